"""What the tests of the vector math functions share: how to run one, where to look, and what is exact there."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from functools import cache

import mpmath
import torch
from mpmath import mpf

from ferrite.codegen.llvm.build import load, object_code
from ferrite.codegen.llvm.math.table import FUNCTIONS, declarations, function_name, function_text
from ferrite.codegen.llvm.processor import host_processor
from ferrite.ir.scalar import OPERATORS

ELEMENTS = {torch.float32: "float", torch.float64: "double"}
BITS = {torch.float32: (23, 8, torch.int32), torch.float64: (52, 11, torch.int64)}
DIGITS = 40


@cache
def runner(name: str, dtype: torch.dtype, lanes: int) -> Callable[..., torch.Tensor]:
    """The function applied to vectors of numbers, `lanes` at a time."""
    arity = OPERATORS[name].arity
    address = load({"loop": object_code(_loop(name, dtype, lanes, arity), host_processor())})["loop"]
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (arity + 1), ctypes.c_int64)(address)

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        assert all(x.dtype is dtype and x.dim() == 1 for x in inputs)
        size = inputs[0].numel()
        padded = [torch.cat([x, x.new_ones(-size % lanes)]) for x in inputs]
        result = torch.empty_like(padded[0])
        call(*(x.data_ptr() for x in padded), result.data_ptr(), result.numel())
        return result[:size]

    return run


def _loop(name: str, dtype: torch.dtype, lanes: int, arity: int) -> str:
    element, size = ELEMENTS[dtype], dtype.itemsize
    full = element if lanes == 1 else f"<{lanes} x {element}>"
    names = "abc"[:arity]
    loads = [
        f"  %p{a} = getelementptr {element}, ptr %{a}, i64 %i\n  %v{a} = load {full}, ptr %p{a}, align {size}"
        for a in names
    ]
    given = ", ".join(f"{full} %v{a}" for a in names)
    lines = [
        *sorted(declarations([(name, dtype, lanes)])),
        function_text(name, dtype, lanes),
        f"define void @loop({', '.join(f'ptr %{a}' for a in names)}, ptr %out, i64 %count) {{",
        "entry:",
        "  br label %each",
        "each:",
        "  %i = phi i64 [ 0, %entry ], [ %next, %each ]",
        *loads,
        f"  %r = call {full} {function_name(name, dtype, lanes)}({given})",
        f"  %pr = getelementptr {element}, ptr %out, i64 %i",
        f"  store {full} %r, ptr %pr, align {size}",
        f"  %next = add i64 %i, {lanes}",
        "  %more = icmp ult i64 %next, %count",
        "  br i1 %more, label %each, label %done",
        "done:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


# --- where to look ----------------------------------------------------------------------------------------------------

EVERYWHERE = ((-1.0, 1.0), (-10.0, 10.0), (-100.0, 100.0))
# Where a function changes most, or changes its way; the sweep over all exponents comes in addition.
INTERVALS: dict[str, tuple[tuple[float, float], ...]] = {
    "exp": ((-1, 1), (-104, 89), (-745, 710)),
    "exp2": ((-1, 1), (-150, 128), (-1075, 1024)),
    "expm1": ((-1, 1), (-40, 89), (-1, 710)),
    "sigmoid": ((-2, 2), (-30, 30), (-104, 30), (-745, 40)),
    "log": ((0.5, 2), (0, 10), (0, 1000)),
    "log2": ((0.5, 2), (0, 10), (0, 1000)),
    "log10": ((0.5, 2), (0, 10), (0, 1000)),
    "log1p": ((-1, 1), (-0.5, 2), (0, 1000)),
    "sin": ((-1, 1), (-10, 10), (-70000, 70000)),
    "cos": ((-1, 1), (-10, 10), (-70000, 70000)),
    "tan": ((-1, 1), (-10, 10), (-70000, 70000)),
    "asin": ((-1, 1), (0.4, 0.6), (0.99, 1)),
    "acos": ((-1, 1), (0.4, 0.6), (0.99, 1), (-1, -0.99)),
    "atanh": ((-1, 1), (0.9, 1)),
    "acosh": ((1, 2), (1, 1.01), (1, 100)),
    "sinh": ((-2, 2), (-90, 90), (-711, 711)),
    "cosh": ((-2, 2), (-90, 90), (-711, 711)),
    "tanh": ((-1, 1), (0.5, 0.7), (-10, 10), (-20, 20)),
    "erf": ((-1.5, 1.5), (-4, 4), (-6, 6)),
    "erfc": ((-1.5, 1.5), (-6, 6), (0, 10.1), (0, 27.3)),
    "erfinv": ((-1, 1), (0.99, 1), (-0.6, 0.6)),
    "lgamma": ((0, 4), (-0.6, 0.6), (-10, 10), (0, 1000), (0.99, 1.01), (1.99, 2.01)),
    "digamma": ((0, 4), (-0.6, 0.6), (-10, 10), (0, 1000), (1.46, 1.47)),
    "special_ndtr": ((-2, 2), (-15, 7), (-14.3, -12), (-38.6, 9)),
    "special_ndtri": ((0, 1), (0.2, 0.8), (0, 0.01), (0.99, 1)),
    "special_erfcx": ((-2, 2), (-26.7, 30), (0, 100)),
    "special_log_ndtr": ((-2, 2), (-40, 10), (-1000, 0), (0, 38)),
}
# Beyond these powers of two the exact value is no news, or long to find.
GREATEST_EXPONENT = {
    "erfc": 6,
    "special_ndtr": 6,
    "lgamma": 9,
    "digamma": 9,
    "special_log_ndtr": 60,
    "special_erfcx": 60,
}
GREATEST_EXPONENT |= dict.fromkeys(("i0", "special_i0e", "special_i1", "special_i1e"), 11)
GREATEST_EXPONENT |= dict.fromkeys(("special_modified_bessel_i0", "special_modified_bessel_i1"), 11)
# Torch's own double precision overflows inside at infinity; the limits are infinite.
INFINITY_IS_NAN_IN_TORCH = {"i0", "special_i1", "special_modified_bessel_i0", "special_modified_bessel_i1"}


def every_exponent(dtype: torch.dtype, each: int, step: int = 1) -> torch.Tensor:
    """Numbers of both signs with every exponent (or every few), subnormal ones, infinities and NaNs too."""
    fraction, exponent, whole = BITS[dtype]
    generator = torch.Generator().manual_seed(1)
    exponents = torch.arange(0, 1 << exponent, step, dtype=torch.int64)[:, None] << fraction
    fractions = torch.randint(0, 1 << fraction, (exponents.numel(), each), generator=generator, dtype=torch.int64)
    fractions[:, :3] = torch.tensor([0, 1, (1 << fraction) - 1])[: fractions.size(1)]
    positive = (exponents | fractions).flatten().to(whole).view(dtype)
    return torch.cat([positive, -positive])


def points(name: str, dtype: torch.dtype, each: int, step: int, dense: int) -> list[torch.Tensor]:
    """One vector of arguments for each operand."""
    generator = torch.Generator().manual_seed(2)
    parts = [every_exponent(dtype, each, step)]
    for low, high in INTERVALS.get(name, EVERYWHERE):
        parts.append((torch.rand(dense, generator=generator, dtype=torch.float64) * (high - low) + low).to(dtype))
    found = torch.cat(parts)
    if FUNCTIONS[name].arity == 1:
        return [found]
    order = torch.randperm(found.numel(), generator=generator)
    return [found, found[order]]


def doubles(name: str, step: int, dense: int) -> list[torch.Tensor]:
    """Numbers with an exact value that can be found."""
    inputs = points(name, torch.float64, each=2, step=step, dense=dense)
    limit = 2.0 ** GREATEST_EXPONENT.get(name, 1023)
    kept = torch.stack([x.isfinite() & (x != 0) & (x.abs() <= limit) for x in inputs]).all(0)
    return [x[kept] for x in inputs]


def singles(name: str, each: int, dense: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Numbers, and what torch says in double precision."""
    inputs = points(name, torch.float32, each=each, step=1, dense=dense)
    if name in INFINITY_IS_NAN_IN_TORCH:
        inputs = [x[~x.isinf()] for x in inputs]
    return inputs, OPERATORS[name].meaning(*(x.double() for x in inputs))


