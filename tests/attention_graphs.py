"""Attention written out in graphs: rewritten by the rules alone, run, compared; and pieces that tests write it with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.options import Options
from ferrite.passes.shared.attention import BEFORE_AUTOGRAD, FOR_INFERENCE
from ferrite.passes.shared.attention.bias import LOWEST
from ferrite.passes.shared.attention.cases import rows
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules, why
from tests.compare import assert_no_farther, upcast_tree
from tests.torch_level import captured

SDPA = torch.ops.aten.scaled_dot_product_attention.default
HALVES = (torch.float16, torch.bfloat16)
Function = Callable[..., Any]


def rewritten(
    fn: Function, inputs: list[Any], level: str = "torch", options: Any = None, training: bool = False
) -> tuple[Callable[..., Any], int, list[str]]:
    """What became of a function, how many calls of attention it has, and why others have not been made.

    `level`: as Dynamo captures it (torch), as symbolic tracing does (traced), or in ATen.
    """
    settings = Options(**(options or {}))
    rules = FOR_INFERENCE if level == "aten" else BEFORE_AUTOGRAD
    if level == "aten":
        gm, arrange = make_fx(fn, tracing_mode="fake")(*inputs), list
    else:
        found = captured(fn, inputs, "dynamo" if level == "torch" else "modules")
        gm, arrange = found.gm, found.arrange
    apply_rules(gm, rules, PassContext(settings, is_inference=not training))
    reasons = [miss.reason for rule in rules for miss in why(gm, rule, settings)]
    count = sum(node.target is SDPA for node in gm.graph.nodes)
    gm.recompile()

    def run(*given: Any) -> Any:
        result = gm(*arrange(given))
        return result[0] if isinstance(result, tuple) else result

    return run, count, reasons


@torch.no_grad()
def assert_fused(fn: Function, make_inputs: Callable[[], list[Any]], level: str = "torch") -> None:
    """One call is left, and it is no farther from float64 than eager is."""
    torch.manual_seed(0)
    inputs = make_inputs()
    run, count, reasons = rewritten(fn, inputs, level)
    assert count == 1, reasons
    mine, theirs = run(*inputs), fn(*inputs)
    assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    assert_no_farther(mine, theirs, fn(*upcast_tree(inputs)), "result")


def assert_refused(fn: Function, inputs: list[Any], reason: str, options: Any = None, training: bool = False) -> None:
    _, count, reasons = rewritten(fn, inputs, "torch", options, training)
    assert count == 0
    assert any(reason in each for each in reasons), reasons


def out(result: torch.Tensor) -> torch.Tensor:
    """As models go on: heads side by side."""
    return result.transpose(1, 2).reshape(result.shape[0], result.shape[2], -1)


def scores_of(q: Any, k: Any) -> Any:
    return q @ k.transpose(2, 3)


def multi_query(q: Any, k: Any, v: Any) -> Any:
    """One head of keys and values serves all queries, by broadcasting."""
    return out((q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v)


def masks() -> dict[str, torch.Tensor]:
    hidden, half_hidden = rows(), torch.zeros(2, 1, 5, 5)
    half_hidden[1, :, 1] = -math.inf
    half_hidden[0, :, 2] = LOWEST
    return {
        "rows of minus infinity": torch.zeros(5, 5).masked_fill(hidden, -math.inf),
        "rows of the lowest number": torch.zeros(5, 5).masked_fill(hidden, LOWEST),
        "both": half_hidden,
        "every key of a sequence": torch.tensor([0.0, -math.inf]).view(2, 1, 1, 1),
        "a bias for each head": torch.randn(3, 5, 5),
        "a vector": torch.randn(5),
        "nan": torch.zeros(5, 5).index_fill(0, torch.tensor(1), math.nan),
        "infinity": torch.zeros(5, 5).index_fill(1, torch.tensor(1), math.inf),
    }
