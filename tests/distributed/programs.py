"""Graphs with collectives, by hand, in a process group of imagined ranks; and what is in them afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferrite.options import resolve
from ferrite.passes.post_grad import POST_GRAD
from ferrite.pipeline import PassContext, Pipeline, run_pipeline
from tests.graphs import target_names, traced_with_fakes

c10d = torch.ops._c10d_functional
RANKS = 8


def gathered(x: torch.Tensor, group: str = "0", ranks: int = RANKS) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, ranks, group))


def scattered(x: torch.Tensor, op: str = "sum", group: str = "0", ranks: int = RANKS) -> torch.Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, op, ranks, group))


def reduced(x: torch.Tensor, op: str = "sum", group: str = "0") -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, op, group))


def passed(
    function: Callable[..., Any], *inputs: torch.Tensor, steps: tuple[str, ...], distributed: Any, dynamic: bool = False
) -> torch.fx.GraphModule:
    """A graph of a function after some passes of the stage, with all laws checked."""
    gm = traced_with_fakes(function, *inputs, dynamic=dynamic)
    chosen = tuple(step for step in POST_GRAD.passes if step.name in steps)
    assert len(chosen) == len(steps)
    options = resolve({"strict": True, "distributed": distributed}, environ={})
    run_pipeline(Pipeline("post_grad", chosen), gm, PassContext(options, True))
    return gm


def collectives(gm: torch.fx.GraphModule) -> list[str]:
    """In order: `all_gather_into_tensor`, `wait_tensor`, and `mm` between them."""
    names = [name.split(".")[1] for name in target_names(gm) if "." in name]
    kept = ("all_gather", "reduce_scatter", "all_reduce", "wait_tensor", "mm", "all_to_all")
    return [name for name in names if name.startswith(kept)]


def count(gm: torch.fx.GraphModule, name: str) -> int:
    return sum(each.startswith(name) for each in collectives(gm))
