"""Attention masks that hide nothing are left out of the call, and what is known of elements holds for all of them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ferrite
from ferrite.passes.pre_grad.predicates import written_memory
from ferrite.passes.pre_grad.value_bounds import ValueBounds
from tests.compare import assert_same_as_eager, compiled_graphs, since
from tests.torch_level import captured


@pytest.fixture(autouse=True)
def torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of it are counted here."""
    monkeypatch.setenv("FERRITE_OWN_ATTENTION", "off")


FUSED = "aten._scaled_dot_product_flash_attention_for_cpu.default"


class Attention(nn.Module):
    """As a library writes it that serves padded and unpadded sequences with the same lines."""

    def __init__(self, spelled: str = "named") -> None:
        super().__init__()
        self.qkv, self.out, self.spelled = nn.Linear(16, 48), nn.Linear(16, 16), spelled

    def mask(self, x: Any) -> Any:
        batch, length, _ = x.shape
        places = torch.arange(length, device=x.device)
        return ((places[:, None] >= 0) & (places < length)).expand(batch, 1, length, length)

    def forward(self, x: Any) -> Any:
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        if self.spelled == "named":
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x), dropout_p=0.0, is_causal=False)
        else:
            found = F.scaled_dot_product_attention(q, k, v, self.mask(x))
        return self.out(found.transpose(1, 2).flatten(2))


class Padded(Attention):
    """The last place is hidden."""

    def mask(self, x: Any) -> Any:
        return torch.arange(x.shape[1], device=x.device).expand(x.shape[1], -1) < x.shape[1] - 1


class Causal(Attention):
    def mask(self, x: Any) -> Any:
        places = torch.arange(x.shape[1], device=x.device)
        return places <= places[:, None]


def calls_and_kernels() -> tuple[list[str], set[str]]:
    graphs = [graph for graph in ferrite.last_compile().graphs if graph.kind != "backward"]
    calls = [call.operator for graph in graphs for call in graph.eager_calls]
    return calls, {name for graph in graphs for kernel in graph.kernels for name in kernel.operators}


@pytest.mark.parametrize("spelled", ["named", "by position"])
def test_a_mask_that_hides_nothing_is_left_out(spelled):
    assert_same_as_eager(Attention(spelled), lambda: [torch.randn(2, 5, 16)], backward=True, fullgraph=True)
    assert ferrite.last_compile().rewrites["mask_of_nothing"] == 1
    calls, operators = calls_and_kernels()
    assert FUSED in calls
    assert not operators & {"arange", "ge", "lt", "where", "_softmax", "expand"}


@since(2, 13)
def test_one_graph_serves_every_length():
    model = Attention()
    compiled = assert_same_as_eager(model, lambda: [torch.randn(2, 5, 16)], dynamic=True, fullgraph=True)
    assert ferrite.last_compile().rewrites["mask_of_nothing"] == 1
    longer = torch.randn(3, 9, 16)
    torch.testing.assert_close(compiled(longer), model(longer))
    assert compiled_graphs() == 1


@pytest.mark.parametrize("kind", [Padded, Causal])
def test_a_mask_that_hides_something_stays(kind):
    assert_same_as_eager(kind(), lambda: [torch.randn(2, 5, 16)], fullgraph=True)
    assert "mask_of_nothing" not in ferrite.last_compile().rewrites


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_causal_mask_is_said_by_a_flag(dynamic):
    """Where lengths are known: its elements are looked at."""
    assert_same_as_eager(Causal(), lambda: [torch.randn(2, 5, 16)], backward=True, fullgraph=True, dynamic=dynamic)
    assert ("causal_mask" in ferrite.last_compile().rewrites) is not dynamic
    if not dynamic:
        calls, operators = calls_and_kernels()
        assert FUSED in calls
        assert not operators & {"arange", "ge", "le", "tril", "where", "_softmax"}


def test_numerics_of_eager_keep_the_mask():
    options = {"numerics": "strict"}
    assert_same_as_eager(Attention(), lambda: [torch.randn(2, 5, 16)], fullgraph=True, options=options)
    assert "mask_of_nothing" not in ferrite.last_compile().rewrites


