"""Several calls in one compiled function: what passes so needs no compile of its own, up to 3.5 times as dear.

Each call has tensors of its own and is compared with what eager makes of it alone. All of them are one graph
(`fullgraph=True`). A call that differs here, that eager refuses or that no graph can hold has no verdict: it is judged
alone, as `judge` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.lower.sweep import SEED, copied
from tests.tables.entries import Entry, Sample
from tests.tables.judge import MORE_IN_GRAPHS, Call, Verdict, attempt, compared, judge, ours

# Guards of symbolic sizes grow faster than the calls.
AT_ONCE = {"static": 12, "backward": 10, "in place": 10, "dynamic": 4}


def judge_together(chosen: Sequence[tuple[Entry, Sample, str]], way: str) -> list[Verdict | None]:
    """A verdict for each entry's sample in its layout; None where it has to be judged alone."""
    found: list[Verdict | None] = [None] * len(chosen)
    if len(chosen) < 2 or way not in AT_ONCE:
        return found
    calls = [Call(sample, layout, way == "backward") for _, sample, layout in chosen]
    eager = [attempt(call, lambda fn: fn) for call in calls]
    good = [
        place
        for place, result in enumerate(eager)
        if chosen[place][0].kind != "optimizer" and not isinstance(result, BaseException)
    ]

    def settle(places: list[int]) -> None:
        """Where one call is refused, or has no graph, the others are tried in halves."""
        if len(places) < 2:
            return
        results = run_together([calls[place] for place in places], way)
        if results is None:
            settle(places[: len(places) // 2])
            settle(places[len(places) // 2 :])
            return
        for place, result in zip(places, results, strict=True):
            if compared(chosen[place][0], calls[place], result, eager[place]) is None:
                found[place] = Verdict("passed")

    for start in range(0, len(good), AT_ONCE[way]):
        settle(good[start : start + AT_ONCE[way]])
    return found


def verdicts(chosen: Sequence[tuple[Entry, Sample, str]], way: str) -> list[Verdict]:
    """A verdict for each, together or alone."""
    found: list[Verdict | None] = []
    for start in range(0, len(chosen), AT_ONCE.get(way, 1)):
        found += judge_together(chosen[start : start + AT_ONCE.get(way, 1)], way)
    return [verdict or judge(*call, way) for verdict, call in zip(found, chosen, strict=True)]


def run_together(calls: Sequence[Call], way: str) -> list[list[Any]] | None:
    """Each call's results as it would have them alone; None where there is an error, as for what no graph can hold."""
    torch.compiler.reset()
    torch.manual_seed(SEED)
    functions = [call.sample.build(lambda fn: fn) for call in calls]

    def all_of(arguments: list[Any]) -> list[Any]:
        return [
            function(first, *args, **kwargs)
            for function, (first, args, kwargs) in zip(functions, arguments, strict=True)
        ]

    given = [[copied(tensor) for tensor in call.tensors] for call in calls]
    arguments = [call.arguments(own) for call, own in zip(calls, given, strict=True)]
    try:
        with torch._dynamo.config.patch(MORE_IN_GRAPHS):
            results = ours(way == "dynamic", fullgraph=True)(all_of)(arguments)
        if way == "backward":
            return gradients(results, given, calls)
    except Exception:
        return None
    return [pytree.tree_leaves(pair) for pair in zip(results, given, strict=True)]


def gradients(results: list[Any], given: list[list[torch.Tensor]], calls: Sequence[Call]) -> list[list[Any]]:
    """As `with_gradients` gives them, for all calls by one backward."""
    outputs = [[leaf for leaf in pytree.tree_leaves(each) if isinstance(leaf, torch.Tensor)] for each in results]
    wanted = [[leaf for leaf in each if leaf.requires_grad] for each in outputs]
    seeds = [
        seed.to(leaf.device, leaf.dtype)
        for call, leaves in zip(calls, wanted, strict=True)
        for seed, leaf in zip(call.seeds, leaves, strict=True)
    ]
    inputs = [[tensor for tensor in own if tensor.requires_grad] for own in given]
    of, by = itertools.chain.from_iterable(wanted), itertools.chain.from_iterable(inputs)
    flat = iter(torch.autograd.grad(list(of), list(by), seeds, allow_unused=True))
    return [
        [*mine, *([next(flat) for _ in own] if leaves else [])]
        for mine, leaves, own in zip(outputs, wanted, inputs, strict=True)
    ]
