"""Scalar operators and conversions as Triton source: one row each.

A row takes the texts of the operands and their type; floats have 32 or 64 bits, since kernels compute on no others.
What has no row has no Triton source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch

from ferrite.codegen.triton.float8 import FORMATS
from ferrite.codegen.triton.helpers import HELPERS
from ferrite.codegen.triton.launch import TYPES
from ferrite.codegen.triton.orthogonal import POLYNOMIAL_OPERATORS
from ferrite.errors import NotGenerated
from ferrite.graph import HALVES
from ferrite.ir import Cast, Const, Expr, Load, Local, Op, bits_of, is_integer, short, value_of

Needs = Callable[[str], object]
Row = Callable[[Needs, torch.dtype, list[str]], str | None]
ALL = "propagate_nan=tl.PropagateNan.ALL"
MAX_FACTORIAL = 170  # the largest that a double holds
MAX_RECIPROCAL_EXPONENT = 120  # of a power of two: beyond, one over it may be denormal
NARROW_INTEGERS = (torch.int8, torch.int16, torch.uint8, torch.uint16, torch.uint32)


# --- types and literals -----------------------------------------------------------------------------------------------


def type_name(dtype: torch.dtype) -> str:
    name = TYPES.get(dtype)
    if name is None:
        raise NotGenerated(f"elements of type {short(dtype)}")
    return name


def constant(expr: Const, shape: str = "[]") -> str:
    """A number of its type: a Python number has none, and loses the sign of zero."""
    return filled(expr.bits, expr.dtype, shape)


def filled(bits: int, dtype: torch.dtype, shape: str) -> str:
    if dtype in FORMATS:
        return f"tl.full({shape}, {bits}, tl.uint8)"
    value, name = value_of(bits, dtype), type_name(dtype)
    by_bits = dtype is torch.bfloat16 or (
        dtype.is_floating_point and (math.isnan(value) or (value == 0 and math.copysign(1, value) < 0))
    )
    if by_bits:
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        return f"tl.cast({filled(bits, integer, shape)}, {name}, bitcast=True)"
    return f"tl.full({shape}, {literal(value)}, {name})"


def literal(value: bool | int | float) -> str:
    if isinstance(value, float) and math.isinf(value):
        return 'float("inf")' if value > 0 else 'float("-inf")'
    return repr(value)


def plain_number(expr: Const) -> str | None:
    """A literal that means the same beside an operand of the type: finite, and not minus zero."""
    if expr.dtype not in (torch.float32, torch.int32, torch.int64):
        return None
    value = expr.value
    if isinstance(value, float) and (not math.isfinite(value) or (value == 0 and math.copysign(1, value) < 0)):
        return None
    return f"({value!r})" if value < 0 else repr(value)


# --- conversions ------------------------------------------------------------------------------------------------------


def converted(needs: Needs, text: str, old: torch.dtype, new: torch.dtype) -> str:
    """As eager converts: to and from floats of 16 and 8 bits by way of 32 bits, to bool by comparing with zero."""
    name = type_name(new)
    if old is new:
        return text
    if new is torch.bool:
        return f"({_widened(needs, text, old)} != 0)"
    if old is torch.bfloat16 or old in FORMATS:
        return converted(needs, _widened(needs, text, old), torch.float32, new)
    if new in HALVES or new in FORMATS:
        wide = converted(needs, text, old, torch.float32)
        return _rounded(needs, wide, new)
    if old.is_floating_point and new in NARROW_INTEGERS:  # what does not fit wraps, as if converted to 64 bits first
        return f"tl.cast(tl.cast({text}, tl.int64), {name})"
    return f"tl.cast({text}, {name})"


def _widened(needs: Needs, text: str, dtype: torch.dtype) -> str:
    if dtype is torch.bfloat16:
        needs("from_bfloat16")
        return f"from_bfloat16({text})"
    if dtype in FORMATS:
        needs(f"from_{FORMATS[dtype].name}")
        return f"from_{FORMATS[dtype].name}({text})"
    return f"tl.cast({text}, tl.float32)" if dtype is torch.float16 else text


def _rounded(needs: Needs, text: str, dtype: torch.dtype) -> str:
    if dtype is torch.bfloat16:
        needs("to_bfloat16")
        return f"to_bfloat16({text})"
    if dtype in FORMATS:
        needs(f"to_{FORMATS[dtype].name}")
        return f"to_{FORMATS[dtype].name}({text})"
    return f"tl.cast({text}, tl.float16)"


# --- operators --------------------------------------------------------------------------------------------------------


def operation(needs: Needs, expr: Op, args: list[str], quick: bool = False, at_least_one: Collection[str] = ()) -> str:
    """`quick`: all results have 16 bits, so that the last bits of 32 do not matter. `at_least_one`: names of values
    that are."""
    dtype = expr.operands[-1].dtype
    type_name(expr.dtype)
    row = ROWS.get(expr.name)
    if quick and dtype is torch.float32:
        row = QUICK.get(expr.name, row)
        if expr.name == "div" and is_at_least_one(expr.operands[1], at_least_one):
            row = _by_type("quick_divide({0}, {1})", None)
    if expr.name == "div" and dtype is torch.float32 and (factor := exact_reciprocal(expr.operands[1])) is not None:
        row = _by_type(f"{{0}} * {factor!r}", None)
    if expr.name == "polygamma":
        row = _polygamma(expr.operands[0])
    elif any(operand.dtype != dtype for operand in expr.operands) and expr.name != "where":
        row = None  # a number beside a float: few operators have one
    if dtype in FORMATS and expr.name != "where":
        row = None
    if expr.name == "bitcast":
        row = _bitcast_to(expr.dtype)
    text = row(needs, dtype, args) if row else None
    if text is None:
        raise NotGenerated(f"{expr.name} of {short(dtype)}")
    return text


def exact_reciprocal(expr: Expr) -> float | None:
    """One over a power of two: to multiply by it rounds as the division does."""
    if not isinstance(expr, Const) or not isinstance(expr.value, float):
        return None
    mantissa, exponent = math.frexp(expr.value)
    return 1 / expr.value if abs(mantissa) == 0.5 and abs(exponent) <= MAX_RECIPROCAL_EXPONENT else None


def is_at_least_one(expr: Expr, names: Collection[str]) -> bool:
    """Whether a value has one of these names, or is one and an exponential, as below a sigmoid."""
    if isinstance(expr, Local):
        return expr.name in names
    if not isinstance(expr, Op) or expr.name != "add":
        return False
    one, power = sorted(expr.operands, key=lambda each: not isinstance(each, Const))
    return isinstance(one, Const) and one.value == 1 and isinstance(power, Op) and power.name == "exp"


def rounds_apart(expr: Op, products: Collection[str]) -> bool:
    """Whether a sum must not be one instruction with a product: with a product that is rounded to 16 bits before; or
    where both are products, and equal ones would leave what the rounding of one of them took. `products`: names of
    values that are."""
    if expr.name not in ("add", "sub") or not expr.dtype.is_floating_point:
        return False
    found = [(is_product(each, products), is_rounded(each)) for each in expr.operands]
    return any(all(each) for each in found) or all(product for product, _ in found)


def is_product(expr: Expr, names: Collection[str]) -> bool:
    """Whether a value is a product, rounded or turned."""
    while isinstance(expr, Cast) or (isinstance(expr, Op) and expr.name == "neg"):
        expr = expr.args[0]
    if isinstance(expr, Local | Load):
        return (expr.name if isinstance(expr, Local) else expr.buffer) in names
    if isinstance(expr, Op) and expr.name == "where":
        return any(is_product(each, names) for each in expr.args[1:])
    return isinstance(expr, Op) and expr.name == "mul" and expr.dtype.is_floating_point


def is_rounded(expr: Expr) -> bool:
    """Whether a value of more bits has 16 that count."""
    if isinstance(expr, Op) and expr.name == "neg":
        return is_rounded(expr.args[0])
    return isinstance(expr, Cast) and expr.arg.dtype in HALVES


INFIX_NAMES = ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge")  # take a plain number as an operand


def _bitcast_to(new: torch.dtype) -> Row:
    def row(needs: Needs, old: torch.dtype, args: list[str]) -> str | None:
        if old is not new and torch.bool in (old, new):
            return None
        return args[0] if old is new else f"tl.cast({args[0]}, {type_name(new)}, bitcast=True)"

    return row


def _arithmetic(sign: str, for_bool: str) -> Row:
    return lambda needs, dtype, args: f"{args[0]} {for_bool if dtype is torch.bool else sign} {args[1]}"


def _comparison(sign: str) -> Row:
    def row(needs: Needs, dtype: torch.dtype, args: list[str]) -> str:
        if dtype is torch.bool:  # one bit has a sign in Triton: True would be below False
            args = [f"tl.cast({arg}, tl.int32)" for arg in args]
        return f"{args[0]} {sign} {args[1]}"

    return row


def _extreme(name: str, for_bool: str) -> Row:
    def row(needs: Needs, dtype: torch.dtype, args: list[str]) -> str:
        if dtype is torch.bool:
            return f"{args[0]} {for_bool} {args[1]}"
        return f"tl.{name}({', '.join(args)}{', ' + ALL if dtype.is_floating_point else ''})"

    return row


def _extreme_number(name: str, for_bool: str) -> Row:
    """The number, where the other is NaN."""
    plain = _extreme(name, for_bool)

    def row(needs: Needs, dtype: torch.dtype, args: list[str]) -> str | None:
        left, right = args
        text = plain(needs, dtype, args)
        if not dtype.is_floating_point:
            return text
        return f"tl.where({left} != {left}, {right}, tl.where({right} != {right}, {left}, {text}))"

    return row


def _library(name: str) -> Row:
    """A function of CUDA's library of accurate ones, for floats."""

    def row(needs: Needs, dtype: torch.dtype, args: list[str]) -> str | None:
        return f"libdevice.{name}({', '.join(args)})" if dtype.is_floating_point else None

    return row


