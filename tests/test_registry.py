"""Names: built-in, installed and by path; and what happens when one of them is broken."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from fedbench.algorithms import fedmf
from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.dataset import DatasetOptions
from fedbench.errors import UsageError

PLUGIN = """
from __future__ import annotations
from dataclasses import dataclass
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.registry import register

@register("{name}", summary="a small one")
@dataclass(frozen=True)
class Small(Algorithm):
    alpha: float = 0.9
    '''how much'''
"""


@pytest.fixture(autouse=True)
def same_tables_afterwards() -> Iterator[None]:
    registry.algorithms(), registry.datasets()
    with registry._registrations_undone():
        yield
    registry._discover.cache_clear()


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, points: str) -> None:
    """An installed distribution: a module and its entry points on sys.path."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(folder))
    registry._discover.cache_clear()


def test_every_built_in_module_imports(caplog: pytest.LogCaptureFixture) -> None:
    registry._discover.cache_clear()
    with caplog.at_level(logging.WARNING):
        names = registry.algorithms()
    assert not caplog.records
    assert list(names) == sorted(names)
    assert all(cls.name == name and cls.summary for name, cls in names.items())
    assert registry.dataset_names() == sorted(registry.dataset_names())


def test_register_names_the_class() -> None:
    @registry.register("mine", summary="of mine")
    @dataclass(frozen=True)
    class Mine(Algorithm):
        pass

    assert registry.algorithm("mine") is Mine
    assert (Mine.name, Mine.summary) == ("mine", "of mine")


def test_a_class_that_forgot_dataclass_is_refused() -> None:
    class Mine(Algorithm):
        alpha: float = 1.0

    with pytest.raises(UsageError, match="put @dataclass"):
        registry.register("mine", summary="")(Mine)


def test_a_name_that_cannot_be_a_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be a name"):
        registry.register("../mine", summary="")(Algorithm)


def test_two_of_one_name_are_refused_and_both_named(tmp_path: Path) -> None:
    @registry.register("mine", summary="")
    @dataclass(frozen=True)
    class Mine(Algorithm):
        pass

    path = write(tmp_path / "other.py", PLUGIN.format(name="mine"))
    with pytest.raises(UsageError) as caught:
        registry.algorithm(path)
    assert __name__ in str(caught.value) and path in str(caught.value)


def test_unknown_names_get_the_nearest_and_all() -> None:
    registry.register("nearby", summary="")(dataclass(frozen=True)(type("Nearby", (Algorithm,), {})))
    with pytest.raises(UsageError, match="did you mean nearby.*known: .*nearby"):
        registry.algorithm("neerby")
    registry.register_dataset("films", summary="", aliases=["movies"])(lambda options: None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="did you mean movies"):
        registry.dataset("movie")


def test_aliases_lead_to_the_same_loader() -> None:
    def load(options: DatasetOptions) -> None: ...

    registry.register_dataset("films", summary="some", aliases=["movies"])(load)  # type: ignore[type-var]
    assert registry.dataset("movies") is load
    assert registry.dataset_name("movies") == "films"
    assert "movies" not in registry.dataset_names() and "films" in registry.dataset_names()


def test_a_path_means_a_file_of_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", "user,item\na,x\na,y\nb,x\n")
    data = registry.dataset(path)(DatasetOptions())
    assert (data.users, data.items) == (2, 2)


def test_a_file_gives_its_one_algorithm_each_time(tmp_path: Path) -> None:
    path = write(tmp_path / "small.py", PLUGIN.format(name="small"))
    for _ in range(2):
        cls = registry.algorithm(path)
        assert cls.name == "small" and registry.field_help(cls)["alpha"] == "how much"
    assert "small" not in registry.algorithms()


