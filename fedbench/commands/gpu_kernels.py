"""What the kernels for GPUs become, without a GPU: registers, spills, and counted operations and bytes.

python -m fedbench.commands.gpu_kernels     writes docs/results/gpu_kernels.json and the tables of docs/performance.md; needs Triton
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm, Stage, Tensors
from fedbench.contract.randomness import Draw
from fedbench.kernels.compiler.indices import LANE
from fedbench.kernels.compiler.triton_driver import SAMPLES, SIZES
from fedbench.simulation import derived_gpu
from fedbench.simulation.derived import Shapes, lane_work
from fedbench.simulation.federation import Federation, world_of
from fedbench.simulation.probe import tiny

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "docs" / "results" / "gpu_kernels.json", ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- gpu-kernels:begin -->", "<!-- gpu-kernels:end -->"
DIMS = (16, 64)
TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
"""A100, H100 and MI300"""
CLIENTS, ITEMS = 7, 53
NUMBER = 4
"""bytes of a float32"""
STEP_WORK = {"adam": 12, "adamw": 14, "sgd": 2}
"""operations on a number in a step of an optimizer; a root and a quotient are one each"""


def methods(dim: int) -> Iterator[tuple[str, Algorithm, bool]]:
    """Built-in methods that train by steps, and whether a client has been sent something."""
    of = registry.algorithms()
    adapter = (2 * dim, dim, dim // 2, 1)
    fedem: Any = replace(of["fedem"](), dim=dim, adapter=adapter)  # type: ignore[call-arg]
    published = replace(fedem, **of["fedem"].published)
    yield "fedmf", replace(of["fedmf"](), dim=dim), True
    yield "local", replace(of["local"](), dim=dim), False
    yield "fedem, before the first answer", fedem, False
    yield "fedem", fedem, True
    yield "fedem, published", published, True
    yield "fedavg_ncf", replace(of["fedavg_ncf"](), dim=dim), True
    yield "fedrec_mf", replace(of["fedrec_mf"](), dim=dim), True
    yield "fedrec_mf, implicit", replace(of["fedrec_mf"](), dim=dim, feedback="implicit"), True  # type: ignore[call-arg]
    yield "fedrecon by sgd", replace(of["fedrecon"](), dim=dim, reconstruct="sgd", server="adam", negatives=4), True  # type: ignore[call-arg]
    for name in ("pfedrec", "fedrap", "colr", "fedcia", "fedfast", "lightfr"):
        yield name, replace(of[name](), dim=dim), True
    yield "fedncf", replace(of["fedncf"](), dim=dim, layers=(2 * dim, dim, dim // 2)), True  # type: ignore[call-arg]
    yield "gpfedrec", replace(of["gpfedrec"](), dim=dim, layers=adapter), True  # type: ignore[call-arg]
    yield "fedca", replace(of["fedca"](), dim=dim, adapter=adapter), True  # type: ignore[call-arg]


def kernels(dim: int) -> Iterator[tuple[str, Stage, derived_gpu.GpuKernel]]:
    """The kernel of each stage of each method, as its first client trains once it was answered by a server that has aggregated, or not."""
    for name, algorithm, answered in methods(dim):
        split = tiny(CLIENTS, ITEMS, algorithm.predicts_ratings)
        federation, world = Federation.start(algorithm, split, 0, kernel="off", compile=False), world_of(split)
        if answered:
            federation.next_round()
        now = algorithm.at(1 + answered, world)
        own = {key: value[0] for key, value in now.init_client(world, Draw(0, 0, np.arange(1), torch.float32)).items()}
        sent: Tensors = {}
        if answered:
            answer = now.answer(federation.server)
            personal = answer.personal if answer.slot is not None else {}
            sent = {**answer.shared, **{key: value[0] for key, value in personal.items()}}
        held = now.receive(dict(own), dict(sent))
        trains = [stage for stage in now.stages(sent) if stage.phases]
        for number, stage in enumerate(trains, 1):
            said = f"{name}, stage {number}" if len(trains) > 1 else name
            yield said, stage, derived_gpu.made(now, stage, (shapes(now, held), shapes(now, sent)))


def shapes(algorithm: Algorithm, tensors: Tensors) -> Shapes:
    return {name: (LANE, *value.shape[1:]) if name in algorithm.tables else tuple(value.shape) for name, value in tensors.items()}


def compiled(kernel: derived_gpu.GpuKernel, target: str, number: str = "fp32") -> dict[str, int]:
    """Registers of a thread, and bytes or registers that are spilled to memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    whole = {*SAMPLES, "steps"} - {"labels"}
    types = {name: "*i32" if name in whole else "i32" if name in SIZES or name.startswith("by_") else f"*{number}"
             for name in kernel.model.arguments()}  # fmt: skip
    source = ASTSource(kernel.module.train, {**types, "TILE": "constexpr"}, {"TILE": kernel.tile})
    options = {"num_warps": kernel.warps, "num_stages": 1}
    made = compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    if "amdgcn" in made.asm:
        found = {key: int(value) for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", made.asm["amdgcn"])}
        return {"registers": found["vgpr_count"], "spilled": found["vgpr_spill_count"]}
    said = assembled(made.asm["ptx"], target)
    if said["spilled"]:  # as a run does, see GpuKernel.train
        made = compile(source, target=GPUTarget(*TARGETS[target]), options={**options, "maxnreg": derived_gpu.MOST_REGISTERS})
        said = assembled(made.asm["ptx"], target)
    return said


def text_of(kernel: derived_gpu.GpuKernel) -> str:
    return Path(str(kernel.module.__file__)).read_text()


def assembled(ptx: str, target: str) -> dict[str, int]:
    """What NVIDIA's assembler says of a kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_text(ptx)
        named = f"--gpu-name={target}{'a' if target == 'sm_90' else ''}"
        said = subprocess.run([tool, "-v", named, text, "-o", Path(folder) / "out"], capture_output=True, text=True, check=True).stderr
    registers, stores, loads = (re.search(what, said) for what in (r"Used (\d+) reg", r"(\d+) bytes spill stores", r"(\d+) bytes spill lo"))
    assert registers and stores and loads, said
    return {"registers": int(registers[1]), "spilled": int(stores[1]) + int(loads[1])}


def counted(kernel: derived_gpu.GpuKernel, stage: Stage) -> dict[str, int]:
    """Of one row: operations in a step, bytes that a step reads and writes, and bytes from and to the GPU's memory in all of a round."""
    model = kernel.model
    trained = [one for one in model.updates if one.table]
    work = sum(lane_work(outputs) for _, outputs in model.graphs)
    work += sum(STEP_WORK[one.optimizer] * one.width for one in trained)
    moved = sum(2 * one.width * (1 + len(one.state)) for one in trained)
    read = sum(width for step in model.steps for width in step.tables.values())
    rows = sum(model.tables.values()) + sum({one.name: one.width for one in trained}.values())
    return {"operations": work, "step_bytes": NUMBER * (moved + read + 2 * model.acts + 3), "round_bytes": NUMBER * (rows + moved // 2 + 3)}


def measured() -> list[dict[str, Any]]:
    found = []
    for dim in DIMS:
        for name, stage, kernel in kernels(dim):
            machines = {target: compiled(kernel, target) for target in TARGETS}
            found.append({"method": name, "dim": dim, "tile": kernel.tile, "warps": kernel.warps, **counted(kernel, stage), **machines})
            print(found[-1], file=sys.stderr)
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Both tables of the page."""
    heads = " | ".join(f"{target}: registers, spilled" for target in TARGETS)
    lines = [f"| method | d | rows a tile | warps | {heads} |", "|---|---|---|---|---|---|---|"]
    for one in found:
        cells = [f"{one[target]['registers']}, {one[target]['spilled']}" for target in TARGETS]
        lines.append(f"| {one['method']} | {one['dim']} | {one['tile']} | {one['warps']} | {' | '.join(cells)} |")
    lines += ["", "Counted from the graph, for one row that a client touches, in float32:", ""]
    lines += [
        "| method | d | operations a step | bytes a step | operations a byte | bytes a round from memory |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        share = one["operations"] / one["step_bytes"]
        lines.append(
            f"| {one['method']} | {one['dim']} | {one['operations']:,} | {one['step_bytes']:,} | {share:.1f} | {one['round_bytes']:,} |"
        )
    return "\n".join(lines)


def main() -> int:
    found = measured()
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