def _by_type(floating: str | None, integer: str | None, unsigned: str | None = None) -> Row:
    """`{0}` and `{1}` are the operands; a word before a bracket may be a helper."""

    def row(needs: Needs, dtype: torch.dtype, args: list[str]) -> str | None:
        if dtype is torch.bool:
            return None
        form = floating if dtype.is_floating_point else integer
        if not dtype.is_floating_point and not dtype.is_signed and unsigned is not None:
            form = unsigned
        return None if form is None else _filled_form(needs, form, args)

    return row


def _in_32_bits(form: str) -> Row:
    """What is not exact enough for 64."""
    return lambda needs, dtype, args: _filled_form(needs, form, args) if dtype is torch.float32 else None


def _polygamma(order: Expr) -> Row | None:
    """A derivative of the logarithm of the gamma function, by zeta."""
    if not isinstance(order, Const) or not isinstance(order.value, int) or order.value < 0:
        return None
    n = order.value
    if n == 0:
        return _by_type("digamma({1})", None)
    factor = -((-1.0) ** n) * (float(math.factorial(n)) if n <= MAX_FACTORIAL else math.inf)

    def row(needs: Needs, dtype: torch.dtype, args: list[str]) -> str:
        given = filled(bits_of(n + 1.0, torch.float64), torch.float64, "[]")
        scale = filled(bits_of(factor, torch.float64), torch.float64, "[]")
        needs("hurwitz_zeta")
        return f"tl.cast({scale} * hurwitz_zeta({given}, {args[1]}), {type_name(dtype)})"

    return row


