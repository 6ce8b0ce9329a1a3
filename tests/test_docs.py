"""The documentation is true: its examples train, and its commands, flags, paths and links exist."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun

import fedbench
from fedbench import parts
from fedbench.__main__ import COMMANDS
from fedbench.commands import bench, bench_page, cli, evaluate, log_model, recommend, reproduce, submit, verify
from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm, Answer, Batch, Context, Extra, Phase, Pull, Stage, World
from fedbench.contract.central import Central, Pool
from fedbench.contract.dataset import DatasetOptions
from fedbench.contract.randomness import Draw
from fedbench.contract.uploads import Rows, Tables, Uploads
from fedbench.data.protocol import Protocol
from fedbench.reporting import report
from fedbench.settings import command_line
from fedbench.settings.config import RunConfig
from fedbench.settings.flags import flag_groups
from fedbench.simulation.failures import Failures
from fedbench.sweeping import study, sweep
from fedbench.testing.algorithm_tests import AlgorithmTests
from fedbench.testing.small_federation import small_instance
from fedbench.tuning import tune

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDE = ROOT / "docs" / "adding-an-algorithm.md"
PAGE_NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
ROOMS = "fedbench|algorithms|datasets|sweeps|tests|docs"

REFERENCE, FLAGS = ROOT / "docs" / "reference.md", ("<!-- flags:begin -->", "<!-- flags:end -->")

OTHERS = r"chromium|ray|python -m mlflow|python -m pip"
"""commands whose flags are not ours"""

PARSERS = {"report": report.parser, "recommend": recommend.parser, "evaluate": evaluate.parser, "log-model": log_model.parser}

each_page = pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def examples() -> dict[str, str]:
    """Complete algorithm files, by the name in their first line (`# name.py`)."""
    found = {}
    for page in PAGES:
        for text in blocks(page, "python"):
            if named := re.match(r"# (\w+\.py)\n", text):
                found[named[1]] = text
    return found


def lines_of(page: Path) -> list[str]:
    """Every command: a line in a block of commands, or `python ...` in the text; always as `python`."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(python [^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return [line.strip().removeprefix(".venv/bin/") for line in lines]


def commands(page: Path) -> list[list[str]]:
    """The words after `train.py` of every command that python or torchrun starts with it; a bare one names it and no more."""
    lines = [line for line in lines_of(page) if re.match(r"python train.py .|torchrun .* train.py", line)]
    return [shlex.split(line.partition("train.py")[2], comments=True) for line in lines]


