"""Random programs with collectives, on two ranks, compiled with passes of all kinds: results, gradients, and what is
left in inputs are eager's, and both ranks send the same in the same order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import ferrite
from tests.compare import compile_strict, reset
from tests.distributed.programs import c10d
from tests.distributed.training import device
from tests.ranks import on_ranks

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # newer names of functional collectives
]
RANKS, SIDE = 2, 16  # on a GPU the same programs run on one rank, too
BUCKETS = ("bucket_ag", "bucket_rs", "bucket_ar")
SETTINGS: Sequence[Any] = (
    "auto",
    {**{name: {} for name in BUCKETS}, "overlap": {}, "dedup_reduce_scatter": {}},
    {**{name: {"style": "opaque", "cap_mb": 0.005} for name in BUCKETS}, "overlap": {"prefetch": 1}},
    {**{name: {"style": "coalesced"} for name in BUCKETS}, "overlap": {"in_flight_mb": 0.003}},
    {"bucket_ag": {"style": "opaque_multidtype"}, "bucket_ar": {"style": "opaque_multidtype"}},
    {"async_tp": {}, "overlap": {"compute": 0}},
    {"async_tp": {"chunks": 4}, "decompose_comms": {}, "ddp_fuse": {"bucket_mb": 0.002}, "overlap": {}},
    {"overlap": {"memory_mb": 0, "memory_percent": 0}},
)


@dataclass(frozen=True)
class Step:
    """One operation, on values by their numbers."""

    name: str
    operands: tuple[int, ...]
    group: int
    detail: int


Value = torch.Tensor
Operation = Callable[..., Value]


def wait(x: Value) -> Value:
    return c10d.wait_tensor(x)


def shares() -> list[int]:
    """How many rows each rank is given of those that there are."""
    return [SIDE // dist.get_world_size()] * dist.get_world_size()


def joined(x: Value, group: str) -> Value:
    whole = wait(c10d.all_gather_into_tensor(x, dist.get_world_size(), group))
    return whole[:SIDE] - whole[-SIDE:] * 0.5


def joined_halves(x: Value, group: str) -> Value:
    whole = wait(c10d.all_gather_into_tensor(x.to(torch.bfloat16), dist.get_world_size(), group))
    return whole[-SIDE:].float()


def joined_together(x: Value, y: Value, group: str) -> Value:
    both = c10d.all_gather_into_tensor_coalesced([x, y], dist.get_world_size(), group)
    return wait(both[0])[:SIDE] + wait(both[1])[-SIDE:]


def shared_out(x: Value, group: str) -> Value:
    ranks = dist.get_world_size()
    part = wait(c10d.reduce_scatter_tensor(x, "sum", ranks, group))
    return torch.cat([part, part * 0.5])[: part.shape[0] * ranks] * 0.5


def shared_out_twice(x: Value, y: Value, group: str) -> Value:
    ranks = dist.get_world_size()
    parts = (wait(c10d.reduce_scatter_tensor(each, "avg", ranks, group)) for each in (x, y))
    return sum(parts).repeat(ranks, 1)


def summed(x: Value, group: str) -> Value:
    return wait(c10d.all_reduce(x, "sum", group)) * 0.5


def averaged(x: Value, group: str) -> Value:
    return wait(c10d.all_reduce(torch.ops.aten.div.Tensor(x, dist.get_world_size()), "sum", group))


def largest(x: Value, group: str) -> Value:
    return wait(c10d.all_reduce(x, "max", group))


def exchanged(x: Value, group: str) -> Value:
    halves = shares()
    return wait(c10d.all_to_all_single(x.contiguous(), halves, halves, group))


def from_first(x: Value, group: str) -> Value:
    return wait(c10d.broadcast(x, 0, group))


def in_place(x: Value, _group: str) -> Value:
    y = x * 0.5
    dist.all_reduce(y)
    return y


def rows_times(x: Value, y: Value, group: str) -> Value:
    """As tensor parallel layers do, there and back."""
    ranks = dist.get_world_size()
    rows = wait(c10d.all_gather_into_tensor(x, ranks, group))
    return wait(c10d.reduce_scatter_tensor((rows @ y) * 0.1, "sum", ranks, group))


def joined_with_gradient(x: Value, group: str) -> Value:
    whole = functional.all_gather_tensor_autograd(x, 0, group)
    return whole[:SIDE] - whole[-SIDE:] * 0.5


def shared_with_gradient(x: Value, group: str) -> Value:
    return functional.reduce_scatter_tensor_autograd(x, "sum", 0, group).repeat(dist.get_world_size(), 1) * 0.5


def exchanged_with_gradient(x: Value, group: str) -> Value:
    halves = shares()
    return functional.all_to_all_single_autograd(x, halves, halves, group)


def product(x: Value, y: Value, _group: str) -> Value:
    return x @ y * 0.1


def local(x: Value, y: Value, _group: str) -> Value:
    return torch.sin(x) + y.t() * 0.5


FORWARD: dict[str, tuple[Operation, int]] = {
    **{each.__name__: (each, 1) for each in (joined, joined_halves, shared_out, summed, averaged, largest, exchanged)},
    **{each.__name__: (each, 1) for each in (from_first, in_place)},
    **{each.__name__: (each, 2) for each in (joined_together, shared_out_twice, rows_times, product, local)},
}
TRAINING: dict[str, tuple[Operation, int]] = {
    **{each.__name__: (each, 1) for each in (joined_with_gradient, shared_with_gradient, exchanged_with_gradient)},
    **{each.__name__: (each, 2) for each in (product, local)},
}


@dataclass(frozen=True)
class Program:
    """Steps, one after the other, on three inputs; some are written in between."""

    steps: tuple[Step, ...]
    groups: tuple[str, ...]
    is_training: bool

    def __call__(self, *inputs: Value) -> list[Value]:
        values = list(inputs)
        operations = TRAINING if self.is_training else FORWARD
        for step in self.steps:
            if step.name == "write":
                inputs[step.detail % len(inputs)].mul_(0.9).add_(values[step.operands[0]], alpha=0.1)
            else:
                operation, _ = operations[step.name]
                values.append(operation(*(values[each] for each in step.operands), self.groups[step.group]))
        return values[len(inputs) :: 2] + values[-1:]


def drawn(seed: int, groups: tuple[str, ...]) -> Program:
    draws = random.Random(seed)
    is_training = seed % 3 == 2
    operations = TRAINING if is_training else FORWARD
    steps: list[Step] = []
    values = 3
    for _ in range(draws.randint(6, 14)):
        writes = not is_training and draws.random() < 0.12
        name = "write" if writes else draws.choice(list(operations))
        many = 1 if writes else operations[name][1]
        operands = tuple(draws.randrange(values) for _ in range(many))
        steps.append(Step(name, operands, draws.randrange(len(groups)), draws.randrange(100)))
        values += not writes
    return Program(tuple(steps), groups, is_training)


def results(run: Callable[..., list[Value]], program: Program, inputs: list[Value]) -> list[Value]:
    """What a program gives, and leaves in its inputs; in training their gradients."""
    if not program.is_training:
        with torch.no_grad():
            return [*run(*inputs), *inputs]
    leaves = [each.requires_grad_() for each in inputs]
    found = run(*leaves)
    total = torch.stack([each.sin().mean() for each in found]).sum()
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return [each.detach() for each in (*found, *gradients) if each is not None]


def check(seeds: Sequence[int]) -> Callable[[int], dict[int, list[str]]]:
    """On each rank: what it sends, by the program. A program that differs from eager is an error that names it."""

    def on_rank(rank: int) -> dict[int, list[str]]:
        groups = dist.group.WORLD.group_name, dist.new_group(list(range(dist.get_world_size()))).group_name
        sent: dict[int, list[str]] = {}
        for seed in seeds:
            program = drawn(seed, groups)

            def inputs(seed: int = seed) -> list[Value]:
                draws = torch.Generator("cpu").manual_seed(1000 * seed + rank)
                return [torch.randn(SIDE, SIDE, generator=draws, device="cpu").to(device()) for _ in range(3)]

            wanted = results(program, program, inputs())
            reset()
            near = 4e-3 if any(step.name == "joined_halves" for step in program.steps) else 1e-4
            distributed = SETTINGS[seed % len(SETTINGS)]
            found = results(compile_strict(program, options={"distributed": distributed}), program, inputs())
            for mine, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=near, atol=near, msg=f"seed {seed}, {distributed}")
            graphs = ferrite.last_compile().communication.graphs
            sent[seed] = [each.signature for _, graph in graphs for each in graph.collectives]
        return sent

    return on_rank


def assert_alike(seeds: Sequence[int], patience: int) -> None:
    first, second = on_ranks(check(seeds), patience=patience)
    assert first == second, "ranks would not send the same"
    assert sum(map(len, first.values())) > len(seeds)


def test_random_programs_are_eager():
    assert_alike(range(4), patience=160)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4, 100, 24))
def test_more_random_programs_are_eager(first):
    assert_alike(range(first, first + 24), patience=900)
