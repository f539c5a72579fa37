"""One vector math function: its formula, how far it may be from the truth, and its text for a type and for lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ferrite.codegen.llvm.math.text import FLOATS, FunctionLines, Value, narrow, widen

Body = Callable[..., Value]
ELEMENTS = {short: element for element, short in FLOATS.items()}


@dataclass(frozen=True)
class MathFunction:
    """`f32` and `f64`: the greatest error, in units of the last place of the exact result.

    With a `floor`, results in f64 that are smaller than it are measured by its last place: close to a root of the
    function only the absolute error is bounded. A `wide` function computes in f64 for f32 too.
    """

    name: str
    body: Body
    f32: float
    f64: float
    method: str
    arity: int = 1
    wide: bool = False
    inline: bool = True
    floor: float = 0.0

    def bound(self, short: str) -> float:
        return self.f32 if short == "f32" else self.f64


@dataclass(frozen=True)
class FunctionText:
    definition: str
    declares: frozenset[str]


def symbol(name: str, short: str, lanes: int) -> str:
    return f"@ferrite_{name}_{short}_v{lanes}"


@cache
def write(function: MathFunction, short: str, lanes: int) -> FunctionText:
    written = FunctionLines(symbol(function.name, short, lanes), lanes)
    element = ELEMENTS[short]
    parameters = [written.parameter(name, element) for name in "xyz"[: function.arity]]
    if function.wide and short == "f32":
        result = narrow(function.body(*map(widen, parameters)))
    else:
        result = function.body(*parameters)
    full = written.type(element)
    head = f"define internal {full} {written.symbol}({', '.join(f'{full} {p.name}' for p in parameters)})"
    how = "alwaysinline" if function.inline else "noinline"
    lines = [f"{head} {how} nounwind {{", "entry:", *written.lines, f"  ret {full} {result.name}", "}"]
    return FunctionText("\n".join([*lines, *written.helpers]) + "\n", frozenset(written.declares))
