"""Calls that compute nothing: what nobody reads is erased, and for what an operand is already, that is used.

    y = clone(x); z = y + 1        =>      z = x + 1

Each rule names the operator, the operand that already is the result, and when. The engine checks the rest for all of
them: that the operand looks like the result in shape, strides, dtype, device and bits, and that no output would come
to share storage with an input or another output. (`return clone(x)` keeps its clone.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import has_effect, same_number, same_sizes
from ferrite.rewrite import Case, NodeRule, Site

aten, prims = torch.ops.aten, torch.ops.prims


def erase_dead_calls(graph: torch.fx.Graph) -> int:
    """Erase the calls that nobody reads and that have no effect; how many. Linear."""
    erased = 0
    for node in reversed(list(graph.nodes)):
        if not node.users and not has_effect(node):
            graph.erase_node(node)
            erased += 1
    return erased


def source_of(argument: str, holds: Callable[[Site], bool], otherwise: str) -> Callable[[Site], Any]:
    """A rewrite to one of the operands, where a condition holds."""

    def rewrite(site: Site) -> Any:
        source = site.arguments[argument]
        if not isinstance(source, torch.fx.Node):
            return Refusal(f"{argument} is no tensor")
        return source if holds(site) else Refusal(otherwise)

    return rewrite


def always(_site: Site) -> bool:
    """The engine compares the looks: a view to the shape it has is one whatever the spelling (-1)."""
    return True


def keeps_strides_of_ones(site: Site) -> bool:
    """Whether a view to the same shape has the same strides for all values of the symbols. Where a size turns out to be
    one, eager lays its dimension out with the one inside of it: (s0 - 1, 2) with strides (1, 0) is viewed as (1, 2)
    with (0, 0)."""
    value = site.value(site.arguments["self"])
    if all(type(size) is int or torch_api.known_true(size > 1) for size in value.shape):
        return True
    return value.layout is torch.strided and is_written_contiguous(value)


def is_written_contiguous(value: torch.Tensor) -> bool:
    """Whether its strides are those of a contiguous tensor along dimensions of one, too."""
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not same_number(stride, expected):
            return False
        expected = expected * size
    return True


def whole_slice(site: Site) -> bool:
    """From the start to the end in single steps; a missing bound is the end it stands for."""
    self, dim = site.value(site.arguments["self"]), site.arguments["dim"]
    size = self.shape[dim]
    start, end, step = (site.value(site.arguments[name]) for name in ("start", "end", "step"))
    from_start = start is None or torch_api.known_equal(start, 0) or torch_api.known_equal(start, -size)
    to_end = end is None or torch_api.known_true(end >= size)
    return from_start and to_end and torch_api.known_equal(step, 1)


def whole_slice_scatter(site: Site) -> bool:
    self, source = site.value(site.arguments["self"]), site.value(site.arguments["src"])
    dim = site.arguments["dim"]
    has_it = -self.dim() <= dim < self.dim()  # eager refuses it otherwise, and tracing does not look
    return has_it and same_sizes(self.shape, source.shape) and whole_slice(site)


def ones(name: str) -> Callable[[Site], bool]:
    return lambda site: all(torch_api.known_equal(site.value(item), 1) for item in site.arguments[name])


def zeros(name: str) -> Callable[[Site], bool]:
    return lambda site: all(torch_api.known_equal(site.value(item), 0) for item in site.arguments[name])


def dtype_already(site: Site) -> bool:
    self = site.arguments.get("a", site.arguments.get("self"))
    return bool(site.value(self).dtype == site.arguments["dtype"])


def device_already(site: Site) -> bool:
    wanted, here = torch.device(site.arguments["device"]), site.value(site.arguments["a"]).device
    return bool(wanted.type == here.type and wanted.index in (None, here.index))


def on_integers(site: Site) -> bool:
    dtype = site.value(site.arguments["self"]).dtype
    return not (dtype.is_floating_point or dtype.is_complex)


def on_integers_without_decimals(site: Site) -> bool:
    return on_integers(site) and site.arguments.get("decimals", 0) == 0


def exponent_one(site: Site) -> bool:
    exponent = site.arguments["exponent"]
    return isinstance(exponent, (int, float)) and not isinstance(exponent, bool) and exponent == 1


def not_into_pinned_memory(site: Site) -> bool:
    """A copy into pinned memory is there for the pinning."""
    target = site.arguments["self"]
    return not (isinstance(target, torch.fx.Node) and target.kwargs.get("pin_memory"))


def only_tensor(site: Site) -> Any:
    tensors = site.arguments["tensors"]
    return tensors[0] if len(tensors) == 1 else Refusal(f"it concatenates {len(tensors)} tensors")


def case(label: str, function: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float32) -> Case:
    return Case(label, function, lambda: [(torch.rand(shape) * 10).to(dtype)])


NOOP_RULES = (
    NodeRule(
        "slice_noop",
        "a slice from start to end is its operand",
        (aten.slice.Tensor,),
        source_of("self", whole_slice, "it leaves something out"),
        (
            case("all bounds given", lambda x: aten.slice.Tensor(x, 0, 0, 4, 1) + 1, 4, 3),
            case("no bounds given", lambda x: aten.slice.Tensor(x) + 1, 4, 3),
            case("end beyond the size", lambda x: aten.slice.Tensor(x, 1, 0, sys.maxsize) + 1, 4, 3),
            case("start counted from the end", lambda x: aten.slice.Tensor(x, 0, -4) + 1, 4, 3),
        ),
        (
            case("starts later", lambda x: aten.slice.Tensor(x, 0, 1, 4) + 1, 4, 3),
            case("ends earlier", lambda x: aten.slice.Tensor(x, 0, 0, 3) + 1, 4, 3),
            case("every second", lambda x: aten.slice.Tensor(x, 0, 0, 4, 2) + 1, 4, 3),
            case("to a computed end", lambda x: aten.slice.Tensor(x, 0, 0, x.shape[0] // 2) + 1, 4, 3),
            case("from a computed start", lambda x: aten.slice.Tensor(x, 0, x.shape[0] // 2) + 1, 4, 3),
        ),
    ),
    NodeRule(
        "slice_scatter_noop",
        "writing a whole tensor over another leaves the one written",
        (aten.slice_scatter.default,),
        source_of("src", whole_slice_scatter, "part of the tensor below stays"),
        (case("whole", lambda x: aten.slice_scatter.default(x.sin(), x.cos(), 0, 0, 4) + 1, 4, 3),),
        (
            case("part", lambda x: aten.slice_scatter.default(x.sin(), x[:2].cos(), 0, 0, 2) + 1, 4, 3),
            case(
                "up to a computed end",
                lambda x: aten.slice_scatter.default(x.sin(), x[: (n := x.shape[0] // 2)].cos(), 0, 0, n) + 1,
                *(4, 3),
            ),
        ),
    ),
    NodeRule(
        "repeat_noop",
        "repeating once is the operand",
        (aten.repeat.default,),
        source_of("self", ones("repeats"), "it repeats"),
        (case("once", lambda x: aten.repeat.default(x, [1, 1]) + 1, 4, 3),),
        (
            case("twice", lambda x: aten.repeat.default(x, [1, 2]) + 1, 4, 3),
            case("a new dimension", lambda x: aten.repeat.default(x, [1, 1, 1]) + 1, 4, 3),
            case("as often as a size says", lambda x: aten.repeat.default(x, [1, x.shape[0] // 2]) + 1, 4, 3),
        ),
    ),
    NodeRule(
        "constant_pad_nd",
        "padding by nothing is the operand",
        (aten.constant_pad_nd.default,),
        source_of("self", zeros("pad"), "it pads"),
        (case("nothing", lambda x: aten.constant_pad_nd.default(x, [0, 0]) + 1, 4, 3),),
        (
            case("one column", lambda x: aten.constant_pad_nd.default(x, [0, 1]) + 1, 4, 3),
            case("as much as a size says", lambda x: aten.constant_pad_nd.default(x, [0, x.shape[0] - 3]) + 1, 4, 3),
        ),
    ),
    NodeRule(
        "convert_element_type_noop",
        "converting to the dtype it has is the operand",
        (prims.convert_element_type.default,),
        source_of("a", dtype_already, "the dtype changes"),
        (case("same", lambda x: prims.convert_element_type.default(x, torch.float32) + 1, 4),),
        (case("wider", lambda x: prims.convert_element_type.default(x, torch.float64) + 1, 4),),
    ),
    NodeRule(
        "device_put_noop",
        "moving to the device it is on is the operand",
        (prims.device_put.default,),
        source_of("a", device_already, "the device changes"),
        (case("same", lambda x: prims.device_put.default(x, torch.device("cpu")) + 1, 4),),
        (case("another", lambda x: prims.device_put.default(x, torch.device("meta")) + 1, 4),),
    ),
    NodeRule(
        "int_noop",
        "rounding integers is the operand",
        (aten.ceil.default, aten.floor.default, aten.trunc.default, aten.round.default, aten.round.decimals),
        source_of("self", on_integers_without_decimals, "it rounds"),
        (
            case("ceil", lambda x: aten.ceil.default(x) + 1, 4, dtype=torch.int32),
            case("floor", lambda x: aten.floor.default(x) + 1, 4, dtype=torch.uint8),
            case("trunc", lambda x: aten.trunc.default(x) + 1, 4, dtype=torch.int16),
            case("round", lambda x: aten.round.default(x) + 1, 4, dtype=torch.int64),
        ),
        (
            case("floats", lambda x: aten.floor.default(x) + 1, 4),
            case("decimals", lambda x: aten.round.decimals(x, decimals=1) + 1, 4),
        ),
    ),
    NodeRule(
        "pow_noop",
        "the first power is the operand",
        (aten.pow.Tensor_Scalar,),
        source_of("self", exponent_one, "the exponent is not 1"),
        (
            case("integer", lambda x: aten.pow.Tensor_Scalar(x, 1) + 1, 4),
            case("float", lambda x: aten.pow.Tensor_Scalar(x, 1.0) + 1, 4),
        ),
        (
            case("square", lambda x: aten.pow.Tensor_Scalar(x, 2) + 1, 4),
            case("it promotes", lambda x: aten.pow.Tensor_Scalar(x, 1.0) + 1, 4, dtype=torch.int32),
        ),
    ),
    NodeRule(
        "cat_noop",
        "the concat of one tensor is that tensor",
        (aten.cat.default,),
        only_tensor,
        (case("one", lambda x: aten.cat.default([x.sin()], 1) + 1, 4, 3),),
        (case("two", lambda x: aten.cat.default([x.sin(), x], 1) + 1, 4, 3),),
    ),
    NodeRule(
        "view_default_noop",
        "a view of the shape it has is the operand",
        (aten.view.default, aten.reshape.default, aten._unsafe_view.default),
        source_of("self", keeps_strides_of_ones, "a dimension that may be one may get another stride"),
        (
            case("same", lambda x: aten.view.default(x, [4, 3]) + 1, 4, 3),
            case("with an open size", lambda x: aten.view.default(x, [4, -1]) + 1, 4, 3),
        ),
        (case("other", lambda x: aten.view.default(x, [3, 4]) + 1, 4, 3),),
    ),
    NodeRule(
        "view_dtype_noop",
        "viewing as the dtype it has is the operand",
        (aten.view.dtype,),
        source_of("self", dtype_already, "the dtype changes"),
        (case("same", lambda x: aten.view.dtype(x, torch.float32) + 1, 4),),
        (case("bits", lambda x: aten.view.dtype(x, torch.int32) + 1, 4),),
    ),
    NodeRule(
        "true_noop",
        "a copy of what nobody changes is the operand",
        (aten.clone.default, aten.alias.default),
        source_of("self", always, ""),
        (
            case("clone", lambda x: aten.clone.default(x) + 1, 4),
            case("alias", lambda x: aten.alias.default(x.sin()) + 1, 4),
        ),
        (
            case("returned", lambda x: aten.clone.default(x), 4),
            case("returned beside it", lambda x: (lambda y: (y, aten.clone.default(y)))(x.sin()), 4),
            case(
                "another format",
                lambda x: aten.clone.default(x, memory_format=torch.channels_last) + 1,
                *(2, 3, 4, 5),
            ),
        ),
    ),
    NodeRule(
        "copy_noop",
        "a functional copy is what was copied",
        (aten.copy.default,),
        source_of("src", not_into_pinned_memory, "it is there for the pinned memory"),
        (case("same look", lambda x: aten.copy.default(x.sin(), x.cos()) + 1, 4),),
        (case("it broadcasts", lambda x: aten.copy.default(x.sin(), x[0].cos()) + 1, 4, 3),),
    ),
)
