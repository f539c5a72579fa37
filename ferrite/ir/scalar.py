"""The scalar operators: one row each, with what they take and give, their cost, and what they mean in torch.

`takes`: a row of `TAKES`. `gives`: "same" or "bool" or "free" (as the node says). All operands have one type, but for
the first of `where`, and for the number that goes with `ldexp` and `polygamma`, which may be an integer.
Costs are in additions: what recomputing one costs, roughly, with vector code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.ir.types import is_integer

CHEAP, DIVISION, TRANSCENDENTAL, SPECIAL = 1, 8, 20, 60
STOPPING = frozenset(["floor_divide", "trunc_divide", "remainder", "fmod"])  # on integers, where the divisor is zero
DOTS = ("dot_s8s8", "dot_u8s8")  # of words of four bytes: four products are added at once

# What an operator may be given.
TAKES: dict[str, Callable[[torch.dtype], bool]] = {
    "any": lambda dtype: True,
    "number": lambda dtype: dtype is not torch.bool,
    "ordered": lambda dtype: not dtype.is_complex,
    "real": lambda dtype: not dtype.is_complex and dtype is not torch.bool,
    "float": lambda dtype: dtype.is_floating_point or dtype.is_complex,
    "floating": lambda dtype: dtype.is_floating_point,
    "integer": is_integer,  # bool is one
    "whole": lambda dtype: is_integer(dtype) and dtype is not torch.bool,
    "bool": lambda dtype: dtype is torch.bool,
    "byte": lambda dtype: dtype in (torch.int8, torch.uint8),
    "word": lambda dtype: dtype is torch.int32,
}


@dataclass(frozen=True)
class ScalarOperator:
    name: str
    arity: int
    meaning: Callable[..., torch.Tensor]
    takes: str = "any"
    gives: str = "same"
    cost: int = CHEAP


OPERATORS: dict[str, ScalarOperator] = {}


def _row(
    name: str, arity: int, meaning: Callable[..., Any], takes: str = "any", gives: str = "same", cost: int = CHEAP
) -> None:
    OPERATORS[name] = ScalarOperator(name, arity, meaning, takes, gives, cost)


def _rows(arity: int, names: str, module: Any = torch, prefix: str = "", **rest: Any) -> None:
    for name in names.split():
        _row(prefix + name, arity, getattr(module, name), **rest)


def _fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c, rounded once: the product of two floats is exact in double precision."""
    if a.dtype is torch.float32:
        return (a.double() * b.double() + c.double()).float()
    return torch.addcmul(c, a, b)


