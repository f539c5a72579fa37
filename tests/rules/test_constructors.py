"""Constants are made on the device that reads them. The device type `meta` stands in for an accelerator."""

from __future__ import annotations

import itertools
import operator

import pytest
import torch

from ferrite.passes.shared import constructors
from ferrite.passes.shared.constructors import ConstructorMover, Fates, move_constructors_to_gpu
from tests.graphs import traced_with_fakes

pytestmark = pytest.mark.quick
aten, prims = torch.ops.aten, torch.ops.prims
META = torch.device("meta")


def from_scratch(gm):
    """Every fake value computed anew from the inputs; raises where devices do not go together."""
    values = {}
    placeholders = gm.graph.find_nodes(op="placeholder")
    mode = placeholders[0].meta["val"].fake_mode
    with mode:
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = node.meta["val"]
            elif node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    return values


def look(value):
    if isinstance(value, torch.Tensor):
        return (str(value.shape), str(value.stride()), value.dtype, value.device, value.layout)
    return [look(item) for item in value] if isinstance(value, (list, tuple)) else str(value)


def assert_moved(gm, expected, **options):
    """Run the pass and check what must hold of every run."""
    outputs = look([node.meta["val"] for node in gm.graph.output_node().all_input_nodes])
    shape_env = gm.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env
    guards = len(shape_env.guards)
    mover = ConstructorMover("meta", **options)
    assert mover(gm.graph) == expected
    assert len(shape_env.guards) == guards
    gm.graph.lint()
    gm.recompile()
    for node, value in from_scratch(gm).items():
        assert look(value) == look(node.meta["val"]), node
    if not options.get("allow_outputs"):
        assert look([node.meta["val"] for node in gm.graph.output_node().all_input_nodes]) == outputs
    assert mover(gm.graph) == 0
    return gm


def find(gm, target):
    return gm.graph.find_nodes(op="call_function", target=target)


def device_of(gm, target):
    (node,) = find(gm, target)
    return node.meta["val"].device.type


def on_meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def scalar(dtype=torch.float32):
    return torch.ones((), dtype=dtype)


# --- what moves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "between",
    [
        lambda c: c,
        lambda c: c * 2,
        lambda c: c * c,
        lambda c: torch.stack([c, c]).sum(0),
        lambda c: torch.cat([c, c + 1]).max(0, keepdim=True)[1],
        lambda c: c.view(-1, 1).expand(-1, 2).transpose(0, 1),
    ],
    ids=["direct", "through mul", "used twice", "in a list", "through a tuple", "through views"],
)
def test_an_index_made_on_the_host_moves(between, dynamic):
    gm = traced_with_fakes(lambda x: x[between(torch.arange(x.shape[0]))], on_meta(5), dynamic=dynamic)
    assert_moved(gm, 1)
    (arange,) = find(gm, aten.arange.default)
    assert arange.kwargs["device"] == META
    assert all(node.meta["val"].device == META for node in find(gm, aten.mul.Tensor))


def test_indices_left_out_are_no_operands():
    gm = assert_moved(traced_with_fakes(lambda x: x[:, torch.arange(4)], on_meta(3, 5)), 1)
    assert find(gm, aten.index.Tensor)[0].args[1][0] is None


def test_a_device_left_out_means_the_host():
    gm = traced_with_fakes(lambda x: x[torch.arange(4)], on_meta(5))
    (arange,) = find(gm, aten.arange.default)
    arange.kwargs = {}
    assert_moved(gm, 1)
    assert arange.kwargs == {"device": META}


def test_prims_constructors_move():
    def fn(x):
        return x[prims.iota(4, start=0, step=1, dtype=torch.int64, device=torch.device("cpu"), requires_grad=False)]

    gm = assert_moved(traced_with_fakes(fn, on_meta(5)), 1)
    assert device_of(gm, prims.iota.default) == "meta"


def test_a_number_beside_tensors_moves():
    gm = assert_moved(traced_with_fakes(lambda x: x + torch.full((), 2.0), on_meta(5)), 1)
    assert device_of(gm, aten.full.default) == "meta"


