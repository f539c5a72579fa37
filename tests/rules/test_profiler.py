"""Ranges of the profiler go; what they enclosed stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.passes.post_grad.cleanup import ENTER, EXIT, erase_profiler_ranges

pytestmark = pytest.mark.quick
profiler = torch.ops.profiler


def trace(fn, *inputs):
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(value) for value in inputs]
    with mode:
        return make_fx(fn)(*fakes)


def names(gm):
    return [node.name for node in gm.graph.nodes]


def ranges(gm):
    return [node for node in gm.graph.nodes if node.target in (*ENTER, *EXIT)]


def plain(x):
    return x.sin().cos()


def one_range(x):
    with torch.profiler.record_function("range"):
        return x.sin().cos()


def nested_ranges(x):
    with torch.profiler.record_function("outer"):
        y = x.sin()
        with torch.profiler.record_function("inner"):
            return y.cos()


@pytest.mark.parametrize(("fn", "count"), [(plain, 0), (one_range, 2), (nested_ranges, 4)])
def test_ranges_go_and_nothing_else(fn, count):
    gm = trace(fn, torch.rand(3))
    assert len(ranges(gm)) == count
    assert erase_profiler_ranges(gm.graph) == count
    assert names(gm) == names(trace(plain, torch.rand(3)))  # neighbours again, as if there had been no range
    assert erase_profiler_ranges(gm.graph) == 0
    gm.graph.lint()
    gm.recompile()
    x = torch.rand(3)
    assert torch.equal(gm(x), fn(x))


def around(graph, enter, leave, handle=None):
    """Open and close a range around the calls of a graph; None leaves that end out."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if enter is not None:
        with graph.inserting_before(calls[0]):
            handle = graph.call_function(enter, ("range",))
    if leave is not None:
        with graph.inserting_after(calls[-1]):
            graph.call_function(leave, (handle,))
    return handle


@pytest.mark.parametrize("old", [False, True])
def test_both_kinds_of_handle(old):
    gm = trace(plain, torch.rand(3))
    around(gm.graph, ENTER[0 if old else 1], EXIT[0 if old else 1])
    assert erase_profiler_ranges(gm.graph) == 2
    assert not ranges(gm)


def test_a_range_that_is_never_closed():
    gm = trace(plain, torch.rand(3))
    around(gm.graph, ENTER[1], None)
    assert erase_profiler_ranges(gm.graph) == 1


def test_a_handle_somebody_else_reads_keeps_its_range():
    gm = trace(one_range, torch.rand(3))
    handle = around(gm.graph, ENTER[0], EXIT[0])
    output = gm.graph.output_node()
    output.args = ([*output.all_input_nodes, handle],)
    assert erase_profiler_ranges(gm.graph) == 2  # the other range
    assert [node.target for node in ranges(gm)] == [ENTER[0], EXIT[0]]
    gm.graph.lint()


def test_a_range_opened_outside_is_closed_inside():
    gm = trace(lambda x, handle: x.sin().cos(), torch.rand(3), torch.rand(()))
    around(gm.graph, None, EXIT[0], handle=gm.graph.find_nodes(op="placeholder")[1])
    assert erase_profiler_ranges(gm.graph) == 0
    assert len(ranges(gm)) == 1
