"""The result of a run, or of several: summary.json, per_client.parquet, the final table and the notes below it."""

from __future__ import annotations

import copy
import dataclasses
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbench.contract import registry
from fedbench.contract.algorithm import Tensors
from fedbench.contract.dataset import Interactions
from fedbench.data.protocol import Protocol
from fedbench.data.split import Split
from fedbench.evaluation.baselines import chance_metrics, mean_predictions, popularity_ranks, rating_floors
from fedbench.evaluation.metrics import client_errors, client_metrics, metrics_of, new_item_metrics, ranking_metrics, rating_spread, spread
from fedbench.evaluation.significance import FromChance, bootstrap, bounds, from_chance
from fedbench.experiment.folder import over_folds
from fedbench.settings.config import RunConfig
from fedbench.simulation.federation import COUNTED, Federation
from fedbench.text import human

SCHEMA = 1
"""version of summary.json: it changes when a key is renamed, removed or means something else, not when one is added"""
LONGEST_NAME = 28
"""of a row in the final table, which must fit a terminal of 80 columns"""


@dataclass
class Best:
    """The reported round so far: its score on the selection metric, higher being better, and what came of it."""

    round: int = 0
    score: float = float("-inf")
    outcome: dict[str, np.ndarray] = field(default_factory=dict)
    """every client's ranks (val, test, full_val, full_test: [U] each), or the predictions of the held-out ratings (test, val)"""
    state: Tensors = field(default_factory=dict)
    """what the server and the clients held in it, if that is kept"""
    unranked: Federation | None = None
    """the model whose full ranking is still to be computed"""

    def rank_all(self) -> None:
        """Compute the full ranking, if it was put off."""
        if self.unranked is not None:
            self.outcome |= {f"full_{part}": ranks for part, ranks in self.unranked.full_ranks().items()}
            self.unranked = None


def summarise(
    config: RunConfig, dataset: Interactions, federation: Federation, best: Best, lines: Sequence[dict[str, Any]], device: str
) -> dict[str, Any]:
    """summary.json; `lines` are those of metrics.jsonl."""
    split = federation.split
    reported = next((line for line in lines if line["round"] == best.round), {})
    exposure = {key.removeprefix("exposure/"): value for key, value in reported.items() if key.startswith("exposure/")}
    summary = {
        "schema": SCHEMA,
        "algo": config.algorithm.name,
        "dataset": dataset.name,
        "protocol": split.protocol.name,
        "protocol_fields": protocol_fields(split.protocol),
        "protocol_fingerprint": split.fingerprint,
        "data_checksum": split.checksum,
        "leaky": split.protocol.leaky,
        **({"control": control(split, best.outcome)} if config.failures.no_server else {}),
        "recipe": config.recipe,
        "seed": config.seed,
        "rounds": federation.round,
        "best_round": best.round,
        **(rating_results if split.held else ranking_results)(split, best.outcome),
        "clients": split.clients,
        "items": split.items,
        **({"exposure": exposure} if exposure else {}),
        **({"scores": scores} if (scores := readings(config.algorithm.scores, reported)) else {}),
        "bytes_up": federation.bytes_up,
        "bytes_down": federation.bytes_down,
        "client_visits": int(federation.visits.sum()),
        "clients_never_seen": int((federation.visits[split.trainers] == 0).sum()),
        **federation.counts,
        "seconds_per_round": float(np.median([line["seconds"] for line in lines])) if lines else 0.0,
        "peak_rss_mb": peak_rss_mb(),
        "device": device,
        "config_hash": config.digest(),
        **(source.facts() if (source := registry.source(type(config.algorithm))) else {}),
    }
    return summary | {"notes": notes(summary, split)}


def control(split: Split, outcome: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What summary.json says of a run with --no-server: how far its HR@10 on test is from chance; ratings have no such level."""
    if split.held:
        return {"what": "no server"}
    found = from_chance(outcome["test"], split.test_item[split.evaluated], split.chance(10))
    return {"what": "no server", "leaks": found.leaks, "standard_error": found.error, "standard_errors": found.errors}


def readings(names: Sequence[str], line: Mapping[str, float]) -> dict[str, dict[str, dict[str, float]]]:
    """Metrics of the method's further readings in the reported round: by name, then val and test."""
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in names}
    for key, value in line.items():
        name, _, rest = key.partition("/")
        part, _, metric = rest.partition("/")
        if name in found and metric:
            found[name].setdefault(part, {})[metric] = value
    return {name: parts for name, parts in found.items() if parts}