# --- how far off ------------------------------------------------------------------------------------------------------


def errors(
    result: torch.Tensor, exact: torch.Tensor, rest: torch.Tensor | float = 0.0, floor: float = 0.0
) -> torch.Tensor:
    """How far the result is from exact + rest (both f64), in units of the last place of exact, or of a larger floor."""
    dtype = result.dtype
    greatest = torch.finfo(dtype).max
    size = exact.abs().clamp(min=floor, max=2.0 ** ((1 << BITS[dtype][1] - 1) - 1)).to(dtype)
    unit = (torch.nextafter(size, size.new_full((), math.inf)) - size).double()
    wide = result.double()
    found = ((wide - exact) - rest).abs() / unit
    # A result beyond the largest number is infinite, one within half a unit of it may be.
    overflow = wide.isinf() & (exact.abs() > greatest) & (wide.sign() == exact.sign())
    same = (wide == exact) & (wide.isinf() | (torch.as_tensor(rest) == 0)) | (wide.isnan() & exact.isnan()) | overflow
    return torch.where(same, 0.0, torch.where(found.isnan(), math.inf, found))


# --- what is exact ----------------------------------------------------------------------------------------------------


def _power(x: mpf, y: mpf) -> mpf:
    if x < 0 and y != mpmath.floor(y):
        return mpmath.nan
    size = mpmath.exp(min(max(y * mpmath.log(abs(x)), mpf(-3000)), mpf(3000)))
    return -size if x < 0 and mpmath.floor(y / 2) != y / 2 else size


