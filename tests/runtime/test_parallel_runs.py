"""Kernels that share a parallel region give what they give one after the other: whoever calls them, with any team."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

import ferrite
from ferrite.lower.graph import lower_module
from ferrite.schedule.steps import Run
from ferrite.targets import executable_of
from ferrite.targets.cpu import CPU
from tests.children import in_child
from tests.compare import compile_strict, reset
from tests.executables import function_of, plan_of
from tests.lower.lowered import traced
from tests.threads import in_threads

Tensor = torch.Tensor
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
SIZES = [64 * 2 ** (place % 7) + place for place in range(30)]
COUNT = len(SIZES)


def step(parameters: list[Tensor], gradients: list[Tensor], momenta: list[Tensor]) -> None:
    """An optimizer's, in place."""
    torch._foreach_mul_(momenta, 0.9)
    torch._foreach_add_(momenta, gradients)
    torch._foreach_addcdiv_(parameters, momenta, torch._foreach_exp(torch._foreach_sin(gradients)), -0.1)


def flat(*tensors: Tensor) -> list[Tensor]:
    step(*(list(tensors[at : at + COUNT]) for at in range(0, 3 * COUNT, COUNT)))
    return []


def state(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for _ in range(3) for size in SIZES]


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="module")
def compiled() -> Callable[[list[Tensor]], None]:
    """By pieces: Dynamo compiles anew when the number of threads changes."""
    lowered = lower_module(traced(flat, *state()))
    plan = plan_of(lowered.program)
    (run,) = (each for each in plan.steps if isinstance(each, Run))
    assert [(item.first, item.count) for item in run.parallel_regions] == [(0, COUNT)]
    loaded = function_of(plan, lowered.objects)
    return lambda tensors: loaded(list(tensors)) and None


def stepped(compiled: Callable[[list[Tensor]], None], threads: int, seed: int = 0, steps: int = 3) -> list[Tensor]:
    torch.set_num_threads(threads)
    tensors = state(seed)
    for _ in range(steps):
        compiled(tensors)
    return tensors


def same(ours: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, others))


def test_values_do_not_depend_on_the_team(compiled: Callable[[list[Tensor]], None]) -> None:
    alone = stepped(compiled, 1)
    eager = state()
    for _ in range(3):
        flat(*eager)
    for ours, theirs in zip(alone, eager, strict=True):
        torch.testing.assert_close(ours, theirs)
    for threads in (2, 3, 4):
        for _ in range(20):
            assert same(stepped(compiled, threads), alone)


@linux
def test_the_kernels_are_shared_by_a_team(compiled: Callable[[list[Tensor]], None]) -> None:
    def work() -> bool:
        torch.set_num_threads(1)
        before = len(os.listdir("/proc/self/task"))
        stepped(compiled, 1)
        assert len(os.listdir("/proc/self/task")) == before
        stepped(compiled, 3)
        return len(os.listdir("/proc/self/task")) == before + 2

    assert in_threads([work]) == [True]  # a new thread has no team yet


def test_many_threads_have_regions_of_their_own(compiled: Callable[[list[Tensor]], None]) -> None:
    expected = [stepped(compiled, 1, seed) for seed in range(8)]

    def work(seed: int) -> bool:
        return all(same(stepped(compiled, 1 + (seed + turn) % 3, seed), expected[seed]) for turn in range(5))

    assert all(in_threads([lambda seed=seed: work(seed) for seed in range(8)]))


@linux
def test_a_child_of_a_fork_has_a_team_of_its_own(compiled: Callable[[list[Tensor]], None]) -> None:
    expected = stepped(compiled, 2)

    def work() -> str:
        before = len(os.listdir("/proc/self/task"))
        right = same(stepped(compiled, 2), expected)
        return f"{right} {len(os.listdir('/proc/self/task')) > before}"

    for _ in range(2):
        assert in_child(work) == "True True"
        assert same(stepped(compiled, 2), expected)


@pytest.mark.usefixtures("artifact_cache", "llvm_kernels")
def test_one_sees_what_runs_together() -> None:
    """In the record and in the host program; of what is compiled, and of what comes out of the cache."""
    results = []
    for outcome in ("miss", "hit"):
        reset()
        tensors = state()
        run = compile_strict(step, dynamic=False)
        run(*(tensors[at : at + COUNT] for at in range(0, 3 * COUNT, COUNT)))
        (graph,) = ferrite.last_compile().graphs
        assert [each.result for each in ferrite.last_compile().cache] == [outcome]
        assert [kernel.region for kernel in graph.kernels] == [0] * COUNT
        assert f"# kernels 0 to {COUNT - 1} of run_0: together, one thread each" in graph.source
        results.append(tensors)
    assert same(*results)


def test_the_text_is_silent_where_kernels_run_in_turn() -> None:
    plan = plan_of(lower_module(traced(lambda x: (x - x.sum()).exp(), torch.randn(50))).program)
    text = executable_of(plan, {"cpu": CPU}).source.text
    assert "together" not in text
    assert plan.regions == [None] * len(plan.launches)