def test_an_explicit_copy_of_a_constructor_needs_no_host_memory():
    gm = assert_moved(traced_with_fakes(lambda x: x + torch.arange(5).to("meta"), on_meta(5)), 1)
    assert device_of(gm, aten.arange.default) == "meta"


def test_shape_queries_hold_nothing_back():
    gm = traced_with_fakes(lambda x: x[torch.arange(4)], on_meta(5))
    (arange,) = find(gm, aten.arange.default)
    with gm.graph.inserting_after(arange):
        size = gm.graph.call_function(aten.sym_size.int, (arange, 0))
    size.meta["val"] = 4
    gm.graph.output_node().args = ([*gm.graph.output_node().all_input_nodes, size],)
    assert ConstructorMover("meta")(gm.graph) == 1


@pytest.mark.parametrize("target", ["copy", "copy_", "slice_scatter", "index_put"])
def test_operators_that_take_host_operands(target):
    def fn(x):
        if target == "copy":
            return aten.copy(x, torch.arange(5.0))
        if target == "copy_":
            return aten.copy_(x, torch.arange(5.0))
        if target == "slice_scatter":
            return aten.slice_scatter(x, torch.arange(2.0), 0, 0, 2)
        return aten.index_put(x, [torch.arange(2)], torch.full((), 1.0))

    gm = traced_with_fakes(fn, on_meta(5))
    assert_moved(gm, 2 if target == "index_put" else 1)


def test_without_an_accelerator_nothing_happens(monkeypatch):
    gm = traced_with_fakes(lambda x: x[torch.arange(4)], on_meta(5))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert move_constructors_to_gpu(gm.graph) == 0
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: META)
    assert move_constructors_to_gpu(gm.graph) == 1


def test_target_and_flags_reach_the_mover():
    gm = traced_with_fakes(lambda x: (x[torch.arange(4)], torch.zeros(3)), on_meta(5))
    assert move_constructors_to_gpu(gm.graph, "cuda") == 0
    assert move_constructors_to_gpu(gm.graph, "meta", allow_outputs=True) == 2
    gm = traced_with_fakes(lambda x, p: x + p, on_meta(5), scalar())
    assert move_constructors_to_gpu(gm.graph, "meta") == 0
    assert move_constructors_to_gpu(gm.graph, "meta", allow_inputs=True) == 1


# --- what stays -------------------------------------------------------------------------------------------------------


def returned(x):
    c = torch.arange(4)
    return x[c], c


def view_returned(x):
    c = torch.arange(4)
    return x[c], (c * 2).view(2, 2)


def read_by_the_host(x):
    c = torch.arange(4)
    return x[c].sum() * c.sum().item()


def sized_by_contents(x):
    c = torch.arange(4)
    return x[c.nonzero()]


def selected_by_mask(x):
    return x[torch.arange(5) > 2]


def copied_to_the_host(x):
    c = torch.arange(5.0)
    return x + c.to("meta"), aten._to_copy(c, device="cpu", dtype=torch.float64)


def asserted(x):
    c = torch.full((), 1)
    aten._assert_async(c)
    return x * c


def changed_in_place(x):
    c = torch.arange(4)
    c.add_(1)
    return x[c]


@pytest.mark.parametrize(
    "fn",
    [
        returned,
        view_returned,
        read_by_the_host,
        sized_by_contents,
        selected_by_mask,
        copied_to_the_host,
        asserted,
        changed_in_place,
    ],
)
def test_what_the_host_needs_stays(fn):
    gm = traced_with_fakes(fn, on_meta(5))
    before = [(node.target, node.args, node.kwargs) for node in gm.graph.nodes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constructors, "refresh", lambda nodes: None if not nodes else pytest.fail("nothing to refresh"))
        assert ConstructorMover("meta")(gm.graph) == 0
    assert [(node.target, node.args, node.kwargs) for node in gm.graph.nodes] == before


def test_returned_values_move_where_allowed():
    gm = assert_moved(traced_with_fakes(returned, on_meta(5)), 1, allow_outputs=True)
    assert device_of(gm, aten.arange.default) == "meta"


