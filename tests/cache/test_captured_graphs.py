"""What passes make of a graph of torch calls, through the cache: from an entry it is what the passes make of it."""

from __future__ import annotations

import copy
import json
import math
import operator
import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import ferrite
from ferrite.__main__ import main
from ferrite.cache import Key, captured_key, open_store
from ferrite.cache import rewritten_graph as captured
from ferrite.capture import capture
from ferrite.capture.calls_as_data import CallDescriber, at_path, path_of, rebuilt
from ferrite.capture.edits import Before, make
from ferrite.errors import FerriteWarning, NotCached
from ferrite.options import resolve
from ferrite.runtime import run_in_eager
from tests.compare import since
from tests.models.architectures import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("artifact_cache")


class Seen:
    """One compilation: the graph behind the pre-grad passes, the functional graphs made of it, and its record."""

    def __init__(self) -> None:
        self.torch: list[Any] = []
        self.aten: list[Any] = []
        self.record: Any = None
        self.answer: Any = None

    @property
    def result(self) -> str:
        return self.record.captured.result


@pytest.fixture
def compile_twice(monkeypatch):
    """Compile a function with what passes leave in an entry, and again from it."""

    def compile_one(function, inputs, settings, grad) -> Seen:
        seen = Seen()

        def watched(gm, example_inputs, compile_graph, *rest):
            def in_eager(graph):
                seen.aten.append((graph.kind, graph.output_strides, text_of(graph.gm)))
                return run_in_eager(graph.gm)

            seen.torch.append(text_of(gm))
            return capture(gm, example_inputs, in_eager, *rest)

        with monkeypatch.context() as patch:
            patch.setattr("ferrite.backend.capture", watched)
            torch.compiler.reset()
            torch.manual_seed(0)
            given = copy.deepcopy(inputs)
            with torch.set_grad_enabled(grad):
                compiled = ferrite.compile(function, strict=True, **settings)
                answer = compiled(**given) if isinstance(given, dict) else compiled(*given)
            seen.answer = (list(tensors_in(answer)), list(tensors_in(given)), torch.random.get_rng_state())
        seen.record = ferrite.last_compile()
        return seen

    def twice(function, *inputs, grad=False, settle=False, **settings) -> tuple[Seen, Seen]:
        given = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], dict) else inputs
        if settle:  # some models break their graphs otherwise the first time
            compile_one(function, given, {**settings, "cache": False}, grad)
        return compile_one(function, given, settings, grad), compile_one(function, given, settings, grad)

    return twice


