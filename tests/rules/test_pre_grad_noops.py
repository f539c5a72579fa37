"""What computes nothing goes away, and only that; the predicates that say so."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ferrite.graph.verify import verify_graph
from ferrite.options import Options
from ferrite.passes.pre_grad import remove_identity, remove_noop_pass, remove_reshape_pass, remove_split_ops_pass
from ferrite.passes.pre_grad.canonical import CANONICAL
from ferrite.passes.pre_grad.metadata import add_values
from ferrite.passes.pre_grad.predicates import (
    ELEMENTWISE,
    concat_view,
    is_elementwise_unary,
    is_plain,
    is_shape_view,
    requires_grad,
    sole_user,
)
from ferrite.pipeline import GraphPass, PassContext
from tests.torch_level import Captured, assert_same, captured

pytestmark = pytest.mark.quick
aten = torch.ops.aten


def after(step: GraphPass, before: Captured) -> tuple[Captured, int]:
    found = before.copy()
    count = step.function(found.gm, PassContext(Options(strict=True))) or 0
    verify_graph(found.gm, deep=True)
    return found, count


def changes(step: GraphPass, function: Callable[..., Any], make_inputs: Callable[[], list[Any]]) -> list[Any]:
    """Run one pass on what a function does, compare, and tell which calls are left."""
    before = captured(function, make_inputs())
    found, _ = after(step, before)
    assert_same(before, found, make_inputs)
    assert after(step, found)[1] == 0
    return [node.target for node in found.gm.graph.nodes if node.op.startswith("call")]


def one(*shape: int) -> Callable[[], list[Any]]:
    return lambda: [torch.randn(shape).requires_grad_()]


# --- predicates -------------------------------------------------------------------------------------------------------


def called(function: Callable[..., Any], *inputs: Any) -> torch.fx.Node:
    """The last call of a function."""
    graph = captured(function, list(inputs), "modules").gm.graph
    return [node for node in graph.nodes if node.op.startswith("call")][-1]


X = torch.rand(2, 3, 4)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.view(2, 12), True),
        (lambda x: x.reshape(2, 12), True),
        (lambda x: x.flatten(1), True),
        (lambda x: x.unflatten(2, (2, 2)), True),
        (lambda x: x[:1].squeeze(0), True),
        (lambda x: x.unsqueeze(0), True),
        (lambda x: x.ravel(), True),
        (lambda x: x.view_as(x), True),
        (lambda x: x.reshape_as(x), True),
        (lambda x: x.view(torch.int32), False),
        (lambda x: x.mT.reshape(2, 12), False),  # it copies
        (lambda x: x.transpose(0, 1), False),
        (lambda x: x[0], False),
        (lambda x: x.relu(), False),
    ],
)
def test_views_of_another_shape(function, expected):
    assert is_shape_view(called(function, X)) is expected


def test_one_reader():
    graph = captured(lambda a, b: torch.cat([a, a]).sum() + torch.cat([b]), [X[0], X[0]], "modules").gm.graph
    a, b, twice, _, once, *_ = graph.nodes
    assert sole_user(a) is None  # one user reads it twice
    assert sole_user(b) is once
    assert sole_user(twice) is not None


def test_concats():
    join = concat_view(called(lambda x: torch.stack([x, x.sin()], -1), X))
    assert join is not None
    assert (join.kind, join.dim, [node.name for node in join.operands]) == ("stack", 3, ["x", "sin"])
    assert concat_view(called(lambda x: torch.cat([x, x], axis=-1), X)).dim == 2  # type: ignore[call-arg]
    assert concat_view(called(lambda x: torch.cat(x.split(1)), X)) is None
    assert concat_view(called(lambda x: x.relu(), X)) is None


ARGUMENTS: dict[Any, dict[str, Any]] = {
    aten.clamp.default: {"min": -0.5, "max": 0.5},
    aten.clamp_min.default: {"min": 0.25},
    aten.clamp_max.default: {"max": 0.25},
    aten.round.decimals: {"decimals": 1},
    aten.to.dtype: {"dtype": torch.float64},
}


@pytest.mark.parametrize("target", ELEMENTWISE, ids=str)
def test_facts_about_elementwise_operators(target):
    rest = ARGUMENTS.get(target, {})
    node = called(lambda x: target(x, **rest), torch.rand(2, 2))
    found = is_elementwise_unary(node)
    assert found is not None
    names = [argument.name for argument in target._schema.arguments]
    assert set(found.parameters) <= set(names)
    x = torch.linspace(-2, 2, 101)
    y = target(x, **rest)
    for place in (0, 13, 50):  # one element by itself gives what it gives among others
        alone = target(x[place : place + 1], **rest)
        same = torch.equal(alone.nan_to_num(), y[place : place + 1].nan_to_num())
        assert same or (not found.exact and torch.allclose(alone, y[place : place + 1], equal_nan=True))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.relu_(),
        lambda x: F.relu(x, inplace=True),
        lambda x: x + 1,
        lambda x: x.softmax(-1),
        lambda x: torch.clamp(x, x, x),
        lambda x: x.to(torch.float64, copy=True),
    ],
)
def test_what_is_not_elementwise_or_is_more_than_that(function):
    assert is_elementwise_unary(called(function, torch.rand(2, 3))) is None


def test_who_requires_a_gradient():
    def function(x: Any, y: Any) -> Any:
        return x.sin(), y.sin(), x.detach().cos(), (x > y).float()

    inputs = [torch.rand(3).requires_grad_(), torch.rand(3)]
    for form in ("dynamo", "modules"):
        gm = captured(function, inputs, form).gm
        (results,) = gm.graph.output_node().args
        assert [requires_grad(node) for node in results] == [True, False, False, False]
        assert requires_grad(*results[:2]) is None


def test_ordinary_tensors():
    graph = captured(lambda x: x + 1, [torch.rand(2)]).gm.graph
    assert is_plain(next(iter(graph.nodes)).meta["val"])
    assert not is_plain(torch.rand(2).to_sparse())
    assert not is_plain(3)


# --- remove_identity --------------------------------------------------------------------------------------------------


class Plus(nn.Identity):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + 1


class Leaves(torch.fx.Tracer):
    """Looks into no module but the outermost and Sequential."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not isinstance(module, nn.Sequential)