def _filled_form(needs: Needs, form: str, args: list[str]) -> str:
    for word in form.replace("(", " ").split():
        if word in HELPERS:
            needs(word)
    return form.format(*args)


def _logical(form: str) -> Row:
    return lambda needs, dtype, args: form.format(*args) if is_integer(dtype) else None


def _sign_bit(needs: Needs, dtype: torch.dtype, args: list[str]) -> str | None:
    if dtype is torch.bool:
        return f"{args[0]} != {args[0]}"
    if not dtype.is_floating_point:
        return f"{args[0]} < 0"
    integer = "tl.int64" if dtype is torch.float64 else "tl.int32"
    return f"tl.cast({args[0]}, {integer}, bitcast=True) < 0"


def _negated(needs: Needs, dtype: torch.dtype, args: list[str]) -> str | None:
    # 0 - x, which some versions print for -x, has no negative zero
    return f"{args[0]} * (-1.0)" if dtype.is_floating_point else f"-{args[0]}"


def _infinite(sign: str, for_integers: str) -> Row:
    def row(needs: Needs, dtype: torch.dtype, args: list[str]) -> str:
        if not dtype.is_floating_point:
            return f"{args[0]} {for_integers} {args[0]}"
        return f'tl.abs({args[0]}) {sign} float("inf")'

    return row