def text_of(gm: torch.fx.GraphModule) -> list[Any]:
    """All that later stages can see of a graph."""
    return [
        (
            node.op,
            node.name,
            node.target,
            repr(node.args),
            repr(node.kwargs),
            sorted(user.name for user in node.users),
            node.meta.get("stack_trace"),
            list(node.meta.get("nn_module_stack", ())),
            [name for name, _function in node.meta.get("source_fn_stack", ())],
            sorted(vars(node)),
        )
        for node in gm.graph.nodes
    ]


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def assert_same(first: Seen, second: Seen) -> None:
    assert first.torch == second.torch
    assert first.aten == second.aten
    for one, other in zip(first.answer[0] + first.answer[1], second.answer[0] + second.answer[1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(first.answer[2], second.answer[2])
    assert first.record.rewrites == second.record.rewrites
    assert names_of(first) == names_of(second)


def names_of(seen: Seen) -> list[Any]:
    return [(each.name, each.nodes_before, each.nodes_after, each.facts) for each in seen.record.passes["pre_grad"]]


# --- graphs -----------------------------------------------------------------------------------------------------------


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x):
        y = self.norm(x)
        return self.first(y) + self.second(y), F.dropout(y, 0.5, self.training)


def split_and_joined(x):
    parts = torch.split(x, 2, dim=1)
    return torch.cat([torch.relu(part) for part in parts], dim=1), torch.stack(torch.unbind(x, 0), 0)


def written(x):
    x.add_(1)
    y = x.view(-1)
    y[2:4] = 0
    return y.reshape(x.shape).contiguous() * 2, x.t().contiguous()


def by_slices(x):
    return x[..., 1:-1:2], x[None, :, 0], x[:, torch.tensor([0, 2])], x.view(-1, 2).transpose(0, 1).reshape(-1)


def in_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = (x @ x.t()).relu().relu()
    return y.float() @ x


def with_constant(x):
    return x * torch.tensor([[1.0], [math.inf], [-0.0], [0.5]]) + torch.full((4, 1), -0.0)


def by_operators(x):
    return torch.ops.aten.add.Tensor(x, torch.ops.aten.relu.default(x), alpha=2), torch.ops.aten.cat([x, x], -1)


def drawn_for_nobody(x):
    torch.rand_like(torch.cat([x[:2], x[2:]]).contiguous())
    F.dropout(x.reshape(4, 8), 0.5)
    return torch.randn_like(x)


def without_gradient(x):
    with torch.no_grad():
        y = torch.cat(torch.split(x, [3, 5], 1), 1)
    return y.detach() * x.to(torch.float64).to(torch.float32)


def by_size(x):
    return x.view(x.shape[0] * 2, -1).reshape(x.size(0), -1).expand(x.shape[0], x.shape[1]) * x.shape[0]


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


GRAPHS = [split_and_joined, written, by_slices, in_autocast, with_constant, by_operators, drawn_for_nobody]
X = torch.arange(32.0).reshape(4, 8) / 7


STATIC_AND_DYNAMIC = [False, pytest.param(True, marks=since(2, 13))]  # before, values do not keep their symbols


@pytest.mark.parametrize("dynamic", STATIC_AND_DYNAMIC)
@pytest.mark.parametrize("function", [*GRAPHS, without_gradient, by_size])
def test_a_graph_from_the_cache_is_what_passes_make(compile_twice, function, dynamic):
    first, second = compile_twice(function, X, dynamic=dynamic)
    assert [first.result, second.result] == ["miss", "hit"]
    assert_same(first, second)


@pytest.mark.parametrize("training", [False, True])
def test_a_module_from_the_cache_is_what_passes_make(compile_twice, training):
    first, second = compile_twice(Normed().train(training), X.clone().requires_grad_(), grad=True)
    assert [first.result, second.result] == ["miss", "hit"]
    assert_same(first, second)


@pytest.mark.parametrize("dynamic", STATIC_AND_DYNAMIC)
def test_attention_from_the_cache_is_one_call(compile_twice, dynamic):
    heads = torch.randn(3, 2, 4, 64, 32)
    first, second = compile_twice(attention, *heads, dynamic=dynamic)
    assert [first.result, second.result] == ["miss", "hit"]
    assert_same(first, second)
    assert dynamic or second.record.rewrites


def test_autocast_around_a_function_counts(compile_twice):
    def product(x):
        return (x @ x.t()).contiguous()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, second = compile_twice(product, X)
    assert_same(first, second)
    other, _again = compile_twice(product, X)
    assert [first.result, second.result, other.result] == ["miss", "hit", "miss"]


QUICK = ("distilbert", "resnet")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in ARCHITECTURES]
)
def test_a_model_from_the_cache_is_what_passes_make(compile_twice, name):
    architecture = ARCHITECTURES[name]
    first, second = compile_twice(architecture.model(), architecture.inputs(), settle=name not in QUICK)
    if first.record.captured is not None:  # otherwise it is no graph for this stage
        assert [first.result, second.result] == ["miss", "hit"]
    assert_same(first, second)


# --- hits and misses --------------------------------------------------------------------------------------------------


def compiled(function, *inputs, **options) -> Any:
    torch.compiler.reset()
    ferrite.compile(function, **{"strict": True, **options})(*inputs)
    return ferrite.last_compile().captured


def joined(x):
    return torch.cat(torch.split(x, 2, dim=1), dim=1) + 1


def test_a_hit_runs_no_pass(monkeypatch):
    assert compiled(joined, X).result == "miss"
    rewrites = ferrite.last_compile().rewrites
    monkeypatch.setattr("ferrite.debug.compilation.run_pipeline", None)
    monkeypatch.setattr("ferrite.backend.add_values", None)
    assert compiled(joined, X).result == "hit"
    record = ferrite.last_compile()
    assert record.rewrites == rewrites
    assert rewrites
    assert {(step.seconds, step.note) for step in record.passes["pre_grad"] if step.rewrites} == {
        (0.0, captured.FROM_CACHE)
    }


def test_a_graph_that_passes_leave_alone_is_kept_as_such():
    compiled(torch.sin, X)
    (entry,) = open_store(resolve()).entries("captured")
    assert open_store(resolve()).about(entry).metadata["nodes"] is None
    assert compiled(torch.sin, X).result == "hit"


def adds_nothing(gm, context):
    return 0


