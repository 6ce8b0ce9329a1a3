"""From the command line to a RunConfig: defaults < recipe < config file < flags.

Flags are fields: those of RunConfig, Protocol, DatasetOptions and of the chosen algorithm. A value from the command line and one
from a file pass through the same `Flag.read`, so both are checked alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

from fedbench import files, text, trust
from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.dataset import DatasetOptions
from fedbench.data import protocol as protocols
from fedbench.data.protocol import PRESETS, Protocol
from fedbench.errors import FedbenchError, UsageError
from fedbench.parts.central import Central
from fedbench.settings import hints
from fedbench.settings.cadence import Cadence
from fedbench.settings.naming import NOT_HASHED, SHORT
from fedbench.simulation.client_store import STORES
from fedbench.simulation.failures import Failures

RECIPES = ("clean", "published")
CHOICES = {
    "protocol": tuple(PRESETS),
    "recipe": RECIPES,
    "dtype": ("float32", "float64"),
    "kernel": ("auto", "off"),
    "keep_state": ("auto", "best", "last", "none"),
    "budget": ("rounds", "visits", "bytes"),
}
AT_LEAST = {
    **dict.fromkeys(("rounds", "clients_per_round", "local_epochs", "batch_size", "dim", "eval_negatives", "eval_clients"), 1),
    **dict.fromkeys(("users", "items", "interactions", "threads", "block_rows", "eval_every", "budget_value", "jobs"), 1),
    **dict.fromkeys(("negatives", "stop_below", "min_interactions", "seed", "split_seed", "data_seed", "fold", "new_users"), 0),
    "folds": 2,
}
OR_NUMBER = ("checkpoint_every", "max_upload_norm")
"""words that may be a number in a config file"""
SYNTHETIC = ("users", "items", "interactions", "data_seed")
MOST_SEEDS = 1000


@dataclass(frozen=True)
class RunConfig:
    """All that a run is told. Fields of plain types are flags: the sentence under a field is its --help text."""

    algo: str
    """the algorithm: a name from --list, or a path to a .py file that holds one"""
    algorithm: Algorithm
    dataset: str
    """the data: a name from --list, or a path to a .csv file (user,item[,rating][,time])"""
    data: DatasetOptions = DatasetOptions()
    failures: Failures = Failures()
    protocol: Protocol = Protocol()
    """how data is split and ranked: clean (no leak), ncf (the NCF paper's files), published (as the FedEM code: LEAKS)"""
    recipe: str = "clean"
    """the algorithm's switches: clean, or published (its paper's own); follows --protocol if not given"""
    seed: int = 0
    """seed of everything but the split"""
    refit: bool = False
    """train once more for the chosen number of rounds with the validation items in training; reported beside the strict result"""
    budget: str = "rounds"
    """what --budget-value counts: rounds, visits (clients a round, summed) or bytes (up and down)"""
    budget_value: int | None = None
    """the run ends with the round that reaches it, however many rounds that takes; --rounds ends the run if not given"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps"""
    dtype: str = "float32"
    """precision of the tensors"""
    threads: int | None = None
    """CPU threads; what torch takes if not given"""
    compile: bool | None = None
    """compile the training step of methods without a fused kernel with torch.compile: slow to start, faster rounds, kept for the next
    run; on a GPU unless --no-compile, on a CPU on request"""
    kernel: str = "auto"
    """fused kernels: auto (where the algorithm has one for the device) or off"""
    block_rows: int | None = None
    """rows of clients' tables in one block; chosen from cache or memory size if not given"""
    client_store: str = "auto"
    """where clients' own state lies: ram, mmap (a sparse file inside --out), a folder for that file, or auto: ram if it fits, else mmap"""
    eval_every: int = 1
    """rounds between two evaluations"""
    out: Path | None = None
    """folder of the run; runs/<dataset>/<algo>/<time>-<hash> if not given"""
    resume: str = "auto"
    """auto (go on where the run in --out stopped), never, or the folder of the run to go on with"""
    checkpoint_every: str = "auto"
    """rounds (10) or time (60s, 5m) between two saved states, never, or auto: each minute, less often if that takes over 2 % of the run"""
    keep_state: str = "auto"
    """what a finished run keeps for later use: best (the state of the reported round), last, none, or auto (best if there is room)"""
    mlflow: bool = True
    """mirror the run in MLflow"""
    experiment: str = "fedbench"
    """name of the MLflow experiment"""
    quiet: bool = False
    """no progress bar, only warnings and the result"""
    debug: bool = False
    """show tracebacks and debug messages"""

    @property
    def limit(self) -> int:
        """How much of its budget a run may use."""
        return self.algorithm.rounds if self.budget_value is None else self.budget_value

    def to_dict(self) -> dict[str, Any]:
        """Every flag's value, flat and ready for JSON; `--config` reads it back."""
        own = {**_values(self), "protocol": self.protocol.name}
        parts = {**_values(self.protocol), **_values(self.data), **_values(self.failures), **_values(self.algorithm)}
        folds = () if self.protocol.split == "kfold" else protocols.FOLD_FIELDS
        hidden = ("algorithm", "data", "failures", "name", "ncf", *(() if self.dataset == "synthetic" else SYNTHETIC), *folds)
        hidden += () if self.budget_value is None else ("rounds",)
        return {key: _plain(value) for key, value in {**own, **parts}.items() if key not in hidden}

    def identity(self) -> dict[str, Any]:
        """What determines the result. A file counts by its content, not by its path."""
        skipped = {*NOT_HASHED, *(key for key, value in _values(self.failures).items() if value == getattr(Failures, key))}
        skipped |= set() if self.protocol.new_users else {"new_users"}
        skipped |= {"eval_clients"} if self.protocol.eval_clients is None else set()
        values = {key: value for key, value in self.to_dict().items() if key not in skipped}
        return values | {"algo": _identity(self.algo), "dataset": _identity(self.dataset)}

    def digest(self) -> str:
        """64 hex digits of the identity."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    def hash8(self) -> str:
        return self.digest()[:8]


class Request(NamedTuple):
    """What the command line asks for."""

    configs: list[RunConfig]
    """one a seed and fold; empty with --list"""
    list: bool
    print_config: bool
    out: Path | None = None
    """the folder that all of them are below, if one was named"""
    jobs: int = 1
    """how many of them at once"""

    def shown(self) -> dict[str, Any]:
        """All of them as one file that --config reads back."""
        told = self.configs[0].to_dict()
        if len(self.configs) == 1:
            return told
        seeds = list(dict.fromkeys(run.seed for run in self.configs))
        if len({run.protocol.fold for run in self.configs}) > 1:
            told["fold"] = None
        told["out"] = None if self.out is None else str(self.out)
        return {"seeds" if key == "seed" else key: seeds if key == "seed" else value for key, value in told.items()}


@dataclass(frozen=True)
class Flag:
    """One flag or config key."""

    key: str
    kind: Any
    default: Any
    help: str
    choices: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def spelling(self) -> str:
        return f"{SHORT[self.key]}/{self.option}" if self.key in SHORT else self.option

    @property
    def item_kind(self) -> Any:
        """The type without `None`, and of one member if it is a tuple."""
        kinds = [kind for kind in _members(self.kind) if kind is not NoneType]
        return get_args(kinds[0])[0] if get_origin(kinds[0]) is tuple else kinds[0]

    @property
    def is_tuple(self) -> bool:
        return any(get_origin(kind) is tuple for kind in _members(self.kind))

    def read(self, value: object, where: str) -> Any:
        """A word of the command line or a value of a file as this flag's type, or a UsageError that opens with `where`."""
        if NoneType in _members(self.kind) and (value is None or value == "none"):
            return None
        if not self.is_tuple:
            return self._read_one(value, where)
        if isinstance(value, str):
            value = [word.strip() for word in value.split(",")]
        if not isinstance(value, list | tuple):
            raise UsageError(f"{where} must be a list such as 32,16,8, not {value!r}")
        return tuple(self._read_one(member, where) for member in value)

    def _read_one(self, value: object, where: str) -> Any:
        if self.key in OR_NUMBER and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        try:
            result: Any = _READ[self.item_kind](value)
        except (ValueError, TypeError, OverflowError):
            shown = value if isinstance(value, int | float) and not isinstance(value, bool) else repr(value)
            several = f"; several seeds are --seeds {value}" if self.key == "seed" and re.fullmatch(r"\d+[-,][\d,-]+", str(value)) else ""
            raise UsageError(f"{where} must be {_EXPECTED[self.item_kind]}, not {shown}{several}") from None
        if self.choices and isinstance(result, str):
            result = text.matching(result, self.choices) or result
        if self.choices and result not in self.choices:
            raise UsageError(f"{where} must be one of {', '.join(self.choices)}, not {value!r}")
        if self.key in AT_LEAST and result < AT_LEAST[self.key]:
            raise UsageError(f"{where} must be at least {AT_LEAST[self.key]}, not {result}")
        return result


def _read_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    number = text.whole(value) if isinstance(value, str) else value
    if abs(number) >= 2**63:
        raise OverflowError
    return number


def _read_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    number = text.number(value) if isinstance(value, str) else float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _read_str(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise TypeError
    return value


def _read_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _read_path(value: object) -> Path:
    return Path(os.path.expanduser(_read_str(value)))  # unlike Path.expanduser it leaves an unknown ~name alone


JOBS = Flag("jobs", int, 1, "with several seeds or folds: runs at once, each a process; they share the CPU threads (default: 1)")
_READ = {int: _read_int, float: _read_float, str: _read_str, bool: _read_bool, Path: _read_path}
_EXPECTED = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", Path: "a path"}
_METAVAR = {
    int: "N",
    float: "X",
    str: "WORD",
    Path: "PATH",
    "algo": "NAME",
    "dataset": "NAME",
    "seeds": "N-N",
    "resume": "HOW",
    "client_store": "WHERE",
}


def resolve(argv: Sequence[str], names: str | None = None) -> RunConfig:
    """The one run that the command line describes; `names` as for `parse`."""
    configs = parse(argv, names).configs
    if len(configs) != 1:
        raise UsageError(f"expected one run, but the flags name {len(configs)}; use --seed, and --fold if folds are tested")
    return configs[0]


def parse(argv: Sequence[str], names: str | None = None) -> Request:
    """Read the command line in two steps: first the algorithm, then all flags, that algorithm's own included.

    names: who names the algorithm, in words, if it is not the user's own command line: a file of Python must then be known, see `trust`.
    """
    algo, cls, file, in_file = _named_algorithm(argv, names)
    groups = flag_groups(cls)
    flags = {flag.key: flag for group in groups.values() for flag in group}
    hints.refuse_single_dash(argv, flags)
    given, unknown = _parser(algo, cls, groups).parse_known_args(argv)
    negated = [f"no_{key}" for key in flags if flags[key].item_kind is bool]
    hints.refuse_unknown(unknown, [*flags, "config", "jobs", "list", "print_config", "trust_plugin", "help", "version", *negated], cls)
    if given.list:
        return Request([], list=True, print_config=False)
    on_line = {key: flags[key].read(value, flags[key].spelling) for key, value in vars(given).items() if key in flags}
    from_file = _read_file_values(in_file, file, flags, cls)
    if cls is None:
        raise UsageError("--algo is missing: name an algorithm (python train.py --list shows them) or a path to a .py file")
    if "dataset" not in on_line | from_file:
        raise UsageError("--dataset is missing: name a dataset (python train.py --list shows them) or a path to a .csv file")
    out = on_line.get("out", from_file.get("out"))
    jobs = JOBS.read(given.jobs, "--jobs")
    return Request(_configs(cls, on_line, from_file), list=False, print_config=given.print_config, out=out, jobs=jobs)


def _named_algorithm(
    argv: Sequence[str], names: str | None = None
) -> tuple[str | None, type[Algorithm] | None, str | None, dict[str, Any]]:
    """The algorithm that the command line or its config file names, its class, and that file with its values."""
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--algo")
    first.add_argument("--config")
    first.add_argument(trust.FLAG, action="store_true")
    early, _ = first.parse_known_args(argv)
    in_file = read_config(Path(early.config)) if early.config is not None else {}
    algo = early.algo if early.algo is not None else in_file.get("algo")
    if algo is not None and not isinstance(algo, str):
        raise UsageError(f"{early.config}: algo must be a word, not {algo!r}")
    names = names or (f"--config {early.config}" if early.algo is None else None)
    cls = registry.algorithm(algo, names is None, early.trust_plugin, names or "--algo") if algo is not None else None
    return algo, cls, early.config, in_file


def _configs(cls: type[Algorithm], on_line: dict[str, Any], from_file: dict[str, Any]) -> list[RunConfig]:
    if "rounds" in on_line and on_line.get("budget_value") is not None:
        raise UsageError("--rounds and --budget-value both say when the run ends; use one of them")
    from_file = _without_overruled(cls, on_line, from_file)
    said = {**from_file, **on_line}
    preset = PRESETS[said.get("protocol", "clean")]
    recipe = said.get("recipe") or _recipe_of(preset.name)
    said = {**(_published(cls) if recipe == "published" else {}), **said}

    protocol = dataclasses.replace(preset, **_fields_said(Protocol, said))
    if protocol.ratings and "explicit" in cls.choices.get("feedback", ()):
        said = {"feedback": "explicit", **said}
    data = DatasetOptions(**_fields_said(DatasetOptions, said), ncf="ncf" in (protocol.split, protocol.candidates))
    algorithm, failures = _made(cls, said), Failures(**_fields_said(Failures, said))
    failures.check()
    if protocol.split == "auto" and algorithm.predicts_ratings:
        protocol = dataclasses.replace(protocol, split=algorithm.rating_split)

    rest = {key: value for key, value in said.items() if key in {field.name for field in dataclasses.fields(RunConfig)}}
    rest |= {"algorithm": algorithm, "failures": failures, "data": data, "protocol": protocol, "recipe": recipe}
    rest |= {"algo": registry.algorithm_name(said["algo"]), "dataset": registry.dataset_name(said["dataset"])}
    rest["device"] = said.get("device", RunConfig.device).lower()
    config = RunConfig(**rest)
    _check(config)
    return _one_a_seed_and_fold(config, _seeds(on_line) or _seeds(from_file) or (0,))


def _made(cls: type[Algorithm], said: Mapping[str, Any]) -> Algorithm:
    """The algorithm with these values, checked; what goes wrong in its own code is its own error."""
    try:
        algorithm = cls(**_fields_said(cls, said))
        algorithm.check(None)
    except FedbenchError:
        raise
    except Exception as error:
        raise UsageError(f"algorithm {cls.name} fails to check its values: {type(error).__name__}: {error}") from error
    return algorithm


def _without_overruled(cls: type[Algorithm], on_line: dict[str, Any], from_file: dict[str, Any]) -> dict[str, Any]:
    """The file's values, less those that hang on a preset, recipe or budget of the file which the command line replaces by another."""
    kept = dict(from_file)
    dropped: set[str] = {"budget", "budget_value"} if "rounds" in on_line else {"rounds"} if "budget_value" in on_line else set()
    if "protocol" in on_line and from_file.get("protocol", on_line["protocol"]) != on_line["protocol"]:
        dropped |= {"recipe", *(field.name for field in dataclasses.fields(Protocol))}
        kept["protocol"] = on_line["protocol"]
    recipe = on_line.get("recipe") or (None if "recipe" in dropped else from_file.get("recipe"))
    recipe = recipe or _recipe_of(kept.get("protocol", on_line.get("protocol", "clean")))
    if (from_file.get("recipe") or recipe) != recipe:
        dropped |= {"recipe", *cls.published}
    return {key: value for key, value in kept.items() if key not in dropped}


def _recipe_of(preset: str) -> str:
    return "published" if preset == "published" else "clean"


def _published(cls: type[Algorithm]) -> dict[str, Any]:
    """What the published recipe sets, checked like any other value."""
    flags = {flag.key: flag for flag in _flags(cls, cls.choices)}
    where = f"algorithm {cls.name}, published recipe"
    for key in cls.published:
        if key not in flags:
            raise UsageError(f"{where}: there is no field {key!r}")
    return {key: flags[key].read(value, f"{where}: {key}") for key, value in cls.published.items()}


def _fields_said(cls: type, said: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: said[field.name] for field in dataclasses.fields(cls) if field.name in said}


def _seeds(said: Mapping[str, Any]) -> tuple[int, ...]:
    if "seed" in said and "seeds" in said:
        raise UsageError("--seed and --seeds are both given; use one of them")
    return (said["seed"],) if "seed" in said else said.get("seeds", ())


def _one_a_seed_and_fold(config: RunConfig, seeds: tuple[int, ...]) -> list[RunConfig]:
    protocol = config.protocol
    folds = range(protocol.folds) if protocol.split == "kfold" and protocol.fold is None else (protocol.fold,)
    if len(seeds) * len(folds) > MOST_SEEDS:
        raise UsageError(f"{len(seeds):,} seeds and {len(folds):,} folds are {len(seeds) * len(folds):,} runs; {MOST_SEEDS:,} is the most")
    configs = [
        dataclasses.replace(config, seed=seed, protocol=dataclasses.replace(protocol, fold=fold)) for seed in seeds for fold in folds
    ]
    if len(configs) == 1:
        return configs
    if config.resume not in ("auto", "never"):
        raise UsageError("--resume PATH goes on with one run; for several seeds or folds use --resume auto and --out")
    return configs if config.out is None else placed(configs, config.out)


def placed(configs: Sequence[RunConfig], parent: Path) -> list[RunConfig]:
    """Each of several runs in a folder of its own: parent/seed-K, parent/fold-K or parent/seed-K/fold-K."""
    seeds, folds = {config.seed for config in configs}, {config.protocol.fold for config in configs}

    def place(config: RunConfig) -> Path:
        by_seed = parent / f"seed-{config.seed}" if len(seeds) > 1 else parent
        return by_seed / f"fold-{config.protocol.fold}" if len(folds) > 1 else by_seed

    return [dataclasses.replace(config, out=place(config)) for config in configs]


def _check(config: RunConfig) -> None:
    registry.dataset(config.dataset)
    Cadence.of(config.checkpoint_every)
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,9})?", config.device, re.ASCII):
        raise UsageError(f"--device must be auto, cpu, cuda, cuda:<number> or mps, not {config.device!r}")
    if config.client_store not in STORES and not os.path.isdir(config.client_store):
        raise UsageError(f"--client-store must be auto, ram, mmap or a folder; there is no folder {config.client_store!r}")
    if config.out is not None and os.path.isfile(config.out):
        raise UsageError(f"--out {config.out}: is a file; name a folder")
    if config.resume not in ("auto", "never") and not os.path.isdir(config.resume):
        raise UsageError(f"--resume must be auto, never or the folder of a run; there is no folder {config.resume!r}")
    if config.refit and config.protocol.select_on != "val":
        on = config.protocol.select_on
        raise UsageError(f"--refit trains for the rounds that validation chose, but --select-on {on} chooses on {on}; drop one of them")
    if config.refit and config.protocol.ratings:
        raise UsageError(f"--refit needs a validation item of each client, and --split {config.protocol.split} has none; drop one of them")
    if config.failures.happen() and isinstance(config.algorithm, Central):
        raise UsageError(f"--dropout, --stragglers and --corrupt are for federated methods; {config.algo} has no clients that could fail")
    if config.budget != "rounds" and config.budget_value is None:
        raise UsageError(f"--budget {config.budget} needs --budget-value: how many {config.budget} a run may use")
    _check_split(config.algo, config.algorithm, config.protocol)
    for key in SYNTHETIC:
        if config.dataset != "synthetic" and getattr(config.data, key) != getattr(DatasetOptions, key):
            raise UsageError(f"--{key.replace('_', '-')} is for --dataset synthetic; {config.dataset} would ignore it")