def _lgamma(x: mpf) -> mpf:
    if x > 0:
        return mpmath.loggamma(x)
    if x == mpmath.floor(x):
        return mpmath.inf
    return mpmath.log(mpmath.pi / abs(x * mpmath.sinpi(x))) - mpmath.loggamma(-x)


def _erfcx(x: mpf) -> mpf:
    if x < 50:
        return mpmath.exp(x * x) * mpmath.erfc(x)
    z, term, total = 1 / (2 * x * x), mpf(1), mpf(0)
    for k in range(12):
        total += term
        term *= -(2 * k + 1) * z
    return total / (x * mpmath.sqrt(mpmath.pi))


def _log_ndtr(x: mpf) -> mpf:
    scaled = x / mpmath.sqrt(2)
    if x < 0:
        return mpmath.log(_erfcx(-scaled) / 2) - scaled * scaled
    return mpmath.log1p(-mpmath.erfc(scaled) / 2)


def _erfcinv(z: mpf) -> mpf:
    """By Newton's method on the logarithm of erfc, for z of at most one half."""
    goal = mpmath.log(z)
    v = mpmath.sqrt(-goal) * mpf("0.9")
    for _ in range(50):
        value = mpmath.erfc(v)
        step = (mpmath.log(value) - goal) * value * mpmath.sqrt(mpmath.pi) / 2 * mpmath.exp(v * v)
        v += step
        if abs(step) < abs(v) * mpf(10) ** (3 - DIGITS):
            break
    return v


def _erfinv(x: mpf) -> mpf:
    if abs(x) > 1:
        return mpmath.nan
    if abs(x) > 0.5:
        return mpmath.sign(x) * _erfcinv(1 - abs(x))
    return mpmath.erfinv(x)


def _ndtri(p: mpf) -> mpf:
    if not 0 < p < 1:
        return mpmath.nan
    if 0.25 <= p <= 0.75:
        return mpmath.sqrt(2) * _erfinv(2 * p - 1)
    return mpmath.sqrt(2) * (-_erfcinv(2 * p) if p < 0.5 else _erfcinv(2 * (1 - p)))


def _fmod(x: mpf, y: mpf) -> mpf:
    with mpmath.workdps(800):
        return mpmath.sign(x) * (abs(x) % abs(y))


def _remainder(x: mpf, y: mpf) -> mpf:
    with mpmath.workdps(800):
        return x % y


def _i(order: int, scaled: bool) -> Callable[[mpf], mpf]:
    return lambda x: mpmath.besseli(order, x) * (mpmath.exp(-abs(x)) if scaled else 1)


EXACT: dict[str, Callable[..., mpf]] = {
    **{name: getattr(mpmath, name) for name in ("exp", "expm1", "log", "log10", "log1p", "sqrt")},
    **{name: getattr(mpmath, name) for name in ("sin", "cos", "tan", "asin", "acos", "atan", "atan2")},
    **{name: getattr(mpmath, name) for name in ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh")},
    **{name: getattr(mpmath, name) for name in ("erf", "erfc", "digamma", "hypot")},
    "exp2": lambda x: mpmath.exp(x * mpmath.ln2),
    "log2": lambda x: mpmath.log(x) / mpmath.ln2,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "pow": _power,
    "fmod": _fmod,
    "remainder": _remainder,
    "erfinv": _erfinv,
    "lgamma": _lgamma,
    "i0": _i(0, False),
    "special_i0e": _i(0, True),
    "special_i1": _i(1, False),
    "special_i1e": _i(1, True),
    "special_modified_bessel_i0": _i(0, False),
    "special_modified_bessel_i1": _i(1, False),
    "special_ndtr": lambda x: mpmath.erfc(-x / mpmath.sqrt(2)) / 2,
    "special_ndtri": _ndtri,
    "special_erfcx": _erfcx,
    "special_log_ndtr": _log_ndtr,
}


def exact_pair(name: str, numbers: Iterable[float]) -> tuple[float, float]:
    """The exact value as a float and what that lacks; NaN where the function is not defined on the real line."""
    with mpmath.workdps(DIGITS):
        try:
            value = EXACT[name](*map(mpf, numbers))
        except (ValueError, ZeroDivisionError):
            return math.nan, 0.0
        if isinstance(value, mpmath.mpc) or mpmath.isnan(value):
            return math.nan, 0.0
        nearest = float(value)
        # Of infinity and of subnormal numbers there is no rest, or none that is a float.
        whole = math.isinf(nearest) or abs(nearest) < 2.0**-1022
        return nearest, 0.0 if whole else float(value - nearest)


def exact_values(name: str, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = [exact_pair(name, numbers) for numbers in zip(*(x.tolist() for x in inputs), strict=True)]
    found = torch.tensor(pairs, dtype=torch.float64)
    return found[:, 0], found[:, 1]
