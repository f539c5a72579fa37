"""One graph with several configurations, compiled to be timed: nothing of it is kept, and no user sees it.

All kernels are compiled at once, by Triton's worker processes. A result is compared with the reference before its time
counts. The cache of the GPU is emptied before each call, as in a model others have filled it meanwhile.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ferrite.codegen import named_objects, verify_host
from ferrite.errors import Refusal, RefusedKernels
from ferrite.lower import lower_module
from ferrite.runtime import load_host, run_in_eager
from ferrite.schedule import Plan, make_plan
from ferrite.schedule.gpu import Tuned
from ferrite.targets.cuda import CudaTarget
from ferrite.targets.executable import UncompiledOperations, executable_of, runs_of

Trial = Callable[..., Any]
MIN_ROUNDS, MAX_ROUNDS, MICROSECONDS = 5, 30, 3000.0  # of one trial
CACHES_WRITTEN = 10  # that are written through to empty one: it takes longer than the host does for a call


def compiled_trials(gm: torch.fx.GraphModule, target: CudaTarget, tuned: Sequence[Tuned]) -> list[Trial | Refusal]:
    """A function for each table of configurations; or why there is none."""
    targets = {"cuda": target}
    lowered = lower_module(gm, kernels_on=targets)
    plans = [make_plan(lowered.program, {"cuda": replace(target.scheduling, tuned=each)}) for each in tuned]
    kernels = dict.fromkeys(launch.kernel for plan in plans for launch in plan.launches)
    with contextlib.suppress(RefusedKernels):  # which of them it is, is seen below
        target.compiled(list(kernels))

    def loaded(plan: Plan) -> Trial | Refusal:
        try:
            executable = executable_of(plan, targets)
        except UncompiledOperations as problem:
            return Refusal(str(problem))
        source = verify_host(executable.source, lowered.objects)
        objects = named_objects(source, lowered.objects)
        run = load_host(source, runs_of(executable, targets), objects, in_eager=run_in_eager(gm))
        return lambda *given: run(list(given))

    return [loaded(plan) for plan in plans]


def reason_against(
    results: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], far: Sequence[float]
) -> Refusal | None:
    """Why results are not what they should be: farther from the exact ones than eager's are, by `far` at most, and some
    units of their type. None where they are right."""
    for result, right, allowed in zip(results, exact, far, strict=True):
        if (result.isnan() != right.isnan()).any():
            return Refusal("other elements are no numbers")
        away = farthest(result, right)
        unit = torch.finfo(result.dtype).eps * right.abs().max().item()
        if away > 2 * allowed + unit:
            return Refusal(f"it is {away:.3g} away, and torch {allowed:.3g}")
    return None


def farthest(result: torch.Tensor, right: torch.Tensor) -> float:
    return (result.to(right.dtype) - right).abs().max().item()


class Stopwatch:
    """Times functions on the current GPU."""

    def __init__(self) -> None:
        size = CACHES_WRITTEN * torch.cuda.get_device_properties().L2_cache_size
        self.other = torch.empty(size, dtype=torch.int8, device="cuda")

    def microseconds(self, function: Trial, *given: Any) -> float:
        """The median, of more rounds where they are short."""
        function(*given)
        first = self.times(function, given, MIN_ROUNDS)
        rounds = min(int(MICROSECONDS / max(min(first), 1.0)), MAX_ROUNDS)
        return statistics.median(first if rounds <= MIN_ROUNDS else self.times(function, given, rounds))

    def times(self, function: Trial, given: Sequence[Any], rounds: int) -> list[float]:
        events = []
        for _ in range(rounds):
            self.other.zero_()
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            function(*given)
            pair[1].record()
            events.append(pair)
        torch.cuda.synchronize()
        return [1000 * begin.elapsed_time(end) for begin, end in events]
