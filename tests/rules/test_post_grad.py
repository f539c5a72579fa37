"""The post-grad stage as a whole: its public doors, users' passes and hooks, outputs that must not change."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite
from ferrite.graph.verify import verify_graph
from ferrite.options import Options
from ferrite.passes import POST_GRAD, all_rules, describe, post_grad_passes
from ferrite.passes.page import read_names, reference_page
from ferrite.pipeline import PassContext, run_pipeline
from ferrite.rewrite.engine import Engine
from tests.compare import assert_same_as_eager, compile_strict
from tests.graphs import assert_same_computation, target_names

aten = torch.ops.aten
quick = pytest.mark.quick
ALONE = {"pre_grad": False, "joint": False}  # the stages before this one have rules for the same


def clone_and_add(x):
    y = x.clone()
    return y + 1


@quick
@pytest.mark.parametrize("as_aten", [False, True], ids=["torch calls", "aten"])
def test_the_stage_runs_on_an_exported_graph_in_place(as_aten):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gm, _ = torch._dynamo.export(clone_and_add, torch.randn(2), aten_graph=as_aten)
    assert "clone" in str(gm.graph)
    assert post_grad_passes(gm, is_inference=False) is gm
    assert "clone" not in str(gm.graph)
    assert torch.equal(gm(torch.ones(2)), torch.full((2,), 2.0))


@quick
def test_a_graph_without_metadata_is_refused_with_what_to_do():
    gm = torch.fx.symbolic_trace(clone_and_add)
    with pytest.raises(ferrite.UserError, match="input 'x' has no metadata"):
        post_grad_passes(gm)


@quick
@pytest.mark.parametrize("step", POST_GRAD.passes, ids=lambda step: step.name)
def test_every_step_is_callable_alone_and_can_be_skipped(step):
    gm = make_fx(clone_and_add, tracing_mode="fake")(torch.ones(3))
    assert getattr(ferrite.passes.post_grad, step.name) is step
    step(gm)
    assert torch.equal(gm(torch.ones(3)), torch.full((3,), 2.0))
    records = run_pipeline(POST_GRAD, gm, PassContext(Options(skip=(step.name,))))
    note = next(record.note for record in records if record.name == step.name)
    assert step.required or note == "skipped by option" or step.scope == "inference"


@quick
def test_every_stage_pass_and_rule_is_described():
    text = describe()
    for step in POST_GRAD.passes:
        assert f"{step.name} " in text
        assert step.purpose
    for rule in all_rules():
        assert f"{rule.name}: {rule.purpose}" in text


@quick
def test_the_page_of_passes_is_current():
    from pathlib import Path

    docs = Path(__file__).parents[2] / "docs"
    assert (docs / "passes.md").read_text() == reference_page(read_names(docs / "names.csv")), "run `make docs`"


# --- outputs ----------------------------------------------------------------------------------------------------------


def assert_outputs_kept(fn, *inputs):
    """Run the stage on a traced function; what inputs and outputs share must stay."""
    before = make_fx(fn, tracing_mode="fake")(*inputs)
    after = copy.deepcopy(before)
    post_grad_passes(after, is_inference=True, options=Options(strict=True))

    def sharing(gm):
        own = [x.clone() for x in inputs]
        results = gm(*own)
        results = results if isinstance(results, (tuple, list)) else [results]
        tensors = [*own, *results]
        storages = [t.untyped_storage()._cdata for t in tensors]
        pairs = {(i, j) for i in range(len(tensors)) for j in range(i) if storages[i] == storages[j]}
        objects = {(i, j) for i in range(len(tensors)) for j in range(i) if tensors[i] is tensors[j]}
        return pairs, objects, [t.clone() for t in tensors]

    (old_pairs, old_objects, old), (new_pairs, new_objects, new) = sharing(before), sharing(after)
    assert (old_pairs, old_objects) == (new_pairs, new_objects)
    assert all(map(torch.equal, old, new))
    return after


@quick
def test_two_copies_that_are_returned_stay_two():
    def fn(x):
        y = x + 1
        return y.clone(), y.clone()

    after = assert_outputs_kept(fn, torch.ones(3))
    assert target_names(after).count("aten.clone.default") == 1  # one of them may be y itself


@quick
def test_a_returned_copy_of_an_input_stays():
    assert_outputs_kept(lambda x: x.clone(), torch.ones(3))
    assert_outputs_kept(lambda x: (x, x.clone()), torch.ones(3))


@quick
def test_a_returned_alias_of_an_input_is_not_the_input():
    assert_outputs_kept(lambda x: aten.alias.default(x), torch.ones(3))
    assert_outputs_kept(lambda x: aten.view.default(x, [3]), torch.ones(3))


@quick
def test_a_copy_taken_before_a_write_stays():
    def fn(x):
        y = x.clone()
        x.copy_(x * 2)
        return y

    assert_outputs_kept(fn, torch.ones(3))


@quick
def test_parts_of_a_split_joined_and_returned_do_not_share_with_the_input():
    assert_outputs_kept(lambda x: torch.cat(torch.split(x, [1, 2])), torch.ones(3))


@quick
def test_a_copy_of_a_conjugate_keeps_its_values():
    assert_outputs_kept(lambda x: aten.clone.default(x.conj()) + 1, torch.ones(3, dtype=torch.complex64) * 1j)


# --- what the stage leaves --------------------------------------------------------------------------------------------


@torch.library.custom_op("post_grad_stage::increment", mutates_args={"x"})
def increment(x: torch.Tensor) -> None:
    x.add_(1)


def everything(x, w):
    """A range, an assertion, an operator that writes, a scan, a map and a write to an input."""
    with torch.profiler.record_function("range"):
        y = (x @ w + 1).clone()
    aten._assert_tensor_metadata.default(y, None, None, y.dtype)
    increment(y)
    carry, sums = torch._higher_order_ops.scan(lambda c, row: (c + row, c * row), y[0], y)
    doubled = torch._higher_order_ops.map(lambda row: row * 2, y)
    x.copy_(doubled)
    return carry, sums, torch.cat(doubled.split([1, 2]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_after_the_stage_nothing_is_left_that_was_to_go(dynamic):
    seen = []

    @ferrite.graph_pass(stage="post_grad")
    def look(gm, context):
        """Comes last."""
        seen.append(gm)
        return 0

    make = lambda: [torch.randn(3, 3), torch.randn(3, 3)]  # noqa: E731
    assert_same_as_eager(everything, make, options={"passes": [look], **ALONE}, dynamic=dynamic, graphs=1)
    *_, gm = seen  # bodies of loops come before their owner
    names = target_names(gm)
    everywhere = {name for each in seen for name in target_names(each)}
    gone = ("record_function", "assert_tensor_metadata", "auto_functionalized", "triton_kernel_wrapper_functional")
    assert not [name for name in everywhere if any(part in name for part in (*gone, "scan", "map_impl"))]
    assert names.count("while_loop") == 2
    assert "post_grad_stage.increment.default" in names
    verify_graph(gm, deep=True)
    code = gm.code
    gm.recompile()
    assert gm.code == code
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function" and node.users)


@quick
def test_a_second_run_of_the_stage_changes_nothing():
    def fn(x, w, b):
        y = torch.cat((x @ w + b).clone().split([1, 2])).relu()
        z = y.new_zeros(3, 3).index_put((torch.tensor([0, 2]),), y[:2])
        return z.amax(1), torch.cumsum(torch.full((3,), 2.0), 0) + z[0, :]

    gm = make_fx(fn, tracing_mode="fake")(torch.rand(3, 4), torch.rand(4, 3), torch.rand(3))
    for is_first in (True, False):
        text = str(gm.graph)
        records = run_pipeline(POST_GRAD, gm, PassContext(Options(strict=True)))
        assert any(record.changed for record in records) == is_first
        assert (str(gm.graph) != text) == is_first
    assert all(record.seconds >= 0 for record in records)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strict_numerics_leave_every_bit(dtype):
    """All that could be asked for is asked for: products, sums, softmax, thin products, batches."""
    asked = {"kernel_rewrites": "always", "fuse_int_mm_scale": True, "max_autotune": True, "cpu_concat_linear": True}
    fusions = ("batch_linear_post_grad", "batch_aten_tanh", "batch_aten_sigmoid", "decompose_mm_pass")
    options = Options(strict=True, numerics="strict", post_grad_fusions=fusions, **asked)

    def fn(x, w, b):
        heads = [torch.tanh(torch.sigmoid(x * i @ w + b)) for i in range(1, 7)]
        both = torch.stack(heads).sum(0) + (x @ w + w @ x)
        powers = (both - both.amax(1, keepdim=True)).exp()
        scores = (w[:3] @ both + b) + (powers / powers.sum(1, keepdim=True))[:3]
        thin = scores[:1] @ w
        steps = torch.cumsum(torch.full((8,), 0.1, dtype=x.dtype), 0)
        return [part.clone().sum(1) for part in torch.cat([scores.t(), w[:, :3]]).split([8, 8])], thin * steps

    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype) for shape in ((8, 8), (8, 8), (8,))]
    before = make_fx(fn, tracing_mode="fake")(*inputs)
    after, loose = copy.deepcopy(before), copy.deepcopy(before)
    post_grad_passes(after, is_inference=True, options=options)
    assert_same_computation(before, after, lambda: [x.clone() for x in inputs], exact=True)
    relaxed = PassContext(dataclasses.replace(options, numerics="relaxed"), is_inference=True)
    run_pipeline(POST_GRAD, loose, relaxed)
    rounding = {rule.name for rule in all_rules("post_grad") if rule.numerics != "exact"}
    expected = {"addmm", "decompose_mm", "prepare_softmax_online", "pointless_cumsum_replacement"}
    assert {*expected, "batch_linear_post_grad", "batch_aten_tanh"} <= set(relaxed.rewrites) & rounding


# --- users' passes ----------------------------------------------------------------------------------------------------


def relu_to_neg(graph):
    for node in graph.nodes:
        if node.target is aten.relu.default:
            node.target = aten.neg.default


class WithIdentity:
    def __init__(self):
        self.calls = []

    def __call__(self, graph, is_inference):
        self.calls.append((len(graph.nodes), is_inference))

    def uuid(self):
        return "with-identity"


@quick
@pytest.mark.parametrize("name", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
@pytest.mark.parametrize("as_list", [False, True])
def test_hooks_on_the_graph_work_unchanged(name, as_list):
    watcher = WithIdentity()
    hook = [relu_to_neg, watcher] if as_list else relu_to_neg
    compiled = compile_strict(lambda x: torch.relu(x) + 1, options={name: hook})
    assert torch.equal(compiled(torch.ones(3)), torch.zeros(3))
    assert watcher.calls == ([(4, True)] if as_list else [])


@quick
@pytest.mark.parametrize("executor", ["native", "calls"])
@pytest.mark.parametrize("name", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
def test_what_a_hook_leaves_out_of_order_and_without_metadata_is_repaired(name, executor):
    def careless(graph):
        """Puts a copy of the product's negative behind the node that reads it."""
        (add,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
        with graph.inserting_after(add):
            new = graph.call_function(aten.neg.default, (add.args[0],))
        with graph.inserting_after(new):
            copied = graph.call_function(aten.clone.default, (new,))
        add.args = (copied, add.args[1])

    compiled = compile_strict(lambda x: torch.abs(x) + 1, options={name: careless, "executor": executor})
    x = torch.randn(3)
    assert torch.equal(compiled(x), 1 - torch.abs(x))
    if executor == "native":  # kernels have no such operators
        return
    # the patterns run between the two places: they see what the first hook wrote, not what the second did
    calls = {call.operator for call in ferrite.last_compile().eager_calls}
    assert ("aten.clone.default" in calls) == (name == "post_grad_custom_post_pass")


@quick
def test_users_passes_run_per_compile_in_their_places():
    seen = []

    @ferrite.graph_pass(stage="post_grad", before="remove_noop_ops")
    def early(gm, context):
        """Sees the clones."""
        seen.append(("early", "aten.clone.default" in target_names(gm), context.is_inference))
        return 0

    @ferrite.graph_pass(stage="post_grad", after="remove_noop_ops")
    def late(gm):
        """Does not."""
        seen.append(("late", "aten.clone.default" in target_names(gm)))
        return 0

    fn = lambda x: torch.sin(x.clone()) + 1  # noqa: E731
    compile_strict(fn, options={"passes": [early, late], **ALONE})(torch.ones(3))
    assert seen == [("early", True, True), ("late", False)]
    torch.compiler.reset()
    compile_strict(fn)(torch.ones(3))
    assert len(seen) == 2, "the passes of one compile are not those of the next"


@quick
def test_a_users_pass_that_fails_is_reported_by_name_and_left_out():
    @ferrite.graph_pass
    def mine(gm):
        """Fails."""
        raise KeyError("lost")

    compiled = torch.compile(lambda x: x.clone() + 1, backend="ferrite", options={"passes": [mine], **ALONE})
    with pytest.warns(ferrite.FerriteWarning, match="pass 'mine' failed"):
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert ferrite.last_compile().rewrites == {"true_noop": 1}
    torch.compiler.reset()
    with pytest.raises(ferrite.CompilerBug, match="KeyError: 'lost'"):
        compile_strict(lambda x: x.clone() + 1, options={"passes": [mine]})(torch.ones(3))


@quick
def test_why_lists_candidates_and_reasons():
    gm = make_fx(lambda x: (x.clone() + 1, x.clone()), tracing_mode="fake")(torch.ones(3))
    fires, refused = ferrite.why(gm, "true_noop")
    assert (fires.node, fires.reason) == ("clone", "")
    assert (refused.node, refused.reason) == ("clone_1", "output clone_1 would become x_1 itself")
    assert str(refused).startswith("true_noop at clone_1: output clone_1 would become")
    with pytest.raises(ferrite.UserError, match="there is no rule 'tru_noop'\n  did you mean    true_noop"):
        ferrite.why(gm, "tru_noop")


@quick
def test_the_record_counts_rewrites_by_rule():
    compiled = compile_strict(lambda x, w, b: torch.mm(x, w).add(b).clone() + 1, options=ALONE)
    compiled(*(torch.ones(n) for n in ((2, 3), (3, 4), (4,))))
    record = ferrite.last_compile()
    assert record.rewrites == {"addmm": 1, "true_noop": 1}
    assert "addmm" in str(record)
    assert [step.name for step in record.graphs[0].passes] == [step.name for step in POST_GRAD.passes]


@quick
def test_branches_are_rewritten_too():
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: x.clone().sin() + 1, lambda x: x.clone() * 2, (x,))

    compiled = compile_strict(fn, options=ALONE)
    for x in (torch.ones(3), -torch.ones(3)):
        assert torch.equal(compiled(x), fn(x))
    record = ferrite.last_compile()
    assert record.rewrites["true_noop"] == 2
    inner = [step.name for step in record.graphs[0].passes if "/" in step.name]
    assert len(inner) == 2
    assert all(name.endswith("/remove_noop_ops") for name in inner)