def as_modules(model: nn.Module, x: torch.Tensor) -> torch.fx.GraphModule:
    gm = torch.fx.GraphModule(model, Leaves().trace(model))
    add_values(gm, [x])
    for step in CANONICAL:
        step.function(gm, PassContext(Options(strict=True)))
    return gm


def without_identities(model: nn.Module, x: torch.Tensor) -> tuple[int, list[str]]:
    gm = as_modules(model, x)
    expected, modules = model(x), [name for name, _ in model.named_modules()]
    count = remove_identity.function(gm, PassContext(Options(strict=True)))
    verify_graph(gm, deep=True)
    gm.recompile()
    result = gm(x)
    assert torch.equal(result, expected)
    assert (result is x) == (expected is x)
    assert [name for name, _ in model.named_modules()] == modules, "the user's own module changed"
    return count, [str(node.target) for node in gm.graph.nodes if node.op == "call_module"]


def test_identities_in_a_sequence():
    model = nn.Sequential(nn.Identity(), nn.ReLU(), nn.Identity(), nn.Identity())
    assert without_identities(model, torch.randn(3)) == (3, [])


def test_one_identity_under_two_names():
    same = nn.Identity()
    assert without_identities(nn.Sequential(same, nn.ReLU(), same), torch.randn(3)) == (2, [])


def test_an_identity_of_an_input_that_is_returned():
    assert without_identities(nn.Sequential(nn.Identity()), torch.randn(3)) == (1, [])


def test_an_identity_inside_a_folder_of_the_users_own():
    assert without_identities(
        nn.Sequential(nn.Sequential(nn.Identity(), nn.Tanh()), nn.Identity()), torch.randn(3)
    ) == (
        2,
        [],
    )


def test_other_identities_stay():
    assert without_identities(nn.Sequential(Plus()), torch.randn(3)) == (0, ["0"])
    hooked = nn.Identity()
    hooked.register_forward_hook(lambda module, args, result: result * 2)
    assert without_identities(nn.Sequential(hooked), torch.randn(3)) == (0, ["0"])


def test_an_identity_called_by_name():
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    gm = torch.fx.GraphModule(model, Leaves().trace(model))
    node = gm.graph.find_nodes(op="call_module", target="0")[0]
    node.args, node.kwargs = (), {"input": node.args[0]}
    add_values(gm, [torch.rand(3)])
    assert remove_identity.function(gm, PassContext(Options(strict=True))) == 1
    assert not hasattr(gm, "0")
    assert hasattr(gm, "1")


# --- remove_noop_pass -------------------------------------------------------------------------------------------------


def test_dropout_that_warns_about_its_input_stays():
    targets = changes(remove_noop_pass, lambda x: F.dropout1d(x, 0.5, False) + 1, one(2, 3))
    assert F.dropout1d in targets


def test_no_random_number_is_lost():
    """Dropout that drops draws, and what is drawn after it depends on that."""

    def function(x: Any) -> Any:
        return F.dropout2d(x, 0.5, True) + F.dropout(x, 0.0, True) + F.dropout(x, 0.5, True)

    targets = changes(remove_noop_pass, function, one(2, 2, 2, 2))
    assert targets.count(aten.dropout.default) == 1
    assert aten.feature_dropout.default in targets


def test_chains_go_as_a_whole():
    def function(x: Any) -> Any:
        y = x.contiguous().float().expand(2, 3)[:].permute(0, 1).clone()
        return torch.cat([y * 1 - 0], 1).repeat(1, 1) + 1

    assert changes(remove_noop_pass, function, one(2, 3)) == [aten.add.Tensor]


def test_what_is_returned_keeps_what_others_see_of_it():
    """Copies stay copies, views stay views, and what eager returns as itself is itself."""

    def function(x: Any) -> Any:
        y = x.sin()
        return x.clone(), x.expand(2, 3), x.contiguous(), y.clone(), y, torch.cat([y]), y * 1

    changes(remove_noop_pass, function, one(2, 3))


