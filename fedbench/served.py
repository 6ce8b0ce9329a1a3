"""The model that MLflow serves. MLflow keeps this file and runs it when it loads the model; nothing is pickled.

Rows of user and k (10 if there is none) come in; rows of user, rank, item, score and, where the dataset has it, title go out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.pyfunc import PythonModel

from fedbench.experiment import saved_model

K = 10


class Recommender(PythonModel):
    """What `python -m fedbench recommend` says, for users who took part."""

    def load_context(self, context: Any) -> None:
        folder = Path(context.artifacts["model"])
        self.model = saved_model.read(folder, beside=folder.parents[1] / "code")

    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        users = model_input["user"].astype(str)
        many = model_input["k"].fillna(K).astype(int) if "k" in model_input else pd.Series(K, users.index)
        unknown = [user for user in users if user not in self.model.number]
        if unknown:
            raise MlflowException(f"user {unknown[0]}: not among the users that took part", INVALID_PARAMETER_VALUE)
        items = self.model.split.items
        if not many.between(1, items).all():
            raise MlflowException(f"k must be from 1 to {items}, the number of items", INVALID_PARAMETER_VALUE)
        clients = np.array([self.model.number[user] for user in users])
        found = self.model.recommend(clients, int(many.max()))
        asked = pd.DataFrame({"user": users.to_numpy(), "k": many.to_numpy()})
        rows = asked.merge(found, on="user", how="left")
        return rows[rows["rank"] <= rows["k"]].drop(columns="k").reset_index(drop=True)


mlflow.models.set_model(Recommender())
