"""Depthwise convolutions are loops, forward and backward; all others are calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import ferrite
from ferrite.lower.ops import convolution
from ferrite.machines import NEOVERSE_N1, XEON
from tests.compare import assert_same_as_eager, compile_strict
from tests.lower.lowered import INTERPRETER

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch):
    """As on Arm, and with oneDNN, which torch switches off for good where a product in half precision fails in it: what
    is left to torch because of that is another question."""
    monkeypatch.setattr(convolution, "host_machine", lambda: NEOVERSE_N1)
    with torch.backends.mkldnn.flags(enabled=True):
        yield


def inputs(
    *sizes: int, kernel: tuple[int, ...] = (3, 3), dtype: torch.dtype = torch.float32, last: bool = False
) -> Callable[[], list[Any]]:
    def make() -> list[Any]:
        x = torch.randn(sizes).to(dtype)
        if last:
            x = x.contiguous(memory_format=LAST[x.dim()])
        channels = sizes[1]
        weight, bias = torch.randn(channels, 1, *kernel).to(dtype), torch.randn(channels).to(dtype)
        return [each.requires_grad_() for each in (x, weight, bias)]

    return make


def depthwise(**how: Any) -> Callable[..., Any]:
    def fn(x: Any, weight: Any, bias: Any) -> Any:
        convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
        return convolve(x, weight, bias, groups=x.shape[1], **how)

    return fn


CASES: dict[str, tuple[Callable[..., Any], Callable[[], list[Any]]]] = {
    "plain": (depthwise(), inputs(2, 5, 9, 8)),
    "padded": (depthwise(padding=1), inputs(2, 5, 9, 8)),
    "in steps": (depthwise(padding=1, stride=2), inputs(2, 5, 9, 8)),
    "in uneven steps": (depthwise(padding=(0, 2), stride=(3, 2)), inputs(2, 5, 10, 9)),
    "dilated": (depthwise(padding=2, dilation=2), inputs(2, 5, 9, 8)),
    "dilated, in steps": (depthwise(padding=(4, 1), dilation=(3, 2), stride=2), inputs(1, 4, 11, 9)),
    "edges wider than the window": (depthwise(padding=4), inputs(1, 3, 5, 4)),
    "seven by seven": (depthwise(padding=3), inputs(2, 4, 12, 11, kernel=(7, 7))),
    "one by one": (depthwise(), inputs(2, 4, 6, 5, kernel=(1, 1))),
    "a line": (depthwise(padding=1), inputs(3, 4, 21, kernel=(5,))),
    "a volume": (depthwise(padding=1, stride=2), inputs(1, 3, 5, 6, 7, kernel=(3, 3, 2))),
    "one channel": (depthwise(padding=1), inputs(2, 1, 9, 8)),
    "no bias": (lambda x, w, b: F.conv2d(x, w, None, padding=1, groups=5) * b[:, None, None], inputs(2, 5, 9, 8)),
    "in the middle": (
        lambda x, w, b: F.silu(F.conv2d(F.relu6(x * 2), w, b, padding=1, groups=5)) + x,
        inputs(2, 5, 9, 8),
    ),
    "channels last": (depthwise(padding=1), inputs(2, 5, 9, 8, last=True)),
    "channels last, in steps": (depthwise(padding=1, stride=2), inputs(2, 5, 9, 8, last=True)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("executor", ["native", pytest.param("interpreter", marks=pytest.mark.slow)])
def test_values_and_gradients_are_eager_s(name, executor):
    fn, make = CASES[name]
    assert_same_as_eager(fn, make, backward=True, terms=9.0, options=INTERPRETER if executor == "interpreter" else {})
    calls = ferrite.last_compile().eager_calls
    assert all("channels last" in name and "backward" not in call.operator for call in calls)


@pytest.mark.parametrize("kernel", [5, 7])
def test_large_windows_are_loops_wherever_channels_lie(kernel):
    assert_same_as_eager(depthwise(padding=3), inputs(2, 5, 12, 11, kernel=(kernel, kernel), last=True), terms=49.0)
    assert len(ferrite.last_compile().eager_calls) == (kernel < 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_types(dtype):
    assert_same_as_eager(depthwise(padding=1), inputs(2, 5, 9, 8, dtype=dtype), backward=True, terms=9.0)
    assert not ferrite.last_compile().eager_calls


def test_only_what_is_wanted_is_computed():
    def frozen() -> list[Any]:
        x, weight, bias = inputs(2, 5, 9, 8)()
        return [x, weight.detach(), bias.detach()]

    assert_same_as_eager(depthwise(padding=1), frozen, backward=True, options={"partition": "save-all"})
    forward, backward = ferrite.last_compile().graphs
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert [kernel.operators for kernel in backward.kernels] == [("convolution_backward",)]


def test_symbolic_sizes():
    def fn(x: Any, weight: Any, bias: Any) -> Any:
        return F.conv2d(x, weight, bias, padding=1, stride=2, groups=6)

    compiled = compile_strict(fn, dynamic=True)
    for sizes in ((2, 6, 13, 10), (1, 6, 7, 20), (5, 6, 4, 5)):
        given = inputs(*sizes)()
        for parameter in given[1:]:
            torch._dynamo.mark_static(parameter)
        torch.testing.assert_close(compiled(*given), fn(*given))
    assert not ferrite.last_compile().eager_calls


NEAR_MISSES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "two channels of each": (lambda x, w: F.conv2d(x, w, groups=4), ((2, 4, 9, 8), (8, 1, 3, 3))),
    "groups of two": (lambda x, w: F.conv2d(x, w, groups=2), ((2, 4, 9, 8), (4, 2, 3, 3))),
    "all channels": (F.conv2d, ((2, 4, 9, 8), (4, 4, 3, 3))),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, groups=4), ((2, 4, 9, 8), (4, 1, 3, 3))),
    "a large window": (lambda x, w: F.conv2d(x, w, groups=4), ((1, 4, 12, 12), (4, 1, 9, 9))),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_others_are_calls(name):
    fn, shapes = NEAR_MISSES[name]
    assert_same_as_eager(
        fn, lambda: [torch.randn(shape).requires_grad_() for shape in shapes], backward=True, terms=9.0
    )
    assert len(ferrite.last_compile().eager_calls) == 2


@pytest.mark.parametrize(
    ("last", "kernel", "stride", "called"),
    [(False, 3, 1, []), (False, 3, 2, ["convolution", "convolution_backward"]), (True, 7, 1, ["convolution"])],
)
def test_what_torch_does_as_fast_is_left_to_it(monkeypatch, last, kernel, stride, called):
    monkeypatch.setattr(convolution, "host_machine", lambda: XEON)
    make = inputs(1, 4, 14, 14, kernel=(kernel, kernel), last=last)
    assert_same_as_eager(depthwise(padding=1, stride=stride), make, backward=True, terms=9.0)
    assert [call.operator.split(".")[1] for call in ferrite.last_compile().eager_calls] == called


def test_gradients_without_one_dnn_have_strides_of_their_own():
    with torch.backends.mkldnn.flags(enabled=False):
        assert_same_as_eager(depthwise(padding=1), inputs(2, 5, 9, 8, last=True), backward=True, terms=9.0)
    assert [call.operator.split(".")[1] for call in ferrite.last_compile().eager_calls] == [
        "convolution",
        "convolution_backward",
    ]
