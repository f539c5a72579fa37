"""Products that are written into their part of a joined tensor: no memory of their own, no copy, eager's bits."""

from __future__ import annotations

import pytest
import torch

import ferrite
from ferrite.ir.program.nodes import Template
from ferrite.schedule.loops.out_products import MAX_PARTS_SEARCHED, with_out_products
from ferrite.schedule.steps import Plan
from tests import gpu_plans
from tests.compare import assert_same_as_eager
from tests.schedule.plans import plan_of

quick = pytest.mark.quick
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def rows(a, b, x):
    return torch.cat([x.relu(), a @ b])


def columns(a, b, x):
    return torch.cat([a @ b, x @ b, x.sum(-1, keepdim=True)], 1)


def one_row(a, b, x):
    return torch.cat([a[:1] @ b, x])


def with_bias(a, b, x):
    return torch.stack([torch.addmm(x, a, b), torch.addmm(x, a, b, beta=2, alpha=3)])


def batches(a, b, x):
    return torch.cat([torch.bmm(a, b), torch.baddbmm(x, a, b)])


def heads(a, b, x):
    """As the gradient of a layer that makes queries, keys and values at once: heads lie side by side in every row."""
    made = [each.transpose(0, 1).reshape(1, a.shape[1], -1) for each in (torch.bmm(a, b), torch.bmm(x, b))]
    return torch.cat(made, 2)


def then_multiplied(a, b, x):
    return torch.cat([a @ b, x @ b], 1) @ torch.ones(2 * b.shape[1], 3, dtype=a.dtype)