@quick
def test_the_stage_can_be_switched_off():
    options = {"post_grad": False, "executor": "calls", **ALONE}
    compile_strict(lambda x: x.clone() + 1, options=options)(torch.ones(3))
    record = ferrite.last_compile()
    assert record.rewrites == {}
    assert "aten.clone.default" in {call.operator for call in record.eager_calls}


# --- cost and random graphs -------------------------------------------------------------------------------------------


def steps_for(layers: int) -> int:
    def fn(x, w, b):
        for _ in range(layers):
            x = torch.mm(x, w).add(b).clone().sin()
        return x

    gm = make_fx(fn, tracing_mode="fake")(torch.ones(3, 3), torch.ones(3, 3), torch.ones(3))
    context = PassContext(Options())
    rules = tuple(all_rules())
    engine = Engine(gm, rules, context)
    assert engine.run() == 2 * layers
    return context.steps


def test_matching_is_linear_in_the_nodes():
    assert steps_for(200) <= 1.1 * 10 * steps_for(20)


UNARY = [torch.sin, torch.relu, torch.clone, torch.t, lambda x: x.view(4, 4), lambda x: x[:, :], lambda x: x + 0.5]
BINARY = [torch.add, torch.mul, torch.mm, lambda a, b: torch.cat(torch.split(a + b, [1, 3])), torch.maximum]


