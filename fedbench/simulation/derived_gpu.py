"""Kernels for GPUs, derived from an algorithm's own loss as those for a CPU are: written in Triton, one program a client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import Algorithm, Phase, Stage, Tensors
from fedbench.kernels.compiler import build
from fedbench.kernels.compiler.driver import how_rows
from fedbench.kernels.compiler.triton_driver import TileModel
from fedbench.kernels.compiler.weights import Degrees
from fedbench.kernels.optimizers import BETA1, BETA2
from fedbench.simulation.blocks import Block
from fedbench.simulation.derived import Kernels, Shapes, gradient_graph, update, watched

TILE = 16
"""rows of a client that are looked at together, at most"""

MOST_REGISTERS = 255
"""of a thread, on NVIDIA's GPUs"""


@dataclass(frozen=True, eq=False)
class GpuKernel:
    """A way to train the clients of one algorithm by the phases of one stage, on a GPU."""

    model: TileModel
    module: ModuleType
    changes: bool
    """the loss depends on the round, so its numbers are looked up in every round"""
    constants: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    """further options for the compiler"""

    @property
    def widest(self) -> int:
        """Numbers of the widest value of a sample."""
        return max(width for step in self.model.steps for width in (*step.widths, *step.tables.values()))

    @property
    def tile(self) -> int:
        """Rows of a client that are looked at together: fewer of wide ones, so that a tile takes only a few registers of each thread."""
        return TILE if self.widest <= 64 else TILE // 2

    @property
    def warps(self) -> int:
        """Groups of 32 threads of a program, for the same reason."""
        return 4 if self.widest <= 32 else 8

    def numbers(self, like: Tensor) -> Tensor:
        """The loss's own numbers on a device, sent once."""
        key = like.dtype, like.device
        if key not in self.constants:
            self.constants[key] = torch.tensor(self.model.constants.values or [0.0], dtype=like.dtype, device=like.device)
        return self.constants[key]

    def train(self, samples: Mapping[str, Any], held: Tensors, sent: Tensors, plan: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Running mean losses and steps, [C] each. What is held and trained changes in place."""
        model, some = self.model, next(iter(held.values()))
        clients, height = samples["labels"].shape
        given: dict[str, Any] = {**samples, **plan, "height": height, "numbers": self.numbers(some)}
        for key in model.tables:
            given[f"q_{key[0][0]}_{key[1]}"] = (held if key[0] == "held" else sent)[key[1]].contiguous()
        for key in model.params:
            value = (held if key[0] == "held" else sent)[key[1]]
            whole = value[:1].contiguous() if value.stride(0) == 0 and len(value) > 1 else value.contiguous()  # the same for all clients
            given[f"p_{key[0][0]}_{key[1]}"], given[f"by_{key[0][0]}_{key[1]}"] = whole, 0 if len(whole) < clients else value[0].numel()
        for name, (rows, width) in model.kept.items():
            given[name] = some.new_zeros(clients, height, width) if rows else some.new_zeros(clients, width)
        given["acts"], given["tmp"] = some.new_empty(clients, height, model.acts), some.new_empty(clients, model.tmp)
        given["losses"], given["steps"] = some.new_zeros(clients), torch.zeros(clients, dtype=torch.int32, device=some.device)
        options = {"num_warps": self.warps, "num_stages": 1, **self.limits}
        with torch.cuda.device_of(some):  # Triton launches on the current device, whatever the tensors' is
            done = self.module.train[(clients,)](*(given[name] for name in model.arguments()), TILE=self.tile, **options)
        if getattr(done, "n_spills", 0) and torch.version.hip is None:
            # NVIDIA's assembler may give a thread fewer registers than there are, and spill; from the next launch on it may take them
            self.limits["maxnreg"] = MOST_REGISTERS
        return given["losses"], given["steps"]


class GpuKernels(Kernels):
    """The derived kernels of one engine on a GPU."""

    def made(self, algorithm: Algorithm, stage: Stage, shapes: tuple[Shapes, Shapes]) -> Any:
        return made(algorithm, stage, shapes)

    def train(
        self, kernel: Any, algorithm: Algorithm, block: Block, held: Tensors, sent: Tensors, stage: Stage, epoch: int
    ) -> tuple[Tensors, Tensor, Tensor]:
        return train_block(kernel, algorithm, block, held, sent, stage, epoch)


def made(algorithm: Algorithm, stage: Stage, shapes: tuple[Shapes, Shapes]) -> GpuKernel:
    """Trace, write and load a kernel; Triton compiles it when it is first called."""
    watching, context = watched(algorithm)
    graphs = [gradient_graph(watching, phase, *shapes) for phase in stage.phases]
    for _, outputs in graphs:
        Degrees().needs_all_rows(outputs)  # raises where samples of one item may not be taken together
    updates = tuple(update(algorithm, number, name, phase, *shapes) for number, phase in enumerate(stage.phases) for name in phase.names)
    model = TileModel(graphs, updates)
    return GpuKernel(model, build.load(model.text(type(algorithm).__name__)), context.asked)


def train_block(
    kernel: GpuKernel, algorithm: Algorithm, block: Block, held: Tensors, sent: Tensors, stage: Stage, epoch: int
) -> tuple[Tensors, Tensor, Tensor]:
    """Train a block by a derived kernel. Returns what is held then, running mean losses and steps."""
    held = {name: value.clone(memory_format=torch.contiguous_format) for name, value in held.items()}
    width = block.local.shape[1]
    size = min(stage.batch_size or width, width)
    most = stage.epochs * -(-width // size)
    most = most if stage.max_steps is None else min(most, stage.max_steps)
    some = next(iter(held.values()))
    plan = {"epochs": stage.epochs, "batch": size, "most_steps": most, **paces(kernel.model, stage.phases, most, algorithm, some)}
    loss, steps = kernel.train(row_lists(block, epoch, stage.epochs, size, some.dtype), held, sent, plan)
    return held, loss, steps


def paces(model: TileModel, phases: tuple[Phase, ...], steps: int, algorithm: Algorithm, like: Tensor) -> dict[str, Tensor]:
    """The optimizers' numbers: of every step Adam's corrections and the rates, then what stays the same."""
    how, clips = how_rows(model.updates, phases)
    step = np.arange(1, 1 + max(1, steps))[:, None]
    rates = np.array([row[0] for row in how]) * np.array([row[3] for row in how]) ** (step - 1)
    pace = np.concatenate([1 / (1 - BETA1**step), 1 / np.sqrt(1 - BETA2**step), rates], axis=1)
    fixed = [*(number for row in how for number in (row[1], row[2], row[4])), *clips, algorithm.stop_below]
    return {name: torch.from_numpy(np.array(value)).to(like.device, like.dtype) for name, value in (("pace", pace), ("how", fixed))}


def row_lists(block: Block, epoch: int, epochs: int, batch: int, dtype: torch.dtype) -> dict[str, Any]:
    """Which samples use each row, and where they are in the order of each epoch; made where the block lies."""
    clients, width = block.local.shape
    height = block.rows.shape[1]
    device = block.local.device
    real = torch.arange(width, device=device) < block.count[:, None]
    # padding is put on a row behind the last: sorted, it comes last, and `first` never reaches it
    local = torch.where(real, block.local, height).to(torch.int64)
    sorted_rows, by_row = torch.sort(local, dim=1, stable=True)
    ends = torch.arange(height + 1, device=device).expand(clients, -1).contiguous()
    first = torch.searchsorted(sorted_rows, ends)
    labels = torch.zeros(clients, height + 1, dtype=dtype, device=device).scatter_(1, local, block.label.to(dtype))[:, :height]
    # where everybody has one batch, the order of samples makes no difference: one list for all epochs
    shuffled = bool((block.counts > batch).any())
    position = torch.arange(width, device=device, dtype=torch.int32).expand(clients, -1)
    places = [torch.zeros_like(position).scatter_(1, block.order(e, batch), position) for e in range(epoch, epoch + epochs * shuffled)]
    return {
        "labels": labels.contiguous(),
        "first": first.to(torch.int32),
        "places": torch.stack([one.gather(1, by_row) for one in places or [position]]),
        "counts": block.count.to(torch.int32),
        "heights": block.height.to(torch.int32),
        "used": first.diff(dim=1).amax(dim=1).to(torch.int32),
        "longest": width,
        "by_epoch": clients * width if shuffled else 0,
    }