def test_joined_with_a_host_input():
    assert_moved(traced_with_fakes(lambda x, i: x[torch.arange(4) + i], on_meta(5), torch.arange(4)), 0)
    assert_moved(
        traced_with_fakes(lambda x, i: x[torch.arange(4), i], on_meta(5, 5), torch.arange(4)), 1
    )  # index takes either


def test_joined_with_a_constructor_that_escapes():
    def fn(x):
        c, d, free = torch.arange(4), torch.ones(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
        return x[c + d], x[free], d * 3

    gm = assert_moved(traced_with_fakes(fn, on_meta(5)), 1)
    assert device_of(gm, aten.zeros.default) == "meta"
    assert device_of(gm, aten.arange.default) == device_of(gm, aten.ones.default) == "cpu"


def test_fate_is_shared_across_a_chain_of_meetings():
    def fn(x):
        a, b, c = torch.arange(4), torch.arange(4), torch.arange(4)
        return x[a + b], x[b + c], c + 1

    assert_moved(traced_with_fakes(fn, on_meta(5)), 0)


def test_joined_with_a_constant_of_the_model():
    gm = traced_with_fakes(lambda x: x[torch.arange(4) + torch.tensor([0, 1, 0, 1])], on_meta(5))
    assert gm.graph.find_nodes(op="get_attr")
    assert ConstructorMover("meta")(gm.graph) == 0


def test_joined_with_a_copy_from_the_device():
    def fn(x):
        return x[torch.arange(4) + aten.zeros_like(aten._to_copy(x[:4], device="cpu", dtype=torch.int64))]

    assert_moved(traced_with_fakes(fn, on_meta(5)), 0)


def test_a_host_input_written_to_holds_its_source():
    assert_moved(
        traced_with_fakes(lambda x, p: (x[torch.arange(4)], p.copy_(torch.zeros(4)))[0], on_meta(5), torch.ones(4)), 1
    )


def test_an_operand_that_belongs_on_the_host():
    """Neither a number beside tensors nor an operator known to take both: it asked for the host for a reason."""
    gm = traced_with_fakes(lambda x: x + torch.arange(5.0).to("meta"), on_meta(5))
    (copy,) = find(gm, aten._to_copy.default)
    copy.replace_all_uses_with(copy.args[0])
    gm.graph.erase_node(copy)
    assert ConstructorMover("meta")(gm.graph) == 0


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="fakes of a second GPU cannot be made beside just one GPU")
def test_two_devices_or_none(monkeypatch):
    assert_moved(traced_with_fakes(lambda x: x[torch.arange(4)], torch.ones(5)), 0)
    gm = traced_with_fakes(lambda x: x[torch.arange(4)], on_meta(5))
    (x,) = gm.graph.find_nodes(op="placeholder")
    mover = ConstructorMover("cuda")  # two indices of one type can only be written down, not made here
    mode = x.meta["val"].fake_mode
    with mode:
        x.meta["val"] = [torch.empty(5, device="cuda:0"), torch.empty(5, device="cuda:1")]
    assert mover(gm.graph) == 0
    with mode:
        x.meta["val"] = torch.empty(5, device="cuda:1")
        find(gm, aten.index.Tensor)[0].meta["val"] = torch.empty(4, device="cuda:1")
    monkeypatch.setattr(constructors, "refresh", lambda nodes: None)  # would need a torch built for the device
    assert mover(gm.graph) == 1
    assert find(gm, aten.arange.default)[0].kwargs["device"] == torch.device("cuda:1")


def test_pinned_memory_stays_on_the_host():
    gm = traced_with_fakes(lambda x: x[torch.arange(4)], on_meta(5))
    find(gm, aten.arange.default)[0].update_kwarg("pin_memory", True)
    assert ConstructorMover("meta")(gm.graph) == 0


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + torch.rand(5).to("meta"),
        lambda x: x[torch.randperm(5)],
        lambda x: x + torch.bernoulli(torch.full((5,), 0.5)).to("meta"),
    ],
    ids=["rand", "randperm", "drawn from a constant"],
)
def test_random_numbers_keep_their_stream(fn):
    assert_moved(traced_with_fakes(fn, on_meta(5)), 0)
    assert_moved(traced_with_fakes(fn, on_meta(5)), 1, random_in_order=False)


