"""Straight-line LLVM text, written as formulas.

A `Value` is one vector (or one scalar) in the text being written. Operators and the functions below append an
instruction and give its result, so that a formula here reads as on paper:

>>> written = FunctionLines("@f", lanes=4)
>>> x = written.parameter("x", "float")
>>> _ = fma(x, x, 0.5) < 1.0
>>> print("\\n".join(written.lines))
  %v0 = call <4 x float> @llvm.fma.v4f32(<4 x float> %x, <4 x float> %x, <4 x float> splat (float 0x3FE0000000000000))
  %v1 = fcmp olt <4 x float> %v0, splat (float 0x3FF0000000000000)

No instruction has a fast-math flag: what is written is what is computed, the same in every lane and for every count
of lanes. An instruction that was written before is not written again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from ferrite.codegen.coefficients.constants import rounded

FLOATS = {"float": "f32", "double": "f64"}
INTEGER_OF = {"float": "i32", "double": "i64"}
FLOAT_OF = {"i32": "float", "i64": "double"}
FRACTION_BITS = {"float": 23, "double": 52}
EXPONENT_BIAS = {"float": 127, "double": 1023}
INFINITY, NAN = float("inf"), float("nan")

Number = int | float


@dataclass
class FunctionLines:
    """The lines of one function so far, and what they call: intrinsics, and helpers defined beside it."""

    symbol: str
    lanes: int
    lines: list[str] = field(default_factory=list)
    helpers: list[str] = field(default_factory=list)
    declares: set[str] = field(default_factory=set)
    values_by_text: dict[str, Value] = field(default_factory=dict)
    count: int = 0
    block: str = "entry"

    def parameter(self, name: str, element: str) -> Value:
        return Value(self, f"%{name}", element)

    def type(self, element: str) -> str:
        return element if self.lanes == 1 else f"<{self.lanes} x {element}>"

    def instruction(self, text: str, element: str) -> Value:
        """The value of an instruction that has no effect but its result."""
        if text not in self.values_by_text:
            self.values_by_text[text] = Value(self, f"%v{self.count}", element)
            self.lines.append(f"  %v{self.count} = {text}")
            self.count += 1
        return self.values_by_text[text]

    def constant(self, number: Number, element: str) -> Value:
        text = _literal(number, element)
        return Value(self, text if self.lanes == 1 else f"splat ({element} {text})", element)

    def intrinsic(self, name: str, arguments: Sequence[Value]) -> Value:
        """An intrinsic over floats that takes and gives one type."""
        element = arguments[0].element
        short = FLOATS[element] if self.lanes == 1 else f"v{self.lanes}{FLOATS[element]}"
        full = self.type(element)
        self.declares.add(f"declare {full} @llvm.{name}.{short}({', '.join([full] * len(arguments))})")
        listed = ", ".join(f"{full} {argument.name}" for argument in arguments)
        return self.instruction(f"call {full} @llvm.{name}.{short}({listed})", element)

    def start(self, block: str) -> None:
        self.lines.append(f"{block}:")
        self.block = block


@dataclass(frozen=True, eq=False)
class Value:
    written: FunctionLines
    name: str
    element: str  # "float", "double", "i32", "i64" or "i1"

    def like(self, number: Value | Number) -> Value:
        return number if isinstance(number, Value) else self.written.constant(number, self.element)

    @property
    def is_float(self) -> bool:
        return self.element in FLOATS

    def _binary(self, float_name: str, integer_name: str, other: Value | Number, swapped: bool = False) -> Value:
        pair = (self.like(other), self) if swapped else (self, self.like(other))
        return _two(float_name if self.is_float else integer_name, *pair)

    def __add__(self, other: Value | Number) -> Value:
        return self._binary("fadd", "add", other)

    def __radd__(self, other: Number) -> Value:
        return self._binary("fadd", "add", other)

    def __sub__(self, other: Value | Number) -> Value:
        return self._binary("fsub", "sub", other)

    def __rsub__(self, other: Number) -> Value:
        return self._binary("fsub", "sub", other, swapped=True)

    def __mul__(self, other: Value | Number) -> Value:
        return self._binary("fmul", "mul", other)

    def __rmul__(self, other: Number) -> Value:
        return self._binary("fmul", "mul", other)

    def __truediv__(self, other: Value | Number) -> Value:
        return _two("fdiv", self, self.like(other))

    def __rtruediv__(self, other: Number) -> Value:
        return _two("fdiv", self.like(other), self)

    def __neg__(self) -> Value:
        return self.written.instruction(f"fneg {self.written.type(self.element)} {self.name}", self.element)

    def __and__(self, other: Value | Number) -> Value:
        return _two("and", self, self.like(other))

    def __or__(self, other: Value | Number) -> Value:
        return _two("or", self, self.like(other))

    def __xor__(self, other: Value | Number) -> Value:
        return _two("xor", self, self.like(other))

    def __invert__(self) -> Value:
        return self ^ -1

    def __lshift__(self, count: Value | int) -> Value:
        return _two("shl", self, self.like(count))

    def __rshift__(self, count: Value | int) -> Value:
        """Keeps the sign."""
        return _two("ashr", self, self.like(count))

    def unsigned_shift(self, count: Value | int) -> Value:
        return _two("lshr", self, self.like(count))

    # Comparisons of floats are false where an operand is NaN, but for !=, as everywhere.
    def __lt__(self, other: Value | Number) -> Value:
        return _compare("olt", "slt", self, self.like(other))

    def __le__(self, other: Value | Number) -> Value:
        return _compare("ole", "sle", self, self.like(other))

    def __gt__(self, other: Value | Number) -> Value:
        return _compare("ogt", "sgt", self, self.like(other))

    def __ge__(self, other: Value | Number) -> Value:
        return _compare("oge", "sge", self, self.like(other))

    def equals(self, other: Value | Number) -> Value:
        return _compare("oeq", "eq", self, self.like(other))

    def differs(self, other: Value | Number) -> Value:
        return _compare("une", "ne", self, self.like(other))


def _literal(number: Number, element: str) -> str:
    if element not in FLOATS:
        return "true" if element == "i1" and number else "false" if element == "i1" else str(int(number))
    wide = rounded(float(number)) if element == "float" else float(number)
    return f"0x{struct.unpack('<Q', struct.pack('<d', wide))[0]:016X}"


def _two(name: str, left: Value, right: Value) -> Value:
    assert left.element == right.element, (name, left, right)
    text = f"{name} {left.written.type(left.element)} {left.name}, {right.name}"
    return left.written.instruction(text, left.element)


def _compare(ordered: str, signed: str, left: Value, right: Value) -> Value:
    assert left.element == right.element, (ordered, left, right)
    how = f"fcmp {ordered}" if left.is_float else f"icmp {signed}"
    return left.written.instruction(f"{how} {left.written.type(left.element)} {left.name}, {right.name}", "i1")


def _call(name: str, *arguments: Value | Number) -> Value:
    first = next(argument for argument in arguments if isinstance(argument, Value))
    return first.written.intrinsic(name, [first.like(argument) for argument in arguments])


def fma(a: Value | Number, b: Value | Number, c: Value | Number) -> Value:
    """a * b + c, rounded once."""
    return _call("fma", a, b, c)


def sqrt(x: Value) -> Value:
    return _call("sqrt", x)


def fabs(x: Value) -> Value:
    return _call("fabs", x)


def trunc(x: Value) -> Value:
    return _call("trunc", x)


def floor(x: Value) -> Value:
    return _call("floor", x)


def nearest(x: Value) -> Value:
    """The nearest whole number, ties to even."""
    return _call("rint", x)


def copysign(magnitude: Value | Number, sign: Value) -> Value:
    return _call("copysign", magnitude, sign)


def minimum(x: Value, y: Value | Number) -> Value:
    """The smaller one; NaN where either is."""
    return _call("minimum", x, y)


def maximum(x: Value, y: Value | Number) -> Value:
    return _call("maximum", x, y)


def select(condition: Value, yes: Value | Number, no: Value | Number) -> Value:
    either = next(value for value in (yes, no) if isinstance(value, Value))
    yes, no, written = either.like(yes), either.like(no), condition.written
    assert yes.element == no.element
    full = written.type(yes.element)
    kind = written.type("i1")
    return written.instruction(f"select {kind} {condition.name}, {full} {yes.name}, {full} {no.name}", yes.element)


def constant(number: Number, like: Value) -> Value:
    return like.written.constant(number, like.element)


def _convert(how: str, x: Value, element: str) -> Value:
    written = x.written
    return written.instruction(f"{how} {written.type(x.element)} {x.name} to {written.type(element)}", element)


def bits(x: Value) -> Value:
    """The bits of a float, as an integer of its width."""
    return _convert("bitcast", x, INTEGER_OF[x.element])


def from_bits(x: Value) -> Value:
    return _convert("bitcast", x, FLOAT_OF[x.element])


def to_float(x: Value) -> Value:
    """An integer as a float of its width."""
    return _convert("sitofp", x, FLOAT_OF[x.element])


def widen(x: Value) -> Value:
    return _convert("fpext", x, "double")


def narrow(x: Value) -> Value:
    return _convert("fptrunc", x, "float")


def polynomial(x: Value, coefficients: Sequence[float]) -> Value:
    """c[0] + c[1] x + c[2] x^2 + ... by Horner's rule."""
    total = constant(coefficients[-1], x)
    for coefficient in reversed(coefficients[:-1]):
        total = fma(total, x, coefficient)
    return total


def polynomial_in_halves(x: Value, coefficients: Sequence[float]) -> Value:
    """The same as two sums, of the even and of the odd powers: a long one waits less for itself."""
    square = x * x
    return fma(polynomial(square, coefficients[1::2]), x, polynomial(square, coefficients[::2]))


def quotient(x: Value, parts: tuple[Sequence[float], Sequence[float]]) -> Value:
    return polynomial(x, parts[0]) / polynomial(x, parts[1])
