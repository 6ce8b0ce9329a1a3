"""Where a run lives and where it resumes: its folder, and the checkpoint that it continues from."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fedbench.data.split import Split
from fedbench.errors import UsageError
from fedbench.experiment import checkpoint, finished, folder
from fedbench.settings.config import RunConfig
from fedbench.simulation import workers


def choose_folder(config: RunConfig) -> Path:
    """The run's folder: the one to resume, the one given, or a new one."""
    if config.resume not in ("auto", "never"):
        return Path(config.resume)
    if config.out is not None:
        return config.out
    return new_folder(config)


def new_folder(config: RunConfig) -> Path:
    """runs/<dataset>/<algo>/<time>-<hash>, with a number behind if that is taken."""
    place = folder_of_runs(config) / f"{time.strftime('%Y%m%d-%H%M%S')}-{config.hash8()}"
    folder, again = place, 1
    while folder.exists():
        again += 1
        folder = place.with_name(f"{place.name}-{again}")
    return folder


def folder_of_runs(config: RunConfig) -> Path:
    """Where runs of this dataset and algorithm go without --out."""
    return Path("runs") / Path(config.dataset).stem / config.algorithm.name


def resume_after_restart(config: RunConfig) -> RunConfig:
    """The config after torchrun started lost workers again: it resumes and, without --out, in the newest unfinished run of these flags."""
    if config.resume not in ("auto", "never") or config.out:
        return dataclasses.replace(config, resume="auto" if config.resume == "never" else config.resume)
    # folders are named by time, so the last one is that of the start that was lost
    begun = sorted(folder_of_runs(config).glob(f"*-{config.hash8()}*"))
    last = begun[-1] if begun and not (begun[-1] / "summary.json").exists() else None
    return dataclasses.replace(config, resume="auto", out=last)


class ResumePoint(NamedTuple):
    """Where a run starts."""

    resumes: bool
    """whether the folder holds a run that stopped"""
    state: checkpoint.State | None
    """its newest checkpoint; None: the first round"""


def agreed_folder(config: RunConfig) -> tuple[RunConfig, Path]:
    """The run's folder, chosen on worker 0 for all, and the config, which resumes if torchrun has started workers again."""
    if workers.on_any(workers.restarted()):
        config = resume_after_restart(config)
    return config, Path(workers.broadcast(lambda: str(choose_folder(config))))


def broadcast_point(find: Callable[[], ResumePoint]) -> ResumePoint:
    """What `find` returns on worker 0, which alone looks into the run's folder."""

    def as_json() -> tuple[bool, tuple[str, dict[str, Any]] | None]:
        resumes, state = find()
        return resumes, (str(state.path), state.facts) if state else None

    resumes, state = workers.broadcast(as_json)
    return ResumePoint(resumes, checkpoint.State(Path(state[0]), state[1]) if state else None)


def find_resume_point(out: Path, config: RunConfig, split: Split) -> ResumePoint:
    """Whether the folder holds a run to resume, and its checkpoint.

    A checkpoint of another configuration, dataset or protocol is refused before anything in the folder is touched.
    """
    named = config.resume not in ("auto", "never")
    if not (out / "config.json").exists():
        if named:
            raise UsageError(f"--resume {out}: no run and no checkpoint there; give the folder of a run that was interrupted")
        finished.refuse_several(out)
        return ResumePoint(False, None)
    if config.resume == "never":
        return ResumePoint(False, None)
    here = config.to_dict()
    if differs := finished.difference(out, config):
        if not named and (out / "summary.json").exists():
            raise UsageError(f"--out {out} already holds a run: {differs}; choose another folder")
        refuse(out, f"{differs}; give the same flags")
    # find_finished has looked before: a summary that is still here is not this run's
    if (out / "summary.json").exists():
        refuse(out, f"{out / 'summary.json'} is no summary of a run; remove it, or start again with another --out")
    state = checkpoint.newest(out)
    # killed before its first checkpoint is no error; checkpoints that cannot be read are, if the folder was named
    if state is None:
        if named and checkpoint.rounds(out):
            raise UsageError(f"--resume {out}: no checkpoint there can be read; start again with another --out")
        return ResumePoint(True, None)
    for key, mine in (("algo", config.identity()["algo"]), ("dataset", config.identity()["dataset"])):
        if state.facts.get(key) != mine:
            refuse(out, f"the content of {here[key]} has changed since that run began; start again with another --out")
    for key, mine in (("data_checksum", split.checksum), ("protocol_fingerprint", split.fingerprint)):
        if state.facts.get(key) != mine:
            words = key.replace("_", " ")
            refuse(out, f"that run's {words} is {state.facts.get(key)}, here it is {mine}; use the data and the flags that it had")
    if isinstance(state.facts.get("round"), int):
        folder.check_rounds(out, state.facts["round"])
    return ResumePoint(True, state)


def refuse(out: Path, why: str) -> NoReturn:
    raise UsageError(f"--resume {out}: {why}")


def how_to_resume(config: RunConfig, out: Path) -> str:
    """What to do after an interrupt: without --out the next run of the same command would be a new one."""
    named = config.out is not None or config.resume not in ("auto", "never")
    return "the same command resumes it" if named and config.resume != "never" else f"the same flags with --resume {out} resume it"
