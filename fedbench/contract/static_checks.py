"""What can be told of an algorithm's class without running it: names, signatures, fields and their values."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple, Union, get_args, get_origin, get_type_hints

from fedbench.contract.algorithm import KEEPERS, Algorithm
from fedbench.contract.central import Central
from fedbench.contract.plugin_errors import fault, is_ours, meant

KINDS = (int, float, str, bool, Path)
ALLOWED = "int, float, str, bool, Path, tuple[int, ...] or one of them | None"
EXPECTED = {int: "a whole number", float: "a number", str: "a word", bool: "True or False", Path: "a Path"}
RATING_SPLITS = ("kfold", "users")
"""splits whose held-out data are ratings, see data/protocol.py"""
NEAR = 0.8
"""how alike a name must be to that of a hook to be taken for a slip"""
OTHERWISE = {
    **dict.fromkeys(("choose_clients", "select_clients", "sample_clients", "select", "sample", "pick"), ("choose",)),
    **dict.fromkeys(("init", "initialize", "initialise", "setup"), ("init_server", "init_client")),
    **dict.fromkeys(("server_init", "initialize_server", "init_global"), ("init_server",)),
    **dict.fromkeys(("client_init", "initialize_client", "init_local", "init_user"), ("init_client",)),
    **dict.fromkeys(("check_flags", "check_fields", "validate", "check_world"), ("check",)),
    **dict.fromkeys(("compute_loss", "local_loss", "client_loss", "loss_fn", "forward"), ("loss",)),
    **dict.fromkeys(("predict", "score_items", "scoring"), ("score",)),
    **dict.fromkeys(("server_update", "aggregate_updates", "update_server"), ("aggregate",)),
}
"""what a hook might be called elsewhere"""


class Kind(NamedTuple):
    """A field's type, taken apart."""

    member: type
    several: bool
    optional: bool

    @classmethod
    def of(cls, kind: Any) -> Kind | None:
        """None if no flag can have this type."""
        members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        kinds = [member for member in members if member is not NoneType]
        if len(kinds) != 1:
            return None
        several = get_origin(kinds[0]) is tuple
        if several and get_args(kinds[0])[1:] != (...,):
            return None
        member = get_args(kinds[0])[0] if several else kinds[0]
        return cls(member, several, NoneType in members) if member in KINDS else None

    def problem(self, value: object, words: tuple[str, ...] = ()) -> str:
        """What is wrong with a value of a field of this type that may be one of these words; "" if nothing is."""
        if value is None:
            return "" if self.optional else "is None; write the type as X | None if it may be missing"
        if self.several and not isinstance(value, tuple | list):
            return f"must be a tuple, not {value!r}"
        for one in value if self.several and isinstance(value, tuple | list) else (value,):
            # a whole number may stand for a float, True for no number
            number = isinstance(one, int | float) and self.member is float
            if not (number or isinstance(one, self.member)) or (isinstance(one, bool) and self.member is not bool):
                return f"must be {EXPECTED[self.member]}{' in each place' if self.several else ''}, not {one!r}"
            if words and one not in words:
                return f"must be one of {', '.join(words)}, not {one!r}{meant(one, words)}"
        return ""


def check_class(cls: type[Algorithm]) -> None:
    """Raise PluginError for the first mistake in a class. What it inherits from another algorithm was looked at there."""
    if not is_ours(cls):
        _check_dataclass(cls)
        _check_names(cls)
    for name in _hooks():
        _check_hook(cls, name)
    _check_facts(cls)
    if issubclass(cls, Central) and not is_ours(cls):
        if cls.epoch is Central.epoch:
            raise fault(
                cls, "", f"{cls.__qualname__} has no function epoch, which the engine calls; write {_shape('epoch', Central.epoch)}"
            )
        _check_hook(cls, "epoch", of=Central)
    _check_fields(cls)


def _hooks() -> list[str]:
    """What the engine calls or reads of an algorithm, methods and properties."""
    return [
        name for name, thing in vars(Algorithm).items() if not name.startswith("_") and (callable(thing) or isinstance(thing, property))
    ]


def _facts() -> list[str]:
    """What a class says of itself: its ClassVars."""
    return [name for name, kind in Algorithm.__annotations__.items() if "ClassVar" in str(kind)]


def _check_dataclass(cls: type[Algorithm]) -> None:
    own = _own_fields(cls)
    if own and "__dataclass_fields__" not in vars(cls):
        raise fault(cls, "", f"{cls.__qualname__} has fields but is not a dataclass; put @dataclass(frozen=True) right above `class`")


def _own_fields(cls: type) -> list[str]:
    return [name for name, kind in vars(cls).get("__annotations__", {}).items() if "ClassVar" not in str(kind) and kind is not ClassVar]


