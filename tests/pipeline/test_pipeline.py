"""Passes and pipelines: order, places of users' passes, the driver's bookkeeping, rollback, fuel, skipping."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite
from ferrite.graph.verify import InvalidGraph
from ferrite.options import Options
from ferrite.passes.joint import joint_custom_post_pass
from ferrite.pipeline import Fuel, PassContext, PassFailure, Pipeline, graph_pass, run_pipeline

pytestmark = pytest.mark.quick
aten = torch.ops.aten


def traced(fn=lambda x: torch.relu(x.sin().clone()) + 1, *inputs) -> torch.fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(*(inputs or (torch.rand(3),)))


def operators(gm) -> list[str]:
    return [node.target.__name__.split(".")[0] for node in gm.graph.nodes if node.op == "call_function"]


def swap(gm, old, new) -> int:
    found = [node for node in gm.graph.nodes if node.target is old]
    for node in found:
        node.target = new
    return len(found)


@graph_pass
def sin_to_cos(gm):
    """sin becomes cos."""
    return swap(gm, aten.sin.default, aten.cos.default)


@graph_pass
def cos_to_tan(gm, context):
    """cos becomes tan."""
    return swap(gm, aten.cos.default, aten.tan.default)


@graph_pass
def first_call_last(gm):
    """Says that it did nothing, and leaves a node behind its user."""
    first, *_, last = [node for node in gm.graph.nodes if node.op == "call_function"]
    last.append(first)
    return 0


def test_what_a_pass_of_a_user_leaves_out_of_order_is_put_right():
    gm = traced()
    before = operators(gm)
    run_pipeline(Pipeline("one", (first_call_last,)), gm, PassContext(Options(strict=True)))
    assert operators(gm) == before
    assert torch.equal(gm(torch.ones(3)), torch.ones(3).sin().relu() + 1)


def test_the_name_of_a_part_is_a_place():
    whole = graph_pass(lambda gm: 0, name="whole", names=("first", "second"))
    pipeline = Pipeline("post_grad", (NEGATED, whole, TANH))
    beside = [
        graph_pass(lambda gm: 0, name="before", before="second"),
        graph_pass(lambda gm: 0, name="behind", after="first"),
    ]
    names = [step.name for step in pipeline.with_passes(beside).passes]
    assert names == ["negated", "before", "whole", "behind", "tanh"]
    with pytest.raises(ferrite.UserError, match="second"):
        pipeline.with_passes([graph_pass(lambda gm: 0, name="lost", after="secnd")])


def own(name, old, new):
    """As one of ferrite's own passes."""

    def swapped(gm):
        return swap(gm, old, new)

    swapped.__module__ = "ferrite.passes"
    return graph_pass(swapped, name=name)


NEGATED = own("negated", aten.sin.default, aten.neg.default)
TANH = own("tanh", aten.relu.default, aten.tanh.default)


@graph_pass
def raises(gm):
    """Edits, then fails."""
    swap(gm, aten.relu.default, aten.neg.default)
    raise ValueError("no")


@graph_pass
def breaks(gm):
    """Leaves the graph with an output of another shape."""
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        output.args = (gm.graph.call_function(aten.sum.default, (output.args[0],)),)


def run(passes, gm, **settings):
    options = Options(**settings)
    reported = []
    context = PassContext(options, fuel=Fuel(options.fuel))
    records = run_pipeline(
        Pipeline("test", tuple(passes)), gm, context, lambda name, e: reported.append((name, str(e)))
    )
    return records, reported


def test_passes_run_in_order_and_are_recorded():
    gm = traced()
    records, _ = run([sin_to_cos, cos_to_tan], gm)
    assert operators(gm) == ["tan", "clone", "relu", "add"]
    assert [(r.name, dict(r.rewrites), r.nodes_before, r.nodes_after) for r in records] == [
        ("sin_to_cos", {"sin_to_cos": 1}, 6, 6),
        ("cos_to_tan", {"cos_to_tan": 1}, 6, 6),
    ]
    assert torch.equal(gm(torch.ones(3)), torch.relu(torch.ones(3).tan()) + 1)


@pytest.mark.parametrize("as_hook", [False, True])
def test_what_a_user_wrote_may_run_the_graph_as_it_is_then(as_hook):
    gm, found = traced(), []

    def look(it):
        found.append(gm(torch.ones(3)))
        return 0

    gm.forward  # noqa: B018  its code is compiled
    mine = joint_custom_post_pass if as_hook else graph_pass(look, stage="joint")
    run([NEGATED, TANH, mine], gm, joint_custom_post_pass=[look] if as_hook else [])
    expected = torch.tanh(-torch.ones(3)) + 1
    assert torch.equal(found[0], expected)
    assert torch.equal(gm(torch.ones(3)), expected)