METHODS = [name for name in examples() if not name.startswith("test_")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds the examples, to run in."""
    for name, text in examples().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_both_guides_have_examples() -> None:
    """Every block of Python is a file that the tests below run."""
    named = {"item_bias.py", "my_mf.py", "my_fedrap.py", "my_pfedrec.py", "my_gpfedrec.py", "central_bias.py", "test_my_mf.py"}
    assert set(examples()) == named
    assert all(re.match(r"# \w+\.py\n", block) for block in blocks(GUIDE, "python"))
    assert all(text.count("\n") < 120 for text in examples().values())
    assert examples()["my_mf.py"].count("\n") < 45


@pytest.mark.parametrize("name", METHODS)
def test_an_example_trains(name: str, folder: Path) -> None:
    size = ["--users", "60", "--items", "120", "--interactions", "10", "--rounds", "2"]
    assert cli.main(["--algo", name, "--dataset", "synthetic", *size, "--no-mlflow", "--quiet", "--out", "run"]) == 0
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["rounds"] == 2 and (summary["bytes_up"] > 0) == (name != "central_bias.py") and not summary["leaky"]
    losses = [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[1] < losses[0]


@pytest.mark.parametrize("name", [name for name in METHODS if name != "central_bias.py"])
def test_an_example_passes_the_heart_of_check(name: str, folder: Path) -> None:
    algorithm = small_instance(registry.algorithm(name)())
    tests = AlgorithmTests()
    tests.test_equals_the_loop(algorithm, "off")
    tests.test_private_state_never_shows_in_upload(algorithm)
    tests.test_works_row_by_row(algorithm)


def test_fedrap_as_published_equals_the_loop(folder: Path) -> None:
    cls = registry.algorithm("my_fedrap.py")
    fields = {**cls.published, "lr_items": 5.0, "dim": 4}  # rates of 200 magnify rounding
    AlgorithmTests().test_equals_the_loop(small_instance(cls(**fields)), "off")


def test_the_example_of_a_test_is_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    scope: dict[str, Any] = {}
    exec(compile(examples()["test_my_mf.py"], "test_my_mf.py", "exec"), scope)
    tests = scope["TestMyMF"]()
    assert isinstance(tests, AlgorithmTests)
    for case in tests.cases(AlgorithmTests.test_quality):
        tests.test_quality(**case)


def test_all_that_a_method_may_use_is_on_the_page() -> None:
    """Every public name of the contract and of the parts, in a block or a span of code."""
    page = GUIDE.read_text(encoding="utf-8")
    code = " ".join([*re.findall(r"^```.*?^```$", page, flags=re.MULTILINE | re.DOTALL), *re.findall(r"`([^`\n]+)`", page)])
    words = set(re.findall(r"\w+", code))
    named: dict[str, set[str]] = {}
    for cls in (Algorithm, Phase, Stage, Batch, Extra, Pull, Answer, Uploads, Rows, Tables, Draw, World, Context, Central, Pool):
        inherited = {*dir(tuple), *dir(object)} if issubclass(cls, tuple) else {*dir(object)}
        fields = getattr(cls, "_fields", ()) or [field.name for field in dataclasses.fields(cls)]
        named[cls.__name__] = {name for name in (*vars(cls), *fields) if not name.startswith("_")} - inherited
    for module in pkgutil.iter_modules(parts.__path__):
        things = vars(importlib.import_module(f"fedbench.parts.{module.name}"))
        own = {name for name, thing in things.items() if getattr(thing, "__module__", "") == f"fedbench.parts.{module.name}"}
        named[module.name] = {name for name in own | {*things.get("__all__", ())} if not name.startswith("_")}
    assert {place: missing for place, names in named.items() if (missing := names - words)} == {}
    assert len(named["Algorithm"]) > 40 and len(named["mixing"]) > 4


@each_page
def test_commands_are_understood(page: Path, folder: Path) -> None:
    for words in commands(page):
        if not {"--help", "--config", "NAME"} & set(words):
            request = command_line.parse(words)
            assert request.configs or request.list


@each_page
def test_sweeps_are_understood(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = ("python sweeps/grid.py", "python -m fedbench sweep")
    for line in (line for line in lines_of(page) if line.startswith(starts) and line not in starts):
        own, rest = sweep.split_line(shlex.split(line, comments=True)[2 if "grid.py" in line else 4 :])
        if "--help" not in own:
            options = sweep.parser().parse_args(own)
            assert study.read(rest, options.study and ROOT / options.study).points


@each_page
def test_searches_are_understood(page: Path, folder: Path) -> None:
    starts = "python -m fedbench tune"
    for line in (line for line in lines_of(page) if line.startswith(starts) and line != starts):
        assert tune.read(shlex.split(line, comments=True)[4:]).space


@each_page
def test_commands_on_finished_runs_are_understood(page: Path) -> None:
    for line in (line for line in lines_of(page) if line.startswith("python -m fedbench ")):
        name, *words = shlex.split(line, comments=True)[3:]
        assert name in COMMANDS or name in ("help", "COMMAND"), line
        if name in PARSERS and words and words != ["--help"]:
            given = PARSERS[name]().read(words)
            assert bool(given.runs) != bool(given.experiment) if name == "report" else given.run is not None


@each_page
def test_flags_exist(page: Path, folder: Path) -> None:
    classes: list[type[Algorithm]] = [*registry.algorithms().values(), *(registry.algorithm(name) for name in METHODS)]
    flags = [flag for cls in classes for group in flag_groups(cls).values() for flag in group]
    known = {flag.option for flag in flags} | {f"--no-{flag.option[2:]}" for flag in flags if flag.item_kind is bool}
    known |= {"--config", "--list", "--print-config", "--help", "--version", *sweep.own_options()}
    known |= {"--may-leave", "--json"}  # of check
    parsers = [
        *(make() for make in PARSERS.values()),
        submit.parser(),
        verify.parser(),
        bench.parser(),
        tune.parser(),
        reproduce.parser(),
        torchrun.get_args_parser(),
    ]
    known |= {option for parser in parsers for action in parser._actions for option in action.option_strings}
    text = re.sub(rf"^(?:{OTHERS}) .*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))
    assert named <= known


@each_page
def test_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(rf"(?<![\w/.:-])(?:{ROOMS})/[\w./-]*\w", text))
    named |= set(re.findall(r"`(\w+\.py)`", text)) - set(examples()) - {"plugin.py"}  # which a run folder has
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@each_page
def test_links_resolve(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), target
        assert not anchor or anchor[1:] in anchors(linked), f"{target}{anchor}"


def anchors(page: Path) -> set[str]:
    """What a link can point to inside a page: its headings, lower case, without punctuation, dashes for blanks."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_table_of_speed_is_what_bench_measured() -> None:
    """`bench --all --json --page` wrote both; neither was edited since."""
    written = json.loads((ROOT / "docs" / "results" / "bench.json").read_text(encoding="utf-8"))
    assert written["schema"] == bench.SCHEMA
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    table = page.partition(bench_page.BEGIN)[2].partition(bench_page.END)[0]
    assert table.strip() == bench_page.markdown(written)


def flag_tables() -> str:
    """Every flag that is no algorithm's own, a table a group, for docs/reference.md."""
    lines = []
    for title, flags in flag_groups(None).items():
        lines += [f"### {title.partition(' (')[0].capitalize()}", "", "| flag | default | meaning |", "|---|---|---|"]
        for flag in flags:
            spelling = ", ".join(f"`{name}`" for name in flag.spelling.split("/"))
            default = command_line._default_text(flag, None).removeprefix("default: ").removesuffix("default: ")
            lines.append(f"| {spelling} | {default} | {' '.join(flag.help.split())} |".replace("<", "&lt;"))
        lines.append("")
    return "\n".join(lines)


def test_the_reference_has_every_flag_command_and_key() -> None:
    """`python -m tests.test_docs` writes the tables of flags again."""
    page = REFERENCE.read_text(encoding="utf-8")
    assert page.partition(FLAGS[0])[2].partition(FLAGS[1])[0].strip() == flag_tables().strip()
    named = set(re.findall(r"`--([a-z-]+)`", page))
    fields = [field.name for cls in (RunConfig, Protocol, DatasetOptions, Failures) for field in dataclasses.fields(cls) if field.init]
    not_flags = {"algorithm", "data", "failures", "name", "ncf"}
    assert {name.replace("_", "-") for name in fields if name not in not_flags} <= named
    assert {f"fedbench {name}" for name in COMMANDS} <= set(re.findall(r"`(fedbench [a-z-]+)`", page))


def test_the_reference_has_every_file_and_key_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "item_bias.py").write_text(examples()["item_bias.py"], encoding="utf-8")
    size = ["--users", "60", "--items", "120", "--interactions", "10", "--rounds", "1", "--new-users", "0.1"]
    flags = ["--no-mlflow", "--quiet", "--refit", "--out", str(tmp_path / "run")]
    assert cli.main(["--algo", str(tmp_path / "item_bias.py"), "--dataset", "synthetic", *size, *flags]) == 0
    named = set(re.findall(r"`([\w./]+)`", REFERENCE.read_text(encoding="utf-8")))
    assert {f"{path.name}{'/' * path.is_dir()}" for path in (tmp_path / "run").iterdir()} <= named
    read = {name: json.loads((tmp_path / "run" / name).read_text()) for name in ("summary.json", "env.json")}
    assert set(read["summary.json"]) | set(read["env.json"]) <= named
    rounds = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert {key for key in rounds if "/" not in key} <= named


def test_one_version_everywhere() -> None:
    assert f"\nversion: {fedbench.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"  version = {{{fedbench.__version__}}},\n" in (ROOT / "docs" / "authors.md").read_text(encoding="utf-8")
    assert f"\n## {fedbench.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 170
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        reached.add(page)
        targets = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8"))
        left += {(page.parent / target).resolve() for target in targets if "://" not in target} - reached
    assert set(PAGES) <= reached


if __name__ == "__main__":
    before, _, rest = REFERENCE.read_text(encoding="utf-8").partition(FLAGS[0])
    after = rest.partition(FLAGS[1])[2]
    REFERENCE.write_text(f"{before}{FLAGS[0]}\n{flag_tables()}{FLAGS[1]}{after}", encoding="utf-8")