def test_operators_of_others_are_left_alone():
    with torch.library._scoped_library("ferrite_test_constructors", "FRAGMENT") as library:
        library.define("host(Tensor x) -> Tensor")
        library.impl("host", torch.clone, "CompositeExplicitAutograd")
        op = torch.ops.ferrite_test_constructors.host
        assert_moved(traced_with_fakes(lambda x: x[op(torch.arange(4))], on_meta(5)), 0)


@pytest.mark.parametrize("op", [aten.index_put, aten.index_put_])
@pytest.mark.parametrize(("dtype", "moved"), [(torch.bool, 0), (torch.uint8, 0), (torch.int64, 1)])
def test_a_masked_fill_needs_its_number_on_the_host(op, dtype, moved):
    gm = traced_with_fakes(lambda x, mask: op(x, [mask], torch.full((), 1.0)), on_meta(4), on_meta(4, dtype=dtype))
    assert_moved(gm, moved)


def test_a_masked_write_of_device_values_is_no_fill():
    def fn(x, mask, values):
        return aten.index_put(x, [mask, torch.arange(4)], values)

    assert_moved(traced_with_fakes(fn, on_meta(4, 4), on_meta(4, dtype=torch.bool), on_meta(4)), 1)


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_scalars_of_two_dtypes_travel_apart():
    gm = traced_with_fakes(lambda x, i, f: (x * i) + f, on_meta(5), scalar(torch.int64), scalar(torch.float32))
    assert_moved(gm, 2, allow_inputs=True)
    copies = find(gm, aten._to_copy.default)
    assert [node.meta["val"].dtype for node in copies] == [torch.int64, torch.float32]
    assert all(node.kwargs["non_blocking"] for node in copies)


def test_scalars_of_one_dtype_travel_together():
    gm = traced_with_fakes(lambda x, p, q, r: x * p + q * r, on_meta(5), scalar(), scalar(), scalar())
    gm.graph.find_nodes(op="placeholder")[2].meta["stack_trace"] = "where q came from"
    assert_moved(gm, 3, allow_inputs=True)
    assert len(find(gm, aten._to_copy.default)) == len(find(gm, aten.cat.default)) == 1
    assert len(find(gm, aten.unsqueeze.default)) == len(find(gm, operator.getitem)) == 3
    q, r = find(gm, aten.mul.Tensor)[1].all_input_nodes
    assert q.meta["val"].device == r.meta["val"].device == META
    assert q.meta["stack_trace"] == "where q came from"


def test_inputs_stay_unless_asked():
    assert_moved(traced_with_fakes(lambda x, p: x * p, on_meta(5), scalar()), 0)
    assert_moved(traced_with_fakes(lambda x, p: x * p, on_meta(5), torch.ones(5).sum()), 1, allow_inputs=True)
    gm = traced_with_fakes(lambda x, p, i: x[i] * p, on_meta(5), scalar(), torch.arange(4))
    assert_moved(gm, 1, allow_inputs=True)  # only rank 0


def test_an_input_returned_or_written_to_stays_itself():
    def fn(x, p, q):
        y = x * p * q
        q.copy_(q + 1)
        return y, p

    gm = traced_with_fakes(fn, on_meta(5), scalar(), scalar())
    assert_moved(gm, 1, allow_inputs=True)  # q + 1 is written on the host, so q stays
    _, p, q = gm.graph.find_nodes(op="placeholder")
    assert gm.graph.output_node() in p.users
    (write,) = find(gm, aten.copy_.default)
    assert write.args[0] is q


def test_a_write_to_the_input_itself_does_not_hold_it():
    def fn(x, p, q):
        y = x * p
        p.copy_(q)
        return y

    gm = assert_moved(traced_with_fakes(fn, on_meta(5), scalar(), torch.ones(1).sum()), 1, allow_inputs=True)
    p = gm.graph.find_nodes(op="placeholder")[1]
    assert find(gm, aten.copy_.default)[0].args[0] is p