def _one_over(text: str) -> Row:
    def row(needs: Needs, dtype: torch.dtype, args: list[str]) -> str | None:
        if not dtype.is_floating_point:
            return None
        one = filled(bits_of(1.0, dtype), dtype, "[]")
        return _filled_form(needs, f"divide({one}, {text})", args)

    return row


def _normal_distribution(needs: Needs, dtype: torch.dtype, args: list[str]) -> str | None:
    if not dtype.is_floating_point:
        return None
    factor = filled(bits_of(-math.sqrt(0.5), dtype), dtype, "[]")
    return f"libdevice.erfc({args[0]} * {factor}) * 0.5"


def _turned(needs: Needs, dtype: torch.dtype, args: list[str]) -> str | None:
    """Of a real number: 0 or pi; NaN stays."""
    if not dtype.is_floating_point:
        return None
    zero, half = (filled(bits_of(value, dtype), dtype, "[]") for value in (0.0, math.pi))
    return f"tl.where({args[0]} != {args[0]}, {args[0]}, tl.where({args[0]} < 0, {half}, {zero}))"


def _no_part(needs: Needs, dtype: torch.dtype, args: list[str]) -> str | None:
    """The imaginary part of a real number, NaN or not."""
    return f"tl.cast({args[0]} != {args[0]}, {type_name(dtype)}) * 0.0" if dtype.is_floating_point else None


def _sign(needs: Needs, dtype: torch.dtype, args: list[str]) -> str | None:
    if dtype is torch.bool:
        return args[0]
    name = type_name(dtype)
    return f"tl.cast({args[0]} > 0, {name}) - tl.cast({args[0]} < 0, {name})"


def _inverted(needs: Needs, dtype: torch.dtype, args: list[str]) -> str | None:
    if dtype is torch.bool or dtype.is_signed:
        return f"~{args[0]}"
    ones = filled((1 << 8 * dtype.itemsize) - 1, dtype, "[]")  # Triton's interpreter has no ~ of these
    return f"{args[0]} ^ {ones}"


LIBRARY = """exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh
    erf erfc erfinv lgamma atan2 hypot copysign nextafter"""