def test_a_join_of_one_that_is_written_leaves_the_input_alone():
    def function(x: Any) -> Any:
        y = torch.cat([x])
        y.add_(1)
        return y

    targets = changes(remove_noop_pass, function, lambda: [torch.rand(3)])
    assert aten.cat.default in targets


def test_detach_in_graphs_that_write():
    def function(x: Any, y: Any) -> Any:
        buffer = y.sin()
        buffer[0] = x[0]
        return buffer.detach() * x + y.detach()

    targets = changes(remove_noop_pass, function, lambda: [torch.rand(3).requires_grad_(), torch.rand(3)])
    assert targets.count(aten.detach.default) == 1


def test_numbers_that_are_not_known_are_no_reason():
    found = captured(lambda x, n: x * n + 1, [torch.rand(3), 1], symbolic=True)
    _, count = after(remove_noop_pass, found)
    assert count == 0


# --- remove_reshape_pass ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: x.view(6).view(3, 2) + 1, [aten.view.default]),
        (lambda x: x.view(6).unsqueeze(0).reshape(3, 2) + 1, [aten.reshape.default]),
        (lambda x: x.flatten().reshape(3, 2).squeeze().view(2, 3) + 1, []),
        (lambda x: x.reshape(1, 6).reshape(6, 1).reshape(6).reshape(3, 2) + 1, [aten.reshape.default]),
        (lambda x: x.t().reshape(6).reshape(2, 3) + 1, [aten.transpose.int, aten.reshape.default]),
        (lambda x: x.t().reshape(3, 1, 2).reshape(3, 2).sum() + 1, [aten.transpose.int, aten.sum.default]),
        (lambda x: x.view(3, 2).view(6), [aten.view.default]),
    ],
)
def test_chains_of_shapes(function, left):
    targets = changes(remove_reshape_pass, function, one(2, 3))
    assert [target for target in targets if target is not aten.add.Tensor] == left


def test_a_view_that_only_the_copy_between_allows_stays_right():
    def function(x: Any) -> Any:
        y = x.t().reshape(6).view(2, 3)
        y.add_(1)
        return y, x

    changes(remove_reshape_pass, function, lambda: [torch.rand(2, 3)])


def test_shapes_that_are_not_known_stay():
    found = captured(lambda x: x.reshape(-1).reshape(x.shape[1], x.shape[0]) + 1, [torch.rand(4, 3)], symbolic=True)
    changed, count = after(remove_reshape_pass, found)
    assert count == 0
    restored = captured(lambda x: x.reshape(-1).reshape(x.shape[0], x.shape[1]) + 1, [torch.rand(4, 3)], symbolic=True)
    changed, count = after(remove_reshape_pass, restored)
    assert count == 1
    assert_same(restored, changed, lambda: [torch.rand(4, 3)])


# --- remove_split_ops_pass --------------------------------------------------------------------------------------------


def two() -> list[Any]:
    return [torch.randn(2, 4).requires_grad_(), torch.randn(3, 4).requires_grad_()]


def test_pieces_of_a_join():
    def function(a: Any, b: Any) -> Any:
        first, second, third = torch.cat([a, b]).split([2, 1, 2])
        return first.sum() + second * third

    targets = changes(remove_split_ops_pass, function, two)
    assert aten.cat.default not in targets
    assert targets.count(aten.narrow.default) == 2


def test_pieces_of_several_operands():
    def function(a: Any, b: Any) -> Any:
        first, second = torch.cat([a, b, a.sin()]).split([5, 2])
        return first.sum(0) + second

    targets = changes(remove_split_ops_pass, function, two)
    assert targets.count(aten.cat.default) == 1
    assert aten.split_with_sizes.default not in targets


def test_a_join_that_stays_is_not_joined_twice():
    def function(a: Any, b: Any) -> Any:
        joined = torch.cat([a, b, a.sin(), b.sin()])
        first, second = joined.split([5, 5])
        return first * second, joined.exp()

    targets = changes(remove_split_ops_pass, function, two)
    assert targets.count(aten.cat.default) == 1


def test_pieces_that_nobody_reads():
    gm = captured(lambda x: (x.split(1), x.unbind(0), x * 2)[2], [torch.rand(3)], "modules").gm
    assert aten.unbind.int in {node.target for node in gm.graph.nodes}
    remove_split_ops_pass.function(gm, PassContext(Options(strict=True)))
    assert [node.target for node in gm.graph.nodes if node.op == "call_function"] == [aten.mul.Tensor]


def test_a_piece_that_is_returned_is_still_a_view():
    """Of its own, of the caller's tensor."""

    def function(x: Any) -> Any:
        (only,) = torch.split(x, 3)
        first, _ = torch.split(x, [1, 2])
        return only, first

    targets = changes(remove_split_ops_pass, function, one(3, 2))
    assert targets.count(operator.getitem) >= 2
