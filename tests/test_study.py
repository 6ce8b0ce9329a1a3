"""From a command line or a study file to the points of a sweep."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fedbench.contract import registry
from fedbench.errors import UsageError
from fedbench.experiment import processes, run
from fedbench.settings.command_line import resolve
from fedbench.sweeping import result_tables, study, sweep
from tests.real_data import FETCHED, REAL

ROOT = Path(__file__).parents[1]
STUDIES = sorted((ROOT / "sweeps").glob("*.toml"))
FEDMF = "--algo fedmf --dataset synthetic"


def points(words: str) -> list[study.Point]:
    return list(study.read(words.split()).points.values())


def written(folder: Path, text: str) -> Path:
    (folder / "s.toml").write_text(text)
    return folder / "s.toml"


def test_every_combination_the_last_axis_fastest() -> None:
    found = points(f"{FEDMF} -n 10 none -e 1 3 --seeds 0-1 --rounds 7")
    assert [point.label for point in found][:3] == ["n=10 e=1 seed=0", "n=10 e=1 seed=1", "n=10 e=3 seed=0"]
    assert len(found) == 8 and found[-1].values == {"clients_per_round": None, "local_epochs": 3, "seed": 1}
    assert {point.config.algorithm.rounds for point in found} == {7}


@pytest.mark.parametrize(
    ("words", "key", "values"),
    [
        ("--algo fedem --dataset filmtrust --alpha 0 0.5 .9", "alpha", [0.0, 0.5, 0.9]),
        ("--algo fedem --dataset filmtrust --exclude-self true false", "exclude_self", [True, False]),
        ("--algo fedem --dataset filmtrust --merge static elastic", "merge", ["static", "elastic"]),
        ("--algo fedavg_ncf --dataset ml-100k --layers 64,32 32,16,8", "layers", [[64, 32], [32, 16, 8]]),
        ("--algo fedmf local --dataset ml-100k", "algo", ["fedmf", "local"]),
        ("--algo fedmf --dataset ml-100k --protocol clean published", "protocol", ["clean", "published"]),
        ("--algo fedmf --dataset ml-100k --seed 3 5", "seed", [3, 5]),
        ("--algo fedmf --dataset ml-100k --seeds 0-1 7", "seed", [0, 1, 7]),
        ("--algo fedmf --dataset ml-100k --lr 1e-1 1e-2", "lr", [0.1, 0.01]),
    ],
)
def test_any_flag_is_an_axis(words: str, key: str, values: list[object]) -> None:
    assert study.read(words.split()).axes == {key: values}


def test_a_points_key_is_the_hash_of_its_run(tmp_path: Path) -> None:
    for point in points(f"{FEDMF} -n 10 20 --seeds 0-1 --no-mlflow --threads 1 --data-dir x"):
        n, seed = point.values["clients_per_round"], point.values["seed"]
        same = resolve(f"{FEDMF} -n {n} --seed {seed}".split())
        assert point.key == same.digest()[: study.KEY_DIGITS]
        processes.job(point.key, point.config.to_dict(), tmp_path / "out", tmp_path, threads=1)
        assert resolve(["--config", str(tmp_path / f"{point.key}.json")]).digest() == point.config.digest()


def test_values_that_stand_there_twice_are_one_point() -> None:
    assert len(points(f"{FEDMF} -n 10 20 10 --lr 0.1 0.10")) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (f"{FEDMF} -n 10 x", "-n/--clients-per-round must be a whole number, not 'x'"),
        (f"{FEDMF} --rouns 1 2", "unknown flag --rouns; did you mean --rounds?"),
        (f"{FEDMF} --alpha 1 2", "unknown flag --alpha: it belongs to fedca, fedem, not to fedmf"),
        ("--algo fedem fedmf --dataset synthetic --alpha 1", "it belongs to fedca, fedem, not to fedmf"),
        (f"{FEDMF} --threads 1 2", "--threads changes no result, so it cannot be an axis"),
        (f"{FEDMF} --seed 1 --seeds 0-1", "--seed and --seeds are both given"),
        (f"{FEDMF} --rounds 3 --budget-value 5", "--rounds and --budget-value both say when the run ends"),
        ("10 20", "unexpected word '10'"),
        ("--algo fedmf", "--dataset is missing"),
        (f"{FEDMF} --seeds 0-999 --lr .1 .2 .3 .4 .5 .6 .7 .8 .9 1 2", "11,000 points"),
    ],
)
def test_a_wrong_line_is_one_error(words: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        study.read(words.split())
    assert says in str(caught.value)


def test_the_sweeps_own_flags_are_hinted_at() -> None:
    with pytest.raises(UsageError, match="unknown flag --dry-rn; did you mean --dry-run"):
        sweep.main(f"{FEDMF} -n 10 20 --dry-rn".split())
    with pytest.raises(UsageError, match="--jobs: must be a whole number from 1, not '0'"):
        sweep.main(f"{FEDMF} -n 10 20 --jobs 0".split())
    with pytest.raises(UsageError, match="--resume is for train.py"):
        sweep.main(f"{FEDMF} --resume auto".split())


STUDY = """
about = "two lines of one grid"
metrics = ["ndcg_10"]
[fixed]
algo = "fedmf"
dataset = "synthetic"
rounds = 9
[[grid]]
name = "n"
fixed = { local_epochs = 3 }
axes = { clients_per_round = [10, 20] }
[[grid]]
name = "e"
fixed = { clients_per_round = 10 }
axes = { local_epochs = [1, 3], seeds = "0-1" }
"""


def test_a_study_file(tmp_path: Path) -> None:
    found = study.read([], written(tmp_path, STUDY))
    assert (found.name, found.about, found.metrics) == ("s", "two lines of one grid", ("ndcg_10",))
    assert [(grid.name, grid.axes) for grid in found.grids] == [
        ("n", {"clients_per_round": [10, 20]}),
        ("e", {"local_epochs": [1, 3], "seed": [0, 1]}),
    ]
    # n 10, e 3, seed 0 is in both grids and is one run
    assert len(found.points) == 2 + 4 - 1
    assert found.axes == {"clients_per_round": [10, 20], "local_epochs": [1, 3], "seed": [0, 1]}


def test_the_command_line_overrules_a_study(tmp_path: Path) -> None:
    file = written(tmp_path, STUDY)
    found = study.read(["--rounds", "1", "--seeds", "5-6", "-e", "2"], file)
    assert {point.config.algorithm.rounds for point in found.points.values()} == {1}
    assert found.grids[1].axes == {"seed": [5, 6]} and found.axes["seed"] == [5, 6]
    visits = study.read(["--budget", "visits", "--budget-value", "40"], file)
    assert {point.config.limit for point in visits.points.values()} == {40}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("axs = {}", "unknown key 'axs'; did you mean axes?"),
        ('[axes]\nalgo = "fedmf"', "axes: algo must be a list of values, not 'fedmf'"),
        ("fixed = 3", "fixed must be a table"),
        ("grid = 3", "grid must be one table or more"),
        ("grid = []", "grid must be one table or more"),
        ("metrics = [1]", "metrics must be a list of words"),
        ("a = ", "line 1: Invalid value"),
        ('[fixed]\nalgo = "fedmf"\ndataset = "synthetic"\n[axes]\nlr = [0.1, "x"]', "--lr must be a number, not 'x'"),
    ],
)
def test_a_wrong_study_is_one_error(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        study.read([], written(tmp_path, text))
    assert str(caught.value).startswith(f"--study {tmp_path / 's.toml'}") and says in str(caught.value)


def test_the_sweeps_hash_is_that_of_its_points() -> None:
    one, other = (study.read(f"{FEDMF} {words}".split()) for words in ("-n 10 20 -e 1 3", "-e 3 1 -n 20 10"))
    assert one.hash8() == other.hash8() != study.read(f"{FEDMF} -n 10 20 -e 1 2".split()).hash8()


def test_the_study_of_protocols_has_every_algorithm() -> None:
    found = study.read([], ROOT / "sweeps" / "protocols.toml")
    assert {point.config.algo for point in found.points.values()} == set(registry.algorithms())


@pytest.mark.parametrize("file", STUDIES, ids=[file.stem for file in STUDIES])
def test_a_shipped_study_runs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = study.read(["--rounds", "1", "--no-mlflow", "--quiet"], file)
    assert found.about and len(found.points) > 5
    smallest = min(found.points.values(), key=lambda point: sweep.work(point)[2])
    if not (REAL / smallest.config.dataset).is_dir():
        pytest.skip(f"{smallest.config.dataset} is not here: `{FETCHED}` brings it")
    monkeypatch.setenv("FEDBENCH_DATA", str(REAL))
    summary = run.run(dataclasses.replace(smallest.config, out=tmp_path / "run"))
    assert summary["rounds"] == 1 and sweep.finished(tmp_path / "run", smallest)


def test_grids_of_one_name_share_a_table(tmp_path: Path) -> None:
    text = '[[grid]]\nname = "small"\nfixed = { algo = "fedmf", lr = 0.1 }\naxes = { seeds = "0-1" }\n'
    text += '[[grid]]\nname = "small"\nfixed = { algo = "popularity" }\n'
    found = study.read(["--dataset", "synthetic"], written(tmp_path, text))
    scores = dict(zip(found.points, (0.2, 0.4, 0.1), strict=True))
    facts = {"protocol_fingerprint": "f", "leaky": False, "rounds": 3, "client_visits": 0, "bytes_up": 0, "bytes_down": 0}
    summaries = {
        key: {"algo": point.config.algo, **facts, "val": {"ndcg_10": scores[key]}, "test": {"ndcg_10": scores[key]}}
        for key, point in found.points.items()
    }
    result_tables.write(found, summaries, {key: {"status": "finished", "seconds": 1.0} for key in found.points}, tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert text.count("**small**") == 1
    lines = [[word.strip() for word in line.split("|")] for line in text.splitlines()]
    assert [line[1:3] for line in lines if line[1:2] in (["fedmf"], ["popularity"])] == [["fedmf", "2"], ["popularity", "1"]]
    assert "0.3000 ±" in text and "best on validation [f]: algo=fedmf" in text
    assert text.count("± half of the 95% t interval of the mean over 2 seeds") == 1