def _check_split(algo: str, algorithm: Algorithm, protocol: Protocol) -> None:
    """What is held out must be what the algorithm predicts, and fold flags are for folds."""
    split, words = protocol.split, type(algorithm).choices.get("feedback", ())
    if protocol.ratings and not algorithm.predicts_ratings:
        change = "use --feedback explicit" if "explicit" in words else "take an algorithm that predicts ratings"
        raise UsageError(f"--split {split} holds out ratings and {algo} only ranks; {change}, or use --split auto")
    if not protocol.ratings and algorithm.predicts_ratings:
        change = " or --feedback implicit" if "implicit" in words else ""
        raise UsageError(f"--split {split} holds out items to rank and {algo} predicts ratings; use --split kfold{change}")
    if protocol.ratings and protocol.eval_clients is not None:
        raise UsageError(f"--eval-clients is for ranking; --split {split} predicts every rating that is held out")
    if split == "users" and not algorithm.reconstructs:
        raise UsageError(f"--split users tests clients that never took part, and {algo} cannot reconstruct them; use --split kfold")
    if protocol.new_users and protocol.eval_clients is not None:
        raise UsageError("--new-users measures all clients that it keeps out of training; drop --eval-clients")
    if protocol.new_users >= 1:
        raise UsageError(f"--new-users must be a share below 1, such as 0.1, not {protocol.new_users:g}")
    if protocol.new_users and protocol.ratings:
        raise UsageError(f"--new-users is for rankings, and --split {split} holds out ratings; use --split users")
    if split != "kfold":
        for key in protocols.FOLD_FIELDS:
            if getattr(protocol, key) != getattr(Protocol, key):
                raise UsageError(f"--{key} is for --split kfold; --split {split} would ignore it")
    elif protocol.fold is not None and protocol.fold >= protocol.folds:
        raise UsageError(f"--fold {protocol.fold}: name one of 0 to {protocol.folds - 1}, or raise --folds")


