"""The slow, obvious engine: one client after another, autograd and torch.optim, no padding, no mask, no mapping.

It takes the algorithm's own functions for one client and the same randomness, so the batched engine must give the same numbers.
`python -m fedbench bench` times the batched engine against it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import Algorithm, Answer, Batch, Phase, Stage, Tensors, World
from fedbench.contract.randomness import keys
from fedbench.contract.uploads import Rows, Uploads
from fedbench.data.sampling import Samples
from fedbench.kernels.shuffling import orders


def make_optimizer(phase: Phase, held: Tensors) -> torch.optim.Optimizer:
    parameters = [held[name].requires_grad_() for name in phase.names]
    if phase.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=phase.lr, weight_decay=phase.weight_decay)
    return {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[phase.optimizer](parameters, lr=phase.lr)


def run_cohort(
    algorithm: Algorithm,
    world: World,
    server: Tensors,
    kept: Tensors,
    samples: Samples,
    seed: int,
    when: int,
    epochs: np.ndarray | None = None,
) -> tuple[Uploads, list[float]]:
    """One round. `kept` (name -> [U, ...]) is updated in place; returns the uploads and each client's running mean loss."""
    answer = algorithm.answer(server)
    stream, halves = (keys(seed, when, purpose, samples.clients) for purpose in ("shuffle", "halves"))
    uploaded, losses = [], []
    for c, client in enumerate(samples.clients):
        rows = torch.from_numpy(samples.row[samples.row_ptr[c] : samples.row_ptr[c + 1]].astype(np.int64))
        local = torch.from_numpy(samples.local[samples.ptr[c] : samples.ptr[c + 1]].astype(np.int64))
        label = torch.from_numpy(samples.label[samples.ptr[c] : samples.ptr[c + 1]])
        mine = algorithm if epochs is None else replace(algorithm, local_epochs=int(epochs[c]))
        one, loss = run_client(mine, answer, kept, int(client), rows, local, label, stream[c : c + 1], halves[c : c + 1])
        uploaded.append((rows, one))
        losses.append(loss)
    return stack(algorithm, world, kept, samples, uploaded), losses


def run_client(
    algorithm: Algorithm,
    answer: Answer,
    kept: Tensors,
    client: int,
    rows: Tensor,
    local: Tensor,
    label: Tensor,
    key: np.ndarray,
    halves: np.ndarray,
) -> tuple[Tensors, float]:
    """Receive, work through the stages, keep, upload."""
    own = {name: tensor[client] for name, tensor in kept.items()}
    sent = sent_to(answer, client)
    held = algorithm.receive(own, sent)
    kept_tables = [name for name in algorithm.tables if name in kept]
    whole = {name: held[name] for name in kept_tables}
    held = {name: (value[rows] if name in algorithm.tables else value).clone() for name, value in held.items()}
    sent = {name: value[rows] if name in algorithm.tables else value for name, value in sent.items()}
    dtype = next((value.dtype for value in held.values()), torch.float64)
    loss, epoch = 0.0, 0
    for stage in algorithm.stages(sent):
        take = samples_of(stage, len(label), halves)
        mine = Batch(local[take], label[take].to(dtype), torch.ones(len(take), dtype=dtype))
        if stage.phases:
            loss, steps = train_client(algorithm, stage, held, sent, mine, key, epoch)
        else:
            held, loss, steps = {**held, **algorithm.solve(held, sent, mine)}, 0.0, 0
        epoch += stage.epochs
        for name in kept_tables:
            whole[name] = whole[name] * math.prod(phase.decay(name) for phase in stage.phases) ** steps
    for name in kept:
        if name in kept_tables:
            kept[name][client] = whole[name]
            kept[name][client][rows] = held[name]
        else:
            kept[name][client] = held[name]
    mine_now = {**held, **{name: kept[name][client] for name in kept_tables}}
    return algorithm.upload(mine_now, {} if kept_tables else sent, torch.tensor(float(len(label)))), loss


def samples_of(stage: Stage, count: int, halves: np.ndarray) -> Tensor:
    """Positions of the samples that a stage works on."""
    order = np.arange(count)
    if stage.part != "all" or stage.max_samples is not None:
        orders(halves, np.array([0, count]), 0, 1, order)
    half = math.ceil(count / 2)
    part = {"all": order, "support": order[:half], "query": order[half:]}[stage.part]
    return torch.from_numpy(part[: stage.max_samples])


def train_client(
    algorithm: Algorithm, stage: Stage, held: Tensors, sent: Tensors, mine: Batch, key: np.ndarray, first_epoch: int
) -> tuple[float, int]:
    """A stage's epochs over shuffled batches, `held` trained in place; returns the running mean loss and the number of steps."""
    count = len(mine.label)
    if count == 0:
        return 0.0, 0
    optimizers = [make_optimizer(phase, held) for phase in stage.phases]
    total, seen, before, steps = 0.0, 0, 0.0, 0
    size = stage.batch_size or count
    order = np.empty(count, np.int64)
    for epoch in range(stage.epochs):
        orders(key, np.array([0, count]), first_epoch + epoch, size, order)
        for take in torch.from_numpy(order).split(size):
            if steps == stage.max_steps:
                break
            batch = Batch(*(part[take] for part in mine))
            for phase, optimizer in zip(stage.phases, optimizers, strict=True):
                optimizer.zero_grad()
                loss = algorithm.loss(held, sent, batch)
                loss.backward()
                for name in phase.names:
                    if held[name].grad is None:  # not in the loss: an optimizer that decays weights must not skip it
                        held[name].grad = torch.zeros_like(held[name])
                if phase.clip:
                    torch.nn.utils.clip_grad_norm_([held[name] for name in phase.names], phase.clip)
                optimizer.step()
            steps += 1
            total += float(loss.detach()) * len(take)
            seen += len(take)
        mean = total / seen
        if epoch > 0 and abs(mean - before) / abs(before + 1e-5) < algorithm.stop_below:
            break
        before = mean
    for tensor in held.values():
        tensor.requires_grad_(False)
    return mean, steps


def sent_to(answer: Answer, client: int) -> Tensors:
    """What the server sends to one client."""
    sent = dict(answer.shared)
    if answer.slot is not None and answer.slot[client] >= 0:
        sent |= {name: value[answer.slot[client]] for name, value in answer.personal.items()}
    return sent


def stack(algorithm: Algorithm, world: World, kept: Tensors, samples: Samples, uploaded: list[tuple[Tensor, Tensors]]) -> Uploads:
    """The clients' uploads side by side."""
    tensors: dict[str, Tensor | Rows] = {}
    for name in uploaded[0][1]:
        if name in algorithm.tables and name not in kept:
            counts = torch.tensor([len(rows) for rows, _ in uploaded])
            item = torch.cat([rows for rows, _ in uploaded])
            tensors[name] = Rows(counts, item, torch.cat([one[name] for _, one in uploaded]))
        else:
            tensors[name] = torch.stack([one[name] for _, one in uploaded])
    return Uploads(world, torch.from_numpy(samples.clients), tensors, algorithm.travels_whole(world), algorithm.summed)
