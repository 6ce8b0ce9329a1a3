"""How much memory the machine has left."""

from __future__ import annotations


def free_memory() -> float:
    """Bytes that can still be had without swapping; infinite where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")
