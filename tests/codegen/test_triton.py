"""Kernels as Triton source: the same numbers as element by element, and the shape one would write by hand."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from triton_kernels import DEVICES, assert_same_results, kernel_of, run_both

from ferrite.codegen.triton import grid, kernel_source, launch_of, statements, unsupported
from ferrite.ir.kernel import checks
from ferrite.ir.run_kernel import run_kernel
from loop_kernels import GATHER, KERNELS, ONLINE_SOFTMAX, POINTWISE, SCATTER_ADD, SOFTMAX, WELFORD, changed, text

NAN, INF = float("nan"), float("inf")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def nan(*shape):
    return torch.full(shape, NAN)


def source_of(text):
    return kernel_source(kernel_of(text), "kernel")


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that a few elements need several of them."""
    monkeypatch.setattr(grid, "LOOPED", 8)
    monkeypatch.setattr(grid, "SHARED", 4)
    monkeypatch.setattr(statements, "MOST_ELEMENTS", 16)


# --- kernels written by hand ------------------------------------------------------------------------------------------


def cases():
    torch.manual_seed(0)
    rows, wide = torch.randn(3, 11), torch.randn(19)
    ties = torch.tensor([[1.0, 3, 3, 2, 3], [NAN, 9, NAN, 1, 1], [-INF] * 5])
    where, source = torch.tensor([5, 0, 5, 5, 2]), torch.randn(5, 3)
    scale = torch.randn(5, dtype=torch.bfloat16)
    places = torch.zeros(3, dtype=torch.int64)
    yield "pointwise", [torch.randn(3, 5), scale, nan(3, 5)], [3]
    yield "pointwise", [torch.randn(0, 5), scale, nan(0, 5)], [0]
    yield "row softmax", [rows, nan(3, 11)], [3, 11]
    yield "row softmax", [rows[:, :1], nan(3, 1)], [3, 1]
    yield "online softmax", [wide, nan(19)], [19]
    for values in ([1.0, -INF, 2.0], [INF, 1.0], [-INF, -INF], [NAN, 1.0], [2.0]):
        yield "online softmax", [torch.tensor(values), nan(len(values))], [len(values)]
    yield "argmax", [rows, nan(3), places], [3, 11]
    yield "argmax", [ties, nan(3), places], [3, 5]
    yield "welford", [rows, nan(3), nan(3)], [3, 11]
    yield "scatter-add", [where, source, torch.randn(6, 3)], [5]
    yield "gather", [where, torch.randn(6), nan(5)], [5]
    yield "gather", [where.neg(), torch.randn(6), nan(5)], [5]
    yield "cumulative sum", [wide, nan(19)], [19]
    yield "linear scan", [wide, wide.flip(0), nan(19)], [19]
    yield "column sums", [rows, nan(11), nan(11)], [3, 11]
    yield "column sums", [rows[:0], nan(11), nan(11)], [0, 11]


CASES = list(cases())
IDS = [case[0].replace(" ", "-") for case in CASES]


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_a_kernel_computes_the_same(case, device):
    name, memory, sizes = CASES[case]
    assert_same_results(kernel_of(KERNELS[name]), memory, sizes, device)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [0, 4, 10, 13, 14, 18], ids=lambda case: IDS[case])
def test_a_kernel_computes_the_same_in_small_blocks(case, device, small_blocks):
    name, memory, sizes = CASES[case]
    assert_same_results(kernel_of(KERNELS[name]), memory, sizes, device)


# --- shape of the source ----------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_bounded_reduction_is_one_block():
    source = source_of(SOFTMAX)
    assert source.count("tl.program_id") == 1
    assert source.count("tl.reduce(") == 2
    assert "for " not in source.partition("def kernel")[2]
    assert "row = tl.where(" in source, "the tile is a block"


@pytest.mark.quick
def test_an_unbounded_reduction_is_a_loop_with_a_block_of_states():
    body = source_of(ONLINE_SOFTMAX).partition("def kernel")[2]
    assert body.count("for ") == 2
    assert body.count("tl.reduce(") == 1
    assert body.index("most = tl.full([BLOCK_0]") < body.index("for ") < body.index("tl.reduce(")


