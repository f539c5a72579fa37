"""Scalar operators, conversions, states and random numbers in Triton: the same bits as the oracle's."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from ferrite.codegen.triton import kernel_source, unsupported
from ferrite.codegen.triton.emit import written
from ferrite.codegen.triton.float8 import FORMATS
from ferrite.codegen.triton.launch import OPTIONS
from ferrite.codegen.triton.operators import LIBRARY, QUICK, RENAMED
from ferrite.ir.expr import Random, cast, const, load, masked, op
from ferrite.ir.expr_laws import wrong_type
from ferrite.ir.index.algebra import axis, number
from ferrite.ir.index.substitution import evaluate
from ferrite.ir.kernel.nodes import Kernel, Loop, Pointer, Store
from ferrite.ir.random import random_numbers
from ferrite.ir.scalar import OPERATORS
from ferrite.ir.states import STATES
from ferrite.ir.types import short
from tests.loop_kernels import KERNELS
from tests.triton_kernels import DEVICES, PLACE, assert_same_bits, elementwise, kernel_of, run_both, run_triton

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
NAN, INF = float("nan"), float("inf")
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.0, -3.7, 0.1, 7.3, 1e-3, -1e-5, INF, -INF, NAN, 1e30]
INTEGERS = [0, 1, -1, 2, -2, 3, 5, -7, 8, 31, -64, 100, -128, 127]
TYPES = [torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]
DIVISIONS = ("floor_divide", "trunc_divide", "remainder", "fmod")
ROUNDED = ("sigmoid", "rsqrt", "sqrt", "fma", "special_ndtr", "special_log_ndtr")  # in several steps, by us or by eager
ROUNDED += ("digamma", "special_i0e", "special_i1e")
ODD = ("special_i1", "special_modified_bessel_i1")
GROWING = ("i0", "special_modified_bessel_i0", *ODD)
WAVES = ("special_bessel_j0", "special_bessel_j1", "special_bessel_y0", "special_bessel_y1")
ELSEWHERE = {"igamma", "igammac", "special_zeta", "special_airy_ai", "special_spherical_bessel_j0"}
ELSEWHERE |= {name for name in OPERATORS if "polynomial" in name or "_bessel_k" in name}  # in test_triton_special
OTHER_RESULTS = {"frexp_exponent": torch.int32}
# Equal zeros of different signs: either may be the greater.
ANY_ZERO = ("maximum", "minimum", "fmax", "fmin")


def numbers(dtype):
    values = FLOATS if dtype.is_floating_point else INTEGERS
    return torch.tensor(values, dtype=torch.float64 if dtype.is_floating_point else torch.int64).to(dtype)


def pairs(dtype):
    left, right = torch.meshgrid(numbers(dtype), numbers(dtype), indexing="ij")
    return left.reshape(-1).clone(), right.reshape(-1).clone()


def operators(dtype):
    """Every operator that takes a type and has Triton source, as an expression of a, b and c."""
    operands = [load(name, [PLACE], dtype) for name in "abc"]
    for name, row in OPERATORS.items():
        operands[0] = load("condition", [PLACE], torch.bool) if name == "where" else load("a", [PLACE], dtype)
        gives = {"bool": torch.bool, "free": OTHER_RESULTS.get(name, dtype)}.get(row.gives, dtype)
        expr = op(name, *operands[: row.arity], dtype=gives)
        if wrong_type(expr):
            continue
        if unsupported(elementwise({"a": dtype, "b": dtype, "c": dtype, "condition": torch.bool}, [expr])) is None:
            yield name, expr


def meaning(expr, given, device):
    """What an operator means, for all elements at once. In the interpreter torch itself computes the functions of
    CUDA's library."""
    values = dict(zip(("a", "b", "c", "condition"), given, strict=True))
    result = OPERATORS[expr.name].meaning(*(values[operand.buffer] for operand in expr.operands))
    if device != "cpu":  # where torch computes with infinities, there is a limit
        if expr.name in GROWING:
            result = torch.where(values["a"].isinf(), values["a"] if expr.name in ODD else INF, result)
        if expr.name in WAVES:
            result = torch.where(values["a"].isinf() & ((values["a"] > 0) | ("_j" in expr.name)), 0.0, result)
    return result