def read_seeds(value: object, where: str) -> tuple[int, ...]:
    """`0-4`, `0,1,2`, `0-2,7` or a list of numbers."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    seeds: list[int] = []
    for part in parts:
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", str(part).strip(), re.ASCII)
        if match is None or isinstance(part, bool):
            raise UsageError(f"{where} must be like 0-4 or 0,1,2, not {value!r}")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise UsageError(f"{where}: {part} runs backwards; write {high}-{low}")
        if len(seeds) + high - low >= MOST_SEEDS:
            raise UsageError(f"{where}: {value} names more than {MOST_SEEDS} seeds")
        seeds += range(low, high + 1)
    if not seeds or len(set(seeds)) != len(seeds):
        raise UsageError(f"{where} must name each seed once, not {value!r}")
    return tuple(seeds)


class _SeedsFlag(Flag):
    def read(self, value: object, where: str) -> tuple[int, ...]:
        return read_seeds(value, where)


def flag_groups(cls: type[Algorithm] | None) -> dict[str, list[Flag]]:
    """Help groups by title, in order; with the algorithm's own flags if there is one."""
    run = {flag.key: flag for flag in _flags(RunConfig, CHOICES, skip=("algorithm", "data", "failures"))}
    run["protocol"] = dataclasses.replace(run["protocol"], kind=str, default="clean")
    run["recipe"] = dataclasses.replace(run["recipe"], kind=str | None, default=None)
    seeds = _SeedsFlag("seeds", str, None, "several runs, one a seed, such as 0-4 or 0,1,2; ends with mean, deviation and interval")
    shared = {field.name for field in dataclasses.fields(Algorithm)}
    trained = _flags(cls or Algorithm, (cls or Algorithm).choices)
    groups = {
        "run": [run[key] for key in ("algo", "dataset", "protocol", "recipe", "seed")] + [seeds, run["refit"]],
        "training": [flag for flag in trained if flag.key in shared] + [run["budget"], run["budget_value"]],
    }
    if cls is not None:
        groups[f"{cls.name}: {cls.summary}"] = [flag for flag in trained if flag.key not in shared]
    groups["protocol (defaults by preset)"] = _flags(Protocol, protocols.CHOICES, skip=("name",))
    groups["failures"] = _flags(Failures, {})
    groups["data"] = _flags(DatasetOptions, {}, skip=("ncf",))
    groups["machine"] = [run[key] for key in ("device", "dtype", "threads", "compile", "kernel", "block_rows", "client_store")]
    groups["output"] = [
        run[key] for key in ("eval_every", "out", "resume", "checkpoint_every", "keep_state", "mlflow", "experiment", "quiet", "debug")
    ]
    _refuse_clashes(groups, cls)
    return groups


