"""The loops of a kernel: stated facts about their form on plans, and the same functions compiled, equal to eager.

Edges of paddings and windows, strides of two and three, tables that threads share, columns, joined tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ferrite.ir.expr import Load, Masked, Op, indices_of, nodes_of
from ferrite.ir.index.algebra import ONE, Max, Min, axis
from ferrite.ir.kernel.nodes import Accumulate, Kernel, Loop, Store, When, nodes_in, walk
from ferrite.machines import Machine
from ferrite.schedule.cpu.tiles import side_of
from ferrite.schedule.fusion.accesses import step_of
from tests.compare import assert_no_farther, assert_same_as_eager, compile_strict
from tests.schedule.plans import extent, loops, memory, number, plan_of

quick = pytest.mark.quick


def only_kernel(fn: Callable[..., Any], *inputs: torch.Tensor) -> Kernel:
    (launch,) = plan_of(fn, *inputs).launches
    return launch.kernel


def nodes(kernel: Kernel) -> list[Any]:
    return [item for statement in walk(kernel.body) for item in nodes_in(statement)]


# --- loops parted where conditions change -----------------------------------------------------------------------------


@quick
def test_a_padding_is_a_copy_between_its_edges():
    kernel = only_kernel(lambda x: F.pad(x, (3, 5)), torch.randn(16, 64))
    assert [extent(loop) for loop in loops(kernel, "vector")] == [3, 64, 5]
    assert not any(isinstance(item, Masked) for item in nodes(kernel))


@quick
def test_rows_of_a_padding_ask_once_for_a_vector():
    """What depends on the row is left, and is the same for all lanes."""
    kernel = only_kernel(lambda x: F.pad(x, (1, 1, 1, 1)), torch.randn(4, 16, 64))
    masks = [item.mask for item in nodes(kernel) if isinstance(item, Masked)]
    (copy,) = [loop for loop in loops(kernel, "vector") if extent(loop) == 64]
    assert masks
    assert all(copy.axis not in mask.atoms for mask in masks)


@quick
def test_a_mirrored_edge_is_copied_backwards():
    kernel = only_kernel(lambda x: F.pad(x, (4, 4), mode="reflect"), torch.randn(2, 16, 64))
    assert len(loops(kernel, "vector")) == 3
    assert not [index for item in nodes(kernel) for index in indices_of(item) if isinstance(index, Max | Min)]


@quick
def test_a_write_into_a_slice_is_two_copies():
    kernel = only_kernel(lambda x, y: torch.slice_scatter(x, y * 2, 1, 16), torch.randn(8, 64), torch.randn(8, 48))
    assert [extent(loop) for loop in loops(kernel, "vector")] == [16, 48]


@quick
def test_many_conditions_are_left_as_they_are():
    def fn(x):
        for _ in range(8):
            x = F.pad(x, (1, 0))
        return x

    kernel = only_kernel(fn, torch.randn(4, 64))
    assert len(loops(kernel, "vector")) == 1


# --- strips -----------------------------------------------------------------------------------------------------------


def twice(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)


def rows_in_strips(kernel: Kernel) -> list[int]:
    """How many rows go by under each vector of columns."""
    inside = [inner for outer in loops(kernel, "vector") for inner in outer.body if isinstance(inner, Loop)]
    return [extent(loop) for loop in inside]


@quick
def test_what_a_column_needs_is_computed_once_for_many_rows():
    assert rows_in_strips(only_kernel(twice, torch.randn(2, 3, 16, 32))) == [32]


@quick
def test_a_strip_is_as_long_as_the_cache_is_large():
    assert rows_in_strips(only_kernel(twice, torch.randn(1, 1, 1024, 1024))) == [16]


@quick
@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda x: x * torch.arange(64.0), (32, 64)),  # little to compute
        (lambda x: x * x.sin(), (32, 64)),  # nothing of the column alone
        (lambda x: x * torch.arange(64.0).sin(), (4, 64)),  # few rows
        (lambda x: x * torch.arange(8.0).sin(), (64, 8)),  # few columns
        (lambda x: x * x[0].sin(), (32, 64)),  # memory says
    ],
)
def test_other_loops_go_row_by_row(fn, shape):
    plan = plan_of(fn, torch.randn(shape))
    assert [rows for launch in plan.launches for rows in rows_in_strips(launch.kernel)] == []
    assert plan.launches


# --- windows ----------------------------------------------------------------------------------------------------------


@quick
def test_windows_are_written_out_and_vectors_are_made_of_results():
    kernel = only_kernel(lambda x: F.avg_pool2d(x, 2), torch.randn(2, 4, 16, 64))
    assert not any(isinstance(item, Accumulate) for item in walk(kernel.body))
    (loop,) = loops(kernel, "vector")
    assert extent(loop) == 32


@quick
def test_the_place_of_the_greatest_is_not_computed_where_nobody_asks():
    def nodes_of_pool(fn):
        return [item.dtype for item in nodes(only_kernel(fn, torch.randn(2, 4, 16, 64))) if isinstance(item, Op)]

    assert torch.int64 not in nodes_of_pool(lambda x: F.max_pool2d(x, 3, 2, 1))
    assert torch.int64 in nodes_of_pool(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True))


@quick
def test_the_inside_of_a_padding_is_turned_in_tiles():
    kernel = only_kernel(padded_and_turned, torch.randn(1, 24, 30, 40))
    assert not any(isinstance(item, Masked) for item in nodes(kernel))
    assert any(loop.copies == 4 and isinstance(loop.body[0], Loop) for loop in loops(kernel, "vector"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_paddings_that_are_turned(dynamic):
    assert_same_as_eager(
        padded_and_turned, lambda: [torch.randn(2, 24, 30, 40)], dynamic=dynamic, options={"check_bounds": True}
    )


def padded_and_turned(x):
    return F.pad(x, (1, 2, 0, 1)).permute(0, 2, 3, 1).contiguous()


@quick
def test_a_tile_is_turned_while_it_is_filled():
    kernel = only_kernel(lambda x: x.t().contiguous(), torch.randn(256, 256))
    outer, inner, last = loops(kernel, "vector")
    assert outer.lanes == 1
    assert outer.copies == inner.lanes > 1
    (load,) = [item for item in nodes_in(last.body[0]) if isinstance(item, Load)]
    assert step_of(load.coordinates[0], last.axis) is ONE, "the tile is read along the vectors"


@quick
def test_windows_are_not_shared_among_threads():
    """However many there are: each is a few elements."""
    x = torch.randn(1, 40, 40, 64).permute(0, 3, 1, 2)
    kernel = only_kernel(lambda x: F.avg_pool2d(x, 5, 1), x)
    assert not any(isinstance(item, Accumulate) for item in walk(kernel.body))


@quick
def test_long_rows_are_no_windows():
    kernel = only_kernel(lambda x: x.sum(-1), torch.randn(64, 8))
    assert any(isinstance(item, Accumulate) for item in walk(kernel.body))


@quick
@pytest.mark.parametrize(
    ("sizes", "vector", "side"), [((64, 4096), 64, 32), ((64, 4096), 16, 128), ((128, 4096), 64, 128)]
)
def test_tiles_of_a_short_axis_are_small_where_vectors_are_wide(sizes, vector, side):
    assert (
        side_of(
            *(axis(name, size) for name, size in zip("ij", sizes, strict=True)), machine=Machine(vector_bytes=vector)
        )
        == side
    )


# --- tables, columns, joined tensors ----------------------------------------------------------------------------------


@quick
def test_threads_own_shares_of_a_table():
    plan = plan_of(
        lambda table, ids, rows: table.index_put_((ids,), rows, accumulate=True),
        torch.randn(2000, 512),
        torch.randint(0, 2000, (300,)),
        torch.randn(300, 512),
    )
    kernel = plan.launches[-1].kernel
    (share,) = loops(kernel, "parallel")
    assert extent(share) == 8
    (choice,) = [item for item in walk(kernel.body) if isinstance(item, When)]
    assert any(isinstance(item, Store) and item.mode == "add" and not item.atomic for item in walk(choice.body))


@quick
def test_columns_are_gone_through_row_by_row():
    kernel = plan_of(lambda x: x.sum(0), torch.randn(4096, 256)).launches[0].kernel
    stores = [item for item in walk(kernel.body) if isinstance(item, Store) and item.mode == "add"]
    assert stores
    assert all(item.buffer not in {pointer.name for pointer in kernel.pointers} for item in stores), (
        "sums wait in tiles"
    )


@quick
def test_two_sums_of_the_same_columns_are_one_kernel():
    plan = plan_of(lambda g, x: ((g * x).sum(0), g.sum(0)), torch.randn(4096, 256), torch.randn(4096, 256))
    reading = [launch for launch in plan.launches if len(launch.arguments) == 4]
    assert len(reading) == 1, "both read the large tensors once"


@quick
@pytest.mark.parametrize("axis", [0, 1])
def test_what_reads_a_joined_tensor_reads_its_parts(axis):
    plan = plan_of(lambda x, y: torch.cat([x, y.sin()], axis) * 2 + 1, torch.randn(16, 64), torch.randn(16, 64))
    assert len(memory(plan)) == 1, "the result alone"


@quick
def test_a_joined_tensor_that_is_returned_through_a_view_stays_whole():
    plan = plan_of(lambda x, y: ((j := torch.cat([x, y])).view(-1), j + 1), torch.randn(4, 8), torch.randn(4, 8))
    assert not any("_part" in buffer.name for buffer in plan.program.buffers)


@quick
def test_groups_that_an_operation_needs_both_of_are_one_kernel():
    """An optimizer's step goes through its tensors list by list; one kernel goes through all lists of a tensor."""

    def step(p, g, m, v):
        m = m + (g - m) * 0.1
        v = v * 0.99
        v = v + g * g * 0.01
        return p - m / (v.sqrt() + 1e-8), m, v

    assert len(plan_of(step, *(torch.rand(64, 64) for _ in range(4))).launches) == 1