def _fmod(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Exact, also where the quotient overflows: torch's vector code says NaN there, its scalar code does not."""
    if a.dtype is torch.float32:
        return torch.fmod(a.double(), b.double()).float()
    return torch.fmod(a, b)


def _ndtr(a: torch.Tensor) -> torch.Tensor:
    """By the complement of erf: torch's own ndtr adds one to erf, and has no digits left where the result is small."""
    return (0.5 * torch.erfc(a.double() * -math.sqrt(0.5))).to(a.dtype)


def _word(*four: torch.Tensor) -> torch.Tensor:
    """Four bytes as one integer of 32 bits, the first in its lowest bits."""
    together = torch.stack(torch.broadcast_tensors(*four), -1)
    return together.contiguous().view(torch.int32).squeeze(-1)


def _dot_of(left: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The sum of four products: of the bytes of one word, which are of this type, with those of another, which have
    signs. It always fits."""

    def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        bytes_of_a, bytes_of_b = a.unsqueeze(-1).contiguous().view(left), b.unsqueeze(-1).contiguous().view(torch.int8)
        return (bytes_of_a.int() * bytes_of_b.int()).sum(-1, dtype=torch.int32)

    return dot


_rows(2, "add mul")
_rows(2, "sub", takes="number")
_rows(2, "maximum minimum fmax fmin", takes="ordered")
_row("div", 2, torch.true_divide, takes="float", cost=DIVISION)
_row("floor_divide", 2, lambda a, b: torch.div(a, b, rounding_mode="floor"), takes="real", cost=DIVISION)
_row("trunc_divide", 2, lambda a, b: torch.div(a, b, rounding_mode="trunc"), takes="real", cost=DIVISION)
_rows(2, "remainder", takes="real", cost=DIVISION)
_row("fmod", 2, _fmod, takes="real", cost=DIVISION)
_rows(2, "pow", takes="number", cost=2 * TRANSCENDENTAL)
_rows(1, "neg", takes="number")
_rows(1, "abs", takes="real")
_rows(1, "sign", takes="ordered")
_row("abs_complex", 1, torch.abs, takes="float", gives="free", cost=DIVISION)
_rows(1, "ceil floor trunc round", takes="floating")
_rows(1, "sqrt rsqrt reciprocal", takes="float", cost=DIVISION)
_rows(1, "exp exp2 expm1 log log2 log10 log1p", takes="float", cost=TRANSCENDENTAL)
_rows(1, "sin cos tan sinh cosh tanh sigmoid", takes="float", cost=TRANSCENDENTAL)
_rows(1, "asin acos atan asinh acosh atanh", takes="float", cost=TRANSCENDENTAL)
_rows(1, "erf erfc", takes="floating", cost=TRANSCENDENTAL)
_row("special_ndtr", 1, _ndtr, takes="floating", cost=TRANSCENDENTAL)
_rows(1, "erfinv lgamma digamma i0", takes="floating", cost=SPECIAL)
_rows(2, "atan2 hypot", takes="floating", cost=2 * TRANSCENDENTAL)
_rows(2, "copysign nextafter", takes="floating")
_rows(2, "igamma igammac", takes="floating", cost=SPECIAL)
_row("fma", 3, _fused, takes="float")
_rows(
    1,
    "i0e i1 i1e ndtri log_ndtr erfcx airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1",
    torch.special,
    "special_",
    takes="floating",
    cost=SPECIAL,
)
_rows(
    1,
    "modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 spherical_bessel_j0 "
    "scaled_modified_bessel_k0 scaled_modified_bessel_k1",
    torch.special,
    "special_",
    takes="floating",
    cost=SPECIAL,
)
_rows(
    2,
    "zeta chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w "
    "hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p "
    "shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v "
    "shifted_chebyshev_polynomial_w",
    torch.special,
    "special_",
    takes="floating",
    cost=SPECIAL,
)
_row("polygamma", 2, lambda n, x: torch.special.polygamma(int(n.flatten()[0]), x), takes="floating", cost=SPECIAL)
_rows(2, "eq ne", gives="bool")
_rows(2, "lt le gt ge", takes="ordered", gives="bool")
_rows(1, "isnan isinf isfinite", gives="bool")
_rows(1, "signbit", takes="ordered", gives="bool")
_rows(2, "logical_and logical_or logical_xor", takes="bool")
_rows(1, "logical_not", takes="bool")
_rows(2, "bitwise_and bitwise_or bitwise_xor", takes="integer")
_rows(2, "bitwise_left_shift bitwise_right_shift gcd lcm", takes="whole")
_rows(1, "bitwise_not", takes="integer")
_row("pack_bytes", 4, _word, takes="byte", gives="free", cost=6 * CHEAP)
_row("dot_s8s8", 2, _dot_of(torch.int8), takes="word")
_row("dot_u8s8", 2, _dot_of(torch.uint8), takes="word")
_row("where", 3, torch.where)
_row("frexp_mantissa", 1, lambda a: torch.frexp(a).mantissa, takes="floating")
_row("frexp_exponent", 1, lambda a: torch.frexp(a).exponent, takes="floating", gives="free")
_rows(2, "ldexp", takes="floating", cost=DIVISION)
_row("bitcast", 1, lambda a: a, gives="free")
_row("real", 1, torch.real, takes="float", gives="free")
_row("imag", 1, lambda a: torch.imag(a) if a.is_complex() else torch.zeros_like(a), takes="float", gives="free")
_row("complex", 2, torch.complex, takes="floating", gives="free")
_row("conj", 1, torch.conj_physical, takes="float")
_row("angle", 1, torch.angle, takes="float", gives="free", cost=TRANSCENDENTAL)
