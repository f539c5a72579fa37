"""Every scalar operator and conversion as machine code: the bits that torch gives, for numbers of every sort."""

from __future__ import annotations

import itertools
import platform

import pytest
import torch

from ferrite.codegen.llvm.emit import unsupported
from ferrite.codegen.llvm.math.calls import LIBM
from ferrite.codegen.llvm.math.table import MATH
from ferrite.codegen.llvm.operators import TAKES
from ferrite.codegen.llvm.types import REGISTER
from ferrite.errors import Refusal
from ferrite.ir.expr import Load, cast, const, load, op
from ferrite.ir.expr_laws import wrong_type
from ferrite.ir.index.algebra import axis
from ferrite.ir.kernel.interpret import run_kernel
from ferrite.ir.kernel.nodes import Kernel, Loop, Pointer, Store
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.ir.scalar import OPERATORS
from ferrite.ir.types import is_integer, short
from tests.llvm_kernels import assert_bits, assert_same, both, native

FLOATS = (torch.float32, torch.float64)
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
TYPES = (*FLOATS, *WHOLE, torch.bool)
INFINITE = float("inf")
MATHEMATICAL = {name for name, _ in MATH} | set(LIBM)
DIVIDING = ("floor_divide", "trunc_divide", "remainder", "fmod")


def samples(dtype):
    """Numbers of every sort, a few at random."""
    generator = torch.Generator().manual_seed(0)
    if dtype is torch.bool:
        return torch.tensor([True, False, True, True, False, False, True])
    if is_integer(dtype):
        info = torch.iinfo(dtype)
        special = [0, 1, 2, 3, 5, 7, info.max, info.max - 1, *([-1, -2, -7, info.min] if info.min else [])]
        chosen = torch.randint(info.min, min(info.max, 1 << 40), [4], generator=generator).tolist()
        return torch.tensor(special + chosen, dtype=dtype)
    special = [0.0, -0.0, 1.0, -1.0, -2.5, 1.5, -7.75, INFINITE, -INFINITE, float("nan")]
    tiny = torch.finfo(dtype).tiny
    extreme = [tiny, -tiny, tiny / 4, torch.finfo(dtype).max, 123456.7, 3e9, -3e9, 1e19, -300.2]
    chosen = (torch.randn(3, generator=generator) * 3).tolist()
    return torch.tensor(special + extreme + chosen, dtype=dtype)


def paired(values, arity):
    """All combinations of values."""
    if arity == 1:
        return [values]
    if arity == 2:
        return [part.flatten() for part in torch.meshgrid(values, values, indexing="ij")]
    return [part.flatten() for part in torch.meshgrid(values[:9], values[2:9], values[:5], indexing="ij")]


def pointwise(roots, inputs, lanes, copies, extent):
    """A kernel that stores one expression over the inputs after the other."""
    i = axis("i", extent)
    outputs = [Pointer(f"out{place}", root.dtype, "write") for place, root in enumerate(roots)]
    stores = tuple(Store(pointer.name, (i,), root) for pointer, root in zip(outputs, roots, strict=True))
    return Kernel((*inputs, *outputs), (), (Loop(i, "vector", stores, lanes, copies),))


def run_all(roots, operands, lanes, copies):
    count = operands[0].numel()
    inputs = [Pointer(f"x{place}", tensor.dtype) for place, tensor in enumerate(operands)]
    kernel = pointwise([root(axis("i", count)) for root in roots], inputs, lanes, copies, count)
    outputs = [torch.zeros(count, dtype=pointer.dtype) for pointer in kernel.pointers[len(inputs) :]]
    return str(kernel), [*operands, *outputs]


def operators(dtype, arity):
    """The operators on a type that are exact: torch's bits are the only right ones."""
    for name, row in OPERATORS.items():
        if row.arity != arity or name in ("ldexp", "polygamma", "complex", "bitcast", "where", "abs_complex"):
            continue
        types = [torch.int32] if name == "frexp_exponent" else [torch.bool] if row.gives == "bool" else [dtype]
        node = op(name, *[load("x", (axis("i", 4),), dtype)] * arity, dtype=types[0])
        if wrong_type(node) is None and unsupported(node) is None:
            yield name, types[0]


WIDTHS = ((1, 1), (4, 2))


def exact_operators(dtype, arity):
    return [pair for pair in operators(dtype, arity) if pair[0] not in MATHEMATICAL or is_integer(dtype)]


ARITIES = [pair for pair in itertools.product(TYPES, (1, 2, 3)) if exact_operators(*pair)]


@pytest.mark.parametrize(("lanes", "copies"), WIDTHS)
@pytest.mark.parametrize(("dtype", "arity"), ARITIES, ids=lambda value: str(value).removeprefix("torch."))
def test_exact_operators_have_the_bits_of_torch(dtype, arity, lanes, copies):
    exact = exact_operators(dtype, arity)
    operands = paired(samples(dtype), arity)
    if is_integer(dtype):
        operands = without_zero_division(operands)

    def root(name, result):
        return lambda i: op(name, *(load(f"x{place}", (i,), dtype) for place in range(arity)), dtype=result)

    roots = [root(*pair) for pair in exact]
    source, memory = run_all(roots, operands, lanes, copies)
    expected = oracle(run_all(roots, operands, 1, 1)[0], *memory)
    made = machine(source, memory)
    for (name, _), one, other in zip(exact, expected[arity:], made[arity:], strict=True):
        if name in ("maximum", "minimum"):  # of two zeros torch's vector code takes another than its scalar code
            one, other = (torch.where(item == 0, torch.zeros_like(item), item) for item in (one, other))
        assert_bits(one, other, name)


KNOWN = {}


