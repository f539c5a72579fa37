"""The elements of a tensor that is made of constants alone, computed on the CPU while compiling.

    q = arange(n); m = q[:, None] >= q          the lower triangle of an n x n matrix

Only of truth values and integers, made by operators that every device computes alike, and only so much that it takes a
few milliseconds. Inputs, parameters, random numbers, memory that the graph writes to and sizes that are not known have
no such elements.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from ferrite.capture import on_real_tensors
from ferrite.errors import NotApplied
from ferrite.graph import Storage, fake_value, has_effect, is_random, mutates, says_so, storages_of
from ferrite.passes.pre_grad.predicates import is_plain
from ferrite.passes.shared.constants import MAX_CALLS_BEHIND

MAX_BYTES = 8 << 20  # of one value on the way
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Names of operators that devices answer differently where there is no answer, as in a division by zero; or that make
# nothing in particular, or something elsewhere.
UNLIKE = re.compile(r"div|mod|remainder|shift|pow|empty|cuda")
CPU = torch.device("cpu")


class ConstantTensors:
    """`written`: the memory that the graph writes."""

    def __init__(self, written: frozenset[Storage]) -> None:
        self.written = written
        self.found: dict[torch.fx.Node, torch.Tensor] = {}

    def of(self, node: torch.fx.Node) -> torch.Tensor | None:
        try:
            with on_real_tensors():
                made: torch.Tensor = self.computed(node)
                return made
        except Exception:  # of whatever kind: it is the graph's, and raised when it runs
            return None

    def computed(self, node: torch.fx.Node) -> Any:
        if node in self.found:
            return self.found[node]
        value = fake_value(node)
        if type(value) in (int, bool, torch.device, torch.dtype):  # asked of a tensor
            return value
        if len(self.found) >= MAX_CALLS_BEHIND or not self.is_constant_call(node, value):
            raise NotApplied(f"{node.name} is not computed from constants alone")
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.computed)
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), on_cpu)
        if node.op == "call_method":
            made = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            made = node.target(*args, **kwargs)  # type: ignore[operator]
        if not isinstance(made, torch.Tensor) or (made.shape, made.dtype) != (value.shape, value.dtype):
            raise NotApplied(f"{node.name} is not what tracing says it is")
        self.found[node] = made
        return made

    def is_constant_call(self, node: torch.fx.Node, value: Any) -> bool:
        if node.op not in ("call_function", "call_method") or not isinstance(value, torch.Tensor):
            return False
        if not is_plain(value) or value.dtype not in DTYPES or not all(type(size) is int for size in value.shape):
            return False
        if value.numel() * value.element_size() > MAX_BYTES:
            return False
        name = str(getattr(node.target, "__name__", node.target))
        if UNLIKE.search(name) or is_random(node) or mutates(node) or has_effect(node):
            return False
        return not says_so(node) and self.written.isdisjoint(storages_of(node))


def on_cpu(item: Any) -> Any:
    """An argument of a call that is made on the CPU."""
    is_device = isinstance(item, torch.device) or (isinstance(item, str) and item.partition(":")[0] == "cuda")
    return CPU if is_device else item