def test_a_file_without_register_is_named_after_itself(tmp_path: Path) -> None:
    source = "from fedbench.contract.algorithm import Algorithm\nclass Mine(Algorithm):\n    'One line.'\n"
    cls = registry.algorithm(write(tmp_path / "my method.py", source))
    assert (cls.name, cls.summary) == ("my_method", "One line.")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "found none"),
        ("from fedbench.contract.algorithm import Algorithm", "found none"),
        ("from fedbench.contract.algorithm import Algorithm\nclass A(Algorithm): pass\nclass B(Algorithm): pass", "found A, B"),
        ("from fedbench.contract.algorithm import Algorithm\nclass A(Algorithm):\n    x: int = 1", "put @dataclass"),
        ("def broken(:", "line 1: .*SyntaxError"),
        ("import no_such_module_at_all", "ModuleNotFoundError"),
        ("raise SystemExit(0)", "SystemExit"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, source: str, message: str) -> None:
    path = write(tmp_path / "bad.py", source)
    with pytest.raises(UsageError, match=message) as caught:
        registry.algorithm(path)
    assert path in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        registry.algorithm(str(tmp_path / "nothing.py"))


def test_installed_plug_ins_are_found_under_their_entry_points_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = PLUGIN.format(name="inner") + "\ndef load(options):\n    '''Rows from afar.'''\n"
    points = "[fedbench.algorithms]\nouter = plug_in_a:Small\n[fedbench.datasets]\nafar = plug_in_a:load\n"
    installed(tmp_path, monkeypatch, "plug_in_a", source, points)
    assert registry.algorithm("outer").name == "outer"
    assert registry.algorithm("outer").summary == "a small one"
    assert "inner" not in registry.algorithms()
    assert registry.datasets()["afar"].summary == "Rows from afar."


def test_a_broken_plug_in_is_reported_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = "[fedbench.algorithms]\ngone = plug_in_b_missing:X\nnumber = plug_in_b:x\ngood = plug_in_b:Small\n"
    installed(tmp_path, monkeypatch, "plug_in_b", PLUGIN.format(name="inner") + "\nx = 1\n", points)
    with caplog.at_level(logging.WARNING):
        names = registry.algorithms()
    assert "good" in names and not {"gone", "number"} & set(names)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and not any("\n" in line for line in lines)
    assert any("gone" in line and "ModuleNotFoundError" in line for line in lines)
    assert any("number" in line and "not a subclass" in line for line in lines)


def test_a_plug_in_may_not_take_a_built_in_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    taken = next(iter(registry.algorithms()))
    points = f"[fedbench.algorithms]\n{taken} = plug_in_c:Small\n"
    installed(tmp_path, monkeypatch, "plug_in_c", PLUGIN.format(name="inner"), points)
    with caplog.at_level(logging.WARNING):
        assert registry.algorithms()[taken].__module__.startswith("fedbench.algorithms.")
    assert len(caplog.messages) == 1 and taken in caplog.messages[0] and "plug_in_c" in caplog.messages[0]


def test_a_broken_built_in_is_reported_and_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), registry._left_out_if_broken("algorithms/half.py"):
        registry.register("half", summary="")(dataclass(frozen=True)(type("Half", (Algorithm,), {})))
        raise RuntimeError("two\nlines")
    assert "half" not in registry.algorithms()
    assert caplog.messages == ["algorithms/half.py is left out: RuntimeError: two lines"]


def test_field_help_is_inherited_and_overridden() -> None:
    @dataclass(frozen=True)
    class Mine(Algorithm):
        dim: int = 4
        rounds: int = 2
        """my rounds,
        in two lines"""
        silent: int = 0

    found = registry.field_help(Mine)
    assert found["dim"] == registry.field_help(Algorithm)["dim"]
    assert found["rounds"] == "my rounds, in two lines"
    assert "silent" not in found and "summary" not in found


def test_every_field_of_every_algorithm_has_a_sentence() -> None:
    for name, cls in registry.algorithms().items():
        missing = {field.name for field in fields(cls)} - set(registry.field_help(cls))
        assert not missing, f"{name}: no sentence under {missing}"


def test_a_file_module_that_failed_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        registry.algorithm(write(tmp_path / "failing.py", "1/0"))
    assert not [name for name in sys.modules if name.startswith("fedbench_file_failing_")]


def test_the_file_of_a_built_in_is_that_built_in() -> None:
    assert registry.algorithm(str(Path(fedmf.__file__))) is fedmf.FedMF