def fails(gm, context):
    raise RuntimeError("not today")


def test_what_passes_depend_on_misses():
    own = ferrite.graph_pass(stage="pre_grad", name="own")(adds_nothing)
    cases = [{}, {"skip": ("split_cat_pass",)}, {"passes": (own,)}]
    assert [compiled(joined, X, **case).result for case in cases] == ["miss"] * 3
    assert [compiled(joined, X, **case).result for case in cases] == ["hit"] * 3
    assert compiled(joined, X.double()).result == "miss"
    assert compiled(joined, X.clone().requires_grad_()).result == "miss"
    with torch.no_grad():
        assert compiled(joined, X.clone().requires_grad_()).result == "miss"


def test_names_are_part_of_the_graph():
    def other_name(x):
        total = torch.cat(torch.split(x, 2, dim=1), dim=1)
        return total + 1

    compiled(joined, X)
    assert compiled(other_name, X).result == "miss"
    assert {each.name for each in ferrite.explain_cache().captured.differences} == {"names"}


def test_without_the_cache_passes_run():
    outcome = compiled(joined, X, cache=False)
    assert (outcome.result, outcome.reason) == ("off", "option cache")


# --- what is not kept -------------------------------------------------------------------------------------------------


def branching(x):
    return torch.cond(x.sum() > 0, lambda y: torch.sin(y) * 2, lambda y: torch.exp(y) - 1, (x,))


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (branching, {}, "a GraphModule"),
        (joined, {"fuel": 100}, "option fuel"),
        (joined, {"rounds": {"split_cat_pass": 2}, "fuel": 0}, "option fuel"),
        pytest.param(lambda x: x[x > 1].sum(), {}, "data decides about sizes in it", marks=since(2, 13)),
    ],
)
@pytest.mark.filterwarnings("ignore")
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_what_is_not_kept_says_why(function, options, reason):
    for _ in range(2):
        outcome = compiled(function, X, **options)
        assert outcome.result == "not kept"
        assert reason in outcome.reason
    assert not list(open_store(resolve()).entries("captured"))


def test_a_failing_pass_is_seen_every_time():
    own = ferrite.graph_pass(stage="pre_grad", name="fails")(fails)
    for _ in range(2):
        with pytest.warns(FerriteWarning, match="not today"):
            outcome = compiled(joined, X, passes=(own,), strict=False)
        assert outcome.result == "not kept"


def test_a_key_that_cannot_be_made_costs_the_cache_alone(monkeypatch):
    def fail(*_args, **_kwargs):
        raise RuntimeError("no text today")

    monkeypatch.setattr("ferrite.cache.captured_key", fail)
    outcome = compiled(joined, X, strict=False)
    assert (outcome.result, outcome.reason) == ("not kept", "no key could be made: RuntimeError: no text today")


# --- what is wrong with an entry --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows: rows[:-1],
        lambda rows: [*rows[:-1], 1000],
        lambda rows: [{**row, "call": ["call_function", "torch:nothing", ["tuple"], None]} for row in map(whole, rows)],
        lambda rows: [
            {**row, "call": ["call_function", "os:system", ["tuple", "true"], None]} for row in map(whole, rows)
        ],
        lambda rows: [{"call": ["call_method", "neg", ["tuple", ["node", 9]], None], "name": "y", "like": None}, *rows],
        lambda rows: "nothing",
    ],
)
def test_an_entry_that_makes_no_sense_is_made_anew(damage):
    compiled(joined, X)
    store = open_store(resolve())
    (entry,) = store.entries("captured")
    about = store.about(entry)
    metadata = {**about.metadata, "nodes": damage(about.metadata["nodes"])}
    store.publish(Key.of("captured", about.components), {}, metadata)
    for result in ("miss", "hit"):
        torch.compiler.reset()
        function = ferrite.compile(joined, strict=True)
        torch.testing.assert_close(function(X), joined(X))
        assert ferrite.last_compile().captured.result == result


def whole(row):
    return {"is": row} if isinstance(row, int) else row


# --- graphs as data ---------------------------------------------------------------------------------------------------

VALUES = [
    *(None, True, 1, 2**70, "text", 0.1, -0.0, math.inf, 1e-310, complex(-0.0, 2.0), ..., slice(1, None, -1)),
    *((), (1, [2, (3,)]), [], {"a": (1,), "b": None}, torch.float32, torch.bfloat16, torch.device("cuda", 1)),
    *(
        torch.strided,
        torch.sparse_coo,
        torch.channels_last,
        torch.contiguous_format,
        torch.Size([2, 3]),
        range(1, 9, 2),
    ),
    *(torch.relu, operator.add, F.gelu, torch.ops.aten.add.Tensor, torch.ops.aten.cat, torch.nn.functional.layer_norm),
]


