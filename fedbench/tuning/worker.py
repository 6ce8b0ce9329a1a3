"""A process that runs trials: `python -m fedbench.tuning.worker CONFIG ALGO FOLDER`, started by `workers.Workers`.

It loads the data once. Orders and answers are lines of JSON, see `main`; what a method prints goes to the log.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from fedbench.errors import FedbenchError
from fedbench.settings.command_line import resolve
from fedbench.tracking.run_log import plain
from fedbench.tuning.trial import Bench


def main(file: str, algo: str, folder: str, orders: TextIO, answers: TextIO) -> None:
    """Say what the data is, then run the trial of each order: a line a round evaluated, whose answer says whether to stop, and a last."""

    def tell(**answer: Any) -> None:
        answers.write(json.dumps(plain(answer)) + "\n")
        answers.flush()

    try:
        bench = Bench.prepared(resolve(["--config", file, "--algo", algo]))
    except FedbenchError as error:
        tell(error=str(error), code=error.exit_code)
        return
    tell(ready=bench.facts)
    for order in orders:
        wanted = json.loads(order)

        def report(line: dict[str, float], value: float) -> bool:
            tell(line=line, value=value)
            return bool(json.loads(orders.readline())["stop"])

        tell(ended=dataclasses.asdict(bench.run(wanted["values"], report, Path(folder))))


if __name__ == "__main__":
    logging.getLogger("fedbench").setLevel(logging.WARNING)
    # the lines are on the pipe that was standard output; whatever else is printed goes where errors go
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.stdin, pipe)