@pytest.mark.quick
def test_blocks_are_as_large_as_the_problem_and_no_larger():
    launch = launch_of(kernel_of(SOFTMAX), "kernel")
    assert launch.constants([7, 11]) == {"BLOCK_0": 16}
    assert launch.constants([7, 4096]) == {"BLOCK_0": 4096}
    assert launch.instances([7, 11]) == 7
    assert (launch.warps([7, 11]), launch.warps([7, 4096])) == (1, 8)
    looped = launch_of(kernel_of(ONLINE_SOFTMAX), "kernel")
    assert looped.constants([10**6]) == {"BLOCK_0": 1024}
    assert looped.instances([10**6]) == 1


@pytest.mark.quick
def test_a_vector_loop_at_the_top_is_spread_over_programs():
    launch = launch_of(kernel_of(GATHER), "kernel")
    assert launch.instances([5000]) == 5
    assert launch.instances([0]) == 0
    several = launch_of(kernel_of(POINTWISE), "kernel")
    assert several.instances([1000]) == 16, "64 rows in one program"
    with pytest.raises(ValueError, match="a grid has"):
        launch_of(kernel_of(SOFTMAX), "kernel").instances([1 << 31, 3])


@pytest.mark.quick
def test_indices_are_wide_only_where_bounds_ask_for_it():
    assert "int64" not in source_of(changed(POINTWISE, "symbol(0, None)", "symbol(0, 1000)"))
    assert "tl.cast(n, tl.int64)" in source_of(POINTWISE)


@pytest.mark.quick
def test_accesses_are_masked_where_lanes_lie_outside():
    source = source_of(changed(changed(POINTWISE, "vector(5", "vector(8"), "parallel(n, copies=64)", "parallel(n)"))
    assert "mask" not in source, "eight elements are one whole block"
    assert source_of(POINTWISE).count("mask=") == 3


COMPLEX = text("""
    def kernel(x, out, n):
        n = symbol(0, None)
        x = pointer(c64, 'read')
        out = pointer(f32, 'write')
        for i in vector(n, lanes=4):
            v0: c64 = x[i]
            v1: f32 = real(v0)
            out[i] = v1
""")


@pytest.mark.quick
def test_what_has_no_source_says_why():
    assert "scratch memory" in unsupported(kernel_of(KERNELS["transposing copy"]))
    assert "scratch memory" in unsupported(kernel_of(changed(SOFTMAX, "symbol(1, 4096)", "symbol(1, 8192)")))
    assert unsupported(kernel_of(COMPLEX)) == "elements of type c64"
    assert unsupported(kernel_of(changed(SCATTER_ADD, "atomic_add", "atomic_mul"))) == "atomic mul of f32"
    assert unsupported(kernel_of(changed(POINTWISE, "sin(v3)", "digamma(v3)"))) == "digamma of f32"
    assert "every lane has another number" in unsupported(
        kernel_of(changed(TRIANGLE, "symbol(0, 50)", "symbol(0, None)"))
    )
    assert unsupported(kernel_of(SOFTMAX)) is None


# --- checks -----------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_an_index_outside_is_the_error_of_eager(device):
    with pytest.raises(IndexError, match="index 6 is out of bounds for dimension with size 6"):
        run_on(GATHER, [torch.tensor([1, 6]), torch.randn(6), nan(2)], [2], device)
    with pytest.raises(IndexError, match="index 1073741824 is out of bounds"):  # and nothing is touched there
        run_on(GATHER, [torch.tensor([1, 1 << 30]), torch.randn(6), nan(2)], [2], device)
    own = changed(SCATTER_ADD, "data(row, 6)", "data(row, 6, 'RuntimeError: {index} of {size}')")
    with pytest.raises(RuntimeError, match="-1 of 6"):
        run_on(own, [torch.tensor([1, -1]), torch.randn(2, 3), torch.randn(6, 3)], [2], device)


