"""Compiled, a convolution whose windows do not overlap is a product, forward and backward: torch's are not called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import ferrite
from ferrite.capture import gradients_of_pointwise_weights_lie_as_images
from tests.compare import assert_same_as_eager, compile_strict, reset


@pytest.fixture(autouse=True)
def with_one_dnn():
    """Which torch switches off for good where a product in half precision fails in it."""
    with torch.backends.mkldnn.flags(enabled=True):
        yield


CONVOLVE = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def given(*shapes: tuple[int, ...], last: bool = False, frozen: tuple[int, ...] = ()) -> Callable[[], list[Any]]:
    """Image, weight and bias; `frozen`: those without gradient."""

    def make() -> list[Any]:
        tensors = [torch.randn(shape) for shape in (*shapes, (shapes[1][0],))]
        if last:
            tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last)
        return [tensor.requires_grad_(place not in frozen) for place, tensor in enumerate(tensors)]

    return make


def convolution(step: int = 1) -> Callable[..., Any]:
    return lambda x, weight, bias: CONVOLVE[x.dim()](x, weight, bias, stride=step)


def in_the_middle(x: Any, weight: Any, bias: Any) -> Any:
    return F.relu(F.conv2d(F.silu(x), weight, bias)).mean((2, 3))


CASES: dict[str, tuple[Callable[..., Any], Callable[[], list[Any]]]] = {
    "one by one": (convolution(), given((1, 64, 32, 32), (32, 64, 1, 1))),
    "a batch": (convolution(), given((3, 64, 20, 20), (32, 64, 1, 1))),
    "a batch, more weights than places": (convolution(), given((3, 160, 6, 6), (128, 160, 1, 1))),
    "every other place": (convolution(2), given((2, 64, 43, 42), (64, 64, 1, 1))),
    "patches": (convolution(4), given((1, 16, 64, 64), (32, 16, 4, 4))),
    "patches, and a rest": (convolution(4), given((2, 16, 66, 67), (32, 16, 4, 4))),
    "patches, channels last": (convolution(4), given((2, 16, 66, 67), (32, 16, 4, 4), last=True)),
    "a line": (convolution(), given((2, 64, 700), (64, 64, 1))),
    "a volume": (convolution(2), given((1, 16, 16, 16, 17), (32, 16, 2, 2, 2))),
    "in the middle": (in_the_middle, given((2, 64, 32, 32), (32, 64, 1, 1))),
    "the image has no gradient": (convolution(4), given((1, 16, 64, 64), (32, 16, 4, 4), frozen=(0,))),
    "the weight has no gradient": (convolution(), given((1, 64, 32, 32), (32, 64, 1, 1), frozen=(1, 2))),
}


def called() -> set[str]:
    return {call.operator.split(".")[1] for call in ferrite.last_compile().eager_calls}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_eager_s(name):
    fn, make = CASES[name]
    assert_same_as_eager(fn, make, backward=True, terms=64.0, options={"own_products": "off"})
    assert set() < called() <= {"mm", "bmm"}


def test_where_channels_are_last_only_gradients_are_products():
    assert_same_as_eager(convolution(), given((2, 64, 32, 32), (32, 64, 1, 1), last=True), backward=True, terms=64.0)
    assert called() == where_channels_are_last()


def where_channels_are_last() -> set[str]:
    """Torch 2.11 gives the gradient of the weight strides of its own."""
    return {"convolution", "mm" if gradients_of_pointwise_weights_lie_as_images() else "convolution_backward"}


@pytest.mark.parametrize("last", [False, True])
def test_sizes_known_at_run_time(last):
    reset()
    fn = convolution()
    compiled = compile_strict(fn, dynamic=True)
    for sizes in ((2, 64, 33, 40), (5, 64, 50, 21)):
        x, weight, bias = given(sizes, (64, 64, 1, 1), last=last)()
        for parameter in (weight, bias):
            torch._dynamo.mark_static(parameter)
        result, expected = compiled(x, weight, bias), fn(x, weight, bias)
        assert result.stride() == expected.stride()
        grads, wanted = (torch.autograd.grad(y.square().mean(), (x, weight, bias)) for y in (result, expected))
        torch.testing.assert_close((result, *grads), (expected, *wanted), rtol=1e-4, atol=1e-5)
    assert called() == (where_channels_are_last() if last else {"bmm"})


def test_gradients_without_one_dnn_have_strides_of_their_own():
    with torch.backends.mkldnn.flags(enabled=False):
        assert_same_as_eager(
            convolution(), given((2, 64, 32, 32), (32, 64, 1, 1), last=True), backward=True, terms=64.0
        )
    assert called() == {"convolution", "convolution_backward"}


def test_strict_numerics_leave_it_to_torch():
    fn, make = CASES["one by one"]
    assert_same_as_eager(fn, make, backward=True, options={"numerics": "strict"})
    assert called() == {"convolution", "convolution_backward"}


def test_two_convolutions_have_one_kernel_between_them():
    """It reads channels side by side and writes them so: no copy of its own."""

    def fn(x: Any, first: Any, second: Any) -> Any:
        return F.conv2d(F.relu(F.conv2d(x, first, padding=1)), second, padding=1)

    shapes = (1, 16, 32, 32), (16, 16, 3, 3), (16, 16, 3, 3)
    torchs = {"own_convolutions": "off"}
    assert_same_as_eager(fn, lambda: [*map(torch.randn, shapes)], terms=144.0, options=torchs)
    record = ferrite.last_compile()
    assert record.rewrites["convolution_channels_last"] == 2
    assert len(record.kernels) == 3  # before, between and behind
