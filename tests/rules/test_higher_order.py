"""Functionalised operators written out: copies where they are needed, the operator itself, and nothing else to see."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan

import ferrite
from ferrite.capture import capture
from ferrite.graph.facts import innermost_first
from ferrite.graph.verify import Snapshot, verify_graph
from ferrite.options import Options
from ferrite.passes.post_grad.higher_order import (
    decompose_auto_functionalized,
    decompose_triton_kernel_wrapper_functional,
)
from ferrite.passes.post_grad.loops import decompose_map_to_while_loop, decompose_scan_to_while_loop
from ferrite.passes.post_grad.reinplace import reinplace_inplaceable_ops
from ferrite.pipeline import graph_pass
from ferrite.runtime import run_in_eager
from tests.cases import seldom
from tests.compare import assert_same_as_eager, since
from tests.custom_operators import increment, swap
from tests.graphs import target_names

SELDOM_DYNAMIC = [False, pytest.param(True, marks=pytest.mark.slow)]
aten = torch.ops.aten
IN_PLACE = graph_pass(reinplace_inplaceable_ops.function, name="reinplace", after="move_constructors_to_gpu")
WRITE_OUT = graph_pass(decompose_auto_functionalized.function, name="write_out", after="reinplace")
WRITE_OUT_ALONE = graph_pass(decompose_auto_functionalized.function, name="alone", after="move_constructors_to_gpu")


@torch.library.custom_op("higher::add_from", mutates_args={"x"})
def add_from(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.add_(y)
    return x * 2, y * 2


@add_from.register_fake
def _(x, y):
    return torch.empty_like(x), torch.empty_like(y)


@torch.library.custom_op("higher::several", mutates_args={"xs", "other"})
def several(xs: list[torch.Tensor], other: torch.Tensor | None, by: int) -> None:
    for x in xs:
        x.add_(by)
    if other is not None:
        other.mul_(2)


@torch.library.custom_op("higher::negate_bits", mutates_args={"x"})
def negate_bits(x: torch.Tensor) -> None:
    assert x.dtype == torch.int32
    x.bitwise_not_()


def tagged(name):
    """A tag of operators that torch knows how to functionalise; () where this torch does not."""
    return (getattr(torch.Tag, name),) if hasattr(torch.Tag, name) else ()


LIBRARY = torch.library.Library("higher_tagged", "DEF")
LIBRARY.define("clamp_low_(Tensor(a!) x, float low) -> Tensor(a!)", tags=tagged("inplace"))
LIBRARY.impl("clamp_low_", lambda x, low: x.clamp_(min=low), "CompositeExplicitAutograd")
torch.library.register_fake("higher_tagged::clamp_low_", lambda x, low: x)
LIBRARY.define("halve.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=tagged("out"))
LIBRARY.impl("halve.out", lambda x, *, out: out.copy_(x / 2), "CompositeExplicitAutograd")
LIBRARY.define(
    "split.out(Tensor x, *, Tensor(a!) low, Tensor(b!) high) -> (Tensor(a!), Tensor(b!))", tags=tagged("out")
)
LIBRARY.impl(
    "split.out",
    lambda x, *, low, high: (low.copy_(x.clamp(max=0)), high.copy_(x.clamp(min=0))),
    "CompositeExplicitAutograd",
)


def captured(fn, *inputs, dynamic=False):
    """The inference graph of a function."""
    graphs = []

    def compile_graph(graph):
        graphs.append(graph.gm)
        return run_in_eager(graph.gm)

    backend = lambda gm, example: capture(gm, example, compile_graph, Options())  # noqa: E731
    torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    assert len(graphs) == 1
    return graphs[0]


def written_out(fn, *inputs, dynamic=False, in_place=True):
    gm = captured(fn, *(x.clone() for x in inputs), dynamic=dynamic)
    snapshot = Snapshot.of(gm)
    if in_place:
        reinplace_inplaceable_ops(gm)
        verify_graph(gm, snapshot, deep=True)
    decompose_auto_functionalized(gm)
    verify_graph(gm, snapshot, deep=True)
    assert not any("auto_functionalized" in target for target in target_names(gm))
    new = [node for node in gm.graph.nodes if "rewritten" in node.meta]
    assert new
    assert all("stack_trace" in node.meta for node in new)
    return gm


def on_input(x):
    increment(x, 2.0)
    return x + 1


def on_intermediate(x):
    y = x.sin()
    increment(y, 2.0)
    return y


def twice(x):
    y = x.sin()
    increment(y, 1.0)
    increment(y[0], 5.0)
    return y


def read_before(x):
    before = x * 2
    increment(x, 1.0)
    return before, x * 2


def old_value_read_later(x):
    y = x.sin()
    z = y.clone()
    increment(z, 1.0)
    return z, y + 1


def only_a_slice(x):
    increment(x[1:], 2.0)
    return x * 2


def two_intermediates(x):
    a, b = x + 1, x - 1
    return swap(a, b), a, b


def input_and_intermediate(x):
    y = x.exp()
    return swap(x, y), y * 2


def two_views(x):
    return swap(x[0], x[1]), x + 1


def two_views_of_an_intermediate(x):
    y = x.sin()
    return swap(y[0], y[1]), y


def several_results(x):
    y = x.sin()
    first, second = add_from(y, x)
    return first, second, y


def listed(x):
    y = x.sin()
    several([y[0], x, y[1]], None, 2)
    return y


def optional_given(x):
    y, z = x.sin(), x.cos()
    several([y], z, 3)
    return y + z


def transposed(x):
    y = x.sin().t()
    increment(y, 1.0)
    return y


def empty_list(x):
    y = x.sin()
    several([], y, 2)
    return y


def as_integers(x):
    negate_bits(x.view(torch.int32))
    return x + 1


def with_views_between(x):
    y = x.sin()
    increment(y, 1.0)
    z = y.t()
    increment(y, 2.0)
    return z + 1, y[0]


def indexed_too(x):
    x[torch.tensor([0, 2])] = 7.0
    increment(x, 1.0)
    x[torch.tensor([1])] = 9.0
    return x.sum()


def returned(x):
    increment(x, 1.0)
    return x


# the copies of operands that remain
CASES = {
    on_input: 0,
    on_intermediate: 0,
    twice: 0,
    read_before: 0,
    old_value_read_later: 0,
    only_a_slice: 0,
    two_intermediates: 0,
    input_and_intermediate: 0,
    two_views: 0,
    two_views_of_an_intermediate: 0,
    several_results: 0,
    listed: 0,
    optional_given: 0,
    transposed: 0,
    empty_list: 0,
    as_integers: 0,
    with_views_between: 0,
    indexed_too: 0,
    returned: 0,
}
X = torch.randn(3, 4)


@pytest.mark.parametrize("dynamic", SELDOM_DYNAMIC)
@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_no_copy_is_made_where_none_is_needed(fn, dynamic):
    found = captured(fn, X.clone(), dynamic=dynamic)
    clones = target_names(found).count("aten.clone.default")
    gm = written_out(fn, X, dynamic=dynamic)
    assert target_names(gm).count("aten.clone.default") == CASES[fn] + clones


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_without_the_note_everything_is_copied(fn):
    gm = captured(fn, X.clone())
    clones = target_names(gm).count("aten.clone.default")
    wrapped = [node for node in gm.graph.nodes if "auto_functionalized" in str(node.target)]
    bases = sum(len(node.kwargs["_all_bases"]) for node in wrapped)
    assert target_names(written_out(fn, X, in_place=False)).count("aten.clone.default") == bases + clones


WAYS = {"both": [IN_PLACE, WRITE_OUT], "note": [IN_PLACE], "copies": [WRITE_OUT_ALONE]}


@pytest.mark.parametrize(
    ("dynamic", "passes"),
    [
        pytest.param(dynamic, passes, id=f"{dynamic}-{name}", marks=[pytest.mark.slow] * (dynamic and name != "both"))
        for dynamic in (False, True)
        for name, passes in WAYS.items()
    ],
)
@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_nobody_can_tell(fn, dynamic, passes):
    exact = fn is not as_integers
    assert_same_as_eager(
        fn, lambda: [torch.randn(3, 4)], options={"passes": passes}, dynamic=dynamic, exact=exact, graphs=1, calls=2
    )


def returns_its_argument(x):
    y = torch.ops.higher_tagged.clamp_low_(x, 0.5)
    z = torch.ops.higher_tagged.clamp_low_(x.sin()[1:], 0.5)
    return y + 1, z


def into_destination(x):
    out = x.new_empty(3, 4)
    torch.ops.higher_tagged.halve.out(x, out=out)
    return out + 1


def into_two_destinations(x):
    low, high = torch.empty_like(x), x.new_empty(4, 3).t()
    torch.ops.higher_tagged.split.out(x, low=low, high=high)
    return low, high * 2


@pytest.mark.skipif(not hasattr(torch.Tag, "inplace"), reason="this torch functionalises no such operators")
@pytest.mark.parametrize("passes", [[IN_PLACE, WRITE_OUT], [WRITE_OUT_ALONE]], ids=["both", "copies"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [returns_its_argument, into_destination, into_two_destinations])
def test_operators_that_return_what_they_write(fn, dynamic, passes):
    written_out(fn, X, dynamic=dynamic, in_place=len(passes) == 2)
    assert_same_as_eager(fn, lambda: [torch.randn(3, 4)], options={"passes": passes}, dynamic=dynamic, graphs=1)


def kept_operand(x):
    y = x.sin()
    increment(y, 1.0)
    return y


def test_a_later_read_keeps_the_copy():
    gm = captured(kept_operand, X.clone())
    (sin,) = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        late = gm.graph.call_function(aten.neg.default, (sin,))
        late.meta["val"] = torch.ops.aten.neg.default(sin.meta["val"])
    output.args = ((*output.args[0], late),)
    reinplace_inplaceable_ops(gm)
    decompose_auto_functionalized(gm)
    assert target_names(gm).count("aten.clone.default") == 1
    y, old = gm(X)
    assert torch.equal(y, X.sin() + 1)
    assert torch.equal(old, -X.sin())


def bytes_of_input(x, read_later):
    gm = captured(as_integers, x.clone())
    (view,) = (node for node in gm.graph.nodes if node.target is aten.view.dtype and node.args[0].op == "placeholder")
    if read_later:
        copy = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)[0]
        output = gm.graph.output_node()
        with gm.graph.inserting_before(copy):
            late = gm.graph.call_function(aten.neg.default, (view.args[0],))
            late.meta["val"] = aten.neg.default(view.args[0].meta["val"])
        output.args = ((*output.args[0], late),)
    reinplace_inplaceable_ops(gm)
    decompose_auto_functionalized(gm)
    own = x.clone()
    return gm, gm(own), own


def test_bytes_of_an_input():
    wanted = X.clone()
    negate_bits(wanted.view(torch.int32))
    gm, _, own = bytes_of_input(X, read_later=False)
    assert "aten.clone.default" not in target_names(gm)
    assert torch.equal(own.view(torch.int32), wanted.view(torch.int32))
    gm, results, own = bytes_of_input(X, read_later=True)
    assert "aten.clone.default" in target_names(gm)
    assert torch.equal(own.view(torch.int32), wanted.view(torch.int32))
    assert torch.equal(results[-1], -X)


# --- the first encoding -----------------------------------------------------------------------------------------------


def first_encoding(fn, *inputs):
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(fn, tracing_mode="fake")(*inputs)
    wanted = gm(*(x.clone() for x in inputs))
    reinplace_inplaceable_ops(gm)
    decompose_auto_functionalized(gm)
    verify_graph(gm, deep=True)
    assert "auto_functionalized" not in str(gm.graph)
    for old, new in zip(wanted, gm(*inputs), strict=True):
        assert torch.equal(old, new)
    return target_names(gm).count("aten.clone.default")


def test_first_encoding():
    op, writing = torch.ops.higher, torch.ops.writing

    def one(x):
        return (auto_functionalized(writing.increment.default, x=x.sin(), by=2.0)[1],)

    def read_later(x):
        y = x.sin()
        return auto_functionalized(writing.increment.default, x=y, by=2.0)[1], y + 1

    def of_input(x):
        return (auto_functionalized(writing.increment.default, x=x, by=2.0)[1],)

    def same_twice(x):
        y = x.sin()
        return auto_functionalized(writing.swap.default, x=y, y=y)

    def listed(x):
        _, xs, _ = auto_functionalized(op.several.default, xs=[x.sin(), x.cos()], other=None, by=2)
        return tuple(xs)

    def listed_with_input(x):
        _, xs, other = auto_functionalized(op.several.default, xs=[x.sin(), x], other=x.cos(), by=2)
        return (*xs, other)

    def read_as_well(x):
        y = x.sin()
        return auto_functionalized(op.add_from.default, x=y, y=y)

    counts = [first_encoding(fn, X.clone()) for fn in (one, read_later, of_input, same_twice, listed)]
    assert counts == [0, 1, 1, 1, 0]
    assert first_encoding(listed_with_input, X.clone()) == 2
    assert first_encoding(read_as_well, X.clone()) == 1


def test_copies_keep_strides_and_offset():
    def fn(x):
        return (auto_functionalized(torch.ops.writing.increment.default, x=x[1:, ::2], by=2.0)[1],)

    assert first_encoding(fn, torch.randn(5, 8)) == 1


# --- other places -----------------------------------------------------------------------------------------------------


def test_inside_a_branch():
    def fn(x, flag):
        def yes(x):
            y = x.sin()
            increment(y, 1.0)
            return y + 1

        return torch.cond(flag, yes, lambda x: x + 1, (x,))

    assert_same_as_eager(
        fn, lambda: [torch.randn(3), torch.tensor(True)], options={"passes": [IN_PLACE, WRITE_OUT]}, graphs=1
    )
    assert ferrite.last_compile().rewrites["reinplace_inplaceable_ops"] == 1


def branch_writes(x, flag):
    y = x.sin()

    def yes(y):
        y.add_(1)
        return y + 1

    return torch.cond(flag, yes, lambda y: y - 1, (y,)), y


def branch_writes_into_an_input(x, flag):
    def yes(x):
        x.mul_(2)
        return x + 1

    return torch.cond(flag, yes, lambda x: x - 1, (x,)) + x


def branch_writes_and_the_old_value_is_read(x, flag):
    y = x.sin()
    z = y.clone()

    def yes(z):
        z.add_(1)
        return z + 1

    return torch.cond(flag, yes, lambda z: z - 1, (z,)), z, y * 2


def branch_writes_into_a_part(x, flag):
    y = x.sin()

    def yes(part):
        part.add_(1)
        return part + 1

    return torch.cond(flag, yes, lambda part: part - 1, (y[1:],)), y


def loop_writes(x, flag):
    y, buffer = x.sin(), x.cos()

    def body(i, y):
        buffer.add_(1)
        return i + 1, y + buffer

    return torch.while_loop(lambda i, y: i.sum() < 3, body, (x.new_zeros(1), y)), buffer


def loop_in_a_branch_writes(x, flag):
    def yes(x):
        buffer = x.cos()

        def body(i, y):
            buffer.add_(1)
            return i + 1, y + buffer

        return torch.while_loop(lambda i, y: i.sum() < 2, body, (x.new_zeros(1), x.sin()))[1] + buffer

    return torch.cond(flag, yes, lambda x: x - 1, (x,))


WRITING = [branch_writes, branch_writes_into_an_input, branch_writes_and_the_old_value_is_read]
WRITING += [branch_writes_into_a_part, loop_writes, loop_in_a_branch_writes]


@since(2, 13)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("fn", WRITING, ids=lambda fn: fn.__name__)
def test_higher_order_operators_that_write(fn, in_place):
    with torch.no_grad():
        gm = captured(fn, X.clone(), torch.tensor(True))
    everywhere = lambda: [node for module in innermost_first(gm) for node in module.graph.nodes]  # noqa: E731
    clones = lambda: [node for node in everywhere() if node.target is aten.clone.default]  # noqa: E731
    wrapped = [node for node in everywhere() if node.target is torch.ops.higher_order.auto_functionalized_v2]
    assert wrapped
    wanted_clones = len(clones()) + (0 if in_place else sum(len(node.kwargs["_all_bases"]) for node in wrapped))
    names = set(dict(gm.named_modules()))
    snapshot = Snapshot.of(gm)
    if in_place:
        reinplace_inplaceable_ops(gm)
    decompose_auto_functionalized(gm)
    verify_graph(gm, snapshot, deep=True)
    assert not any(node.target is torch.ops.higher_order.auto_functionalized_v2 for node in everywhere())
    assert not any(str(node.target).startswith("_tree_spec") for node in everywhere())
    assert len(clones()) == wanted_clones
    assert set(dict(gm.named_modules())) == names  # the graphs are still called
    for flag in (True, False):
        inputs, own = [X.clone(), torch.tensor(flag)], [X.clone(), torch.tensor(flag)]
        with torch.no_grad():
            wanted = torch.utils._pytree.tree_leaves(fn(*inputs))
            given = [own[index] for index in argument_order(gm)]
            assert all(map(torch.allclose, wanted, gm(*given)))
        assert torch.equal(inputs[0], own[0])


def argument_order(gm):
    """Which of a float tensor and a flag each input of a graph is."""
    return [int(node.meta["val"].dtype is torch.bool) for node in gm.graph.find_nodes(op="placeholder")]


@since(2, 13)
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("fn", WRITING, ids=lambda fn: fn.__name__)
def test_nobody_can_tell_that_higher_order_operators_write(fn, flag):
    with torch.no_grad():
        assert_same_as_eager(fn, lambda: [torch.randn(3, 4), torch.tensor(flag)], graphs=1, calls=2)
    calls = [call.operator for graph in ferrite.last_compile().graphs for call in graph.eager_calls]
    assert "higher_order.auto_functionalized_v2" not in calls


def test_graphs_that_nobody_calls_leave_the_module():
    gm = captured(running_sum, torch.randn(3), torch.randn(4, 3))
    (step,) = (node.target for node in gm.graph.find_nodes(op="get_attr"))
    decompose_scan_to_while_loop(gm)
    assert step not in dict(gm.named_modules())
    assert "while_loop" in target_names(gm)


def test_backward():
    def fn(x):
        y = (x * 2).detach()
        increment(y, 1.0)
        return (x * y).sum()

    make = lambda: [torch.randn(3, 4, requires_grad=True)]  # noqa: E731
    assert_same_as_eager(fn, make, options={"passes": [IN_PLACE, WRITE_OUT]}, backward=True)


def test_triton_kernels_by_shape():
    """Without Triton the kernel cannot be run; the graph around it can be looked at."""
    functional = torch.ops.higher_order.triton_kernel_wrapper_functional
    graph = torch.fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    values = {name: mode.from_tensor(torch.empty(4)) for name in ("x", "old", "new")}
    x = graph.placeholder("x")
    x.meta["val"] = values["x"]
    sin = graph.call_function(aten.sin.default, (x,))
    sin.meta["val"] = aten.sin.default(values["x"])
    settings = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}
    call = graph.call_function(
        functional, (), {**settings, "kwargs": {"a": x, "b": sin}, "tensors_to_clone": ["a", "b"]}
    )
    call.meta["val"] = {"a": values["old"], "b": values["new"]}
    items = [graph.call_function(operator.getitem, (call, name)) for name in ("a", "b")]
    for item, name in zip(items, ("old", "new"), strict=True):
        item.meta["val"] = values[name]
    graph.output(tuple(items))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    reinplace_inplaceable_ops(gm)
    decompose_triton_kernel_wrapper_functional(gm)
    assert target_names(gm) == ["aten.sin.default", "aten.clone.default", "triton_kernel_wrapper_mutation"]
    kernel = next(node for node in gm.graph.nodes if node.target.__class__.__name__ == "TritonKernelWrapperMutation")
    assert "tensors_to_clone" not in kernel.kwargs
    assert kernel.kwargs["kwargs"]["b"] is sin
    assert gm.graph.output_node().args[0] == (kernel.kwargs["kwargs"]["a"], sin)


# --- loops ------------------------------------------------------------------------------------------------------------

SCAN = graph_pass(decompose_scan_to_while_loop.function, name="scan", after="move_constructors_to_gpu")
MAP = graph_pass(decompose_map_to_while_loop.function, name="map", after="scan")


def running_sum(c, x):
    return scan(lambda c, x: (c + x, c * x), c, x)


def two_carries(c, x):
    def step(carry, x):
        a, b = carry
        return (a + x, b * 2), (a * x, b.sin())

    return scan(step, (c, c + 1), x)


def two_sequences(c, x):
    return scan(lambda c, xs: (c + xs[0], c * xs[1].sum()), c, (x, x.cos() @ x.new_ones(3, 2)))


def carry_unchanged(c, x):
    return scan(lambda c, x: (c.clone(), c + x), c, x)


def backwards(c, x):
    return scan(lambda c, x: (c + x, c * x), c, x, reverse=True)


def along_another_dimension(c, x):
    return scan(lambda c, x: (c + x.sum(), c * 2), c, x, dim=1)


def with_outer_value(c, x):
    weight = c.exp()
    return scan(lambda c, x: (c + x * weight, (c * weight).sum()), c, x)


def transposed_results(c, x):
    return scan(lambda c, x: (c + x, (c[:, None] * x).t() + 1), c, x)


def nested_scan(c, x):
    def step(c, row):
        inner, sums = scan(lambda a, b: (a + b, a * b), c.sum(), row)
        return c + inner, sums

    return scan(step, c, x)


def plain_map(c, x):
    return mapped(lambda x, c: (c + x, (c * x).sum()), x, c)


def single_map(c, x):
    return mapped(lambda x: x.sin() * 2, x) + c


def map_in_a_scan(c, x):
    return scan(lambda c, x: (c + x, mapped(lambda y: y * 2, x)), c, x)


def scan_with_a_branch(c, x):
    def step(c, x):
        return torch.cond(x.sum() > 0, lambda c, x: c + x, lambda c, x: c - x, (c, x)), c * x

    return scan(step, c, x)


def step_with_a_write(c, x):
    def step(c, x):
        y = c.sin()
        increment(y, 1.0)
        return c + y, y * x

    return scan(step, c, x)


LOOPS = [
    *(running_sum, two_carries, two_sequences, carry_unchanged, backwards, along_another_dimension, with_outer_value),
    *(transposed_results, nested_scan, plain_map, single_map, map_in_a_scan, scan_with_a_branch),
]


@pytest.mark.parametrize("length", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("dynamic", SELDOM_DYNAMIC)
@pytest.mark.parametrize(
    "fn", seldom(LOOPS, two_sequences, carry_unchanged, backwards, plain_map), ids=lambda fn: fn.__name__
)
def test_loops(fn, dynamic, length):
    make = lambda: [torch.randn(3), torch.randn(length, 3)]  # noqa: E731
    assert_same_as_eager(fn, make, options={"passes": [SCAN, MAP]}, dynamic=dynamic, graphs=1)
    assert sum(ferrite.last_compile().rewrites.values()) >= 1


@pytest.mark.parametrize("dynamic", SELDOM_DYNAMIC)
@pytest.mark.parametrize("fn", LOOPS, ids=lambda fn: fn.__name__)
def test_loops_leave_valid_graphs(fn, dynamic):
    inputs = torch.randn(3), torch.randn(4, 3)
    gm = captured(fn, *inputs, dynamic=dynamic)
    snapshot = Snapshot.of(gm)
    decompose_scan_to_while_loop(gm)
    decompose_map_to_while_loop(gm)
    verify_graph(gm, snapshot, deep=True)
    reachable = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert "while_loop" in target_names(gm)
    assert not {"scan", "map_impl"} & set(target_names(gm))
    assert all("val" in node.meta for node in reachable)
    nodes = list(gm.graph.nodes)
    decompose_scan_to_while_loop(gm)
    decompose_map_to_while_loop(gm)
    assert list(gm.graph.nodes) == nodes


@pytest.mark.parametrize("fn", [running_sum, two_carries, plain_map, nested_scan], ids=lambda fn: fn.__name__)
def test_any_length(fn):
    """One graph for all lengths, none included: then the carries are copies of what they started as."""
    gm = captured(fn, torch.randn(3), torch.randn(4, 3), dynamic=True)
    decompose_scan_to_while_loop(gm)
    decompose_map_to_while_loop(gm)
    for length in (0, 1, 2, 7):
        c, x = torch.randn(3), torch.randn(length, 3)
        results = gm(*arguments_for(gm, c, x))
        if length:
            for new, old in zip(results, torch.utils._pytree.tree_leaves(fn(c, x)), strict=True):
                assert torch.allclose(new, old)
        elif fn is not plain_map:
            assert torch.equal(results[0], c)
            assert results[0] is not c
            assert results[-1].shape[0] == 0


def arguments_for(gm, c, x):
    """What a graph that was captured for a vector and a matrix takes: these, and their sizes."""
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    sizes = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            sizes |= zip(map(str, value.shape), (c if value.dim() == 1 else x).shape, strict=True)
    given = {1: c, 2: x}
    return [given[value.dim()] if isinstance(value, torch.Tensor) else sizes[str(value)] for value in values]


def test_no_iterations_known():
    gm = captured(two_carries, torch.randn(3), torch.randn(4, 3))
    (loop,) = (node for node in gm.graph.nodes if str(node.target) == "scan")
    empty = loop.args[2][0].meta["val"].new_empty(0, 3)
    loop.args[2][0].meta["val"] = empty
    loop.meta["val"] = tuple(v if i < 2 else v.new_empty(0, 3) for i, v in enumerate(loop.meta["val"]))
    for item in loop.users:
        item.meta["val"] = loop.meta["val"][item.args[1]]
    decompose_scan_to_while_loop(gm)
    assert "while_loop" not in target_names(gm)
    c = torch.randn(3)
    first, second, *rest = gm(c, torch.empty(0, 3))
    assert torch.equal(first, c)
    assert torch.equal(second, c + 1)
    assert [tuple(each.shape) for each in rest] == [(0, 3), (0, 3)]


def test_what_does_not_change_is_not_carried():
    gm = captured(with_outer_value, torch.randn(3), torch.randn(4, 3))
    decompose_scan_to_while_loop(gm)
    (loop,) = (node for node in gm.graph.nodes if str(node.target) == "while_loop")
    assert len(loop.args[2]) == 2  # the counter and the carry
    assert loop.args[2][0] == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_carries_handed_on_are_copied(dynamic):
    gm = captured(carry_unchanged, torch.randn(3), torch.randn(4, 3), dynamic=dynamic)
    step = next(m for m in gm.modules() if m is not gm and isinstance(m, torch.fx.GraphModule))
    for clone in step.graph.find_nodes(op="call_function", target=aten.clone.default):
        clone.replace_all_uses_with(clone.args[0])
        step.graph.erase_node(clone)
    step.recompile()
    decompose_scan_to_while_loop(gm)
    c, x = torch.randn(3), torch.randn(4, 3)
    arguments = [3, c, 4, x] if dynamic else [c, x]
    last, sums = gm(*arguments)
    assert torch.equal(last, c)
    assert last.data_ptr() != c.data_ptr()
    assert torch.equal(sums, c + x)


def test_all_passes_together():
    passes = [IN_PLACE, WRITE_OUT, graph_pass(SCAN.function, name="scan", after="write_out"), MAP]
    assert_same_as_eager(
        step_with_a_write, lambda: [torch.randn(3), torch.randn(4, 3)], options={"passes": passes}, graphs=1
    )
    assert "reinplace_inplaceable_ops" in ferrite.last_compile().rewrites


def test_loops_in_training():
    make = lambda: [torch.randn(3, requires_grad=True), torch.randn(4, 3, requires_grad=True)]  # noqa: E731
    assert_same_as_eager(running_sum, make, options={"passes": [SCAN, MAP]}, backward=True)
    assert ferrite.last_compile().rewrites["decompose_scan_to_while_loop"] >= 1