def test_the_code_of_a_graph_is_made_once_a_stage(monkeypatch):
    made = []
    monkeypatch.setattr(torch.fx.GraphModule, "recompile", lambda self: made.append(self))
    gm = torch.fx.GraphModule(traced(), traced().graph)
    made.clear()
    records, _ = run([NEGATED, TANH, joint_custom_post_pass], gm)
    assert [record.changed for record in records] == [True, True, False]
    assert made == [gm]


def test_a_pass_is_a_value_with_a_purpose_and_an_identity():
    assert sin_to_cos.purpose == "sin becomes cos."
    assert sin_to_cos.identity
    assert sin_to_cos.identity != cos_to_tan.identity
    assert graph_pass(len, name="x").name == "x"


def test_identity_comes_from_fields_or_from_the_pass_itself():
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, gm):
            return 0

    class Named(Scale):
        def uuid(self):
            return "mine"

    assert graph_pass(Scale(1)).identity == graph_pass(Scale(1)).identity != graph_pass(Scale(2)).identity
    assert graph_pass(Named(1)).identity == graph_pass(Named(2)).identity == "mine"


def test_a_failing_pass_is_taken_back_reported_and_skipped():
    gm = traced()
    records, reported = run([sin_to_cos, raises, cos_to_tan], gm)
    assert operators(gm) == ["tan", "clone", "relu", "add"]
    assert reported == [("raises", "no")]
    assert [r.note for r in records] == ["", "failed: ValueError: no", ""]


def test_a_pass_that_breaks_the_graph_is_named_and_taken_back():
    gm = traced()
    _, reported = run([sin_to_cos, breaks], gm)
    assert operators(gm) == ["cos", "clone", "relu", "add"]
    assert [name for name, _ in reported] == ["breaks"]
    assert "law G4" in reported[0][1]


@pytest.mark.parametrize("bad", [raises, breaks])
def test_strict_raises_and_leaves_the_graph_as_it_was(bad):
    gm = traced()
    with pytest.raises(PassFailure) as caught:
        run([sin_to_cos, bad], gm, strict=True)
    assert caught.value.name == bad.name
    assert isinstance(caught.value.__cause__, (ValueError, InvalidGraph))
    assert operators(gm) == ["sin", "clone", "relu", "add"]


def test_order_and_metadata_are_repaired():
    @graph_pass
    def careless(gm):
        """Appends a node behind its user, without metadata."""
        relu = next(node for node in gm.graph.nodes if node.target is aten.relu.default)
        with gm.graph.inserting_before(gm.graph.output_node()):
            new = gm.graph.call_function(aten.neg.default, (relu.args[0],))
        relu.args = (new,)

    gm = traced()
    run([careless], gm, strict=True)
    assert operators(gm) == ["sin", "clone", "neg", "relu", "add"]
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")
    assert torch.equal(gm(torch.ones(3)), torch.relu(-torch.ones(3).sin()) + 1)


def test_skipping_by_name():
    gm = traced()
    records, _ = run([sin_to_cos, cos_to_tan], gm, skip=("sin_to_cos",))
    assert operators(gm) == ["sin", "clone", "relu", "add"]
    assert records[0].note == "skipped by option"


@pytest.mark.parametrize(("fuel", "expected"), [(0, "sin"), (1, "cos"), (2, "tan"), (None, "tan")])
def test_fuel_stops_after_so_many_rewrites(fuel, expected):
    gm = traced()
    run([sin_to_cos, cos_to_tan], gm, fuel=fuel)
    assert operators(gm)[0] == expected


def test_fuel_counts_rewrites_by_rules():
    def count_clones(fuel):
        gm = traced(lambda x: x.sin().clone().sin().clone().sin().clone() + 1)
        ferrite.passes.post_grad_passes(gm, options=Options(fuel=fuel))
        return operators(gm).count("clone")

    assert [count_clones(fuel) for fuel in (0, 1, 2, 3, None)] == [3, 2, 1, 0, 0]


def test_scope():
    training = graph_pass(lambda gm: swap(gm, aten.sin.default, aten.cos.default), name="t", scope="training")
    for is_inference, expected in ((True, "sin"), (False, "cos")):
        gm = traced()
        run_pipeline(Pipeline("test", (training,)), gm, PassContext(Options(), is_inference))
        assert operators(gm)[0] == expected


def test_a_pass_for_a_device_runs_only_where_a_value_is_on_it():
    calls = []
    for_meta = graph_pass(lambda gm: calls.append(1) or 0, name="for_meta", device="meta")
    records, _ = run([for_meta], traced())
    assert (calls, records[0].note) == ([], "nothing on meta")
    inside = traced(lambda x: aten.zeros_like.default(x, device=torch.device("meta")).sum().to("cpu") + x)
    run([for_meta], inside)
    assert calls == [1]