def operands_of(dtype):
    left, right = pairs(dtype)
    return [left, right, left.flip(0), torch.arange(len(left)) % 3 == 0]


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES, ids=short)
def test_operators(dtype, device):
    found = [(name, expr) for name, expr in operators(dtype) if name not in ELSEWHERE]
    found = [(name, expr) for name, expr in found if dtype.is_floating_point or name not in DIVISIONS]
    inputs = {"a": dtype, "b": dtype, "c": dtype, "condition": torch.bool}
    kernel = elementwise(inputs, [expr for _, expr in found])
    given = operands_of(dtype)
    memory = [*given, *(torch.zeros(len(given[0]), dtype=expr.dtype) for _, expr in found)]
    made = run_triton(kernel, memory, [len(given[0])], device)
    wrong = []
    for (name, expr), left in zip(found, made[4:], strict=True):
        right = meaning(expr, given, device)
        try:
            if name in (*LIBRARY.split(), *RENAMED, *ROUNDED, "pow") and dtype.is_floating_point:
                tolerance = 2e-6 if dtype is torch.float32 else 1e-14
                least = 1e-7 if name in WAVES else 0  # a wave has zeros, and eager rounds places far out
                torch.testing.assert_close(left, right, rtol=tolerance, atol=least, equal_nan=True)
            else:
                zero = (left == 0) & (right == 0) & (name in ANY_ZERO)
                assert_same_bits(left[~zero], right[~zero], name)
        except AssertionError as problem:
            wrong.append(f"{name}: {problem}")
    assert not wrong, "\n".join(wrong)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8], ids=short)
def test_divisions_of_integers(dtype, device):
    left, right = pairs(dtype)
    left, right = left[right != 0], right[right != 0]
    values = [op(name, load("a", [PLACE], dtype), load("b", [PLACE], dtype)) for name in DIVISIONS]
    memory = [left, right, *(torch.zeros_like(left) for _ in values)]
    expected, made = run_both(elementwise({"a": dtype, "b": dtype}, values), memory, [len(left)], device)
    for name, one, other in zip(DIVISIONS, made[2:], expected[2:], strict=True):
        assert_same_bits(one, other, name)


@pytest.mark.quick
def test_the_operators_that_have_source():
    common = {"add", "mul", "sub", "maximum", "minimum", "neg", "abs", "sign", "eq", "lt", "where", "fmod", "remainder"}
    for dtype in (torch.float32, torch.int64):
        assert common <= {name for name, _ in operators(dtype)}
    floats = {name for name, _ in operators(torch.float64)}
    assert {"exp", "tanh", "erf", "pow", "sqrt", "sigmoid", "round", "fma", "signbit"} <= floats
    assert {"digamma", "special_i0e", "frexp_mantissa", "frexp_exponent", "angle"} <= floats
    assert {"pow", "gcd", "lcm"} <= {name for name, _ in operators(torch.int32)}
    assert "special_zeta" in floats
    assert {"igamma", *WAVES}.isdisjoint(floats), "not exact enough for 64 bits"


# --- conversions and constants ----------------------------------------------------------------------------------------

