"""The report: every figure again from per_client.parquet by scipy, refusals, warnings, and a page that asks for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedbench.__main__ import main
from fedbench.commands import cli
from fedbench.data.protocol import Protocol
from fedbench.experiment.summary import protocol_fields
from fedbench.reporting.boards import RANKING, choose_boards, compare, read_runs

CLIENTS, SEEDS, CANDIDATES = 120, 5, 100
FINGERPRINT = {"clean": "1a" * 8, "published": "2b" * 8}


def metrics(rank: np.ndarray, prefix: str = "") -> dict[str, float]:
    return {
        f"{prefix}hr_10": float((rank <= 10).mean()),
        f"{prefix}ndcg_10": float(np.where(rank <= 10, 1 / np.log2(rank + 1), 0).mean()),
        f"{prefix}mrr": float((1 / rank).mean()),
    }


def write_run(folder: Path, algo: str, seed: int, skill: float, dataset: str = "toy", protocol: str = "clean", **settings: Any) -> Path:
    """A folder as a run leaves it. With `skill` s a client's rank is the best of s ranks drawn at random; popularity has skill 2."""
    rng, who = np.random.default_rng([seed, *algo.encode(), *dataset.encode()]), np.random.default_rng(7)

    def ranks(generator: np.random.Generator, best_of: float, of: int) -> np.ndarray:
        return np.ceil(of * generator.random(CLIENTS) ** best_of).clip(1).astype(np.int64)

    clients = pd.DataFrame({"user": [f"u{i}" for i in range(CLIENTS)], "train_items": who.integers(3, 90, CLIENTS)})
    for name, of in (("rank", CANDIDATES), ("full_rank", 1000)):
        clients[f"{name}_val"], clients[f"{name}_test"] = ranks(rng, skill, of), ranks(rng, skill, of)
        clients[f"{name}_popularity"] = ranks(who, 2, of)
    own = {
        part: {**metrics(clients[f"rank_{of}"].to_numpy()), **metrics(clients[f"full_rank_{of}"].to_numpy(), "full_")}
        for part, of in (("val", "val"), ("test", "test"), ("popularity", "popularity"))
    }
    everything = np.arange(1, CANDIDATES + 1)
    summary = {
        **{"algo": algo, "dataset": dataset, "protocol": protocol, "protocol_fingerprint": FINGERPRINT[protocol]},
        **{"leaky": protocol == "published", "seed": seed, "rounds": 3, "best_round": 3, "items": 1000},
        **{**own, "chance": {**metrics(everything), **metrics(np.arange(1, 1001), "full_")}, "clients": CLIENTS},
        **{"bytes_up": int(1000 * skill), "bytes_down": 500, "client_visits": int(100 * skill), "clients_never_seen": 0},
        **{"seconds_per_round": 0.1, "protocol_fields": {"eval_negatives": CANDIDATES - 1}},
    }
    folder.mkdir(parents=True)
    clients.to_parquet(folder / "per_client.parquet", index=False)
    lines = [{"round": r, "test/ndcg_10": own["test"]["ndcg_10"] * r / 3, "test/hr_10": own["test"]["hr_10"] * r / 3} for r in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {"algo": algo, "dataset": dataset, "seed": seed, "rounds": 3, "device": "cpu", **settings}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two algorithms with 5 seeds each."""
    root = tmp_path_factory.mktemp("runs")
    for seed in range(SEEDS):
        write_run(root / "good" / f"seed-{seed}", "good", seed, skill=4)
        write_run(root / "poor" / f"seed-{seed}", "poor", seed, skill=1.6)
    return root


def report(*words: str | Path) -> int:
    return main(["report", *map(str, words)])


@pytest.fixture(scope="module")
def made(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of their report."""
    out = tmp_path_factory.mktemp("made")
    assert report(runs, "--out", out) == 0
    return out


def facts(out: Path) -> dict[str, Any]:
    return json.loads((out / "report.json").read_text())


def ndcg(folder: Path, column: str = "rank_test") -> np.ndarray:
    """[seeds, U] from the files alone."""
    ranks = [pd.read_parquet(one / "per_client.parquet")[column].to_numpy() for one in sorted(folder.iterdir())]
    return np.stack([np.where(rank <= 10, 1 / np.log2(rank + 1), 0) for rank in ranks])


def test_scipy_finds_the_same_intervals_and_p_values(runs: Path, made: Path) -> None:
    (board,) = facts(made)["boards"]
    good, poor = board["methods"]
    assert [good["method"], poor["method"]] == ["good", "poor"] and good["seeds"] == list(range(SEEDS))
    values = {name: ndcg(runs / name) for name in ("good", "poor")}
    for row in (good, poor):
        table = values[row["method"]]

        def mean(s: np.ndarray, u: np.ndarray, table: np.ndarray = table) -> float:
            return table[np.ix_(s, u)].mean()

        samples = (np.arange(SEEDS), np.arange(CLIENTS))
        found = stats.bootstrap(samples, mean, vectorized=False, n_resamples=4000, method="percentile", rng=1).confidence_interval
        shown = row["test"]["ndcg_10"]
        assert shown["value"] == pytest.approx(table.mean())
        assert (shown["low"], shown["high"]) == pytest.approx((found.low, found.high), abs=0.06 * (found.high - found.low))
    floor = ndcg(runs / "good", "rank_popularity")[0]
    to_best = stats.wilcoxon(np.round(values["poor"].mean(axis=0) - values["good"].mean(axis=0), 12)).pvalue
    assert good["against_best"] is None and poor["against_best"]["p"] == pytest.approx(to_best)
    to_floor = [stats.wilcoxon(np.round(values[name].mean(axis=0) - floor, 12)).pvalue for name in ("good", "poor")]
    # Holm for two: the smaller one twice, the larger one as it is unless it would be below the smaller
    smaller, larger = sorted(to_floor)
    corrected = {smaller: min(1, 2 * smaller), larger: min(1, max(2 * smaller, larger))}
    shown = [row["against_floor"]["p"] for row in (good, poor)]
    assert shown == pytest.approx([corrected[p] for p in to_floor])
    difference = poor["against_best"]
    assert difference["value"] == pytest.approx(values["poor"].mean() - values["good"].mean())
    assert difference["low"] < difference["value"] < difference["high"] < 0


def test_every_metric_is_the_mean_of_the_summaries(runs: Path) -> None:
    found, _ = read_runs([runs])
    (board,), _ = choose_boards(found, None, False, [])
    for row in compare(board):
        for metric in RANKING:
            expected = np.mean([run.summary["test"][metric.key] for run in row.method.runs])
            assert row.estimates[metric.key].value == pytest.approx(expected)


def test_what_the_folder_holds(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(runs, "--out", tmp_path / "r") == 0
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"report.html", "report.md", "report.json", "figures"}
    pictures = {path.stem for path in (tmp_path / "r" / "figures").iterdir()}
    assert pictures == {f"toy-clean-{name}" for name in ("leaderboard", "convergence", "spread", "bytes", "visits")}
    markdown = (tmp_path / "r" / "report.md").read_text()
    assert all(f"(figures/{name}.png)" in markdown for name in pictures)
    said, page = capsys.readouterr().out, (tmp_path / "r" / "report.html").read_text()
    assert "1. good" in said and "2. poor" in said
    floor = ndcg(runs / "good", "rank_popularity")[0].mean()
    assert all(f"1 of 2 methods does not beat popularity on NDCG@10 ({floor:.4f}): poor" in text for text in (said, markdown, page))


def test_a_new_report_leaves_no_figure_of_the_old_one(runs: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "one", "good", 0, 4, dataset="another")
    assert report(other, "--out", tmp_path / "r") == 0 and report(runs, "--out", tmp_path / "r") == 0
    assert not list((tmp_path / "r" / "figures").glob("another*"))


def test_the_same_runs_give_the_same_page(runs: Path, tmp_path: Path) -> None:
    pages = []
    for _ in range(2):
        assert report(runs, "--out", tmp_path / "r") == 0
        pages.append((tmp_path / "r" / "report.html").read_bytes())
    assert pages[0] == pages[1]


class Page(HTMLParser):
    """Every tag, every address that a browser would ask for, every cell of a table and the text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.rows: list[list[tuple[dict[str, str | None], str]]] = []
        self.text = ""
        self._in_cell = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "action", "data", "poster")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append((dict(attributes), ""))
        self._in_cell = tag in ("th", "td")  # and not in the small print

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            attributes, text = self.rows[-1][-1]
            self.rows[-1][-1] = attributes, text + data
            self._in_cell = False

    def row(self, name: str) -> list[tuple[dict[str, str | None], str]]:
        """The leaderboard's row of this name."""
        return next(row for row in self.rows if row[0][1] == name)


def test_the_page_asks_for_nothing(made: Path) -> None:
    page = Page(made / "report.html")
    assert page.addresses and all(address.startswith(("#", "data:image/svg+xml;base64,")) for address in page.addresses)
    assert not {"link", "iframe", "object"} & set(page.tags) and page.tags.count("script") == 1
    source = (made / "report.html").read_text()
    assert "@import" not in source and "url(" not in source and "default-src 'none'" in source and "unsafe" not in source
    for tag in ("style", "script"):
        inline = source.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        allowed = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert inline and f"{tag}-src 'sha256-{allowed}'" in source


def test_names_are_text_and_not_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = """<img src=x onerror="alert('1')"> & |$a$`"""
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"{seed}", "<script>x</script>", seed, 4, dataset=odd, note=f"<b>{seed}</b>")
    assert report(tmp_path / "runs", "--out", tmp_path / "r") == 0
    page = Page(tmp_path / "r" / "report.html")
    assert page.tags.count("script") == 1 and "b" not in page.tags
    assert odd in page.text and "<script>x</script>" in page.text
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert "<script" not in (tmp_path / "r" / "report.md").read_text()
    assert all(path.parent == tmp_path / "r" / "figures" for path in tmp_path.rglob("*.png"))


