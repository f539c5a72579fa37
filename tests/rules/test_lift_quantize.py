"""Quantising moves above views: to the bit, with the dtypes that follow."""

from __future__ import annotations

import pytest
import torch

import ferrite
from ferrite.capture import torch_api
from ferrite.graph import fake_value
from ferrite.graph.verify import verify_graph
from ferrite.options import Options
from ferrite.passes.pre_grad.lift_quantize import LIFT
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules
from tests.compare import assert_same_as_eager
from tests.torch_level import assert_same, captured

Q = torch_api.quantized_decomposed()


def quantized(x):
    return Q.quantize_per_tensor(x, 0.05, 3, -128, 127, torch.int8)


def per_channel(x, scales, zeros, axis):
    return Q.quantize_per_channel(x, scales, zeros, axis, -128, 127, torch.int8)


def lifted(fn, inputs, form="dynamo"):
    before = captured(fn, inputs(), form)
    after = before.copy()
    count = apply_rules(after.gm, (LIFT,), PassContext(Options()))
    verify_graph(after.gm, deep=True)
    assert_same(before, after, inputs)
    return after.gm.graph, count


CHAINS = {
    "three moves": lambda y: y.transpose(1, 2).unsqueeze(0).reshape(2, 12),
    "a reshape that copies": lambda y: y.permute(2, 0, 1).reshape(4, 6),
    "flatten and squeeze": lambda y: torch.flatten(y, 1).unsqueeze(1).squeeze(1),
    "view": lambda y: y.view(6, 4).view(-1),
    "methods and functions": lambda y: torch.transpose(y, -1, -2).permute(0, 2, 1).mT,
}


@pytest.mark.parametrize("form", ["dynamo", "modules"])
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_chains_of_moves(chain, form):
    graph, fired = lifted(lambda x: quantized(chain(x.relu() + 1)), lambda: [torch.randn(2, 3, 4)], form)
    assert fired == 1
    (node,) = [node for node in graph.nodes if "quantize" in str(node.target)]
    assert "add" in str(node.args[0].target), "next to what computed the numbers"
    behind, user = [node], node
    while (user := next(iter(user.users))).op != "output":
        behind.append(user)
    assert len(behind) > 1
    assert all(fake_value(each).dtype == torch.int8 for each in behind), "metadata follows"


def moved_channels(move, axis):
    return lambda x, scales, zeros: per_channel(move(x.relu()), scales, zeros, axis).flatten() + 1


def test_channels_are_followed_everywhere():
    """Every permutation, transposition and new dimension of a cube, and every axis of the result."""
    moves = {
        **{f"permute {p}": (lambda y, p=p: y.permute(*p)) for p in [(0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)]},
        **{f"transpose {d}": (lambda y, d=d: y.transpose(*d)) for d in [(0, 1), (1, 2), (0, -1)]},
        **{f"unsqueeze {d}": (lambda y, d=d: y.unsqueeze(d)) for d in (0, 1, 2, -1)},
        "both": lambda y: y.unsqueeze(1).permute(3, 1, 0, 2).squeeze(1),
    }
    sizes = (2, 3, 4)
    count = 0
    for name, move in moves.items():
        shape = move(torch.empty(sizes)).shape
        for axis, size in enumerate(shape):

            def inputs(size=size):
                return [torch.randn(sizes), torch.rand(size) + 0.1, torch.randint(-5, 5, (size,))]

            _, fired = lifted(moved_channels(move, axis), inputs, "modules")
            assert fired == (size != 1), (name, axis)
            count += fired
    assert count > 30


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (quantized(y := x.relu().transpose(1, 2)), y + 1),
        lambda x: (quantized((y := x.relu()).transpose(1, 2)), y + 1),
        lambda x: quantized(x.transpose(1, 2)),
        lambda x: quantized(x.abs().view(torch.int32).view(torch.float32)),
        lambda x: quantized(x.relu().expand(2, 3, 4)),
    ],
)
def test_it_is_left(fn):
    _, fired = lifted(fn, lambda: [torch.randn(2, 3, 4)])
    assert fired == 0


def test_a_write_in_between():
    def fn(x):
        y = x * 2
        moved = y.transpose(1, 2)
        y.add_(1)
        return quantized(moved)

    _, fired = lifted(fn, lambda: [torch.randn(2, 3, 4)])
    assert fired == 0


def test_through_the_compiler():
    assert_same_as_eager(
        lambda x: quantized(x.relu().transpose(1, 2).reshape(2, 12)), lambda: [torch.randn(2, 3, 4)], exact=False
    )
    assert ferrite.last_compile().rewrites["lift_quantize"] == 1
