"""What a backend must keep to because of how PyTorch differentiates a captured graph and calls what was compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ferrite
from ferrite.capture import CapturedGraph, torch_api
from ferrite.lower import LoweredProgram, lower_graph
from tests.compare import assert_same_as_eager, compile_strict, since


@since(2, 13)  # before, symbols do not last through the passes of pre_grad
def test_every_value_of_a_graph_belongs_to_one_fake_mode() -> None:
    """A second one would know nothing of the symbols of the first. Dynamo's own ends where autograd begins."""
    modes: dict[str, set[int]] = {}

    def look(stage: str) -> Any:
        def hook(graph: torch.fx.Graph) -> None:
            values = [node.meta.get("val", node.meta.get("example_value")) for node in graph.nodes]
            leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(values) if torch_api.is_fake(leaf)]
            assert leaves
            modes.setdefault(stage, set()).update(id(leaf.fake_mode) for leaf in leaves)

        return hook

    stages = ("pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_post_pass")
    constant = torch.randn(4)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        parts = torch.cat(x.split(2, 1), 1)
        return (torch.nn.functional.linear(parts, w) + constant).softmax(-1)

    options = {stage: look(stage) for stage in stages}
    inputs = [torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)]
    compile_strict(fn, options=options, dynamic=True)(*inputs).sum().backward()
    assert set(modes) == set(stages)
    assert len(modes.pop("pre_grad_custom_pass")) == 1
    assert len(set().union(*modes.values())) == 1, modes


def test_a_backward_graph_compiled_later_has_the_options_of_then() -> None:
    seen: list[int] = []
    x = torch.rand(3, requires_grad=True)
    with ferrite.using(post_grad_custom_post_pass=lambda graph: seen.append(len(graph.nodes))):
        result = ferrite.compile(lambda x: x.sin().exp(), strict=True)(x)
    assert len(seen) == 1
    result.sum().backward()
    assert len(seen) == 2
    torch.testing.assert_close(x.grad, x.cos() * x.sin().exp())


def kept_twice(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.exp()).cos()


def test_a_graph_kept_for_a_second_backward_gives_it_whatever_comes_after() -> None:
    compiled, x = compile_strict(kept_twice), torch.rand(4, requires_grad=True)
    first = compiled(x).sum()
    first.backward(retain_graph=True)
    once = x.grad.clone()
    first.backward()
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, 3 * once)


def test_a_graph_kept_only_after_saved_memory_was_given_away_is_refused_not_wrong() -> None:
    """Which of the two there will be is known to nobody when the backward graph is compiled."""
    compiled, x = compile_strict(kept_twice), torch.rand(4, requires_grad=True)
    compiled(x).sum().backward()
    expected = x.grad.clone()
    with pytest.raises(RuntimeError, match="donated_buffer=False"):
        compiled(x).sum().backward(retain_graph=True)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_random_numbers_drawn_again_are_those_of_the_forward_part(dynamic: bool) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x * 2, 0.5) * torch.rand_like(x)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False) + torch.rand(8)

    assert_same_as_eager(
        fn, lambda: [torch.rand(4, 8, requires_grad=True)], backward=True, exact=False, dynamic=dynamic
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_random_numbers_are_drawn_again_inside_of_a_region(dynamic: bool) -> None:
    """Also by an operator with several results, one of which the forward part has no use for."""

    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: torch.nn.functional.dropout(x * 2) * torch.rand_like(x), x, use_reentrant=False)

    assert_same_as_eager(
        lambda x: region(region(x)) + torch.rand(8),
        lambda: [torch.rand(4, 8, requires_grad=True)],
        backward=True,
        exact=False,
        dynamic=dynamic,
    )


def test_results_that_need_no_gradient_have_no_backward_graph() -> None:
    x = torch.rand(4, requires_grad=True)
    found = compile_strict(lambda x: (x > 0.5, x.detach() * 2, x.argmax()))(x)
    assert [each.requires_grad for each in found] == [False] * 3
    assert [graph.kind for graph in ferrite.last_compile().graphs] == ["inference"]


def test_inputs_that_are_left_of_a_frozen_graph_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them keep their address is told by number, and the numbers have changed."""

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x * self.weight + self.calls * y

    compiled: list[CapturedGraph] = []

    def watched(graph: CapturedGraph, *about: Any) -> LoweredProgram:
        compiled.append(graph)
        return lower_graph(graph, *about)

    monkeypatch.setattr("ferrite.backend.lower_graph", watched)
    model = Counting().eval()
    frozen = ferrite.freeze(model, strict=True, executor="calls")
    frozen(torch.ones(3), torch.ones(3))
    (graph,) = compiled
    inputs = graph.gm.graph.find_nodes(op="placeholder")
    assert len(inputs) == len(ferrite.last_compile().graphs[0].inputs) == 3
    (place,) = graph.static_inputs
    assert inputs[place].meta["val"].shape == ()


def test_a_region_compiled_once_is_rewritten_once() -> None:
    @torch.compiler.nested_compile_region
    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(x.split(2, 1), 1).relu() * 2

    def fn(x: torch.Tensor) -> torch.Tensor:
        return layer(layer(layer(x)))

    assert_same_as_eager(fn, lambda: [torch.rand(4, 4, requires_grad=True)], backward=True)
    assert ferrite.last_compile().rewrites["mutate_cat_pass"] == 1


def by_hand(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.softmax(query @ key.transpose(-2, -1) / 4.0, -1) @ key


@pytest.mark.parametrize("kind", ["by hand", "call", "dropout"])
def test_attention_and_random_numbers_in_a_checkpoint_without_gradients(kind: str) -> None:
    """torch counts attention among what draws random numbers, and means gradients when it refuses those."""
    blocks: dict[str, Any] = {
        "by hand": by_hand,
        "call": lambda query, key: torch.nn.functional.scaled_dot_product_attention(query, key, key),
        "dropout": lambda query, key: torch.nn.functional.dropout(query) * 2,
    }

    def fn(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return checkpoint(blocks[kind], query, key, use_reentrant=False) + 1

    assert_same_as_eager(fn, lambda: [torch.randn(1, 2, 8, 16) for _ in range(2)], fullgraph=True)
