"""The golden net: what every built-in method computes, kept as numbers and digests, so that a change of the house changes no result.

    python -m tests.golden            compare every case with tests/golden.json (`make golden`)
    python -m tests.golden --write    make tests/golden.json anew, after a change that is meant to move results
    python -m tests.golden --write fedmf colr    for some methods alone

A case is a whole run on synthetic data: method, recipe, dtype, kernel, threads. Its digests cover metrics.jsonl, every client's ranks and
the kept model to the last bit; they hold on the machine that wrote them and are compared there alone: what is written for some methods on
another machine has none. The numbers of a float64 run on one thread (metrics of every round, and a few sums over the model) are compared
everywhere, to 1e-9; a few of some methods that LOOSE names less closely.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import math
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from safetensors.numpy import load_file
from tqdm import tqdm

from fedbench.commands import cli
from fedbench.contract import registry

FILE = Path(__file__).with_suffix(".json")
DATA = ("--dataset", "synthetic", "--users", "40", "--items", "90", "--interactions", "12")
HOW = ("--rounds", "3", "--no-mlflow", "--quiet", "--keep-state", "best", "--checkpoint-every", "never", "--device", "cpu")
VARIANTS: dict[str, tuple[str, ...]] = {
    "colr": ("-n 17",),
    "fedavg_ncf": ("-n 17", "-n 9 --weight-decay 0.1"),
    "fedcia": ("--dim 8",),
    "fedem": ("", "--merge static", "--merge replace", "-n 17 --agg-ratio 0.5"),
    "fedmf": ("", "-n 17 --server adam --server-lr 0.05", "--dropout 0.2 --stragglers 0.3 --corrupt 0.1", "--refit"),
    "fedrec_mf": ("--fold 0", "--feedback implicit"),
    "fedrecon": ("-n 17", "-n 17 --feedback explicit", "-n 17 --reconstruct ridge --server sgd --negatives 4"),
}
"""flags that take other paths through the engine, beside the method's own; the flags of a line"""
SPEED = ("seconds",)
"""what of a round's line depends on the machine's speed"""
TOLERANCE = 1e-9
LOOSE: dict[str, tuple[str, float]] = {
    # items that the same users met score alike but for the last bits of an inverse, which decide who is ranked first
    **dict.fromkeys(("central_ease", "fedease"), ("hr_ mrr ndcg_", 0.02)),
    # bases of tables, whose last bits Adam magnifies, and maps that are nearly singular inverses
    "fedca": ("", 1e-6),
    "fedcia": ("", 1e-3),
}
"""methods in which another processor's linear algebra can be seen: in numbers with one of these in their names, and how far they may be"""


class Case(NamedTuple):
    """One run."""

    algo: str
    protocol: str
    flags: tuple[str, ...]
    dtype: str
    kernel: str
    threads: int

    @property
    def name(self) -> str:
        return " ".join([self.algo, self.protocol, *self.flags, self.dtype, f"kernel={self.kernel}", f"threads={self.threads}"])

    @property
    def has_numbers(self) -> bool:
        """Whether its numbers say something on any machine; of others the last bits are looked at, where that can be done."""
        return self.dtype == "float64" and self.threads == 1

    def line(self, out: Path) -> list[str]:
        how = ["--dtype", self.dtype, "--kernel", self.kernel, "--threads", str(self.threads), "--out", str(out)]
        return ["--algo", self.algo, "--protocol", self.protocol, *self.flags, *DATA, *HOW, *how]


def cases() -> Iterator[Case]:
    """Every built-in method × recipe × dtype × kernel × threads."""
    for algo in registry.algorithms():
        for flags in VARIANTS.get(algo, ("",)):
            for rest in itertools.product(("clean", "published"), ("float32", "float64"), ("auto", "off"), (1, 2)):
                protocol, dtype, kernel, threads = rest
                if protocol == "clean" or flags != "--refit":  # a round that was chosen on test is not trained for again
                    yield Case(algo, protocol, tuple(flags.split()), dtype, kernel, threads)


BY_KERNEL = ("fedmf", "fedrecon")
"""methods of which CI runs the first variant by kernel as well;
the common tests compare all methods' kernels with a loop, those of some in the long form alone"""


def short_cases() -> list[Case]:
    """What CI runs: each model in float64 on one thread by its own code, and a few by kernel under the clean protocol."""

    def by_kernel(case: Case) -> bool:
        return case.algo in BY_KERNEL and case.protocol == "clean" and case.flags == tuple(VARIANTS.get(case.algo, ("",))[0].split())

    return [case for case in cases() if case.dtype == "float64" and case.threads == 1 and (case.kernel == "off" or by_kernel(case))]


