"""Equal calls become one before a graph is partitioned, and torch need not import Inductor to look for them."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

import ferrite
from ferrite.passes.joint import merge_equal_calls
from tests.compare import assert_same_as_eager
from tests.fresh_process import run_python
from tests.graphs import assert_metadata_is_true, assert_same_computation, operators

quick = pytest.mark.quick


def merged(function, *shapes, mark=None):
    """The graph of a function after the pass, which computes what it did."""

    def make_inputs():
        return [torch.rand(shape) for shape in shapes]

    before = make_fx(function, tracing_mode="fake")(*make_inputs())
    after = make_fx(function, tracing_mode="fake")(*make_inputs())
    if mark is not None:
        mark(after.graph)
    merge_equal_calls(after)
    assert_same_computation(before, after, make_inputs)
    assert_metadata_is_true(after)
    return operators(after)


@quick
def test_equal_calls_are_one_and_so_is_what_is_made_of_them():
    assert merged(lambda x, y: x.sin().exp() @ y + x.sin().exp(), (3, 3), (3, 3)).count("sin.default") == 1


@quick
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: (x.sin(), x.sin()), "sin.default"),
        (lambda x: (x.sin(), x.sin()[0]), "sin.default"),
        (lambda x: x.add(1) * x.add(1.0), "add.Tensor"),
        (lambda x: x.sin() * x.sin().add_(1), "sin.default"),
    ],
    ids=["both are returned", "a view of one is returned", "numbers of two types", "one is written to"],
)
def test_near_misses_stay_two(function, name):
    assert merged(function, (3, 4)).count(name) == 2


@quick
def test_draws_stay_two():
    gm = make_fx(lambda x: torch.rand_like(x) - torch.rand_like(x), tracing_mode="fake")(torch.rand(100))
    merge_equal_calls(gm)
    assert operators(gm).count("rand_like.default") == 2


@quick
def test_what_a_checkpoint_computes_again_is_not_what_is_saved_elsewhere():
    def mark(graph):
        first = next(node for node in graph.nodes if node.target is torch.ops.aten.sin.default)
        first.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    def twice(x):
        return x.sin() * x.sin().exp()

    assert merged(twice, (3,)).count("sin.default") == 1
    assert merged(twice, (3,), mark=mark).count("sin.default") == 2


def test_a_value_that_forward_and_backward_make_is_saved_once():
    def function(x, w):
        return (x @ w).tanh() * (x @ w).tanh()

    assert_same_as_eager(function, lambda: [torch.rand(8, 4), torch.rand(4, 16, requires_grad=True)], backward=True)
    saved = ferrite.last_compile().saved
    assert [value.operator for value in saved.kept] == ["aten.tanh.default"]
    assert ferrite.last_compile().rewrites["merge_equal_calls"] >= 2


def test_training_does_not_import_inductors_patterns():
    program = (
        "import sys, torch\n"
        "layer = torch.nn.Linear(4, 4)\n"
        "step = torch.compile(layer, backend='ferrite', options={'strict': True})\n"
        "step(torch.rand(2, 4)).sum().backward()\n"
        "assert layer.weight.grad is not None\n"
        "print([name for name in sys.modules if name == 'torch._inductor.pattern_matcher'])\n"
    )
    done = run_python("-c", program)
    assert done.stdout.strip() == "[]", done.stderr
