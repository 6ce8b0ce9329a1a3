"""The slow, obvious engine: one client after another, autograd and torch.optim, no padding, no mask, no mapping.

It takes the algorithm's own functions for one client and the same randomness, so the batched engine must give the same numbers.
`python -m fedbench bench` times the batched engine against it.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import SHARED, Algorithm, Answer, Batch, Phase, Stage, Tensors, World
from fedbench.contract.randomness import keys
from fedbench.contract.uploads import Rows, Uploads
from fedbench.data.sampling import Samples
from fedbench.kernels.shuffling import orders


def make_optimizer(phase: Phase, leaves: Tensors) -> torch.optim.Optimizer:
    """One of torch's own, with a group for each name, since rates may differ."""
    groups = [{"params": [leaves[name].requires_grad_()], "lr": phase.rate(name)} for name in phase.names]
    if phase.optimizer == "adamw":
        return torch.optim.AdamW(groups, weight_decay=phase.weight_decay)
    if phase.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=phase.momentum, weight_decay=phase.weight_decay)
    return torch.optim.Adam(groups)


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
    algorithm = algorithm.at(when, world)
    answer = algorithm.answer(server)
    stream, halves = (keys(seed, when, purpose, samples.clients) for purpose in ("shuffle", "halves"))
    uploaded, losses = [], []
    for c, client in enumerate(samples.clients):
        rows = torch.from_numpy(samples.row[samples.row_ptr[c] : samples.row_ptr[c + 1]].astype(np.int64))
        local = torch.from_numpy(samples.local[samples.ptr[c] : samples.ptr[c + 1]].astype(np.int64))
        label = torch.from_numpy(samples.label[samples.ptr[c] : samples.ptr[c + 1]])
        mine = algorithm if epochs is None else algorithm.with_epochs(int(epochs[c]))
        batch = Batch(local, label, torch.ones_like(label))
        one, loss = run_client(mine, answer, kept, int(client), rows, batch, (stream[c : c + 1], halves[c : c + 1]))
        uploaded.append((rows, one))
        losses.append(loss)
    return stack(algorithm, world, kept, samples, uploaded), losses


def run_client(
    algorithm: Algorithm,
    answer: Answer,
    kept: Tensors,
    client: int,
    rows: Tensor,
    samples: Batch,
    keys_: tuple[np.ndarray, np.ndarray],
) -> tuple[Tensors, float]:
    """Receive whole tables, work through the stages on the touched rows, upload, keep. keys_: of the shuffles and of the halves."""
    tables, own = algorithm.tables, {name: tensor[client] for name, tensor in kept.items()}
    sent = sent_to(answer, client)
    whole = {name: value.clone() for name, value in algorithm.receive(own, sent).items()}
    received = {name: value[rows] if name in tables else value for name, value in sent.items()}
    dtype = next((value.dtype for value in whole.values()), torch.float64)
    loss, epoch = 0.0, 0
    for stage in algorithm.stages(received):
        take = samples_of(stage, len(samples.label), keys_[1])
        ones = torch.ones(max(len(take), len(rows)), dtype=dtype)
        mine = Batch(samples.items[take], samples.label[take].to(dtype), ones[: len(take)], ones[: len(rows)])
        if stage.phases:
            loss = train_client(algorithm, stage, whole, received, sent, rows, mine, (keys_[0], epoch))
        else:
            held = touched(whole, rows, tables)
            for name, value in algorithm.solve(held, received, mine).items():
                put(whole, name, value, rows, tables)
        epoch += stage.epochs
    held = touched(whole, rows, tables)
    count = torch.tensor(float(len(samples.label)), dtype=dtype)
    uploaded = algorithm.upload(held, received, count)
    if any(name in algorithm.own_tables for name in uploaded):
        everything = algorithm.upload(whole, sent, count)
        uploaded = {name: everything[name] if name in algorithm.own_tables else value for name, value in uploaded.items()}
    for name in algorithm.own_tables:  # rows that no sample touches are kept as they are by now, whatever `keep` says of others
        kept[name][client] = whole[name]
    for name, value in algorithm.keep(held, received).items():
        if name in kept and name in tables:
            kept[name][client][rows] = value
        elif name in kept:
            kept[name][client] = value
    return uploaded, loss


def touched(whole: Tensors, rows: Tensor, tables: Collection[str]) -> Tensors:
    """What the client holds in training: of tables the rows that its samples touch."""
    return {name: value[rows] if name in tables else value for name, value in whole.items()}


def put(whole: Tensors, name: str, value: Tensor, rows: Tensor, tables: Collection[str]) -> None:
    if name in tables:
        whole[name] = whole[name].index_copy(0, rows, value)
    else:
        whole[name] = value


def samples_of(stage: Stage, count: int, halves: np.ndarray) -> Tensor:
    """Positions of the samples that a stage works on."""
    order = np.arange(count)
    if stage.part != "all" or stage.max_samples is not None:
        orders(halves, np.array([0, count]), 0, 1, order)
    half = math.ceil(count / 2)
    part = {"all": order, "support": order[:half], "query": order[half:]}[stage.part]
    return torch.from_numpy(part[: stage.max_samples])


