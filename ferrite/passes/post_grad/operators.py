"""Operators of our own that rules rewrite to, each one name for work that a code generator does in one kernel.

    m = amax(x, [1], True); e = exp(x - m); s = sum(e, [1], True)      =>      m, s = prepare_softmax_online(x, 1)

Each has a reference in plain ATen (see `ferrite.passes.shared.library`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.passes.shared.library import define

aten = torch.ops.aten


@define("prepare_softmax_online(Tensor x, int dim) -> (Tensor, Tensor)")
def prepare_softmax_online(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest along a dimension, and the sum of exponentials shifted by it.

    A kernel computes both in one pass: (m, s) and (m', s') combine to (M, s·exp(m - M) + s'·exp(m' - M)), M the larger.
    """
    largest = aten.amax.default(x, [dim], True)
    return largest, aten.sum.dim_IntList(aten.exp.default(aten.sub.Tensor(x, largest)), [dim], True)


@define("mm_plus_mm(Tensor a, Tensor b, Tensor c, Tensor d) -> Tensor")
def mm_plus_mm(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """a @ b + c @ d. The second product is where the first is added up, unrounded: one result is written, once."""
    return torch.mm(c, d).addmm_(a, b)


@define("int_mm_mul(Tensor a, Tensor b, Tensor scale) -> Tensor")
def int_mm_mul(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The int32 product of int8 matrices, scaled in the scale's dtype."""
    product: torch.Tensor = aten._int_mm.default(a, b)
    return product * scale


@define("b2b_gemm(Tensor a, Tensor b, Tensor c, str between, bool left) -> Tensor")
def b2b_gemm(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, between: str, left: bool) -> torch.Tensor:
    """f(a @ b) @ c if left, else a @ f(b @ c); `between` is f as `write_pointwise` wrote it."""
    if left:
        return torch.mm(run_pointwise(between, torch.mm(a, b)), c)
    return torch.mm(a, run_pointwise(between, torch.mm(b, c)))


# --- several linear layers on one input -------------------------------------------------------------------------------

# Not in every build of torch. The overload without a second operand is the plain layer.
_packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
PACKED_LINEAR = None if _packet is None else _packet.default


def look_of_grouped_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], packed: bool = True
) -> list[torch.Tensor]:
    """Packed weights have a layout of their own, which fake values cannot run on."""
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


@define(
    "grouped_linear(Tensor x, Tensor[] weights, Tensor?[] biases, bool packed=True) -> Tensor[]", look_of_grouped_linear
)
def grouped_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], packed: bool = True
) -> list[torch.Tensor]:
    """[x @ w0.T + b0, x @ w1.T, ...]: one name for the whole group, so that a kernel may read x once for all of it.

    Here the layers run one after the other through the operator they came from (`packed`: that of packed weights), so
    that results are the same to the bit. No two results share memory.
    """
    pairs = zip(weights, biases, strict=True)
    if PACKED_LINEAR is None or not packed:
        return [torch.nn.functional.linear(x, weight, bias) for weight, bias in pairs]
    return [PACKED_LINEAR(x, weight, bias, "none", [], "") for weight, bias in pairs]


# --- pointwise functions as text --------------------------------------------------------------------------------------
# A schema has no functions, so that one travels as JSON: a list of [operator, arguments, keywords]. Step i makes value
# i + 1, value 0 is the operand, the last value is the result. {"value": i} is a value, {"dtype": "float32"} a dtype.


def write_pointwise(operand: torch.fx.Node, region: Sequence[torch.fx.Node]) -> str | None:
    """Pointwise nodes in order as text; None where an argument is neither a value among them nor a plain literal."""
    numbers = {operand: 0, **{node: i + 1 for i, node in enumerate(region)}}
    try:
        return json.dumps(
            [
                [torch_api.operator_name(n.target), _encode(list(n.args), numbers), _encode(n.kwargs, numbers)]
                for n in region
            ]
        )
    except (KeyError, TypeError):
        return None


def run_pointwise(text: str, operand: torch.Tensor) -> torch.Tensor:
    values = [operand]
    for name, args, kwargs in json.loads(text):
        function = torch_api.find_operator(name)
        values.append(function(*_decode(args, values), **_decode(kwargs, values)))
    return values[-1]


def _encode(item: Any, numbers: Mapping[torch.fx.Node, int]) -> Any:
    match item:
        case torch.fx.Node():
            return {"value": numbers[item]}
        case torch.dtype():
            return {"dtype": str(item).removeprefix("torch.")}
        case list() | tuple():
            return [_encode(each, numbers) for each in item]
        case dict():
            return {key: _encode(each, numbers) for key, each in item.items()}
        case None | bool() | int() | float() | str():
            return item
        case _:
            raise TypeError(f"{item!r} has no text")


def _decode(item: Any, values: Sequence[torch.Tensor]) -> Any:
    match item:
        case {"value": int(number)}:
            return values[number]
        case {"dtype": str(name)}:
            return getattr(torch, name)
        case list():
            return [_decode(each, values) for each in item]
        case dict():
            return {key: _decode(each, values) for key, each in item.items()}
        case _:
            return item
