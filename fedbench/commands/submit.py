"""`python -m fedbench submit`: a finished run as one file that others can verify."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedbench import files
from fedbench.errors import UsageError
from fedbench.experiment import submission
from fedbench.settings.parser import Parser
from fedbench.text import say

EPILOG = """The file holds the whole config, the protocol's fingerprint, every round's numbers, versions, the commit, and of a plug-in its
source; no paths of this machine. `python -m fedbench verify FILE` runs it again.

example:
  python train.py --algo fedmf --dataset filmtrust --out runs/mine
  python -m fedbench submit runs/mine --by "A. Author"
"""


def parser() -> Parser:
    made = Parser(
        prog="python -m fedbench submit",
        usage="python -m fedbench submit RUN [--by NAME] [--out FILE]",
        description="Write a finished run as one JSON file that others can verify.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("folder", type=Path, nargs="?", metavar="RUN", help="folder of a finished run")
    made.add_argument("--by", default="", metavar="NAME", help="who sends it")
    made.add_argument("--out", type=Path, metavar="FILE", help="the file (default: ALGO-DATASET-PROTOCOL-sSEED.json here)")
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    return made


def main(argv: list[str]) -> int:
    given = parser().read(argv)
    if given.folder is None:
        raise UsageError("RUN is missing: give the folder of a finished run")
    content = submission.compose(given.folder, given.by)
    out = given.out or Path(
        f"{content['algo']}-{content['dataset']}-{content['protocol_fields']['protocol']}-s{content['result']['seed']}.json"
    )
    if out.exists() or out.is_symlink():
        raise UsageError(f"--out {out}: is there already; remove it or give another name")
    try:
        files.write_text(out, submission.text_of(content))
    except FileNotFoundError:
        raise UsageError(f"--out {out}: there is no folder {out.parent}") from None
    note = ", from a checkout with changes that no commit has" if content["dirty"] else ""
    say(f"submission  {out}  [{content['digest'][:16]}], {len(content['rounds']):,} rounds{note}")
    return 0