def run_on(source, memory, sizes, device):
    from ferrite.codegen.triton.run import run

    run(kernel_of(source), [tensor.reshape(-1).clone().to(device) for tensor in memory], sizes)


TWO_CHECKS = text("""
    def kernel(where, there, source, out, n):
        n = symbol(0, None)
        where = pointer(i64, 'read')
        there = pointer(i32, 'read')
        source = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for i in vector(n, lanes=4):
            v0: i64 = where[i]
            v1: i32 = there[data(v0, n)]
            v2: f32 = source[data(v1, 4)]
            out[i] = v2
""")


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_a_gather_from_a_gather_says_which_check_failed(device):
    kernel = kernel_of(TWO_CHECKS)
    assert len(checks(kernel)) == 2
    where, there, source = torch.tensor([2, 0, 1]), torch.tensor([3, 0, 1], dtype=torch.int32), torch.randn(4)
    assert_same_results(kernel, [where, there, source, nan(3)], [3], device)
    with pytest.raises(IndexError, match="index 3 is out of bounds for dimension with size 3"):
        run_on(TWO_CHECKS, [where + 1, there, source, nan(3)], [3], device)
    with pytest.raises(IndexError, match="index 4 is out of bounds for dimension with size 4"):
        run_on(TWO_CHECKS, [where, there + 1, source, nan(3)], [3], device)


# --- loops, conditions, memory ----------------------------------------------------------------------------------------

IN_PLACE = text("""
    def kernel(x, n):
        n = symbol(1, 64)
        x = pointer(f32, 'both')
        with sum(f32) as total:
            for j in reduction(n, lanes=4):
                v0: f32 = x[j]
                total.join(v0)
        for j in vector(n, lanes=4):
            v1: f32 = x[j]
            v2: f32 = add(v1, total)
            x[j] = v2
        for k in serial(3):
            for i in vector(n, lanes=4):
                v3: f32 = x[-i + k*n + n - 1]
                x[i + k*n + n].mul(v3)
""")

TRIANGLE = text("""
    def kernel(x, out, n):
        n = symbol(0, 50)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for i in vector(n, lanes=4):
            with sum(f32) as total:
                for j in reduction(i + 1, lanes=4):
                    v0: f32 = x[i*n + j]
                    total.join(v0)
            last: f32 = let(total)
            for k in serial(i):
                out[i*n + k] = last
            v1: i64 = index((i - 3) // 2 + (i - 3) % 5)
            v2: f32 = cast(v1)
            out[i*n + i] = v2
""")

CONDITIONS = text("""
    def kernel(x, out, n, m):
        n = symbol(0, 40)
        m = symbol(0, 40)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for i in parallel(n):
            v0: i64 = index(i)
            v1: b8 = gt(v0, i64(0))
            if v1:
                with amin(f32) as least, sum(i64) as count:
                    for j in reduction(m, lanes=4):
                        v2: f32 = x[i*m + j]
                        v3: b8 = gt(v2, f32(0.0))
                        if v3:
                            v4: f32 = x[i*m + j]
                            least.join(v4)
                            count.join(i64(1))
                    for j in reduction(2, lanes=2):
                        count.join(i64(10))
                out[2*i] = least
                v5: f32 = cast(count)
                out[2*i + 1] = v5
""")

OWN_MAXIMUM = text("""
    def kernel(x, out, n):
        n = symbol(1, None)
        x = pointer(i32, 'read')
        out = pointer(i32, 'write')
        with own(i32) as best:
            with combine(best):
                v0: i32 = param(0)
                v1: i32 = param(1)
                v2: i32 = maximum(v0, v1)
                results(v2)
            for j in reduction(n, lanes=4):
                v3: i32 = x[j]
                best.join(v3)
        out[0] = best
""")

TILE_SUMS = text("""
    def kernel(x, out, n):
        n = symbol(0, None)
        x = pointer(bf16, 'read')
        out = pointer(bf16, 'both')
        for i in parallel(n):
            tile = scratch(f32, [1, 6])
            for j in vector(6, lanes=4):
                tile[0, j] = f32(0.5)
            for k in unrolled(3):
                for j in vector(6, lanes=4):
                    v0: bf16 = x[18*i + 6*k + j]
                    v1: f32 = cast(v0)
                    tile[0, j].add(v1)
            for j in vector(6, lanes=4):
                v2: f32 = tile[0, j]
                v3: bf16 = cast(v2)
                out[6*i + j].add(v3)
""")

