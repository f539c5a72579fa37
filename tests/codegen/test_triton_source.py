"""The shape of the Triton source: what one would write by hand. Needs no Triton."""

from __future__ import annotations

import pytest
import torch

from ferrite.codegen.triton import kernel_source, launch_of, unsupported
from ferrite.ir.kernel.parse import parse_kernel
from tests.gpu_plans import kernels_of
from tests.loop_kernels import GATHER, KERNELS, ONLINE_SOFTMAX, POINTWISE, SCATTER_ADD, SOFTMAX, WELFORD, changed, text
from tests.triton_kernels import BLOCKS, COMPLEX, IN_PLACE, ROW_SCANS, ROWS_IN_ORDER, TRIANGLE, kernel_of

pytestmark = pytest.mark.quick


def source_of(text):
    return kernel_source(kernel_of(text), "kernel")


def test_a_bounded_reduction_is_one_block():
    source = source_of(SOFTMAX)
    assert source.count("tl.program_id") == 1
    assert source.count("tl.reduce(") == 2
    assert "for " not in source.partition("def kernel")[2]
    assert "row = tl.where(" in source, "the tile is a block"


def test_an_unbounded_reduction_is_a_loop_with_a_block_of_states():
    states = changed(ONLINE_SOFTMAX, "softmax(f32, f32) as (most, total)", "amax(f32) as most, sum(f32) as total")
    states = changed(states, "most.update(v0)", "most.update(v0)\n            total.update(f32(1.0))")
    body = source_of(states).partition("def kernel")[2]
    assert body.count("for ") == 2
    assert body.count("tl.reduce(") == 2
    assert body.index("most = tl.full([BLOCK_0]") < body.index("for ") < body.index("tl.reduce(")


def test_a_block_updates_a_softmax_with_one_exponential_for_a_lane():
    body = source_of(ONLINE_SOFTMAX).partition("def kernel")[2]
    loop, after = body.partition("for ")[2].split("tl.reduce(", 1)[1].split("tl.reduce(", 1)
    assert body.index("total = tl.full([BLOCK_0]") < body.index("for ")
    assert "most = tl.full([], " in body, "all lanes have one"
    assert loop.count("exp(") == 2, "one of them is of a number"
    assert "for " in after, "the sums of the lanes are combined once"


def test_blocks_are_as_large_as_the_problem_and_no_larger():
    launch = launch_of(kernel_of(SOFTMAX), "kernel")
    assert launch.constants([7, 11]) == {"BLOCK_0": 16}
    assert launch.constants([7, 4096]) == {"BLOCK_0": 4096}
    assert launch.instances([7, 11]) == 7
    assert (launch.warps([7, 11]), launch.warps([7, 4096])) == (1, 8)
    looped = launch_of(kernel_of(ONLINE_SOFTMAX), "kernel")
    assert looped.constants([10**6]) == {"BLOCK_0": 1024}
    assert looped.instances([10**6]) == 1


def test_a_vector_loop_at_the_top_is_spread_over_programs():
    launch = launch_of(kernel_of(GATHER), "kernel")
    assert launch.instances([5000]) == 5
    assert launch.instances([0]) == 0
    several = launch_of(kernel_of(POINTWISE), "kernel")
    assert several.instances([1000]) == 16, "64 rows in one program"
    with pytest.raises(ValueError, match="a grid has"):
        launch_of(kernel_of(SOFTMAX), "kernel").instances([1 << 31, 3])


def test_indices_are_wide_only_where_bounds_ask_for_it():
    assert "int64" not in source_of(changed(POINTWISE, "symbol(0, None)", "symbol(0, 1000)"))
    assert "tl.cast(n, tl.int64)" in source_of(POINTWISE)


def test_accesses_are_masked_where_lanes_lie_outside():
    source = source_of(changed(changed(POINTWISE, "vector(5", "vector(8"), "parallel(n, copies=64)", "parallel(n)"))
    assert "mask" not in source, "eight elements are one whole block"
    assert source_of(POINTWISE).count("mask=") == 3


def test_a_kernel_that_says_its_blocks():
    kernel = kernel_of(BLOCKS)
    launch = launch_of(kernel, "kernel")
    assert launch.blocks == ()
    assert launch.instances([6]) == 2
    assert launch.warps([6]) == 1
    source = kernel_source(kernel, "kernel")
    assert "row[:, None, :]" in source, "a tile is used by a block with one dimension more"
    scans = source_of(ROW_SCANS)
    assert scans.count("tl.associative_scan(") == 1
    assert "for j_start in range(0, n, 8)" in scans
    assert parse_kernel(str(kernel)) == kernel


def reason(source):
    """Why a kernel has no Triton source."""
    return unsupported(kernel_of(source)).reason


def test_what_has_no_source_says_why():
    assert "scratch memory" in reason(KERNELS["transposing copy"])
    assert "scratch memory" in reason(changed(SOFTMAX, "symbol(1, 4096)", "symbol(1, 8192)"))
    assert reason(COMPLEX) == "elements of type c64"
    assert reason(changed(SCATTER_ADD, "atomic_add", "atomic_mul")) == "atomic mul of f32"
    assert reason(changed(POINTWISE, "sin(v3)", "ldexp(v3, v3)")) == "ldexp of f32"
    assert "every lane has another number" in reason(changed(TRIANGLE, "symbol(0, 50)", "symbol(0, None)"))
    assert unsupported(kernel_of(SOFTMAX)) is None


def test_threads_wait_between_statements_that_touch_the_same_memory():
    body = source_of(IN_PLACE)
    assert body.count("tl.debug_barrier()") == 2, "before the first store, and in every step of the last loop"
    for source in (SOFTMAX, SCATTER_ADD, WELFORD, ROWS_IN_ORDER):
        assert "barrier" not in source_of(source)
    assert "barrier" in source_of(changed(ROWS_IN_ORDER, "out[8*k + j]", "out[4*k + j]"))


IN_PLACE_ROWS = text("""
    def kernel(x, y):
        x = pointer(f32, 'both')
        y = pointer(f32, 'read')
        warps = 1
        for k in parallel(4):
            for r in serial(8, copies=3):
                for j in vector(64, lanes=64):
                    v0: f32 = x[512*k + 64*r + j]
                    v1: f32 = y[512*k + 64*r + j]
                    v2: f32 = add(v0, v1)
                    a0: f32 = let(v2)
                    x[512*k + 64*r + j] = a0
""")


def test_rows_that_one_warp_changes_in_place_are_loaded_ahead():
    """Which Triton does not do where there is a barrier."""
    source = source_of(IN_PLACE_ROWS)
    assert "num_stages=3" in source
    assert "barrier" not in source
    assert source_of(changed(IN_PLACE_ROWS, "warps = 1", "warps = 2")).count("barrier") == 1, "before the store"
    another_row = changed(IN_PLACE_ROWS, "v0: f32 = x[512*k + 64*r + j]", "v0: f32 = x[512*k + j]")
    assert "barrier" in source_of(another_row), "an iteration loads what the one before it stored"


def test_sums_of_the_same_lanes_are_combined_at_once():
    kernel, *_ = kernels_of(lambda x: (x.sum(1), (x * x).sum(1), x.amax(1)), torch.empty(4096, 512))
    source = kernel_source(kernel, "kernel")
    assert source.count("tl.reduce(") == 2
    assert "_2)" in source.partition("tl.reduce(")[2].partition("\n")[0]