def oracle(source, *memory):
    """What a kernel leaves in memory, one element after the other; the width makes no difference to it."""
    if source not in KNOWN:
        KNOWN[source] = [tensor.clone() for tensor in memory]
        run_kernel(parse_kernel(source), KNOWN[source])
    return KNOWN[source]


def machine(source, memory):
    assert native(source)(memory)[0] == 0
    return memory


def without_zero_division(operands):
    if len(operands) != 2 or operands[0].dtype is torch.bool:
        return operands
    kept = operands[1] != 0
    if platform.machine() == "x86_64" and operands[0].dtype in (torch.int32, torch.int64):
        # least / -1 does not fit, and there torch's own divisions, in lcm too, end the process
        least = torch.iinfo(operands[0].dtype).min
        kept &= (operands[0] != least) & (operands[1] != least)
    return [operand[kept] for operand in operands]


@pytest.mark.parametrize("name", DIVIDING)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=short)
def test_a_quotient_that_does_not_fit_wraps(name, dtype):
    least = torch.iinfo(dtype).min
    values = [torch.tensor([least] * 5, dtype=dtype), torch.full((5,), -1, dtype=dtype)]

    def root(i):
        return op(name, load("x0", (i,), dtype), load("x1", (i,), dtype), dtype=dtype)

    source, memory = run_all([root], values, 4, 1)
    expected = least if name.endswith("divide") else 0
    assert machine(source, memory)[-1].tolist() == [expected] * 5


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_mathematical_operators_are_close_to_torch(dtype):
    """How close is the business of the tests of the functions; here they are called at all, in every width."""
    values = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9, 0.3, 0.6], dtype=dtype)
    names = [name for arity in (1, 2) for name, _ in operators(dtype, arity) if name in MATHEMATICAL]
    assert {"exp", "log", "tanh", "sigmoid", "erf", "pow", "atan2"} <= set(names)

    def root(name):
        arity = OPERATORS[name].arity
        return lambda i: op(name, *[load("x0", (i,), dtype)] * arity)

    source, memory = run_all([root(name) for name in names], [values], 4, 1)
    expected, made = both(source, memory)
    for name, one, other in zip(names, expected[1:], made[1:], strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7, equal_nan=True), name


@pytest.mark.parametrize(("lanes", "copies"), WIDTHS)
@pytest.mark.parametrize("source", [*TYPES, torch.float16, torch.bfloat16], ids=short)
def test_conversions_have_the_bits_of_torch(source, lanes, copies):
    targets = [dtype for dtype in REGISTER if dtype != source]
    values = samples(source)
    if source.is_floating_point:
        # what does not fit 16 bits without a sign torch's vector code makes something else of than its scalar code
        small = values[(values >= 0) & (values < 65536)]
        targets.remove(torch.uint16)
        assert_same(*run_all([lambda i: cast(load("x0", (i,), source), torch.uint16)], [small], lanes, copies))

    def root(target):
        return lambda i: cast(load("x0", (i,), source), target)

    assert_same(*run_all([root(target) for target in targets], [values], lanes, copies))


def test_a_16_bit_float_is_rounded_as_torch_rounds_it():
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(-(1 << 31), 1 << 31, [300], generator=generator).to(torch.int32)
    halves = torch.tensor([1.0, 1.00390625, 1.01171875, 65504.0, 65519.9, 65520.0, 6e-8, 3e-8, 2.9e-8, 6.1e-5])
    values = torch.cat([patterns.view(torch.float32), halves, -halves])
    roots = [
        lambda i, dtype=dtype: cast(load("x0", (i,), torch.float32), dtype) for dtype in (torch.float16, torch.bfloat16)
    ]
    assert_same(*run_all(roots, [values], 4, 1))
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        widened = [lambda i, dtype=dtype: cast(load("x0", (i,), dtype), torch.float32)]
        source, memory = run_all(widened, [every.view(dtype)], 4, 1)
        assert_bits(every.view(dtype).float(), machine(source, memory)[1])


@pytest.mark.parametrize("name", DIVIDING)
@pytest.mark.parametrize("dtype", WHOLE, ids=short)
def test_dividing_an_integer_by_zero_stops(name, dtype):
    values, zeros = torch.arange(1, 10).to(dtype), torch.arange(8, -1, -1).to(dtype)
    for lanes in (1, 4):
        source, memory = run_all(
            [lambda i: op(name, load("x0", (i,), dtype), load("x1", (i,), dtype))], [values, zeros], lanes, 1
        )
        assert native(source)(memory)[0] == -1
        memory[1] = zeros + 1
        assert native(source)(memory)[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64], ids=short)
def test_choosing_and_reading_bits(dtype):
    values = samples(torch.float32).to(dtype)
    size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.float64}[dtype.itemsize]
    chosen = torch.arange(values.numel()) % 3 == 0

    def where(i):
        return op("where", load("x1", (i,), torch.bool), load("x0", (i,), dtype), const(1, dtype), dtype=dtype)

    def bitcast(i):
        return op("bitcast", load("x0", (i,), dtype), dtype=size)

    roots = [where] if dtype is torch.bool else [where, bitcast]
    assert_same(*run_all(roots, [values, chosen], 4, 1))


def test_what_has_no_native_form_is_named():
    complex_, x = load("x", (axis("i", 4),), torch.complex64), load("x", (axis("i", 4),), torch.float32)
    assert unsupported(op("add", complex_, complex_)) == Refusal("c64 has no native form")
    assert unsupported(op("special_airy_ai", x)) == Refusal("special_airy_ai on f32 has no native form")
    assert unsupported(op("add", op("exp", x), x)) is None
    assert set(TAKES) <= set(OPERATORS)
    assert isinstance(x, Load)
