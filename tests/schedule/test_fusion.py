"""What becomes one kernel: counted on plans, so that nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import ferrite
from ferrite.ir import ZERO, Index, axis, number
from ferrite.ir.program import Buffer
from ferrite.schedule.fusion.accesses import MemoryAccess, separated
from ferrite.schedule.fusion.groups import apart
from ferrite.schedule.steps import Run
from tests.compare import compile_strict
from tests.schedule.plans import memory, plan_of, runs

quick = pytest.mark.quick


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in shapes]


def rotated(q, cosine, sine):
    """Rotary positions."""
    left, right = q.chunk(2, -1)
    return q * cosine + torch.cat([-right, left], -1) * sine


def residual_and_norm(x, y, weight, bias):
    total = x + y
    return total, F.layer_norm(total, (64,), weight, bias)


def cross_entropy(x, labels):
    return F.cross_entropy(x, labels)


MATRIX, ROW = (32, 64), (64,)
# name -> function, inputs, kernels
FUSED = {
    "softmax": (lambda x: x.softmax(-1), tensors(MATRIX), 1),
    "log softmax": (lambda x: x.log_softmax(-1), tensors(MATRIX), 1),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (64,), w, b), tensors(MATRIX, ROW, ROW), 1),
    "root mean square norm": (lambda x, w: F.rms_norm(x, (64,), w), tensors(MATRIX, ROW), 1),
    "gelu chain": (lambda x, y: F.gelu(x * 2 + 1) * y, tensors(MATRIX, MATRIX), 1),
    "residual and norm": (residual_and_norm, tensors(MATRIX, MATRIX, ROW, ROW), 1),
    "cross entropy": (cross_entropy, [*tensors(MATRIX), torch.randint(0, 64, (32,))], 2),
    "cat of computed parts": (lambda x, y: torch.cat([x.sin(), y.cos()], -1), tensors(MATRIX, (32, 16)), 1),
    "rotary positions": (rotated, tensors((2, 4, 16, 32), (16, 32), (16, 32)), 1),
    "transposed copy": (lambda x: x.t().contiguous(), tensors((64, 48)), 1),
    "largest and where": (lambda x: (x.argmax(-1), x.amax(-1)), tensors(MATRIX), 1),
    "batch norm in training": (
        lambda x, mean, var, w, b: F.batch_norm(x, mean, var, w, b, training=True),
        [*tensors((8, 16, 6, 6), (16,)), torch.rand(16), *tensors((16,), (16,))],
        1,
    ),
}


@quick
@pytest.mark.parametrize("name", FUSED)
def test_it_is_one_kernel(name):
    function, inputs, most = FUSED[name]
    plan = plan_of(function, *inputs)
    assert 1 <= len(plan.launches) <= most
    assert len(plan.steps) == len(runs(plan)) == 1, "nothing is called, nothing is interpreted"


@quick
@pytest.mark.parametrize("name", [name for name, (*_, most) in FUSED.items() if most == 1])
def test_what_stays_inside_takes_no_memory(name):
    function, inputs, _ = FUSED[name]
    plan = plan_of(function, *inputs)
    assert memory(plan) == set(plan.program.outputs), "results, and nothing beside them"
    assert [run.arena for run in runs(plan)] == [0]


@quick
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_a_join_are_computed_in_their_places(axis):
    plan = plan_of(lambda x, y: torch.cat([x.sin(), y.cos(), x.exp()], axis), *tensors((8, 8), (8, 8)))
    assert memory(plan) == set(plan.program.outputs)


@quick
def test_without_fusing_every_operation_is_a_kernel():
    function, inputs, _ = FUSED["residual and norm"]
    plan = plan_of(function, *inputs, fuse=False)
    assert len(plan.launches) == len(plan.program.operations) > 2


@quick
def test_the_plan_of_a_program_without_operations_is_empty():
    plan = plan_of(lambda x: x, torch.ones(3))
    assert plan.steps == ()
    assert plan.launches == []


@quick
def test_a_call_between_two_kernels_stays_between_them():
    plan = plan_of(lambda x, w: torch.relu(torch.sin(x) @ w).cos(), *tensors((8, 8), (8, 8)))
    assert [isinstance(step, Run) for step in plan.steps] == [True, False, True]


# --- what is not fused, and why ---------------------------------------------------------------------------------------


@quick
def test_along_memory_and_across_do_not_go_together():
    plan = plan_of(lambda x: x.softmax(0), *tensors((32, 64)))
    assert len(plan.launches) == 2
    assert {each.refusal.reason for each in plan.not_fused} == {"one goes along memory, the other across"}


@quick
def of_parts(count: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """So many results of each quarter."""
    return lambda x: [part.sin() + place for part in x.chunk(4, 1) for place in range(count)]


@pytest.mark.quick
def test_what_reads_other_parts_of_a_tensor_joins_where_little_is_written():
    x = torch.randn(64, 256)
    assert len(plan_of(of_parts(1), x).launches) == 1
    refused = plan_of(of_parts(3), x)
    assert len(refused.launches) > 1
    assert any("together hold more than they read" in each.refusal.reason for each in refused.not_fused)


def test_a_total_is_known_before_it_is_used():
    """Every row needs the sum of all rows, and there is work for threads: they share no rows."""
    plan = plan_of(lambda x: x / x.sum(), *tensors((256, 256)))
    assert plan.launches[-1].name == "div", "a kernel of its own"
    assert any("rows in common" in each.refusal.reason for each in plan.not_fused)


def test_why_two_operators_are_or_are_not_in_one_kernel():
    def model(x):
        return torch.relu((x.sin() + 1).softmax(0))

    compile_strict(model)(torch.randn(32, 64))
    record = ferrite.last_compile()
    names = {name for kernel in record.kernels for name in kernel.operators}
    assert len(record.kernels) == 2
    first, second = (kernel.operators for kernel in record.kernels)
    assert record.why_not_fused(second[0], second[-1]).endswith(f"are in one kernel, {record.kernels[1].name}")
    apart = record.why_not_fused(first[-1], second[-1])
    assert apart == f"{first[-1]} and {second[-1]} are in different kernels: one goes along memory, the other across"
    for far in second[:-1]:  # it was never held against the first, but what it is in one kernel with was
        assert record.why_not_fused(first[-1], far).endswith("one goes along memory, the other across")
    unknown = record.why_not_fused("nothing_of_this_name", second[-1])
    assert unknown.startswith("nothing_of_this_name: in no kernel. Kernels have: ")
    assert all(name in unknown for name in names)


# --- whole models -----------------------------------------------------------------------------------------------------


def layers(count):
    def model(x, w, v):
        for _ in range(count):
            x = F.layer_norm(x + F.gelu(x @ w) @ v, (64,))
        return x.softmax(-1)

    return model


@quick
def test_equal_layers_have_equal_kernels():
    inputs = tensors(MATRIX, (64, 128), (128, 64))
    two, three = (plan_of(layers(count), *inputs) for count in (2, 3))
    assert len(three.launches) > len(two.launches)
    assert {launch.kernel for launch in three.launches} == {launch.kernel for launch in two.launches}


@quick
def test_names_do_not_matter_to_a_kernel():
    one = plan_of(lambda x, y: x.sin() * y, *tensors(MATRIX, MATRIX))
    other = plan_of(lambda unused, y, x: (x.sin() * y, unused), *tensors(ROW, MATRIX, MATRIX))
    assert {launch.kernel for launch in one.launches} == {launch.kernel for launch in other.launches}


def test_a_norm_with_its_gradient_is_three_kernels_at_most():
    model = torch.nn.LayerNorm(64)
    compile_strict(model)(torch.randn(32, 64, requires_grad=True)).sum().backward()
    forward, backward = ferrite.last_compile().graphs
    assert len(forward.kernels) == 1
    assert len(backward.kernels) <= 2
    assert not forward.eager_calls
    assert not backward.eager_calls


@pytest.mark.parametrize("threads", [1, 2])
def test_additions_to_places_that_memory_decides_are_the_same_every_time(threads):
    """Many rows are added to few: in which order must not depend on what thread comes first."""

    def model(index, values):
        return torch.zeros(5, 64).index_add(0, index, values), torch.zeros(5, 64).scatter_add(
            0, index[:, None] + 0 * values.long(), values
        )

    torch.manual_seed(0)
    index, values = torch.randint(0, 5, (2000,)), torch.randn(2000, 64)
    compiled = compile_strict(model)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first = compiled(index, values)
        assert ferrite.last_compile().kernels
        for _ in range(5):
            assert all(map(torch.equal, compiled(index, values), first))
    finally:
        torch.set_num_threads(before)
    for mine, exact in zip(first, model(index, values), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4)


def test_a_row_that_is_written_again_is_not_read_as_it_was():
    """A total, overwritten in the loop that also joins a reduction, and read by a loop after it."""

    def norm(x, y):
        total = x.sum((1, 2), keepdim=True)
        total[:, 0] = y
        return torch.nn.functional.layer_norm(total, total.shape[-1:])

    def greatest(x, y):
        total = x.sum(1, keepdim=True)
        total[:] = y
        return total.amax(1, keepdim=True), total - total.amax(1, keepdim=True)

    def other_row(x, y):
        total = x.sum(1, keepdim=True)
        total[0] = y
        return total.var(1, correction=0), total + total.amax(1, keepdim=True)

    x, y = torch.randn(4, 16, 1), torch.randn(1)
    for fn, argument in ((norm, x), (greatest, x[..., 0]), (other_row, x[..., 0])):
        torch.testing.assert_close(compile_strict(fn)(argument, y), fn(argument, y))


@pytest.mark.parametrize("width", [0, 1, 2])
def test_a_total_is_kept_where_only_a_loop_inside_of_another_asks_for_it(width):
    """Rows without elements, and with few: reductions of them are written out."""

    def fn(x, y):
        wide = y.to(torch.float32)
        normal = torch.nn.functional.layer_norm(x, x.shape[-1:])
        return wide.softmax(1), torch.cat([wide, normal], -1)

    x, y = torch.randn(24, width)[::2], torch.randint(-4, 9, (12, 1), dtype=torch.int32)
    torch.testing.assert_close(compile_strict(fn, dynamic=True)(x, y), fn(x, y), rtol=1e-4, atol=1e-4)


def accesses_of_view(strides: tuple[int, int], *coordinates: tuple[Index, Index]) -> list[MemoryAccess]:
    sizes, steps = ((number(8), number(8)), tuple(map(number, strides)))
    view = Buffer("view", torch.float32, sizes, steps, ZERO, torch.device("cpu"), "view", "base")
    return [MemoryAccess("view", "base", at, True, "set", view) for at in coordinates]


@quick
def test_coordinates_tell_elements_apart_only_where_a_view_does_not_overlap_itself():
    row, left, right = axis("i", 8), axis("j", 4), axis("k", 4)
    halves = (row, left), (row, right + 4)
    for strides, wanted in (((8, 1), True), ((16, 2), True), ((4, 1), False), ((0, 1), False)):
        first, second = accesses_of_view(strides, *halves)
        assert apart(first, second) is wanted  # with rows of 4, the right half of a row is the left half of the next
        assert separated(first, second, [row]) is wanted
    near = accesses_of_view((8, 1), (row, left), (row, right + 3))
    assert not apart(*near)  # one column is in both
    assert separated(near[0], near[1], [row])