def outcome(case: Case) -> dict[str, Any]:
    """What a run left: digests of its files, and its numbers."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        if code := cli.main(case.line(out)):
            raise SystemExit(f"{case.name}: exit code {code}")
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        lines = [{key: value for key, value in line.items() if key not in SPEED} for line in lines]
        clients = pd.read_parquet(out / "per_client.parquet")
        model = load_file(out / "checkpoint" / "model.safetensors")
        summary = json.loads((out / "summary.json").read_text())
    exact = {
        "metrics": digest(json.dumps(lines, sort_keys=True).encode()),
        "clients": digest(*(clients[name].to_numpy().astype(str).astype("S").tobytes() for name in sorted(clients))),
        "model": digest(*(name.encode() + model[name].tobytes() for name in sorted(model))),
    }
    if not case.has_numbers:
        return {"fingerprint": summary["protocol_fingerprint"], "exact": exact}
    numbers = {f"{line['round']} {key}": value for line in lines for key, value in line.items() if key != "round"}
    numbers |= {f"model {name} {kind}": value for name, tensor in model.items() for kind, value in sums(tensor).items()}
    return {"fingerprint": summary["protocol_fingerprint"], "exact": exact, "numbers": numbers}


def sums(tensor: np.ndarray) -> dict[str, float]:
    """Three sums that see size, sign and place of every number."""
    flat = tensor.astype(np.float64).ravel()
    return {"norm": float(np.linalg.norm(flat)), "sum": float(flat.sum()), "wave": float(flat @ np.cos(np.arange(flat.size)))}


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def machine() -> str:
    """What the last bits of a result depend on besides the code: the processor and the libraries that compute."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        facts = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        cpu = " ".join(value.strip() for key, value in facts.items() if key.strip() in ("model name", "flags"))
    versions = [importlib.metadata.version(name) for name in ("torch", "numpy", "numba", "scipy")]
    return digest(cpu.encode(), *(version.encode() for version in versions))


def tolerance(algo: str, name: str) -> float:
    """How far a number may be from that of another machine, as a share of it and as a number."""
    parts, loose = LOOSE.get(algo, ("", TOLERANCE))
    return loose if not parts or any(part in name for part in parts.split()) else TOLERANCE


def differences(found: dict[str, Any], expected: dict[str, Any], exactly: bool, algo: str = "") -> list[str]:
    """What is not as it was, in words."""
    if found["fingerprint"] != expected["fingerprint"]:
        return [f"protocol fingerprint {found['fingerprint']}, was {expected['fingerprint']}"]
    if exactly and "exact" in expected:
        return [f"{part} not bit for bit as before" for part in expected["exact"] if found["exact"][part] != expected["exact"][part]]
    here, there = found.get("numbers", {}), expected.get("numbers", {})
    names = [f"{name} {'is gone' if name in there else 'is new'}" for name in sorted(here.keys() ^ there.keys())]
    far = {name: tolerance(algo, name) for name in here.keys() & there.keys()}
    moved = [name for name, most in far.items() if not math.isclose(here[name], there[name], rel_tol=most, abs_tol=most)]
    return names + [f"{name} is {here[name]!r}, was {there[name]!r}" for name in sorted(moved)]


def check(some: Sequence[Case], expected: dict[str, Any], exactly: bool) -> list[str]:
    """Run the cases; what differs, a line each."""
    found = []
    for case in tqdm(some, unit="run"):
        if case.name not in expected and (exactly or case.has_numbers):
            found.append(f"{case.name}: not in {FILE.name}; `python -m tests.golden --write` adds it")
        if case.name not in expected:
            continue
        found += [f"{case.name}: {what}" for what in differences(outcome(case), expected[case.name], exactly, case.algo)[:3]]
    return found


def write(some: Sequence[Case], golden: dict[str, Any], methods: Sequence[str]) -> None:
    """Keep what runs leave now: all of them, or those of some methods beside what is known of the others."""
    here = not methods or golden["machine"] == machine()
    kept = {name: case for name, case in golden["cases"].items() if methods and name.split()[0] not in methods}
    for case in tqdm([case for case in some if (not methods or case.algo in methods) and (here or case.has_numbers)], unit="run"):
        kept[case.name] = {part: value for part, value in outcome(case).items() if here or part != "exact"}
    FILE.write_text(
        json.dumps({"machine": machine() if not methods else golden["machine"], "cases": kept}, indent=0, sort_keys=True) + "\n"
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description="Compare what every method computes with what it did.")
    parser.add_argument("--write", nargs="*", metavar="METHOD", help="keep today's results as the golden ones, of all methods or of these")
    options = parser.parse_args(argv)
    some = list(cases())
    golden = json.loads(FILE.read_text())
    if options.write is not None:
        write(some, golden, options.write)
        return 0
    exactly = golden["machine"] == machine()
    print(f"{len(some)} cases, compared {'bit for bit' if exactly else 'by their numbers: written on another machine'}")
    wrong = check(some, golden["cases"], exactly)
    print("\n".join(wrong) or "all as they were")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
