"""Groups that differ in names alone are built once; whatever else differs makes another kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ferrite.schedule import plan
from ferrite.schedule.cpu import CpuScheduling, kernels
from tests.schedule.plans import plan_of

pytestmark = pytest.mark.quick


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every group that a kernel is built for; what verifying builds again to compare does not count."""
    found: list[Any] = []

    def counted(self: CpuScheduling, group: Any, *rest: Any) -> Any:
        found.append(group)
        return kernels.build(group, *rest, machine=self.machine)

    monkeypatch.setattr(CpuScheduling, "arranged", counted)
    monkeypatch.setattr(plan, "check_repeat", lambda *_repeat: None)
    return found


def in_turn(*steps: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """One step after the other, with a product between: so that each is a kernel of its own."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        for step in steps:
            x = step(x @ w)
        return x

    return function


def soft(x: Tensor) -> Tensor:
    return (x * 0.125).softmax(-1)


X, W = torch.randn(32, 32), torch.randn(32, 32)


def test_layers_that_repeat_are_built_once(builds):
    made = plan_of(in_turn(soft, soft, soft, soft), X, W)
    assert len(made.launches) == 4
    assert len(builds) == 1
    assert len({launch.kernel for launch in made.launches}) == 1
    assert len({launch.arguments for launch in made.launches}) == 4, "each has memory of its own"


def test_each_launch_says_where_it_comes_from():
    first, second = plan_of(in_turn(soft, soft), X, W).launches
    assert first.kernel == second.kernel
    assert first.kernel.origins != second.kernel.origins


OTHERS = {
    "a constant": lambda x: (x * 0.25).softmax(-1),
    "an operator": lambda x: (x + 0.125).softmax(-1),
    "the axis that is reduced": lambda x: (x * 0.125).softmax(0),
    "strides": lambda x: (x.t() * 0.125).softmax(-1),
    "a reduction": lambda x: x * 0.125 - x.amax(-1, keepdim=True),
    "a type": lambda x: (x.double() * 0.125).softmax(-1).float(),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_differs_in_more_is_built_by_itself(builds, what):
    made = plan_of(in_turn(soft, OTHERS[what], soft), X, W)
    first, *others, last = (launch.kernel for launch in made.launches)
    assert first == last
    assert others
    assert first not in others
    assert len(builds) == 1 + len(others)


def test_one_tensor_twice_is_not_two_tensors(builds):
    def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        first = (x + y) @ w
        return (first + first) @ w

    made = plan_of(function, X, torch.randn(32, 32), W)
    assert len(builds) == len(made.launches) == 2


def test_what_is_needed_later_is_stored_and_what_is_not_is_not(builds):
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = (x @ w).exp()
        once = first / first.sum(-1, keepdim=True)
        second = (once @ w).exp()
        return second / second.sum(-1, keepdim=True), second

    stored, kept = (launch.kernel for launch in plan_of(function, X, W).launches)
    assert len(builds) == 2
    assert stored != kept
