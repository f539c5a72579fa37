"""Operators whose results lie in memory otherwise than torch forecasts, where their operands are not contiguous.

Loops write a result as the forecast says. These are called in eager then, so that their results have eager's strides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.graph import HALVES, MetadataUpdater, fake_value, is_elementwise, no_guards, same_number, same_sizes
from ferrite.ir import ZERO, Index, contiguous_strides
from ferrite.lower.concat_strides import suggested_order
from ferrite.lower.eager_strides import Placed, Undecided
from ferrite.lower.sizes import Sizes, UnknownSize
from ferrite.lower.strides import same_strides

aten = torch.ops.aten
CPU = torch.device("cpu")
SCALED = (aten.add.Tensor, aten.sub.Tensor)
SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default, aten.diagonal_scatter.default)

# Eager goes by the order of the operands' strides, the forecast by something else where they differ.
BY_ALL_OPERANDS = frozenset(
    {
        aten.copysign,
        aten.div,
        aten.floor_divide,
        aten.native_dropout_backward,
        aten.special_xlog1py,
        aten.xlogy,
    }
)
# One operand decides.
BY_ONE_OPERAND = frozenset({aten.roll, aten.channel_shuffle, aten.log_sigmoid_forward, aten.max_unpool2d})
# This operand decides whether channels come last, which is forecast right, or the result is contiguous.
BY_CHANNELS = {
    aten.native_batch_norm: 0,
    aten._native_batch_norm_legit: 0,
    aten._native_batch_norm_legit_functional: 0,
    aten._native_batch_norm_legit_no_training: 0,
    aten._batch_norm_with_update: 0,
    aten._batch_norm_with_update_functional: 0,
    aten.native_batch_norm_backward: 1,
    aten.batch_norm_backward: 1,
}


@dataclass(frozen=True)
class OperandLayout:
    """How an operand lies in memory."""

    sizes: tuple[Index, ...]
    strides: tuple[Index, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU

    @property
    def is_contiguous(self) -> bool:
        return same_strides(self.sizes, self.strides, contiguous_strides(self.sizes))

    @property
    def has_channels_last(self) -> bool:
        if len(self.sizes) not in (4, 5):
            return False
        batch, channels, *space = self.sizes
        batch_step, *space_steps, step = contiguous_strides((batch, *space, channels))
        return same_strides(self.sizes, self.strides, (batch_step, step, *space_steps))

    @property
    def is_corrected(self) -> bool:
        """Whether `correct_misforecasts` has said of a normalised batch how it lies."""
        return self.device.type == "cpu" and known_order(self.sizes, self.strides) is not None


def has_strides_of_more(operand: OperandLayout) -> bool:
    """Whether it has no elements, and the strides of a tensor that has: eager may keep these."""
    return any(size is ZERO for size in operand.sizes) and operand.strides != contiguous_strides(operand.sizes)


def known_order(sizes: tuple[Index, ...], strides: tuple[Index, ...]) -> tuple[int, ...] | None:
    """The dimensions, the innermost first, of memory that eager makes for a batch like this one; None where what is
    known of sizes does not tell."""
    try:
        return suggested_order(Placed(sizes, strides))
    except Undecided:
        return None


def may_be_misforecast(target: Any) -> bool:
    """Whether `misforecast` is worth asking: most operators are forecast right."""
    packet = getattr(target, "overloadpacket", None)
    return packet in BY_ALL_OPERANDS or packet in BY_ONE_OPERAND or packet is aten.angle


def misforecast(target: Any, operands: Iterable[OperandLayout]) -> Refusal | None:
    """Why a result would not have eager's strides; None where it has."""
    packet, operands = getattr(target, "overloadpacket", None), list(operands)
    if packet in BY_ALL_OPERANDS:
        wrong = target is not aten.div.Tensor and len({each.strides for each in operands if each.sizes}) > 1
    elif packet in BY_ONE_OPERAND:
        wrong = not all(each.is_contiguous for each in operands) or any(map(has_strides_of_more, operands))
    elif packet is aten.angle:  # complex numbers are taken apart first, which leaves no order of dimensions
        wrong = operands[0].dtype.is_complex and not operands[0].is_contiguous
    elif packet in BY_CHANNELS:
        batch = operands[BY_CHANNELS[packet]]
        wrong = not (batch.is_contiguous or batch.has_channels_last or batch.is_corrected)
    else:
        return None
    return Refusal("torch forecasts other strides for its result than it has") if wrong else None


def correct_misforecasts(gm: torch.fx.GraphModule) -> bool:
    """Make the forecasts of a graph eager's, where that can be done before anything is lowered. Whether there was a
    wrong one: what was known of results before is wrong then."""
    halves = [node for node in gm.graph.nodes if is_of_repeated_halves(node)]
    scaled = [node for node in gm.graph.nodes if node.target in SCALED and is_scaled(node)]
    typed = [node for node in gm.graph.nodes if node.target is aten.mv.default and has_two_types(node)]
    repeated = [node for node in gm.graph.nodes if node.target in SCATTERS and has_elements_in_one_place(node)]
    sizes = Sizes()
    batches = {node: order for node in gm.graph.nodes if (order := order_of_batch(node, sizes)) is not None}
    if not any((halves, scaled, typed, repeated, batches)):
        return False
    updater = MetadataUpdater(gm.graph)
    corrected = [node for node in halves if forecast_in_single_precision(node, updater)]
    corrected += [node for node in scaled if forecast_without_factor(node, updater)]
    for node in typed:
        updater.correct(node, fake_value(node).to(fake_value(node.args[1]).dtype))
        updater.update()
    if typed:
        correct_tangents(gm.graph, updater)
    mode: Any = updater.mode
    for node in repeated:
        with mode, torch.no_grad(), no_guards(mode):
            updater.correct(node, fake_value(node.args[0]).clone())
        updater.update()
    for node, order in batches.items():
        forecast_in_order(node, order, updater)
    gm.recompile()
    return bool(corrected or typed or repeated or batches)