def flat(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [made(5, 6, dtype=dtype), made(6, 6, dtype=dtype), made(5, 6, dtype=dtype)]


def batched(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [made(3, 5, 4, dtype=dtype), made(3, 4, 4, dtype=dtype), made(3, 5, 4, dtype=dtype)]


def made(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * 8).round().to(dtype) / 8 if dtype.is_floating_point else torch.randint(9, shape)


PARTS = {
    "rows": (rows, flat, 1),
    "columns": (columns, flat, 2),
    "one row": (one_row, flat, 1),
    "with a bias": (with_bias, flat, 2),
    "batches": (batches, batched, 2),
    "heads": (heads, batched, 2),
    "then multiplied": (then_multiplied, flat, 2),
}


def read_twice(a, b, x):
    product = a @ b
    return torch.cat([product, x]), product + 1


def leaves(a, b, x):
    product = a @ b
    return torch.cat([product, x]), product


def computed_with(a, b, x):
    return torch.cat([(a @ b).relu(), x])


def another_type(a, b, x):
    return torch.cat([a @ b, x.double()])


def some_rows(a, b, x):
    return torch.cat([(a @ b)[:2], x])


def some_columns(a, b, x):
    return torch.cat([(a @ b)[:, :3], x], 1)


def one_of_its_rows(a, b, x):
    return torch.cat([(a @ b)[0], x[0]])


def repeated(a, b, x):
    return torch.cat([(a[:1] @ b).expand(3, 6), x])


def turned(a, b, x):
    return torch.cat([(a @ b).t(), x.t()])


def all_of_it(a, b, x):
    return (a @ b).clone(), x


def written_twice(a, b, x):
    joined = x.new_zeros(10, 6)
    joined[:5] = a @ b
    return joined


def of_itself(a, b, x):
    joined = torch.cat([a, x])
    joined[2:7] = joined[1:6] @ b
    return joined


def into_an_input(a, b, x):
    x[:, :] = a @ b
    return x + 1


NEAR_MISSES = {
    fn.__name__: fn
    for fn in (
        read_twice,
        leaves,
        computed_with,
        another_type,
        some_rows,
        some_columns,
        one_of_its_rows,
        repeated,
        turned,
        all_of_it,
        written_twice,
        of_itself,
        into_an_input,
    )
}


def written_in_place(plan: Plan) -> list[str]:
    calls = [step.call for step in plan.steps if isinstance(step, Template)]
    return [str(call.operator) for call in calls if str(call.operator).endswith(".out")]


@quick
@pytest.mark.parametrize("name", PARTS)
def test_a_product_is_written_into_its_part(name):
    function, inputs, many = PARTS[name]
    plan = plan_of(function, *inputs())
    assert len(written_in_place(plan)) == many
    results = [item for step in plan.steps if isinstance(step, Template) for item in step.call.results]
    assert len(results) - results.count(None) == (name == "then multiplied"), "no memory but for the last product"
    assert len(plan.launches) == (name in ("rows", "columns", "one row", "then multiplied")), "nothing is copied"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_the_numbers_are_those_of_eager(name, dtype):
    function, inputs, _ = PARTS[name]
    assert_same_as_eager(function, lambda: inputs(dtype), exact=False)


@pytest.mark.parametrize("name", PARTS)
def test_sizes_that_are_known_at_run_time(name):
    function, inputs, _ = PARTS[name]
    assert_same_as_eager(function, inputs, dynamic=True)


@pytest.mark.parametrize("name", ["rows", "columns", "with a bias", "then multiplied"])
def test_training(name):
    function, inputs, _ = PARTS[name]
    assert_same_as_eager(function, lambda: [each.requires_grad_() for each in inputs()], backward=True)


@quick
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_product_keeps_its_memory(name):
    function = NEAR_MISSES[name]
    assert written_in_place(plan_of(function, *flat())) == []


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_right(name):
    assert_same_as_eager(NEAR_MISSES[name], flat)


def test_only_so_many_parts_are_compared_with_each_other():
    """Products that stand too far before their copies keep their memory; all are right."""

    def function(a, b):
        return torch.cat([(a + number) @ b for number in range(MAX_PARTS_SEARCHED + 16)])

    given = [torch.randn(2, 3), torch.randn(3, 3)]
    assert 0 < len(written_in_place(plan_of(function, *given))) < MAX_PARTS_SEARCHED + 16
    assert_same_as_eager(function, lambda: given)


def test_the_plan_holds_less_than_eager():
    assert_same_as_eager(rows, lambda: [torch.randn(64, 64), torch.randn(64, 64), torch.randn(64, 64)])
    memory = ferrite.last_compile().graphs[0].memory
    assert memory.peak == 2 * 64 * 64 * 4, "the joined tensor alone"
    assert memory.peak < memory.eager


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize(
    ("columns", "dtype", "many"),
    [
        (8, torch.float32, 2),
        (24, torch.bfloat16, 2),
        (20, torch.bfloat16, 1),
        (18, torch.float32, 1),
        (17, torch.float32, 0),
        (6, torch.float32, 2),
    ],
)
def test_on_a_gpu_into_parts_that_are_aligned_or_thin(columns, dtype, many):
    """The second part begins behind so many columns, and rows are twice as long."""
    pytest.importorskip("triton")
    given = [torch.randn(32, 16), torch.randn(16, columns), torch.randn(16, columns)]

    def function(a, b, c):
        return torch.cat([a @ b, a @ c], 1)

    assert len(written_in_place(gpu_plans.plan_of(function, *(each.to(dtype) for each in given)))) == many


def test_a_concatenation_is_not_there_while_most_is_held():
    """The first product is computed before what takes most memory, and copied; without that, it is written in place."""

    def fn(a, b, x, is_large):
        first = a @ b
        between = (x @ x.t()).sum() if is_large else x.sum()
        return torch.cat([first, (a + between) @ b, b @ a, b @ b])

    a, b, x = torch.randn(32, 32), torch.randn(32, 32), torch.randn(96, 8)
    for is_large, many in ((True, 3), (False, 4)):
        plan = plan_of(lambda a, b, x, is_large=is_large: fn(a, b, x, is_large), a, b, x)
        assert len(written_in_place(plan)) == many
    assert_same_as_eager(lambda a, b, x: fn(a, b, x, True), lambda: [a.clone(), b.clone(), x.clone()])


@quick
def test_products_are_each_devices_own():
    program = gpu_plans.lowered(rows, *flat()).program
    assert with_out_products(program, "cuda") is program
    assert with_out_products(program, "cpu") is not program
