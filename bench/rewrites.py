"""What each pass of the pre-grad stage gains, on a piece of a model where it should: `python -m bench.passes rewrites`.

Each case is a graph as Dynamo captures it, spelled as the stage spells it. It runs as it is, and after the one pass,
both in eager, turn by turn in one process. Below 1 the rewritten graph is faster. With `--compiled` it runs as ferrite
compiles it, without the one pass and with it: what other stages do as well, or kernels, is then no gain any more. Then
there are pieces, too, for those passes after autograd whose forms are mostly left to the option `kernel_rewrites`.

"Fires" is whether the pass did anything by itself: under the default options, or with `compress="auto"` for
compressions. Where it did not, the figures are with the option that asks for it, and should not be below 1. So each
pass has a case in which it pays, and one that is left where there is a choice. Weights of a frozen case are constants,
joined once. "Others" is the share of the machine that other processes had meanwhile.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import ferrite
from bench.measure import interleaved, others_share, ratio, undisturbed
from bench.pieces import AFTER_AUTOGRAD, PIECES, Piece
from ferrite.options import Options
from ferrite.passes import PIPELINES, PRE_GRAD, pre_grad_passes

Call = Callable[[], object]


def captured(piece: Piece, inputs: list[torch.Tensor]) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """The graph of a piece, and its inputs in the order in which the graph takes them."""
    torch.compiler.reset()
    found: list[tuple[torch.fx.GraphModule, list[torch.Tensor]]] = []

    def keep(gm: torch.fx.GraphModule, given: list[Any]) -> Any:
        found.append((gm, list(given)))
        return gm.forward

    torch.compile(piece.function, backend=keep, fullgraph=True, dynamic=False)(*inputs)
    ((gm, order),) = found
    return gm, order


def staged(piece: Piece, gm: torch.fx.GraphModule, inputs: list[torch.Tensor], *skip: str, **options: Any) -> Any:
    """The graph after the stage without any pass that is not needed to read it, but for the one that is measured."""
    kept = {*NEEDED, *piece.beside, piece.step}
    names = [name for step in PRE_GRAD.passes for name in step.names or (step.name,)]
    others = [name for name in names if name not in kept]
    return pre_grad_passes(copy.deepcopy(gm), inputs, Options(**{**IN_EAGER, **options}, skip=(*others, *skip)))


def before_and_after(piece: Piece, gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> tuple[Any, Any, str]:
    """The graph without the pass and with it, and whether it fires by itself, only if asked, or not."""
    before = staged(piece, gm, inputs, piece.step, **piece.by_itself)
    for how, options in (("yes", piece.by_itself), ("asked", {**piece.by_itself, **piece.options})):
        after = staged(piece, gm, inputs, **options)
        if str(after.graph) != str(before.graph):
            return before, after, how
    return before, after, "no"


def with_constants(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
    """A graph in which all that depends on parameters alone is computed once, as freezing does."""
    places = zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)
    known: dict[torch.fx.Node, Any] = {node: value for node, value in places if isinstance(value, torch.nn.Parameter)}
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.all_input_nodes and known.keys() >= set(node.all_input_nodes):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
            gm.register_buffer(f"constant_{node.name}", known[node])
            with gm.graph.inserting_before(node):
                node.replace_all_uses_with(gm.graph.get_attr(f"constant_{node.name}"))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


IN_EAGER = {"strict": True, "executor": "calls"}
# The form in which passes read a graph, and the closing ones; they change how calls are spelled, not which there are.
NEEDED = frozenset(
    {"numpy_compat_normalization", "normalize_node_kwargs_pass", "normalization_pass", "torch_spelling"}
    | {"stack_to_unsqueeze_pass", "unsqueeze_to_stack_pass"}
)


def one_call(forward: Callable[..., Any], inputs: list[torch.Tensor], training: bool) -> Call:
    def call() -> None:
        results = forward(*inputs)
        if training:
            torch.autograd.grad(sum(result.sum() for result in results), inputs)
        if inputs[0].is_cuda:
            torch.cuda.synchronize()

    return call


def calls_in_eager(piece: Piece, inputs: list[torch.Tensor], training: bool) -> tuple[dict[str, Call], str]:
    gm, inputs = captured(piece, inputs)
    before, after, how = before_and_after(piece, gm, inputs)
    if piece.frozen:
        before, after = with_constants(before, inputs), with_constants(after, inputs)
    graphs = {"before": before, "after": after}
    return {name: one_call(graph.forward, inputs, training) for name, graph in graphs.items()}, how


def rules_of(step: str) -> set[str]:
    return {rule.name for pipeline in PIPELINES for each in pipeline.passes if each.name == step for rule in each.rules}


def calls_compiled(piece: Piece, inputs: list[torch.Tensor], training: bool) -> tuple[dict[str, Call], str]:
    rules = rules_of(piece.step)

    def compiled(**options: Any) -> tuple[Call, bool]:
        torch.compiler.reset()
        function = ferrite.compile(piece.function, dynamic=False, **{**piece.by_itself, **options})
        call = one_call(lambda *args: results_of(function(*args)), inputs, training)
        call()
        return call, not rules.isdisjoint(ferrite.last_compile().rewrites)

    before, _ = compiled(skip=(piece.step,))
    for how, options in (("yes", {}), ("asked", piece.options)):
        after, fired = compiled(**options)
        if fired:
            return {"before": before, "after": after}, how
    return {"before": before, "after": after}, "no"


def results_of(found: Any) -> Any:
    return found if isinstance(found, (list, tuple)) else (found,)


def measured(calls: dict[str, Call], rounds: int) -> tuple[dict[str, list[float]], float]:
    return others_share(lambda: interleaved(calls, rounds, clock=time.thread_time))


def rows(rounds: int, device: str, only: str = "", compiled: bool = False, busy: bool = False) -> Iterator[str]:
    """`busy`: others use the machine. Then it is the CPU time of the one thread that torch has."""
    yield "| pass | piece of a model | fires | kind | without, µs | with to without | others |"
    yield "|---|---|---|---|---|---|---|"
    for piece in (*PIECES, *(AFTER_AUTOGRAD if compiled else ())):
        for training in piece.kinds() if only in piece.step else ():
            with torch.set_grad_enabled(training):
                make = calls_compiled if compiled else calls_in_eager
                calls, how = make(piece, piece.inputs(training, device), training)
                seconds, others = measured(calls, rounds) if busy else undisturbed(calls, rounds)
            middle, low, high = ratio(seconds["after"], seconds["before"])
            kind = "training" if training else "inference"
            micros = statistics.median(seconds["before"]) * 1e6
            yield (
                f"| {piece.step} | {piece.what} | {how} | {kind} | {micros:.0f} | "
                f"{middle:.2f} ({low:.2f} to {high:.2f}) | {others:.0%} |"
            )
