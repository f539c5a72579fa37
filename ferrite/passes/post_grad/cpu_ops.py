"""Operators for layers that go on: a linear layer or a convolution, and the pointwise work right behind it.

    relu(addmm(b, x, w.t()))        =>      linear_pointwise(x, w, b, ..., "relu", ...)
    convolution(x, w, b, ...) + o   =>      convolution_pointwise_binary(o, x, w, b, ..., "add", "none")

One call names the whole, so that a kernel may do the rest while a tile is at hand. The references below run the
operators that the call came from, one after the other, so that results are eager's to the bit. The fused kernels of
oneDNN are not used: their relu makes nan of -inf, their sigmoid 0 of nan, and on weights that are not packed the linear
layer alone takes twice the time of addmm and more.

How a post-op is told: `attr`, `scalars` and `algorithm` as in torch's own packed operators; `parts`: it was written by
its parts, say y * sigmoid(y); `wide`: it was computed in single precision and rounded to half again. `packed`: the
layer itself is torch's packed operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import register_fake, torch_api
from ferrite.passes.shared.library import LIBRARY, define

aten = torch.ops.aten

POST_OP = "str attr, float[] scalars, str algorithm, bool parts, bool wide"
LINEAR = "Tensor x, Tensor weight, Tensor? bias, bool packed"
CONVOLUTION = (
    "Tensor x, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, "
    "SymInt[] output_padding, SymInt groups, bool packed"
)

# None where this build of torch has no such operator.
PACKED_LINEAR = torch_api.find_operator("mkldnn._linear_pointwise.default")
PACKED_CONVOLUTION = torch_api.find_operator("mkldnn._convolution_pointwise.default")
PACKED_TRANSPOSED = torch_api.find_operator("mkldnn._convolution_transpose_pointwise.default")


# --- post-ops by their parts: each is what a rule looks for, and what a reference runs --------------------------------


def swish_parts(y: Any) -> Any:
    return aten.mul.Tensor(y, aten.sigmoid.default(y))


def gelu_parts(y: Any, half: float = 0.5, root: float = 0.7071067811865476, one: float = 1) -> Any:
    return aten.mul.Tensor(aten.mul.Tensor(y, half), aten.add.Tensor(aten.erf.default(aten.mul.Tensor(y, root)), one))


def gelu_tanh_parts(
    y: Any, half: float = 0.5, cubic: float = 0.044715, root: float = 0.7978845608028654, one: float = 1
) -> Any:
    cube = aten.mul.Tensor(aten.mul.Tensor(y, y), y)
    inner = aten.mul.Tensor(aten.add.Tensor(y, aten.mul.Tensor(cube, cubic)), root)
    return aten.mul.Tensor(aten.mul.Tensor(y, half), aten.add.Tensor(aten.tanh.default(inner), one))


def hardsigmoid_parts(y: Any, three: float = 3, zero: float = 0, six: float = 6) -> Any:
    return aten.div.Tensor(aten.clamp.default(aten.add.Tensor(y, three), zero, six), six)


def hardswish_parts(y: Any, three: float = 3, zero: float = 0, six: float = 6) -> Any:
    return aten.div.Tensor(aten.mul.Tensor(y, aten.clamp.default(aten.add.Tensor(y, three), zero, six)), six)


def leaky_relu_parts(y: Any, slope: float, zero: float = 0) -> Any:
    return aten.where.self(aten.gt.Scalar(y, zero), y, aten.mul.Tensor(y, slope))


WHOLE: Mapping[str, Callable[..., torch.Tensor]] = {
    "relu": aten.relu.default,
    "sigmoid": aten.sigmoid.default,
    "tanh": aten.tanh.default,
    "hardswish": aten.hardswish.default,
    "hardsigmoid": aten.hardsigmoid.default,
    "swish": aten.silu.default,
    "leaky_relu": aten.leaky_relu.default,
    "hardtanh": aten.hardtanh.default,
}
BY_PARTS: Mapping[tuple[str, str], Callable[..., torch.Tensor]] = {
    ("swish", ""): swish_parts,
    ("gelu", "none"): gelu_parts,
    ("gelu", "tanh"): gelu_tanh_parts,
    ("hardsigmoid", ""): hardsigmoid_parts,
    ("hardswish", ""): hardswish_parts,
    ("leaky_relu", ""): leaky_relu_parts,
    ("hardtanh", ""): aten.clamp.default,
}


def post_op(
    y: torch.Tensor, attr: str, scalars: Sequence[float], algorithm: str, parts: bool, wide: bool
) -> torch.Tensor:
    """What stands behind the layer, as eager computes it."""
    if attr == "none":
        return y
    own = y.to(torch.float32) if wide else y
    if parts:
        result = BY_PARTS[attr, algorithm](own, *scalars)
    elif attr == "gelu":
        result = aten.gelu.default(own, approximate=algorithm)
    else:
        result = WHOLE[attr](own, *scalars)
    return result.to(y.dtype) if wide else result


# --- layers -----------------------------------------------------------------------------------------------------------


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, packed: bool) -> torch.Tensor:
    """A weight is [out, in], as torch.nn.functional.linear has it."""
    if packed:
        result: torch.Tensor = PACKED_LINEAR(x, weight, bias, "none", [], "")
        return result
    return torch.nn.functional.linear(x, weight, bias)


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    packed: bool,
) -> torch.Tensor:
    result: torch.Tensor
    if not packed:
        result = aten.convolution.default(
            x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
        )
    elif transposed:
        result = PACKED_TRANSPOSED(x, weight, bias, padding, output_padding, stride, dilation, groups, "none", [], "")
    else:
        result = PACKED_CONVOLUTION(x, weight, bias, padding, stride, dilation, groups, "none", [], "")
    return result


# For each kind of layer: its arguments, the layer, and how many arguments it takes.
LAYERS: Mapping[str, tuple[str, Callable[..., torch.Tensor], int]] = {
    "linear": (LINEAR, linear, 4),
    "convolution": (CONVOLUTION, convolution, 10),
}
BINARY: Mapping[str, Callable[..., torch.Tensor]] = {"add": aten.add.Tensor, "sub": aten.sub.Tensor}
BINARY_OUT: Mapping[str, Callable[..., torch.Tensor]] = {"add": aten.add.out, "sub": aten.sub.out}


def define_layer(name: str) -> None:
    """The operators of one kind of layer: with a post-op, with a second operand, and writing into that operand."""
    arguments, layer, count = LAYERS[name]

    def pointwise(*given: Any) -> torch.Tensor:
        return post_op(layer(*given[:count]), *given[count:])

    def binary(other: torch.Tensor, *given: Any) -> torch.Tensor:
        kind, unary = given[count:]
        return post_op(BINARY[kind](layer(*given[:count]), other), unary, (), "", False, False)

    def binary_(other: torch.Tensor, *given: Any) -> torch.Tensor:
        kind, unary = given[count:]
        BINARY_OUT[kind](layer(*given[:count]), other, out=other)
        return other if unary == "none" else other.copy_(post_op(other, unary, (), "", False, False))

    define(f"{name}_pointwise({arguments}, {POST_OP}) -> Tensor")(pointwise)
    define(f"{name}_pointwise_binary(Tensor other, {arguments}, str binary, str unary) -> Tensor")(binary)
    define(f"{name}_pointwise_binary_(Tensor(a!) other, {arguments}, str binary, str unary) -> Tensor(a!)")(binary_)


for layer_name in LAYERS:
    define_layer(layer_name)


# --- quantised --------------------------------------------------------------------------------------------------------


@define(
    "qmaxpool2d(Tensor x, int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool ceil_mode) -> Tensor"
)
def qmaxpool2d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> torch.Tensor:
    """The largest integers of each window. Pooling of integers in channels-last order is limited to tiny images by
    the index type of its kernel; there they are pooled as floats, which hold 8 bits exactly."""
    direct = x.is_contiguous()
    operand = x if direct else x.to(torch.float32)
    pooled: torch.Tensor = aten.max_pool2d_with_indices.default(
        operand, kernel_size, stride, padding, dilation, ceil_mode
    )[0]
    return pooled if direct else pooled.to(x.dtype)


# Torch's packed layers on 8-bit integers, in every spelling that this build has. The last three arguments are the
# post-op.
QUANTIZED = ("qlinear_pointwise", "qconv_pointwise", "qconv2d_pointwise")
INTEGERS = (torch.int8, torch.uint8)


@dataclass(frozen=True)
class QuantizedLayer:
    """An operator of torch, and those of ours for it with a post-op that eager computes and with a second operand."""

    base: Any
    names: tuple[str, ...]
    pointwise: Any
    binary: Any

    @property
    def is_convolution(self) -> bool:
        return "qconv" in str(self.base)

    def run(self, given: Sequence[Any], finish: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The layer in floating point, what `finish` does with it, and rounding to integers where that is asked for."""
        own = dict(zip(self.names, given, strict=True))
        scale, zero_point, dtype = (own[f"output_{name}"] for name in ("scale", "zero_point", "dtype"))
        if dtype in INTEGERS:
            own.update(output_scale=1.0, output_zero_point=0, output_dtype=torch.float32)
        *plain, _, _, _ = own.values()
        y = finish(self.base(*plain, "none", [], ""))
        if dtype not in INTEGERS:
            return y
        limits = torch.iinfo(dtype)
        quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
        result: torch.Tensor = quantize(y, scale, zero_point, limits.min, limits.max, dtype)
        return result


