"""`python -m fedbench log-model`: a finished run's model in MLflow, which can load, call and serve it."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import numpy as np

from fedbench import CHECKOUT, HERE
from fedbench.errors import FedbenchError
from fedbench.experiment import saved_model
from fedbench.experiment.saved_model import Model
from fedbench.settings.parser import Parser, run_parser
from fedbench.text import say
from fedbench.tracking import mirror_process
from fedbench.tracking.run_log import mlflow_run_of, setup_logging

DISTRIBUTION = "fedbench-rec"
EPILOG = """The model is logged to the run's own copy in MLflow, or to a new one if this store has none. It holds what scoring needs, as
safetensors and JSON, and the code that reads it; nothing is pickled. It also holds which items each user has, for these are left out of
recommendations, so it is as private as the data. It is a command of its own and no part of a run because each copy costs disk space.

examples:
  python -m fedbench log-model --run runs/mine
  python -m fedbench log-model --run runs/mine --register films
"""


def parser() -> Parser:
    about = "Log the model that a finished run kept to MLflow, ready for `mlflow models predict` and `mlflow models serve`."
    made = run_parser("log-model", "[--register NAME]", about, EPILOG)
    made.add_argument("--register", metavar="NAME", help="also a new version of this name in MLflow's model registry")
    return made


def main(argv: list[str]) -> int:
    given = parser().read(argv)
    setup_logging(quiet=True, debug=given.debug)
    loaded = saved_model.load(given.run, given.data_dir, given.trust_plugin)
    uri = log_model(loaded, given.run, given.register)
    say(f"model  {uri}\n")
    # MLflow starts its web server by name, so the folder of the programs must be on the path
    where = f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH MLFLOW_TRACKING_URI={shlex.quote(mirror_process.tracking_uri())}"
    say(f"{where} mlflow models serve -m {uri} --env-manager local --host 127.0.0.1 --port 5001")
    asked = f'{{"dataframe_records": [{{"user": "{loaded.split.user_ids[0]}", "k": 10}}]}}'
    say(f"curl http://127.0.0.1:5001/invocations -H 'Content-Type: application/json' -d {shlex.quote(asked)}")
    return 0


def log_model(loaded: Model, folder: Path, register: str | None = None) -> str:
    """The model's address in MLflow."""
    client, experiment = mirror_process.open_store(loaded.config.experiment)
    import mlflow

    mlflow.set_tracking_uri(mirror_process.tracking_uri())
    plug_in = [loaded.config.algo] if loaded.config.algo.endswith(".py") else []
    try:
        with tempfile.TemporaryDirectory() as scratch, mlflow.start_run(**_place(client, folder, experiment)):
            model = Path(scratch) / "model"
            model.mkdir()
            saved_model.save(loaded, model, Path(loaded.config.algo).name)
            made = mlflow.pyfunc.log_model(
                name="recommender",
                python_model=str(HERE / "served.py"),
                artifacts={"model": str(model)},
                code_paths=[str(packed(Path(scratch))), *plug_in],
                pip_requirements=requirements(),
                registered_model_name=register,
                **described(loaded),
            )
    except mlflow.exceptions.MlflowException as error:
        raise FedbenchError(f"MLflow does not take the model ({mirror_process.one_line(error)})") from error
    return made.model_uri


def packed(folder: Path) -> Path:
    """This package in `folder` as it is when installed: algorithms and datasets inside, so that no `datasets` of ours hides another."""
    package, leave_out = folder / "fedbench", shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE, package, ignore=leave_out)
    if CHECKOUT is not None:
        for name in ("algorithms", "datasets"):
            shutil.copytree(CHECKOUT / name, package / name, ignore=leave_out)
    return package


def requirements() -> str | list[str]:
    """What the model needs to run, in pip's words: a checkout's own file, or what the installed package says of itself."""
    if CHECKOUT is not None:
        return str(CHECKOUT / "requirements.txt")
    return [line for line in requires(DISTRIBUTION) or [] if "extra ==" not in line]


def _place(client: Any, folder: Path, experiment: str) -> dict[str, Any]:
    """The MLflow run that is the copy of this folder, or a new one."""
    from mlflow.exceptions import MlflowException

    try:
        return {"run_id": client.get_run(mlflow_run_of(folder) or "").info.run_id}
    except MlflowException:
        return {"experiment_id": experiment, "run_name": f"model of {folder.name}"}


def described(loaded: Model) -> dict[str, Any]:
    """The signature, and an example of the input."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    output = [ColSpec("string", "user"), ColSpec("integer", "rank"), ColSpec("string", "item"), ColSpec("double", "score")]
    titles = [] if loaded.item_names is None else [ColSpec("string", "title")]
    asked = Schema([ColSpec("string", "user"), ColSpec("long", "k", required=False)])
    example = loaded.recommend(np.array([0]), 1)[["user"]].assign(k=10)
    return {"signature": ModelSignature(asked, Schema([*output, *titles])), "input_example": example}
