"""Random graphs of loops, compiled to kernels without any pass before, compared with eager.

Elementwise work, reductions, running sums, joins and views in chains; sizes of nothing, one and odd numbers; inputs
that lie in memory in every way; sizes that are known and sizes that are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ferrite.lower.graph import lower_module
from tests.compare import assert_no_farther
from tests.executables import function_of, plan_of

Tensor = torch.Tensor
Step = Callable[[list[Tensor]], Tensor]

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape) if x.shape[0] else x,
    "flipped twice": lambda x: x.flip(0).flip(0),
}
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "scale": lambda x: x * 0.5 + 1,
    "decay": lambda x: torch.exp(-x.abs()),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "multiply": lambda x, y: torch.tanh(x) * torch.tanh(y),  # so that numbers stay small
    "maximum": torch.maximum,
}
# Each keeps the shape, so that chains go on; `axis` is one of the tensor's.
ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "less the sum": lambda x, axis: x - x.sum(axis, keepdim=True),
    "less the mean of all": lambda x, axis: x - x.sum() / max(x.numel(), 1),
    "softmax": lambda x, axis: x.softmax(axis),
    "running sum": lambda x, axis: x.cumsum(axis),
    "flip": lambda x, axis: x.flip(axis),
    "roll": lambda x, axis: torch.cat([x.narrow(axis, 1, x.shape[axis] - 1), x.narrow(axis, 0, 1)], axis),
    "join and part": lambda x, axis: torch.cat([x.sin(), x], axis).narrow(axis, x.shape[axis] // 2, x.shape[axis]),
    "flat": lambda x, axis: (x.reshape(-1) + 1).reshape(x.shape),
    "copied across": lambda x, axis: x.transpose(0, axis).contiguous().transpose(0, axis),
    "largest": lambda x, axis: x - x.amax(axis, keepdim=True),
}
NEEDS_ELEMENTS = ("roll", "largest")


@dataclass(frozen=True)
class Case:
    """A function of some inputs: steps by name, each on values by their numbers; the last ones are the results."""

    shape: tuple[int, ...]
    layouts: tuple[str, ...]
    steps: tuple[tuple[Any, ...], ...]
    results: int
    dynamic: bool

    def inputs(self, device: str = "cpu") -> list[Tensor]:
        torch.manual_seed(0)
        return [LAYOUTS[layout](torch.randn(self.shape).to(device)) for layout in self.layouts]

    def values(self, inputs: list[Tensor]) -> list[Tensor]:
        values = list(inputs)
        for name, *at in self.steps:
            if name in UNARY:
                values.append(UNARY[name](values[at[0] % len(values)]))
            elif name in BINARY:
                values.append(BINARY[name](values[at[0] % len(values)], values[at[1] % len(values)]))
            else:
                values.append(ALONG[name](values[at[0] % len(values)], at[1] % len(self.shape)))
        return values

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        return self.values(list(inputs))[-self.results :]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 17]), min_size=1, max_size=3)))
    layouts = tuple(draw(st.lists(st.sampled_from(sorted(LAYOUTS)), min_size=1, max_size=3)))
    usable = [name for name in sorted(ALONG) if 0 not in shape or name not in NEEDS_ELEMENTS]
    place = st.integers(0, 6)
    step = st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY)), place),
        st.tuples(st.sampled_from(sorted(BINARY)), place, place),
        st.tuples(st.sampled_from(usable), place, place),
    )
    steps = tuple(draw(st.lists(step, min_size=1, max_size=6)))
    return Case(shape, layouts, steps, draw(st.integers(1, len(steps))), draw(st.booleans()))


# A sum over one element has no loop, but is joined like any other: what is computed beside it is not known after it.
ONE_ELEMENT = Case((1,), ("contiguous",), (*[("decay", 0)] * 4, ("softmax", 0, 0), ("decay", 1)), 6, False)
NO_COLUMN = Case((2, 0), ("contiguous",), (("decay", 0), ("decay", 1), ("flat", 1, 0)), 1, False)
ONE_ROW = Case((1, 2), ("contiguous",), (("flip", 0, 1), ("softmax", 0, 0)), 2, False)


def compiled(case: Case, inputs: list[Tensor]) -> list[Tensor]:
    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(each, static_shapes=not case.dynamic) for each in inputs]
    with mode:
        lowered = lower_module(make_fx(lambda *given: case(*given))(*fakes))
    plan = plan_of(lowered.program)
    assert not plan.not_compiled, "every loop has a kernel"
    return list(function_of(plan, lowered.objects)(list(inputs)))


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
@example(ONE_ELEMENT)
@example(ONE_ROW)
@example(NO_COLUMN)
def test_a_random_graph_computes_what_eager_does(case: Case) -> None:
    assert_like_eager(case)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_many_random_graphs_compute_what_eager_does(case: Case) -> None:
    assert_like_eager(case)


def assert_like_eager(case: Case) -> None:
    inputs = case.inputs()
    kept = [each.clone() for each in inputs]
    ours = compiled(case, inputs)
    assert all(map(torch.equal, inputs, kept)), "inputs are left as they are"
    assert_same_results(case, inputs, ours)


def assert_same_results(case: Case, inputs: list[Tensor], ours: list[Tensor]) -> None:
    eager = case(*inputs)
    exact = case.values([each.double() for each in inputs])
    terms = max((value.abs().max().item() for value in exact if value.numel()), default=0.0)
    for number, (mine, theirs, true) in enumerate(zip(ours, eager, exact[-case.results :], strict=True)):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        if mine.numel():  # torch's own forecast for tensors without elements is not what eager does
            assert mine.stride() == theirs.stride()
        # each of up to six steps rounds once, relative to the largest number on the way
        assert_no_farther(mine, theirs, true, f"result {number}", terms=terms, ulps=24.0)