# Functions of the library that have another name there.
RENAMED = {
    "round": "rint",
    "i0": "cyl_bessel_i0",
    "special_i1": "cyl_bessel_i1",
    "special_modified_bessel_i0": "cyl_bessel_i0",
    "special_modified_bessel_i1": "cyl_bessel_i1",
    "special_bessel_j0": "j0",
    "special_bessel_j1": "j1",
    "special_bessel_y0": "y0",
    "special_bessel_y1": "y1",
    "special_erfcx": "erfcx",
    "special_ndtri": "normcdfinv",
}
# Sums that are rounded on their own, whatever is added.
APART = {"add": "add_apart", "sub": "subtract_apart"}
# CUDA's waves are off by 2e-6 in 32 bits, where eager's are exact to the last digits, and by 5e-12 in 64.
BY_DOUBLE = "tl.cast(libdevice.{}(tl.cast({{0}}, tl.float64)), tl.float32)"
ROWS: dict[str, Row] = {
    "add": _arithmetic("+", "|"),
    "mul": _arithmetic("*", "&"),
    "sub": _by_type("{0} - {1}", "{0} - {1}"),
    "div": _by_type("divide({0}, {1})", None),
    "floor_divide": _by_type("floor_divide_float({0}, {1}, divide({0}, {1}))", "floor_divide({0}, {1})", "{0} // {1}"),
    "trunc_divide": _by_type("libdevice.trunc(divide({0}, {1}))", "{0} // {1}"),
    "remainder": _by_type("floor_modulo_float({0}, {1})", "floor_modulo({0}, {1})", "{0} % {1}"),
    "fmod": _by_type("libdevice.fmod({0}, {1})", "{0} % {1}"),
    "maximum": _extreme("maximum", "|"),
    "minimum": _extreme("minimum", "&"),
    "fmax": _extreme_number("maximum", "|"),
    "fmin": _extreme_number("minimum", "&"),
    "neg": _negated,
    "abs": _by_type("tl.abs({0})", "tl.abs({0})", "{0}"),
    "sign": _sign,
    "signbit": _sign_bit,
    "ceil": _by_type("tl.ceil({0})", None),
    "floor": _by_type("tl.floor({0})", None),
    "trunc": _library("trunc"),
    **{name: _library(there) for name, there in RENAMED.items()},
    **{f"special_bessel_{name}": _in_32_bits(BY_DOUBLE.format(name)) for name in ("j0", "j1", "y0", "y1")},
    "sqrt": _by_type("square_root({0})", None),
    "rsqrt": _library("rsqrt"),
    "reciprocal": _one_over("{0}"),
    "sigmoid": _one_over("(libdevice.exp({0} * (-1.0)) + 1.0)"),
    "special_ndtr": _normal_distribution,
    "special_log_ndtr": _by_type("log_normal_distribution({0})", None),
    "pow": _by_type("libdevice.pow({0}, {1})", "integer_power({0}, {1})"),
    "gcd": _by_type(None, "common_divisor(tl.abs({0}), tl.abs({1}))", "common_divisor({0}, {1})"),
    "lcm": _by_type(
        None,
        "common_multiple({0}, {1}, common_divisor(tl.abs({0}), tl.abs({1})))",
        "common_multiple({0}, {1}, common_divisor({0}, {1}))",
    ),
    "digamma": _by_type("digamma({0})", None),
    "special_i0e": _by_type("scaled_bessel_i0({0})", None),
    "special_i1e": _by_type("scaled_bessel_i1({0})", None),
    "special_modified_bessel_k0": _by_type("bessel_k0({0})", None),
    "special_modified_bessel_k1": _by_type("bessel_k1({0})", None),
    "special_scaled_modified_bessel_k0": _by_type("scaled_bessel_k0({0})", None),
    "special_scaled_modified_bessel_k1": _by_type("scaled_bessel_k1({0})", None),
    "special_spherical_bessel_j0": _by_type("spherical_bessel_j0({0})", None),
    "special_airy_ai": _by_type("airy_ai({0})", None),
    "special_zeta": _by_type("zeta({0}, {1})", None),
    "igamma": _in_32_bits("lower_gamma({0}, {1})"),
    "igammac": _in_32_bits("upper_gamma({0}, {1})"),
    **{name: _by_type(f"{helper}({{0}}, {{1}})", None) for name, helper in POLYNOMIAL_OPERATORS.items()},
    "frexp_mantissa": _by_type("float_mantissa({0})", None),
    "frexp_exponent": _by_type("float_exponent({0})", None),
    "imag": _no_part,
    "angle": _turned,
    "real": _by_type("{0}", None),
    "conj": _by_type("{0}", None),
    "abs_complex": _by_type("tl.abs({0})", None),
    "isnan": lambda needs, dtype, args: f"{args[0]} != {args[0]}",
    "isinf": _infinite("==", "!="),
    "isfinite": _infinite("<", "=="),
    "logical_and": _logical("{0} & {1}"),
    "logical_or": _logical("{0} | {1}"),
    "logical_xor": _logical("{0} ^ {1}"),
    "logical_not": _logical("~{0}"),
    "bitwise_and": _logical("{0} & {1}"),
    "bitwise_or": _logical("{0} | {1}"),
    "bitwise_xor": _logical("{0} ^ {1}"),
    "bitwise_not": _inverted,
    "bitwise_left_shift": _by_type(None, "shift_left({0}, {1})"),
    "bitwise_right_shift": _by_type(None, "shift_right({0}, {1})", "shift_right_unsigned({0}, {1})"),
    "where": lambda needs, dtype, args: f"tl.where({', '.join(args)})",
    "fma": _by_type("libdevice.fma({0}, {1}, {2})", None),
    **{name: _comparison(sign) for name, sign in zip(INFIX_NAMES[3:], ("==", "!=", "<", "<=", ">", ">="), strict=True)},
    **{name: _library(name) for name in LIBRARY.split()},
}

# At the speed of the hardware, for results that are rounded to 16 bits. Logarithms are not among them: near one the
# hardware's are wrong in all digits.
QUICK: dict[str, Row] = {
    "div": _by_type("{0} / {1}", None),
    "reciprocal": _by_type("1.0 / {0}", None),
    "sqrt": _by_type("tl.sqrt({0})", None),
    "exp": _by_type("tl.exp({0})", None),
    "sigmoid": _by_type("quick_sigmoid({0})", None),
    "tanh": _by_type("quick_tanh({0})", None),
    "erf": _by_type("quick_erf({0})", None),
    "special_ndtr": _by_type("quick_ndtr({0})", None),
}
