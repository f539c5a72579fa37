"""Resampling as loop programs, with its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.compare import compile_strict
from tests.lower.lowered import eager_calls, kinds, program_of, programs_of

MODES = ["nearest", "nearest-exact", "bilinear", "bicubic"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(8, 10), (6, 3), pytest.param((7, 11), marks=pytest.mark.slow)])
def test_resampling_and_its_gradient(mode, size):
    # weights are sums of a few products: as exact as eager's, but rounded in another order
    def fn(a):
        return F.interpolate(a, size=size, mode=mode)

    a = torch.randn(1, 1, 4, 5, dtype=torch.float64)
    forward, backward = programs_of(fn, a.requires_grad_(), grad=True)
    assert not eager_calls(forward)
    assert not eager_calls(backward)
    compiled = torch.compile(fn, backend="ferrite", options={"strict": True, "executor": "interpreter"})
    for function in (fn, compiled):
        a.grad = None
        function(a).sin().sum().backward()
        if function is fn:
            expected = torch.clone(a.grad)
    torch.testing.assert_close(a.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("executor", ["interpreter", "native"])
@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize("size", [(3, 9), (11, 4), (1, 1)])
def test_antialiased_resampling_weighs_windows_as_wide_as_the_scale(size, corners, executor):
    """What lies beside a window counts nothing, even if it is infinite."""

    def fn(a):
        return F.interpolate(a, size, mode="bilinear", antialias=True, align_corners=corners)

    a = torch.randn(2, 3, 5, 17)
    a[0, 1, 4, 16] = float("inf")
    (program,) = programs_of(fn, a)
    assert not eager_calls(program)
    compiled = torch.compile(fn, backend="ferrite", options={"strict": True, "executor": executor})
    torch.testing.assert_close(compiled(a), fn(a), rtol=1e-5, atol=1e-6, equal_nan=True)
    channels_last = a.to(memory_format=torch.channels_last)
    assert compiled(channels_last).stride() == fn(channels_last).stride()


@pytest.mark.parametrize("mode", ["linear", "trilinear"])
@pytest.mark.parametrize("corners", [True, False])
def test_linear_resampling_in_one_and_three_dimensions(mode, corners):
    sizes = (2, 3, 5) if mode == "linear" else (1, 2, 3, 4, 5)
    fn = lambda a: F.interpolate(a, scale_factor=1.7, mode=mode, align_corners=corners)  # noqa: E731
    assert not eager_calls(program_of(fn, torch.randn(*sizes)))


def test_whole_factors_repeat_elements_without_computing_places():
    program = program_of(lambda a: F.interpolate(a, scale_factor=3) + 1, torch.randn(1, 2, 4, 5))
    assert kinds(program) == ["compute"]
    assert "data(" not in str(program)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_resampling_symbolic_sizes(mode):
    fn = lambda a: F.interpolate(a, scale_factor=2.0, mode=mode)  # noqa: E731
    assert not eager_calls(program_of(fn, torch.randn(1, 2, 5, 6), dynamic=True))


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_sampling_at_a_grid(mode, padding):
    fn = lambda a, grid: F.grid_sample(a, grid, mode=mode, padding_mode=padding, align_corners=False)  # noqa: E731
    program = program_of(fn, torch.randn(2, 3, 5, 6), torch.rand(2, 4, 3, 2) * 3 - 1.5)
    assert kinds(program) == ["compute"]


@pytest.mark.parametrize("count", [0, 1])
def test_whole_numbers_are_sampled_as_in_eager(count):
    """Eager has no kernel for them, which shows where there are some."""
    given = torch.ones(count, 1, 3, 3, dtype=torch.int32), torch.zeros(count, 2, 2, 2, dtype=torch.int32)
    fn = compile_strict(lambda x, grid: F.grid_sample(x, grid, align_corners=False))
    if count:
        with pytest.raises(NotImplementedError, match="not implemented for 'Int'"):
            fn(*given)
    else:
        assert fn(*given).dtype == torch.int32
