"""An algorithm whose functions are looked at: what goes in stays as it is, and what comes out is what the engine can use."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedbench.contract.algorithm import OWN, SHARED, Algorithm, Answer, Phase, Stage
from fedbench.contract.central import Central
from fedbench.contract.plugin_errors import blame, fault, is_ours, meant, where
from fedbench.errors import FedbenchError
from fedbench.simulation.comparing import copied, same
from fedbench.simulation.own_tables import Read
from fedbench.simulation.plain_answers import check_bits, check_choose, check_cohort, check_epoch, check_extra, check_travels, kind

log = logging.getLogger("fedbench")

ASKED = 2
"""times that every function is asked the same twice"""
EXAMPLES = {
    "init_server": '{"items": draw.normal("items", world.items, self.dim)}',
    "init_client": '{"user": draw.normal("user", self.dim)}',
    "receive": "{**own, **sent}",
    "upload": '{"items": held["items"] - sent["items"]}',
    "aggregate": '{**server, "items": ...}',
    "solve": '{"user": ...}',
    "keep": '{"user": held["user"]}',
}


@dataclass
class Seen:
    """What came by so far."""

    algorithm: Algorithm = Algorithm()  # noqa: RUF009 (it is frozen)

    items: int = 0
    clients: int = 0
    names: set[str] = field(default_factory=set)
    """of tensors that clients keep, are sent or hold"""
    kept: set[str] = field(default_factory=set)
    """of those that clients keep"""
    held: set[str] = field(default_factory=set)
    """of those that `receive` gives"""
    shapes: dict[str, list[int]] = field(default_factory=dict)
    """of what one client keeps, tables without their rows"""
    a_row_an_item: set[str] = field(default_factory=set)
    """of those that are no tables but have as many rows as there are items"""
    of_numbers: dict[str, torch.dtype] = field(default_factory=dict)
    """of what is held, the kind of numbers"""
    bits: set[str] = field(default_factory=set)
    """of those whose bits the method states"""
    losses: int = 0
    read: set[str] = field(default_factory=set)
    """of what `loss` looked at in `held`"""
    moved: set[str] = field(default_factory=set)
    """of what phases move by the loss alone"""
    uploaded: set[str] = field(default_factory=set)
    """of what `upload` returned"""
    served: set[str] = field(default_factory=set)
    """of what the server holds or sends to one client each"""
    whole: set[str] = field(default_factory=set)
    """of what `travels_whole` names"""
    solved: set[str] = field(default_factory=set)
    """of those that `solve` returned and nobody holds"""
    last: str = ""
    """the function that was called last"""
    again: Counter[str] = field(default_factory=Counter)
    """how often each function was asked the same twice"""


def checked(algorithm: Algorithm) -> tuple[Algorithm, Seen]:
    """The algorithm, looked at, and what was seen of it."""
    cls, seen = type(algorithm), Seen()
    checks: dict[str, Callable[..., None]] = {**CHECKS, **{f"score_{name}": partial(_score, hook=f"score_{name}") for name in cls.scores}}
    optional = ("keep", "choose", "bits", "travels_whole", "extra", "cohort")  # whether a class has one of its own is asked elsewhere too
    named = [name for name in checks if hasattr(cls, name) and not (name in optional and getattr(cls, name) is getattr(Algorithm, name))]
    seen.algorithm = algorithm
    body: dict[str, Any] = {name: _watched(cls, name, checks[name], seen) for name in named}
    body["__setattr__"] = _refuse_to_write
    twin = type(cls.__name__, (cls,), {**body, "__module__": cls.__module__, "__qualname__": cls.__qualname__})
    made: Algorithm = object.__new__(twin)
    made.__dict__.update(algorithm.__dict__)
    return made, seen


def _refuse_to_write(self: Algorithm, name: str, value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}: functions are pure; what changes is a tensor that is kept or sent")


def look_back(algorithm: Algorithm, seen: Seen) -> None:
    """What shows only when all is done: tables and bits of what nobody makes."""
    cls = type(algorithm)
    for name in sorted(seen.bits - seen.names):
        raise fault(cls, "bits", f"bits names {name!r}, which neither answer nor upload gives{meant(name, seen.names)}")
    for name in sorted(seen.moved - seen.read) if seen.losses else ():
        raise fault(cls, "loss", f"a phase moves {name!r}, but loss never reads held[{name!r}]; what is read of sent does not train")
    for name in sorted(seen.whole - seen.names):
        raise fault(cls, "travels_whole", f"travels_whole names {name!r}, which neither answer nor upload gives{meant(name, seen.names)}")
    _refuse_unmade(cls, seen)
    declared = next((base for base in cls.__mro__ if "tables" in vars(base)), Algorithm)
    if is_ours(declared) or not seen.names:
        return
    for name, keeper in cls.tables.items():
        if keeper == OWN and name not in seen.kept:
            hint = meant(name, seen.kept)
            raise fault(cls, "tables", f"tables says that clients keep {name!r}, but init_client does not make it{hint}")
        if keeper == SHARED and name in seen.kept:
            raise fault(cls, "tables", f"init_client makes {name!r}, so clients keep it; write {name!r}: OWN in tables")
        if name not in seen.names:
            hint = meant(name, seen.names)
            raise fault(
                cls, "tables", f"tables names {name!r}, which neither init_client, answer nor upload gives{hint}; drop it or make it"
            )


def _refuse_unmade(cls: type[Algorithm], seen: Seen) -> None:
    """What a class says of names that nobody makes means nothing."""
    facts = [("summed", seen.uploaded, "upload returns"), ("paired", seen.uploaded, "upload returns")]
    facts += [("per_client_server_state", seen.served, "the server makes")] if seen.served else []
    for fact, made, who in facts if seen.uploaded else ():
        if is_ours(declared := next(base for base in cls.__mro__ if fact in vars(base))) or is_sound(declared):
            continue
        for name in (name for name in getattr(cls, fact) if name not in made):
            said = f"{fact} names {name!r}, and {who} no such name{meant(name, made)}"
            if meant(name, made):
                raise fault(cls, fact, said)
            log.warning("%s: %s with these flags", where(cls, fact), said)  # with others it may


def _watched(cls: type[Algorithm], name: str, check: Callable[..., None], seen: Seen) -> Callable[..., Any]:
    static = inspect.getattr_static(cls, name)

    def call(self: Algorithm, *given: Any) -> Any:
        before = [_state(one) for one in given]
        shown = given
        seen.last = name
        if name == "loss":  # what it reads of `held` is noted
            read = Read(given[0])
            shown = (read, *given[1:])
        # what a client is mailed is laid where it lies, so its server's step is not the same again
        again = None if is_sound(cls) or seen.again[name] >= ASKED or cls.per_client_server_state else [copied(one) for one in given]
        found = _called(cls, name, lambda: static.__get__(self, cls)(*shown))
        if name == "loss":
            seen.read |= read.names
        for one, was in zip(given, before, strict=True):
            _refuse_changed(cls, name, was, _state(one))
        check(cls, seen, given, found)
        if again is not None:
            seen.again[name] += 1
            if not same(_plain(found), _plain(_called(cls, name, lambda: static.__get__(self, cls)(*again)))):
                said = "it may depend on its arguments, self's fields and self.context alone, and draw only with `draw`"
                raise fault(cls, name, f"{name} gives another answer when it is asked the same again; {said}")
        return found

    return call


def _called(cls: type[Algorithm], name: str, function: Callable[[], Any]) -> Any:
    """What a function of an algorithm returns; what goes wrong in it is told as its own."""
    try:
        return function()
    except NotImplementedError as error:
        if not _is_default(error):
            raise blame(error) or fault(cls, name, f"{name} fails: NotImplementedError: {error}") from error
        raise fault(cls, "", f"{cls.__name__} has no function {name}, which the engine calls; write {_form(cls, name)}") from None
    except (FedbenchError, MemoryError):
        raise
    except Exception as error:
        if blame(error) is None:  # it failed in inherited code of ours, with what this class gave it
            raise fault(cls, name, f"{name} fails: {type(error).__name__}: {error}") from error
        raise


def _is_default(error: BaseException) -> bool:
    """Whether it is what a function of the contract raises that a method must write."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    is_hook = place is not None and (hasattr(Algorithm, place.tb_frame.f_code.co_name) or place.tb_frame.f_code.co_name == "epoch")
    return is_hook and place is not None and str(place.tb_frame.f_globals.get("__name__", "")).startswith("fedbench.contract.")