def _flags(cls: type, choices: Mapping[str, tuple[str, ...]], skip: tuple[str, ...] = ()) -> list[Flag]:
    """One flag a field."""
    sentences = registry.field_help(cls)
    try:
        kinds = get_type_hints(cls)
    except (NameError, TypeError) as error:
        raise UsageError(f"{cls.__module__}.{cls.__qualname__}: the type of a field cannot be read: {error}") from error
    flags = []
    for field in dataclasses.fields(cls):
        if field.name in skip or not field.init:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        flag = Flag(field.name, kinds[field.name], default, sentences.get(field.name, ""), choices.get(field.name, ()))
        if cls is not RunConfig:
            _refuse_odd(flag, cls)
        flags.append(flag)
    return flags


def _refuse_odd(flag: Flag, cls: type) -> None:
    where = f"{cls.__module__}.{cls.__qualname__}.{flag.key}"
    allowed = "int, float, str, bool, Path, tuple[int, ...] or X | None"
    kinds = [kind for kind in _members(flag.kind) if kind is not NoneType]
    if len(kinds) != 1 or flag.item_kind not in _READ or (flag.is_tuple and get_args(kinds[0])[1:] != (...,)):
        raise UsageError(f"{where}: {flag.kind} cannot be a flag's type; use {allowed}")
    if flag.default is dataclasses.MISSING:
        raise UsageError(f"{where}: a flag needs a default")


