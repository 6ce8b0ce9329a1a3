"""The model in MLflow: no pickle in it, and `mlflow models predict` and `serve` say what `recommend` says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import requests

from fedbench.__main__ import main
from fedbench.experiment import saved_model
from fedbench.experiment.run import run
from fedbench.settings.command_line import resolve

MODELS = [sys.executable, "-P", "-m", "mlflow", "models"]
DATA = "--dataset synthetic --users 40 --items 150 --interactions 12 --no-mlflow --quiet"
PLUG_IN = '''
from dataclasses import dataclass

import torch

from fedbench.contract.algorithm import Algorithm, Answer


@dataclass(frozen=True)
class Counting(Algorithm):
    """Items by how many clients have them."""

    rounds: int = 1
    tables = {"count": "shared"}

    def init_server(self, world, draw):
        return {"count": torch.zeros(world.items, dtype=draw.dtype)}

    def answer(self, server):
        return Answer(shared=server)

    def upload(self, held, sent, samples):
        return {"count": torch.ones_like(sent["count"])}

    def aggregate(self, server, uploads, draw):
        return {"count": server["count"] + uploads.rows("count").combine(uploads.world.items, "sum")}

    def score(self, own, sent):
        return sent["count"]
'''


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tracking store of the test's own."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # MLflow starts its web server by name
    monkeypatch.chdir(tmp_path)
    return tmp_path


def log(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The address of the model of a run, which is logged."""
    capsys.readouterr()
    assert main(["log-model", "--run", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "--host 127.0.0.1" in printed
    return printed.split()[1]


def artifacts(address: str) -> Path:
    import mlflow

    return Path(mlflow.artifacts.download_artifacts(address))


def test_the_saved_model_is_the_model(tmp_path: Path) -> None:
    for words in ("fedmf --dim 8 --rounds 2", "fedrecon --dim 8 --rounds 2", "fedem --dim 4 --adapter 8,1 --rounds 2 -e 2 -n 30"):
        name = words.split()[0]
        run(resolve(["--algo", *words.split(), *DATA.split(), "--out", str(tmp_path / name)]))
        loaded, place = saved_model.load(tmp_path / name), tmp_path / f"{name}-saved"
        place.mkdir()
        saved_model.save(loaded, place, loaded.config.algo)
        assert sorted(path.name for path in place.iterdir()) == ["config.json", "ids.json", "model.safetensors"]
        everyone = np.arange(loaded.split.clients)
        pd.testing.assert_frame_equal(saved_model.read(place, tmp_path).recommend(everyone, 5), loaded.recommend(everyone, 5))


@pytest.mark.slow
def test_the_real_server_and_predict_say_what_recommend_says(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernels are off, for a model's copy of the code would compile its own."""
    run(resolve([*f"--algo fedmf --dim 8 --rounds 2 --kernel off {DATA}".split(), "--out", str(store / "run")]))
    address = log(store / "run", capsys)
    inside = [path for path in artifacts(address).rglob("*") if path.is_file()]
    assert {path.suffix for path in inside if "code" not in path.parts} <= {".json", ".safetensors", ".py", ".yaml", ".txt", ""}
    assert not [path for path in inside if path.suffix in (".pkl", ".pt", ".pth", ".pickle") or path.name == "python_model"]
    loaded = saved_model.load(store / "run")
    users = [str(user) for user in loaded.split.user_ids[[4, 1]]]
    expected = pd.concat([loaded.recommend(np.array([4]), 3), loaded.recommend(np.array([1]), 6)], ignore_index=True)
    asked = json.dumps({"dataframe_records": [{"user": users[0], "k": 3}, {"user": users[1], "k": 6}]})

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "-m", address, "--env-manager", "local", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (store / "server.log").open("w") as noise:
        server = subprocess.Popen([*MODELS, *words], stdout=noise, stderr=noise, start_new_session=True)
    try:
        invocations, headers = f"http://127.0.0.1:{port}/invocations", {"Content-Type": "application/json"}
        wait_for(f"http://127.0.0.1:{port}/ping", server, store / "server.log")
        answer = requests.post(invocations, data=asked, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        check(pd.DataFrame(answer.json()["predictions"]), expected)
        nobody = json.dumps({"dataframe_records": [{"user": "nobody"}]})
        refused = requests.post(invocations, data=nobody, headers=headers, timeout=120)
        assert refused.status_code == 400 and "user nobody: not among the users that took part" in refused.text
    finally:
        with suppress(ProcessLookupError):  # it is gone already
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)

    (store / "asked.json").write_text(asked)
    words = ["predict", "-m", address, "--env-manager", "local", "-i", "asked.json", "-o", "answer.json", "-t", "json"]
    done = subprocess.run([*MODELS, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check(pd.DataFrame(json.loads((store / "answer.json").read_text())["predictions"]), expected)


def check(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    assert found[["user", "rank", "item"]].to_dict("records") == expected[["user", "rank", "item"]].to_dict("records")
    np.testing.assert_allclose(found["score"], expected["score"], rtol=1e-5)


def wait_for(address: str, server: subprocess.Popen[bytes], noise: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, noise.read_text()
        try:
            if requests.get(address, timeout=5).status_code == 200:
                return
        except requests.RequestException:
            time.sleep(0.5)
    raise AssertionError(noise.read_text())


def test_a_file_of_ones_own_and_a_default_k(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import mlflow

    (store / "counting.py").write_text(PLUG_IN)
    run(resolve([*f"--algo {store / 'counting.py'} {DATA}".split(), "--out", str(store / "run")]))
    address = log(store / "run", capsys)
    (store / "counting.py").unlink()
    served = mlflow.pyfunc.load_model(address)
    assert served.metadata.signature.inputs.input_names() == ["user", "k"]
    user = str(model_users(store / "run")[0])
    assert len(served.predict(pd.DataFrame({"user": [user]}))) == 10
    two = served.predict(pd.DataFrame({"user": [user, user], "k": [1, 2]}))
    assert two["rank"].to_list() == [1, 1, 2] and two["item"].iloc[0] == two["item"].iloc[1]


def model_users(folder: Path) -> list[str]:
    return pd.read_parquet(folder / "per_client.parquet")["user"].to_list()


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (([], "--run is missing"), (["--run", str(tmp_path)], "there is no run"), (["--rum", "x"], "did you mean --run?")):
        assert main(["log-model", *words]) == 2
        printed = capsys.readouterr().err
        assert said in printed and printed.count("\n") == 1
