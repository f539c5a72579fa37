"""What a pass may know, and what is recorded about it."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ferrite.errors import Refusal
from ferrite.options import Options
from ferrite.tune import Problem


class Fuel:
    """How many rewrites may still happen: `FERRITE_FUEL=n` stops after n, so that a wrong one is found by halving."""

    def __init__(self, amount: int | None) -> None:
        self.amount, self.spent = amount, 0

    @property
    def left(self) -> bool:
        return self.amount is None or self.amount > 0

    def spend(self) -> None:
        self.spent += 1
        if self.amount is not None:
            self.amount -= 1

    def refill(self, earlier: tuple[int | None, int]) -> None:
        """As it was at an earlier time: what was done since is done again, or not at all."""
        self.amount, self.spent = earlier

    @property
    def level(self) -> tuple[int | None, int]:
        return self.amount, self.spent


class Times(Protocol):
    """How long things take, as far as that was measured."""

    def __call__(self, problem: Problem) -> Any: ...


def no_times(problem: Problem) -> None:
    return None


class OnRefusal(Protocol):
    """Told of a rule that had a candidate and did not fire there."""

    def __call__(self, rule: str, node: torch.fx.Node, refusal: Refusal) -> None: ...


@dataclass
class PassContext:
    """Handed to every pass: what kind of graph it is, and the options. Passes report rewrites by rule through it."""

    options: Options
    is_inference: bool = False
    fuel: Fuel = field(default_factory=lambda: Fuel(None))
    rewrites: collections.Counter[str] = field(default_factory=collections.Counter)
    facts: collections.Counter[str] = field(default_factory=collections.Counter)  # what passes count besides rewrites
    steps: int = 0  # of matching: cost without a clock
    times: Times = no_times  # of products and calls on the GPU of this process
    refused: OnRefusal | None = None  # who wants to know where rules did not fire
    code_waits: bool = False  # the code of an edited graph is made when the stage is over: nobody runs it before
    known: object = None  # what the rewriter remembers of the graph from one pass to the next

    def count(self, rule: str) -> None:
        self.rewrites[rule] += 1


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: `note` says why it did not run, or how it failed."""

    name: str
    seconds: float = field(metadata={"read as": 0.0})  # it took none where it is read from the cache
    rewrites: Mapping[str, int]
    nodes_before: int
    nodes_after: int
    note: str = ""
    facts: Mapping[str, int] = field(default_factory=dict)  # what it counted besides rewrites

    @property
    def changed(self) -> bool:
        return bool(self.rewrites) or self.nodes_before != self.nodes_after
