"""Which blocks make flex attention fastest on this GPU: every kernel of it with each of some blocks, one by one.

    python -m bench.attention_blocks [--only PATTERN ..] [--width 64 128] [--way result rows keys] [--seconds 150]

`result`: forward; `rows` and `keys`: gradients of rows and of keys, each with the sums that both need. Microseconds
between two events, with the cache of the GPU emptied before each, medians; a result that is farther than some units of
its type from that of the blocks of the machine is none. The fastest are to be `ferrite/machines/gpu_attention.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd

from bench.flex_attention import CASES, Case, call_of, inputs_of
from ferrite.codegen import RefusedKernels, named_objects, verify_host
from ferrite.errors import Refusal
from ferrite.lower import LoweredProgram, lower_module
from ferrite.machines import AttentionBlocks, AttentionMachine, GpuMachine
from ferrite.runtime import load_host, run_in_eager
from ferrite.runtime.cuda import workers
from ferrite.schedule import Plan, make_plan
from ferrite.targets.cuda import CUDA
from ferrite.targets.executable import UncompiledOperations, executable_of, runs_of
from ferrite.targets.trials import Stopwatch

WAYS = ("result", "rows", "keys")
MIN_COSINE = 0.9995  # between results of different blocks


@dataclass
class Graph:
    """One direction of a case, what it is given, and a function for each arrangement of blocks."""

    case: str
    width: int
    way: str
    gm: torch.fx.GraphModule
    given: list[Any] = field(default_factory=list)
    plans: dict[AttentionBlocks, Plan] = field(default_factory=dict)
    lowered: LoweredProgram | None = None

    @property
    def label(self) -> str:
        return f"{self.width} {self.case}, {self.way}"


def blocks_to_try(width: int, way: str) -> Iterator[AttentionBlocks]:
    """Those of the machine first."""
    yield CUDA.scheduling.machine.attention.blocks(2, width, way != "result", way == "keys")
    sides = ((128, 128), (128, 64), (128, 32), (64, 128), (64, 64), (64, 32))
    for (outer, inner), warps, stages in itertools.product(sides, (4, 8), (2, 3, 4)):
        rows_of_a_warp = outer // warps
        if rows_of_a_warp < 16 or (stages * inner + outer) * width * 4 > 220 << 10:
            continue
        if stages == 4 and inner == 128:
            continue
        # of scores and sums, two of them where gradients of keys are made, a thread has so many
        held = outer * (2 * inner + (2 if way == "keys" else 1) * width) // (32 * warps)
        if held <= 400:
            yield AttentionBlocks(outer, inner, warps, stages)


def machine_with(blocks: AttentionBlocks) -> GpuMachine:
    table = ((256, blocks),)
    return replace(CUDA.scheduling.machine, attention=AttentionMachine(table, table, table, table))


def plan_of(graph: Graph, blocks: AttentionBlocks) -> Plan:
    if graph.lowered is None:
        graph.lowered = lower_module(graph.gm, kernels_on={"cuda"}, attention_on={"cuda"})
    return make_plan(graph.lowered.program, {"cuda": replace(CUDA.scheduling, machine=machine_with(blocks))})


def loaded(graph: Graph, plan: Plan) -> Callable[..., Any] | Refusal:
    targets = {"cuda": CUDA}
    try:
        executable = executable_of(plan, targets)
    except UncompiledOperations as problem:
        return Refusal(str(problem))
    assert graph.lowered is not None
    source = verify_host(executable.source, graph.lowered.objects)
    objects = named_objects(source, graph.lowered.objects)
    run = load_host(source, runs_of(executable, targets), objects, in_eager=run_in_eager(graph.gm))
    return lambda *given: run(list(given))


def captured(case: Case, sizes: tuple[int, int, int, int], ways: Sequence[str]) -> list[Graph]:
    """The graphs of both directions, as they are when they run."""
    found: list[Graph] = []
    width = sizes[-1]

    def compile_graph(gm: torch.fx.GraphModule, inputs: Any, backward: bool) -> Callable[..., Any]:
        graphs = [Graph(case.name, width, way, gm) for way in (WAYS[1:] if backward else WAYS[:1])]
        for one in graphs:
            one.gm = only_outputs(gm, {"result": None, "rows": slice(0, 1), "keys": slice(1, 3)}[one.way])
        whole = Graph(case.name, width, "whole", gm)
        function = loaded(whole, plan_of(whole, next(blocks_to_try(width, "result"))))
        assert not isinstance(function, Refusal), function
        found.extend(graphs)

        def run(given: list[Any]) -> Any:
            values = [each.detach() if isinstance(each, torch.Tensor) else each for each in given]
            for one in graphs:
                one.given = list(values)
            with torch.no_grad():
                return function(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    torch.manual_seed(0)
    torch.compiler.reset()
    forward, backward = (lambda gm, i: compile_graph(gm, i, False)), (lambda gm, i: compile_graph(gm, i, True))
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    function = torch.compile(call_of(case, sizes[2], sizes[1]), backend=backend, fullgraph=True, dynamic=False)
    given = [each.requires_grad_() for each in inputs_of(case, *sizes)]
    out = function(*given)
    if set(ways) & set(WAYS[1:]):
        torch.autograd.grad(out, given, torch.randn_like(out))
    return [each for each in found if each.way in ways]


def only_outputs(gm: torch.fx.GraphModule, which: slice | None) -> torch.fx.GraphModule:
    """A graph of some of the first three outputs."""
    if which is None:
        return gm
    gm = copy.deepcopy(gm)
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (tuple(output.args[0][:3][which]),)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def differs(results: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> str:
    for mine, right in zip(results[:2], reference[:2], strict=False):
        one, other = (each.float().flatten().nan_to_num(0.0, 0.0, 0.0) for each in (mine, right))
        cosine = float(torch.dot(one, other) / (one.norm() * other.norm()).clamp_min(1e-30))
        if not cosine > MIN_COSINE:
            return f"wrong ({cosine:.5f})"
    return ""


def line_of(graph: Graph, times: dict[AttentionBlocks, float], first: AttentionBlocks, most: int = 6) -> str:
    best = sorted(times, key=times.__getitem__)[:most]
    cells = [f"{times[each]:.0f} ({each.outer}x{each.inner} w{each.warps} s{each.stages})" for each in best]
    now = f"now {times[first]:.0f}" if first in times else "now: none"
    return f"| {graph.label} | {now} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["none", "causal", "relative bias"])
    parser.add_argument("--width", nargs="*", type=int, default=[64, 128])
    parser.add_argument("--way", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--workers", type=int, default=15)
    chosen = parser.parse_args()
    began = time.perf_counter()
    warnings.filterwarnings("ignore")
    workers.MAX_WORKERS = chosen.workers
    graphs: list[Graph] = []
    for case, width in itertools.product((each for each in CASES if each.name in chosen.only), chosen.width):
        graphs += captured(case, (chosen.batch, chosen.heads, chosen.length, width), chosen.way)
        print(f"captured {case.name} {width}: {time.perf_counter() - began:.0f} s", flush=True)
    graphs.sort(key=lambda each: WAYS.index(each.way))
    watch = Stopwatch()
    for way in chosen.way:
        some = [each for each in graphs if each.way == way]
        for graph in some:
            every = dict.fromkeys(blocks_to_try(graph.width, graph.way))
            graph.plans = {blocks: plan_of(graph, blocks) for blocks in every}
        kernels = dict.fromkeys(x.kernel for each in some for plan in each.plans.values() for x in plan.launches)
        with contextlib.suppress(RefusedKernels):
            CUDA.compiled(list(kernels))
        print(f"{way}: {len(kernels)} kernels compiled: {time.perf_counter() - began:.0f} s", flush=True)
        for graph in some:
            times, reference, refused = dict[AttentionBlocks, float](), None, []
            with torch.no_grad():
                for blocks, plan in graph.plans.items():
                    if time.perf_counter() - began > chosen.seconds:
                        print("no time for more")
                        break
                    try:
                        trial = loaded(graph, plan)
                        if isinstance(trial, Refusal):
                            refused.append(f"{blocks}: {trial.reason[:60]}")
                            continue
                        results = [each.clone() for each in trial(*graph.given) if isinstance(each, torch.Tensor)]
                    except RefusedKernels:
                        refused.append(f"{blocks}: refused")
                        continue
                    reference = results if reference is None else reference
                    problem = differs(results, reference)
                    if problem:
                        refused.append(f"{blocks}: {problem}")
                        continue
                    times[blocks] = watch.microseconds(trial, *graph.given)
            if times:
                print(line_of(graph, times, next(iter(graph.plans))), flush=True)
            for each in refused:
                print(f"    {each}", flush=True)


if __name__ == "__main__":
    main()
