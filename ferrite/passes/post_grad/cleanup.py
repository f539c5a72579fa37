"""Steps that take away what generates nothing, put constants where they are used, and calls near their first user."""

from __future__ import annotations

import torch

from ferrite.graph import order
from ferrite.passes.post_grad import asserts
from ferrite.passes.shared import constructors
from ferrite.passes.shared.noops import NOOP_RULES, erase_dead_calls
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import apply_rules

profiler = torch.ops.profiler
ENTER = (profiler._record_function_enter.default, profiler._record_function_enter_new.default)
EXIT = (profiler._record_function_exit.default, profiler._record_function_exit._RecordFunction)


@graph_pass(stage="post_grad")
def eliminate_dead_code(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Calls that nobody reads and that have no effect are erased.

    Writes, random draws, assertions, collectives and effects stay. Dead nodes would count as users and keep other
    rules from firing, so this comes first.
    """
    return erase_dead_calls(gm.graph)


@graph_pass(stage="post_grad", rules=NOOP_RULES)
def remove_noop_ops(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Calls that compute what they are given are replaced by it."""
    return apply_rules(gm, NOOP_RULES, context)


@graph_pass(stage="post_grad")
def remove_profiler_ops(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Profiler ranges are erased, so that they keep nothing from fusing."""
    return erase_profiler_ranges(gm.graph)


def erase_profiler_ranges(graph: torch.fx.Graph) -> int:
    """Erase the nodes that open and close ranges; how many. Code is generated across them, so they would mark nothing.

    A range whose handle anybody else reads stays, both ends of it: opened and never closed it would swallow the rest
    of the program. So does the end of a range that was opened outside the graph.
    """
    erased = 0
    for target in ENTER:
        for enter in graph.find_nodes(op="call_function", target=target):
            exits = list(enter.users)
            if any(user.target not in EXIT or user.users for user in exits):
                continue
            for node in (*exits, enter):
                graph.erase_node(node)
                erased += 1
    return erased


@graph_pass(stage="post_grad")
def remove_assert_ops(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Assertions on metadata, which is known, are erased; those on data stay."""
    return asserts.remove_assert_ops(gm.graph)


@graph_pass(stage="post_grad")
def move_constructors_to_gpu(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Constants made on the CPU for an accelerator are made there."""
    return constructors.move_constructors_to_gpu(gm.graph)


@graph_pass(stage="post_grad", scope="inference")
def reorder_for_locality(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A producer moves to right before its first user, so that its result is still at hand."""
    return order.reorder_for_locality(gm.graph)