def test_control_characters_are_spelt_out(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "odd\x1b[31m\x01\u202e", 0, 4)
    assert report(tmp_path / "a", "--out", tmp_path / "r") == 0
    page = Page(tmp_path / "r" / "report.html")
    assert "odd\\x1b[31m\\x01\\u202e" in page.text and not {"\x1b", "\x01", "\u202e"} & set(page.text)
    for picture in page.addresses:
        if picture.startswith("data:"):
            ElementTree.fromstring(base64.b64decode(picture.partition(",")[2]))  # a control character would make it no XML


def test_bold_counts_what_must_be_beaten(runs: Path, tmp_path: Path) -> None:
    assert report(runs / "poor", "--out", tmp_path) == 0
    page = Page(tmp_path / "report.html")
    for name, bold in (("popularity", True), ("1. poor", False), ("chance", False)):
        attributes, _ = page.row(name)[2]  # NDCG@10
        assert (attributes.get("class") == "best") == bold, name
    markdown = (tmp_path / "report.md").read_text()
    assert f"**{page.row('popularity')[2][1]}**" in markdown and "Bold: the best value of a column, among all rows" in page.text


def test_of_ten_methods_below_the_floor_one_sentence_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(15):
        write_run(tmp_path / "a" / str(number), "poor", 0, 1.2, lr=number)
    assert report(tmp_path / "a", "--out", tmp_path / "r") == 0
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("! ")]
    assert warning.startswith("! 15 of 15 methods do not beat popularity on NDCG@10 (") and warning.endswith(" and 3 more")
    source = (tmp_path / "r" / "report.html").read_text()
    assert source.count("do not beat popularity") == 1 and source.count('<ul class="warnings"><li>') == 1


