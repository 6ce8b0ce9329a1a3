"""Torch's operations while a function runs, as a graph of torch.fx.

`make_fx` and the gradient of torch.func would do the same, but load a compiler that nothing here uses: more than a second in every
process.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
Table = Mapping[Any, Callable[..., Any]]
"""operation -> how it is written as others"""
ANSWERS = (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default)
"""operations that tell Python about the numbers of a tensor"""


class Recorder(TorchDispatchMode):
    """Every operation becomes a node while it is computed; `node.meta["val"]` is its result."""

    def __init__(self, apart: Table) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.apart = apart
        self.root = torch.nn.Module()
        """constant tensors, by the names of their nodes"""
        self.nodes: dict[int, fx.Node] = {}
        """by identity of tensors, which stay alive in `seen`"""
        self.seen: list[Tensor] = []
        self.varying: set[fx.Node] = set()
        """what depends on an argument of the function"""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch need not load a compiler to keep out of this class."""
        return False

    def knows(self, tensor: Tensor, node: fx.Node) -> None:
        self.nodes[id(tensor)] = node
        self.seen.append(tensor)

    def argument(self, tensor: Tensor) -> None:
        node = self.graph.placeholder(f"arg{len(self.nodes)}")
        node.meta["val"] = tensor
        self.varying.add(node)
        self.knows(tensor, node)

    def node(self, value: Any) -> Any:
        """What stands for a value in the graph: a node for a tensor, the value itself for any other."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.nodes:
            name = f"_tensor_constant{len(list(self.root.buffers()))}"
            self.root.register_buffer(name, value.detach().clone())  # the function may change it in place
            self.knows(value, self.graph.get_attr(name))
        return self.nodes[id(value)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for simpler in (self.apart.get(func), func.decompose):
            if simpler is not None:
                with self:
                    found = simpler(*args, **kwargs)
                if found is not NotImplemented:
                    return found
        given, named = fx.node.map_aggregate((tuple(args), dict(kwargs)), self.node)
        node = self.graph.call_function(func, given, named)
        if self.varying.intersection(node.all_input_nodes):
            self.varying.add(node)
            if func in ANSWERS:
                raise RuntimeError(f"{func} asks for the numbers of a tensor, which are not known while it is recorded")
        found = func(*args, **kwargs)
        # a tensor of its own: squeeze_ and the like change the shape of what they were given
        node.meta["val"] = fx.node.map_aggregate(found, lambda one: one.detach() if isinstance(one, Tensor) else one)
        if func._schema.is_mutable and isinstance(args[0], Tensor):
            self.knows(args[0], node)
        elif isinstance(found, Tensor):
            self.knows(found, node)
        elif isinstance(found, list | tuple):
            for place, one in enumerate(found):
                if isinstance(one, Tensor):
                    part = self.graph.call_function(operator.getitem, (node, place))
                    part.meta["val"] = one.detach()
                    if node in self.varying:
                        self.varying.add(part)
                    self.knows(one, part)
        return found


def record(function: Callable[..., Sequence[Any]], tensors: Sequence[Tensor], apart: Table, lines: Any = None) -> fx.GraphModule:
    """The operations of a function of tensors that returns a list; those in `apart` are taken apart. `lines.nodes` grows meanwhile."""
    recorder = Recorder(apart)
    if lines is not None:
        lines.nodes = recorder.graph.nodes
    for tensor in tensors:
        recorder.argument(tensor)
    with recorder:
        found = function(*tensors)
    recorder.graph.output([recorder.node(one) for one in found])
    return fx.GraphModule(recorder.root, recorder.graph)


def slopes(of: Callable[[dict[str, Tensor]], Tensor], part: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """The gradient of a function of named tensors, and its value; of a function of several values that of their sum."""
    leaves = {name: value.detach().requires_grad_() for name, value in part.items()}
    value = of(leaves)
    if not value.requires_grad:
        return {name: torch.zeros_like(one) for name, one in part.items()}, value
    total = value.sum() if value.dim() else value
    found = torch.autograd.grad(total, [*leaves.values()], allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True)), value.detach()
