"""The page of all methods as published and honest: it says what was measured, and each measurement can be asked for again."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedbench.contract import registry
from fedbench.settings import command_line

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_and_clean", ROOT / "sweeps" / "published_and_clean.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(study: ModuleType, cell: Any, hr: float, seconds: float = 1.0) -> dict[str, Any]:
    return {cell.key: {"hr_10": hr, "ndcg_10": hr / 2, "seconds": seconds}}


def test_the_page_is_made_of_the_file(study: ModuleType) -> None:
    assert study.FILE.with_suffix(".md").read_text(encoding="utf-8") == study.page(study.read())


def test_it_has_every_method_of_clients(study: ModuleType) -> None:
    """All that people publish; what stands beside them is named too."""
    named = {*study.METHODS, *study.BESIDE, "random", "popularity_recent", "fedease_sketch", "fedrec_mf"}
    assert {name for name in registry.algorithms() if registry.algorithm(name).federated} <= named
    assert {*study.METHODS, *study.BESIDE} <= set(registry.algorithms())


def test_a_run_has_the_protocol_and_the_recipe_of_its_column(study: ModuleType) -> None:
    for reading, (wanted, _) in study.READINGS.items():
        flags = study.Cell("ml-100k", "pfedrec", reading, 1).flags()
        config = command_line.resolve([word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))])
        assert (config.protocol.name, config.recipe, config.seed) == (wanted["protocol"], wanted["recipe"], 1)
        assert config.protocol.leaky == (reading == "published")


def test_means_and_what_is_missing(study: ModuleType) -> None:
    cell = study.Cell("filmtrust", "fedmf", "clean", 0)
    found = {key: one for seed, hr in enumerate((0.2, 0.3, 0.4)) for key, one in made(study, cell._replace(seed=seed), hr).items()}
    assert study.shown(found, "filmtrust", "fedmf", "clean") == ".300/.150"
    assert study.shown({cell.key: found[cell.key]}, "filmtrust", "fedmf", "clean") == ".200/.100 (1)"
    assert study.shown(found, "filmtrust", "fedem", "clean") == "not run"
    long = {study.Cell("filmtrust", "fedem", "published", 0).key: {"hours": 8.6}}
    assert study.shown(long, "filmtrust", "fedem", "published") == "not run, 9 h" and not study.missing(long, [], 1)
    assert math.isnan(study.mean(found | long, "filmtrust", "fedem", "clean", "hr_10")) and study.ordered(found, "filmtrust")[0] == "fedmf"


def test_what_is_measured_is_not_measured_again(study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a long run gets one seed."""
    monkeypatch.setattr(study, "FILE", tmp_path / "found.json")
    found: dict[str, Any] = {}
    for cell in study.cells(["filmtrust"], 0):
        found |= made(study, cell, 0.4, seconds=study.LONG + 1)
    study.save(found)
    monkeypatch.setattr(study, "measure", None)  # nothing asks for it
    assert study.study(["filmtrust"], jobs=1, hours=1.0) == found