# --- the same compiled ------------------------------------------------------------------------------------------------

NAMES = {
    "padding": (lambda x: F.pad(x, (1, 2, 3, 0), value=2.5), (2, 3, 9, 17)),
    "mirrored": (lambda x: F.pad(x, (2, 3, 1, 2), mode="reflect"), (2, 3, 9, 17)),
    "repeated edge": (lambda x: F.pad(x, (2, 3, 1, 2), mode="replicate"), (2, 3, 9, 17)),
    "around": (lambda x: F.pad(x, (2, 3), mode="circular"), (2, 3, 17)),
    "cut and padded": (lambda x: F.pad(x, (-2, 3, 1, -1)), (2, 3, 9, 17)),
    "average pool": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), (2, 3, 9, 17)),
    "average pool, wide steps": (lambda x: F.avg_pool2d(x, 2, 4), (2, 3, 9, 17)),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (2, 3, 9, 17)),
    "max pool, dilated": (lambda x: F.max_pool2d(x, 2, 1, 0, 2), (2, 3, 9, 17)),
    "every second": (lambda x: x[..., ::2].sin(), (5, 33)),
    "every third": (lambda x: x[..., 1::3] * 2, (5, 37)),
    "every second backwards": (lambda x: x.flip(-1)[..., ::2] + 1, (5, 33)),
    "columns": (lambda x: (x.sum(0), x.amax(0), x.var(0)), (700, 33)),
    "all columns of many": (lambda x: x.sum((0, 2)), (300, 7, 11)),
    "turned": (lambda x: x.t().contiguous(), (300, 133)),
    "turned and joined": (lambda x: torch.cat([x.mT.contiguous() * 2, x.mT.sin().contiguous()], 1), (3, 150, 41)),
    "joined": (lambda x: torch.cat([x, x.sin(), x * 2], 0) + 1, (5, 33)),
    "joined twice": (lambda x: torch.cat([torch.cat([x, x.sin()], 1) * 2, x], 1).relu(), (5, 33)),
    "enlarged": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"), (2, 3, 9, 17)),
    "enlarged by strips": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), (2, 3, 19, 37)),
    "enlarged by curves": (lambda x: F.interpolate(x, (31, 67), mode="bicubic"), (2, 3, 19, 37)),
    "times what a column has": (lambda x: x + torch.arange(67.0).sin(), (37, 67)),
    "enlarged to the corners": (
        lambda x: F.interpolate(x, (13, 29), mode="bilinear", align_corners=True),
        (2, 3, 9, 17),
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_eagers(name):
    fn, shape = NAMES[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    found = [pytree.tree_leaves(each) for each in (compile_strict(fn, dynamic=False)(x), fn(x), fn(x.double()))]
    for mine, theirs, exact in zip(*found, strict=True):
        assert mine.stride() == theirs.stride()
        if mine.is_floating_point():
            terms = x.abs().sum(0).max().item() if "columns" in name else 0.0
            assert_no_farther(mine, theirs, exact, name, terms=terms)
        else:
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf"), -0.0])
def test_windows_with_special_values(special):
    x = torch.zeros(2, 3, 9, 17)
    x[0, 0, 3, 4] = special
    x[1, 2, 0, 0] = special
    ours = compile_strict(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), dynamic=False)(x)
    eager = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(ours[0]), torch.signbit(eager[0]))


