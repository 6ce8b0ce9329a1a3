"""A device that is not there: its tensors say cuda:0, hold their values on the CPU, and refuse what a GPU's tensors refuse.

    with PretendDevice() as device:
        federation = Federation.start(algorithm, split, seed=0, device=device.name, kernel="off", compile=False)
        federation.next_round()
    print(device.waits, device.operations.total())

It finds tensors of host and device that are mixed up, and counts what is slow on a GPU, without one. What it computes is what the CPU
does. It says nothing about speed, memory or the kernels for GPUs.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from contextlib import ExitStack
from typing import Any, NoReturn, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

META = torch.device("meta")
"""the device as torch's own code knows it: the only one but the CPU that every build of torch can differentiate on"""
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim", "bincount"}
"""operations whose result the host must know before it can go on"""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
"""operations that take indices of the host on a device, at the price of a copy"""
TENSOR = torch.tensor
NOT_OURS = ("site-packages", __file__, "<")
FREE = 16 << 30
"""bytes of memory that it says are free"""


class OnDevice(Tensor):
    """A tensor that says it is on the pretend device; `value` is what it holds, on the CPU."""

    value: Tensor
    home: PretendDevice

    @staticmethod
    def __new__(cls, value: Tensor, home: PretendDevice) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(
            cls, value.size(), strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype, device=META
        )
        made.value, made.home = value, home
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(self.home.name)

    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"can't convert {self.home.name} device type tensor to numpy; use Tensor.cpu() first (at {line()})")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, device: Any = None, **rest: Any) -> Tensor:  # type: ignore[override]
        return made_on_the_host(data, dtype=dtype or self.dtype, device=device or self.device, **rest)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OnDevice({self.value!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """An operation outside of the `with`, on a tensor made within."""
        home = next(leaf.home for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OnDevice))
        return home.run(func, args, kwargs or {})


class PretendDevice(TorchDispatchMode):
    """Within it, `name` is a device. The counters are by line of code, "engine.py:188"."""

    def __init__(self, name: str = "cuda:0", float64: bool = True) -> None:
        """float64: whether it can hold such numbers; Apple's GPUs (mps) cannot."""
        super().__init__()
        self.name, self.float64 = name, float64
        self.kinds = {META.type, torch.device(name).type}
        self.patches = ExitStack()
        self.waits: Counter[str] = Counter()
        """times that the host stands still until the device has caught up; a copy to the host is one"""
        self.copies: Counter[str] = Counter()
        """tensors that travelled, in either direction"""
        self.bytes: Counter[str] = Counter()
        """that travelled"""
        self.operations: Counter[str] = Counter()
        """on the device"""

    def __enter__(self) -> Self:
        importlib.import_module("torch._dynamo")  # torch needs it for every mode, and it must not remember the stand-ins
        nothing = dict.fromkeys(("_lazy_init", "set_device"), lambda *_: None)
        for name, stand_in in {**nothing, "mem_get_info": lambda *_: (FREE, FREE)}.items():
            self.patches.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        self.patches.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor, *_: tensor))
        self.patches.enter_context(mock.patch.object(torch, "tensor", made_on_the_host))  # else torch passes the mode by
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation: looked at, counted, and done on the CPU."""
        name, leaves = func.overloadpacket.__name__, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = {id(inside(leaf)): leaf for leaf in leaves}
        asked = kwargs.get("device")
        to_here = torch.device(asked).type in self.kinds if asked is not None else any(isinstance(leaf, OnDevice) for leaf in leaves)
        self.look(name, args, kwargs, leaves, to_here)
        if to_here and asked is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        made = func(*tree_map(inside, args), **tree_map(inside, kwargs))
        if to_here and not self.float64 and any(isinstance(leaf, Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(made)):
            raise TypeError(f"{self.name} cannot hold float64 ({name} at {line()})")

        def outside(leaf: Any) -> Any:
            if id(leaf) in given:  # what is written in place, or by `out`, is still the tensor it was
                return given[id(leaf)]
            return OnDevice(leaf, self) if to_here and isinstance(leaf, Tensor) else leaf

        if torch.Tag.inplace_view in func.tags and to_here:  # the shape changes in place, as `value`'s has
            with torch._C._DisableTorchDispatch():
                func(*args, **kwargs)
        return tree_map(outside, made)

    def look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor], to_here: bool) -> None:
        """Refuse tensors of two devices, and count."""
        here = [leaf for leaf in leaves if isinstance(leaf, OnDevice)]
        there = [leaf for leaf in leaves if not isinstance(leaf, OnDevice) and leaf.dim() > 0]  # a number of the host may join
        if not here and not to_here:
            return
        at = line()
        self.operations[at] += 1
        travels = name in ("_to_copy", "copy_")
        if here and there and not travels:
            if name not in INDEXING or not isinstance(args[0], OnDevice) or any(leaf is one for leaf in there for one in args[2:3]):
                raise RuntimeError(f"Expected all tensors to be on the same device, but found {self.name} and cpu ({name} at {at})")
            self.count_copies(at, *there)
        source = args[name == "copy_"] if travels else None
        to_device = isinstance(args[0], OnDevice) if name == "copy_" else to_here
        if source is not None and isinstance(source, OnDevice) != to_device:
            self.count_copies(at, source)
            self.waits.update([at] if isinstance(source, OnDevice) else [])
        masks = name in INDEXING and any(isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1] or ())
        unknown_size = name == "repeat_interleave" and kwargs.get("output_size") is None
        if here and (name in WAITS or masks or unknown_size):
            self.waits[at] += 1

    def count_copies(self, at: str, *tensors: Tensor) -> None:
        self.copies[at] += len(tensors)
        self.bytes[at] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def made_on_the_host(data: Any, *, device: Any = None, **rest: Any) -> Tensor:
    """What torch.tensor does, which a mode does not see."""
    made = TENSOR(data, **rest)
    return made if device is None else made.to(device)


def inside(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, OnDevice) else leaf


def line() -> str:
    """The innermost line of code that runs now and is not torch's: "engine.py:188"."""
    frame = sys._getframe(1)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in NOT_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
