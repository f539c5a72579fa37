"""What was read of an input before it is written must not be read again in the backward part.

    before = clone(x); y = before * w; copy_(x, x + 1)        the gradient of w is `before`

A partitioner may save x, which costs nothing, and calculate `before` again: by then x holds the new values. So what
reads the memory of such an input is marked to be saved, if the backward part needs it.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ferrite.graph import mutates, storages_of
from ferrite.pipeline import PassContext, graph_pass


@graph_pass(stage="joint", scope="training", required=True, keeps_values=True)
def save_reads_of_written_inputs(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """What reads an input that is written later is saved for the backward part, never calculated again."""
    writers = [node for node in gm.graph.nodes if mutates(node)]
    written = frozenset().union(*(storages_of(operand) for node in writers for operand in node.all_input_nodes[:1]))
    marked = 0
    for node in gm.graph.nodes:
        if node.op != "call_function" or not written or mutates(node):
            continue
        reads = any(not written.isdisjoint(storages_of(operand)) for operand in node.all_input_nodes)
        if reads and written.isdisjoint(storages_of(node)):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            marked += 1
    return marked