def has_two_types(node: torch.fx.Node) -> bool:
    """Whether a matrix is multiplied by a vector of another type. Where eager does not refuse that, for want of an
    element, the result has the vector's type; the forecast is the matrix's."""
    matrix, vector = (fake_value(each) for each in node.args)  # type: ignore[arg-type]
    return bool(matrix.dtype != vector.dtype != fake_value(node).dtype)


def has_elements_in_one_place(node: torch.fx.Node) -> bool:
    """Whether a tensor that is to be written into is forecast as expanded as its operand is. Eager clones that; some
    versions of torch do not see it among symbolic sizes."""
    value = fake_value(node)
    return any(
        same_number(stride, 0) and not same_number(size, 1)
        for size, stride in zip(value.shape, value.stride(), strict=True)
    )


def order_of_batch(node: torch.fx.Node, sizes: Sizes) -> tuple[int, ...] | None:
    """How eager orders the dimensions of a normalised batch, the innermost first; None for other calls, and where the
    forecast is the same or nobody can tell."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    deciding = BY_CHANNELS.get(packet)
    if deciding is None:
        return None
    value, operand = fake_value(node)[0], fake_value(node.args[deciding])  # type: ignore[arg-type]
    if value is None or value.device.type != "cpu":
        return None
    try:
        order = known_order(sizes.indices(operand.shape), sizes.indices(operand.stride()))
    except UnknownSize:
        return None
    if order is None:
        return None
    step: Any = 1
    for dim in order:
        if not same_number(value.stride()[dim], step):
            return order
        step = step if same_number(value.shape[dim], 0) else step * value.shape[dim]
    return None


def forecast_in_order(node: torch.fx.Node, order: tuple[int, ...], updater: MetadataUpdater) -> None:
    mode: Any = updater.mode
    first, *rest = fake_value(node)
    with mode, torch.no_grad(), no_guards(mode):
        outermost = torch.empty([first.shape[dim] for dim in reversed(order)], dtype=first.dtype, device=first.device)
        value = outermost.permute([len(order) - 1 - order.index(dim) for dim in range(len(order))])
    updater.correct(node, (value, *rest))
    updater.update()


def correct_tangents(graph: torch.fx.Graph, updater: MetadataUpdater) -> None:
    """The gradient of a result that comes in has the result's type."""
    output = graph.output_node()
    told = dict(zip(output.meta.get("desc", ()), output.args[0], strict=False))  # type: ignore[arg-type]
    for node in graph.find_nodes(op="placeholder"):
        result, value = told.get(getattr(node.meta.get("desc"), "output", None)), fake_value(node)
        new = fake_value(result) if isinstance(result, torch.fx.Node) else None
        if isinstance(new, torch.Tensor) and isinstance(value, torch.Tensor) and new.dtype != value.dtype:
            updater.correct(node, value.to(new.dtype))
    updater.update()


def is_scaled(node: torch.fx.Node) -> bool:
    """Whether the second operand is multiplied on the way. With symbolic sizes, the forecast is that of two calls, of
    which the first has lost how the operand was laid out."""
    values = [fake_value(each) if isinstance(each, torch.fx.Node) else None for each in node.args[:2]]
    if node.kwargs.get("alpha", 1) == 1 or not all(isinstance(value, torch.Tensor) for value in values):
        return False
    numbers = [number for value in values for number in (*value.shape, *value.stride())]  # type: ignore[union-attr]
    return any(isinstance(number, torch.SymInt) for number in numbers)


def forecast_without_factor(node: torch.fx.Node, updater: MetadataUpdater) -> bool:
    """The factor changes nothing about where the result lies; whether that is elsewhere than forecast."""
    mode: Any = updater.mode
    with mode, torch.no_grad(), no_guards(mode):
        value = node.target(*(fake_value(each) for each in node.args[:2]))  # type: ignore[arg-type,operator]
    if same_sizes(value.stride(), fake_value(node).stride()):
        return False
    updater.correct(node, value)
    updater.update()
    return True


def is_of_repeated_halves(node: torch.fx.Node) -> bool:
    """Whether it is computed of several tensors in half precision, elements of one of which are repeated along a
    dimension. The forecast is made of copies in single precision, whose strides are no longer 0 and count."""
    if not is_elementwise(node.target) or not isinstance(value := node.meta.get("val"), torch.Tensor):
        return False
    operands = [each for each in map(fake_value, node.all_input_nodes) if isinstance(each, torch.Tensor) and each.ndim]
    if len(operands) < 2 or any(each.dtype not in HALVES or each.dtype != operands[0].dtype for each in operands):
        return False
    return value.ndim > 1 and any(same_number(stride, 0) for each in operands for stride in each.stride())


def forecast_in_single_precision(node: torch.fx.Node, updater: MetadataUpdater) -> bool:
    """Nothing is copied then; whether the result lies elsewhere than forecast."""
    mode: Any = updater.mode
    value = fake_value(node)

    def single(operand: torch.fx.Node) -> Any:
        each = fake_value(operand)
        if not isinstance(each, torch.Tensor) or each.dtype not in HALVES:
            return each
        return torch.empty_strided(each.shape, each.stride(), dtype=torch.float32, device=each.device)

    with mode, torch.no_grad(), no_guards(mode):
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), single)
        strides = node.target(*args, **kwargs).stride()  # type: ignore[operator]
        if same_sizes(strides, value.stride()):
            return False
        updater.correct(node, torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device))
    updater.update()
    return True