def define_quantized(base: Any) -> QuantizedLayer:
    text = str(base._schema)
    arguments = text[text.index("(") + 1 : text.rindex(") ->")]
    name = str(base._schema.name).rpartition("::")[2] + ("_tensor" if base._schema.overload_name else "")

    def pointwise(*given: Any) -> torch.Tensor:
        *own, parts = given
        attr, scalars, algorithm = own[-3:]
        return layer.run(own, lambda y: post_op(y, attr, scalars, algorithm, parts, False))

    def binary(other: torch.Tensor, scale: float, zero_point: int, *own: Any) -> torch.Tensor:
        if other.dtype in INTEGERS:
            limits = torch.iinfo(other.dtype)
            dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor.default
            other = dequantize(other, scale, zero_point, limits.min, limits.max, other.dtype)
        return layer.run(own, lambda y: aten.add.Tensor(y, other))

    define(f"{name}({arguments}, bool parts) -> Tensor")(pointwise)
    define(f"{name}_binary(Tensor other, float other_scale, int other_zero_point, {arguments}) -> Tensor")(binary)
    operators = (
        torch_api.find_operator(f"ferrite.{name}.default"),
        torch_api.find_operator(f"ferrite.{name}_binary.default"),
    )
    layer = QuantizedLayer(base, tuple(each.name for each in base._schema.arguments), *operators)
    return layer


def pack_int8(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """The weight of a linear layer on integers, [out, in], in the order its kernel wants for so many rows of input."""
    packed: torch.Tensor = PACK_INT8(weight, [rows, weight.shape[1]])
    return packed


def look_of_pack_int8(weight: torch.Tensor, rows: int) -> torch.Tensor:
    return weight.new_empty(weight.shape[1], weight.shape[0])


# Torch's own operator for this has no rule for fake values, so that no graph could hold it.
PACK_INT8 = torch_api.find_operator("onednn.qlinear_prepack.default")
LIBRARY.define("pack_int8(Tensor weight, SymInt rows) -> Tensor")
LIBRARY.impl("pack_int8", pack_int8, "CompositeExplicitAutograd")
register_fake(LIBRARY, "pack_int8", look_of_pack_int8)


def quantized_layers() -> dict[Any, QuantizedLayer]:
    if torch_api.quantized_decomposed() is None:
        return {}
    spellings = [f"onednn.{name}.{overload}" for name in QUANTIZED for overload in ("default", "tensor")]
    bases = [base for base in map(torch_api.find_operator, spellings) if base is not None]
    return {base: define_quantized(base) for base in bases}


QUANTIZED_LAYERS = quantized_layers()