def test_an_alias_of_an_input_is_never_returned_from_the_device():
    gm = traced_with_fakes(lambda x, p: (x * p, p.view(1)), on_meta(5), scalar())
    assert_moved(gm, 0, allow_inputs=True, allow_outputs=True)
    gm = traced_with_fakes(lambda x, p: (x * p, p + 1), on_meta(5), scalar())
    assert_moved(gm, 1, allow_inputs=True, allow_outputs=True)


def test_an_input_written_to_through_a_view_stays():
    def fn(x, p):
        y = x * p
        p.view(1).copy_(torch.zeros(1))
        return y

    assert_moved(traced_with_fakes(fn, on_meta(5), scalar()), 0, allow_inputs=True)


def test_explicit_copies_become_nothing_unless_returned():
    def fn(x, p):
        return x * p + p.to("meta").sin(), p.to("meta")

    gm = assert_moved(traced_with_fakes(fn, on_meta(5), scalar()), 1, allow_inputs=True)
    batch, kept = find(gm, aten._to_copy.default)
    assert kept in gm.graph.output_node().all_input_nodes
    assert kept.args[0].target is operator.getitem
    assert batch.kwargs["non_blocking"]


def test_a_copy_that_casts_still_casts():
    gm = traced_with_fakes(
        lambda x, p: x * p + aten._to_copy(p, device="meta", dtype=torch.float64), on_meta(5), scalar()
    )
    assert_moved(gm, 1, allow_inputs=True)
    assert [node.meta["val"].dtype for node in find(gm, aten._to_copy.default)] == [torch.float32, torch.float64]


def test_a_prims_copy_becomes_nothing():
    gm = traced_with_fakes(lambda x, p: x * p + prims.device_put(p, META).sin(), on_meta(5), scalar())
    assert_moved(gm, 1, allow_inputs=True)
    assert not find(gm, prims.device_put.default)


def test_an_explicit_copy_alone_is_left_alone():
    assert_moved(traced_with_fakes(lambda x, p: x * p.to("meta"), on_meta(5), scalar()), 0, allow_inputs=True)


def test_an_input_may_meet_a_constructor():
    gm = traced_with_fakes(lambda x, p: x * (p * torch.full((), 2.0)), on_meta(5), scalar())
    assert_moved(gm, 2, allow_inputs=True)


def test_values_of_the_batched_inputs():
    """Everything on the cpu: the copies themselves can be run and compared."""

    def fn(x, p, q, i):
        return x * p + q, x * i

    inputs = [torch.rand(3), torch.tensor(2.5), torch.tensor(-1.0), torch.tensor(2**53 + 1)]
    gm = traced_with_fakes(fn, *inputs)
    expected = gm(*inputs)
    parts = constructors.copy_inputs(gm.graph.find_nodes(op="placeholder")[1:], torch.device("cpu"))
    constructors.refresh(parts)
    gm.graph.lint()
    gm.recompile()
    for ours, eager in zip(gm(*inputs), expected, strict=True):
        assert torch.equal(ours, eager)
        assert ours.dtype == eager.dtype
    assert [find(gm, aten._to_copy.default)[i].meta["val"].dtype for i in (0, 1)] == [torch.float32, torch.int64]


# --- helpers ----------------------------------------------------------------------------------------------------------


