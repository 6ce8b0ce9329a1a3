"""`python -m fedbench report`: finished runs compared, with intervals and tests, in one self-contained HTML page."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.errors import UsageError
from fedbench.evaluation import significance
from fedbench.evaluation.significance import LEVEL, RESAMPLES
from fedbench.reporting import charts
from fedbench.reporting.board_figures import figures
from fedbench.reporting.boards import (
    RANKING,
    RATING,
    Board,
    Comparison,
    Estimate,
    Method,
    Row,
    choose_boards,
    compare,
    is_popularity,
    keep,
    read_runs,
)
from fedbench.reporting.charts import Bar
from fedbench.reporting.page import Cell, Figure, Page, Section, Table, listed, slug, write
from fedbench.settings.parser import Parser
from fedbench.text import human, say
from fedbench.tracking import views
from fedbench.tracking.mirror_process import finished_folders
from fedbench.tracking.run_log import mlflow_run_of

EPILOG = """A leaderboard holds runs of one fingerprint: the same data, split and candidates. Two fingerprints for one dataset are refused;
--fingerprint keeps one of them, and --leak-gap shows LEAKY runs beside clean ones in a section of their own.

examples:
  python -m fedbench report runs
  python -m fedbench report runs/filmtrust runs/ml-100k --out report
  python -m fedbench report --experiment fedbench
  python -m fedbench report runs/leak --leak-gap
"""
KEYS = [metric.key for metric in (*RANKING, *RATING)]
ALPHA = 0.05
METHOD = (
    f"""Intervals: {LEVEL:.0%} percentile bootstrap, {RESAMPLES:,} resamples. Each resample draws as many clients as there are, with
    replacement, and, apart from that, as many seeds as the method has, with replacement; its value is the mean over all pairs of a
    drawn seed and a drawn client. All methods of a table meet the same drawn clients, so the interval of a difference is a paired
    one. With one seed only clients are resampled. A few seeds show little of how much seeds vary: such intervals are rather too
    narrow.""",
    """p-values: two-sided Wilcoxon signed-rank test over clients on the leading metric, each client's value being its mean over seeds;
    clients without a difference do not count. Corrected by Holm's method over all comparisons of the table with the same other (the
    best, or the floor). The best is the best on test, so a p-value against it describes rather than promises. The test is over the
    clients of this split: it does not speak of other datasets.""",
    """Critical differences: Friedman's test on the methods' ranks on each dataset, and Nemenyi's critical difference of mean ranks at the 5
    % level. Where a method was run with several settings, the one with the best validation result stands for it.""",
    """Ratings: every client counts by how many of its ratings are held out, and the folds of a seed are put together, so that each
    rating is tested once. RMSE is the root of the mean over all of them. In the Wilcoxon test a client's value is its own RMSE.""",
    "Costs are those of the whole run, not of the rounds up to the reported one. Bands of curves are the lowest and the highest seed.",
)


