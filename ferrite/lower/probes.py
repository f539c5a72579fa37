"""Results of which eager is asked how they lie, because torch's forecast of their strides cannot be trusted.

Along a dimension of one, and in a tensor without elements, a stride addresses nothing. Eager orders dimensions by it
all the same, and the forecast does so otherwise:

    x = torch.randn(8, 1).t()       sizes (1, 8), strides (1, 1)
    x + 1                           eager: (1, 1), forecast: (8, 1)

Such calls are made on tensors of ones that lie as the operands do, where sizes are numbers, and small.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ferrite.capture import torch_state
from ferrite.graph import fake_value
from ferrite.graph.aliases import storages_in
from ferrite.graph.facts import is_known_operator
from ferrite.graph.regions import has_effect, is_random, mutates
from ferrite.graph.updater import MetadataUpdater
from ferrite.graph.values import no_guards

aten = torch.ops.aten
LARGEST = 1 << 18  # elements of an operand, with those it skips: a call takes well under a millisecond
MOST = 64  # corrections of one graph, each of which may change everything behind it
# Besides the elementwise ones. They compute nothing that ones could harm.
ASKED = frozenset({aten.expand, aten.flip, aten.clone, aten.full_like, aten.fill, aten.hardtanh, aten.var})


def corrected_by_eager(gm: torch.fx.GraphModule) -> bool:
    """Make the forecasts of doubtful results eager's. Whether there was a wrong one."""
    count, updater = 0, None
    for node in gm.graph.nodes:
        if not is_doubtful(node) or (strides := strides_in_eager(node)) is None:
            continue
        if strides == tuple(fake_value(node).stride()):
            continue
        updater = updater or MetadataUpdater(gm.graph)
        if updater.mode is None or count == MOST:
            break
        updater.correct(node, laid_out_as(node, strides, updater.mode))
        updater.update()
        count += 1
    return count > 0


def is_doubtful(node: torch.fx.Node) -> bool:
    """Whether a forecast may be wrong, and eager can be asked."""
    out = fake_value(node) if node.op == "call_function" and is_asked(node) else None
    if not isinstance(out, torch.Tensor) or not is_small(out):
        return False
    operands = [fake_value(each) for each in node.all_input_nodes]
    if not all(isinstance(each, torch.Tensor) and is_small(each) for each in operands):
        return False
    if 0 in out.shape or any(0 in each.shape for each in operands):
        return True
    if any(out.ndim > each.ndim for each in operands) and 1 in out.shape and packet_of(node) is aten.expand:
        return True
    return any(1 in each.shape and tuple(each.stride()) != dense(each.shape) for each in operands)


def is_asked(node: torch.fx.Node) -> bool:
    elementwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    if not (elementwise or packet_of(node) in ASKED) or not is_known_operator(node):
        return False
    return not (mutates(node) or is_random(node) or has_effect(node))


def packet_of(node: torch.fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def is_small(value: torch.Tensor) -> bool:
    """Whether a tensor like it can be made here and now."""
    if value.layout is not torch.strided or value.device.type != "cpu" or value.is_conj() or value.is_neg():
        return False
    if not all(type(number) is int for number in (*value.shape, *value.stride())):
        return False
    return extent(value) <= LARGEST and math.prod(value.shape) <= LARGEST


def extent(value: torch.Tensor) -> int:
    """How many elements of memory a tensor reaches over."""
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1)


def dense(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor: (6, 1, 2) has (2, 2, 1)."""
    return tuple(math.prod(max(size, 1) for size in sizes[place + 1 :]) for place in range(len(sizes)))


def strides_in_eager(node: torch.fx.Node) -> tuple[int, ...] | None:
    """The strides that a call's result has; None where it cannot be made on ones."""
    with as_in_eager():
        try:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: ones_like(fake_value(each)))
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # its own business: the call may need other numbers
            return None
    out = fake_value(node)
    if not isinstance(result, torch.Tensor) or (result.shape, result.dtype) != (out.shape, out.dtype):
        return None
    return tuple(result.stride())


def ones_like(value: torch.Tensor) -> torch.Tensor:
    return torch.ones(extent(value), dtype=value.dtype).as_strided(value.shape, value.stride())


@contextlib.contextmanager
def as_in_eager() -> Iterator[None]:
    with torch_state.on_real_tensors(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def laid_out_as(node: torch.fx.Node, strides: Sequence[int], mode: Any) -> torch.Tensor:
    """A picture of a call's result with other strides, in the same memory where it is a view of an operand."""
    out = fake_value(node)
    with mode, torch.no_grad(), no_guards(mode):
        for operand in node.all_input_nodes:
            if storages_in(fake_value(operand)) == storages_in(out):
                return fake_value(operand).as_strided(out.shape, strides, out.storage_offset())  # type: ignore[no-any-return]
        return torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device)