STORED = [*TYPES, torch.float16, torch.bfloat16]


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("old", STORED, ids=short)
def test_conversions(old, device):
    values = numbers(old) if old is not torch.float32 else torch.cat([numbers(old), torch.randn(40)])
    if old.is_floating_point:  # what an integer cannot hold is converted as the machine likes
        whole = [dtype for dtype in STORED if not dtype.is_floating_point and dtype is not torch.bool]
        values = torch.cat([values, torch.tensor([1.00390625, 1.01171875, 65519.0, 65520.0, 3e-39]).to(old)])
    results = [cast(load("a", [PLACE], old), new) for new in STORED if new is not old]
    kernel = elementwise({"a": old}, results)
    memory = [values, *(torch.zeros(len(values), dtype=result.dtype) for result in results)]
    expected, made = run_both(kernel, memory, [len(values)], device)
    for result, one, other in zip(results, made[1:], expected[1:], strict=True):
        if old.is_floating_point and result.dtype in whole:
            fits = values.double().abs() < 128
            fits = fits & (values >= 0) if not result.dtype.is_signed else fits
            one, other = one[fits], other[fits]
        assert_same_bits(one, other, str(result.dtype))


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_every_number_of_sixteen_bits_is_widened_and_rounded(device):
    bits = torch.arange(-(1 << 15), 1 << 15, 37, dtype=torch.int32).to(torch.int16)
    wide = torch.randn(2000) * torch.logspace(-44, 38, 2000)
    wide = torch.cat([wide, torch.tensor([1.00390625, 1.01171875, 3.4e38, NAN, INF, -0.0])])
    kernel = elementwise({"a": torch.bfloat16}, [cast(load("a", [PLACE], torch.bfloat16), torch.float32)])
    made = run_triton(kernel, [bits.view(torch.bfloat16), torch.zeros(len(bits))], [len(bits)], device)
    assert_same_bits(made[1], bits.view(torch.bfloat16).float())
    halves = [cast(load("a", [PLACE], torch.float32), dtype) for dtype in (torch.bfloat16, torch.float16)]
    memory = [wide, *(torch.zeros(len(wide), dtype=half.dtype) for half in halves)]
    made = run_triton(elementwise({"a": torch.float32}, halves), memory, [len(wide)], device)
    assert_same_bits(made[1], wide.bfloat16())
    assert_same_bits(made[2], wide.half())


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FORMATS, ids=short)
def test_every_number_of_eight_bits_is_widened_and_rounded(dtype, device):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    wide = codes.float()
    kernel = elementwise(
        {"a": dtype}, [cast(load("a", [PLACE], dtype), new) for new in (torch.float32, torch.bfloat16)]
    )
    made = run_triton(kernel, [codes, torch.zeros(256), torch.zeros(256, dtype=torch.bfloat16)], [256], device)
    assert_same_bits(made[1], wide)
    assert_same_bits(made[2], codes.bfloat16())
    halves = torch.arange(-(1 << 15), 1 << 15, 3, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    ordered = wide[~wide.isnan()].sort().values
    middle = (ordered[1:] + ordered[:-1]) / 2
    near = [torch.nextafter(middle, torch.full_like(middle, side)) for side in (INF, -INF)]
    given = torch.cat([halves, ordered, middle, *near, torch.randn(500) * 100, torch.tensor([NAN, -NAN, INF, -INF])])
    for old in (torch.float32, torch.float16, torch.float64):
        values = given.to(old)
        kernel = elementwise({"a": old}, [cast(load("a", [PLACE], old), dtype)])
        made = run_triton(kernel, [values, torch.zeros(len(values), dtype=dtype)], [len(values)], device)
        found, expected = made[1].view(torch.uint8), values.to(dtype).view(torch.uint8)
        nan = made[1].float().isnan() & values.to(dtype).float().isnan()
        assert torch.equal(found[~nan], expected[~nan])


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_constants_keep_their_bits(device):
    values = []
    for dtype in STORED:
        for value in (0.0, -0.0, NAN, INF, 0.1, 1e-40) if dtype.is_floating_point else (0, 1, -1, 77):
            place = load("a", [PLACE], torch.bool)
            values.append(op("where", place, const(value, dtype), const(1, dtype), dtype=dtype))
    a = torch.tensor([True, False])
    memory = [a, *(torch.full((2,), 1, dtype=value.dtype) for value in values)]
    expected, made = run_both(elementwise({"a": torch.bool}, values), memory, [2], device)
    for one, other, value in zip(made, expected, [None, *values], strict=True):
        assert_same_bits(one, other, str(value))


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_a_masked_load_touches_nothing_where_it_does_not_count(device):
    # All lanes but the second would load far outside.
    a = load("a", [PLACE * (1 << 40) - (1 << 40)], torch.float32)
    chosen = op("eq", load("b", [PLACE], torch.int64), const(1, torch.int64), dtype=torch.bool)
    value = masked(chosen, op("add", a, a), const(-1.0, torch.float32))
    kernel = elementwise({"a": torch.float32, "b": torch.int64}, [value])
    memory = [torch.randn(4), torch.arange(4), torch.zeros(4)]
    expected, made = run_both(kernel, memory, [4], device)
    assert torch.equal(made[2], expected[2])


# --- random numbers ---------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_are_the_same_bits(device):
    seed = load("seed", [number(0)], torch.int64)
    near, far = (PLACE, number(5)), (PLACE * 3 + (1 << 35), PLACE + (1 << 40))
    kinds = [("uniform", dtype) for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)]
    kinds += [("bits", torch.int64), ("bits", torch.int32)]
    kinds += [("curand_uniform", dtype) for dtype in (torch.float32, torch.bfloat16)]
    values = [Random.intern(kind, seed, *near, dtype) for kind, dtype in kinds]
    values += [Random.intern(kind, seed, *far, torch.float32) for kind in ("uniform", "curand_uniform")]
    kernel = elementwise({"seed": torch.int64}, values)
    for key in (-7, 0x123456789ABCDEF0):
        memory = [torch.tensor([key]), *(torch.zeros(9, dtype=value.dtype) for value in values)]
        made = run_triton(kernel, memory, [9], device)
        for one, value in zip(made[1:], values, strict=True):
            places = (evaluate(each, {PLACE: torch.arange(9)}) for each in (value.counter, value.stream))
            counter, stream = map(torch.as_tensor, places)
            assert torch.equal(one, random_numbers(value.kind, memory[0], counter, stream, value.dtype))


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("counter", "stream", "shared"), [
    (lambda i: i + 4, lambda i: number(5), True),
    (lambda i: i + 2, lambda i: number(5), False),
    (lambda i: i % 8, lambda i: i // 8 % 3, True),
    (lambda i: i // 24 * 4 + i % 4, lambda i: i // 4 % 6, True),
    (lambda i: i % 8, lambda i: i // 2, False),
    (lambda i: i % 6, lambda i: i // 8, False),
])  # fmt: skip
def test_four_lanes_share_what_four_words_come_from(counter, stream, shared, device):
    place = axis("i", 40)
    at = counter(place), stream(place)
    value = Random.intern("curand_uniform", load("seed", [number(0)], torch.int64), *at, torch.float32)
    pointers = (Pointer("seed", torch.int64, "read"), Pointer("out", torch.float32, "write"))
    loop = Loop(place, "vector", (Store("out", (place,), value),), lanes=16)
    kernel = Kernel(pointers, (), (loop,), warps=1)
    assert ("random_four" in kernel_source(kernel, "kernel")) is shared
    _, made = run_triton(kernel, [torch.tensor([-7]), torch.zeros(40)], [], device)
    numbers, streams = (torch.as_tensor(evaluate(each, {place: torch.arange(40)})) for each in at)
    assert torch.equal(made, random_numbers("curand_uniform", torch.tensor([-7]), numbers, streams, torch.float32))


# --- states -----------------------------------------------------------------------------------------------------------

NUMBERS = (torch.float32, torch.int32, torch.int64)
STATE_TYPES = {
    "any": (torch.bool,),
    "all": (torch.bool,),
    "xor": (torch.int32, torch.bool),
    "welford": (torch.float32, torch.float64),
    "softmax": (torch.float32,),
    **dict.fromkeys(("amax", "amin", "argmax", "argmin"), (*NUMBERS, torch.bool)),
}


def reduction(kind, dtype, extent):
    """Rows reduced by a state: `extent` bounds the rows' length."""
    row = STATES[kind]
    types = [dtype, torch.int64] if kind.startswith("arg") else [dtype] * row.gives
    names = [f"r{place}" for place in range(row.gives)]
    pointers = [f"o{place}" for place in range(row.gives)]
    bound = names[0] if len(names) == 1 else f"({', '.join(names)})"
    lines = [
        f"def kernel(x, {', '.join(pointers)}, m, n):",
        "    m = symbol(0, None)",
        f"    n = symbol(0, {extent})",
        f"    x = pointer({short(dtype)}, 'read')",
        *(f"    {name} = pointer({short(one)}, 'write')" for name, one in zip(pointers, types, strict=True)),
        "    for i in vector(m, lanes=4):",
        f"        with {kind}({', '.join(map(short, types))}) as {bound}:",
        "            for j in reduction(n, lanes=4):",
        f"                v0: {short(dtype)} = x[i*n + j]",
        *(["                v1: i64 = index(j)"] if row.takes == 2 else []),
        f"                r0.update({'v0, v1' if row.takes == 2 else 'v0'})",
        *(f"        {pointer}[i] = {name}" for pointer, name in zip(pointers, names, strict=True)),
    ]
    return kernel_of("\n".join(lines)), types


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("extent", [64, None], ids=["one block", "looped"])
@pytest.mark.parametrize(("kind", "dtype"), [(kind, one) for kind in STATES for one in STATE_TYPES.get(kind, NUMBERS)])
def test_states(kind, dtype, extent, device):
    kernel, types = reduction(kind, dtype, extent)
    torch.manual_seed(0)
    rows = torch.randint(-3, 4, (3, 7)).to(dtype)
    if dtype.is_floating_point and kind != "welford":
        rows = torch.cat([rows + torch.randn(3, 7), torch.tensor([[1.0, NAN, 2, NAN, -INF, 0, 1]], dtype=dtype)])
    for given in (rows, rows[:, :1], rows[:, :0]):
        memory = [given, *(torch.ones(len(rows), dtype=one) for one in types)]
        expected, made = run_both(kernel, memory, [len(rows), given.shape[1]], device)
        torch.testing.assert_close(made, expected, equal_nan=True, rtol=3e-6, atol=3e-6)


# --- what Triton's compiler says --------------------------------------------------------------------------------------


def compiled(kernel, folder, monkeypatch):
    """The assembly for a GPU, which need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ferrite.codegen.triton.run import loaded

    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    names = {torch.bool: "i1", torch.float16: "fp16", torch.bfloat16: "bf16"}
    made = written(kernel, "kernel")
    function = loaded(made.source, "kernel", False)
    types = [f"*{names.get(one.dtype, short(one.dtype).replace('f', 'fp'))}" for one in made.launch.pointers]
    types += ["i32"] * len(made.launch.sizes) + ["*i64"] * bool(made.launch.checks)
    types += ["constexpr"] * len(made.launch.blocks)
    sizes = {function.arg_names.index(block.name): min(block.most, 16) for block in made.launch.blocks}
    source = ASTSource(
        function, dict(zip(function.arg_names, types, strict=True)), {(place,): size for place, size in sizes.items()}
    )
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options=OPTIONS).asm["ptx"]


@needs_triton
@pytest.mark.parametrize("name", ["row softmax", "scatter-add", "column sums"])
def test_kernels_compile(name, tmp_path, monkeypatch):
    assert ".visible .entry kernel" in compiled(kernel_of(KERNELS[name]), tmp_path, monkeypatch)


OTHERS = [name for name in KERNELS if name not in ("row softmax", "scatter-add", "column sums", "transposing copy")]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_all_kernels_compile(name, tmp_path, monkeypatch):
    assert ".visible .entry kernel" in compiled(kernel_of(KERNELS[name]), tmp_path, monkeypatch)


@needs_triton
@pytest.mark.parametrize(
    "dtype",
    [torch.int64, *(pytest.param(one, marks=pytest.mark.slow) for one in TYPES if one is not torch.int64)],
    ids=short,
)
def test_operators_compile(dtype, tmp_path, monkeypatch):
    inputs = {"a": dtype, "b": dtype, "c": dtype, "condition": torch.bool}
    kernel = elementwise(inputs, [expr for _, expr in operators(dtype)])
    assert ".visible .entry kernel" in compiled(kernel, tmp_path, monkeypatch)


@needs_triton
@pytest.mark.slow
def test_conversions_and_random_numbers_compile(tmp_path, monkeypatch):
    values = [cast(load("a", [PLACE], torch.float32), new) for new in STORED]
    values += [cast(load("b", [PLACE], torch.bfloat16), new) for new in STORED]
    values += [cast(load("c", [PLACE], torch.int64), new) for new in STORED]
    seed = load("c", [number(0)], torch.int64)
    values += [Random.intern("uniform", seed, PLACE, number(5), dtype) for dtype in (torch.float32, torch.float64)]
    values.append(Random.intern("bits", seed, PLACE, number(5), torch.int64))
    kernel = elementwise({"a": torch.float32, "b": torch.bfloat16, "c": torch.int64}, values)
    assert ".visible .entry kernel" in compiled(kernel, tmp_path, monkeypatch)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("kind", list(STATES))
def test_states_compile(kind, tmp_path, monkeypatch):
    for dtype in STATE_TYPES.get(kind, NUMBERS):
        kernel, _ = reduction(kind, dtype, None)
        assert ".visible .entry kernel" in compiled(kernel, tmp_path, monkeypatch)


# --- results of 16 bits -----------------------------------------------------------------------------------------------


def quick_kernel(name, dtype):
    """One operator from 32 bits to 16, as a GPU's own scheduler writes it."""
    value = op(name, *(load(one, [PLACE], torch.float32) for one in "ab"[: OPERATORS[name].arity]))
    kernel = elementwise(dict.fromkeys("ab"[: OPERATORS[name].arity], torch.float32), [cast(value, dtype)])
    return replace(kernel, warps=1, body=(replace(kernel.body[0], lanes=64),))


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("name", QUICK)
def test_what_is_rounded_to_16_bits_is_as_near_as_rounding_lets_it_be(name, dtype, device):
    some = torch.cat([torch.randn(300) * 3, torch.logspace(-6, 4, 200), -torch.logspace(-6, 4, 200)])
    edges = torch.tensor([0.0, -0.0, INF, -INF, NAN, 0.25, 0.2499, 0.5, 0.4999, 88.0, -88.0, 1.0, -1.0])
    left = torch.cat([some, edges])
    left = left.abs() if name == "sqrt" else left
    operands = [left, torch.flip(left, [0])][: OPERATORS[name].arity]
    kernel = quick_kernel(name, dtype)
    made = run_triton(kernel, [*operands, torch.zeros(len(left), dtype=dtype)], [len(left)], device)[-1]
    exact = OPERATORS[name].meaning(*(each.double() for each in operands))
    nearest = exact.to(dtype)
    finite = nearest.isfinite() & (nearest.abs() >= torch.finfo(dtype).tiny)
    if name == "special_ndtr":  # far below zero it is off by 1e-7, which is not little there
        finite = finite & (exact > 0.02)
    assert torch.equal(made.isnan(), nearest.isnan())
    wrong = (made.double() - exact).abs()[finite] / exact.abs()[finite]
    assert wrong.max() <= torch.finfo(dtype).eps * 0.53, "half a unit, and what is lost before"


def test_only_results_of_16_bits_are_computed_quickly():
    assert "quick_tanh" in written(quick_kernel("tanh", torch.bfloat16), "kernel").source
    assert "libdevice.tanh" in written(quick_kernel("tanh", torch.float64), "kernel").source
