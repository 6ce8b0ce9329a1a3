"""What is said of a run when it is over: summary.json, the row a client, the final table and the words beside it."""

from __future__ import annotations

import dataclasses
import resource
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from fedbench.algorithm import Tensors
from fedbench.config import RunConfig
from fedbench.data import Interactions
from fedbench.evaluate import chance_metrics, popularity_ranks, ranking_metrics, spread
from fedbench.federation import Federation
from fedbench.protocol import Protocol
from fedbench.split import Split


@dataclass
class Best:
    """The reported round so far: its score on the selection metric and every client's ranks in it."""

    round: int = 0
    score: float = -1.0
    ranks: dict[str, np.ndarray] = field(default_factory=dict)
    """val, test, full_val, full_test: [U] each"""
    state: Tensors = field(default_factory=dict)
    """what the server and the clients held in it, if that is kept"""


def summarise(
    config: RunConfig, dataset: Interactions, federation: Federation, best: Best, seconds: list[float], device: str
) -> dict[str, Any]:
    """summary.json"""
    parts = federation.split
    metrics = {
        name: {**ranking_metrics(best.ranks[name]), **ranking_metrics(best.ranks[f"full_{name}"], "full_"), **spread(best.ranks[name])}
        for name in ("val", "test")
    }
    floor = popularity_ranks(parts)
    popularity = {**ranking_metrics(floor["test"]), **ranking_metrics(floor["full_test"], "full_")}
    summary = {
        "algo": config.algo,
        "dataset": dataset.name,
        "protocol": parts.protocol.name,
        "protocol_fields": protocol_fields(parts.protocol),
        "protocol_fingerprint": parts.fingerprint,
        "leaky": parts.protocol.leaky,
        "recipe": config.recipe,
        "seed": config.seed,
        "rounds": federation.round,
        "best_round": best.round,
        **metrics,
        "popularity": popularity,
        "chance": chance_metrics(parts),
        "beats_popularity": metrics["test"]["ndcg_10"] > popularity["ndcg_10"],
        "clients": parts.clients,
        "items": parts.items,
        "bytes_up": federation.bytes_up,
        "bytes_down": federation.bytes_down,
        "client_visits": int(federation.visits.sum()),
        "clients_never_seen": int((federation.visits == 0).sum()),
        "seconds_per_round": float(np.median(seconds)) if seconds else 0.0,
        "peak_rss_mb": peak_rss_mb(),
        "device": device,
    }
    return summary | {"notes": notes(summary, parts)}


def refit_summary(rounds: int, ranks: dict[str, np.ndarray]) -> dict[str, Any]:
    """What summary.json says of the refit: test alone, for nothing was chosen there."""
    return {
        "rounds": rounds,
        "test": {**ranking_metrics(ranks["test"]), **ranking_metrics(ranks["full_test"], "full_"), **spread(ranks["test"])},
    }


def notes(summary: dict[str, Any], parts: Split) -> list[str]:
    """What must be said beside the numbers, in words."""
    said = []
    if parts.protocol.leaky:
        why = []
        if parts.protocol.train_negatives == "leaky":
            why.append("held-out items are never drawn as training negatives")
        if parts.protocol.select_on == "test":
            why.append("the round is chosen on test")
        said.append(f"LEAKY: {' and '.join(why)}; these numbers are inflated (see docs/protocol.md)")
    mine, floor = summary["test"], summary["popularity"]
    if all(mine[key] == value for key, value in floor.items()):
        return said
    figures = f"HR@10 {mine['hr_10']:.4f} against {floor['hr_10']:.4f}, NDCG@10 {mine['ndcg_10']:.4f} against {floor['ndcg_10']:.4f}"
    if not summary["beats_popularity"]:
        said.append(f"{summary['algo']} does NOT beat popularity: {figures}")
    elif mine["hr_10"] <= floor["hr_10"]:
        said.append(f"{summary['algo']} beats popularity on NDCG@10 but not on HR@10: {figures}")
    return said


def final_table(summary: dict[str, Any], parts: Split) -> str:
    """The result beside popularity and chance, and what must be said about it."""
    columns = ("hr_10", "ndcg_10", "mrr", "full_hr_10", "full_ndcg_10")
    rows = [(summary["algo"], summary["test"])]
    if "refit" in summary:
        rows.append((f"{summary['algo']} refit", summary["refit"]["test"]))
    rows += [("popularity", summary["popularity"]), ("random (exact)", summary["chance"])]
    width = max(len(name) for name, _ in rows) + 2
    protocol = f"{summary['protocol']}{' LEAKY' if summary['leaky'] else ''}"
    head = f"{summary['dataset']}, protocol {protocol} [{summary['protocol_fingerprint']}]"
    head += f", test at round {summary['best_round']} of {summary['rounds']}"
    lines = ["", f"{head} (chosen on {parts.protocol.select_on}), {parts.clients:,} clients, {parts.items:,} items"]
    lines.append(" " * width + "".join(f"{name.replace('_10', '@10').replace('_', ' ').upper():>14}" for name in columns))
    for name, metrics in rows:
        lines.append(f"{name:<{width}}" + "".join(f"{metrics[column]:>14.4f}" for column in columns))
    lines.append(f"{summary['seconds_per_round']:.2f} s a round, {human(summary['bytes_up'])} up, {human(summary['bytes_down'])} down, "
                 f"{summary['client_visits']:,} client visits")  # fmt: skip
    return "\n".join([*lines, *(f"! {note}" for note in summary["notes"])])


def human(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def per_client(parts: Split, ranks: dict[str, np.ndarray], refit: dict[str, np.ndarray] | None = None) -> pd.DataFrame:
    """One row a client: its name in the source, how much it trained on, the ranks of its held-out items, and popularity's for test."""
    floor = popularity_ranks(parts)
    return pd.DataFrame(
        {
            "user": parts.user_ids.astype(str),
            "train_items": parts.train_counts,
            "rank_val": ranks["val"],
            "rank_test": ranks["test"],
            "full_rank_val": ranks["full_val"],
            "full_rank_test": ranks["full_test"],
            "rank_popularity": floor["test"],
            "full_rank_popularity": floor["full_test"],
            **({"refit_rank_test": refit["test"], "refit_full_rank_test": refit["full_test"]} if refit else {}),
        }
    )


def protocol_fields(protocol: Protocol) -> dict[str, Any]:
    """The resolved protocol, as flags name it."""
    fields = dataclasses.asdict(protocol)
    return {"protocol": fields.pop("name"), **fields}


def peak_rss_mb() -> float:
    """Largest resident memory of this process so far, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3
