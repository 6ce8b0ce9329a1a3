"""`python -m fedbench ui`, or `make ui`: the MLflow UI on this machine, and the link that compares all runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from types import FrameType

from fedbench.errors import FedbenchError, UsageError
from fedbench.settings.parser import Parser
from fedbench.text import say
from fedbench.tracking import mirror_process, views

HOST, PORT = "127.0.0.1", 5000
START_SECONDS = 300.0
"""how long the server may take to answer: on a busy machine its imports alone take a minute"""
END_SECONDS = 10.0
MOST_LINKS = 5


def main(argv: list[str]) -> int:
    """Serve until Ctrl-C; where MLFLOW_TRACKING_URI is a server already, print the links and end."""
    given = parser().read(argv)
    uri = mirror_process.tracking_uri()
    if uri.startswith(("http://", "https://")):
        say(told(mirror_process.ui_address(uri), views.of_experiments(uri, MOST_LINKS)))
        return 0
    if not 0 < given.port < 65536:
        raise UsageError(f"--port must be from 1 to 65535, not {given.port}")
    refuse_taken(given.port)
    say("starting the MLflow UI ...")
    # a database that is not there yet is the server's to make: two processes that create one at once both fail
    comparisons = [] if mirror_process.missing_database(uri) else views.of_experiments(uri, MOST_LINKS)
    return serve(uri, given.port, comparisons)


def parser() -> Parser:
    about = "Start the MLflow UI on this machine, wait until it answers, and print the link that compares all runs. Ctrl-C ends it."
    made = Parser(prog="python -m fedbench ui", description=about, allow_abbrev=False)
    made.add_argument("--port", type=int, default=PORT, metavar="N", help=f"port on {HOST} (default: {PORT})")
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    return made


def told(address: str, comparisons: list[tuple[str, str]]) -> str:
    """The links; with several experiments each has its name."""
    if not comparisons:
        return f"charts  {address} (no runs yet)"
    return "\n".join(f"charts  {address}/{place}" + (f"  {name}" if len(comparisons) > 1 else "") for name, place in comparisons)


def refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            hint = f"if the UI runs already, open http://{HOST}:{port}; else give another --port"
            raise UsageError(f"--port {port} cannot be used ({error.strerror}); {hint}") from None


def serve(uri: str, port: int, comparisons: list[tuple[str, str]]) -> int:
    """Run the server until Ctrl-C or SIGTERM."""
    address = f"http://{HOST}:{port}"
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryFile() as said:
        process = start(uri, port, said.fileno())
        try:
            until = time.monotonic() + START_SECONDS
            while not answers(address):
                if process.poll() is not None or time.monotonic() > until:
                    raise FedbenchError(f"the MLflow UI did not start: {last_words(said.fileno())}")
                time.sleep(0.2)
            say(f"{told(address, comparisons)}\nready (Ctrl-C ends it)")
            code = process.wait()
            raise FedbenchError(f"the MLflow UI ended by itself with code {code}: {last_words(said.fileno())}")
        except KeyboardInterrupt:
            return 0
        finally:
            end(process)


def start(uri: str, port: int, output: int) -> subprocess.Popen[bytes]:
    """One worker, and none of the job runners, which take most of a minute to start and serve tracing alone."""
    command = [sys.executable, "-P", "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    # not on the command line, which everybody on the machine can read: an address may hold a password
    env = {**os.environ, **quiet, "MLFLOW_BACKEND_STORE_URI": uri}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True)


def answers(address: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
        return True
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    """The server and the processes that it has started."""
    for number, patience in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def last_words(output: int) -> str:
    """The last line that the server printed."""
    lines = [line.strip() for line in os.pread(output, 1 << 20, 0).decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
