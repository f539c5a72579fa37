"""Kernels for grids and blocks: what the scheduler makes of functions, and that it computes what they do."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from ferrite.codegen.triton import kernel_source
from ferrite.ir.index.substitution import evaluate
from ferrite.ir.kernel.nodes import When, walk
from ferrite.ir.program.interpret import interpret
from ferrite.ir.program.loop_operations import Sort
from ferrite.machines import GpuMachine
from ferrite.schedule.gpu.small_tables import with_small_tables_recomputed
from ferrite.schedule.plan import make_plan
from tests.gpu_plans import FEW_PROGRAMS, MACHINE, TINY, assert_as_eager, loops, lowered, run_plan, scheduling
from tests.loop_programs import PROGRAMS, s0

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
torch.manual_seed(0)
ROWS, IMAGES, PLACES = torch.randn(5, 37), torch.randn(2, 3, 6, 6), torch.tensor([3, 0, 5, 2])
LONG = torch.randn(3, 5, 41)


def rms_norm(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


def layer_norm_backward(x, w, g):
    mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    normal = (x - mean) / deviation
    inner = g * w
    dx = (inner - inner.mean(-1, keepdim=True) - normal * (inner * normal).mean(-1, keepdim=True)) / deviation
    return dx, (g * normal).sum(0), g.sum(0)


FUNCTIONS = {
    "chain": (lambda x: F.gelu(x) * x.sigmoid() + x.tanh(), [ROWS]),
    "broadcast": (lambda x, w: x * w + 1, [ROWS, torch.randn(37)]),
    "column broadcast": (lambda x, w: x * w, [ROWS, torch.randn(5, 1)]),
    "three axes": (lambda x, y: x + y, [LONG, torch.randn(3, 1, 41)]),
    "bfloat16": (lambda x, y: (x * y + x).relu(), [ROWS.bfloat16(), torch.randn(37).bfloat16()]),
    "transpose": (lambda x: (x.t() + 1).contiguous(), [ROWS]),
    "transposed operand": (lambda x, y: x + y.t(), [ROWS, torch.randn(37, 5)]),
    "permute": (lambda x: x.permute(2, 0, 1).contiguous() * 2, [LONG]),
    "strided": (lambda x: x[:, ::3] + x[:, 1::3], [torch.randn(4, 36)]),
    "number": (lambda x: x + 1, [torch.randn(())]),
    "nothing": (lambda x: x + 1, [torch.randn(0, 4)]),
    "softmax": (lambda x: x.softmax(-1), [ROWS]),
    "log softmax": (lambda x: x.log_softmax(-1), [ROWS]),
    "softmax of columns": (lambda x: x.softmax(0), [ROWS]),
    "layer norm": (lambda x, w: F.layer_norm(x, (37,), w, w), [ROWS, torch.randn(37)]),
    "layer norm, two axes": (lambda x: F.layer_norm(x, (5, 41)), [LONG]),
    "layer norm backward": (layer_norm_backward, [ROWS, torch.randn(37), torch.randn(5, 37)]),
    "rms norm": (rms_norm, [ROWS, torch.randn(37)]),
    "added rms norm": (lambda x, y, w: (x + y, rms_norm(x + y, w)), [ROWS, torch.randn(5, 37), torch.randn(37)]),
    "row sum": (lambda x: (x * x).sum(1), [ROWS]),
    "columns": (lambda x: (x * x).sum(0), [ROWS]),
    "middle axis": (lambda x: x.sum(1), [LONG]),
    "outer axes": (lambda x: x.sum((0, 1)), [LONG]),
    "first and last axis": (lambda x: x.sum((0, 2)), [LONG]),
    "all of it": (lambda x: (x.sum(), x.amax(), x.prod()), [ROWS]),
    "many": (lambda x: (x.sum(), x.amax(1), x.argmax(0), x.argmin(1), (x > 0).any(1), (x > 9).all()), [ROWS]),
    "argmax of all": (lambda x: x.argmax(), [ROWS]),
    "statistics": (lambda x: torch.var_mean(x, -1), [ROWS]),
    "statistics of columns": (lambda x: torch.var_mean(x, 0), [ROWS]),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), [IMAGES]),
    "embedding": (lambda w, i: F.embedding(i, w) * 2, [torch.randn(6, 8), PLACES]),
    "index_add": (lambda x, i, s: x.index_add(0, i, s), [torch.randn(6, 8), PLACES, torch.randn(4, 8)]),
    "index_add of bfloat16": (
        lambda x, i, s: x.index_add(0, i, s),
        [torch.randn(6, 8).bfloat16(), PLACES, torch.randn(4, 8).bfloat16()],
    ),
    "as many ones in bfloat16 as it cannot count": (
        lambda x, i, s: x.index_add(0, i, s),
        [torch.zeros(3, 8).bfloat16(), torch.zeros(600, dtype=torch.int64), torch.ones(600, 8).bfloat16()],
    ),
    "scatter of float16": (
        lambda x, i, s: x.scatter_add(1, i, s),
        [torch.randn(4, 8).half(), torch.tensor([[1, 0, 7]] * 4), torch.randn(4, 3).half()],
    ),
    "index_put": (lambda x, i, s: x.index_put((i,), s), [torch.randn(6, 8), PLACES, torch.randn(4, 8)]),
    "scatter": (lambda x, i: x.scatter(1, i, 1.0), [torch.randn(4, 8), torch.randint(0, 8, (4, 3))]),
    "cumulative sum": (lambda x: x.cumsum(1), [ROWS]),
    "cumulative sum of columns": (lambda x: x.cumsum(0), [ROWS]),
    "cumulative maximum": (lambda x: x.cummax(1), [ROWS]),
    "max pool": (lambda x: F.max_pool2d(x, 2), [IMAGES]),
    "padded max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), [IMAGES]),
    "pad and max pool": (lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2), [IMAGES.bfloat16()]),
    "pad with ones and max pool": (lambda x: F.max_pool2d(F.pad(x, (2, 1, 1, 2), value=-1.0), 3, 2), [IMAGES]),
    "max pool with places": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), [IMAGES]),
    "max pool of NaN": (lambda x: F.max_pool2d((x - 1).log(), 3, 2, 1), [IMAGES]),
    "average pool": (lambda x: F.avg_pool2d(x, 3, 2, 1), [IMAGES]),
    "pad": (lambda x: F.pad(x, (1, 2, 3, 1)), [IMAGES]),
    "reflected": (lambda x: F.pad(x, (1, 2, 3, 1), "reflect"), [IMAGES]),
    "cat": (lambda x, y: torch.cat([x.relu(), y * 2], 1), [ROWS, torch.randn(5, 9)]),
    "cat of rows": (lambda x, y: torch.cat([x.relu(), y * 2]).sum(1), [ROWS, torch.randn(9, 37)]),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [IMAGES]),
    "integers": (lambda x: (x // 3 + x % 5) ^ 2, [torch.randint(-9, 9, (30,))]),
    "cross entropy": (lambda x, y: F.cross_entropy(x, y), [ROWS, torch.tensor([3, 0, 36, 5, 5])]),
    "heads": (lambda x: x.view(5, 4, 9).transpose(0, 1).softmax(-1).sum(1), [torch.randn(5, 36)]),
    "means of means": (lambda x: (x - x.mean((1, 2), keepdim=True)).square().mean(2).amax(1), [LONG]),
    "group norm": (lambda x, w: F.group_norm(x, 3, w, w), [torch.randn(2, 6, 5, 5), torch.randn(6)]),
}


# On the small one every kernel has several blocks and ragged ends.
MACHINES = [pytest.param(MACHINE, marks=pytest.mark.slow), TINY]


@needs_triton
@pytest.mark.parametrize("machine", MACHINES, ids=["large", "tiny"])
@pytest.mark.parametrize("name", FUNCTIONS, ids=lambda name: name.replace(" ", "-"))
def test_a_function_computes_what_eager_does(name, machine):
    function, inputs = FUNCTIONS[name]
    assert_as_eager(function, *inputs, machine=machine)


@needs_triton
@pytest.mark.parametrize(
    "name", ["chain", "broadcast", "softmax", "layer norm", "columns", "all of it", "transpose", "statistics", "cat"]
)
def test_sizes_that_are_not_known(name):
    function, inputs = FUNCTIONS[name]
    assert_as_eager(function, *inputs, machine=TINY, dynamic=True)


PIECES = GpuMachine(
    multiprocessors=64, long_scan_elements=16, scan_piece_elements=8, one_program_elements=8, one_program_points=0
)
RUNS = {
    "sum": lambda x: x.cumsum(-1),
    "product": lambda x: x.cumprod(-1),
    "greatest": lambda x: x.cummax(-1),
    "least of integers": lambda x: (x * 3).long().cummin(-1),
    "logarithm of sums": lambda x: x.logcumsumexp(-1),
    "of columns": lambda x: x.t().contiguous().cumsum(0),
    "a consumer": lambda x: x.cumsum(-1).exp().sum(0),
}


@needs_triton
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", RUNS, ids=lambda name: name.replace(" ", "-"))
def test_long_scans_in_pieces(name, dynamic):
    for count in (77, 64) if not dynamic else (77,):
        x = torch.randn(3, count) / 4
        plan = assert_as_eager(RUNS[name], x, machine=PIECES, dynamic=dynamic)
        assert len(plan.launches) >= 3
    odd = torch.tensor([[1.0, float("-inf"), float("nan"), 2.0, float("inf")] * 20, [float("-inf")] * 99 + [0.0]])
    assert_as_eager(RUNS[name], odd, machine=PIECES)


NONE, MUCH = float("-inf"), float("inf")
EXPONENTIALS = {
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: x.log_softmax(-1),
    "logarithm of their sum": lambda x: x.logsumexp(-1),
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(len(x))),
}


@needs_triton
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", EXPONENTIALS, ids=lambda name: name.replace(" ", "-"))
def test_rows_of_exponentials_that_are_too_long_to_be_kept(name, dynamic):
    """Lanes side by side have a greatest of their own: the first blocks may hold nothing at all."""
    odd = torch.stack([torch.full([77], NONE), torch.randn(77) * 40, torch.randn(77), torch.randn(77), torch.randn(77)])
    odd[1, :40], odd[2, 3], odd[3, 70], odd[4, ::2] = NONE, MUCH, float("nan"), NONE
    for rows in (torch.randn(6, 77) * 5, odd, torch.randn(4, 64).bfloat16()):
        loose = {"rtol": 1e-2, "atol": 1e-2} if rows.dtype is torch.bfloat16 else {}
        plan = assert_as_eager(EXPONENTIALS[name], rows, machine=TINY, dynamic=dynamic, **loose)
        sources = [kernel_source(launch.kernel, "kernel") for launch in plan.launches]
        assert any("tl.reshape" in source for source in sources) or name == "logarithm of their sum"


@needs_triton
@pytest.mark.parametrize("machine", [MACHINE, TINY], ids=["large", "tiny"])
def test_logarithms_of_sums(machine):
    odd = torch.tensor([[float("-inf"), float("-inf"), 2.0, float("inf"), 1.0], [float("nan"), 1.0, 2.0, 3.0, 4.0]])
    assert_as_eager(lambda x, y: (x.logcumsumexp(1), y.logcumsumexp(1)), ROWS, odd, machine=machine)
    assert_as_eager(lambda x: x.logcumsumexp(0), ROWS.bfloat16(), machine=machine, rtol=1e-2, atol=1e-2)


ZEROS = torch.tensor([[0.0, -0.0, float("nan"), 1.0, -1.0, 0.0, -0.0, float("inf"), float("-inf"), float("nan")]])
EQUALS = torch.randint(0, 4, (6, 37))
SORTED = {
    "rows": (lambda x: x.sort(-1), [ROWS]),
    "columns": (lambda x: x.sort(0, descending=True), [ROWS]),
    "stable": (lambda x: torch.sort(x, stable=True), [EQUALS.float()]),
    "stable and descending": (lambda x: torch.sort(x, stable=True, descending=True), [EQUALS.half()]),
    "integers": (lambda x: torch.sort(x, stable=True, descending=True), [EQUALS.int() - 2]),
    "bytes": (lambda x: torch.sort(x, stable=True), [EQUALS.to(torch.uint8)]),
    "truth values": (lambda x: torch.sort(x, stable=True), [EQUALS > 1]),
    "zeros and NaN": (lambda x: (torch.sort(x, stable=True), torch.sort(x, stable=True, descending=True)), [ZEROS]),
    "a consumer": (lambda x: x.softmax(-1).sort(-1, descending=True)[0].cumsum(-1), [ROWS]),
    "the greatest few": (lambda x: (x.softmax(-1).topk(4), (x * 2).topk(2, dim=0, largest=False)), [ROWS]),
    "median": (lambda x: (x.median(1), x.nanmedian(0)[0], x.median()), [ROWS]),
    "k-th": (lambda x: x.kthvalue(3, 1)[0], [ROWS]),
    "three axes": (lambda x: x.sort(1), [LONG]),
}


@needs_triton
@pytest.mark.parametrize("machine", MACHINES, ids=["large", "tiny"])
@pytest.mark.parametrize("name", SORTED, ids=lambda name: name.replace(" ", "-"))
def test_short_rows_are_sorted_by_kernels(name, machine):
    function, inputs = SORTED[name]
    plan = assert_as_eager(function, *inputs, machine=machine)
    assert not any(isinstance(operation, Sort) for operation in plan.program.operations)
    assert_as_eager(function, *inputs, machine=machine, triton=False)


def test_long_rows_are_torchs_to_sort():
    long, wide = torch.empty(4, 257), torch.empty(4, 8, dtype=torch.int64)
    for given in (long, wide):
        plan = make_plan(lowered(lambda x: x.sort(-1), given).program, {"cpu": scheduling()}, verify=True)
        assert any(isinstance(operation, Sort) for operation in plan.program.operations)


def rotated(q, angles):
    """As the first llama has it."""
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(q.dtype)


C64 = torch.complex64
Z, W = torch.randn(5, 37, dtype=C64), torch.randn(5, 37, dtype=C64)
COMPLEX = {
    "arithmetic": (lambda x, y: (x * y + 1j * x - y, -x, x / y, x.conj() * 2.5), [Z, W]),
    "parts": (lambda x: (x.real + x.imag, x.abs(), x.angle(), torch.complex(x.imag, x.real)), [Z]),
    "sums": (lambda x: (x.sum(0), x.sum(), x.mean(1), x.cumsum(1)), [Z]),
    "comparisons": (lambda x, y: (x == y, torch.where(x != x.conj(), x, y), torch.isfinite(x / 0)), [Z, W]),
    "rotations": (rotated, [torch.randn(2, 3, 5, 8), torch.randn(5, 4)]),
    "rotations of bfloat16": (rotated, [torch.randn(2, 3, 5, 8).bfloat16(), torch.randn(5, 4)]),
    "real beside complex": (lambda x, y: x * y.real + y, [Z, W]),
    "columns": (lambda x: (x.t() * 2).contiguous(), [Z]),
    "a part of it": (lambda x: x[1:, ::2] * 2j, [Z]),
    "double": (lambda x, y: (x * y).abs(), [Z.to(torch.complex128), W.to(torch.complex128)]),
    "truth of halves": (lambda x, y: (x.bool(), y.to(torch.complex32).bool()), [Z.to(torch.complex32), W]),
    "half": (lambda x, y: (x.to(torch.complex64) * y).to(torch.complex32).real, [Z.to(torch.complex32), W]),
    "places": (lambda x, i: (x[i] * 2, x.index_add(0, i, x[:4])), [torch.randn(6, 8, dtype=C64), PLACES]),
    "truth": (lambda x: (x - x.real).bool(), [Z]),
}


@needs_triton
@pytest.mark.parametrize("machine", MACHINES, ids=["large", "tiny"])
@pytest.mark.parametrize("name", COMPLEX, ids=lambda name: name.replace(" ", "-"))
def test_complex_numbers_are_pairs(name, machine):
    function, inputs = COMPLEX[name]
    assert_as_eager(function, *inputs, machine=machine)


@needs_triton
def test_complex_quotients_of_the_odd_kind():
    values = [0.0, -0.0, 1.0, 1e30, 1e-30, float("inf"), float("nan"), -3.0]
    x = torch.complex(*torch.meshgrid(torch.tensor(values), torch.tensor(values), indexing="ij")).reshape(-1, 1)
    finite = x[x.abs().isfinite().squeeze(1)]
    assert_as_eager(lambda x, y: x / y.t(), finite, finite[finite.abs().squeeze(1) > 0], rtol=1e-5, atol=0)
    small = x[(x.abs() < 1e9).squeeze(1)]
    assert_as_eager(lambda x, y: x * y.t(), small, small)


def test_complex_functions_that_are_torchs():
    plan = make_plan(lowered(lambda x: x.exp() * 2, Z).program, {"cpu": scheduling()}, verify=True)
    assert plan.not_compiled


F8 = torch.float8_e4m3fn


@needs_triton
@pytest.mark.parametrize("machine", [MACHINE, TINY], ids=["large", "tiny"])
def test_floats_of_8_bits(machine):
    def quantized(x):
        scale = 448 / x.abs().amax(1, keepdim=True).clamp(min=1e-9)
        return (x * scale).clamp(-448, 448).to(F8).view(torch.uint8), scale

    assert_as_eager(quantized, ROWS, machine=machine)
    assert_as_eager(quantized, ROWS.bfloat16(), machine=machine)
    codes = torch.randint(0, 127, (5, 37), dtype=torch.uint8)
    assert_as_eager(lambda x: (x.view(F8).float() * 2, x.view(F8).bfloat16().sum(1)), codes, machine=machine)
    tiny = ROWS.to(F8)
    assert_as_eager(lambda x: (x.t().contiguous().float(), torch.cat([x, x]).float()), tiny, machine=machine)
    assert_as_eager(lambda x: x.to(torch.float8_e5m2).float().relu(), ROWS * 1000, machine=machine)


# --- rows and columns of one tensor ---------------------------------------------------------------------------------

TALL, DEEP, IMAGES = torch.randn(2, 16, 24), torch.randn(2, 2, 8, 24), torch.randn(2, 8, 6, 24)


def with_column_sums(x, g):
    dx = torch.ops.aten.gelu_backward(g, x)
    return dx, dx.sum(0)


def with_sums_over_images(x, g):
    """The gradient of positions that are added to every image: no pieces, a program has all of a column."""
    dx = x.softmax(-1) * g
    return dx, dx.sum(0)


def with_greatest_of_images(x, g):
    dx = x.softmax(-1) * g
    return dx, dx.amax(0)


WITH_KEPT_COLUMNS = {
    "layer norm backward": (layer_norm_backward, [TALL[0], torch.randn(24), TALL[1]], 1),
    "three axes": (
        lambda x, g: ((g * x.softmax(-1)), (g * x.softmax(-1)).sum((0, 1)), g.amax((0, 1))),
        [DEEP[0], DEEP[1]],
        1,
    ),
    "element by element": (with_column_sums, [TALL[0], TALL[1]], 1),
    "of 16 bits": (with_column_sums, [TALL[0].bfloat16(), TALL[1].bfloat16()], 1),
    "whole columns": (with_sums_over_images, [IMAGES[0], IMAGES[1]], 1),
    "whole columns, of 16 bits": (with_sums_over_images, [IMAGES[0].bfloat16(), IMAGES[1].bfloat16()], 1),
    "whole columns, greatest of 16 bits": (with_greatest_of_images, [IMAGES[0].bfloat16(), IMAGES[1].bfloat16()], 1),
    "columns first": (lambda x, g: ((x * g).sum(0), x.softmax(-1) * g), [TALL[0], TALL[1]], 1),
    "rows that need the columns": (lambda x: (x - x.mean(0)).softmax(-1), [TALL[0]], 0),
    "rows of an odd number": (layer_norm_backward, [torch.randn(13, 24), torch.randn(24), torch.randn(13, 24)], 0),
    "rows too long to be kept": (with_column_sums, [torch.randn(16, 70), torch.randn(16, 70)], 0),
}


@needs_triton
@pytest.mark.parametrize("name", WITH_KEPT_COLUMNS, ids=lambda name: name.replace(" ", "-"))
def test_rows_and_columns_of_one_tensor(name):
    function, inputs, kernels_with_columns = WITH_KEPT_COLUMNS[name]
    tolerance = {"rtol": 2e-2, "atol": 1e-1} if inputs[0].dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    plan = assert_as_eager(function, *inputs, machine=FEW_PROGRAMS, **tolerance)
    found = [launch.kernel for launch in plan.launches if loops(launch.kernel, "serial")]
    assert len(found) == kernels_with_columns, "a program goes through rows, and keeps what columns come to"
    assert all(loop.copies == FEW_PROGRAMS.rows_under_way for kernel in found for loop in loops(kernel, "serial"))


# --- small tables -----------------------------------------------------------------------------------------------------

NORM = [torch.randn(2, 6, 5, 7), torch.randn(6), torch.rand(6) + 0.5, torch.randn(6), torch.randn(6)]


def as_learnt(x, mean, variance, weight, bias):
    factor = (variance + 1e-5).sqrt().reciprocal() * weight
    return ((x - mean[:, None, None]) * factor[:, None, None] + bias[:, None, None] * factor[:, None, None]).relu()


def of_a_kernel(x, mean, variance, weight, bias):
    """What a reduction comes to is scaled in its own kernel."""
    factor = torch.rsqrt(x.sum((0, 2, 3)) ** 2 + variance) * weight
    return x * factor[:, None, None]


def given_out(x, mean, variance, weight, bias):
    factor = (variance + 1e-5).sqrt().reciprocal() * weight
    return factor, x * factor[:, None, None] + factor[:, None, None]


def written_afterwards(x, mean, variance, weight, bias):
    factor = (variance + 1e-5).sqrt().reciprocal() * weight
    variance.mul_(2)
    return x * factor[:, None, None] + factor[:, None, None] * 2


@needs_triton
@pytest.mark.parametrize(
    ("function", "tables"), [(as_learnt, 1), (of_a_kernel, 0), (given_out, 0), (written_afterwards, 0)]
)
def test_small_tables_are_computed_again_by_their_readers(function, tables):
    """A launch for a few numbers takes longer than computing them for every element."""
    program = lowered(function, *NORM).program
    after = with_small_tables_recomputed(program, "cpu", GpuMachine())
    assert len(program.operations) - len(after.operations) == tables
    assert_as_eager(function, *NORM, machine=TINY)


# --- programs ---------------------------------------------------------------------------------------------------------

LOOPS = [
    "pointwise",
    "widened",
    "masked_and_indexed",
    "gather_and_scatter",
    "row_sum",
    "full_sum",
    "prefix_sums",
    "sorted_rows",
    "control_flow",
]


# prefix sums take five seconds there
ON_A_LARGE_ONE = [
    pytest.param(name, MACHINE, marks=pytest.mark.slow if name == "prefix_sums" else ()) for name in LOOPS
]


def memory_of(buffer, sizes):
    shape = [int(evaluate(size, sizes)) for size in buffer.sizes]
    if buffer.dtype.is_floating_point:
        return torch.randn(shape).to(buffer.dtype)
    return torch.randint(0, 16, shape).to(buffer.dtype)


@needs_triton
@pytest.mark.parametrize(("name", "machine"), [*((name, TINY) for name in LOOPS), *ON_A_LARGE_ONE])
def test_a_program_computes_what_its_interpreter_does(name, machine):
    program = PROGRAMS[name]()
    sizes = {s0: 5}
    known = {buffer.name: memory_of(buffer, sizes) for buffer in program.buffers}
    inputs = [5 if item is s0 else known[item] for item in program.inputs]
    objects = {buffer.name: known[buffer.name] for buffer in program.buffers if buffer.kind == "constant"}

    def copies():
        return [item.clone() if isinstance(item, torch.Tensor) else item for item in inputs]

    plan = make_plan(program, {"cpu": scheduling(machine)}, verify=True)
    made, expected = run_plan(plan, copies(), objects), interpret(program, copies(), objects)
    torch.testing.assert_close(made, expected, rtol=2e-5, atol=2e-5)


def test_nothing_in_three_axes():
    plan = make_plan(
        lowered(lambda x: x.cumsum(0) * 2, torch.empty(3, 3, 0)).program, {"cpu": scheduling()}, verify=True
    )
    assert not plan.not_compiled


# --- statistics of columns ------------------------------------------------------------------------------------------

SEVERAL_PROGRAMS = replace(TINY, multiprocessors=8, min_piece_elements=16)


def side_by_side(*sizes):
    return torch.randn(*sizes).to(memory_format=torch.channels_last)


def statistics(x):
    return torch.var_mean(x.float(), (0, 2, 3), correction=0)


@needs_triton
@pytest.mark.parametrize("column_block", [16, 1 << 10], ids=["in steps", "held"])
@pytest.mark.parametrize("sizes", [(4, 16, 8, 8), (4, 16, 6, 8), (3, 16, 7, 5)], ids=["cut", "whole", "odd"])
def test_statistics_of_channels_of_16_bits_are_those_of_pieces(sizes, column_block):
    x = (side_by_side(*sizes) + 300).bfloat16()
    machine = replace(SEVERAL_PROGRAMS, column_block=column_block)
    plan = assert_as_eager(statistics, x, machine=machine, rtol=1e-5, atol=1e-6)
    readers = [launch for launch in plan.launches if plan.program.inputs[0] in launch.arguments]
    assert len(readers) == 1, "memory is read once"


@needs_triton
def test_channels_with_a_number_that_is_unlike_others():
    """Deviations are those from the first number of a piece, whatever that is."""
    x = side_by_side(4, 16, 8, 8).bfloat16()
    numbers = [1e4, -float("inf"), float("nan"), 3e38] * 2
    for channel, number in enumerate(numbers):
        x[(1, channel, 0, 0) if channel < 4 else (1, channel, 1, 5)] = number
    x[:, 8] = 0.1  # all equal: exactly their mean, and no deviations
    made = lowered(statistics, x)
    plan = make_plan(made.program, {"cpu": scheduling(SEVERAL_PROGRAMS)}, verify=True)
    variance, mean = run_plan(plan, [x], made.objects)
    exact, _ = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(mean, x.double().mean((0, 2, 3)).float(), rtol=1e-5, atol=1e-6, equal_nan=True)
    are_finite = torch.tensor([0, 4, *range(8, 16)])
    torch.testing.assert_close(variance[are_finite], exact.float()[are_finite], rtol=2e-5, atol=1e-6)
    assert variance.isfinite().sum() == len(are_finite)
    assert variance[8] == 0


# --- rows of unknown length -------------------------------------------------------------------------------------------

ROWS_OF_ANY_LENGTH = {
    "softmax": lambda x: x.softmax(-1),
    "normalized": lambda x: F.layer_norm(x, x.shape[-1:]) * 2,
    "scaled": lambda x: x / x.abs().amax(-1, keepdim=True) + x.mean(-1, keepdim=True),
}


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("name", ROWS_OF_ANY_LENGTH)
def test_short_and_long_rows_by_one_kernel(name, triton):
    function, machine = ROWS_OF_ANY_LENGTH[name], replace(MACHINE, kept_elements=64)
    made = lowered(function, torch.randn(6, 30), dynamic=True)
    plan = make_plan(made.program, {"cpu": scheduling(machine)}, verify=True)
    (launch,) = plan.launches
    assert any(isinstance(item, When) for item in walk(launch.kernel.body))
    for sizes in ((6, 30), (3, 32), (2, 33), (5, 7), (4, 200)):
        x = torch.randn(sizes)
        (found,) = run_plan(plan, [x.clone()], made.objects, triton)
        torch.testing.assert_close(found, function(x), rtol=2e-5, atol=2e-5)


IMAGES = {
    "statistics": lambda x: torch.var_mean(x, (0, 2, 3)),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("name", IMAGES)
def test_statistics_of_any_number_of_images_read_them_once(name):
    function, machine = IMAGES[name], replace(MACHINE, min_split_elements=1024)
    made = lowered(function, torch.randn(6, 3, 20, 17), dynamic=True)
    plan = make_plan(made.program, {"cpu": scheduling(machine)}, verify=True)
    first = plan.launches[0].kernel
    assert sum(pointer.access == "write" for pointer in first.pointers) == 2, "means and squares of each image"
    for sizes in ((6, 3, 20, 17), (2, 5, 3, 4), (9, 2, 41, 30)):
        x = torch.randn(sizes) + 3
        found = run_plan(plan, [x.clone()], made.objects)
        expected = pytree.tree_leaves(function(x))
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5, check_stride=False)
    few = make_plan(made.program, {"cpu": scheduling()}, verify=True)
    assert len(few.launches) < len(plan.launches), "so few that one kernel is enough"
