"""AOTAutograd: functionalise, decompose, differentiate, partition, and hand each resulting graph to a compiler.

The caller's `compile_graph` sees one kind of object, whatever the direction. AOTAutograd's own wrappers around the
result copy mutated inputs back, regenerate aliases, unwrap subclasses and carry random states and effect tokens; the
graphs only see plain tensors and numbers.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ferrite.capture import size_facts, torch_api, torch_state
from ferrite.capture.assumed_numbers import check_assumed_numbers
from ferrite.capture.decompositions import decompositions
from ferrite.capture.forgotten_strides import ForgottenStrides
from ferrite.capture.parameters import Parameter, Parameters
from ferrite.capture.saved_tensors import SavedTensors
from ferrite.capture.torch_api import BoxedCallable
from ferrite.capture.unused_random import keep_unused_random
from ferrite.capture.user_kernels import note_user_kernels
from ferrite.capture.written_inputs import view_written_inputs
from ferrite.capture.written_layouts import keep_written_layouts
from ferrite.graph import WRITTEN_AFTER, Storage, fake_value, innermost_first, input_storages, mode_of, storages_of
from ferrite.options import Options

Strides = tuple[int | torch.SymInt, ...]
Layout = tuple[Strides, Strides]  # sizes and strides


class GraphKind(enum.Enum):
    INFERENCE = "inference"
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class CapturedGraph:
    """One functional ATen graph, and what is known about its inputs and outputs by position.

    `static_inputs` keep their address from call to call. `donated_inputs` belong to the graph alone. `output_strides`
    holds eager's strides for every output that the user sees, None for the others. `parameters` are the tensors behind
    inputs that are state of a module; known only where they are to be frozen.
    """

    kind: GraphKind
    gm: torch.fx.GraphModule
    static_inputs: frozenset[int]
    donated_inputs: frozenset[int]
    output_strides: tuple[Strides | None, ...]
    parameters: Mapping[int, Parameter] = field(default_factory=dict)


CompileGraph = Callable[[CapturedGraph], BoxedCallable]
Partition = Callable[..., torch_api.Parts]


def capture(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_graph: CompileGraph,
    options: Options,
    around_partition: Callable[[Partition], Partition] = lambda partition: partition,
) -> Callable[..., Any]:
    """Trace `gm`, compile its forward or inference graph now and its backward graph when it is first needed.

    `around_partition` lets the caller observe the split of a joint graph.
    """
    with_views = view_written_inputs(gm, example_inputs)
    check_assumed_numbers(gm)
    keep_written_layouts(gm)
    without_extra = keep_unused_random(gm)
    eager_layouts = user_output_layouts(gm)
    subclasses = [index for index, value in enumerate(example_inputs) if torch_api.is_plain_subclass(value)]
    # Without gradients, and only there: otherwise a parameter may be differentiated.
    parameters = Parameters(gm, example_inputs) if options.freeze and not torch.is_grad_enabled() else None
    saved, forgotten = SavedTensors(), ForgottenStrides()

    def compiler(kind: GraphKind) -> Callable[..., BoxedCallable]:
        def compile_one(graph: torch.fx.GraphModule, _inputs: Sequence[Any]) -> BoxedCallable:
            described = describe(kind, graph, eager_layouts)
            if parameters is not None and kind is GraphKind.INFERENCE:
                described = replace(described, parameters=parameters.behind(graph))
            detached = detached_outputs(graph) if kind is GraphKind.FORWARD else ()
            compiled = detaching(compile_graph(described), detached)
            if kind is GraphKind.FORWARD:
                return forgotten.noting(saved.saving(compiled), graph)
            return saved.using(compiled, described.donated_inputs)

        return compile_one

    partition = torch_api.min_cut_partition if options.partition == "min-cut" else torch_api.save_all_partition
    compiled = torch_api.aot_autograd(
        gm,
        example_inputs,
        forward=compiler(GraphKind.FORWARD),
        backward=compiler(GraphKind.BACKWARD),
        inference=compiler(GraphKind.INFERENCE),
        partition=around_partition(partition),
        decompositions=decompositions(options.decompose),
    )
    compiled = forgotten.restoring(compiled)
    compiled = unwrapping_subclasses(compiled, subclasses)
    compiled = compiled if without_extra is None else without_extra(compiled)
    return compiled if with_views is None else with_views(compiled)


def detached_outputs(gm: torch.fx.GraphModule) -> tuple[int, ...]:
    """Positions of outputs that have no gradient, in the memory of one that has: `y, y.detach()[1:]`.

    A view of a tensor that gets a gradient gets one, too, and nothing in a graph tells a view that was detached.
    """
    output = gm.graph.output_node()
    results: Any = output.args[0]
    plain = [position for position, result in enumerate(results) if isinstance(result, torch.fx.Node)]
    without = [position for position in plain if torch_api.has_no_gradient(output, position)]
    if not without:
        return ()
    others = [results[position] for position in plain if position not in without]
    taken = frozenset[Storage]().union(*map(storages_of, others))
    return tuple(position for position in without if not taken.isdisjoint(storages_of(results[position])))


def detaching(function: BoxedCallable, positions: Sequence[int]) -> BoxedCallable:
    if not positions:
        return function

    def call(args: list[Any]) -> Any:
        results = list(function(args))
        for position in positions:
            results[position] = results[position].detach()
        return results

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def unwrapping_subclasses(function: Callable[..., Any], positions: Sequence[int]) -> Callable[..., Any]:
    """Hand over inputs of plain subclasses (a type of one's own over ordinary storage) as the tensors they are.

    What such a type overrides has been traced already; below that, its elements are all there is.
    """
    if not positions:
        return function

    def call(*args: Any) -> Any:
        plain = list(args)
        for index in positions:
            plain[index] = plain[index].as_subclass(torch.Tensor)
        return function(*plain)

    return call


def complete_drawn_again(gm: torch.fx.GraphModule) -> None:
    """Values of the calls that the partitioner puts around random operators of a checkpoint, which it leaves out."""
    saving, drawing = torch.ops.higher_order.run_and_save_rng_state, torch.ops.higher_order.run_with_rng_state
    for graph in (each.graph for each in innermost_first(gm)):
        for node in graph.find_nodes(op="call_function", target=saving):
            if fake_value(node) is None:
                operator, *args = node.args
                states = (fake_value(user) for user in node.users if user.args[1] == 0)
                complete(node, (next(states, None), result_of(node, operator, args)))
        for node in graph.find_nodes(op="call_function", target=drawing):
            if fake_value(node) is None:
                _, operator, *args = node.args
                complete(node, result_of(node, operator, args))


def result_of(node: torch.fx.Node, operator: Any, args: Sequence[Any]) -> Any:
    """What an operator makes of arguments of a node that calls it."""
    mode: Any = mode_of(node.graph)
    with mode:
        return operator(*torch.fx.node.map_arg(args, fake_value), **torch.fx.node.map_arg(node.kwargs, fake_value))


def complete(node: torch.fx.Node, value: Any) -> None:
    """Give a node its value, and its parts theirs, where they have none."""
    node.meta["val"] = value
    if isinstance(value, (tuple, list)):
        for user in node.users:
            if fake_value(user) is None:
                place: Any = user.args[1]
                complete(user, value[place])


def describe(kind: GraphKind, gm: torch.fx.GraphModule, eager_layouts: Sequence[Layout | None]) -> CapturedGraph:
    complete_drawn_again(gm)
    note_user_kernels(gm)
    static: Sequence[int] = ()
    donated: Sequence[int] = ()
    output = gm.graph.output_node()
    results = output.args[0]
    strides: tuple[Strides | None, ...] = (None,) * len(results)  # type: ignore[arg-type]
    if kind is GraphKind.BACKWARD:
        donated = torch_api.donated_input_indices()
    else:
        static = torch_api.static_input_indices()
        wanted = functools.partial(strides_at, output, eager_layouts)
        strides = tuple(wanted(position) for position in range(len(strides)))
    return CapturedGraph(kind, gm, frozenset(static), frozenset(donated), strides)


def strides_at(output: torch.fx.Node, eager_layouts: Sequence[Layout | None], position: int) -> Strides | None:
    """Eager's strides of one output. Numbers that data decides have other names in the graph than in Dynamo's: what an
    output's size is called there tells which, and where a number is no size (the step of a slice), its stride."""
    index = torch_api.user_output_index(output, position)
    layout = eager_layouts[index] if index is not None and index < len(eager_layouts) else None
    if layout is None:
        return None
    results = output.args[0]
    assert isinstance(results, (tuple, list))
    result: Any = results[position]
    value = fake_value(result) if isinstance(result, torch.fx.Node) else None
    sizes, strides = layout
    if not isinstance(value, torch.Tensor) or len(value.shape) != len(sizes):
        return strides
    theirs: Sequence[Any] = value.stride()
    by_data = [isinstance(each, torch.SymInt) and not torch_api.has_hint(each) for each in theirs]
    if any(by_data) and not input_storages(output.graph).isdisjoint(storages_of(result)):
        return value.stride()  # Dynamo may have guarded what they are; to a view they are what data says all the same
    steps = [pair for pair, unknown in zip(zip(strides, theirs, strict=True), by_data, strict=True) if unknown]
    return size_facts.renamed(strides, [*steps, *zip(sizes, value.shape, strict=True)])


def user_output_layouts(gm: torch.fx.GraphModule) -> tuple[Layout | None, ...]:
    """Eager's sizes and strides of each output of a Dynamo graph, read before any decomposition can change them."""
    results = gm.graph.output_node().args[0]
    if not isinstance(results, (tuple, list)):
        return ()
    return tuple(
        (tuple(value.shape), value.stride())
        if isinstance(result, torch.fx.Node)
        and isinstance(value := fake_value(result), torch.Tensor)
        and value.layout is torch.strided
        and torch_api.is_fake(value)
        else None
        for result in results
    )


def mark_inputs_written_after(joint: torch.fx.Graph) -> None:
    """Let rewrites know what no node shows: that some inputs will hold other values in the backward part."""
    for node in torch_state.inputs_written_after(joint):
        node.meta[WRITTEN_AFTER] = True