def test_devices_of_nodes():
    def fn(x, p, i):
        return x[torch.cat([i, i])] * p, torch.max(x, 0)[0]

    gm = traced_with_fakes(fn, on_meta(5), scalar(), torch.arange(2))
    x, p, i = gm.graph.find_nodes(op="placeholder")
    (pair,) = find(gm, aten.max.dim)
    (mul,) = find(gm, aten.mul.Tensor)
    (cat,) = find(gm, aten.cat.default)
    mover = ConstructorMover("meta")
    assert [constructors.get_node_device(node) for node in (x, i, pair)] == [META, torch.device("cpu"), None]
    assert [mover.is_on_target_device(node) for node in (x, i, pair)] == [True, False, False]
    assert [constructors.is_cpu_scalar_tensor(node) for node in (x, p, i)] == [False, True, False]
    assert mover.all_inputs_are_cpu_scalar_or_on_target_device(mul)
    assert not mover.all_inputs_are_cpu_scalar_or_on_target_device(cat)  # its operands are in a list
    assert constructors.allow_cpu_device(find(gm, aten.index.Tensor)[0])
    assert not constructors.allow_cpu_device(mul)
    counts = constructors.get_cpu_indeg_count(gm.graph)
    assert [counts[node] for node in (x, cat, mul, pair)] == [0, 1, 1, 0]


def test_what_cannot_be_moved():
    gm = traced_with_fakes(
        lambda x: x[torch.arange(4) + torch.randint(2, (4,))] + torch.cat([x, x])[:4].max(0)[0], on_meta(5)
    )
    mover = ConstructorMover("meta")
    held = {str(node.target) for node in gm.graph.nodes if node.op != "placeholder" and mover.cannot_be_moved(node)}
    assert held == {"output", "aten.randint.default", "aten.arange.default"}  # both name the cpu themselves
    assert not ConstructorMover("meta", allow_outputs=True).cannot_be_moved(gm.graph.output_node())


def test_a_fill_of_unknown_count_may_be_of_one():
    gm = traced_with_fakes(
        lambda x, i, v: aten.index_put(x, [i], v), torch.ones(4), torch.arange(2) > 0, torch.ones(2), dynamic=True
    )
    (node,) = find(gm, aten.index_put.default)
    requires = constructors.is_index_put_and_requires_h2d_sync_for_gpu_value
    shape_env = node.meta["val"].fake_mode.shape_env
    guards = len(shape_env.guards)
    assert not requires(node)  # sizes 0 and 1 are told apart from symbols when tracing
    with node.meta["val"].fake_mode:
        node.args[2].meta["val"] = torch.empty(shape_env.create_unbacked_symint())
    assert requires(node)
    assert len(shape_env.guards) == guards


def test_fates_of_many():
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"p{i}") for i in range(100)]
    fates = Fates()
    for first, second in itertools.pairwise(nodes[:50]):
        fates.make_dependencies_equivalent(first, second)
    assert len({fates.root(node) for node in nodes[:50]}) == 1
    assert len({fates.root(node) for node in nodes}) == 51


def test_values_that_stay_the_same_end_the_refresh(monkeypatch):
    ran = []

    def fn(x):
        y = x[torch.arange(4) * 2]
        for _ in range(20):
            y = y.sin()
        return y

    gm = traced_with_fakes(fn, on_meta(9))
    same = constructors.same_metadata
    monkeypatch.setattr(constructors, "same_metadata", lambda a, b: ran.append(a) or same(a, b))
    assert ConstructorMover("meta")(gm.graph) == 1
    assert len(ran) == 3  # arange, mul, index


@pytest.mark.lengthy
def test_work_grows_with_the_graph_not_its_square(monkeypatch):
    steps = 0
    blocked = ConstructorMover.cannot_be_moved

    def counted_root(self, node):
        nonlocal steps
        while (above := self.parent.get(node, node)) is not node:
            steps += 1
            self.parent[node] = self.parent.get(above, above)
            node = above
        return node

    def counted_blocked(self, node):
        nonlocal steps
        steps += 1
        return blocked(self, node)

    monkeypatch.setattr(Fates, "root", counted_root)
    monkeypatch.setattr(ConstructorMover, "cannot_be_moved", counted_blocked)

    def work(count):
        nonlocal steps

        def fn(x):
            total = torch.arange(4)
            for _ in range(count):
                total = total + torch.arange(4)
            return x[total]

        gm = traced_with_fakes(fn, on_meta(5))
        steps = 0
        assert ConstructorMover("meta")(gm.graph) == count + 1
        return steps

    assert work(200) < 2.5 * work(100)
