"""One call, in eager and compiled: a verdict.

    passed       equal to eager in all a caller can see, or the same kind of error
    foreign      torch itself cannot (the graph compiled by `aot_eager` differs from eager in the same way), or eager
                 gives something else each time
    uncompiled   equal, but no graph reached the compiler, even where torch is asked to capture numbers and sizes that
                 data decides
    wrong        values, types, shapes or strides differ
    no error     eager refuses what was computed
    other error  eager raises another class
    refused      eager computes what the compiled function refuses

What kills or hangs the process is for the parent to see.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from tests.lower.sweep import SEED, Reference, copied, difference, with_gradients
from tests.tables.entries import Entry, Sample
from tests.tables.layouts import laid_out

FAILURES = ("wrong", "no error", "other error", "refused")
# Memory without contents has no values to compare.
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
# Where no graph comes about, torch is asked for what it leaves out of graphs unless told otherwise.
MORE_IN_GRAPHS = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True, "allow_rnn": True}
Wrap = Callable[..., Any]


@dataclass
class Verdict:
    kind: str
    why: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES


def quiet() -> None:
    """No warnings and no logs of torch: errors are what is compared."""
    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=logging.CRITICAL)  # type: ignore[attr-defined]
    torch.set_num_threads(1)


def ours(dynamic: bool, fullgraph: bool = False) -> Wrap:
    options = {"strict": True, "cache": False, "keep_repro": False}
    return lambda fn: torch.compile(fn, backend="ferrite", options=options, dynamic=dynamic, fullgraph=fullgraph)


def theirs(dynamic: bool) -> Wrap:
    return lambda fn: torch.compile(fn, backend="aot_eager", dynamic=dynamic)


class Call:
    """A sample as a function of its tensors alone."""

    def __init__(self, sample: Sample, layout: str, backward: bool) -> None:
        leaves, self.spec = pytree.tree_flatten(sample.arguments)
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.leaves, self.sample, self.backward = leaves, sample, backward
        self.tensors = [laid_out(layout, leaves[place], turn) for turn, place in enumerate(self.places)]
        self.names_type = any(isinstance(leaf, torch.dtype) for leaf in leaves)
        self.seeds: list[torch.Tensor] = []

    def function(self, wrap: Wrap) -> Callable[..., Any]:
        """Results and, without gradients, what is in the arguments afterwards."""
        built = self.sample.build(wrap)

        def called(*tensors: torch.Tensor) -> Any:
            first, args, kwargs = self.arguments(tensors)
            return built(first, *args, **kwargs)

        return with_gradients(called, self.seeds) if self.backward else lambda *given: (called(*given), given)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """What the sample is called with, these tensors in the places of its own."""
        now = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            now[place] = tensor
        return pytree.tree_unflatten(now, self.spec)

    def elements_apart(self) -> Call:
        """The same call with arguments that no vector can be loaded from."""
        other = copy.copy(self)
        other.tensors = [laid_out("stepped", tensor, turn) for turn, tensor in enumerate(self.tensors)]
        return other

    def run(self, wrap: Wrap) -> list[Any]:
        torch.manual_seed(SEED)
        return pytree.tree_leaves(self.function(wrap)(*map(copied, self.tensors)))


def attempt(call: Call, wrap: Wrap) -> list[Any] | BaseException:
    try:
        return call.run(wrap)
    except Exception as problem:
        return problem


def judge(
    entry: Entry, sample: Sample, layout: str, way: str, when_eager_ends: Callable[[], None] = lambda: None
) -> Verdict:
    """A verdict about one call. Eager may not come back either: `when_eager_ends` tells when it has."""
    call = Call(sample, layout, way == "backward")
    eager = attempt(call, lambda fn: fn)
    when_eager_ends()
    verdict = judged(entry, call, eager, way == "dynamic")
    if verdict.kind != "uncompiled":
        return verdict
    with torch._dynamo.config.patch(MORE_IN_GRAPHS):
        return judged(entry, call, eager, way == "dynamic")


def judged(entry: Entry, call: Call, eager: Any, dynamic: bool) -> Verdict:
    counters.clear()
    torch.compiler.reset()
    found = attempt(call, ours(dynamic))
    graphs = counters["stats"]["unique_graphs"]
    verdict = compared(entry, call, found, eager)
    if verdict is None:
        return Verdict("passed" if graphs or isinstance(eager, BaseException) else "uncompiled")
    again = attempt(call, lambda fn: fn)
    if compared(entry, call, again, eager) is not None:
        return Verdict("foreign", "eager is not the same twice")
    if verdict.kind == "wrong" and entry.takes_edges:
        # Some of eager's kernels treat NaN in one way among the elements of a vector and in another in the rest of a
        # row: where ours is the latter, for all elements, neither is wrong.
        one_by_one = attempt(call.elements_apart(), lambda fn: fn)
        if compared(entry, call, found, one_by_one) is None:
            return Verdict("foreign", "eager is not the same for elements that lie apart")
    torch.compiler.reset()
    through_torch = attempt(call, theirs(dynamic))
    if is_same_difference(entry, call, found, through_torch, eager):
        return Verdict("foreign", verdict.why)
    return verdict


def is_same_difference(entry: Entry, call: Call, found: Any, through_torch: Any, eager: Any) -> bool:
    """Whether torch's own tracing explains what tells ours from eager's."""
    if isinstance(found, BaseException) and isinstance(through_torch, BaseException):
        return type(found) is type(through_torch) or cause(found) == cause(through_torch) != ""
    if isinstance(found, BaseException) or isinstance(through_torch, BaseException):
        return False
    if isinstance(eager, BaseException):
        return True
    difference = compared(entry, call, through_torch, eager)
    return difference is not None and compared(entry, call, found, through_torch) is None


def cause(problem: BaseException) -> str:
    """The class of what went wrong inside of a compiler, which ours and torch's wrap each in their own."""
    if isinstance(problem, BackendCompilerFailed):
        return type(problem.inner_exception).__name__
    lines = [line.split() for line in str(problem).splitlines()]
    return next((line[1].rstrip(":") for line in lines if line[:1] == ["because"] and len(line) > 1), "")


def compared(entry: Entry, call: Call, found: Any, eager: Any) -> Verdict | None:
    """What tells one run from another."""
    if isinstance(eager, BaseException):
        if not isinstance(found, BaseException):
            return Verdict("no error", said(eager))
        if type(found) is type(eager):
            return None
        return Verdict("other error", f"{said(found)} instead of {said(eager)}")
    if isinstance(found, BaseException):
        return Verdict("refused", said(found))
    try:
        exact = (
            None if entry.info.name in UNDEFINED else Reference(call.function(lambda fn: fn), call.tensors, call.seeds)
        )
        why = difference(found, eager, exact, call.names_type) or strides_differ(found, eager)
    except Exception as problem:
        return Verdict("wrong", f"not comparable: {said(problem)}")
    return Verdict("wrong", why) if why else None


def strides_differ(found: list[Any], eager: list[Any]) -> str | None:
    """All strides count, of sizes zero and one too: a caller can see them."""
    for place, (mine, other) in enumerate(zip(found, eager, strict=True)):
        if isinstance(other, torch.Tensor) and other.layout is torch.strided and mine.stride() != other.stride():
            return f"result {place}: strides {mine.stride()} instead of {other.stride()}"
    return None


def said(problem: BaseException) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    because = [line for line in lines if line.startswith("because")]
    return f"{type(problem).__name__}: {(because or lines or [''])[0][:160]}"