def train_client(
    algorithm: Algorithm,
    stage: Stage,
    whole: Tensors,
    sent: Tensors,
    known: Tensors,
    rows: Tensor,
    mine: Batch,
    order_of: tuple[np.ndarray, int],
) -> float:
    """A stage's epochs over shuffled batches, `whole` trained in place; returns the running mean loss.

    known: what was sent, whole tables. order_of: the key of the shuffles and the number of the first epoch.
    """
    count, tables = len(mine.label), algorithm.tables
    if count == 0:
        return 0.0
    # weight decay and pulls move every row of an own table, so there the whole table is trained; else the touched rows are enough
    everywhere = [n for n in algorithm.own_tables if any(n in p.names and (p.weight_decay or n in p.pull) for p in stage.phases)]
    leaves = {n: (v[rows] if n in tables and n not in everywhere else v).clone() for n, v in whole.items()}
    targets = {name: {**whole, **known}[pull.target] for phase in stage.phases for name, pull in phase.pull.items()}
    toward = {n: v[rows] if n in tables and n not in everywhere else v for n, v in targets.items()}

    def held() -> Tensors:
        return {name: value[rows] if name in everywhere else value for name, value in leaves.items()}

    optimizers = [make_optimizer(phase, leaves) for phase in stage.phases]
    total, seen, before, steps = 0.0, 0, 0.0, 0
    size = stage.batch_size or count
    order = np.empty(count, np.int64)
    for epoch in range(stage.epochs):
        orders(order_of[0], np.array([0, count]), order_of[1] + epoch, size, order)
        for take in torch.from_numpy(order).split(size):
            if steps == stage.max_steps:
                break
            batch = Batch(mine.items[take], mine.label[take], mine.weight[take], mine.rows)
            for phase, optimizer in zip(stage.phases, optimizers, strict=True):
                loss = step(algorithm, phase, optimizer, leaves, held(), sent, batch, toward)
            steps += 1
            total += loss * len(take)
            seen += len(take)
        mean = total / seen
        if epoch > 0 and abs(mean - before) / abs(before + 1e-5) < algorithm.stop_below:
            break
        before = mean
    for name, tensor in leaves.items():
        if name in everywhere:
            whole[name] = tensor.detach()
        else:
            put(whole, name, tensor.detach(), rows, tables)
    return mean


def step(
    algorithm: Algorithm,
    phase: Phase,
    optimizer: torch.optim.Optimizer,
    leaves: Tensors,
    held: Tensors,
    sent: Tensors,
    batch: Batch,
    toward: Tensors,
) -> float:
    """One phase of one batch; the loss before it."""
    optimizer.zero_grad()
    for leaf in leaves.values():
        leaf.grad = None
    loss = algorithm.loss(held, sent, batch)
    loss.backward()
    for name in phase.names:
        if leaves[name].grad is None:  # not in the loss: an optimizer that decays weights must not skip it
            leaves[name].grad = torch.zeros_like(leaves[name])
    if phase.clip:
        torch.nn.utils.clip_grad_norm_([leaves[name] for name in phase.names], phase.clip)
    gaps = {name: pull.weight * (leaves[name].detach() - toward[name]) for name, pull in phase.pull.items()}
    if phase.optimizer == "sgd":
        for name, gap in gaps.items():
            leaves[name].grad = leaves[name].grad + gap  # type: ignore[operator]
    optimizer.step()
    if phase.optimizer != "sgd":  # decoupled from the moments, as adamw's decay is
        for group, name in zip(optimizer.param_groups, phase.names, strict=True):
            leaves[name].data -= group["lr"] * gaps.get(name, 0)
    for group in optimizer.param_groups:
        group["lr"] *= phase.lr_decay
    return float(loss.detach())


def sent_to(answer: Answer, client: int) -> Tensors:
    """What the server sends to one client."""
    sent = dict(answer.shared)
    if answer.slot is None:
        return sent
    if answer.slot[client] < 0:
        return {**sent, **answer.instead}
    return sent | {name: value[answer.slot[client]] for name, value in answer.personal.items()}


def stack(algorithm: Algorithm, world: World, kept: Tensors, samples: Samples, uploaded: list[tuple[Tensor, Tensors]]) -> Uploads:
    """The clients' uploads side by side."""
    tensors: dict[str, Tensor | Rows] = {}
    for name in uploaded[0][1]:
        if algorithm.tables.get(name) == SHARED:
            counts = torch.tensor([len(rows) for rows, _ in uploaded])
            item = torch.cat([rows for rows, _ in uploaded])
            tensors[name] = Rows(counts, item, torch.cat([one[name] for _, one in uploaded]))
        else:
            tensors[name] = torch.stack([one[name] for _, one in uploaded])
    who = torch.from_numpy(samples.clients)
    return Uploads(
        world, who, tensors, algorithm.travels_whole(world), algorithm.summed, bits=algorithm.bits(world), paired=algorithm.paired
    )
