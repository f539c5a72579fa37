"""Batch fusions before autograd: members agree in everything that can be seen, and nothing crosses a write or a mode.

After a fusion values, looks, sharing, inputs and gradients are eager's; what must not be fused is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ferrite.graph.verify import count_guards, verify_graph
from ferrite.options import Options
from ferrite.passes.pre_grad.batch_fusion import FUSIONS
from ferrite.passes.pre_grad.torch_form import as_torch
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules, why
from tests.compare import assert_same_as_eager
from tests.torch_level import Captured, assert_same, captured

aten = torch.ops.aten
BY_NAME = {fusion.name: fusion for fusion in FUSIONS}
ALWAYS = Options(horizontal="always")
# One member of each fusion on its own operands: the first of shape [2, 3], then a weight and a bias.
MEMBERS: dict[str, Callable[..., Any]] = {
    "batch_linear": lambda x, w, b: F.linear(x, w, b),
    "batch_layernorm": lambda x, w, b: F.layer_norm(x, (3,), w[0], b[:3]),
    "batch_tanh": lambda x, w, b: torch.tanh(x),
    "batch_sigmoid": lambda x, w, b: x.sigmoid(),
    "batch_relu": lambda x, w, b: F.relu(x),
    "batch_detach": lambda x, w, b: x.detach(),
    "batch_nan_to_num": lambda x, w, b: torch.nan_to_num(x, 7.0),
    "batch_clamp": lambda x, w, b: x.clamp(-1, 1),
    "batch_dropout": lambda x, w, b: F.dropout(x, 1.0),
}
# Written by the same function as relu: the long sweep has them.
ALIKE = {"batch_tanh", "batch_sigmoid", "batch_nan_to_num", "batch_clamp"}
EACH = [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in MEMBERS]
ALL = pytest.mark.parametrize("name", EACH)
FRESH = pytest.mark.parametrize("name", [each for each in EACH if each.values != ("batch_detach",)])


def operands(count: int, dtype: torch.dtype = torch.float32, requires: bool = True) -> list[torch.Tensor]:
    shapes = [(2, 3), (4, 3), (4,)] * count
    return [(torch.rand(shape) * 4 - 2).to(dtype).requires_grad_(requires) for shape in shapes]


def triples(items: Sequence[Any]) -> list[Any]:
    return [items[i : i + 3] for i in range(0, len(items), 3)]


def of_each(name: str, then: Callable[[Any], Any] = torch.neg) -> Callable[..., Any]:
    return lambda *items: [then(MEMBERS[name](*each)) for each in triples(items)]


def apply(name: str, graph: Captured, options: Options = ALWAYS) -> int:
    context = PassContext(options, is_inference=not torch.is_grad_enabled())
    total = apply_rules(graph.gm, (BY_NAME[name],), context)
    assert dict(context.rewrites) == ({name: total} if total else {}), "work is counted under another name"
    return total


def assert_fused(
    function: Any, make_inputs: Any, name: str, fires: int, *, form: Any = "dynamo", **how: Any
) -> Captured:
    before = captured(function, make_inputs(), form, **how)
    after = before.copy()
    guards = count_guards(after.gm.graph)
    text = str(after.gm.graph)
    assert apply(name, after) == fires, [str(miss) for miss in why(before.gm, BY_NAME[name], ALWAYS)]
    assert (str(after.gm.graph) == text) == (fires == 0)
    assert count_guards(after.gm.graph) == guards
    verify_graph(after.gm, deep=True)
    exact = BY_NAME[name].numerics == "exact"
    assert_same(before, after, make_inputs, exact=exact)
    assert apply(name, after) == 0, "a second run changes something"
    as_torch(after.gm)
    after.gm.recompile()
    assert_same(before, after, make_inputs, exact=exact)
    return after


# --- how many, and what they must agree in ----------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize(("members", "fires"), [(4, 0), (6, 1)])
def test_five_or_more(name, members, fires):
    assert_fused(of_each(name), lambda: operands(members), name, fires)


@ALL
def test_dtypes_are_not_mixed(name):
    assert_fused(of_each(name), lambda: operands(3) + operands(3, torch.float64), name, 0)
    assert_fused(of_each(name), lambda: operands(5) + operands(5, torch.float64, requires=False), name, 2)


@ALL
def test_devices_are_not_mixed(name):
    def half_and_half():
        return [item.to("meta") if place < 9 else item for place, item in enumerate(operands(6, requires=False))]

    graph = captured(of_each(name), half_and_half())
    assert apply(name, graph) == 0


@FRESH
def test_with_and_without_gradient_are_not_mixed(name):
    assert_fused(of_each(name), lambda: operands(3) + operands(3, requires=False), name, 0)
    assert_fused(of_each(name), lambda: operands(5) + operands(5, requires=False), name, 2)


@ALL
def test_shapes_are_not_mixed(name):
    def function(*items):
        return [MEMBERS[name](x if place % 2 else x[:1], w, b).neg() for place, (x, w, b) in enumerate(triples(items))]

    assert_fused(function, lambda: operands(6), name, 0)


@FRESH
@pytest.mark.parametrize("members", [3, 5])
def test_members_in_and_out_of_no_grad(name, members):
    def function(*items):
        each = triples(items)
        outside = [MEMBERS[name](*one).neg() for one in each[:members]]
        with torch.no_grad():
            inside = [MEMBERS[name](*one).neg() for one in each[members:]]
        return outside + inside

    assert_fused(function, lambda: operands(2 * members), name, 0 if members < 5 else 2)


@FRESH
def test_members_in_and_out_of_autocast(name):
    def function(*items):
        each = triples(items)
        outside = [MEMBERS[name](*one).neg() for one in each[:3]]
        with torch.autocast("cpu", torch.bfloat16):
            inside = [MEMBERS[name](*one).neg() for one in each[3:]]
        return outside + inside

    assert_fused(function, lambda: operands(6), name, 0)
    assert_fused(function, lambda: operands(12), name, 1)  # nine of them inside


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("batch_nan_to_num", lambda x: torch.nan_to_num(x, 7.0), lambda x: torch.nan_to_num(x)),
        ("batch_nan_to_num", lambda x: torch.nan_to_num(x, posinf=1.0), lambda x: torch.nan_to_num(x, neginf=1.0)),
        ("batch_clamp", lambda x: x.clamp(0, 1), lambda x: x.clamp(min=0)),
        ("batch_clamp", lambda x: x.clamp(0, 1), lambda x: x.clamp(0.0, 1.0)),
        ("batch_clamp", lambda x: x.clamp(max=1), lambda x: x.clamp(min=1)),
        ("batch_dropout", lambda x: F.dropout(x, 1.0), lambda x: F.dropout(x, 0.0)),
        ("batch_dropout", lambda x: F.dropout(x, 1.0), lambda x: F.dropout(x, 1.0, False)),
        ("batch_layernorm", lambda x: F.layer_norm(x, (3,)), lambda x: F.layer_norm(x, (2, 3))),
        ("batch_layernorm", lambda x: F.layer_norm(x, (3,)), lambda x: F.layer_norm(x, (3,), eps=0.1)),
    ],
)
def test_values_given_by_position_belong_to_the_key(name, one, other):
    def operand(x, place):  # with NaN and infinities, except for norms
        return x if name == "batch_layernorm" else x.log() * (-1) ** place

    def mixed(*xs):
        return [(one if place % 2 else other)(operand(x, place)).neg() for place, x in enumerate(xs)]

    def make_inputs():
        return [torch.tensor([0.0, -1.0, 0.1, 0.5, 3.0, 20.0]).reshape(2, 3) + place // 4 for place in range(8)]

    assert_fused(mixed, make_inputs, name, 0)
    assert_fused(lambda *xs: [one(operand(x, place)).neg() for place, x in enumerate(xs)], make_inputs, name, 1)


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        (
            "batch_clamp",
            [
                lambda x: x.clamp(-1, 1),
                lambda x: torch.clamp(x, min=-1, max=1),
                lambda x: x.clamp(max=1, min=-1),
                lambda x: torch.clip(x, -1, 1),
                lambda x: torch.clamp(input=x, min=-1, max=1),
            ],
        ),
        (
            "batch_dropout",
            [
                lambda x: F.dropout(x, 1.0, True),
                lambda x: F.dropout(x, p=1.0),
                lambda x: F.dropout(input=x, training=True, p=1.0),
                lambda x: torch.dropout(x, 1.0, True),
                lambda x: F.dropout(x, 1.0, True, False),
            ],
        ),
        (
            "batch_relu",
            [torch.relu, F.relu, lambda x: x.relu(), lambda x: F.relu(x, False), lambda x: F.relu(input=x)],
        ),
    ],
)
def test_positions_and_keywords_are_one(name, spellings):
    def make_inputs():
        return [(torch.rand(2, 3) * 4 - 2).requires_grad_() for _ in spellings]

    assert_fused(lambda *xs: [f(x).neg() for f, x in zip(spellings, xs, strict=True)], make_inputs, name, 1)


# --- writes -----------------------------------------------------------------------------------------------------------


@FRESH
def test_nothing_is_read_across_a_write(name):
    def function(*items):
        each = triples([item * 1 for item in items])
        early = [MEMBERS[name](*one).neg() for one in each[:3]]
        each[0][0].add_(1)
        return early + [MEMBERS[name](*one).neg() for one in (each[0], *each[3:])]

    assert_fused(function, lambda: operands(5, requires=False), name, 0)


def test_members_of_both_sides_of_a_write_are_fused_apart():
    def function(x, *xs):
        early = [each.tanh().neg() for each in (x, *xs[:4])]
        x.add_(1)
        return early + [each.tanh().neg() for each in (x, *xs[4:])]

    assert_fused(function, lambda: [torch.rand(2, 3) for _ in range(9)], "batch_tanh", 2)


@FRESH
@pytest.mark.parametrize("write", [torch.relu_, lambda y: y.mul_(2), lambda y: y.view(-1).add_(1)])
def test_a_result_that_is_written_is_no_member(name, write):
    def function(*items):
        results = [MEMBERS[name](*each) for each in triples(items)]
        write(results[0])
        return [result.neg() for result in results]

    assert_fused(function, lambda: operands(6, requires=False), name, 1)
    assert_fused(function, lambda: operands(5, requires=False), name, 0)


def test_relu_in_place_writes_its_operands():
    def function(*xs):
        ys = [x.neg() for x in xs]
        results = [F.relu(y, inplace=True).cos() for y in ys]
        return results, [y.sin() for y in ys]

    assert_fused(function, lambda: [torch.rand(2, 3) - 0.5 for _ in range(6)], "batch_relu", 0)


def test_detach_of_what_is_written_or_returned_stays():
    def written(*xs):
        ys = [x * 1 for x in xs]
        parts = [y.detach() for y in ys]
        ys[0].add_(1)
        return [part.neg() for part in parts]

    assert_fused(written, lambda: [torch.rand(2, 3) for _ in range(5)], "batch_detach", 0)
    assert_fused(lambda *xs: [x.detach() for x in xs], lambda: [torch.rand(2, 3) for _ in range(6)], "batch_detach", 0)


# --- what the caller gets ---------------------------------------------------------------------------------------------


@FRESH
@pytest.mark.parametrize("view", [lambda y: y, lambda y: y.view(-1)])
def test_results_that_are_returned_share_no_memory(name, view):
    assert_fused(of_each(name, view), lambda: operands(6), name, 1)


@FRESH
def test_a_member_that_nobody_reads_is_none(name):
    def function(*items):
        results = [MEMBERS[name](*each) for each in triples(items)]
        return [result.neg() for result in results[1:]]

    before = captured(function, operands(5))
    assert apply(name, before) == 0


@FRESH
def test_what_got_no_gradient_gets_none(name):
    def function(*items):
        first, *rest = [MEMBERS[name](*each) for each in triples(items)]
        return [first.detach().neg(), *(result.neg() for result in rest)]

    assert_fused(function, lambda: operands(5), name, 0)
    assert_fused(function, lambda: operands(6), name, 1)


# --- order ------------------------------------------------------------------------------------------------------------


def test_members_that_depend_on_each_other_are_apart():
    def function(*xs):
        first = [x.tanh() for x in xs]
        return [(y * 2).tanh().neg() for y in first]

    assert_fused(function, lambda: [torch.rand(2, 3).requires_grad_() for _ in range(5)], "batch_tanh", 2)

    def chain(x):
        for _ in range(6):
            x = x.tanh().neg()
        return x

    assert_fused(chain, lambda: [torch.rand(2, 3).requires_grad_()], "batch_tanh", 0)


def test_members_are_found_however_deep_they_lie():
    def function(*xs):
        results = [x.tanh() for x in xs]
        for place in range(len(results)):
            for _ in range(3 * place):
                results[place] = results[place].neg()
        return results

    assert_fused(function, lambda: [torch.rand(2, 3).requires_grad_() for _ in range(6)], "batch_tanh", 1)


def test_three_hundred_at_most():
    def function(x):
        return torch.stack([(x * place).relu() for place in range(310)])

    before = captured(function, [torch.rand(2)], "modules")
    assert apply("batch_relu", before) == 2


def test_what_stands_between_is_moved_behind():
    def function(*xs):
        total = xs[0].neg()
        for x in xs:
            total = total + (total * 0 + 1) * x.neg().tanh()
        return total

    assert_fused(function, lambda: [torch.rand(2, 3).requires_grad_() for _ in range(6)], "batch_tanh", 1)


def groups(size: int) -> Callable[[Any], Any]:
    return lambda x: [torch.cat([(x + i + j).tanh().neg() for j in range(5)]) for i in range(size)]


def test_the_cost_is_near_linear():
    steps = []
    for size in (5, 20):
        graph = captured(groups(size), [torch.rand(2, 3)], "modules")
        context = PassContext(ALWAYS)
        apply_rules(graph.gm, (BY_NAME["batch_tanh"],), context)
        assert context.rewrites["batch_tanh"] == 1
        steps.append(context.steps / len(graph.gm.graph.nodes))
    assert steps[1] < 2 * steps[0]


# --- single fusions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norms_in_half_precision(dtype):
    assert_fused(of_each("batch_layernorm"), lambda: operands(6, dtype), "batch_layernorm", 0)
    plain = lambda *items: [F.layer_norm(x, (3,)).neg() for x, _, _ in triples(items)]  # noqa: E731
    assert_fused(plain, lambda: operands(6, dtype), "batch_layernorm", 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_in_half_precision_round_once(dtype):
    def make_inputs():
        shapes = [(16, 64), (16, 64), (16,)] * 6
        return [(torch.randn(shape) * 8).to(dtype).requires_grad_() for shape in shapes]

    assert_fused(of_each("batch_linear"), make_inputs, "batch_linear", 1)


def test_a_bias_of_one_element_is_no_bias_of_a_batch():
    def function(*items):
        return [F.linear(x, w, b[:1] if place == 0 else b).neg() for place, (x, w, b) in enumerate(triples(items))]

    assert_fused(function, lambda: operands(5), "batch_linear", 0)
    assert_fused(function, lambda: operands(6), "batch_linear", 1)


def test_with_and_without_bias_are_apart():
    def function(*items):
        return [F.linear(x, w, b if place % 2 else None).neg() for place, (x, w, b) in enumerate(triples(items))]

    assert_fused(function, lambda: operands(8), "batch_linear", 0)
    assert_fused(function, lambda: operands(10), "batch_linear", 2)


def test_layers_on_one_matrix():
    def function(x, *weights):
        return [F.linear(x, w).relu() for w in weights]

    after = assert_fused(
        function,
        lambda: [torch.rand(s).requires_grad_() for s in [(2, 3), *[(4, 3)] * 3, *[(2, 3)] * 3]],
        "batch_linear_lhs",
        1,
    )
    assert sum("linear" in str(node.target) for node in after.gm.graph.nodes) == 1


def test_dropout_keeps_the_share_and_the_scale():
    def function(*xs):
        return [F.dropout(x, 0.25).neg() for x in xs]

    graph = captured(function, [torch.ones(4000) for _ in range(6)])
    assert apply("batch_dropout", graph, Options(horizontal="always", numerics="strict")) == 0
    assert apply("batch_dropout", graph) == 1
    graph.gm.recompile()
    torch.manual_seed(0)
    for result in graph.gm(*graph.arrange([torch.ones(4000) for _ in range(6)])):
        kept = result != 0
        assert abs(kept.float().mean() - 0.75) < 0.03
        assert torch.allclose(result[kept], torch.tensor(-1 / 0.75))


def test_rounding_is_left_alone_where_numerics_are_strict():
    for name in ("batch_linear", "batch_relu", "batch_nan_to_num"):
        graph = captured(of_each(name), operands(6))
        expected = int(BY_NAME[name].numerics == "exact")
        assert apply(name, graph, Options(horizontal="always", numerics="strict")) == expected, name


# --- forms of graphs, and the whole stage -----------------------------------------------------------------------------


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 4) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(6))

    def forward(self, a, b, c, d, e, f):
        towers = zip(self.layers, self.norms, (a, b, c, d, e, f), strict=True)
        return torch.cat([torch.tanh(norm(layer(x))) for layer, norm, x in towers])


def towers_inputs() -> list[torch.Tensor]:
    return [torch.rand(2, 3) for _ in range(6)]


@pytest.mark.parametrize("form", ["dynamo", "modules"])
@pytest.mark.parametrize("name", ["batch_linear", "batch_layernorm", "batch_tanh"])
def test_modules_are_members_too(form, name):
    torch.manual_seed(0)
    module = Towers()
    before = captured(module, towers_inputs(), form)
    after = before.copy()
    assert apply(name, after) == 1
    verify_graph(after.gm, deep=True)
    if form == "modules":
        assert_same(before, after, towers_inputs, exact=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_everything_batched(dynamic):
    assert_same_as_eager(Towers(), towers_inputs, backward=True, options={"horizontal": "always"}, dynamic=dynamic)


def test_a_dynamic_batch_is_fused():
    def function(*xs):
        return [x.tanh().neg() for x in xs]

    same_size = lambda *xs: function(*(x[: xs[0].shape[0]] for x in xs))  # noqa: E731
    make_inputs = lambda: [torch.rand(4, 3).requires_grad_() for _ in range(6)]  # noqa: E731
    assert_fused(function, make_inputs, "batch_tanh", 1, symbolic=True)
    assert_fused(same_size, make_inputs, "batch_tanh", 1, symbolic=True)


def test_on_the_cpu_the_model_leaves_them():
    for name in ("batch_linear", "batch_layernorm", "batch_relu", "batch_detach"):
        graph = captured(of_each(name), operands(8))
        assert apply(name, graph, Options()) == 0
        assert all("model" in miss.reason for miss in why(graph.gm, BY_NAME[name], Options()))