def test_names_collide_loudly():
    with pytest.raises(ferrite.UserError, match="two passes of the stage test are called 'sin_to_cos'"):
        Pipeline("test", (sin_to_cos, sin_to_cos))


def test_users_passes_take_the_places_they_name():
    base = Pipeline("test", (sin_to_cos, cos_to_tan))
    names = lambda **place: [  # noqa: E731
        step.name for step in base.with_passes([graph_pass(lambda gm: 0, name="mine", **place)]).passes
    ]
    assert names() == ["sin_to_cos", "cos_to_tan", "mine"]
    assert names(after="sin_to_cos") == ["sin_to_cos", "mine", "cos_to_tan"]
    assert names(before="sin_to_cos") == ["mine", "sin_to_cos", "cos_to_tan"]
    assert names(after="sin_to_cos", before="cos_to_tan") == ["sin_to_cos", "mine", "cos_to_tan"]


def test_an_impossible_or_unknown_place_is_explained():
    base = Pipeline("test", (sin_to_cos, cos_to_tan))
    with pytest.raises(ferrite.UserError, match=r"did you mean +sin_to_cos"):
        base.with_passes([graph_pass(lambda gm: 0, name="mine", after="sin_to_cs")])
    with pytest.raises(ferrite.UserError, match="cannot run both after"):
        base.with_passes([graph_pass(lambda gm: 0, name="mine", after="cos_to_tan", before="sin_to_cos")])


def test_a_pipeline_prints_as_its_documentation():
    text = str(Pipeline("test", (sin_to_cos, cos_to_tan)))
    assert text == "test: 2 passes\n   1  sin_to_cos  sin becomes cos.\n   2  cos_to_tan  cos becomes tan."


def test_a_pass_runs_alone():
    gm = traced()
    assert sin_to_cos(gm) is gm
    assert operators(gm)[0] == "cos"


# --- taking back what was done to nested graphs -----------------------------------------------------------------------


def with_branches():
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: torch.relu(x.sin()), lambda x: x.cos() - 1, (x,)) + x.sin()

    return traced(fn)


def bodies(gm) -> list[torch.fx.GraphModule]:
    return [module for module in gm.modules() if module is not gm and isinstance(module, torch.fx.GraphModule)]


def everywhere(gm) -> list[list[str]]:
    return [operators(module) for module in (gm, *bodies(gm))]


@graph_pass
def ruins_bodies(gm):
    """Edits nested graphs, hangs things on the modules, then fails."""
    if not bodies(gm):
        return
    for body in bodies(gm):
        swap(body, aten.sin.default, aten.neg.default)
        swap(body, aten.cos.default, aten.neg.default)
        body.recompile()
        body.scale = torch.ones(1)
    gm.true_graph_0 = bodies(gm)[1]
    gm.extra = torch.nn.Linear(1, 1)
    gm.register_buffer("left_behind", torch.ones(1))
    raise ValueError("no")


def test_nested_graphs_and_attributes_are_taken_back():
    gm = with_branches()
    before, names = everywhere(gm), [sorted(vars(module)) for module in (gm, *bodies(gm))]
    attributes = sorted([*gm._modules, *gm._buffers])
    wanted = [gm(x) for x in (torch.ones(3), -torch.ones(3))]
    _, reported = run([ruins_bodies], gm)
    assert [name for name, _ in reported] == ["ruins_bodies"]
    assert everywhere(gm) == before
    assert [sorted(vars(module)) for module in (gm, *bodies(gm))] == names
    assert sorted([*gm._modules, *gm._buffers]) == attributes
    assert all(map(torch.equal, wanted, [gm(x) for x in (torch.ones(3), -torch.ones(3))]))


def test_what_worked_in_nested_graphs_stays():
    gm = with_branches()
    records, _ = run([sin_to_cos, ruins_bodies, raises, cos_to_tan], gm)
    # Each body went through the passes before; what is taken back is what was done to it from outside.
    assert [[name for name in found if name in ("sin", "cos", "tan", "neg")] for found in everywhere(gm)] == [
        ["tan"],
        ["tan"],
        ["tan"],
    ]
    assert [record.note for record in records if "/" not in record.name] == [
        *("", "failed: ValueError: no", "failed: ValueError: no", "")
    ]


def test_nested_graphs_keep_their_share_of_the_counts():
    gm = with_branches()
    context = PassContext(Options(fuel=10), fuel=Fuel(10))
    run_pipeline(Pipeline("test", (sin_to_cos, ruins_bodies)), gm, context)
    assert context.rewrites["sin_to_cos"] == 2  # one in a body, one outside
    assert context.fuel.amount == 8