def refit_summary(rounds: int, ranks: dict[str, np.ndarray]) -> dict[str, Any]:
    """What summary.json says of the refit: test alone, for nothing was chosen there."""
    return {
        "rounds": rounds,
        "test": {**ranking_metrics(ranks["test"]), **ranking_metrics(ranks["full_test"], "full_"), **spread(ranks["test"])},
    }


def ranking_results(split: Split, ranks: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Metrics on validation and test, and what popularity and chance get."""
    metrics = {
        name: {**ranking_metrics(ranks[name]), **ranking_metrics(ranks[f"full_{name}"], "full_"), **spread(ranks[name])}
        for name in ("val", "test")
    }
    floor = popularity_ranks(split)
    popularity = {**ranking_metrics(floor["test"]), **ranking_metrics(floor["full_test"], "full_")}
    # by NDCG@10, on which rounds are chosen
    beats = metrics["test"]["ndcg_10"] > popularity["ndcg_10"]
    found = {**metrics, "popularity": popularity, "chance": chance_metrics(split), "beats_popularity": beats}
    return found | {"new_item": new_item_metrics(split, ranks)}


def rating_results(split: Split, predictions: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Rating metrics on validation (empty without validation data) and test, and those of the two mean predictors."""
    metrics: dict[str, dict[str, float]] = {"val": {}, **metrics_of(split, predictions)}
    for name, errors in _errors(split, predictions).items():
        metrics[name] |= rating_spread(errors["mse"])
    floors = rating_floors(split)
    return {**metrics, **floors, "beats_means": metrics["test"]["rmse"] < floors["user_item_mean"]["rmse"]}


def _errors(split: Split, predictions: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    return {name: client_errors(predictions[name], held, split.rating_min, split.rating_max) for name, held in split.held.items()}


def notes(summary: dict[str, Any], split: Split) -> list[str]:
    """Warnings that belong beside the numbers: a leaky protocol, a control, a method that does not beat the reference."""
    said = []
    if split.protocol.leaky:
        why = []
        if split.protocol.train_negatives == "leaky":
            why.append("held-out items are never drawn as training negatives")
        if split.protocol.select_on == "test":
            why.append("the round is chosen on test")
        said.append(f"LEAKY: {' and '.join(why)}; these numbers are inflated (see docs/protocol.md)")
    # a control is judged against chance, not against popularity
    if "control" in summary:
        return [*said, *control_notes(summary)]
    if split.held:
        mine, floor = summary["test"]["rmse"], summary["user_item_mean"]["rmse"]
        if not summary["beats_means"]:
            said.append(f"{summary['algo']} does NOT beat the user and item means: RMSE {mine:.4f} against {floor:.4f}")
        return said
    mine, floor = summary["test"], summary["popularity"]
    if all(mine[key] == value for key, value in floor.items()):  # this is popularity itself
        return said
    figures = f"HR@10 {mine['hr_10']:.4f} against {floor['hr_10']:.4f}, NDCG@10 {mine['ndcg_10']:.4f} against {floor['ndcg_10']:.4f}"
    if not summary["beats_popularity"]:
        said.append(f"{summary['algo']} does NOT beat popularity: {figures}")
    elif mine["hr_10"] <= floor["hr_10"]:
        said.append(f"{summary['algo']} beats popularity on NDCG@10 but not on HR@10: {figures}")
    return said


def control_notes(summary: dict[str, Any]) -> list[str]:
    """What belongs beside the numbers of a run whose server never learnt."""
    said, told = "CONTROL: the server never learnt (--no-server)", summary["control"]
    if "leaks" not in told:
        return [f"{said}; these numbers are what a client knows alone"]
    found = FromChance(summary["test"]["hr_10"], summary["chance"]["hr_10"], told["standard_error"])
    if found.leaks:
        return [f"{said}, yet it is above chance, so something LEAKS: {found}"]
    return [f"{said}, and it is at chance, as it must be: {found}"]


def final_table(summary: dict[str, Any], split: Split) -> str:
    """The result beside popularity and chance, or the mean predictors, and the notes."""
    rows = [(summary["algo"], summary["test"])]
    if "refit" in summary:
        rows.append((f"{summary['algo']} refit", summary["refit"]["test"]))
    if "new_user" in summary:
        rows.append((f"{summary['algo']}, {summary['new_user']['clients']:,} new users", summary["new_user"]))
    rows += [(f"{summary['algo']}, score {name}", parts["test"]) for name, parts in summary.get("scores", {}).items()]
    columns: tuple[str, ...]
    if split.held:
        columns = ("rmse", "mae", "accuracy")
        rows += [("user + item mean", summary["user_item_mean"]), ("global mean", summary["global_mean"])]
    else:
        columns = ("hr_10", "ndcg_10", "mrr", "full_hr_10", "full_ndcg_10")
        rows += [("popularity", summary["popularity"]), ("random (exact)", summary["chance"])]
    protocol = f"{summary['protocol']}{' LEAKY' if summary['leaky'] else ''}"
    head = f"{summary['dataset']}, protocol {protocol} [{summary['protocol_fingerprint']}]"
    if split.protocol.fold is not None:
        head += f", fold {split.protocol.fold} of {split.protocol.folds}"
    chosen = "the last" if split.protocol.select_on == "last" else f"chosen on {split.protocol.select_on}"
    sample = "" if split.sample is None else f" ({len(split.sample):,} of them ranked for)"
    lines = ["", f"{head}: {split.clients:,} clients{sample}, {split.items:,} items"]
    lines.append(f"test at round {summary['best_round']} of {summary['rounds']} ({chosen})")
    lines += metric_rows(rows, columns)
    lines.append(f"{summary['seconds_per_round']:.2f} s a round, {human(summary['bytes_up'])} up, {human(summary['bytes_down'])} down, "
                 f"{summary['client_visits']:,} client visits")  # fmt: skip
    if any(summary[name] for name in COUNTED):
        lines.append(", ".join(f"{summary[name]:,} {name}" for name in COUNTED) + " (clients, over all rounds)")
    return "\n".join([*lines, *(f"! {note}" for note in summary["notes"])])


def _number(value: float | None) -> float:
    """A metric as summary.json has it: null stands for what is not finite."""
    return float("nan") if value is None else value


def _shown(metrics: Mapping[str, float], key: str) -> str:
    return f"{_number(metrics[key]):.4f}" if key in metrics else "–"


def metric_rows(rows: Sequence[tuple[str, Mapping[str, float]]], columns: Sequence[str]) -> list[str]:
    """A table of some metrics, one named row each, that fits a terminal of 80 columns."""
    heads = {key: key.replace("_10", "@10").replace("_", " ").upper() for key in columns}
    wide = {key: max(len(head), len("0.0000")) + 2 for key, head in heads.items()}
    width = min(max(len(name) for name, _ in rows), LONGEST_NAME)
    lines = [" " * width + "".join(f"{head:>{wide[key]}}" for key, head in heads.items())]
    for name, metrics in rows:
        short = name if len(name) <= width else f"{name[: width - 1]}…"
        lines.append(f"{short:<{width}}" + "".join(_shown(metrics, key).rjust(wide[key]) for key in columns))
    return lines


def per_client(split: Split, outcome: Mapping[str, np.ndarray], refit: Mapping[str, np.ndarray] | None = None) -> pd.DataFrame:
    """One row a client: its name in the source, how much it trained on, its ranks and popularity's, or its errors and the means'."""
    columns = {"user": split.user_ids[split.evaluated].astype(str), "train_items": split.train_counts[split.evaluated]}
    if split.held:
        for name, errors in _errors(split, outcome).items():
            columns |= {f"{key}_{name}": value for key, value in errors.items()}
        means = client_errors(mean_predictions(split)["user_item_mean"], split.held["test"], split.rating_min, split.rating_max)
        columns |= {f"{key}_means": value for key, value in means.items() if key != "ratings"}
    else:
        floor = popularity_ranks(split)
        columns |= {f"{kind}rank_{name}": outcome[f"{kind}{name}"] for kind in ("", "full_") for name in ("val", "test")}
        columns |= {f"{kind}rank_popularity": floor[f"{kind}test"] for kind in ("", "full_")}
        columns |= {f"refit_{kind}rank_test": refit[f"{kind}test"] for kind in ("", "full_")} if refit else {}
    return pd.DataFrame(columns)


def over_runs(summaries: Sequence[dict[str, Any]], clients: Sequence[pd.DataFrame] = ()) -> dict[str, Any]:
    """Runs that differ in seed or fold as one summary: means in the same keys, `std` of val and test, and `runs`, one entry each.

    clients: the runs' rows a client; where all have the same clients, `interval` has the 95 % bootstrap intervals of the test metrics.
    """
    summaries = [{"schema": SCHEMA, **summary} for summary in summaries]  # a run that was finished before the key was there has none
    merged: dict[str, Any] = {key: _merge([summary[key] for summary in summaries]) for key in summaries[0]}
    folds = [summary["protocol_fields"]["fold"] for summary in summaries]
    if len(set(folds)) > 1:
        # no single fold's fingerprint is that of the mean: it may be compared with means over the same folds alone
        merged["protocol_fields"]["fold"] = None
        merged["protocol_fingerprint"] = over_folds(merged)
    if len({summary["seed"] for summary in summaries}) > 1:
        merged["seed"] = None
    kept = ("seed", "best_round", "protocol_fingerprint", "val", "test", *(["refit"] if "refit" in merged else []))
    merged["std"] = {part: _deviation([summary[part] for summary in summaries]) for part in kept if isinstance(merged[part], dict)}
    if intervals := _intervals(clients):
        merged["interval"] = {"test": {name: list(ends) for name, ends in intervals.items() if name in merged["test"]}}
    merged["runs"] = [{"fold": fold, **{key: summary[key] for key in kept}} for fold, summary in zip(folds, summaries, strict=True)]
    return merged


def _intervals(clients: Sequence[pd.DataFrame]) -> dict[str, tuple[float, float]]:
    """Intervals of the mean of each ranking metric over seeds and clients; empty if runs ranked for different clients, or did not rank."""
    # the bootstrap draws clients: it needs the same ones in every run, which folds do not have
    if not clients or any("rank_test" not in frame or not frame["user"].equals(clients[0]["user"]) for frame in clients):
        return {}
    columns = {"": "rank_test", "full_": "full_rank_test"}
    by_run = [
        {f"{prefix}{name}": values for prefix, rank in columns.items() for name, values in client_metrics(frame[rank].to_numpy()).items()}
        for frame in clients
    ]
    means = bootstrap([np.stack([run[name] for run in by_run]) for name in by_run[0]])
    return dict(zip(by_run[0], map(bounds, means), strict=True))


def _deviation(values: list[Any]) -> Any:
    """Sample standard deviation of a number, or of each number in a dict."""
    if isinstance(values[0], dict):
        return {key: _deviation([value[key] for value in values]) for key in values[0]}
    return statistics.stdev(values)


def _merge(values: list[Any]) -> Any:
    """One value for several: equal ones stay, dicts merge by key, lists concatenate, booleans are true if all are, numbers average."""
    first = values[0]
    if all(value == first for value in values):
        return copy.deepcopy(first)
    if isinstance(first, dict):
        return {key: _merge([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return list(dict.fromkeys(entry for value in values for entry in value))
    if isinstance(first, bool):
        return all(values)
    return statistics.fmean(values) if all(isinstance(value, int | float) for value in values) else None


def mean_table(merged: dict[str, Any]) -> str:
    """Mean, sample standard deviation and interval of each test metric of `over_runs`."""
    leaky = " LEAKY" if merged["leaky"] else ""
    over = {"seeds": [run["seed"] for run in merged["runs"]], "folds": [run["fold"] for run in merged["runs"]]}
    said = [f"{name} {', '.join(map(str, dict.fromkeys(values)))}" for name, values in over.items() if len(set(values)) > 1]
    lines = [f"{merged['algo']} on {merged['dataset']}, protocol {merged['protocol']}{leaky}, test over {' and '.join(said)}:"]
    tests = {"": (merged["test"], merged["std"]["test"])}
    if "refit" in merged:
        tests["refit "] = merged["refit"]["test"], merged["std"]["refit"]["test"]
    width = 17 + max(map(len, tests))
    intervals = merged.get("interval", {}).get("test", {})
    for prefix, (means, deviations) in tests.items():
        for name, mean in means.items():
            ends = "" if prefix or name not in intervals else "  [{:.4f}, {:.4f}]".format(*intervals[name])
            lines.append(f"  {prefix + name:<{width}} {mean:.4f} ± {deviations[name]:.4f}{ends}")
    lines.append(
        f"± standard deviation over {' × '.join(f'{len(set(values))} {name}' for name, values in over.items() if len(set(values)) > 1)}"
    )
    lines += ["[ ] 95 % bootstrap interval of the mean, over seeds and clients"] if intervals else []
    return "\n".join(lines)


def protocol_fields(protocol: Protocol) -> dict[str, Any]:
    """The resolved protocol, as flags name it."""
    fields = dataclasses.asdict(protocol)
    return {"protocol": fields.pop("name"), **fields}


def peak_rss_mb() -> float:
    """Largest resident memory of this process so far, in MB."""
    with suppress(OSError, KeyError):  # getrusage counts the process that started this one too
        status = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) / 1e3
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3
