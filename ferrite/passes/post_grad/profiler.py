"""Drop the ranges of the profiler.

Code is generated across them, so they would mark nothing and only keep neighbours from being fused.
"""

from __future__ import annotations

import torch

profiler = torch.ops.profiler
ENTER = (profiler._record_function_enter.default, profiler._record_function_enter_new.default)
EXIT = (profiler._record_function_exit.default, profiler._record_function_exit._RecordFunction)


def remove_profiler_ops(graph: torch.fx.Graph) -> int:
    """Erase the nodes that open and close ranges; how many.

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
