"""Which of eager's rules places the results of an operator, and by which operands it goes.

`aten.add` is elementwise, `aten.clone` lies like its operand, a sum is contiguous; `aten.cat` and others have rules
that depend on their arguments. The rules themselves are in `eager_strides` and `concat_strides`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.graph import fake_value, schema_of
from ferrite.lower.calls import flat
from ferrite.lower.concat_strides import concatenated, rolled, stacked
from ferrite.lower.eager_strides import (
    Rule,
    compared_with_number,
    contiguous_result,
    elementwise,
    expanded,
    indexed,
    like_operand,
    narrowed,
    transformed,
    turned,
    viewed,
)

aten = torch.ops.aten
# Results like an operand, whose elements do not matter: they are asked of `empty_like`, which draws no random numbers.
LIKE = frozenset({aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like})
# Besides these and the elementwise ones. They compute nothing that ones could harm.
ASKED = frozenset(
    {
        *(aten._softmax, aten._log_softmax, aten.native_group_norm, aten.tril, aten.triu),
        *(aten._softmax_backward_data, aten._log_softmax_backward_data, aten.log_sigmoid_backward),
        *(aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss, aten.binary_cross_entropy),
        *(aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward),
        *(aten.soft_margin_loss_backward, aten.binary_cross_entropy_backward),
        *(aten.glu, aten.glu_backward, aten._prelu_kernel_backward, aten.channel_shuffle, aten.polar, aten.complex),
    }
)
COPIES = frozenset(
    {
        *(aten.clone, aten.flip, aten.sort, aten._to_copy, aten.nan_to_num, aten.rad2deg, aten.deg2rad),
        *(aten.fill, aten.index_fill, aten.index_put),
    }
)
LIKE_ANYWHERE = LIKE | {aten.clone, aten._to_copy, aten.fill}  # on any device
REDUCTIONS = frozenset(
    {
        *(aten.sum, aten.mean, aten.prod, aten.amax, aten.amin, aten.aminmax, aten.any, aten.all),
        *(aten.var, aten.std, aten.var_mean, aten.std_mean, aten.linalg_vector_norm),
    }
)
CONTIGUOUS = frozenset(
    {
        *(aten.masked_fill, aten.native_layer_norm, aten.native_layer_norm_backward),
        *(aten.renorm, aten.log_sigmoid_forward),
        *(aten.index_add, aten.index_copy, aten.index_reduce, aten.scatter, aten.scatter_add, aten.scatter_reduce),
    }
)
RULES: dict[Any, Rule] = {
    **dict.fromkeys((*LIKE, *COPIES, aten.hardtanh, aten.frexp, aten._prelu_kernel), like_operand),
    **dict.fromkeys((*REDUCTIONS, *CONTIGUOUS), contiguous_result),
    aten.expand: expanded,
    aten.view: viewed,
    aten._unsafe_view: viewed,
}
# Those whose rule depends on arguments: see `rule_by_arguments`.
BY_ARGUMENTS = frozenset(
    {
        *(aten.cat, aten.stack, aten.roll, aten.rot90, aten.constant_pad_nd, aten.isinf, aten._fft_r2c),
        aten.index,
    }
)
OF_ALL_OPERANDS = (aten.cat, aten.stack, aten.index)
# Elementwise for all but complex numbers, of which a tensor is made first.
OF_COMPLEX: dict[Any, Rule] = {
    **dict.fromkeys((aten.abs, aten.conj_physical, aten._conj_physical), like_operand),
    aten.angle: contiguous_result,
}
# The library that computes it decides how results lie, whatever their sizes, and differs from machine to machine.
BY_LIBRARY = frozenset({aten._fft_r2c})
# Elementwise, but not tagged as such.
ITERATED = frozenset(
    {
        *(aten.hardswish, aten.softshrink, aten.elu_backward, aten.hardsigmoid_backward, aten.hardswish_backward),
        *(aten.hardtanh_backward, aten.leaky_relu_backward, aten.logit_backward, aten.mish_backward),
        aten.softplus_backward,
    }
)
# Gradients that are iterated over the input first.
INPUT_FIRST = frozenset({aten.threshold_backward, aten.leaky_relu_backward})
# Tagged as elementwise, but made in other ways, or of several calls.
NOT_ITERATED = frozenset(
    {
        aten._conj_physical,
        aten.conj_physical,
        aten.float_power,
        aten.isfinite,
        aten.ldexp,
        aten.native_dropout_backward,
        aten.positive,
        aten.relu6,
    }
)
MASKS = (torch.bool, torch.uint8)
NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
OPERANDS = ("self", "other", "x", "n", "input")  # what overloads call a number that they make a tensor of


def rule_of(node: torch.fx.Node) -> tuple[Rule | None, Sequence[torch.Tensor]]:
    """The rule by which eager places the results of a call, and the operands that it goes by."""
    packet = packet_of(node)
    operands = [fake_value(each) for each in flat(node.args) if isinstance(each, torch.fx.Node)]
    operands = [each for each in operands if isinstance(each, torch.Tensor)]
    if packet in RULES:
        preserves = node.kwargs.get("memory_format") in (None, torch.preserve_format)
        return (RULES[packet], operands[:1]) if preserves and operands else (None, ())
    if packet in BY_ARGUMENTS:
        return rule_by_arguments(node), operands if packet in OF_ALL_OPERANDS else operands[:1]
    if is_of_complex(packet, operands):
        return OF_COMPLEX[packet], operands[:1]
    placed = [each for each in operands if each.ndim]
    if (
        node.target is aten.pow.Scalar
        or packet in NOT_ITERATED
        or packet in ASKED
        or not placed
        or any(map(is_node, flat(node.kwargs)))
    ):
        return None, ()
    if packet in INPUT_FIRST:
        placed.reverse()
    numbers = len(placed) < len(operands) or takes_numbers_as_tensors(node)
    return functools.partial(elementwise, numbers=numbers), placed


def is_of_complex(packet: Any, operands: Sequence[torch.Tensor]) -> bool:
    return packet in OF_COMPLEX and any(each.is_complex() for each in operands)


def rule_by_arguments(node: torch.fx.Node) -> Rule | None:
    packet, args = packet_of(node), node.args
    if packet is aten.isinf:
        value = fake_value(args[0])  # type: ignore[arg-type]
        return compared_with_number if value.dtype.is_floating_point else like_operand
    if packet is aten.index:
        return by_indices(args[1])
    if any(map(is_node, flat(args[1:]))):
        return None
    if packet is aten.cat:
        return concatenated
    if packet is aten.stack:
        dim: Any = args[1] if len(args) > 1 else 0
        return functools.partial(stacked, dim=dim % fake_value(node).ndim)
    if packet is aten.roll:
        shifts: Any = args[1]
        along: Any = args[2] if len(args) > 2 else ()
        return functools.partial(rolled, shifts=shifts, dims=along)
    if packet is aten.rot90:
        turns: Any = args[1] if len(args) > 1 else 1
        dims: Any = args[2] if len(args) > 2 else (0, 1)
        return functools.partial(turned, turns=turns, dims=tuple(dims))
    if packet is aten._fft_r2c:  # other libraries do as is forecast
        transforms: Any = args[1]
        return functools.partial(transformed, dims=transforms) if torch.backends.mkl.is_available() else None
    widths: Any = args[1]
    return narrowed if all(each <= 0 for each in widths) else None


def by_indices(indices: Any) -> Rule | None:
    """The rule for places by numbers. A mask is made into places first."""
    dims = [dim for dim, each in enumerate(indices) if each is not None]
    if any(fake_value(indices[dim]).dtype in MASKS for dim in dims):
        return None
    return functools.partial(indexed, dims=dims)


def computed_in(node: torch.fx.Node, result: torch.dtype, operands: Sequence[torch.Tensor]) -> torch.dtype | None:
    """The type that operands of another type are converted to first; None where they are taken as they are."""
    packet = packet_of(node)
    if packet in RULES or packet in BY_ARGUMENTS or is_of_complex(packet, operands):
        return None
    if result is not torch.bool:
        return result
    common = functools.reduce(torch.promote_types, (each.dtype for each in operands))
    numbers = [each for each in map(number_behind, node.args) if each is not None]
    kinds = [torch.result_type(torch.empty((1,), dtype=common, device="meta"), each) for each in numbers]
    return functools.reduce(torch.promote_types, kinds, common)


def number_behind(argument: Any) -> Any:
    """A number, or a tensor without dimensions, that stands in a call; None for anything else."""
    value = fake_value(argument) if isinstance(argument, torch.fx.Node) else argument
    if isinstance(value, torch.Tensor):
        return value if not value.ndim else None
    kinds = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}
    return kinds.get(type(value), value) if isinstance(value, NUMBERS) else None


def is_node(value: Any) -> bool:
    return isinstance(value, torch.fx.Node)


def takes_numbers_as_tensors(node: torch.fx.Node) -> bool:
    """Whether an operator is given a number where it works on a tensor."""
    schema: Any = schema_of(node.target)
    for each, value in zip(schema.arguments, node.args, strict=False):
        number = fake_value(value) if isinstance(value, torch.fx.Node) else value
        if isinstance(number, torch.Tensor) or not isinstance(number, NUMBERS):
            continue
        if str(each.type) == "Tensor" or (each.name in OPERANDS and "scalar" in schema.overload_name.lower()):
            return True
    return False


def packet_of(node: torch.fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)