@pytest.mark.parametrize("width", [33, 512])
def test_ids_outside_a_table_are_refused_whoever_owns_the_row(width):
    compiled = compile_strict(lambda table, ids, rows: table.index_add(0, ids, rows), dynamic=False)
    table, rows = torch.zeros(100, width), torch.ones(3, width)
    assert compiled(table, torch.tensor([99, 0, 99]), rows).sum() == 3 * width
    for wrong in (100, -1):
        with pytest.raises(RuntimeError, match=r"out of bounds|out of range"):
            compiled(table, torch.tensor([0, wrong, 5]), rows)


@quick
@pytest.mark.parametrize("sizes", [(64, 4096), (4096, 64), (2048, 8192)], ids=str)
def test_pieces_of_a_long_reduction_lie_in_one_place(sizes):
    kernel = plan_of(lambda x: x.sum(), torch.randn(sizes)).launches[0].kernel
    (piece,) = loops(kernel, "parallel")
    (place,) = {item.coordinates[0] for item in nodes(kernel) if isinstance(item, Load)}
    step = step_of(place, piece.axis)
    assert number(step) * extent(piece) == sizes[0] * sizes[1], "a thread reads what lies behind each other"


@quick
def test_pieces_of_several_long_rows_follow_each_other():
    kernel = plan_of(lambda x: x.sum(1), torch.randn(8, 1 << 16)).launches[0].kernel
    row, piece = loops(kernel, "parallel")
    assert (extent(row), extent(piece)) == (8, 32)