def _refuse_clashes(groups: Mapping[str, list[Flag]], cls: type[Algorithm] | None) -> None:
    taken = {"help", "config", "list", "print_config", "jobs", "trust_plugin"}
    for flag in (flag for group in groups.values() for flag in group):
        if flag.key in taken:
            raise UsageError(f"algorithm {cls.name if cls else ''}: its field {flag.key!r} is a flag of every run too; rename it")
        taken.add(flag.key)


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def whole_number(word: str) -> int:
    """A whole number of a command line, for argparse."""
    try:
        return text.whole(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {word!r}") from None


def number(word: str) -> float:
    """A number of a command line, for argparse."""
    try:
        return text.number(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {word!r}") from None


class Parser(argparse.ArgumentParser):
    """Errors are raised, for the edge to print."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """The flags given; of an unknown one the nearest that there is is named."""
        given, unknown = self.parse_known_args(argv)
        if unknown:
            near = text.nearest(unknown[0], [option for action in self._actions for option in action.option_strings])
            hint = f"did you mean {near[0]}?" if near else f"{self.prog.split()[-1]} --help shows all flags"
            raise UsageError(f"unknown flag {unknown[0]}; {hint}")
        if "run" in given and given.run is None:
            raise UsageError("--run is missing: give the folder of a finished run")
        return given


def run_parser(command: str, usage: str, about: str, epilog: str) -> Parser:
    """The parser of a command on a finished run, with the flags that all of them have."""
    made = Parser(
        prog=f"python -m fedbench {command}",
        usage=f"python -m fedbench {command} --run DIR {usage}",
        description=about,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--run", type=Path, metavar="DIR", help="folder of a finished run")
    made.add_argument("--data-dir", type=Path, metavar="DIR", help="where the dataset is now (default: as in the run)")
    made.add_argument(trust.FLAG, action="store_true", help=trust.HELP)
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    return made


_EPILOG = """A config file (.json or .toml) has flag names as keys; flags overrule it,
it overrules the recipe, and the recipe the defaults.

examples:
  python train.py --algo {algo} --dataset synthetic --rounds 5
  python train.py --algo {algo} --dataset filmtrust --seeds 0-2
"""


def wants_help(argv: Sequence[str]) -> str | None:
    """`--help` asks for the flags most used ("short"), `--help all` for every one ("all")."""
    for word, after in zip(argv, [*argv[1:], ""], strict=False):
        if word in ("-h", "--help", "--help=all"):
            return "all" if after == "all" or word.endswith("all") else "short"
    return None


def print_help(argv: Sequence[str], how: str) -> None:
    """The flags of the algorithm that the command line names, or of every run; "all" adds those of protocol, data, machine and output."""
    algo, cls = _named_algorithm([word for word in argv if word not in ("-h", "--help", "--help=all")])[:2]
    groups = flag_groups(cls)
    if how == "short":
        groups = dict(list(groups.items())[: 3 if cls else 2])
    more = f"python train.py --algo {algo or 'NAME'} --help all shows the flags of protocol,\ndata, machine and output too.\n\n"
    _parser(algo, cls, groups, more if how == "short" else "").print_help()


def _parser(algo: str | None, cls: type[Algorithm] | None, groups: Mapping[str, list[Flag]], more: str = "") -> argparse.ArgumentParser:
    about = "Train one personalised federated recommender and report honest numbers."
    if cls is None:
        about += "\nEach algorithm has flags and defaults of its own:\n`python train.py --algo NAME --help` shows them."
    parser = Parser(
        prog="python train.py",
        usage="python train.py --algo NAME --dataset NAME [flags]",
        description=about,
        epilog=more + _EPILOG.format(algo=algo or "fedem"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag, cls)
        if title == "run":
            group.add_argument("--config", metavar="FILE", help="read flags from a .json or .toml file")
            group.add_argument(trust.FLAG, action="store_true", default=False, help=trust.HELP)
            group.add_argument("--jobs", metavar="N", default=JOBS.default, help=JOBS.help)
            group.add_argument("--list", action="store_true", default=False, help="show algorithms and datasets, and end")
            group.add_argument(
                "--print-config", action="store_true", default=False, help="show the resolved configuration as JSON, and end"
            )
    return parser


def _add(group: argparse._ArgumentGroup, flag: Flag, cls: type[Algorithm] | None) -> None:
    text = f"{flag.help} ({_default_text(flag, cls)})".replace("%", "%%").strip()
    names = [SHORT[flag.key], flag.option] if flag.key in SHORT else [flag.option]
    if flag.item_kind is bool:
        group.add_argument(*names, dest=flag.key, action=argparse.BooleanOptionalAction, help=text)
        return
    metavar = "{" + ",".join(flag.choices) + "}" if flag.choices else _METAVAR.get(flag.key) or _METAVAR[flag.item_kind]
    group.add_argument(*names, dest=flag.key, metavar=f"{metavar},..." if flag.is_tuple else metavar, help=text)


def _default_text(flag: Flag, cls: type[Algorithm] | None) -> str:
    if flag.default is dataclasses.MISSING:
        return "required"
    text = f"default: {_shown(flag.default)}"
    if flag.key in {field.name for field in dataclasses.fields(Protocol)}:
        values = {name: _shown(getattr(preset, flag.key)) for name, preset in PRESETS.items()}
        if len(set(values.values())) > 1:
            text = ", ".join(f"{name}: {value}" for name, value in values.items())
    elif cls is not None and flag.key in cls.published:
        text += f"; published: {_shown(cls.published[flag.key])}"
    return text


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def read_config(path: Path, flag: str = "--config") -> dict[str, Any]:
    """A .json or .toml file as a dict; keys with underscores. Errors name the flag that gave the file."""
    if path.suffix not in (".json", ".toml"):
        raise UsageError(f"{flag} {path}: must end in .json or .toml")
    try:
        content = files.read_bytes(path).decode("utf-8-sig")
        values = json.loads(content, object_pairs_hook=_pairs) if path.suffix == ".json" else tomllib.loads(content)
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{flag} {path}, line {line}: not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{flag} {path}, line {error.lineno}: {error.msg}") from error
    except tomllib.TOMLDecodeError as error:
        # 3.11 gives the line in the message only: "... (at line 2, column 5)" or "(at end of document)".
        found = re.search(r" \(at (?:line (\d+), .*|end of document)\)$", str(error))
        line = int(found[1]) if found and found[1] else content.count("\n") + 1
        raise UsageError(f"{flag} {path}, line {line}: {str(error)[: found.start()] if found else error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} {path}: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{flag} {path}, line 1: must hold an object of flag names and values, not a {type(values).__name__}")
    plain = {key.replace("-", "_"): value for key, value in values.items()}
    if len(plain) < len(values):
        raise UsageError(f"{flag} {path}: a key stands there twice, with - and with _")
    return plain


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands there twice")
    return found


def _read_file_values(
    values: Mapping[str, Any], path: str | None, flags: Mapping[str, Flag], cls: type[Algorithm] | None
) -> dict[str, Any]:
    """A file's values checked; `no_mlflow = true` means `mlflow = false`."""
    read: dict[str, Any] = {}
    for key, value in values.items():
        where = f"--config {path}: {key}"
        positive = key.removeprefix("no_")
        if key not in flags and positive in flags and flags[positive].item_kind is bool:
            if positive in values:
                raise UsageError(f"{where}: {positive} stands there too; keep one of them")
            read[positive] = not flags[positive].read(value, where)
        elif key in flags:
            read[key] = flags[key].read(value, where)
        elif cls is not None or not hints.owners(key):
            raise UsageError(f"--config {path}: unknown key {key!r}" + hints.for_key(key, list(flags), cls, str))
    return read


def _values(thing: Any) -> dict[str, Any]:
    return {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing) if field.init}


def _plain(value: Any) -> Any:
    """A flag's value as JSON knows it."""
    if isinstance(value, tuple):
        return [_plain(member) for member in value]
    return str(value) if isinstance(value, Path) else value


def _identity(name_or_path: str) -> str:
    path = os.path.expanduser(name_or_path)
    if not os.path.isfile(path):
        return name_or_path
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