def _check_names(cls: type[Algorithm]) -> None:
    """Names near to a hook's but not one, fields without a type, and fields that hide something."""
    inherited = {name for base in cls.__mro__[1:] for name in vars(base)}
    fields = {field.name for field in dataclasses.fields(cls)}
    hooks, facts = _hooks(), _facts()
    init = getattr(vars(cls).get("__init__"), "__code__", None)
    if init is not None and not init.co_filename.startswith("<"):  # what dataclasses generate has no file
        raise fault(cls, "__init__", "an algorithm has no __init__ of its own, for its fields are its flags; use check or init_server")
    for name in _own_fields(cls):
        if name in {*hooks, *facts}:
            what = "drop the annotation: it is no flag" if name in facts else "the engine calls a function of that name; rename the field"
            raise fault(cls, name, f"the field {name!r} hides what every algorithm has; {what}")
        if (near := difflib.get_close_matches(name, facts, 1, 0.9)) and near[0] not in vars(cls):
            raise fault(cls, name, f"{name!r} would be a flag; did you mean {near[0]!r}?")
    for name, thing in list(vars(cls).items()):
        if name.startswith("_") or name in _own_fields(cls):
            continue
        is_code = callable(thing) or isinstance(thing, property | classmethod | staticmethod) or hasattr(thing, "__get__")
        if not is_code and name in fields:
            kind = next(field.type for field in dataclasses.fields(cls) if field.name == name)
            raise fault(cls, name, f"without a type this sets no flag; write `{name}: {kind} = {thing!r}`")
        if is_code and name in fields:
            raise fault(cls, name, f"the function {name!r} has the name of a flag that it inherits; rename it")
        if name in inherited:
            continue
        if is_code:
            reading = name.removeprefix("score_")
            if name != reading and _are_words(cls.scores) and reading not in cls.scores and _parameters(thing) == ["own", "sent"]:
                raise fault(cls, name, f"the engine calls no {name!r}, for scores does not name it; write scores = ({reading!r},)")
            _refuse_near_hook(cls, name, thing, hooks)
        elif name not in vars(cls).get("__annotations__", {}):
            slip = meant(name, facts)
            hint = "" if slip else f"write `{name}: {type(thing).__name__} = {thing!r}` to make it one, or call it _{name}"
            raise fault(
                cls, name, f"{name!r} has no type, so it is no flag, and no algorithm has a setting of that name{slip}; {hint}".rstrip("; ")
            )
        elif slip := meant(name, facts):
            raise fault(cls, name, f"no algorithm has a setting {name!r}{slip}")


def _refuse_near_hook(cls: type[Algorithm], name: str, thing: object, hooks: list[str]) -> None:
    """A helper may be called anything; but not almost as a hook that the class does not have, with the hook's arguments."""
    word = name.strip("_").lower()
    if issubclass(cls, Central) and cls.epoch is Central.epoch and {"server", "pool"} & {*_parameters(thing)}:
        raise fault(cls, name, f"the engine calls no {name!r}; did you mean 'epoch'?")
    for hook in difflib.get_close_matches(word, hooks, 1, NEAR):
        mine, theirs = _parameters(thing), _parameters(vars(Algorithm)[hook])
        if hook not in vars(cls) and (len(mine) == len(theirs) or set(mine) & set(theirs)):
            raise fault(cls, name, f"the engine calls no {name!r}; did you mean {hook!r}?")
    for hook in OTHERWISE.get(word, ()):
        mine, theirs = _parameters(thing), _parameters(vars(Algorithm)[hook])
        # what a base of ours does by default is not written by the method
        is_missing = is_ours(next(base for base in cls.__mro__ if hook in vars(base)))
        if is_missing and (set(mine) & set(theirs) or not mine):
            raise fault(cls, name, f"the engine calls no {name!r}; did you mean {hook!r}?")


def _parameters(thing: object) -> list[str]:
    """Names of a method's arguments after self."""
    function = thing.fget if isinstance(thing, property) else getattr(thing, "__func__", thing)
    try:
        return list(inspect.signature(function).parameters)[0 if isinstance(thing, staticmethod) else 1 :]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []


def _check_hook(cls: type[Algorithm], name: str, like: str = "", of: type[Algorithm] = Algorithm) -> None:
    """What overrides a hook, or is called as the hook `like`, must take what the engine gives."""
    mine, theirs = inspect.getattr_static(cls, name), vars(of)[like or name]
    if mine is theirs:
        return
    if isinstance(theirs, property):
        if callable(mine):
            raise fault(cls, name, f"{name} is read, not called; put @property above it")
        return
    if isinstance(mine, property) or not (callable(mine) or isinstance(mine, staticmethod | classmethod)):
        raise fault(cls, name, f"{name} must be a function: {_shape(name, theirs)}")
    given = _parameters(theirs)
    # bound to nothing in particular: the class itself may not be fit to be instantiated
    bound: Callable[..., Any] = mine.__get__(object(), cls) if hasattr(mine, "__get__") else mine
    try:
        signature = inspect.signature(bound)
    except (TypeError, ValueError):
        return
    # Python itself says whether a call as the engine makes it would fit
    try:
        signature.bind(*given)
    except TypeError as error:
        if "self" not in list(inspect.signature(getattr(mine, "__func__", mine)).parameters)[:1] and not isinstance(mine, staticmethod):
            raise fault(cls, name, f"{name} needs self as its first argument: {_shape(name, theirs)}") from None
        raise fault(cls, name, f"the engine calls {_shape(name, theirs)}: {error}") from None
    taken = _parameters(mine)
    if swapped := [word for at, word in enumerate(taken) if word in given and taken[: len(given)].index(word) != given.index(word)]:
        raise fault(cls, name, f"the engine calls {_shape(name, theirs)}, in this order; here {swapped[0]!r} stands elsewhere")


