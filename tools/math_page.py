"""Print docs/math.md: what the vector math functions state, and what they and torch's own were measured to be.

python tools/math_page.py > docs/math.md
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from vector_math import doubles, errors, exact_values, singles

from ferrite.codegen.llvm.math.table import FUNCTIONS
from ferrite.ir.scalar import OPERATORS

HEAD = """# Vector math on the CPU

Generated code computes these functions with vector code of its own, for f32 and f64 and any number of lanes. Every
function gives the same bits for every number of lanes, keeps the sign of zero, gives NaN for NaN, and is right for
infinities and subnormal numbers, in arguments and results. None uses a fast-math flag.

Errors are in units of the last place of the exact result. "Bound" is what the tests hold; "torch" is the greatest error
of torch's own operator at the arguments of the tests: every exponent, both signs, and intervals where a function
changes most (torch 2.13 on aarch64). "Large" is more than a thousand units: there torch's operator overflows early,
loses all digits, or takes subnormal numbers for zero.

The polynomials are fitted by `tools/fit_math.py`. For `lgamma` and `digamma` in f64, results below one are measured by
the last place of one: close to their roots on the negative axis only the absolute error is bounded. `gelu` is x times
`special_ndtr(x)`, whose absolute error in f32 is at most 1.2e-7. Torch's own gelu has an error of that size, and no
digits left where the result is small. This page is made by `python tools/math_page.py`.

| Function | f32: bound | torch | f64: bound | torch | Method |
|---|---|---|---|---|---|
"""


def torch_error(name: str, dtype: torch.dtype) -> str:
    # The meaning of this one is more exact than torch's operator.
    operator = torch.special.ndtr if name == "special_ndtr" else OPERATORS[name].meaning
    if dtype is torch.float32:
        inputs, exact = singles(name, each=150, dense=60_000)
        found = errors(operator(*inputs), exact)
    else:
        inputs = doubles(name, step=32, dense=200)
        found = errors(operator(*inputs), *exact_values(name, inputs), FUNCTIONS[name].floor)
    worst = float(found.max())
    return f"{worst:.2f}" if worst < 1000 else "large"


def main() -> None:
    print(HEAD, end="")
    for name, function in FUNCTIONS.items():
        single, double = (torch_error(name, dtype) for dtype in (torch.float32, torch.float64))
        print(f"| `{name}` | {function.f32} | {single} | {function.f64} | {double} | {function.method} |")


if __name__ == "__main__":
    main()
