"""From given values to RunConfigs: defaults < recipe < config file < flags, then one run a seed and fold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedbench.contract import plugin_errors, registry
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.dataset import DatasetOptions
from fedbench.contract.search import search_space
from fedbench.data.protocol import PRESETS, Protocol
from fedbench.errors import FedbenchError, UsageError
from fedbench.settings import recipes
from fedbench.settings.checks import check
from fedbench.settings.config import RunConfig, placed
from fedbench.settings.flags import MOST_SEEDS, flags_of
from fedbench.simulation.failures import Failures


def configs_of(cls: type[Algorithm], on_line: dict[str, Any], from_file: dict[str, Any]) -> list[RunConfig]:
    if "rounds" in on_line and on_line.get("budget_value") is not None:
        raise UsageError("--rounds and --budget-value both say when the run ends; use one of them")
    # each layer overrules those before it: defaults, recipe, config file, command line
    # a config that fedbench wrote says every field itself, and may be read where there is no recipe
    whole = {flag.key for flag in flags_of(cls, cls.choices)} <= from_file.keys() | {"rounds"} and "recipe" not in on_line
    from_file = _without_overruled(cls, on_line, from_file)
    said = {**from_file, **on_line}
    preset = PRESETS[said.get("protocol", "clean")]
    recipe = said.get("recipe") or _recipe_of(preset.name)
    said = {**_recipe_fields(cls, recipe, said, whole), **said}

    protocol = dataclasses.replace(preset, **_fields_said(Protocol, said))
    # a rating split needs predicted ratings; an algorithm that can do both is told so unless the user chose
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
    check(config)
    return _one_a_seed_and_fold(config, _seeds(on_line) or _seeds(from_file) or (0,))


def _made(cls: type[Algorithm], said: Mapping[str, Any]) -> Algorithm:
    """The algorithm with these values, checked. An exception in its own `check` becomes a UsageError that names it."""
    try:
        with plugin_errors.blamed():
            algorithm = cls(**_fields_said(cls, said))
            algorithm.check(None)
    except FedbenchError:
        raise
    except Exception as error:
        raise UsageError(f"algorithm {cls.name} fails to check its values: {type(error).__name__}: {error}") from error
    return algorithm


def _without_overruled(cls: type[Algorithm], on_line: dict[str, Any], from_file: dict[str, Any]) -> dict[str, Any]:
    """The config file's values without those that belong to a preset, recipe or budget that the command line replaces."""
    kept, said = dict(from_file), {**from_file, **on_line}
    dropped: set[str] = {"budget", "budget_value"} if "rounds" in on_line else {"rounds"} if "budget_value" in on_line else set()
    if "protocol" in on_line and from_file.get("protocol", on_line["protocol"]) != on_line["protocol"]:
        dropped |= {"recipe", *(field.name for field in dataclasses.fields(Protocol))}
        kept["protocol"] = on_line["protocol"]
    recipe = on_line.get("recipe") or (None if "recipe" in dropped else from_file.get("recipe"))
    recipe = recipe or _recipe_of(kept.get("protocol", on_line.get("protocol", "clean")))
    if (from_file.get("recipe") or recipe) != recipe:
        dropped |= {"recipe", *_set_by(cls, recipe, said), *_set_by(cls, from_file.get("recipe"), said)}
    return {key: value for key, value in kept.items() if key not in dropped}


def _recipe_of(preset: str) -> str:
    return "published" if preset == "published" else "clean"


def _recipe_fields(cls: type[Algorithm], recipe: str, said: Mapping[str, Any], whole: bool) -> dict[str, Any]:
    """What a recipe sets. `whole`: the config file says all of it already."""
    if recipe == "tuned":
        return {} if whole else recipes.tuned_fields(cls, said["dataset"])
    return _published(cls) if recipe == "published" else {}


def _set_by(cls: type[Algorithm], recipe: str | None, said: Mapping[str, Any]) -> set[str]:
    """The fields that a recipe sets, or has set: those of a tuned one may be any that is declared as one to search."""
    if recipe != "tuned":
        return set(cls.published)
    found = recipes.find(cls, said["dataset"]) if "dataset" in said else None
    return {*search_space(cls), *(recipes.tuned_fields(cls, said["dataset"]) if found else ())}


def _published(cls: type[Algorithm]) -> dict[str, Any]:
    """Field values of the published recipe, checked like any other value."""
    flags = {flag.key: flag for flag in flags_of(cls, cls.choices)}
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
        raise UsageError("--resume PATH resumes one run; for several seeds or folds use --resume auto and --out")
    return configs if config.out is None else placed(configs, config.out)