@quick
def test_scans_go_through_two_rows_at_once():
    kernel = only_kernel(lambda x: x.cumsum(1), torch.randn(128, 100))
    (rows,) = loops(kernel, "vector")
    assert (extent(rows), rows.lanes, rows.copies) == (2, 1, 2)
    assert loops(only_kernel(lambda x: x.cumsum(1), torch.randn(8, 100)), "vector") == [], "few rows are for threads"


def test_scans_of_an_odd_number_of_rows():
    for fn in (lambda x: x.cumsum(1), lambda x: x.cummax(1), lambda x: (x / 4).cumprod(1)):
        assert_same_as_eager(fn, lambda: [torch.randn(67, 33)])


# --- what several loops compute is kept -------------------------------------------------------------------------------


def normed_edges(x):
    return F.pad(x.exp(), (-1, 3), value=2).softmax(1)


def normed_edges_of_means(x):
    means = x.mean((1, 3))
    return F.pad(means, (-1, 3), value=2.0).log_softmax(1), means.amax(0)


def scattered_edges(x):
    padded = F.pad(x.mean((1, 3)), (-1, 3), value=2)
    back = torch.arange(padded.shape[1] - 1, -1, -1).reshape(1, -1).expand_as(padded)
    return padded.scatter(1, back, padded).log_softmax(1), x.mean((1, 3)).any(0)


def guarded_by_masks(kernel: Kernel) -> set[Any]:
    masks = [item for item in nodes(kernel) if isinstance(item, Masked)]
    return {inner for item in masks for inner in nodes_of(item.value)}


@quick
def test_what_a_mask_guards_is_not_kept_without_it():
    """Where the mask does not hold, the load lies outside of its memory."""
    kernel = only_kernel(normed_edges, torch.randn(5, 4))
    reads = [item for item in nodes(kernel) if isinstance(item, Load) and item.buffer == kernel.pointers[-1].name]
    assert reads
    assert guarded_by_masks(kernel) >= set(reads)
    exponentials = [item for item in nodes(kernel) if isinstance(item, Op) and item.name == "exp"]
    assert sum(bool(item.loads & {kernel.pointers[-1].name}) for item in exponentials) == 1, "kept, with its mask"


@quick
def test_what_no_mask_guards_is_kept():
    kernel = only_kernel(lambda x: x.exp().softmax(1), torch.randn(5, 64))
    exponentials = [item for item in nodes(kernel) if isinstance(item, Op) and item.name == "exp"]
    assert sum(bool(item.loads & {kernel.pointers[-1].name}) for item in exponentials) == 1


@pytest.mark.parametrize("fn", [normed_edges_of_means, scattered_edges])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_edges_of_what_lies_in_a_tile(fn, dtype):
    assert_same_as_eager(fn, lambda: [torch.randn(5, 3, 4, 5, dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_that_are_reduced_by_what_they_came_to_before(dtype):
    """Of the softmax of columns only one row is asked for: what is left are two reductions, one after the other."""

    def fn(x):
        return x.reshape(-1, 12).softmax(-2).select(0, 50)

    x = torch.randn(12, 8, 16).to(dtype)
    torch.testing.assert_close(compile_strict(fn)(x), fn(x))