COUNTS = text("""
    def kernel(which, counts, most, n):
        n = symbol(0, None)
        which = pointer(i64, 'read')
        counts = pointer(i64, 'both')
        most = pointer(i32, 'both')
        for i in parallel(n):
            for j in vector(2, lanes=2):
                v0: i64 = which[i]
                v1: i64 = index(j)
                counts[data(v0, 4)].atomic_add(v1)
                v2: i64 = index(i - j)
                v3: i32 = cast(v2)
                most[0].atomic_amax(v3)
""")

PLANES = text("""
    def kernel(x, out, a, b, c):
        a = symbol(0, 9)
        b = symbol(1, 9)
        c = symbol(1, None)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for i in parallel(a):
            for k in parallel(c):
                v0: f32 = x[i]
                first: f32 = let(v0)
                with prod(f32) as total:
                    for j in reduction(b, lanes=4):
                        v1: f32 = x[i*b*c + j*c + k]
                        v2: f32 = add(v1, first)
                        total.join(v2)
                out[i*c + k] = total
""")


def more_cases():
    torch.manual_seed(0)
    x, halves = torch.randn(64), torch.randn(36).bfloat16()
    negative = torch.tensor([-9, -3, -7, -5, -4], dtype=torch.int32)
    yield "in place", IN_PLACE, [torch.rand(28) + 0.5], [7]
    yield "triangle", TRIANGLE, [x, torch.zeros(49)], [7]
    yield "triangle of nothing", TRIANGLE, [x, torch.zeros(1)], [0]
    yield "conditions", CONDITIONS, [x, torch.zeros(8)], [4, 9]
    yield "conditions on nothing", CONDITIONS, [x, torch.zeros(8)], [4, 0]
    yield "own maximum", OWN_MAXIMUM, [negative, torch.zeros_like(negative[:1])], [5]
    yield "tile sums", TILE_SUMS, [halves, halves[:12].clone()], [2]
    yield "counts", COUNTS, [torch.tensor([3, 0, 3, 1, 3]), torch.zeros(4, dtype=torch.int64), negative[:1]], [5]
    yield "planes", PLANES, [x, nan(12)], [3, 4, 4]


MORE = list(more_cases())


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks", ["large", "small"])
@pytest.mark.parametrize("case", range(len(MORE)), ids=[case[0].replace(" ", "-") for case in MORE])
def test_loops_conditions_and_memory(case, blocks, device, request):
    _, source, memory, sizes = MORE[case]
    kernel = kernel_of(source)
    if blocks == "small":
        request.getfixturevalue("small_blocks")
    assert_same_results(kernel, memory, sizes, device)


@pytest.mark.quick
def test_threads_wait_between_statements_that_touch_the_same_memory():
    body = source_of(IN_PLACE)
    assert body.count("tl.debug_barrier()") == 2, "before the first store, and in every step of the last loop"
    for source in (SOFTMAX, SCATTER_ADD, WELFORD):
        assert "barrier" not in source_of(source)


BIG = text("""
    def kernel(out, n):
        n = symbol(1, 100000)
        out = pointer(i64, 'write')
        for i in vector(3, lanes=4):
            v0: i64 = index(n*n + i*n*n - n)
            out[i] = v0
""")


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_products_of_narrow_indices_do_not_wrap(device):
    expected, made = run_both(kernel_of(BIG), [torch.zeros(3, dtype=torch.int64)], [100000], device)
    assert torch.equal(made[0], expected[0])
    assert int(made[0][2]) == 3 * 10**10 - 10**5


def test_the_oracle_stops_where_triton_reports():
    with pytest.raises(IndexError, match="index 6 is out of bounds"):
        run_kernel(kernel_of(GATHER), [torch.tensor([6]), torch.randn(6), nan(1)], [1])