def main(argv: list[str]) -> int:
    """0 if the report was written."""
    given = _arguments(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folders = given.runs if given.experiment is None else finished_folders(given.experiment, Path(scratch))
        runs, remarks = read_runs(folders)
        # a run that was downloaded has no folder that stays
        sources = [str(run.folder).replace(f"{scratch}/", "MLflow run ") for run in runs]
        copies = {run.folder: mlflow_run_of(run.folder) for run in runs}
    if given.fingerprint:
        runs = keep(runs, given.fingerprint)
    boards, beside = choose_boards(runs, given.metric, given.leak_gap, remarks)
    page = compose(boards, beside, remarks, sources, shlex.join(["python", "-m", "fedbench", "report", *argv]))
    path = write(page, given.out)
    say(page.to_text())
    say(f"\nreport  {path}")
    compared = {run_id: str(run.config.get("experiment")) for run in runs if (run_id := copies[run.folder])}
    for link in views.of_report(compared, page.title, given.out):
        say(f"charts  {link}")
    return 0


def parser() -> Parser:
    made = Parser(
        prog="python -m fedbench report",
        usage="python -m fedbench report RUNS ... | --experiment NAME [flags]",
        description="Compare finished runs: one HTML page that stands alone, its figures as PNG, its tables as Markdown and JSON.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("runs", nargs="*", type=Path, metavar="RUNS", help="folders of runs, or folders above them")
    made.add_argument("--experiment", metavar="NAME", help="the finished runs of an MLflow experiment instead")
    made.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="folder of the report (default: report)")
    made.add_argument("--metric", metavar="NAME", help=f"what is compared (default: ndcg_10, of ratings rmse): {', '.join(KEYS)}")
    made.add_argument("--fingerprint", nargs="+", default=[], metavar="HEX", help="keep only runs whose fingerprint starts so")
    made.add_argument("--leak-gap", action="store_true", help="show LEAKY runs beside clean ones, in a section of their own")
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    return made


def _arguments(argv: list[str]) -> argparse.Namespace:
    given = parser().read(argv)
    if given.metric not in (None, *KEYS):
        raise UsageError(f"--metric must be one of {', '.join(KEYS)}, not {given.metric!r}")
    if bool(given.runs) == (given.experiment is not None):
        raise UsageError("report takes either folders of runs, such as `report runs`, or --experiment NAME")
    if given.out.exists() and not given.out.is_dir():
        raise UsageError(f"--out {given.out}: is a file; name a folder")
    return given


def compose(boards: Sequence[Board], beside: Sequence[Board], remarks: Sequence[str], sources: Sequence[str], command: str) -> Page:
    """The whole report."""
    compared = [(board, compare(board)) for board in boards]
    sections = [board_section(board, rows) for board, rows in compared]
    if len({board.dataset for board in boards}) > 1:
        sections.append(datasets_section(boards))
    if beside:
        sections.append(leak_section(compared, [(board, compare(board)) for board in beside]))
    if remarks:
        sections[0] = Section(**{**vars(sections[0]), "remarks": [*sections[0].remarks, *remarks]})
    datasets = ", ".join(dict.fromkeys(board.dataset for board in boards))
    facts = {"command": command, "boards": [board_facts(board, rows) for board, rows in compared]}
    return Page(f"fedbench report: {datasets}", f"{len(sources)} runs · {command}", sections, METHOD, sources, facts)


def board_section(board: Board, rows: Sequence[Row]) -> Section:
    """One dataset: the leaderboard, what must be said about it, costs, spread and figures."""
    summary = board.first.summary
    lead = f"Protocol {summary['protocol']} [{board.fingerprint}], {board.users:,} clients, {summary.get('items', 0):,} items. "
    lead += f"Best first by {board.lead.label}, on test, at the round that each run reports."
    title = f"{board.dataset}, protocol {summary['protocol']}{', ratings' if board.lead in RATING else ''}"
    tables = [leaderboard(board, rows), differences(board, rows), *new_users(board), *readings(board), costs(board), spread_table(board)]
    return Section(title, lead, board.leaky, warnings(board, rows), remarks_on(board), tables, list(figures(board, rows)))


def warnings(board: Board, rows: Sequence[Row]) -> list[str]:
    """Warnings: leaks, controls above chance, and methods that do not beat the floor."""
    said = []
    if board.leaky:
        said.append("LEAKY protocol: these numbers are inflated by the held-out items; compare them with nothing but each other")
    for row in rows:
        if row.method.control:
            said += beats_chance(board, row)
    return said + below_floor(board, rows)


def beats_chance(board: Board, row: Row) -> list[str]:
    """A method that cannot know the held-out item must be at chance: HR@10 within 3 standard errors of it."""
    chance = board.chance.get("hr_10")
    if chance is None:
        return []
    hit = row.estimates["hr_10"].value
    # on an honest protocol its hits are independent over seeds, and over clients unless all are sent one table, which its runs know
    error = (chance * (1 - chance) / board.users) ** 0.5
    told = [run.summary.get("control", {}).get("standard_error", error) for run in row.method.runs]
    error = (sum(one**2 for one in told) / len(told) / len(row.method.seeds)) ** 0.5
    if hit - chance <= 3 * error:
        return []
    figures = f"HR@10 {hit:.4f}, chance {chance:.4f} ({(hit - chance) / error:+.1f} standard errors)"
    return [f"LEAK: {row.method.name} cannot know the held-out item, and yet it beats chance: {figures}"]


def below_floor(board: Board, rows: Sequence[Row]) -> list[str]:
    """One sentence on the methods that do not clear popularity, or not significantly."""
    judged = [row for row in rows if not row.method.control and not is_popularity(row.method)]
    if board.floor is None:
        return []
    (name, values), lead = board.floor, board.lead
    least = values[lead.key]
    # what diverged is no number, and not above
    above = [row for row in judged if lead.sign * (row.estimates[lead.key].value - least) > 0]
    below = [row.method.name for row in judged if row not in above]
    unsure = [row.method.name for row in above if row.to_floor is not None and row.to_floor.p >= ALPHA]
    goal = f"{name} on {lead.label} ({least:.4f})"
    if len(judged) == 1 and below + unsure:
        return [f"{below[0]} does not beat {goal}" if below else f"{unsure[0]} is better than {goal}, but not significantly"]
    if below:
        more = f"; {len(unsure)} more {_verb(unsure, 'is', 'are')} better, but not significantly: {listed(unsure)}" if unsure else ""
        return [f"{len(below)} of {len(judged)} methods {_verb(below, 'does', 'do')} not beat {goal}: {listed(below)}{more}"]
    if unsure:
        clearly = f"{_verb(unsure, 'is', 'are')} better than {goal}, but not significantly"
        return [f"{len(unsure)} of {len(judged)} methods {clearly}: {listed(unsure)}"]
    return []


def _verb(names: Sequence[str], one: str, several: str) -> str:
    return one if len(names) == 1 else several


def remarks_on(board: Board) -> list[str]:
    """What a reader should know about the runs."""
    said = []
    single = [method.name for method in board.methods if len(method.seeds) == 1 and not is_popularity(method)]
    if single:
        who = "every method" if len(single) == len(board.methods) > 1 else listed(single)
        said.append(f"One seed only, so that the interval is over clients alone: {who}")
    controls = [method.name for method in board.methods if method.control]
    if controls:
        said.append(f"Controls, which must be at chance on an honest protocol: {listed(controls)}")
    return said


def leaderboard(board: Board, rows: Sequence[Row]) -> Table:
    """Metrics with their intervals; the floor and chance stand among the methods by their value."""
    lead = board.lead
    lines: list[tuple[float, bool, list[Cell]]] = []
    for number, row in enumerate(rows):
        tip = f"{LEVEL:.0%} bootstrap interval {board.drawn_over(row.method)}"
        cells = [_score(found.value, _range(found), tip=tip) for found in row.estimates.values()]
        seeds = Cell(str(len(row.method.seeds)), value=len(row.method.seeds))
        lines.append((row.estimates[lead.key].value, False, [Cell(f"{number + 1}. {row.method.name}"), seeds, *cells]))
    for name, values in board.references:
        if not any(name == "popularity" and is_popularity(row.method) for row in rows):
            lines.append((values[lead.key], True, [Cell(name), Cell(""), *(_score(values[metric.key]) for metric in board.metrics)]))
    lines.sort(key=lambda line: -lead.sign * line[0])
    table = [cells for *_, cells in lines]
    for column, metric in enumerate(board.metrics, start=2):
        mark_best(table, column, metric.sign)
    caption = f"Below each value its {LEVEL:.0%} bootstrap interval over seeds and clients (over clients alone where there is one seed). "
    caption += "Bold: the best value of a column, among all rows; values that read the same share it. Bold says nothing of significance, "
    caption += "which the next table does."
    columns = ["method", "seeds", *(metric.label for metric in board.metrics)]
    return Table("Leaderboard", columns, table, caption, frozenset(i for i, line in enumerate(lines) if line[1]))


def mark_best(table: Sequence[list[Cell]], column: int, sign: int) -> None:
    """Mark the best cells of a column, in place; the floor and chance count too."""
    known = [cells[column] for cells in table if cells[column].value is not None]
    if known:
        # by the text: values that read the same are equal to a reader
        best = max(known, key=lambda cell: sign * (cell.value or 0)).text
        for cells in table:
            if cells[column].text == best:
                cells[column] = cells[column]._replace(mark="best")


def differences(board: Board, rows: Sequence[Row]) -> Table:
    """The leading metric against the best method's and the floor's."""
    floor = board.floor[0] if board.floor else "floor"
    columns = ["method", "to the best", "p", f"to {floor}", "p"]
    lines = []
    for number, row in enumerate(rows):
        cells = [*_difference(row.to_best, board.lead.sign), *_difference(row.to_floor, board.lead.sign)]
        lines.append([Cell(f"{number + 1}. {row.method.name}"), *cells])
    caption = f"Differences in {board.lead.label}, below each its {LEVEL:.0%} bootstrap interval over seeds and clients. "
    caption += "p: Wilcoxon signed-rank test over clients, Holm-corrected. "
    caption += f"Green is better and red worse at the {ALPHA:.0%} level."
    if board.floor_values is None:
        caption += f" These runs do not tell {floor}'s result of each client, so there is no test against it."
    return Table("Significance", columns, lines, caption)


def new_users(board: Board) -> list[Table]:
    """Users kept out of training beside those that took part, if the protocol keeps any out."""
    if "new_user" not in board.first.summary:
        return []
    shown = [metric for metric in RANKING if metric in board.metrics]
    columns = ["method", "new users", *(label for metric in shown for label in (metric.label, "new users"))]
    rows = []
    for number, method in enumerate(board.methods):
        values = [_score(method.mean(part, metric.key)) for metric in shown for part in ("test", "new_user")]
        rows.append([Cell(f"{number + 1}. {method.name}"), _amount(method.mean("new_user", "clients")), *values])
    caption = (
        "Users who were not in training learn what is private to them from their own items, the shared part being frozen; means over seeds."
    )
    return [Table("New users", columns, rows, caption)]


def readings(board: Board) -> list[Table]:
    """Further readings of one model, such as with a client's own table alone, if a method has any."""
    shown = [metric for metric in RANKING if metric in board.metrics and not metric.key.startswith("full_")]
    rows = []
    for number, method in enumerate(board.methods):
        for name in dict.fromkeys(name for run in method.runs for name in run.summary.get("scores", {})):
            values = [_score(method.mean("scores", name, "test", metric.key)) for metric in shown]
            rows.append([Cell(f"{number + 1}. {method.name}"), Cell(name), *values])
    caption = "One model scored in other ways, at the round that its own score chose; means over seeds."
    return [Table("Readings of one model", ["method", "score", *(metric.label for metric in shown)], rows, caption)] if rows else []


def costs(board: Board) -> Table:
    """Rounds, bytes, client visits and seconds of each method, as means over seeds."""
    columns = ["method", "reported round", "rounds", "bytes up", "bytes down", "client visits", "clients never seen", "seconds a round"]
    rows = []
    for number, method in enumerate(board.methods):
        best = sorted({int(run.summary.get("best_round") or 0) for run in method.runs})
        rows.append([
            Cell(f"{number + 1}. {method.name}"),
            Cell(str(best[0]) if len(best) == 1 else f"{best[0]}–{best[-1]}", value=sum(best) / len(best)),
            _amount(method.mean("rounds"), "{:g}".format),
            _amount(method.mean("bytes_up"), human),
            _amount(method.mean("bytes_down"), human),
            _amount(method.mean("client_visits")),
            _amount(method.mean("clients_never_seen")),
            _amount(method.mean("seconds_per_round"), "{:.3g}".format),
        ])  # fmt: skip
    return Table("Costs", columns, rows, "Of whole runs, means over seeds. Seconds depend on the machine and on what else ran on it.")


def spread_table(board: Board) -> Table:
    """Metrics of the worst clients, and by how much a client trains on."""
    keys = [("mrr_p10", "MRR, 10th percentile"), ("mrr_worst_decile", "MRR, worst tenth")]
    if board.lead in RATING:
        keys = [("rmse_p90", "RMSE, 90th percentile"), ("rmse_worst_decile", "RMSE, worst tenth")]
    thirds = size_thirds(board)
    columns = ["method", *(label for _, label in keys), *(f"{board.lead.label}, {name}" for name, _ in thirds)]
    rows = []
    for number, method in enumerate(board.methods):
        cells = [Cell(f"{number + 1}. {method.name}"), *(_score(method.mean("test", key)) for key, _ in keys)]
        values = board.values(method, board.lead)
        rows.append([*cells, *(_score(board.total(board.lead, values, inside)) for _, inside in thirds)])
    return Table("Spread over clients", columns, rows, "Means over seeds. Clients in thirds by how many training items they have.")


def size_thirds(board: Board) -> list[tuple[str, np.ndarray]]:
    """Clients by how much they train on: a label and who belongs to it [U]; equal sizes stay together, so there can be fewer than three."""
    sizes = board.first.clients["train_items"].to_numpy()[board.tested]
    # thirds that are equal fall together: many clients may have one size
    group = np.searchsorted(np.unique(np.quantile(sizes, [1 / 3, 2 / 3])), sizes, side="left")
    return [(f"{sizes[group == one].min()}–{sizes[group == one].max()} items", group == one) for one in np.unique(group)]


def representative(board: Board) -> dict[str, Method]:
    """One method an algorithm: of several settings the one with the best validation result; without one, the table's first."""
    chosen: dict[str, Method] = {}
    key = board.lead.key
    for method in board.methods:
        name = method.runs[0].name
        score, held = method.mean("val", key), chosen[name].mean("val", key) if name in chosen else np.nan
        if name not in chosen or board.lead.sign * (score - held) > 0:
            chosen[name] = method
    return chosen


def datasets_section(boards: Sequence[Board]) -> Section:
    """Friedman and Nemenyi over datasets, or why not."""
    title = "Critical differences over datasets"
    # under a leaky protocol ranks would say who uses the leak best
    honest = [board for board in boards if not board.leaky and board.lead == boards[0].lead]
    chosen = [representative(board) for board in honest]
    everywhere = [name for name in chosen[0] if all(name in one for one in chosen)] if chosen else []
    if len(honest) < 2 or len(everywhere) < 3:
        need = "at least 2 datasets with one metric and an honest protocol, and 3 methods that ran on all of them"
        return Section(title, f"Not computed: it needs {need}; here are {len(honest)} and {len(everywhere)}.")
    lead = honest[0].lead
    scores = np.array(
        [[board.total(lead, board.values(one[name], lead)) for name in everywhere] for board, one in zip(honest, chosen, strict=True)]
    )
    found = significance.critical_difference(lead.sign * scores)
    order = np.argsort(found.ranks, kind="stable")
    rows = [[Cell(everywhere[i]), _amount(found.ranks[i], "{:.2f}".format), *map(_score, scores[:, i])] for i in order]
    table = Table(f"Mean ranks by {lead.label}", ["method", "mean rank", *(board.dataset for board in honest)], rows)
    drawn = charts.draw(
        "mean-ranks",
        "mean rank of each method",
        lambda: charts.mean_ranks(everywhere, found.ranks, found.difference, "mean rank over datasets"),
    )
    told = f"{len(honest)} datasets, {len(everywhere)} methods. Friedman's p that all are alike: {_p(found.p)}. "
    told += f"Mean ranks that differ by less than {found.difference:.2f} are not told apart at the 5 % level (Nemenyi)."
    left = sorted({name for one in chosen for name in one} - set(everywhere))
    remarks = [f"Not on every dataset, so left out here: {', '.join(left)}"] if left else []
    if len(honest) < 5:
        remarks.append(f"{len(honest)} datasets are few: this test tells hardly anything apart")
    return Section(
        title, told, remarks=remarks, tables=[table], figures=[Figure(drawn, "A line joins a method with those not told apart from it.")]
    )


def leak_section(clean: Sequence[tuple[Board, list[Row]]], leaky: Sequence[tuple[Board, list[Row]]]) -> Section:
    """Algorithms under a clean protocol beside a LEAKY one, by dataset."""
    tables, pictures, warned = [], [], []
    for board, rows in clean:
        others = [(other, theirs) for other, theirs in leaky if other.dataset == board.dataset]
        if others:
            warned.append(f"{board.dataset}: rows marked LEAKY are inflated; they are here to show by how much")
            warned += [text for other, theirs in others for row in theirs if row.method.control for text in beats_chance(other, row)]
            tables.append(leak_table(board, rows, others))
            pictures.append(leak_figure(board, [(board, rows), *others]))
    return Section("Leak gap", "How much of a number is the leak.", True, warned, tables=tables, figures=pictures)


def leak_table(board: Board, rows: Sequence[Row], others: Sequence[tuple[Board, list[Row]]]) -> Table:
    metrics, key = board.metrics[:2], board.lead.key
    leaked = {name for other, theirs in others for name in by_algorithm(other, theirs)}
    honest = {name: row for name, row in by_algorithm(board, rows).items() if name in leaked}
    lines, references = [], set()
    for where, found in ((board, honest), *((other, by_algorithm(other, theirs)) for other, theirs in others)):
        leaky = where.leaky
        protocol = Cell(f"{where.first.summary['protocol']}{' LEAKY' if leaky else ''}", where.fingerprint, "bad" if leaky else "")
        for name, row in found.items():
            cells = [
                Cell(row.method.name),
                protocol,
                *(_score(row.estimates[m.key].value, _range(row.estimates[m.key])) for m in metrics),
            ]
            gap = row.estimates[key].value - honest[name].estimates[key].value if name in honest else None
            lines.append([*cells, Cell("no clean run" if gap is None else f"{gap:+.4f}", "", "bad", gap) if leaky else Cell("")])
        for name, values in where.references:
            if name == "popularity" and any(is_popularity(row.method) for row in found.values()):
                continue
            references.add(len(lines))
            lines.append([Cell(name), protocol, *(_score(values[m.key]) for m in metrics), Cell("")])
    caption = "The protocols can differ in the split too, and so in clients and candidates: hold each row against its own popularity and "
    caption += f"chance. Below each value its {LEVEL:.0%} bootstrap interval over seeds and clients."
    columns = ["method", "protocol", *(metric.label for metric in metrics), f"{board.lead.label} above clean"]
    return Table(f"{board.dataset}: clean beside LEAKY", columns, lines, caption, frozenset(references))


def leak_figure(board: Board, sides: Sequence[tuple[Board, Sequence[Row]]]) -> Figure:
    found = [(where.leaky, by_algorithm(where, rows)) for where, rows in sides]
    names = dict.fromkeys(name for leaky, rows in found if leaky for name in rows)
    bars = [Bar(name, *rows[name].estimates[board.lead.key], leaky) for name in names for leaky, rows in found if name in rows]
    what = f"{board.dataset}: {board.lead.label}, clean and LEAKY"
    drawn = charts.draw(slug(f"{board.dataset}-leak-gap"), what, charts.intervals, bars, f"test {board.lead.label}", what, False)
    return Figure(drawn, f"{board.lead.label} on test with its {LEVEL:.0%} bootstrap interval over seeds and clients; red is LEAKY.")


def by_algorithm(board: Board, rows: Sequence[Row]) -> dict[str, Row]:
    """The row of the setting that stands for each algorithm."""
    chosen = representative(board).items()
    return {name: row for name, method in chosen for row in rows if row.method is method}


def board_facts(board: Board, rows: Sequence[Row]) -> dict[str, Any]:
    """The leaderboard's numbers, for report.json."""

    def against(found: Comparison | None) -> dict[str, float] | None:
        return None if found is None else {**found.difference._asdict(), "p": found.p}

    methods = [
        {
            "method": row.method.name,
            "seeds": row.method.seeds,
            "test": {key: found._asdict() for key, found in row.estimates.items()},
            "against_best": against(row.to_best),
            "against_floor": against(row.to_floor),
        }
        for row in rows
    ]
    summary = board.first.summary
    return {"dataset": board.dataset, "protocol": summary["protocol"], "protocol_fingerprint": board.fingerprint, "leaky": board.leaky,
            "metric": board.lead.key, "floor": board.floor and board.floor[0], "methods": methods}  # fmt: skip


def _difference(found: Comparison | None, sign: int) -> list[Cell]:
    if found is None:
        return [Cell("–"), Cell("")]
    value = found.difference.value
    mark = "" if found.p >= ALPHA else "good" if sign * value > 0 else "bad"
    return [Cell(f"{value:+.4f}", _range(found.difference), mark, value), Cell(_p(found.p), "", mark, found.p)]


def _range(found: Estimate) -> str:
    return f"[{found.low:.4f}, {found.high:.4f}]"


def _score(value: float, small: str = "", tip: str = "") -> Cell:
    return Cell(f"{value:.4f}", small, value=value, tip=tip) if np.isfinite(value) else Cell("–")


def _amount(value: float, form: Callable[[float], str] = "{:,.0f}".format) -> Cell:
    return Cell(form(value), value=value) if np.isfinite(value) else Cell("–")


def _p(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}" if value < 0.1 else f"{value:.2f}"
