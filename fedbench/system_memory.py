"""How much memory the machine and its GPUs have left."""

from __future__ import annotations


def free_memory() -> float:
    """Bytes that can still be had without swapping; infinite where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def free_gpu_memory(device: str) -> float:
    """Bytes that a GPU can still give."""
    import torch

    return float(torch.cuda.mem_get_info(device)[0])


def memory_of(device: str) -> str:
    """What a device's memory is called in a sentence."""
    return f"the memory of {device}" if device.startswith("cuda") else "memory"