@pytest.mark.quick
@pytest.mark.parametrize("value", VALUES, ids=lambda value: re.sub(r" at 0x[0-9a-f]+", "", repr(value)))
def test_arguments_come_back_as_they_were(value):
    found = rebuilt(json.loads(json.dumps(CallDescriber([]).value(value))), [])
    assert type(found) is type(value)
    assert repr(found) == repr(value)
    assert found is value or not callable(value)


@pytest.mark.quick
@pytest.mark.parametrize("value", [object(), torch.zeros(1), lambda: 0, copy.copy, {1}, X.relu, torch.nn.Linear(1, 1)])
def test_what_has_no_text_is_refused(value):
    with pytest.raises(NotCached):
        CallDescriber([]).value((value,))


@pytest.mark.quick
def test_only_inputs_whose_looks_say_all_have_a_key():
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    node = next(iter(gm.graph.nodes))
    for value in (None, torch.zeros(2), object()):
        node.meta["example_value"] = value
        with pytest.raises(NotCached, match="input x"):
            captured_key(gm, resolve(), sources="0")
    node.meta["example_value"] = 3
    assert captured_key(gm, resolve(), sources="0").components["input 0"] == "3"


@pytest.mark.quick
def test_a_path_leads_to_functions_of_torch_alone():
    assert at_path(path_of(torch.nn.functional.silu)) is torch.nn.functional.silu
    for path in ("os:system", "torch:missing", "ops:aten.missing.default"):
        with pytest.raises(NotCached):
            at_path(path)


@pytest.mark.quick
@pytest.mark.parametrize("change", ["input", "constant", "note", "name"])
def test_edits_that_have_no_form_are_refused(change):
    gm = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    before = Before(gm)
    relu = next(node for node in gm.graph.nodes if node.target is torch.relu)
    with gm.graph.inserting_before(relu):
        if change == "input":
            gm.graph.placeholder("y")
        elif change == "constant":
            gm.register_buffer("held", torch.zeros(1))
            relu.args = (gm.graph.get_attr("held"),)
        elif change == "note":
            relu.meta["custom"] = {"stream": 1}
        else:
            relu.name = "other"
    with pytest.raises(NotCached):
        before.edits(gm)


@pytest.mark.quick
def test_nodes_are_made_moved_edited_and_erased():
    def traced():
        gm = torch.fx.symbolic_trace(lambda x, y: (torch.relu(x) + torch.exp(y), x * 1.0, torch.sin(x)))
        for number, node in enumerate(gm.graph.nodes):
            node.meta["stack_trace"] = f"line {number}"
        return gm

    one, other = traced(), traced()
    before = Before(one)
    x, _y, relu, exp, add, mul, sin, output = one.graph.nodes
    relu.prepend(sin)
    with one.graph.inserting_after(exp):
        made = one.graph.call_method("clamp", (exp,), {"min": 0})
    made.meta["stack_trace"] = exp.meta["stack_trace"]
    add.args = (sin, made)
    exp.target = torch.expm1
    output.args = ((add, x, sin),)
    for node in (mul, relu):
        one.graph.erase_node(node)
    one.recompile()
    make(other, json.loads(json.dumps(before.edits(one))))
    other.graph.lint()
    assert text_of(other) == text_of(one)
    assert other.code == one.code


# --- reports ----------------------------------------------------------------------------------------------------------


def test_commands_and_reports_show_it(capsys):
    compiled(joined, X)
    compiled(joined, torch.randn(6, 8))
    report = str(ferrite.explain_cache())
    assert report.startswith("captured graph: miss, entry ")
    compiled(joined, X)
    assert str(ferrite.explain_cache()).startswith("captured graph: hit, entry ")
    assert "captured graph" in str(ferrite.last_compile())
    capsys.readouterr()
    assert main(["cache", "ls", "--kind", "captured"]) == 0
    assert capsys.readouterr().out.count("torch calls, 1 inputs") == 2
    entry = next(iter(open_store(resolve()).entries("captured")))
    assert main(["cache", "explain", entry.digest[:12]]) == 0
    assert "input 0" in capsys.readouterr().out
    assert main(["cache", "verify"]) == 0
