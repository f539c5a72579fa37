"""The vector math functions: within the error they state, right at the edges, the same for every count of lanes."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ferrite.codegen.llvm.build import assembly
from ferrite.codegen.llvm.math.table import FUNCTIONS, MATH, TYPES, declarations, function_name, function_text
from ferrite.codegen.llvm.processor import PROCESSORS, Processor
from ferrite.ir.scalar import OPERATORS
from tests.vector_math import BITS, EXACT, doubles, errors, every_exponent, exact_values, points, runner, singles

ROOT = Path(__file__).parents[2]
NAMES = sorted(FUNCTIONS)
INF, NAN = math.inf, math.nan


def assert_within_bound(
    name: str, inputs: list[torch.Tensor], exact: torch.Tensor, rest: torch.Tensor | float = 0.0
) -> None:
    dtype = inputs[0].dtype
    accuracy = MATH[name, dtype]
    result = runner(name, dtype, 8)(*inputs)
    found = errors(result, exact, rest, accuracy.floor)
    worst = int(found.argmax())
    assert found[worst] <= accuracy.ulps, (
        f"{name}{tuple(x[worst].item() for x in inputs)} is {result[worst].item()!r}, "
        f"should be {exact[worst].item()!r}: off by {found[worst]:.3f} units"
    )


@pytest.mark.parametrize("name", NAMES)
def test_singles_are_within_their_bound(name):
    inputs, exact = singles(name, each=150, dense=60_000)
    assert_within_bound(name, inputs, exact)


@pytest.mark.parametrize("name", NAMES)
def test_doubles_are_within_their_bound(name):
    inputs = doubles(name, step=32, dense=100)
    assert_within_bound(name, inputs, *exact_values(name, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_singles_are_within_their_bound(name):
    inputs, exact = singles(name, each=4000, dense=2_000_000)
    assert_within_bound(name, inputs, exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_doubles_are_within_their_bound(name):
    inputs = doubles(name, step=4, dense=2000)
    assert_within_bound(name, inputs, *exact_values(name, inputs))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_count_of_lanes_gives_the_same_bits(name, dtype):
    inputs = points(name, dtype, each=3, step=1 if dtype is torch.float32 else 16, dense=100)
    whole = BITS[dtype][2]
    first, *others = (runner(name, dtype, lanes)(*inputs) for lanes in (8, 1, 4, 16))
    for other in others:
        same = (first.view(whole) == other.view(whole)) | (first.isnan() & other.isnan())
        assert same.all()


# --- the edges --------------------------------------------------------------------------------------------------------

# What a function gives at 0, -0, infinity and -infinity.
AT_THE_ENDS: dict[str, tuple[float, float, float, float]] = {
    "exp": (1, 1, INF, 0),
    "exp2": (1, 1, INF, 0),
    "expm1": (0.0, -0.0, INF, -1),
    "sigmoid": (0.5, 0.5, 1, 0),
    "log": (-INF, -INF, INF, NAN),
    "log2": (-INF, -INF, INF, NAN),
    "log10": (-INF, -INF, INF, NAN),
    "log1p": (0.0, -0.0, INF, NAN),
    "sqrt": (0.0, -0.0, INF, NAN),
    "rsqrt": (INF, -INF, 0.0, NAN),
    "sin": (0.0, -0.0, NAN, NAN),
    "cos": (1, 1, NAN, NAN),
    "tan": (0.0, -0.0, NAN, NAN),
    "asin": (0.0, -0.0, NAN, NAN),
    "acos": (math.pi / 2, math.pi / 2, NAN, NAN),
    "atan": (0.0, -0.0, math.pi / 2, -math.pi / 2),
    "sinh": (0.0, -0.0, INF, -INF),
    "cosh": (1, 1, INF, INF),
    "tanh": (0.0, -0.0, 1, -1),
    "asinh": (0.0, -0.0, INF, -INF),
    "acosh": (NAN, NAN, INF, NAN),
    "atanh": (0.0, -0.0, NAN, NAN),
    "erf": (0.0, -0.0, 1, -1),
    "erfc": (1, 1, 0.0, 2),
    "erfinv": (0.0, -0.0, NAN, NAN),
    "lgamma": (INF, INF, INF, INF),
    "digamma": (-INF, INF, INF, NAN),
    "i0": (1, 1, INF, INF),
    "special_i0e": (1, 1, 0.0, 0.0),
    "special_i1": (0.0, -0.0, INF, -INF),
    "special_i1e": (0.0, -0.0, 0.0, -0.0),
    "special_modified_bessel_i0": (1, 1, INF, INF),
    "special_modified_bessel_i1": (0.0, -0.0, INF, -INF),
    "special_ndtr": (0.5, 0.5, 1, 0.0),
    "special_ndtri": (-INF, -INF, NAN, NAN),
    "special_erfcx": (1, 1, 0.0, INF),
    "special_log_ndtr": (math.log(0.5), math.log(0.5), -0.0, -INF),
}
# Exact values elsewhere.
EXACTLY: dict[str, list[tuple[float, float]]] = {
    "exp2": [(3, 8), (-1, 0.5), (-149, 2.0**-149), (127, 2.0**127)],
    "log": [(1, 0.0), (-1, NAN)],
    "log2": [(1, 0.0), (8, 3), (2.0**-149, -149), (2.0**127, 127)],
    "log10": [(1, 0.0), (10, 1), (1000, 3)],
    "log1p": [(-1, -INF), (-2, NAN)],
    "acos": [(1, 0.0)],
    "acosh": [(1, 0.0), (0.5, NAN)],
    "atanh": [(1, INF), (-1, -INF), (1.5, NAN)],
    "cos": [(1e-30, 1)],
    "erfinv": [(1, INF), (-1, -INF), (1.5, NAN)],
    "special_ndtri": [(1, INF), (0.5, 0.0), (1.5, NAN), (-0.5, NAN)],
    "lgamma": [(1, 0.0), (2, 0.0), (-1, INF), (-7, INF)],
    "digamma": [(-1, NAN), (-7, NAN)],
    "tanh": [(30, 1), (-30, -1)],
    "erf": [(7, 1), (-7, -1)],
    "erfc": [(-7, 2), (30, 0.0)],
    "special_ndtr": [(10, 1), (-40, 0.0), (-1e30, 0.0)],
}
POWERS = [
    (NAN, 0.0, 1), (NAN, -0.0, 1), (1, NAN, 1), (1, INF, 1), (-1, INF, 1), (-1, -INF, 1), (-1, NAN, NAN),
    (2, NAN, NAN), (NAN, 2, NAN), (0.0, 3, 0.0), (-0.0, 3, -0.0), (-0.0, 2, 0.0), (0.0, 0.5, 0.0), (-0.0, 0.5, 0.0),
    (0.0, -1, INF), (-0.0, -1, -INF), (-0.0, -2, INF), (-0.0, -0.5, INF), (0.5, INF, 0.0), (2, INF, INF),
    (-2, INF, INF), (0.5, -INF, INF), (2, -INF, 0.0), (-0.5, INF, 0.0), (INF, 2, INF), (INF, -2, 0.0),
    (INF, 0.5, INF), (-INF, 3, -INF), (-INF, 2, INF), (-INF, 0.5, INF), (-INF, -3, -0.0), (-INF, -2, 0.0),
    (-INF, -0.5, 0.0), (-8, 1 / 3, NAN), (-2, 3, -8), (-2, 2, 4), (-2, -1, -0.5), (3, 4, 81), (10, 5, 100000),
    (0.0, 0.0, 1), (INF, 0.0, 1), (0.0, INF, 0.0), (0.0, -INF, INF), (-1.5, 2.0**60, INF), (-1.5, -(2.0**60), 0.0),
    (4, 0.5, 2), (2, -149, 2.0**-149), (-1, 2.0**24 - 1, -1), (-1, 2.0**54, 1),
]  # fmt: skip
QUARTER, HALF, THREE_QUARTERS, WHOLE = math.pi / 4, math.pi / 2, 3 * math.pi / 4, math.pi
PAIRS: dict[str, list[tuple[float, float, float]]] = {
    "pow": POWERS,
    "atan2": [
        (0.0, 0.0, 0.0), (-0.0, 0.0, -0.0), (0.0, -0.0, WHOLE), (-0.0, -0.0, -WHOLE), (0.0, -1, WHOLE), (0.0, 1, 0.0),
        (-0.0, -1, -WHOLE), (1, 0.0, HALF), (1, -0.0, HALF), (-1, 0.0, -HALF), (INF, INF, QUARTER), (INF, 1, HALF),
        (INF, -INF, THREE_QUARTERS), (-INF, -INF, -THREE_QUARTERS), (1, INF, 0.0), (-1, INF, -0.0), (1, -INF, WHOLE),
        (1, 1, QUARTER), (-1, -1, -THREE_QUARTERS), (NAN, 1, NAN), (1, NAN, NAN), (INF, NAN, NAN),
    ],
    "hypot": [
        (3, 4, 5), (0.0, -0.0, 0.0), (INF, NAN, INF), (NAN, -INF, INF), (NAN, 1, NAN), (-2, 0.0, 2),
        (2.0**-149, 0.0, 2.0**-149), (2.0**126, 0.0, 2.0**126),
    ],
    "fmod": [
        (5.5, 2, 1.5), (-5.5, 2, -1.5), (5.5, -2, 1.5), (-4, 2, -0.0), (0.0, 2, 0.0), (-0.0, 2, -0.0), (1, INF, 1),
        (-1, INF, -1), (INF, 2, NAN), (1, 0.0, NAN), (NAN, 1, NAN), (1, NAN, NAN), (INF, INF, NAN),
        (2.0**100, 3, 2.0**100 % 3), (-(2.0**101), 3, -(2.0**101 % 3)),
    ],
    "remainder": [
        (5.5, 2, 1.5), (-5.5, 2, 0.5), (5.5, -2, -0.5), (-5.5, -2, -1.5), (-4, 2, -0.0), (1, INF, 1), (-1, INF, INF),
        (INF, 2, NAN), (1, 0.0, NAN), (NAN, 1, NAN), (1, NAN, NAN), (2.0**100, -3, 2.0**100 % 3 - 3),
    ],
}  # fmt: skip


def same(result: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    equal = (result == wanted) & (result.signbit() == wanted.signbit())
    return equal | (result.isnan() & wanted.isnan())


def assert_rows(name: str, dtype: torch.dtype, rows: list[tuple[float, ...]]) -> None:
    *inputs, exact = torch.tensor(rows, dtype=torch.float64).unbind(1)
    result = runner(name, dtype, 8)(*(x.to(dtype) for x in inputs))
    # Multiples of pi and the like are no floats: there the stated error is allowed.
    close = (exact * 8 != (exact * 8).round()) & (errors(result, exact) <= MATH[name, dtype].ulps)
    wrong = ~(same(result, exact.to(dtype)) | close)
    assert not wrong.any(), [(row, value.item()) for row, value, bad in zip(rows, result, wrong, strict=True) if bad]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_edges(name, dtype):
    if FUNCTIONS[name].arity == 2:
        rows: list[tuple[float, ...]] = list(PAIRS[name])
    else:
        rows = [*zip((0.0, -0.0, INF, -INF), AT_THE_ENDS[name], strict=True), (NAN, NAN), *EXACTLY.get(name, [])]
    assert_rows(name, dtype, rows)


@pytest.mark.parametrize("name", ["cos", "sin", "tanh", "erf", "sigmoid", "special_ndtr"])
def test_values_stay_in_their_range(name):
    """What is at most one in theory is at most one here, so that no root or logarithm of the rest fails."""
    for dtype in TYPES:
        (x,) = points(name, dtype, each=100, step=1, dense=100_000)
        result = runner(name, dtype, 8)(x)
        assert (result.abs() <= 1).logical_or(result.isnan()).all()


def test_the_normal_distribution_has_a_small_absolute_error():
    """What gelu and its gradient are made of: their errors are no larger than those of one erf."""
    (x,), exact = singles("special_ndtr", each=20, dense=500_000)
    result = runner("special_ndtr", torch.float32, 8)(x).double()
    assert (result - exact).abs().nan_to_num(0).max() <= 1.2e-7
    assert (result.isnan() == x.isnan()).all()


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "erf", "erfc", "expm1", "log1p", "asinh"])
def test_small_arguments_keep_all_their_digits(name):
    """Around zero functions are lines, whatever the number of digits there is left."""
    for dtype in TYPES:
        tiny = every_exponent(dtype, each=4)
        tiny = tiny[tiny.abs() < torch.finfo(dtype).eps ** 2]
        result = runner(name, dtype, 8)(tiny)
        slope, offset = {"exp": (0, 1), "sigmoid": (0, 0.5), "erfc": (0, 1), "erf": (2 / math.sqrt(math.pi), 0)}.get(
            name, (1, 0)
        )
        wanted = tiny.double() * slope + offset
        assert errors(result, wanted).max() <= 1.0


# --- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_names_are_those_of_the_operators_and_each_has_an_exact_value():
    assert set(NAMES) <= set(OPERATORS)
    assert set(NAMES) == set(EXACT)
    assert {name for name in NAMES if FUNCTIONS[name].arity == 1} == set(AT_THE_ENDS)
    assert {name for name in NAMES if FUNCTIONS[name].arity == 2} == set(PAIRS)
    assert all(FUNCTIONS[name].arity == OPERATORS[name].arity for name in NAMES)
    assert set(MATH) == {(name, dtype) for name in NAMES for dtype in TYPES}


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_plain(name):
    """No fast-math flag; no branch but the one for rare arguments; everything called is declared or defined."""
    for dtype in TYPES:
        text = function_text(name, dtype, 4)
        first, *helpers = text.split("\ndefine ")
        assert first.startswith("define internal")
        assert f"{function_name(name, dtype, 4)}(" in first.splitlines()[0]
        assert not re.search(r"\b(fast|nnan|ninf|nsz|arcp|contract|afn|reassoc)\b", text)
        assert first.count("br i1") == len(helpers) <= 1
        called = set(re.findall(r"call [^@]*(@[\w.]+)\(", text))
        known = set(re.findall(r"(@[\w.]+)\(", "\n".join(declarations([(name, dtype, 4)]))))
        assert called <= known | set(re.findall(r"define [^@]*(@[\w.]+)\(", text))


@pytest.mark.quick
def test_the_common_functions_are_short():
    """Instructions of one vector of singles. More would be felt in every model."""
    limits = {
        "exp": 18,
        "sigmoid": 19,
        "tanh": 28,
        "log": 32,
        "erf": 30,
        "erfc": 52,
        "special_ndtr": 30,
        "sin": 36,
        "rsqrt": 2,
    }
    texts = {name: function_text(name, torch.float32, 4).split("\ndefine ")[0] for name in limits}
    counts = {name: len(re.findall(" = (?!bitcast)", text)) for name, text in texts.items()}
    assert {name: count for name, count in counts.items() if count > limits[name]} == {}


@pytest.mark.parametrize("target", PROCESSORS.values(), ids=PROCESSORS)
def test_other_machines_can_be_compiled_for(target: Processor):
    uses = [(name, dtype, 8) for name in ("exp", "tanh", "erfc", "sin", "fmod") for dtype in TYPES]
    parts = [*sorted(declarations(uses)), *(function_text(*use) for use in uses)]
    for name, dtype, lanes in uses:
        element = {torch.float32: "float", torch.float64: "double"}[dtype]
        full, arity = f"<{lanes} x {element}>", FUNCTIONS[name].arity
        given = ", ".join(f"{full} %x{i}" for i in range(arity))
        parts.append(f"define {full} @{name}_{element}({given}) {{")
        parts.append(f"  %r = call {full} {function_name(name, dtype, lanes)}({given})\n  ret {full} %r\n}}")
    text = assembly("\n".join(parts), target)
    assert all(f"{name}_{element}:" in text for name in ("exp", "fmod") for element in ("float", "double"))


@pytest.mark.quick
def test_the_page_says_what_the_table_says():
    page = (ROOT / "docs" / "math.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| `")
    ]
    found = {row[0].strip("`"): (float(row[1]), float(row[3]), row[5]) for row in rows}
    wanted = {name: (function.f32, function.f64, function.method) for name, function in FUNCTIONS.items()}
    assert found == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EXP", "LOG", "SINH", "COS"])
def test_the_coefficients_come_from_the_tool(name):
    done = subprocess.run(
        [sys.executable, "-c", f"from fit_math import block, ELEMENTARY; print(block({name!r}, ELEMENTARY[{name!r}]))"],
        cwd=ROOT / "tools",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() in (ROOT / "ferrite" / "codegen" / "coefficients" / "elementary.py").read_text()
