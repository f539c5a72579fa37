"""The place of the greatest or least of many: by blocks, and equal to eager to the bit."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ferrite.ir.kernel.nodes import Accumulate, walk
from tests.compare import compile_strict
from tests.schedule.plans import plan_of

quick = pytest.mark.quick
NAN, INFINITE = float("nan"), float("inf")


def states(fn, *inputs):
    kernels = [launch.kernel for launch in plan_of(fn, *inputs).launches]
    return [
        [state.kind for item in walk(kernel.body) if isinstance(item, Accumulate) for state in item.states]
        for kernel in kernels
    ]


@quick
def test_a_row_of_many_is_looked_at_by_blocks_in_one_kernel():
    assert states(lambda x: x.argmax(-1), torch.randn(8, 4096)) == [["amax", "argmax", "argmax"]]
    assert states(lambda x: x.argmin(-1), torch.randn(8, 4096)) == [["amin", "argmin", "argmin"]]


@quick
def test_a_short_row_is_looked_at_once():
    assert states(lambda x: x.argmax(-1), torch.randn(8, 511)) == [["argmax"]]


@quick
def test_threads_share_the_blocks_of_a_whole_tensor():
    first, second = states(lambda x: x.argmax(), torch.randn(512, 512))
    assert first == ["amax"]
    assert second == ["argmax", "argmax"]


def few_numbers(*shape: int) -> torch.Tensor:
    """Every value stands at many places."""
    return torch.randint(-2, 3, shape).float()


def with_nan(*shape: int) -> torch.Tensor:
    values = few_numbers(*shape)
    values.view(-1)[:: values.numel() // 7 + 1] = NAN
    return values


def two_zeros(*shape: int) -> torch.Tensor:
    values = torch.zeros(shape)
    values.view(-1)[1::3] = -0.0
    return values


KINDS = {
    "different": torch.randn,
    "many equal": few_numbers,
    "some NaN": with_nan,
    "zeros of both signs": two_zeros,
    "all the least": lambda *shape: torch.full(shape, -INFINITE),
    "all the greatest": lambda *shape: torch.full(shape, INFINITE),
    "bytes": lambda *shape: torch.randint(0, 3, shape).to(torch.uint8),
    "bytes of zero": lambda *shape: torch.zeros(shape, dtype=torch.uint8),
    "long integers": lambda *shape: torch.randint(-(2**62), 2**62, shape),
    "bfloat16": lambda *shape: torch.randn(shape).bfloat16(),
}
# The last block may begin inside the one before: 1031 is prime. Columns are as long as rows.
SHAPES = {"rows": (3, 1031), "columns": (1031, 5), "planes": (9, 12, 20), "vocabulary": (2, 50_257)}


def places(x):
    return x.argmax(), x.argmin(), x.argmax(-1), x.argmin(0), *x.max(0), *x.min(-1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_first_place_wins_as_in_eager(kind, shape):
    x = kind(*shape)
    for expected, found in zip(places(x), compile_strict(places)(x), strict=True):
        assert torch.equal(expected.nan_to_num(7), found.nan_to_num(7))
        assert torch.equal(expected.signbit(), found.signbit())


def test_a_window_of_the_least_has_its_first_place():
    x = torch.full((1, 2, 6, 6), -INFINITE)
    x[0, 1, 3, 3] = 1

    def pooled(x):
        return F.max_pool2d(x, 3, 2, 1, return_indices=True)

    for expected, found in zip(pooled(x), compile_strict(pooled)(x), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_windows_in_half_precision_are_ordered_as_numbers(dtype):
    x = torch.randn(2, 3, 9, 17).to(dtype).requires_grad_()

    def pooled(x):
        return F.max_pool2d(x, 3, 2, 1, return_indices=True)

    compiled = compile_strict(pooled)
    for expected, found in zip(pooled(x), compiled(x), strict=True):
        assert torch.equal(expected, found)
    grads = [torch.autograd.grad(fn(x)[0].float().square().sum(), x)[0] for fn in (pooled, compiled)]
    assert torch.equal(*grads)
