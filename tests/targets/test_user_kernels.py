"""Triton kernels of the user's in compiled functions, on a GPU that is simulated: one step each, with what it reads and
writes, in recordings and in the cache, with our kernels around it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

import ferrite
from ferrite.capture.user_kernels import LaunchedKernel
from tests.targets.test_cuda_target import gpu  # noqa: F401  # a fixture

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.interpreter import InterpretedFunction

SCALE = tl.constexpr(3.0)


@triton.jit
def scaled_sum(x, y, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, inside) + SCALE * tl.load(y + at, inside), inside)


@triton.jit
def doubled_in_place(x, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, at < count), at < count)


tuned_sum = triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32}, num_warps=2)], key=["count"])(
    scaled_sum
)
guessed_sum = triton.heuristics({"BLOCK": lambda given: 32})(scaled_sum)


def plain(x, y):
    out = torch.empty_like(x)
    scaled_sum[(triton.cdiv(x.numel(), 32),)](x, y, out, x.numel(), BLOCK=32)
    return out


def with_warps(x, y):
    out = torch.empty_like(x)
    scaled_sum[(triton.cdiv(x.numel(), 32),)](x, y, out, x.numel(), BLOCK=32, num_warps=2)
    return out


def tuned(x, y):
    out = torch.empty_like(x)
    tuned_sum[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel())
    return out


def guessed(x, y):
    out = torch.empty_like(x)
    guessed_sum[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel())
    return out


@torch.library.triton_op("ferrite_tests::triton_sum", mutates_args={})
def triton_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.library.wrap_triton(scaled_sum)[(triton.cdiv(x.numel(), 32),)](x, y, out, x.numel(), BLOCK=32)
    return out


class Driver:
    """What Triton asks of a driver to make code for a GPU that is not there."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