@st.composite
def programs(draw):
    """A list of steps over a growing list of values, and which values are returned and written back."""
    steps = []
    for count in range(2, draw(st.integers(3, 12))):
        if draw(st.booleans()):
            steps.append((draw(st.integers(0, len(UNARY) - 1)), draw(st.integers(0, count - 1)), None))
        else:
            operands = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
            steps.append((draw(st.integers(0, len(BINARY) - 1)), *operands))
    total = 2 + len(steps)
    returned = draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=4))
    return steps, returned, draw(st.none() | st.integers(2, total - 1))


@settings(max_examples=60, deadline=None)
@given(programs())
def test_random_graphs_keep_values_sharing_and_writes(program):
    steps, returned, written = program

    def fn(x, y):
        values = [x, y]
        for function, first, second in steps:
            if second is None:
                values.append(UNARY[function](values[first]))
            else:
                values.append(BINARY[function](values[first], values[second]))
        if written is not None:
            x.copy_(values[written].clone())
        return [values[index] for index in returned]

    assert_outputs_kept(fn, torch.rand(4, 4), torch.rand(4, 4))


@pytest.mark.parametrize("dynamic", [False, True])
def test_training_through_the_stage(dynamic):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    assert_same_as_eager(
        model, lambda: [torch.randn(5, 4, requires_grad=True)], backward=True, dynamic=dynamic, calls=2
    )
