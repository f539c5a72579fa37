"""Linear layers side by side, and sums of them on the pieces of one input, before autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ferrite.graph.verify import count_guards, verify_graph
from ferrite.options import Options
from ferrite.passes.pre_grad.linears import PARALLEL_RULES
from ferrite.passes.pre_grad.sum_of_linears import SUM_RULES
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules, why
from tests.compare import assert_same_as_eager
from tests.torch_level import Captured, assert_same, captured

aten = torch.ops.aten
ALWAYS = Options(horizontal="always")
Shape = tuple[int, ...]


def numbers(*shapes: Shape, dtype: torch.dtype = torch.float32) -> Callable[[], list[torch.Tensor]]:
    return lambda: [(torch.rand(shape) - 0.5).to(dtype).requires_grad_() for shape in shapes]


def apply(graph: Captured, rules: Any, options: Options = ALWAYS, is_inference: bool = False) -> int:
    return apply_rules(graph.gm, rules, PassContext(options, is_inference))


def assert_merged(function: Any, make_inputs: Any, fires: int, rules: Any = PARALLEL_RULES, **how: Any) -> Captured:
    before = captured(function, make_inputs(), **how)
    after = before.copy()
    guards = count_guards(after.gm.graph)
    reasons = [str(miss) for rule in rules for miss in why(before.gm, rule, ALWAYS)]
    assert apply(after, rules) == fires, reasons
    assert count_guards(after.gm.graph) == guards
    verify_graph(after.gm, deep=True)
    assert_same(before, after, make_inputs, exact=False)
    assert apply(after, rules) == 0, "a second run changes something"
    return after


def count(graph: Captured, target: Any) -> int:
    return sum(node.target is target for node in graph.gm.graph.nodes)


# --- layers on one input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", range(2, 9))
def test_any_number_of_layers(layers):
    def function(x, *weights):
        return [F.linear(x, w).relu() for w in weights]

    after = assert_merged(function, numbers((2, 3), *[(place + 1, 3) for place in range(layers)]), 1)
    assert count(after, aten.linear.default) == 1


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 2, 3), (2, 1, 2, 3), (0, 3)])
@pytest.mark.parametrize("biases", [(False, False), (True, True), (False, True), (True, False)])
def test_any_rank_and_biases_here_and_there(shape, biases):
    def function(x, w, v, b, c):
        return F.linear(x, w, b if biases[0] else None).relu(), F.linear(x, v, c if biases[1] else None).tanh()

    assert_merged(function, numbers(shape, (4, 3), (2, 3), (4,), (2,)), 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_precision(dtype):
    def function(x, w, v, b, c):
        return F.linear(x, w, b).relu(), F.linear(x, v, c).tanh()

    assert_merged(function, numbers((4, 32), (8, 32), (4, 32), (8,), (4,), dtype=dtype), 1)


def test_other_inputs_and_dtypes_are_apart():
    assert_merged(
        lambda x, y, w, v: (F.linear(x, w).relu(), F.linear(y, v).tanh()), numbers((2, 3), (2, 3), (4, 3), (4, 3)), 0
    )
    integers = lambda: [torch.arange(6).reshape(2, 3), torch.ones(4, 3).long(), torch.ones(4, 3).long()]  # noqa: E731
    assert_merged(lambda x, w, v: (F.linear(x, w).neg(), F.linear(x, v).neg()), integers, 0)


def test_one_weight_for_two_layers_is_multiplied_once():
    def function(x, w, v, b, c):
        both = F.linear(x, w, b).relu(), F.linear(x, w, b).tanh()
        return *both, F.linear(x, v, c).sin(), F.linear(x, w, c).cos()

    after = assert_merged(function, numbers((2, 3), (4, 3), (4, 3), (4,), (4,)), 1)
    (cat, *_) = (node for node in after.gm.graph.nodes if node.target is aten.cat.default)
    assert len(cat.args[0]) == 3
    assert_merged(lambda x, w: (F.linear(x, w), F.linear(x, w)), numbers((2, 3), (4, 3)), 1)


def test_a_member_without_gradients_is_left_out():
    def function(x, u, v, w):
        with torch.no_grad():
            first = F.linear(x, u).relu()
        return first, F.linear(x, v).relu(), F.linear(x, w).relu()

    after = assert_merged(function, numbers((2, 3), (4, 3), (4, 3), (4, 3)), 1)
    assert count(after, aten.linear.default) == 2


def test_weights_with_and_without_gradient():
    def make_inputs():
        x, w, v = numbers((2, 3), (4, 3), (2, 3))()
        return [x.detach(), w, v.detach()]

    assert_merged(lambda x, w, v: (F.linear(x, w).relu(), F.linear(x, v).tanh()), make_inputs, 0)
    with_input = lambda: [x.detach() if place == 1 else x for place, x in enumerate(numbers((2, 3), (4, 3), (2, 3))())]  # noqa: E731
    assert_merged(lambda x, w, v: (F.linear(x, w).relu(), F.linear(x, v).tanh()), with_input, 1)


@pytest.mark.parametrize("write", [torch.relu_, lambda y: y.add_(1), lambda y: F.relu(y, inplace=True)])
def test_a_result_that_is_written_is_left_out(write):
    def function(x, u, v, w):
        first = F.linear(x, u)
        write(first)
        return first.cos(), F.linear(x, v).relu(), F.linear(x, w).relu()

    after = assert_merged(function, numbers((2, 3), (4, 3), (4, 3), (4, 3)), 1)
    assert count(after, aten.linear.default) == 2


def test_nothing_crosses_a_write_to_the_input_or_a_weight():
    def to_the_input(x, w, v):
        y = x * 1
        first = F.linear(y, w).relu()
        y.add_(1)
        return first, F.linear(y, v).relu()

    def to_a_weight(x, w, v):
        first = F.linear(x, w).relu()
        v.add_(1)
        return first, F.linear(x, v).relu()

    plain = lambda: [x.detach() for x in numbers((2, 3), (4, 3), (4, 3))()]  # noqa: E731
    assert_merged(to_the_input, plain, 0)
    assert_merged(to_a_weight, plain, 0)


def test_autocast_is_a_boundary():
    def function(x, w, v):
        first = F.linear(x, w).relu()
        with torch.autocast("cpu", torch.bfloat16):
            second = F.linear(x, v).relu()
        return first, second

    make_inputs = numbers((2, 3), (4, 3), (4, 3))
    assert_merged(function, make_inputs, 0)

    def inside(x, w, v):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w).relu(), F.linear(x, v).relu()

    assert_merged(inside, make_inputs, 1)


def test_layers_that_depend_on_each_other_stay():
    def function(x, w, v):
        first = F.linear(x, w)
        return first.relu(), F.linear(x, v * first.sum()).relu()

    assert_merged(function, numbers((2, 3), (4, 3), (4, 3)), 0)


def test_symbolic_sizes():
    def function(x, w, v):
        return F.linear(x, w).relu(), F.linear(x, v).tanh()

    assert_merged(function, numbers((5, 3), (4, 3), (2, 3)), 0, symbolic=True)  # also the weights' sizes are symbols
    x = torch.rand(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    before = captured(function, [x, torch.rand(4, 3), torch.rand(2, 3)])
    assert apply(before, PARALLEL_RULES) == 1
    verify_graph(before.gm, deep=True)


# --- one weight -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_inputs_of_any_leading_shape(bias):
    def function(w, b, *xs):
        return [F.linear(x, w, b if bias else None).relu() for x in xs]

    after = assert_merged(function, numbers((4, 3), (4,), (2, 3), (3,), (1, 2, 3), (0, 3), (2, 1, 2, 3)), 1)
    assert count(after, aten.linear.default) == 1


def test_transposed_inputs_and_returned_results():
    def function(w, x, y):
        return F.linear(x.t(), w), F.linear(y, w).view(-1)

    assert_merged(function, numbers((4, 3), (3, 2), (2, 3)), 1)


# --- when it pays -----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(size, size) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("options", "size", "no_grad", "fires"),
    [
        ({"freeze": True}, 32, True, 1),
        ({"freeze": True}, 32, False, 0),
        ({"freeze": True}, 8, True, 0),  # one product would be too large for the quick way that three take
        ({}, 32, True, 0),
        ({"freeze": True, "horizontal": "off"}, 32, True, 0),
        ({"freeze": True, "numerics": "strict"}, 32, True, 0),
        ({"horizontal": "always"}, 4, False, 1),
    ],
)
def test_when_it_pays_on_the_cpu(options, size, no_grad, fires):
    with torch.set_grad_enabled(not no_grad):
        graph = captured(Attention(size), [torch.rand(2, 32, size)])
        assert apply(graph, PARALLEL_RULES, Options(**options), is_inference=no_grad) == fires


@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_compiled(dynamic):
    assert_same_as_eager(
        Attention(8), lambda: [torch.rand(2, 5, 8)], backward=True, options={"horizontal": "always"}, dynamic=dynamic
    )


def test_attention_as_symbolic_tracing_has_it():
    torch.manual_seed(0)
    assert_merged(Attention(8), lambda: [torch.rand(2, 5, 8)], 1, form="modules")


# --- sums of layers ---------------------------------------------------------------------------------------------------

TREES: dict[int, Callable[..., Any]] = {
    2: lambda a, b: b + a,
    3: lambda a, b, c: a + (c + b),
    4: lambda a, b, c, d: (d + a) + (b + c),
    5: lambda a, b, c, d, e: a + (b + (c + (d + e))),
}


@pytest.mark.parametrize("pieces", TREES)
@pytest.mark.parametrize("biases", ["none", "all", "some"])
def test_any_tree_of_sums(pieces, biases):
    widths = [place + 1 for place in range(pieces)]

    def function(x, *rest):
        weights, given = rest[:pieces], rest[pieces:]
        has = [biases == "all" or (biases == "some" and place % 2 == 1) for place in range(pieces)]
        parts = zip(x.split(widths, -1), weights, given, has, strict=True)
        return TREES[pieces](*(F.linear(part, w, b if use else None) for part, w, b, use in parts))

    shapes = [(4, sum(widths)), *[(3, width) for width in widths], *[(3,)] * pieces]
    after = assert_merged(function, numbers(*shapes), 1, SUM_RULES)
    assert count(after, aten.linear.default) == 1


@pytest.mark.parametrize(
    ("function", "fires", "left"),
    [
        (lambda x, u, v, w, y: F.linear(x[:, :2], u) + F.linear(x[:, :2], v), 0, 2),
        (lambda x, u, v, w, y: F.linear(x[:, :2], u) + F.linear(x[:, 1:3], v), 0, 2),
        (lambda x, u, v, w, y: torch.add(F.linear(x[:, :2], u), F.linear(x[:, 2:4], v), alpha=2), 0, 2),
        (lambda x, u, v, w, y: F.linear(x[:, :2], u) - F.linear(x[:, 2:4], v), 0, 2),
        (lambda x, u, v, w, y: y + F.linear(x[:, 2:4], u) + 3 * y + F.linear(x[:, :2], v), 1, 1),
        (lambda x, u, v, w, y: F.linear(x[:, :2], u) + F.linear(x[:, 2:4], v) + F.linear(x[:, 6:], w), 1, 2),
        (lambda x, u, v, w, y: F.linear(x[:2], u[:, :1].repeat(1, 8)) + F.linear(x[2:], v[:, :1].repeat(1, 8)), 0, 2),
    ],
    ids=["piece twice", "overlap", "alpha", "difference", "others join", "a gap", "along rows"],
)
def test_which_sums(function, fires, left):
    after = assert_merged(function, numbers((4, 8), *[(3, 2)] * 3, (3,)), fires, SUM_RULES)
    assert count(after, aten.linear.default) == left


def test_two_inputs_in_one_sum():
    def function(x, y, *weights):
        pieces = (*x.chunk(2, -1), *y.chunk(2, -1))
        a, b, c, d = (F.linear(piece, w) for piece, w in zip(pieces, weights, strict=True))
        return (a + c) + (d + b)

    after = assert_merged(function, numbers((4, 4), (4, 4), *[(3, 2)] * 4), 1, SUM_RULES)
    assert count(after, aten.linear.default) == 2


def test_a_write_between_the_layers_keeps_them_apart():
    def function(x, u, v):
        y = x * 1
        first = F.linear(y[:, :2], u)
        y.add_(1)
        return first + F.linear(y[:, 2:], v)

    plain = lambda: [x.detach() for x in numbers((4, 4), (3, 2), (3, 2))()]  # noqa: E731
    assert_merged(function, plain, 0, SUM_RULES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sums_in_any_precision(dtype):
    def function(x, u, v, b):
        return F.linear(x[:, :16], u, b) + F.linear(x[:, 16:], v)

    assert_merged(function, numbers((8, 32), (4, 16), (4, 16), (4,), dtype=dtype), 1, SUM_RULES)


@pytest.mark.parametrize(
    ("rows", "options", "fires"),
    [(64, {}, 1), (2, {}, 0), (2, {"horizontal": "always"}, 1), (64, {"numerics": "strict"}, 0)],
)
def test_when_a_sum_pays(rows, options, fires):
    function = lambda x, u, v: F.linear(x[:, :2], u) + F.linear(x[:, 2:], v)  # noqa: E731
    graph = captured(function, numbers((rows, 4), (3, 2), (3, 2))())
    assert apply(graph, SUM_RULES, Options(**options)) == fires


def test_sums_compiled():
    function = lambda x, u, v: F.linear(x[:, :2], u) + F.linear(x[:, 2:], v)  # noqa: E731
    assert_same_as_eager(function, numbers((64, 4), (3, 2), (3, 2)), backward=True)