def _plain(found: object) -> object:
    """An answer without the mapping over clients."""
    if isinstance(found, Tensor):
        return _unmapped(found).detach()
    return {name: _plain(value) for name, value in found.items()} if isinstance(found, Mapping) else found


def _form(cls: type[Algorithm], name: str) -> str:
    owner = next(base for base in cls.__mro__ if is_ours(base) and name in vars(base))
    return f"def {name}{inspect.signature(getattr(owner, name))}".split(" ->")[0].replace("'", "")


def _state(argument: object) -> dict[str, tuple[int, int]]:
    """What tells whether a dict of tensors was changed."""
    if not isinstance(argument, dict):
        return {}
    return {name: (id(value), _unmapped(value)._version if isinstance(value, Tensor) else 0) for name, value in argument.items()}


def _unmapped(tensor: Tensor) -> Tensor:
    """The tensor of all clients behind one that is mapped over them."""
    mapped = torch._C._functorch
    while mapped.is_batchedtensor(tensor) or mapped.is_gradtrackingtensor(tensor):
        tensor = mapped.get_unwrapped(tensor)
    return tensor


def _refuse_changed(cls: type[Algorithm], name: str, before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> None:
    if before == after:
        return
    key = next(key for key in {**before, **after} if before.get(key) != after.get(key))
    if key in cls.per_client_server_state or "slot" in (key if cls.per_client_server_state else ""):
        return
    how = "in place; make a new tensor: a = a + b, not a += b" if key in before and before[key][0] == after.get(key, (0, 0))[0] else (
        f"; make a new dict: {{**..., {key!r}: ...}}"
    )  # fmt: skip
    raise fault(cls, name, f"{name} changes {key!r} of its argument {how}")


def _tensors(cls: type[Algorithm], hook: str, found: object) -> Mapping[str, Tensor]:
    if not isinstance(found, Mapping):
        raise fault(cls, hook, f"{hook} returned {kind(found)}; expected a dict of tensors, such as {EXAMPLES.get(hook, '{}')}")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise fault(cls, hook, f"{hook} returned {name!r} as {kind(value)}; expected a tensor under every name")
    return found


def _check_kind(cls: type[Algorithm], hook: str, name: str, value: Tensor, draw: Any) -> None:
    if value.is_floating_point() and "/" not in name and value.dtype != draw.dtype:
        raise fault(
            cls,
            hook,
            f"{hook} made {name!r} of {value.dtype}, and this run has {draw.dtype}; use draw.zeros, draw.full or dtype=draw.dtype",
        )
    if value.device.type != torch.device(draw.device).type:
        raise fault(
            cls, hook, f"{hook} made {name!r} on {value.device}, and this run is on {draw.device}; use draw.zeros or device=draw.device"
        )


def _init_server(cls: type[Algorithm], seen: Seen, given: Any, found: object) -> None:
    world, draw = given
    seen.items, seen.clients = world.items, world.clients
    seen.served |= set(found) if isinstance(found, Mapping) else set()
    if issubclass(cls, Central) and cls.answer is Central.answer:
        for name, rows, what in (("user", world.clients, "world.clients"), ("items", world.items, "world.items")):
            if name not in _tensors(cls, "init_server", found) or found[name].shape[:1] != (rows,):  # type: ignore[index]
                raise fault(cls, "init_server", f"init_server must make {name!r} with {what} rows; {name!r} is read by answer and score")
    for name, value in _tensors(cls, "init_server", found).items():
        _check_kind(cls, "init_server", name, value, draw)


def _init_client(cls: type[Algorithm], seen: Seen, given: Any, found: object) -> None:
    world, draw = given
    n = len(draw.clients)
    for name, value in _tensors(cls, "init_client", found).items():
        if value.dim() < 1 or len(value) != n:
            shape = [n, *value.shape[1:]] if value.dim() and len(value) == 1 else [n, *value.shape]
            raise fault(
                cls,
                "init_client",
                f"init_client made {name!r} of shape {list(value.shape)} for {n} clients; expected {shape}, a row a client: "
                "use draw.zeros, draw.full, draw.normal or draw.uniform",
            )
        _check_kind(cls, "init_client", name, value, draw)
        _check_rows(cls, seen, "init_client", name, value.shape[1:], world.items)
        seen.shapes[name] = list(value.shape[2 if name in cls.tables else 1 :])
    seen.names |= set(found)  # type: ignore[call-overload]
    seen.kept |= set(found)  # type: ignore[call-overload]


def _check_rows(cls: type[Algorithm], seen: Seen, hook: str, name: str, shape: Collection[int], items: int) -> None:
    """A table has one row an item; what else has as many may be a forgotten one."""
    rows = next(iter(shape), None)
    if name in cls.tables and rows != items:
        raise fault(
            cls,
            hook,
            f"{hook} gave the table {name!r} as {list(shape)}; a table has one row an item, [{items}, ...] here: use world.items, "
            f"or leave {name!r} out of tables",
        )
    if name not in cls.tables and rows == items:
        seen.a_row_an_item.add(name)


def _answer(cls: type[Algorithm], seen: Seen, given: Any, found: object) -> None:
    if not isinstance(found, Answer):
        raise fault(cls, "answer", f"answer returned {kind(found)}; expected an Answer, such as Answer(shared=server)")
    for what in ("shared", "personal", "instead"):
        for name, value in _tensors(cls, "answer", getattr(found, what)).items():
            _check_rows(cls, seen, "answer", name, value.shape[1 if what == "personal" else 0 :], seen.items)
            seen.names.add(name)
    if found.personal and found.slot is None:
        raise fault(cls, "answer", "answer sends something personal without a slot; give slot=[U]: the row of each client, -1 for none")
    slot = found.slot
    if isinstance(slot, Tensor) and (slot.is_floating_point() or slot.dtype == torch.bool):
        raise fault(cls, "answer", f"answer gave a slot of {slot.dtype}; expected whole numbers: the row of each client, -1 for none")
    low, high = (int(slot.min()), int(slot.max())) if isinstance(slot, Tensor) and slot.numel() else (-1, -1)
    for name, value in found.personal.items():
        if low < -1 or high >= len(value):
            said = f"and {name!r} has {len(value)} rows; expected -1 (nothing personal) to {len(value) - 1}"
            raise fault(cls, "answer", f"answer gave slots from {low} to {high}, {said}")
    seen.served |= set(found.personal)
    if found.slot is not None and (not isinstance(found.slot, Tensor) or list(found.slot.shape) != [seen.clients]):
        raise fault(cls, "answer", f"answer gave slot as {kind(found.slot)}; expected a tensor of shape [{seen.clients}], a row a client")


def _receive(cls: type[Algorithm], seen: Seen, given: Any, found: object) -> None:
    own, made = given[0], _tensors(cls, "receive", found)
    refuse_lost_tables(cls, "receive", made)
    for name in own.keys() & made.keys():
        if name in cls.tables and made[name].shape != own[name].shape:
            raise fault(cls, "receive", f"receive returned {name!r} as {list(made[name].shape)}; own has it as {list(own[name].shape)}")
    seen.names |= set(made)
    seen.held |= set(made)
    seen.of_numbers |= {name: value.dtype for name, value in made.items()}


def _keep(cls: type[Algorithm], seen: Seen, given: Any, found: object) -> None:
    kept = _tensors(cls, "keep", found)
    refuse_wrongly_kept(cls, kept, seen.kept)
    for name in kept.keys() & seen.shapes.keys():
        rows = list(given[0][name].shape[:1]) if name in cls.tables and name in given[0] else []
        if list(kept[name].shape) != rows + seen.shapes[name]:
            raise fault(cls, "keep", f"keep returned {name!r} as {list(kept[name].shape)}; a client keeps {rows + seen.shapes[name]} here")


def refuse_lost_tables(cls: type[Algorithm], hook: str, found: Mapping[str, Tensor]) -> None:
    """Raise PluginError unless what `receive` or `keep` returns has all tables that clients keep."""
    for name, keeper in cls.tables.items():
        if keeper == OWN and name not in found:
            what = {"receive": f"own[{name!r}]", "keep": "its rows"}[hook]
            raise fault(cls, hook, f"{hook} must return the own table {name!r}{meant(name, found)}: {what}, or what becomes of it")


def refuse_wrongly_kept(cls: type[Algorithm], found: Mapping[str, Tensor], made: Collection[str]) -> None:
    """Raise PluginError unless `keep` returns tensors that init_client `made`, own tables among them."""
    for name in found:
        if name not in made:
            hint = meant(name, made) or "; make it there too, or leave it out"
            raise fault(cls, "keep", f"keep returns {name!r}, which init_client does not make{hint}")
    refuse_lost_tables(cls, "keep", found)


def _phases(cls: type[Algorithm], seen: Seen, given: Any, found: object) -> None:
    if not isinstance(found, tuple | list) or isinstance(found, Phase) or not all(isinstance(one, Phase) for one in found):
        what = "a Phase; a comma is missing" if isinstance(found, Phase) else kind(found)
        raise fault(cls, "phases", f"phases returned {what}; expected a tuple of Phase, such as (Phase(('items',), self.lr),)")


def _stages(cls: type[Algorithm], seen: Seen, given: Any, found: object) -> None:
    hook = "stages" if cls.stages is not Algorithm.stages else "phases"
    if not isinstance(found, tuple | list) or isinstance(found, Stage) or not all(isinstance(one, Stage) for one in found):
        raise fault(cls, hook, f"stages returned {kind(found)}; expected a tuple of Stage, such as (Stage(self.phases(sent)),)")
    for place, stage in enumerate(found, 1):
        if problem := stage.problem(seen.held or seen.names, given[0]):
            raise fault(cls, hook, f"{f'stage {place}: ' if len(found) > 1 else ''}{problem}")
        seen.moved |= {n for phase in stage.phases for n in phase.names if not phase.weight_decay and n not in phase.pull}
        for name in (name for phase in stage.phases for name in phase.names):
            _refuse_untrainable(cls, hook, seen, name)


def _refuse_untrainable(cls: type[Algorithm], hook: str, seen: Seen, name: str) -> None:
    kind = seen.of_numbers.get(name, torch.float32)
    if not kind.is_floating_point:
        raise fault(cls, hook, f"a phase moves {name!r}, which has {kind}; what is trained needs floating-point numbers")
    if name in seen.a_row_an_item:
        raise fault(cls, hook, f"{name!r} is trained and has one row an item, but is no table; write {name!r}: SHARED (or OWN) in tables")


def _loss(cls: type[Algorithm], seen: Seen, given: Any, found: object) -> None:
    if not isinstance(found, Tensor):
        raise fault(cls, "loss", f"loss returned {kind(found)}; expected a tensor with one number, such as bce(logits, batch)")
    if found.dim():
        raise fault(cls, "loss", f"loss returned shape {list(found.shape)}; expected one number: take a mean, as bce(logits, batch) does")
    if not found.is_floating_point():
        raise fault(cls, "loss", f"loss returned {found.dtype}; expected a floating-point number")
    values = _values(found)
    if not is_sound(cls) and not seen.losses and values is not None and not bool(values.isfinite().all()):
        wrong = values[~values.isfinite()][0].item()
        raise fault(cls, "loss", f"loss is {wrong} before the first step; look for a logarithm or a division of 0")
    seen.losses += 1


def is_sound(cls: type[Algorithm]) -> bool:
    """Whether a class is built in: what is not finite there comes of the flags, and the first round says that training diverged."""
    return cls.__module__.startswith("fedbench.algorithms.")


def _values(tensor: Tensor) -> Tensor | None:
    """The numbers of all clients behind a tensor that is mapped over them."""
    try:
        return _unmapped(tensor).detach().reshape(-1)
    except (AttributeError, RuntimeError):
        return None


def _solve(cls: type[Algorithm], seen: Seen, given: Any, found: object) -> None:
    held = given[0]
    for name, value in _tensors(cls, "solve", found).items():
        if name not in held:  # `upload` may read it, and clients that keep nothing score with it
            said = f"solve returned {name!r}, which the client does not hold{meant(name, held)}"
            if meant(name, held) and not cls.reconstructs:
                raise fault(cls, "solve", said)
            if not cls.reconstructs and name not in seen.solved:
                log.warning("%s: %s; it replaces nothing", where(cls, "solve"), said)
            seen.solved.add(name)
        elif value.shape != held[name].shape:
            raise fault(cls, "solve", f"solve returned {name!r} as {list(value.shape)}; it is held as {list(held[name].shape)}")


def _upload(cls: type[Algorithm], seen: Seen, given: Any, found: object) -> None:
    held = given[0]
    for name, value in _tensors(cls, "upload", found).items():
        seen.names.add(name)
        seen.uploaded.add(name)
        if name in cls.tables and name in held and value.shape[:1] != held[name].shape[:1]:
            raise fault(
                cls,
                "upload",
                f"upload returned the table {name!r} as {list(value.shape)}; expected the {held[name].shape[0]} rows that are held, or a "
                "name that is no table",
            )


def _aggregate(cls: type[Algorithm], seen: Seen, given: Any, found: object) -> None:
    server, uploads = given[:2]
    new = _tensors(cls, "aggregate", found)
    seen.served |= set(new)
    for name, value in new.items():
        if not is_sound(cls) and value.is_floating_point() and bool(value.isnan().any()) and bool(uploads.finite().all()):
            raise fault(cls, "aggregate", f"aggregate made {name!r} nan of uploads that are finite; look for a division of 0 by 0")
    added = [name for name in new if name not in server and "/" not in name and name not in (*cls.per_client_server_state, "slot")]
    for name in server:
        if name not in new:
            hint = meant(name, added)
            raise fault(cls, "aggregate", f"aggregate drops {name!r} of the server's tensors{hint}; return all of them: {{**server, ...}}")
        if name in (*cls.per_client_server_state, "slot"):
            continue
        if new[name].shape != server[name].shape:
            raise fault(
                cls,
                "aggregate",
                f"aggregate returned {name!r} as {list(new[name].shape)}; it was {list(server[name].shape)} and must stay so",
            )
        if new[name].dtype != server[name].dtype:
            raise fault(cls, "aggregate", f"aggregate returned {name!r} of {new[name].dtype}; it was {server[name].dtype} and must stay so")
    if server and added:
        raise fault(
            cls, "aggregate", f"aggregate adds {added[0]!r}, which init_server did not make{meant(added[0], server)}; make it there too"
        )


def _score(cls: type[Algorithm], seen: Seen, given: Any, found: object, hook: str = "score") -> None:
    rows = next((given_[name].shape[0] for given_ in given[:2] for name in cls.tables if name in given_), None)
    expected = f"[{rows}], a number for each of the {rows} items" if rows is not None else "[K], a number for each item"
    if not isinstance(found, Tensor):
        raise fault(cls, hook, f"{hook} returned {kind(found)}; expected a tensor of shape {expected}")
    if found.dim() != 1 or (rows is not None and len(found) != rows):
        raise fault(cls, hook, f"{hook} returned shape {list(found.shape)}; expected {expected}")
    values = _values(found)
    if not is_sound(cls) and values is not None and bool(values.isnan().any()):
        raise fault(cls, hook, f"{hook} is nan in the first rounds; look for a logarithm or a division of 0")


CHECKS: dict[str, Callable[..., None]] = {
    "init_server": _init_server,
    "init_client": _init_client,
    "answer": _answer,
    "receive": _receive,
    "phases": _phases,
    "stages": _stages,
    "loss": _loss,
    "solve": _solve,
    "upload": _upload,
    "keep": _keep,
    "aggregate": _aggregate,
    "choose": check_choose,
    "bits": check_bits,
    "travels_whole": check_travels,
    "extra": check_extra,
    "cohort": check_cohort,
    "epoch": check_epoch,
    "score": _score,
}
"""what is looked at in each function's answer"""
