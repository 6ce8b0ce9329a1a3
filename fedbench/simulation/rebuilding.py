"""Clients that keep nothing, rebuilt for an evaluation by a kernel that reads their samples where they lie, without blocks and padding."""

from __future__ import annotations

import torch

from fedbench.contract.algorithm import Algorithm, Answer, Tensors
from fedbench.data.sampling import Samples
from fedbench.parts.ridge import Lists, solve_where_they_lie


def rebuilt_in_place(algorithm: Algorithm, answer: Answer, samples: Samples, clients: int) -> Tensors | None:
    """name -> [U, ...]: what the first stage rebuilds of U clients from all of these samples; None if no kernel can do it at once."""
    if answer.personal or not {"items", "gram", "size"} <= answer.shared.keys() or not len(samples.clients):
        return None
    sent = {name: value[:1] if name in algorithm.tables else value for name, value in answer.shared.items()}
    stage = algorithm.stages(sent)[0]
    # A client of one row shows what is private: it must be the vector that the kernel solves, and nothing besides.
    if stage.ridge is None or stage.phases or stage.max_samples or algorithm.receive({}, sent).keys() - sent.keys() != {"user"}:
        return None
    lists = Lists(samples.ptr[:-1], samples.ptr[1:], samples.local, samples.label, samples.row_ptr[:-1], samples.row)
    found = solve_where_they_lie(stage.ridge, lists, answer.shared)
    user = found.new_zeros(clients, found.shape[1])
    user[torch.from_numpy(samples.clients)] = found
    return {"user": user}
