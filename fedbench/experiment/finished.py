"""A run that is finished already: found by its folder, cleaned up if it was killed at its very end, and printed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedbench import text
from fedbench.console import fitted
from fedbench.data.split import Split
from fedbench.errors import DataError, UsageError
from fedbench.experiment import checkpoint, folder
from fedbench.experiment.summary import final_table
from fedbench.locks import claimed, remove_if_free
from fedbench.settings.config import RunConfig
from fedbench.tracking import mirror_process
from fedbench.tracking.run_log import complete_copy


def find(out: Path, config: RunConfig, split: Split | None = None) -> dict[str, Any] | None:
    """The summary of the finished run in `out` if this configuration made it; None if there is none, or one of other flags.

    A file (an algorithm, a dataset) whose content has changed since then is refused, and so is other data, where it is known.
    """
    if config.resume == "never" or not (out / "config.json").exists():
        return None
    summary = folder.read_summary(out)
    if not summary or difference(out, config):
        return None
    digest = config.digest()
    if summary.get("config_hash", digest) != digest:
        raise UsageError(
            f"--out {out}: the content of {config.algo} or {config.dataset} has changed since that run; start again with another --out"
        )
    if split and (summary.get("data_checksum"), summary["protocol_fingerprint"]) != (split.checksum, split.fingerprint):
        raise UsageError(f"--out {out} holds a finished run on other data; start again with another --out")
    # a summary whose rounds are missing is no finished run: better an error than a report of half of it
    lines = folder.read_rounds(out, summary.get("rounds"))
    select_on = summary.get("protocol_fields", {}).get("select_on", config.protocol.select_on)
    if wrong := folder.contradictions(summary, lines, select_on) if lines else []:
        raise DataError(f"{out / 'summary.json'} was changed after the run, or metrics.jsonl: {wrong[0]}; start again with another --out")
    return summary


def difference(out: Path, config: RunConfig) -> str:
    """The first flag in which the run in `out` differs, in words; empty if there is none. (Files count by their paths here.)"""
    there, here = folder.read_settings(out), config.to_dict()
    for key in config.identity():
        if there.get(key) != here[key]:
            return f"that run has --{key.replace('_', '-')} {there.get(key)}, here it is {here[key]}"
    return ""


def say(out: Path, config: RunConfig, summary: dict[str, Any], split: Split) -> None:
    """Print the result again, and leave the folder as an undisturbed run would have."""
    try:
        table = final_table(summary, split)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{out / 'summary.json'} is no summary of this run ({error}); start again with another --out") from None
    link = tidy(out, config)
    text.say(f"finished: {out} holds this run's result, nothing is left to do")
    text.say(fitted(table))
    text.say(f"folder  {out}")
    if link:
        text.say(f"charts  {link}")


def skip(out: Path, config: RunConfig) -> bool:
    """Whether a run is finished already and need not start; its folder is cleaned up then."""
    if not find(out, config):
        return False
    with claimed(out):
        tidy(out, config)
    return True


def tidy(out: Path, config: RunConfig) -> str | None:
    """Finish what a run that was killed after its summary left undone; returns the charts' address if MLflow had to be asked."""
    # in the order of a run's own end, each step harmless if it was done already
    checkpoint.prune(out, keep=0)
    for part in out.glob("*.part"):
        part.unlink()
    remove_if_free(out / mirror_process.LOCK)
    return complete_copy(out, config.experiment) if config.mlflow else None


def refuse_single_run(parent: Path) -> None:
    """Refuse a folder with a single run for several runs: their mean would overwrite its summary."""
    if (parent / "config.json").exists():
        raise UsageError(f"--out {parent} already holds a run of one seed; choose another folder for several")


def refuse_several(out: Path) -> None:
    """Refuse a folder with several runs for a single run: its summary would overwrite their mean."""
    if (out / "summary.json").exists():
        raise UsageError(f"--out {out} already holds the mean of several runs; choose another folder for a single one")
