"""`ferrite.explain(model, *args)`: what became of a model, in one screen, and what to try next.

It compiles the model, runs it a few times, with a profiler once, and says: graphs, and where they break; kernels beside
calls of torch; what takes the time; the three things that promise most.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ferrite import api
from ferrite.capture import torch_api, torch_dynamo
from ferrite.debug import CompileRecord, kernel_names, recent_compiles
from ferrite.diagnosis.bisect import differentiate, seconds_of
from ferrite.errors import ModelLine
from ferrite.runtime import wait_for_gpus

MAX_SHARES = 6  # that are shown
MAX_ADVICE = 3
PROFILED_CALLS = 3
WITHOUT_TRACES_OF_ITS_OWN = ("KINETO_LOG_LEVEL", "6")  # torch's profiler would say when it begins and ends
BFLOAT16_FEATURES = {"+avx512bf16", "+amx-bf16", "+bf16"}  # of x86 and of ARM, as LLVM names them
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "linear")


@dataclass(frozen=True)
class Share:
    """What takes time: a kernel or an operator of torch, its seconds in one call, and the line it comes from."""

    what: str
    kind: str
    seconds: float
    line: str = ""


@dataclass(frozen=True)
class Explanation:
    """Printing it is its purpose; the rest is the same as data. Seconds are of one call: in eager, compiled, and the
    first one, which compiles. `breaks`: where Dynamo began another graph, and why."""

    records: tuple[CompileRecord, ...]
    breaks: tuple[tuple[str, ModelLine | None], ...]
    eager: float
    compiled: float
    first: float
    shares: tuple[Share, ...]
    advice: tuple[str, ...] = field(default=())
    train: bool = False

    @property
    def around(self) -> float:
        """Seconds of a call outside of kernels and operators: guards, allocation, Python."""
        return max(0.0, self.compiled - sum(share.seconds for share in self.shares))

    @property
    def whole(self) -> float:
        """Seconds that shares are parts of: one call, or what it came to under the profiler, where that is more."""
        return max(self.compiled, sum(share.seconds for share in self.shares), 1e-9)

    def __str__(self) -> str:
        graphs = [graph for record in self.records for graph in record.graphs]
        kernels, calls = sum(len(each.kernels) for each in graphs), sum(len(each.eager_calls) for each in graphs)
        kinds = ", ".join(f"{sum(each.kind == kind for each in graphs)} {kind}" for kind in unique_kinds(graphs))
        step = "a step, with gradients" if self.train else "a call"
        rows = [
            f"graphs      {len(graphs)} ({kinds}), {kernels} kernels, {calls} calls of torch",
            f"time        {step}: {milliseconds(self.compiled)} compiled, {milliseconds(self.eager)} in eager "
            f"({self.eager / self.compiled:.2f} times as fast)",
            f"            the first call: {self.first:.2f} s",
        ]
        for place, (reason, line) in enumerate(self.breaks):
            rows.append(f"{'breaks' if not place else '':<11} {reason}  ({line})")
        if not self.breaks:
            rows.append("breaks      none")
        for graph in graphs:
            if graph.failure is not None:
                rows.append(f"in eager    {graph.failure}")
        rows.append("what takes the time")
        around = Share("around them: guards, memory, Python", "", self.around)
        for share in [*self.shares[:MAX_SHARES], around]:
            part = share.seconds / self.whole
            rows.append(
                f"  {part:5.0%}  {milliseconds(share.seconds):>10}  {share.kind:<6} {share.what:<44.44} {share.line}"
            )
        rows.append("to try")
        rows += [f"  {place}. {text}" for place, text in enumerate(self.advice, 1)] or ["  nothing that we know of"]
        return "\n".join(row[:118].rstrip() if not row.startswith("  ") else row.rstrip() for row in rows)


def explain(
    model: Callable[..., Any], *args: Any, mode: str | None = None, dynamic: bool | None = None, **options: Any
) -> Explanation:
    """Compile a model with these options, run it on these arguments a few times, and tell what became of it. With
    gradients on, and results that need some, its backward is run too. The model and its gradients stay as they are."""
    own = copy.deepcopy(model) if isinstance(model, torch.nn.Module) else model
    breaks = torch_dynamo.graph_breaks_of(own, args)
    torch.compiler.reset()
    before = recent_compiles()
    compiled = api.compile(own, mode=mode, dynamic=dynamic, **options)
    start = time.perf_counter()
    outputs = torch_api.tree_leaves(compiled(*args))
    train = torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in outputs)
    if train:
        differentiate(outputs)
    first = time.perf_counter() - start
    grad = torch.is_grad_enabled()
    seconds, eager = seconds_of(compiled, args, grad), seconds_of(own, args, grad)
    records = tuple(record for record in recent_compiles() if record not in before)
    shares = measured(compiled, args, train, records)
    found = Explanation(records, tuple(breaks), eager, seconds, first, tuple(shares), train=train)
    advice = sorted(advice_for(found, own, outputs), reverse=True)
    return Explanation(**{**vars(found), "advice": tuple(text for _gain, text in advice[:MAX_ADVICE])})


# --- what takes the time ----------------------------------------------------------------------------------------------


def measured(
    compiled: Callable[..., Any], args: Sequence[Any], train: bool, records: Sequence[CompileRecord]
) -> list[Share]:
    """Kernels and operators of torch by their time in one call, longest first. Kernels are known by their ranges."""
    kernels = {
        f"{name}  ({line})" if line else name: (name, line)
        for record in records
        for graph in record.graphs
        for name, line in kernel_names(graph.kernels)
    }
    os.environ.setdefault(*WITHOUT_TRACES_OF_ITS_OWN)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else [])]
    for calls in (1, PROFILED_CALLS):  # the first one loads what profilers look at
        with profile(activities=activities) as profiler:
            for _ in range(calls):
                outputs = torch_api.tree_leaves(compiled(*args))
                if train:
                    differentiate(outputs)
            wait_for_gpus()
    found: dict[tuple[str, str, str], float] = {}
    for event in profiler.events() or ():
        parent = event.cpu_parent
        if event.name in kernels:
            name, line = kernels[event.name]
            key = (name, "kernel", line)
        elif event.name.startswith("aten::") and parent is not None and looks_like_line(parent.name):
            key = (event.name.removeprefix("aten::"), "torch", parent.name)
        else:
            continue
        found[key] = found.get(key, 0.0) + max(event.cpu_time_total, getattr(event, "device_time_total", 0.0)) * 1e-6
    shares = [Share(what, kind, seconds / PROFILED_CALLS, line) for (what, kind, line), seconds in found.items()]
    return sorted(shares, key=lambda share: -share.seconds)


def looks_like_line(name: str) -> bool:
    """Whether a range is a line of the model: `net.py:12  h = torch.relu(x)`."""
    place = name.partition("  ")[0]
    return place.rpartition(":")[2].isdecimal() and ".py" in place


# --- what to try ------------------------------------------------------------------------------------------------------


def advice_for(found: Explanation, model: Any, outputs: Sequence[Any]) -> list[tuple[float, str]]:
    """What may help, with a guess of the share of the time that it is about."""
    advice: list[tuple[float, str]] = []
    graphs = [graph for record in found.records for graph in record.graphs]
    for reason, line in found.breaks[:1]:
        advice.append((0.5, f"one graph in place of {len(found.records)}: {line} breaks it ({reason})"))
    for graph in graphs:
        if graph.failure is not None:
            advice.append(
                (1.0, "a stage failed, and a graph runs in eager: the warning names the command that narrows it")
            )
    if found.compiled > 1.1 * found.eager:
        advice.append((0.9, "it is slower than eager: python -m ferrite bisect MODULE:NAME ARG ... --slow says why"))
    on_gpu = any(isinstance(each, torch.Tensor) and each.is_cuda for each in outputs)
    around = found.around / found.whole
    if around > 0.3:
        way = (
            'mode="reduce-overhead" replays it as CUDA graphs'
            if on_gpu
            else "a larger batch, or a larger part compiled"
        )
        advice.append((around, f"{around:.0%} of the time is outside of kernels: {way}"))
    is_module = isinstance(model, torch.nn.Module)
    if is_module and not found.train and not model.training and not any(r.options.freeze for r in found.records):
        advice.append((0.35, "for inference, weights as constants: ferrite.freeze(model) under torch.no_grad()"))
    if found.train and is_module and not model.training:
        advice.append(
            (0.6, "the model is in eval mode, but gradients are on: torch.no_grad() saves what only backward needs")
        )
    return advice + advice_on_calls(found, outputs, on_gpu)


def advice_on_calls(found: Explanation, outputs: Sequence[Any], on_gpu: bool) -> list[tuple[float, str]]:
    advice: list[tuple[float, str]] = []
    total = found.whole
    products = sum(share.seconds for share in found.shares if share.kind == "torch" and share.what in PRODUCTS) / total
    narrow = any(isinstance(each, torch.Tensor) and each.dtype is torch.float32 for each in outputs)
    if products > 0.4 and narrow and (on_gpu or computes_in_bfloat16()):
        way = "torch.set_float32_matmul_precision('high'), or bfloat16" if on_gpu else "bfloat16"
        advice.append((0.5 * products, f"{products:.0%} of the time is products in float32: {way}"))
    if products > 0.3 and on_gpu:
        advice.append((0.4 * products, 'products measured against kernels of our own: mode="max-autotune"'))
    reasons = {
        call.operator.removeprefix("aten.").partition(".")[0]: call for r in found.records for call in r.eager_calls
    }
    for share in found.shares[:MAX_SHARES]:
        call = reasons.get(share.what)
        if share.kind == "torch" and share.what not in PRODUCTS and call is not None and share.seconds > 0.1 * total:
            advice.append((share.seconds / total, f"{share.what} is torch's own: {call.reason}  ({call.line})"))
    slowest = max(
        (share for share in found.shares if share.kind == "kernel"), key=lambda each: each.seconds, default=None
    )
    if slowest is not None and slowest.seconds > 0.3 * total:
        text = f"the kernel {slowest.what} takes most: its source and neighbours are in the dump (FERRITE_DUMP=dir)"
        advice.append((0.1, text))
    return advice


def computes_in_bfloat16() -> bool:
    """Whether this processor multiplies matrices of bfloat16 by itself: on others they take far longer than float32."""
    try:
        from ferrite.codegen.llvm import host_processor

        features = host_processor().features.split(",")
    except Exception:  # without LLVM
        return False
    return not BFLOAT16_FEATURES.isdisjoint(features)


def unique_kinds(graphs: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(graph.kind for graph in graphs))


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds < 1 else f"{seconds:.2f} s"
