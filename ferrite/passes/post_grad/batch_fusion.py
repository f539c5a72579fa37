"""Many small calls of one operator on tensors of one look: one call on the stack of them. Off unless asked for.

    a = tanh(x)                     s = stack([x, y, ...])
    b = tanh(y)            =>       t = tanh(s)
    ...                             a = select(t, 0, 0);  b = select(t, 0, 1);  ...

`FUSIONS` says what the members of each fusion are and what must be equal among them; `shared.batching` finds them.
The results are views of one tensor, so a value that the caller gets is no member.

The option `post_grad_fusions` names the fusions that run, and their settings.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.options import settings_of
from ferrite.passes.shared.batching import Fusion, Settings, shape_key
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, Numerics, Writer, arguments_of

aten = torch.ops.aten

KERNEL_LIBRARY = "fbgemm_gpu"


class NamedFusion(Fusion):
    """One that the option `post_grad_fusions` names, with its settings."""

    def settings(self, context: PassContext) -> Settings:
        return settings_of(context.options.post_grad_fusions, self.name, Settings)


# --- the fusions ------------------------------------------------------------------------------------------------------


def one_shape(arguments: Mapping[str, Any], values: tuple[torch.Tensor, ...]) -> Refusal | None:
    return None if len({shape_key(value) for value in values}) == 1 else Refusal("its operands have different shapes")


def small_product(arguments: Mapping[str, Any], values: tuple[torch.Tensor, ...]) -> Refusal | None:
    """Products of one known size: with sizes that only run time knows nobody can say that batching pays."""
    if not all(isinstance(size, int) for value in values for size in value.shape):
        return Refusal("its sizes are not known")
    if any(arguments.get(factor, 1) != 1 for factor in ("alpha", "beta")):
        return Refusal("it is scaled")
    bias = fake_value(arguments["self"])
    if len({bias.dtype, *(value.dtype for value in values)}) > 1 or not bias.dtype.is_floating_point:
        return Refusal("it is no product of floating point numbers of one dtype")
    return None


def add_bias(writer: Writer, result: torch.fx.Node, member: torch.fx.Node, settings: Settings) -> torch.fx.Node:
    if member.target is not aten.addmm.default:
        return result
    bias = arguments_of(member)["self"]
    if settings.broadcast_bias:
        bias = writer.call(aten.expand.default, bias, list(fake_value(member).shape))
    return writer.call(aten.add.Tensor, result, bias)


def pointwise(name: str, operand_names: tuple[str, ...], *targets: Any, numerics: Numerics = "exact") -> NamedFusion:
    def some(count: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 3)) -> Case:
        def function(*inputs: torch.Tensor) -> list[torch.Tensor]:
            step = len(operand_names)
            groups = [inputs[start : start + step] for start in range(0, len(inputs), step)]
            return [targets[0](*group).neg() for group in groups]

        def make_inputs() -> list[torch.Tensor]:
            return [(torch.rand(shape) * 9 + 1).to(dtype) for _ in range(count * len(operand_names))]

        return Case(f"{count} of {dtype}, {shape}", function, make_inputs)

    purpose = f"{name.rpartition('_')[2]} of many tensors of one look is one call on their stack"
    examples = (some(5), some(6, torch.bfloat16), some(5, shape=()), some(7, shape=(0, 3)), some(5, torch.int32))
    operands = dict.fromkeys(targets, operand_names)
    return NamedFusion(name, purpose, operands, one_shape, examples=examples, near_misses=(some(4),), numerics=numerics)


def linear_case(count: int, *bias: int, dtype: torch.dtype = torch.float32) -> Case:
    def function(*inputs: torch.Tensor) -> list[torch.Tensor]:
        xs, weights, biases = inputs[:count], inputs[count : 2 * count], inputs[2 * count :]
        if not biases:
            return [torch.mm(x, w).neg() for x, w in zip(xs, weights, strict=True)]
        return [torch.addmm(b, x, w).neg() for b, x, w in zip(biases, xs, weights, strict=True)]

    def make_inputs() -> list[torch.Tensor]:
        sizes = [(2, 3)] * count + [(3, 4)] * count + [bias] * (count if bias else 0)
        return [torch.rand(size, dtype=dtype) for size in sizes]

    return Case(f"{count} with bias {bias}, {dtype}", function, make_inputs)


PRODUCTS = {aten.mm.default: ("self", "mat2"), aten.addmm.default: ("mat1", "mat2")}
FUSIONS = (
    NamedFusion(
        "batch_linear_post_grad",
        "products of one size are one batched product",
        PRODUCTS,
        small_product,
        aten.bmm.default,
        add_bias,
        numerics="rounded",
        examples=(linear_case(5), linear_case(6, 4), linear_case(5, 2, 1), linear_case(5, 4, dtype=torch.float64)),
        near_misses=(linear_case(4), linear_case(4, 4)),
    ),
    NamedFusion(
        "group_linear",
        "products of several sizes are one call of a library",
        PRODUCTS,
        small_product,
        needs=KERNEL_LIBRARY,
        numerics="rounded",
        near_misses=(linear_case(5),),
    ),
    # Vector routines take the last few numbers of a tensor otherwise than the rest: in a stack those are others.
    pointwise("batch_aten_tanh", ("self",), aten.tanh.default, numerics="rounded"),
    pointwise("batch_aten_sigmoid", ("self",), aten.sigmoid.default, numerics="rounded"),
    pointwise("batch_aten_relu", ("self",), aten.relu.default),
    pointwise("batch_aten_add", ("self", "other"), aten.add.Tensor),
    pointwise("batch_aten_sub", ("self", "other"), aten.sub.Tensor),
    pointwise("batch_aten_mul", ("self", "other"), aten.mul.Tensor),
    pointwise("batch_aten_div", ("self", "other"), aten.div.Tensor, aten.div.Tensor_mode),
)
BY_NAME = {fusion.name: fusion for fusion in FUSIONS}
RULES = tuple(fusion for fusion in FUSIONS if not fusion.needs)


def reason_to_refuse(fusion: Fusion, settings: Settings) -> Refusal | None:
    """Why a fusion as a whole does not run here."""
    library = fusion.needs or (KERNEL_LIBRARY if settings.external_lib else "")
    if library and importlib.util.find_spec(library) is None:
        return Refusal(f"the library {library} is not installed")
    return Refusal(f"calls of {library} are not written yet") if fusion.needs else None
