"""`python -m fedbench verify`: run a submission again, or its first rounds, and compare."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from fedbench import files, trust
from fedbench.contract import registry
from fedbench.errors import DataError, FedbenchError, UsageError
from fedbench.experiment import folder as run_folder
from fedbench.experiment import run, submission
from fedbench.experiment.prepare import prepare
from fedbench.settings import command_line
from fedbench.settings.config import RunConfig
from fedbench.settings.parser import Parser, number, whole_number
from fedbench.text import say
from fedbench.tracking.run_log import environment, setup_logging

EPILOG = """Refused, with the reason and exit code 1: a file that was changed after it was written; a fingerprint, a hash or a
result that its own content contradicts; other data; numbers that differ from those of the run that is made again. Every
number of every round is compared, and the result if all rounds are run: counts must be equal, other numbers within
--tolerance, which leaves room for the rounding of another machine or number of threads. A malformed file is exit code 3.

  python -m fedbench verify FILE --rounds 5     the first five rounds
  python -m fedbench verify FILE --rounds 0     train nothing: the file and the data alone

--record writes FILE.verified.json, without FILE's own ending, which the page of submitted results shows.
"""
VERIFIED = "verified"
"""what stands before the ending of a record's name"""


def parser() -> Parser:
    made = Parser(
        prog="python -m fedbench verify",
        usage="python -m fedbench verify FILE [--rounds K] [flags]",
        description="Run a submission again and compare.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("file", type=Path, nargs="?", metavar="FILE", help="what `python -m fedbench submit` wrote")
    made.add_argument("--rounds", type=whole_number, metavar="K", help="run the first K rounds only (default: all of them)")
    made.add_argument("--tolerance", type=number, default=submission.TOLERANCE, metavar="X", help="how far a number may be off, as a share "
                      f"of it, or of 1 if it is smaller (default: {submission.TOLERANCE})")  # fmt: skip
    made.add_argument("--threads", type=whole_number, metavar="N", help="CPU threads")
    made.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1 or mps (default: cpu)")
    made.add_argument("--dataset", type=Path, metavar="FILE", help="where the file of rows is that the submission names")
    made.add_argument("--data-dir", type=Path, metavar="DIR", help="look for datasets here first")
    made.add_argument("--out", type=Path, metavar="DIR", help="keep the run in this folder")
    made.add_argument("--record", action="store_true", help="write down beside FILE that it was verified")
    made.add_argument(trust.FLAG, action="store_true", help="run the plug-in that the file holds, though it was never run here")
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    return made


def main(argv: list[str]) -> int:
    given = parser().read(argv)
    if given.file is None:
        raise UsageError("FILE is missing: give a file that `python -m fedbench submit` wrote")
    if not 0 <= given.tolerance < 1:
        raise UsageError(f"--tolerance {given.tolerance}: must be from 0 to below 1")
    content = submission.read(given.file)
    total = content["result"]["rounds"]
    rounds = total if given.rounds is None else given.rounds
    if not 0 <= rounds <= total:
        raise UsageError(f"--rounds {rounds}: must be from 0 to {total}, the rounds of the submission")
    if given.record and not rounds:
        raise UsageError("--record: with --rounds 0 nothing is run again; give --rounds 1 or more")
    if refused := submission.refusals(content):
        raise FedbenchError(f"refused: {given.file}: {'; '.join(refused)}")
    setup_logging(quiet=True, debug=given.debug)
    with tempfile.TemporaryDirectory(prefix="fedbench-verify-") as place:
        config = config_of(content, given, Path(place))
        refuse_others(content, given.file, config)
        found, chosen = compared(content, config, rounds, given.out or Path(place) / "run") if rounds else ([], None)
    return judged(content, given, rounds, found, chosen)


def config_of(content: dict[str, Any], given: argparse.Namespace, place: Path) -> RunConfig:
    """The run that a submission describes, on this machine."""
    plugin, values = content["plugin"], dict(content["config"])
    if submission.is_file_of_rows(values["dataset"]):
        if given.dataset is None:
            raise UsageError(f"{given.file}: its data is a file of its own, {values['dataset']}; give it with --dataset")
        values["dataset"] = str(given.dataset.absolute())
    elif given.dataset is not None:
        raise UsageError(f"--dataset {given.dataset}: the submission's data is {values['dataset']}, which has a name; leave the flag out")
    if plugin and plugin["file"]:
        source = "\n".join(plugin["source"]).encode()
        trust.admit(Path(plugin["file"]), source, False, given.trust_plugin, str(given.file))
        values["algo"] = str(place / plugin["file"])
        files.write_text(Path(values["algo"]), source.decode())
    here = {"device": given.device, "threads": given.threads, "client_store": "auto", "compile": None}
    here |= {"mlflow": False, "quiet": True, "debug": given.debug, "keep_state": "none", "checkpoint_every": "never"}
    here |= {"data_dir": str(given.data_dir.absolute()) if given.data_dir else None}
    files.write_text(place / "config.json", json.dumps(values | here))
    try:
        return command_line.resolve(["--config", str(place / "config.json")], names=str(given.file))
    except UsageError as error:
        said = str(error).replace(f"--config {place / 'config.json'}", "config")
        raise DataError(f"{given.file}: its config cannot be used here: {said}") from None


def refuse_others(content: dict[str, Any], file: Path, config: RunConfig) -> None:
    """Raise if the algorithm, its settings or the data here are not those of the submission."""
    found = []
    plugin, source = content["plugin"], registry.source(type(config.algorithm))
    here = source.sha256 if source else None
    if here != (plugin["sha256"] if plugin else None):
        theirs = f"a plug-in with the hash {plugin['sha256'][:16]}…" if plugin else "built in"
        found.append(f"its algorithm is {theirs}, {config.algorithm.name} here is {f'one with {here[:16]}…' if here else 'built in'}")
    if (digest := config.digest()) != content["config_hash"]:
        found.append(f"its config has the hash {digest[:16]}…, it says {content['config_hash'][:16]}…")
    told = {"algo": config.algorithm.name, "recipe": config.recipe, "seed": config.seed}
    said = {**content, "seed": content["result"]["seed"]}
    found += [f"its config has {key} {value}, it says {said[key]}" for key, value in told.items() if said[key] != value]
    if found:
        raise FedbenchError(f"refused: {file}: {'; '.join(found)}")
    split, data = prepare(config.dataset, config.protocol, config.data)
    there = {"dataset": content["dataset"], "data_checksum": content["data_checksum"], "fingerprint": content["protocol_fingerprint"]}
    ours = {"dataset": Path(data.name).name, "data_checksum": split.checksum, "fingerprint": split.fingerprint}
    if wrong := [f"its {key.replace('_', ' ')} is {value}, here it is {ours[key]}" for key, value in there.items() if ours[key] != value]:
        raise FedbenchError(f"refused: {file}: {'; '.join(wrong)}")


def compared(content: dict[str, Any], config: RunConfig, rounds: int, out: Path) -> tuple[list[submission.Difference], int | None]:
    """Every number of the submission beside that of the run made again, or of its first rounds; and the round that all of it reports."""
    whole = rounds == content["result"]["rounds"]
    config = dataclasses.replace(config, out=out)
    if not whole:  # the algorithm keeps its number of rounds, which a schedule may depend on
        config = dataclasses.replace(config, budget="rounds", budget_value=rounds, refit=False)
    with redirect_stdout(StringIO()):
        summary = run.run(config)
    lines = run_folder.read_rounds(out)
    return list(submission.differences(content, lines, summary if whole else None)), summary["best_round"] if whole else None


def judged(
    content: dict[str, Any], given: argparse.Namespace, rounds: int, found: Sequence[submission.Difference], chosen: int | None = None
) -> int:
    """Say what was found and write it down if asked; raise if a number differs by more than the tolerance.

    chosen: the round that the run made again reports.
    """
    off = [one for one in found if not one.size <= given.tolerance]
    if off:
        worst = max(off, key=lambda one: one.size)
        raise FedbenchError(
            f"refused: {given.file}: {len(off):,} of {len(found):,} numbers differ by more than {given.tolerance}, first {off[0]}"
            + (f", most {worst}" if worst is not off[0] else "")
        )
    total = content["result"]["rounds"]
    part = "the file and the data, nothing was trained" if not rounds else "all" if rounds == total else f"the first {rounds:,}"
    part += "" if not rounds else f" of {total:,} rounds" if rounds < total else f" {total:,} rounds"
    largest = max((one.size for one in found), default=0.0)
    say(f"verified  {given.file}: {part}")
    if found:
        say(f"{len(found):,} numbers compared, the largest difference is {largest:.2g} (tolerance {given.tolerance})")
    if chosen not in (None, best := content["result"]["best_round"]):
        say(f"here round {chosen} is a little better than round {best}, which the file reports: its full ranking was not compared")
    if given.record:
        env = environment()
        record = {"digest": content["digest"], "rounds": rounds, "of": total, "numbers": len(found), "largest": largest}
        record |= {"tolerance": given.tolerance, "device": given.device, "commit": env["git_commit"], "dirty": env["git_dirty"]}
        record |= {key: env[key] for key in ("python", "platform", "torch_threads", "packages")}
        path = given.file.with_name(f"{given.file.stem}.{VERIFIED}.json")
        files.write_json(path, record)
        say(f"record  {path}")
    return 0
