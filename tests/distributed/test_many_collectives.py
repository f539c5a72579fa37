"""Passes over collectives do work in proportion to how many there are."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.distributed.programs import RANKS, gathered, passed, scattered
from tests.ranks import imagined_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
STEPS = ("bucket_reduce_scatter", "bucket_all_reduce", "bucket_all_gather", "overlap_scheduling")


def chain(layers: int) -> Any:
    """A gather and a scatter in each layer, and a product."""

    def fn(x: torch.Tensor, shard: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for number in range(layers):
            x = torch.relu(x @ gathered(shard * number))
            found.append(scattered(x.t() @ x))
        return found

    return fn


def calls_of(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many calls of functions the passes make."""
    import ferrite.pipeline
    import tests.distributed.programs as programs

    count = 0

    def one_more(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    run = ferrite.pipeline.run_pipeline

    def counted(*given: Any) -> Any:
        sys.setprofile(one_more)
        try:
            return run(*given)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(programs, "run_pipeline", counted)
    with imagined_ranks(RANKS):
        passed(chain(layers), torch.randn(16, 16), torch.randn(2, 16), steps=STEPS, distributed="auto")
    monkeypatch.undo()
    return count


def test_twice_as_many_collectives_are_about_twice_the_work(monkeypatch):
    calls_of(4, monkeypatch)  # imports, and what is cached
    few, many = calls_of(20, monkeypatch), calls_of(80, monkeypatch)
    assert few > 10_000
    assert many / few < 4 * 1.3