def test_an_interval_says_what_it_is_over(runs: Path, tmp_path: Path) -> None:
    single = write_run(tmp_path / "single", "single", 0, 3)
    assert report(runs, single, "--out", tmp_path / "r") == 0
    page = Page(tmp_path / "r" / "report.html")
    for name, over in (("1. good", f"over {SEEDS} seeds and {CLIENTS} clients"), ("2. single", f"over {CLIENTS} clients (one seed)")):
        assert page.row(name)[2][0]["title"] == f"95% bootstrap interval {over}"


def test_cells_carry_what_they_are_sorted_by(runs: Path, made: Path) -> None:
    page = Page(made / "report.html")
    attributes, _ = page.row("1. good")[2]
    assert float(attributes["data-value"] or "") == pytest.approx(ndcg(runs / "good").mean())
    kilobytes = next(row for row in page.rows if [text for _, text in row[1:4]] == ["3", "3", "4 KB"])[3][0]
    assert kilobytes["data-value"] == "4000"
    assert "data-value" not in page.row("popularity")[1][0]  # it has no seeds


def test_the_style_has_dark_print_and_a_first_column_that_stays(made: Path) -> None:
    source = (made / "report.html").read_text()
    assert "@media screen and (prefers-color-scheme: dark)" in source and 'content="light dark"' in source
    assert "tr > :first-child { position: sticky; left: 0;" in source
    assert "[aria-sort] button::after { content: none; }" in source.partition("@media print")[2]
    pictures = [
        base64.b64decode(address.partition(",")[2]).decode() for address in Page(made / "report.html").addresses if "svg" in address
    ]
    assert pictures and all("@media (prefers-color-scheme:dark)" in picture for picture in pictures)
    # every colour of a figure is one that has a dark counterpart
    assert not [picture for picture in pictures if re.search(r"(fill|stroke): #", picture)]