def test_a_vision_transformer(monkeypatch):
    """While a graph is captured, some versions of the library make the mask that they leave out in eager."""
    pytest.importorskip("transformers")
    from tests.models.architectures import ARCHITECTURES

    utilities = importlib.import_module("transformers.masking_utils")
    monkeypatch.setattr(utilities, "_ignore_bidirectional_mask_sdpa", lambda *_, **__: False)
    model = ARCHITECTURES["vit"].build().eval()
    with torch.no_grad():
        assert_same_as_eager(lambda x: model(pixel_values=x).logits, lambda: [torch.randn(2, 3, 32, 32)], dynamic=False)
    assert ferrite.last_compile().rewrites["mask_of_nothing"] == 2
    calls, operators = calls_and_kernels()
    assert calls.count(FUSED) == 2
    assert not operators & {"arange", "ge", "where", "_softmax"}


def test_causal_attention_keeps_a_mask():
    """With both, eager raises an error or applies both, as its kernels do."""

    def fn(q: Any) -> Any:
        return F.scaled_dot_product_attention(q, q, q, torch.ones((5, 5), dtype=torch.bool), is_causal=True)

    assert_same_as_eager(fn, lambda: [torch.randn(2, 3, 5, 4)])
    assert "mask_of_nothing" not in ferrite.last_compile().rewrites


# --- bounds -----------------------------------------------------------------------------------------------------------


def arange(n: Any, *given: Any, **named: Any) -> Any:
    return torch.arange(n.shape[0], *given, **named)


def written(x: Any) -> Any:
    places = arange(x)
    places[0].sub_(1)
    return places[1:]


# Functions of a tensor with 6 rows, and the bounds of their value; None where nothing may be known.
BOUNDED: dict[str, tuple[Any, Any]] = {
    "arange": (arange, (0, 5)),
    "from a start": (lambda x: torch.arange(2, x.shape[0] + 1) * 3, (6, 18)),
    "backwards": (lambda x: torch.arange(5, -1, -2), (0, 5)),
    "parts": (lambda x: arange(x)[None, :, None][..., 0].repeat(2, 1).t(), (0, 5)),
    "differences": (lambda x: arange(x)[:, None] - arange(x), (-5, 5)),
    "one less than a number": (lambda x: 1 - torch.ones_like(x), (0, 0)),
    "a truth value that is not known": (lambda x: arange(x) > 2, (0, 1)),
    "never": (lambda x: arange(x) > 5, (0, 0)),
    "unequal": (lambda x: arange(x) != 6, (1, 1)),
    "either way": (lambda x: (arange(x) >= 0) | (x[:, 0] > 0), None),
    "not": (lambda x: ~(arange(x) < 0), (1, 1)),
    "as a truth value": (lambda x: (arange(x) + 1).bool().logical_and(torch.ones(6)), (1, 1)),
    "as numbers": (lambda x: (arange(x) >= 0).float() * 2, (2, 2)),
    "nothing times the lowest": (lambda x: torch.zeros(6) * torch.finfo(torch.float32).min, (0, 0)),
    "nothing times infinity": (lambda x: torch.zeros(6) * float("inf"), None),
    "nothing times what the type does not hold": (lambda x: torch.zeros(6, dtype=torch.bfloat16) * 3.4e38, None),
    "rounded": (lambda x: torch.full((6,), 256.0, dtype=torch.bfloat16) + 1 > 256, None),
    "a number that is none": (lambda x: torch.full((6,), float("nan")) == 0, None),
    "wraps around": (lambda x: arange(x, dtype=torch.uint8) - 1, None),
    "compared with what the type does not hold": (lambda x: arange(x, dtype=torch.uint8) > -1, None),
    "bits": (lambda x: arange(x) & 1, None),
    "written": (written, None),
    "an input": (lambda x: x * 0 == 0, None),
    "selected": (lambda x: arange(x)[x[:, 0] > 0], None),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_hold(name):
    function, expected = BOUNDED[name]
    graph = captured(lambda x: [function(x)], [torch.randn(6, 2)]).gm.graph
    results: Any = graph.output_node().args[0]
    assert ValueBounds(written_memory(graph)).of(results[0]) == expected
    if expected is not None:
        elements = function(torch.randn(6, 2))
        assert expected[0] <= elements.min().item() <= elements.max().item() <= expected[1]
