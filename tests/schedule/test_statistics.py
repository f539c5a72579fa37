"""Means and squared deviations of many elements: memory is read once, in pieces that the cache holds."""

from __future__ import annotations

import pytest
import torch

from ferrite.ir.expr import Load
from ferrite.ir.kernel.nodes import Loop, nodes_in, walk
from tests.compare import assert_no_farther, compile_strict
from tests.schedule.plans import extent, plan_of

quick = pytest.mark.quick


def readers_of_input(plan):
    """Kernels that read 32-bit floats; all between the input and the result are wider."""
    statements = [list(walk(launch.kernel.body)) for launch in plan.launches]
    loads = [[node for item in body for node in nodes_in(item) if isinstance(node, Load)] for body in statements]
    return sum(any(load.dtype == torch.float32 for load in each) for each in loads)


@quick
def test_the_variance_of_all_reads_memory_once():
    plan = plan_of(lambda x: x.var(), torch.randn(512, 512))
    assert len(plan.launches) == 2
    assert readers_of_input(plan) == 1
    (pieces,) = (item for item in plan.launches[0].kernel.body if isinstance(item, Loop))
    assert (pieces.kind, extent(pieces)) == ("parallel", 512 * 512 // 8192)


@quick
@pytest.mark.parametrize(
    ("shape", "dims", "count"),
    [
        ((100, 100), None, 1),  # few elements: threads need not share them
        ((128, 512), 1, 1),  # many results: threads share those
        ((512, 40), 0, 1),  # results side by side, few elements
        ((8209, 8), None, 4),  # a prime: no equal pieces that the cache holds
    ],
)
def test_other_variances_are_not_cut(shape, dims, count):
    plan = plan_of(lambda x: x.var() if dims is None else x.var(dims), torch.randn(shape))
    assert len(plan.launches) == count


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda x: x.var(), (300, 400)),
        (lambda x: torch.var_mean(x, correction=0), (1 << 16,)),
        (lambda x: torch.std_mean(x, (0, 2)), (6, 5, 30000)),
        (lambda x: x.var(), (8209, 8)),
    ],
)
def test_they_are_as_exact_as_eager(fn, shape, offset):
    torch.manual_seed(0)
    x = torch.randn(shape) + offset
    found = [each if isinstance(each, tuple) else (each,) for each in (compile_strict(fn)(x), fn(x), fn(x.double()))]
    for mine, theirs, exact in zip(*found, strict=True):
        assert_no_farther(mine, theirs, exact, "a statistic")


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_special_values_spread_as_in_eager(special):
    x = torch.randn(1 << 16)
    x[12345] = special
    (variance, mean), (theirs, _) = compile_strict(torch.var_mean)(x), torch.var_mean(x)
    assert variance.isnan()
    assert theirs.isnan()
    # eager's mean is not a number wherever it goes on after an infinity: what its own mean gives is meant here
    torch.testing.assert_close(mean, x.mean(), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(40, 3), (40, 7), (6, 768), (3, 100, 77)])
def test_of_equal_numbers_the_deviations_are_zero(shape, dtype):
    """A sum of equal numbers is rounded, and so is a mean made of it: the deviations tell by how much. Divided by the
    root of no more than `eps` they would be seen."""

    def fn(x):
        return torch.nn.functional.layer_norm(x, x.shape[-1:]), torch.nn.functional.group_norm(x, x.shape[1])

    torch.manual_seed(0)
    x = torch.randn(*shape[:-1], 1, dtype=dtype).expand(shape).contiguous()
    normalised, in_groups = compile_strict(fn)(x)
    assert torch.count_nonzero(normalised) == 0
    if len(shape) == 3:  # a group is a row
        assert torch.count_nonzero(in_groups) == 0


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 3e38])
def test_means_of_what_is_infinite_stay_so(number):
    def fn(x):
        return torch.var_mean(x, -1), torch.nn.functional.layer_norm(x, x.shape[-1:])

    x = torch.arange(24.0).reshape(4, 6)
    x[1, -1] = number
    (variance, mean), result = compile_strict(fn)(x)
    (expected_variance, expected_mean), expected = fn(x)
    if number == 3e38:  # whose variance is infinite: eager's normalised row is no number with AVX, and zero with NEON
        expected[1] = (x[1] - expected_mean[1]) * expected_variance[1].rsqrt()
    torch.testing.assert_close((variance, mean, result), (expected_variance, expected_mean, expected), equal_nan=True)