def refused(words: list[str | Path], code: int, capsys: pytest.CaptureFixture[str], out: Path) -> str:
    assert report(*words, "--out", out) == code
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and not out.exists()
    return error


def test_two_fingerprints_are_refused_by_name(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leaky = write_run(tmp_path / "leaky", "good", 0, 9, protocol="published")
    error = refused([runs, leaky], 2, capsys, tmp_path / "r")
    assert FINGERPRINT["clean"] in error and FINGERPRINT["published"] in error and "LEAKY" in error and "--leak-gap" in error
    assert report(runs, leaky, "--fingerprint", FINGERPRINT["clean"][:6], "--out", tmp_path / "r") == 0
    assert "LEAKY" not in Page(tmp_path / "r" / "report.html").text


def test_the_leak_gap_is_a_section_of_its_own(runs: Path, tmp_path: Path) -> None:
    leaky = write_run(tmp_path / "leaky", "good", 0, 9, protocol="published")
    control = write_run(tmp_path / "control", "local", 0, 6, protocol="published")
    assert report(runs, leaky, control, "--leak-gap", "--out", tmp_path / "r") == 0
    (board,) = facts(tmp_path / "r")["boards"]
    assert [row["method"] for row in board["methods"]] == ["good", "poor"] and not board["leaky"]
    before, after = Page(tmp_path / "r" / "report.html").text.split("How much of a number is the leak")
    clean = ndcg(runs / "good").mean()
    own = json.loads((leaky / "summary.json").read_text())["test"]["ndcg_10"]
    assert "local cannot know the held-out item, and yet it beats chance" in after and "no clean run" in after
    assert "LEAKY" in after and f"{own - clean:+.4f}" in after and f"{own:.4f}" not in before
    assert (tmp_path / "r" / "figures" / "toy-leak-gap.png").exists()


def test_a_leak_gap_needs_both_sides(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--leak-gap" in refused([runs, "--leak-gap"], 2, capsys, tmp_path / "r")


def test_a_leaky_board_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", "local", 0, 6, protocol="published")
    assert report(tmp_path / "a", "--out", tmp_path / "r") == 0
    said = capsys.readouterr().out
    assert "LEAKY protocol" in said and "local cannot know the held-out item, and yet it beats chance" in said
    assert "LEAKY" in (tmp_path / "r" / "report.md").read_text() and "LEAKY" in Page(tmp_path / "r" / "report.html").text


def test_a_control_at_chance_is_no_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        write_run(tmp_path / "a" / str(seed), "local", seed, 1)
    assert report(tmp_path / "a", "--out", tmp_path / "r") == 0
    assert "!" not in capsys.readouterr().out


def test_settings_that_differ_name_a_method_and_make_a_heat_map(tmp_path: Path) -> None:
    for n in (10, 50):
        for e in (1, 3):
            for seed in (0, 1):
                settings = {"clients_per_round": n, "local_epochs": e, "device": f"cuda:{seed}"}
                write_run(tmp_path / "a" / f"{n}-{e}-{seed}", "good", seed, 2 + n / 50 + e, **settings)
    assert report(tmp_path / "a", "--out", tmp_path / "r") == 0
    (board,) = facts(tmp_path / "r")["boards"]
    assert {row["method"] for row in board["methods"]} == {f"good n={n} e={e}" for n in (10, 50) for e in (1, 3)}
    assert all(row["seeds"] == [0, 1] for row in board["methods"])
    assert (tmp_path / "r" / "figures" / "toy-clean-good-n-e.png").exists()


def test_a_run_that_was_repeated_counts_once(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(runs / "good" / "seed-0", tmp_path / "again")
    assert report(runs, tmp_path / "again", runs / "good", "--out", tmp_path / "r") == 0
    assert "run more than once" in capsys.readouterr().out
    assert facts(tmp_path / "r")["boards"][0]["methods"][0]["seeds"] == list(range(SEEDS))


@pytest.mark.parametrize(("algos", "datasets", "computed"), [(3, 2, True), (2, 2, False), (3, 1, None)])
def test_critical_differences_over_datasets(algos: int, datasets: int, computed: bool | None, tmp_path: Path) -> None:
    for dataset in range(datasets):
        for algo in range(algos):
            write_run(tmp_path / "a" / f"{dataset}{algo}", f"m{algo}", 0, 2 + 2 * algo, dataset=f"d{dataset}")
    assert report(tmp_path / "a", "--out", tmp_path / "r") == 0
    text = Page(tmp_path / "r" / "report.html").text
    assert ("Critical differences over datasets" in text) == (computed is not None)
    assert (tmp_path / "r" / "figures" / "mean-ranks.png").exists() == bool(computed)
    if computed is False:
        assert f"here are {datasets} and {algos}" in text


def test_bad_folders_are_one_line(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert "no such folder" in refused([tmp_path / "nowhere"], 2, capsys, tmp_path / "r")
    assert "no finished run" in refused([tmp_path / "empty"], 2, capsys, tmp_path / "r")
    broken = write_run(tmp_path / "broken", "good", 0, 4)
    (broken / "summary.json").write_text('{"algo": ')
    assert "broken/summary.json" in refused([runs, broken], 3, capsys, tmp_path / "r")
    (broken / "summary.json").write_text('{"algo": "good"}')
    assert "'dataset'" in refused([broken], 3, capsys, tmp_path / "r")
    (broken / "summary.json").unlink()
    assert "1 unfinished" in refused([broken], 2, capsys, tmp_path / "r")
    torn = write_run(tmp_path / "torn", "good", 0, 4)
    (torn / "per_client.parquet").write_bytes(b"PAR1 but no more")
    assert "torn" in refused([torn], 3, capsys, tmp_path / "r")
    (torn / "per_client.parquet").unlink()
    assert "per_client.parquet" in refused([torn], 3, capsys, tmp_path / "r")


def test_bad_flags_are_one_line(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r"
    assert "either folders" in refused([], 2, capsys, out)
    assert "did you mean --leak-gap?" in refused([runs, "--leek-gap"], 2, capsys, out)
    assert "ndcg_10" in refused([runs, "--metric", "ndcg"], 2, capsys, out)
    assert FINGERPRINT["clean"] in refused([runs, "--fingerprint", "ff"], 2, capsys, out)
    (tmp_path / "file").write_text("")
    assert report(runs, "--out", tmp_path / "file") == 2 and "is a file" in capsys.readouterr().err
    assert report("--help") == 0 and "--leak-gap" in capsys.readouterr().out


def test_older_runs_without_popularity_ranks_have_no_test_against_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", "good", 0, 4)
    clients = pd.read_parquet(folder / "per_client.parquet")
    clients.drop(columns=["rank_popularity", "full_rank_popularity"]).to_parquet(folder / "per_client.parquet")
    assert report(folder, "--out", tmp_path / "r") == 0
    assert facts(tmp_path / "r")["boards"][0]["methods"][0]["against_floor"] is None
    assert "no test against it" in Page(tmp_path / "r" / "report.html").text


def write_rating_run(folder: Path, algo: str, seed: int, fold: int, noise: float) -> Path:
    """A fold of a rating run. Some clients have no rating in it."""
    protocol = Protocol(split="kfold", folds=2, fold=fold)
    who, rng = np.random.default_rng([9, fold]), np.random.default_rng([seed, fold, *algo.encode()])
    counts = who.integers(0, 4, CLIENTS)

    def errors(mse: np.ndarray) -> dict[str, np.ndarray]:
        known = np.where(counts > 0, mse, np.nan)
        return {"mse": known, "mae": np.sqrt(known), "accuracy": np.where(counts > 0, (known < 0.25).astype(float), np.nan)}

    clients = pd.DataFrame({"user": [f"u{i}" for i in range(CLIENTS)], "train_items": np.arange(CLIENTS), "ratings_test": counts})
    for name, found in (("test", errors(noise * rng.exponential(size=CLIENTS))), ("means", errors(who.exponential(size=CLIENTS)))):
        clients = clients.assign(**{f"{key}_{name}": values for key, values in found.items()})
    floor = float(np.sqrt((clients["mse_means"] * counts).sum() / counts.sum()))
    summary = {
        **{"algo": algo, "dataset": "toy", "protocol": "clean", "protocol_fingerprint": protocol.fingerprint("data"), "leaky": False},
        **{"protocol_fields": protocol_fields(protocol), "data_checksum": "data", "seed": seed, "rounds": 1, "best_round": 1, "val": {}},
        **{"test": {"rmse": 1.0}, "user_item_mean": {"rmse": floor, "mae": floor, "accuracy": 0.5}, "items": 50},
    }
    folder.mkdir(parents=True)
    clients.to_parquet(folder / "per_client.parquet")
    (folder / "config.json").write_text(json.dumps({"algo": algo, "seed": seed, "fold": fold}))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_folds_of_a_seed_are_put_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for algo, noise in (("good", 0.6), ("poor", 1.1)):
        for seed in (0, 1):
            for fold in (0, 1):
                write_rating_run(tmp_path / "a" / algo / f"{seed}-{fold}", algo, seed, fold, noise)
    assert report(tmp_path / "a", "--out", tmp_path / "r") == 0
    (board,) = facts(tmp_path / "r")["boards"]
    good, poor = board["methods"]
    assert (good["method"], good["seeds"], board["metric"]) == ("good", [0, 1], "rmse")
    tables = {
        algo: [[pd.read_parquet(tmp_path / "a" / algo / f"{seed}-{fold}" / "per_client.parquet") for fold in (0, 1)] for seed in (0, 1)]
        for algo in ("good", "poor")
    }
    counts = sum(table["ratings_test"] for table in tables["good"][0])

    def squares(algo: str, seed: int, column: str = "mse_test") -> pd.Series:
        return sum((table[column] * table["ratings_test"]).fillna(0) for table in tables[algo][seed])

    for row in (good, poor):
        mean = np.mean([squares(row["method"], seed).sum() / counts.sum() for seed in (0, 1)])
        shown = row["test"]["rmse"]
        assert shown["value"] == pytest.approx(np.sqrt(mean)) and shown["low"] < shown["value"] < shown["high"]
    tested = counts > 0
    own = {algo: np.sqrt((sum(squares(algo, seed) for seed in (0, 1)) / 2 / counts)[tested]) for algo in tables}
    assert poor["against_best"]["p"] == pytest.approx(stats.wilcoxon(np.round(own["poor"] - own["good"], 12)).pvalue)
    floor = np.sqrt((squares("good", 0, "mse_means") / counts)[tested])
    expected = sorted(stats.wilcoxon(np.round(own[algo] - floor, 12)).pvalue for algo in own)
    shown = sorted(row["against_floor"]["p"] for row in (good, poor))
    assert shown == pytest.approx([min(1, 2 * expected[0]), min(1, max(2 * expected[0], expected[1]))])
    shutil.rmtree(tmp_path / "a" / "poor" / "1-1")
    error = refused([tmp_path / "a"], 2, capsys, tmp_path / "again")
    assert "poor, seed 1, was tested on folds 0, and good on 0, 1" in error


def test_an_experiment_from_its_folders_and_from_its_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real runs; the folder of the second is gone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert report("--experiment", "mine") == 2 and "there is no MLflow database" in capsys.readouterr().err
    words = "--algo fedmf --dataset synthetic --users 60 --items 120 --interactions 10 --rounds 2 --dim 4 --quiet --experiment mine"
    for seed in (0, 1):
        assert cli.main([*words.split(), "--seed", str(seed), "--out", f"runs/{seed}"]) == 0
    shutil.rmtree("runs/1")
    assert report("--experiment", "mine") == 0
    (board,) = facts(Path("report"))["boards"]
    assert board["methods"][0]["seeds"] == [0, 1]
    html = Page(Path("report/report.html")).text
    assert "runs/0" in html and "MLflow run " in html
    assert os.path.exists("report/figures/synthetic-clean-convergence.png")
    capsys.readouterr()
    assert report("--experiment", "yours") == 2 and "it has" in capsys.readouterr().err
