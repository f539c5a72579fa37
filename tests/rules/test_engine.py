"""What the engine does for every rule: spellings, uses, writes, symbols, streams, options, rules over whole graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite
from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph.verify import count_guards
from ferrite.options import Options
from ferrite.passes import all_rules
from ferrite.pipeline import PassContext
from ferrite.rewrite import GraphRule, Match, NodeRule, Rule, Site, apply_rules, why
from tests.graphs import operators

pytestmark = pytest.mark.quick
aten = torch.ops.aten

TWICE_NEGATED = Rule(
    name="twice_negated",
    purpose="the negative of the negative is the number",
    before=lambda x: aten.neg.default(aten.neg.default(x)),
    after=lambda x: aten.alias.default(x),
)
NEGATIVE_OF_NEGATIVE = NodeRule(
    name="negative_of_negative",
    purpose="the same, found by hand",
    targets=(aten.neg.default,),
    rewrite=lambda site: through_negative(site),
)


def through_negative(site: Site) -> Any:
    inner = site.arguments["self"]
    if inner.target is not aten.neg.default:
        return Refusal("it is no negative of a negative")
    site.through(inner)
    return inner.args[0]


def negatives(streams: tuple[Any, Any]) -> torch.fx.GraphModule:
    """-(-(x + 1)) * 2, the two negatives on the given streams, all else as the second."""
    gm = make_fx(lambda x: (x + 1).neg().neg() * 2, tracing_mode="fake")(torch.rand(3))
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    for node in calls:
        node.meta["custom"] = {"stream": streams[1], "note": node.name}
    calls[1].meta["custom"]["stream"] = streams[0]
    return gm


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [TWICE_NEGATED, NEGATIVE_OF_NEGATIVE], ids=lambda rule: rule.name)
@pytest.mark.parametrize("streams", [(1, 2), (1, None)], ids=["two", "one and the current"])
def test_a_match_never_spans_two_streams(rule, streams):
    gm = negatives(streams)
    assert apply_rules(gm, (rule,), PassContext(Options())) == 0
    assert any("run on different streams" in miss.reason for miss in why(gm, rule))


@pytest.mark.parametrize("rule", [TWICE_NEGATED, NEGATIVE_OF_NEGATIVE], ids=lambda rule: rule.name)
@pytest.mark.parametrize("stream", [None, 0, 3])
def test_on_one_stream_it_fires(rule, stream):
    gm = negatives((stream, stream))
    assert apply_rules(gm, (rule,), PassContext(Options())) == 1
    assert "neg.default" not in operators(gm)


def test_no_notes_at_all_are_the_current_stream():
    gm = negatives((None, None))
    for node in gm.graph.nodes:
        node.meta.pop("custom", None)
    next(node for node in gm.graph.nodes if node.target is aten.neg.default).meta["custom"] = None
    assert apply_rules(gm, (TWICE_NEGATED,), PassContext(Options())) == 1


def test_a_value_of_another_stream_does_not_take_a_place():
    """What is read across streams is waited for and kept alive; a new read of that kind would not be."""
    gm = negatives((2, 2))
    next(node for node in gm.graph.nodes if node.target is aten.add.Tensor).meta["custom"]["stream"] = 1
    assert apply_rules(gm, (NEGATIVE_OF_NEGATIVE,), PassContext(Options())) == 0
    assert "add is computed on another stream" in {miss.reason for miss in why(gm, NEGATIVE_OF_NEGATIVE)}


def test_new_nodes_run_on_the_stream_of_the_old():
    gm = negatives((3, 3))
    last = gm.graph.find_nodes(op="call_function", target=aten.neg.default)[-1]
    noted = last.meta["custom"]
    apply_rules(gm, (TWICE_NEGATED,), PassContext(Options()))
    (made,) = gm.graph.find_nodes(op="call_function", target=aten.alias.default)
    assert made.meta["custom"] == {"stream": 3, "note": "neg_1"}
    assert made.meta["custom"] is not noted, "two nodes would be annotated as one"


# --- what a pattern matches -------------------------------------------------------------------------------------------

TRIANGLE_NEGATED = Rule(
    name="triangle_negated",
    purpose="the negative of a triangle is the triangle of the negative",
    before=lambda x: aten.neg.default(aten.tril.default(x)),
    after=lambda x: aten.tril.default(aten.neg.default(x)),
)


def triangle(spell: Any) -> torch.fx.GraphModule:
    gm = make_fx(lambda x: x.tril().neg(), tracing_mode="fake")(torch.rand(3, 3))
    (call,) = gm.graph.find_nodes(op="call_function", target=aten.tril.default)
    call.args, call.kwargs = spell(call.args[0])
    return gm


@pytest.mark.parametrize(
    "spell",
    [
        lambda x: ((x,), {}),
        lambda x: ((x, 0), {}),
        lambda x: ((x,), {"diagonal": 0}),
        lambda x: ((), {"self": x, "diagonal": 0}),
    ],
    ids=["left out", "by position", "by name", "all by name"],
)
def test_a_default_is_one_argument_in_every_spelling(spell):
    gm = triangle(spell)
    assert apply_rules(gm, (TRIANGLE_NEGATED,), PassContext(Options())) == 1
    assert operators(gm) == ["neg.default", "tril.default"]


@pytest.mark.parametrize("spell", [lambda x: ((x, 1), {}), lambda x: ((x,), {"diagonal": 1})], ids=["position", "name"])
def test_an_argument_that_a_rule_does_not_mention_must_hold_its_default(spell):
    gm = triangle(spell)
    assert apply_rules(gm, (TRIANGLE_NEGATED,), PassContext(Options())) == 0
    assert any("diagonal" in miss.reason for miss in why(gm, TRIANGLE_NEGATED))


def test_a_value_that_one_user_reads_twice_has_two_uses():
    rule = Rule(
        name="negative_factor",
        purpose="the sign of a factor is that of the product",
        before=lambda a, b: aten.mul.Tensor(aten.neg.default(a), b),
        after=lambda a, b: aten.neg.default(aten.mul.Tensor(a, b)),
    )
    once = make_fx(lambda x, y: -x * y, tracing_mode="fake")(torch.rand(3), torch.rand(3))
    assert apply_rules(once, (rule,), PassContext(Options())) == 1
    twice = make_fx(lambda x: (y := -x) * y, tracing_mode="fake")(torch.rand(3))
    assert apply_rules(twice, (rule,), PassContext(Options())) == 0


@pytest.mark.parametrize("rule", [TWICE_NEGATED, NEGATIVE_OF_NEGATIVE], ids=lambda rule: rule.name)
def test_a_match_never_spans_a_write(rule):
    def function(x, y):
        first = -(x + 1)
        y.copy_(first)
        return -first * 2

    gm = make_fx(function, tracing_mode="fake")(torch.rand(3), torch.rand(3))
    assert "copy_.default" in operators(gm)
    assert apply_rules(gm, (rule,), PassContext(Options())) == 0


@pytest.mark.parametrize(("mode", "fires"), [("fake", 1), ("symbolic", 0)])
def test_what_cannot_be_decided_does_not_fire(mode, fires):
    def long_enough(match: Match) -> Refusal | None:
        return None if torch_api.known_true(match.value("x").shape[0] >= 3) else Refusal("it may be too short")

    rule = dataclasses.replace(TWICE_NEGATED, when=(long_enough,))
    gm = make_fx(lambda x: (x + 1).neg().neg() * 2, tracing_mode=mode)(torch.rand(3))
    guards = count_guards(gm.graph)
    assert apply_rules(gm, (rule,), PassContext(Options())) == fires
    assert count_guards(gm.graph) == guards
    assert fires or any(miss.reason == "it may be too short" for miss in why(gm, rule))


# --- options ----------------------------------------------------------------------------------------------------------


def only_if_strict(match: Match) -> Refusal | None:
    return None if match.options.strict else Refusal("strict is off")


def test_guards_and_node_rules_see_the_options_of_the_compile():
    guarded = Rule(
        name="guarded",
        purpose="only with an option",
        before=lambda x: aten.neg.default(x),
        after=lambda x: aten.mul.Tensor(x, -1),
        when=(only_if_strict,),
    )
    by_hand = NodeRule(
        name="by_hand",
        purpose="only with an option",
        targets=(aten.neg.default,),
        rewrite=lambda site: (
            site.call(aten.mul.Tensor, site.arguments["self"], -1) if site.options.strict else Refusal("strict is off")
        ),
    )
    for rule in (guarded, by_hand):
        gm = make_fx(lambda x: -x, tracing_mode="fake")(torch.rand(3))
        assert apply_rules(gm, (rule,), PassContext(Options())) == 0
        assert [miss.reason for miss in why(gm, rule)] == ["strict is off"]
        assert [miss.reason for miss in why(gm, rule, Options(strict=True))] == [""]
        assert apply_rules(gm, (rule,), PassContext(Options(strict=True))) == 1


def test_without_a_compile_options_are_the_defaults():
    gm = make_fx(lambda x: -x, tracing_mode="fake")(torch.rand(3))
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.neg.default)
    assert Site(node, lambda *args: None).options == Options()
    found = TWICE_NEGATED.pattern
    assert Match(found).options == Options()


def test_options_reach_the_rules_through_why():
    gm = make_fx(lambda a, b: a @ b, tracing_mode="fake")(torch.rand(3, 6), torch.rand(6, 5))
    assert [miss.reason for miss in ferrite.why(gm, "decompose_mm")] == ["it is not provably thin"]
    asked = Options(post_grad_fusions={"decompose_mm_pass": {"cpu_max_rows": 3}})
    assert [miss.reason for miss in ferrite.why(gm, "decompose_mm", asked)] == [""]


# --- rules over the whole graph ---------------------------------------------------------------------------------------


def test_batch_fusions_are_rules_like_others():
    names = {rule.name for rule in all_rules() if isinstance(rule, GraphRule)}
    assert {"batch_linear_post_grad", "batch_aten_tanh", "batch_aten_add"} <= names
    assert all(f"{name}: " in ferrite.passes.describe() for name in names)
    gm = make_fx(lambda *xs: [x.tanh().neg() for x in xs], tracing_mode="fake")(*(torch.rand(2) for _ in range(4)))
    misses = ferrite.why(gm, "batch_aten_tanh")
    assert str(misses[0]) == "batch_aten_tanh at tanh: 4 calls look like it, 5 are wanted"
    asked = Options(post_grad_fusions={"batch_aten_tanh": {"min_members": 4}})
    assert [miss.reason for miss in ferrite.why(gm, "batch_aten_tanh", asked)] == [""] * 4


# --- values that are numbers ------------------------------------------------------------------------------------------


def test_a_number_is_not_replaced_by_another():
    rule = NodeRule(
        name="other_size",
        purpose="wrong on purpose",
        targets=(aten.sym_size.int,),
        rewrite=lambda site: site.call(aten.sym_size.int, site.arguments["self"], 1 - site.arguments["dim"]),
    )
    gm = make_fx(lambda x: x.new_zeros(x.shape[0]), tracing_mode="symbolic")(torch.rand(3, 4))
    assert gm.graph.find_nodes(op="call_function", target=aten.sym_size.int)
    assert apply_rules(gm, (rule,), PassContext(Options())) == 0
    assert all("the result would be" in miss.reason for miss in why(gm, rule))


# --- numerics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["addmm", "batch_aten_tanh"])
def test_strict_numerics_are_the_reason_where_a_rule_may_round(name):
    gm = make_fx(lambda x: [(x @ x + x).tanh() * 2 for _ in range(5)], tracing_mode="fake")(torch.rand(3, 3))
    assert {miss.reason for miss in ferrite.why(gm, name)} == {""}
    assert {miss.reason for miss in ferrite.why(gm, name, Options(numerics="strict"))} == {
        "it may round otherwise, and the option numerics is strict"
    }


def test_strict_numerics_leave_strides_as_they_are():
    """A sum over other strides adds up in another order."""

    def function(a, b):
        return [part.sin().sum(1) for part in torch.cat([a, b]).split([3, 4])]

    inputs = [torch.rand(5, 3).t(), torch.rand(5, 4).t()]
    (rule,) = (rule for rule in all_rules() if rule.name == "cat_splitwithsizes_replace")
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    assert apply_rules(gm, (rule,), PassContext(Options(numerics="strict"))) == 0
    assert apply_rules(gm, (rule,), PassContext(Options())) == 2