class Launches:
    """Runs launches in Triton's interpreter. `kept`: what was launched: a name, a grid, what it writes."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, ...]] = []

    def run(self, launched: LaunchedKernel, grids, descriptors, given):
        from ferrite.codegen.triton.run import _mode

        kernel, named = launched.kernel, {**launched.constants, **given}
        assert not descriptors
        if hasattr(kernel, "configs"):  # it takes the last one
            from ferrite.capture.user_kernels import grid_by_config

            named |= kernel.configs[-1].kwargs
            grids = [grids[0] if len(grids) == 1 else grid_by_config(kernel.configs, grids)(named)]
        while hasattr(kernel, "values"):
            named |= {name: made(named) for name, made in kernel.values.items()}
            kernel = kernel.fn
        while not isinstance(kernel, triton.JITFunction):
            kernel = kernel.fn
        self.kept.append((launched.name, grids[0], launched.writes))
        with _mode(True):
            InterpretedFunction(kernel.fn)[grids[0]](**named)


@pytest.fixture
def launches(gpu, monkeypatch):  # noqa: F811
    found = Launches()
    monkeypatch.setattr(LaunchedKernel, "__call__", lambda self, *given: found.run(self, *given))
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    return found


def compiled(function, **more):
    return torch.compile(function, backend="ferrite", options={"strict": True, **more}, fullgraph=True)


@pytest.mark.parametrize("function", [plain, with_warps, tuned, guessed, lambda x, y: triton_sum(x, y)])
def test_a_kernel_is_one_step_between_ours(launches, gpu, function):  # noqa: F811
    def model(x, y):
        return function(x.tanh() * 2, y + 1).relu() + x

    x, y = torch.randn(50), torch.randn(50)
    f = compiled(model)
    for _ in range(2):
        torch.testing.assert_close(f(x, y), torch.relu(x.tanh() * 2 + 3 * (y + 1)) + x)
    assert launches.kept == [("scaled_sum", (2, 1, 1), ("out",))] * 2
    (graph,) = ferrite.last_compile().graphs
    assert graph.source.count("scaled_sum(") == 1
    assert "clone" not in graph.source, "it writes what nobody needs the old contents of"
    assert len(ferrite.last_compile().kernels) == 2, "what comes before it, and what comes after it"


def test_a_kernel_writes_to_an_input(launches):
    def model(x, y):
        doubled_in_place[(2,)](x, x.numel(), BLOCK=32)
        return x + y

    x, y = torch.randn(50), torch.randn(50)
    wanted = 2 * x
    result = compiled(model)(x, y)
    torch.testing.assert_close(x, wanted)
    torch.testing.assert_close(result, wanted + y)


def test_what_was_read_before_a_kernel_wrote_is_what_it_was(launches):
    def model(x):
        before, work = x * 3, x.tanh()
        again = work.exp()
        doubled_in_place[(2,)](work, work.numel(), BLOCK=32)
        return before, again, work

    x = torch.randn(50)
    for found, wanted in zip(compiled(model)(x), (x * 3, x.tanh().exp(), 2 * x.tanh()), strict=True):
        torch.testing.assert_close(found, wanted)


def test_sizes_that_vary(launches):
    f = torch.compile(plain, backend="ferrite", options={"strict": True}, fullgraph=True, dynamic=True)
    for size in (50, 70, 200):
        x, y = torch.randn(size), torch.randn(size)
        torch.testing.assert_close(f(x, y), x + 3 * y)
    assert [grid for _name, grid, _writes in launches.kept] == [(2, 1, 1), (3, 1, 1), (7, 1, 1)]


def test_a_kernel_is_part_of_a_recording(launches, gpu):  # noqa: F811
    def model(x, y):
        return torch.relu(plain(x * 2, y).softmax(-1) @ y)

    f = torch.compile(model, backend="ferrite", options={"strict": True, "cuda_graphs": True})
    for place in range(4):
        x, y = torch.randn(50), torch.randn(50)
        torch.testing.assert_close(f(x, y), torch.relu((2 * x + 3 * y).softmax(-1) @ y))
        assert gpu.graphs.replayed == place
    assert ferrite.last_compile().not_recorded == ()


def test_a_program_with_a_kernel_is_kept(launches, tmp_path):
    """Numbers of kernels are those of a process: whoever finds the program launches his own."""
    x, y = torch.randn(50), torch.randn(50)
    outcomes = []
    for _ in range(2):
        torch.compiler.reset()
        torch.testing.assert_close(compiled(plain, cache=True, cache_dir=tmp_path)(x, y), x + 3 * y)
        outcomes.append(ferrite.last_compile().cache[-1].result)

    @triton.jit
    def scaled_sum(x, y, out, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, at < count) - tl.load(y + at, at < count), at < count)

    def other(x, y):
        out = torch.empty_like(x)
        scaled_sum[(triton.cdiv(x.numel(), 32),)](x, y, out, x.numel(), BLOCK=32)
        return out

    torch.compiler.reset()
    torch.testing.assert_close(compiled(other, cache=True, cache_dir=tmp_path)(x, y), x - y)
    assert outcomes == ["miss", "hit"]


def test_without_a_gpu_the_error_is_tritons(monkeypatch, fresh_compiler):
    x, y = torch.randn(50), torch.randn(50)
    with pytest.raises(RuntimeError) as eager:
        plain(x, y)
    with pytest.raises(RuntimeError) as found:
        torch.compile(plain, backend="ferrite")(x, y)
    assert str(eager.value) in str(found.value)


@pytest.mark.quick
def test_the_grid_of_the_configuration_that_runs():
    from ferrite.capture.user_kernels import grid_by_config

    grid = grid_by_config(tuned_sum.configs, [(4, 1, 1), (2, 1, 1)])
    assert grid({"BLOCK": 32, "count": 50}) == (2, 1, 1)
    assert grid({"BLOCK": 16}) == (4, 1, 1)
    with pytest.raises(ValueError, match="not there"):
        grid({"BLOCK": 64})