def _shape(name: str, thing: Any) -> str:
    return f"{name}({', '.join(['self', *_parameters(thing)])})"


def _check_facts(cls: type[Algorithm]) -> None:
    """What a class says of itself is read by others, who rely on its form."""
    if not isinstance(cls.tables, Mapping) or not _are_words(tuple(cls.tables)):
        raise fault(cls, "tables", f"tables must be a dict that says who keeps each, such as {{'items': SHARED}}, not {cls.tables!r}")
    for name, keeper in cls.tables.items():
        if keeper not in KEEPERS:
            raise fault(cls, "tables", f"{name!r} in tables must be SHARED (the server keeps it) or OWN (each client), not {keeper!r}")
    for name in cls.scores if _are_words(cls.scores) else ():
        if not callable(getattr(cls, f"score_{name}", None)):
            raise fault(cls, "scores", f"scores names {name!r}, but there is no function score_{name}(self, own, sent)")
        _check_hook(cls, f"score_{name}", "score")
    for name in ("summed", "paired", "per_client_server_state", "scores", "later"):
        if not _are_words(getattr(cls, name, ())):
            raise fault(cls, name, f"{name} must be a tuple of names, not {getattr(cls, name)!r}")
    for name in ("federated", "reconstructs", "reads_time"):
        if not isinstance(getattr(cls, name, False), bool):
            raise fault(cls, name, f"{name} must be True or False, not {getattr(cls, name)!r}")
    if not cls.federated and not callable(getattr(cls, "epoch", None)):
        raise fault(cls, "federated", "federated = False is for centralised methods: derive from Central of fedbench.contract")
    if cls.usual_cohort is not None and (type(cls.usual_cohort) is not int or cls.usual_cohort < 1):
        raise fault(cls, "usual_cohort", f"usual_cohort must be a whole number over 0, or None, not {cls.usual_cohort!r}")
    if cls.rating_split not in RATING_SPLITS:
        hint = meant(cls.rating_split, RATING_SPLITS)
        raise fault(cls, "rating_split", f"rating_split must be one of {', '.join(RATING_SPLITS)}, not {cls.rating_split!r}{hint}")
    fields = [field.name for field in dataclasses.fields(cls)]
    for name in cls.later if _are_words(cls.later) else ():
        if name not in fields:
            raise fault(cls, "later", f"later names {name!r}, and there is no such field{meant(name, fields)}")
    if not isinstance(cls.published, Mapping) or not _are_words(tuple(cls.published)):
        raise fault(cls, "published", f"published must be a dict from names of fields to values, not {cls.published!r}")
    if not isinstance(cls.choices, Mapping) or not all(map(_are_words, (tuple(cls.choices), *cls.choices.values()))):
        raise fault(cls, "choices", f"choices must be a dict from names of fields to tuples of words, not {cls.choices!r}")


def _are_words(things: object) -> bool:
    return isinstance(things, tuple | list) and all(isinstance(thing, str) for thing in things)


def _check_fields(cls: type[Algorithm]) -> None:
    """Fields are flags: a type that a flag can have, a default, and values that fit."""
    try:
        hints = get_type_hints(cls)
    except (NameError, TypeError, SyntaxError) as error:
        raise fault(cls, "", f"the type of a field cannot be read: {error}") from None
    kinds: dict[str, Kind] = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        kind = Kind.of(hints[field.name])
        if kind is None:
            shown = hints[field.name].__name__ if isinstance(hints[field.name], type) else hints[field.name]
            raise fault(cls, field.name, f"the field {field.name!r} is a {shown}, which cannot be a flag's type; use {ALLOWED}")
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise fault(cls, field.name, f"the field {field.name!r} is a flag and needs a default")
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if problem := kind.problem(default, tuple(cls.choices.get(field.name, ()))):
            raise fault(cls, field.name, f"the default of {field.name!r} {problem}")
        kinds[field.name] = kind
    for name in cls.choices:
        if name not in kinds:
            raise fault(cls, "choices", f"choices: there is no field {name!r}{meant(name, kinds)}")
        if kinds[name].member is not str:
            raise fault(cls, "choices", f"choices: the field {name!r} takes no words; its type is {hints[name]}")
    # a subclass's `choices` replace those of its base
    for name in {name for base in cls.__mro__[1:] if issubclass(base, Algorithm) for name in base.choices}:
        if name in kinds and name not in cls.choices:
            raise fault(
                cls, "choices", f"choices leaves out {name!r}, which it inherits; write {{**{cls.__mro__[1].__name__}.choices, ...}}"
            )
    for name, value in cls.published.items():
        if name not in kinds:
            raise fault(cls, "published", f"published: there is no field {name!r}{meant(name, kinds)}")
        if problem := kinds[name].problem(value, tuple(cls.choices.get(name, ()))):
            raise fault(cls, "published", f"published: {name} {problem}")
