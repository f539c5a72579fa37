"""Models whose layers are spread over ranks, compiled: tensor and sequence parallel, with FSDP beside them, stages of a
pipeline, experts, and attention over a sequence that is spread. Losses, gradients and parameters are the uncompiled
run's.

Programs of two ranks share one start of the ranks, and so do those of four. `test_training.py` has some each day.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import ferrite
from tests.compare import compile_strict, reset
from tests.distributed.training import (
    STRICT,
    TOKENS,
    WIDTH,
    Trained,
    Transformer,
    assert_trained_alike,
    batches,
    compare,
    compiled,
    device,
    whole,
)
from tests.ranks import assert_none_failed, outcomes

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # newer names of functional collectives
]
Program = Callable[[int], Any]

# --- tensor and sequence parallel -------------------------------------------------------------------------------------


def spread(model: Transformer, mesh: Any, is_sequence: bool) -> None:
    """Projections by columns, then by rows; norms over parts of the sequence, if wanted."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between = Shard(1) if is_sequence else Replicate()
    plan: dict[str, Any] = {}
    for name in ("query", "key", "value", "up"):
        plan[f"blocks.*.{name}"] = ColwiseParallel(input_layouts=between)
    for name in ("out", "down"):
        plan[f"blocks.*.{name}"] = RowwiseParallel(output_layouts=between)
    if is_sequence:
        plan |= {f"blocks.*.{name}": SequenceParallel() for name in ("before", "between")}
    plan["last"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    parallelize_module(model, mesh, plan)


class OwnRows(nn.Module):
    """A model that takes the rows of this rank alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.chunk(dist.get_world_size(), 1)[dist.get_rank()])


def tensor_parallel(is_sequence: bool = False) -> Program:
    def program(rank: int) -> int:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(device().type, (dist.get_world_size(),))

        def build(is_compiled: bool) -> tuple[nn.Module, Any]:
            model = Transformer()
            spread(model, mesh, is_sequence)
            called = OwnRows(model) if is_sequence else model
            return model, compiled(called) if is_compiled else called

        compare(build, 0)  # all ranks read the same batch
        found = ferrite.last_compile().communication
        assert found.collectives or dist.get_world_size() == 1  # of one rank nothing is asked
        return found.collectives

    return program


def tensor_and_data_parallel(rank: int) -> None:
    """Two ranks share layers, and two such pairs share batches; layer by layer, as one does with FSDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("data", "tensor"))

    def build(is_compiled: bool) -> tuple[nn.Module, Any]:
        model = Transformer()
        spread(model, mesh["tensor"], False)
        for block in model.blocks:
            if is_compiled:
                block.compile(backend="ferrite", options=STRICT)
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        return model, model

    compare(build, rank // 2)
    assert ferrite.last_compile().communication.collectives  # of the tensor parallel layers


# --- stages of a pipeline ---------------------------------------------------------------------------------------------


def pipeline(kind: str) -> Program:
    """Each rank has some layers, compiled, and sends on what comes out of them."""

    def program(rank: int) -> None:
        from torch.distributed import pipelining

        world = dist.get_world_size()

        def trained(is_compiled: bool) -> Trained:
            torch.manual_seed(0)
            layers = list(Transformer(world).blocks)
            layer = layers[rank]
            called = compiled(layer) if is_compiled else layer
            stage = pipelining.PipelineStage(called, rank, world, device())
            schedule = getattr(pipelining, kind)(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
            losses, gradients = [], list[torch.Tensor]()
            for x, y in batches(0):
                each: list[torch.Tensor] = []
                if rank == 0:
                    schedule.step(x)
                elif rank == world - 1:
                    schedule.step(target=y, losses=each)
                else:
                    schedule.step()
                losses += [value.item() for value in each]
                gradients = gradients or [whole(parameter.grad) for parameter in layer.parameters()]
                optimizer.step()
                optimizer.zero_grad()
            return Trained(losses, gradients, [whole(parameter) for parameter in layer.parameters()])

        wanted = trained(False)
        reset()
        assert_trained_alike(trained(True), wanted, everywhere=False)
        assert {"forward", "backward"} <= {graph.kind for graph in ferrite.last_compile().graphs}

    return program


# --- experts ----------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """One expert for each rank: tokens go to the rank of theirs, and come back. How many go where is said by a router,
    and so is known when it runs (`counts` of None), or before."""

    def __init__(self, counts: list[list[int]] | None) -> None:
        super().__init__()
        self.counts = counts
        self.router = nn.Linear(WIDTH, dist.get_world_size(), bias=False)
        self.expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights = torch.softmax(self.router(flat), -1)
        order = weights.argmax(-1).argsort(stable=True)
        given, taken = self.shares(weights)
        there = functional.all_to_all_single_autograd(flat[order], taken, given, dist.group.WORLD)
        back = functional.all_to_all_single_autograd(self.expert(there), given, taken, dist.group.WORLD)
        result = torch.zeros_like(flat).index_copy(0, order, back)
        return (result * weights.amax(-1, keepdim=True)).view_as(x)

    def shares(self, weights: torch.Tensor) -> tuple[list[int], list[int]]:
        if self.counts is not None:
            rank = dist.get_rank()
            return self.counts[rank], [row[rank] for row in self.counts]
        given = nn.functional.one_hot(weights.argmax(-1), weights.shape[1]).sum(0)
        taken = functional.all_to_all_single(given, None, None, dist.group.WORLD)
        return given.tolist(), taken.tolist()


def experts(counts: list[list[int]] | None) -> Program:
    def program(rank: int) -> None:
        def build(is_compiled: bool) -> tuple[nn.Module, Any]:
            module = Experts(counts)
            return module, compiled(module) if is_compiled else module

        with torch._dynamo.config.patch(capture_scalar_outputs=counts is None):
            compare(build, rank, everywhere=False)
        kinds = {each.kind for _, graph in ferrite.last_compile().communication.graphs for each in graph.collectives}
        assert "all_to_all" in kinds

    return program


# --- attention over a sequence that is spread -------------------------------------------------------------------------


class GatheredAttention(nn.Module):
    """Each rank has some rows of the sequence, and gathers the keys and values of all."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        key, value = (each.contiguous() for each in (key, value))  # as NCCL wants them
        key, value = (functional.all_gather_tensor_autograd(each, 2, dist.group.WORLD) for each in (key, value))
        rows = torch.arange(query.shape[2]) + dist.get_rank() * query.shape[2]
        mask = rows[:, None] >= torch.arange(key.shape[2])
        found = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(found.transpose(1, 2).flatten(2))


class RingAttention(GatheredAttention):
    """The same, with keys and values that go from rank to rank: no rank ever has all of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        world, rank = dist.get_world_size(), dist.get_rank()
        query, key, value = self.project(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        here = torch.arange(query.shape[2])
        top = total = result = None
        moved = torch.stack([key, value])
        for step in range(world):
            owner = (rank - step) % world
            scores = query @ moved[0].transpose(-1, -2) * query.shape[-1] ** -0.5
            is_seen = (here + rank * len(here))[:, None] >= here + owner * len(here)
            scores = scores.masked_fill(~is_seen, float("-inf"))
            highest = scores.amax(-1, keepdim=True).clamp_min(-1e9)
            new_top = highest if top is None else torch.maximum(top, highest)
            weights = torch.exp(scores - new_top)
            part, sums = weights @ moved[1], weights.sum(-1, keepdim=True)
            if top is not None:
                kept = torch.exp(top - new_top)
                part, sums = part + result * kept, sums + total * kept
            top, total, result = new_top, sums, part
            if step + 1 < world:
                moved = to_the_next(moved)
        return self.out((result / total).transpose(1, 2).flatten(2))


def to_the_next(x: torch.Tensor) -> torch.Tensor:
    """What the rank before this one has."""
    world, rank = dist.get_world_size(), dist.get_rank()
    flat = x.reshape(-1)
    given, taken = (
        [flat.numel() if each == other % world else 0 for each in range(world)] for other in (rank + 1, rank - 1)
    )
    return functional.all_to_all_single_autograd(flat, taken, given, dist.group.WORLD).view(x.shape)


def spread_attention(kind: type[nn.Module]) -> Program:
    def program(rank: int) -> None:
        def build(is_compiled: bool) -> tuple[nn.Module, Any]:
            module = kind()
            return module, compiled(module) if is_compiled else module

        found = compare(build, rank, steps=3, everywhere=False)
        assert len(found.losses) == 3
        assert ferrite.last_compile().communication.collectives or dist.get_world_size() == 1

    return program


def ring_is_the_whole(rank: int) -> None:
    """Attention by a ring gives what attention over all of the sequence gives."""
    world = dist.get_world_size()
    torch.manual_seed(0)
    ring, gathered, x = RingAttention(), GatheredAttention(), torch.randn(2, world * TOKENS, WIDTH)
    gathered.load_state_dict(ring.state_dict())
    own = x.chunk(world, 1)[rank]
    query, key, value = ring.project(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    wanted = ring.out(found.transpose(1, 2).flatten(2)).chunk(world, 1)[rank]
    for module in (ring, gathered):
        torch.testing.assert_close(compiled(module)(own), wanted, rtol=1e-4, atol=1e-5)


# --- by hand ----------------------------------------------------------------------------------------------------------


def by_hand(rank: int) -> int:
    """A layer that is spread by columns and rows, of functional collectives with gradients."""

    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
            inner = torch.relu(self.up(rows))
            return functional.reduce_scatter_tensor_autograd(self.down(inner), "sum", 0, dist.group.WORLD)

    def build(is_compiled: bool) -> tuple[nn.Module, Any]:
        module = Spread()
        return module, compiled(module) if is_compiled else module

    compare(build, rank, everywhere=False)
    return ferrite.last_compile().communication.collectives


def in_place_calls(rank: int) -> None:
    """The calls of `torch.distributed` that write into their arguments."""

    def fn(x: torch.Tensor) -> Any:
        y = x * 2
        dist.all_reduce(y)
        gathered = torch.empty(dist.get_world_size() * y.shape[0], *y.shape[1:])
        dist.all_gather_into_tensor(gathered, y)
        part = torch.empty_like(y)
        dist.reduce_scatter_tensor(part, gathered)
        exchanged = torch.empty_like(y)
        dist.all_to_all_single(exchanged, part)
        dist.broadcast(exchanged, 0)
        return y + 1, gathered.sin(), part, exchanged * 2

    x = torch.randn(4, 3) + rank
    wanted = fn(x)
    for mine, theirs in zip(compile_strict(fn)(x), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


UNEVEN = [[20, 12], [5, 27]]
PROGRAMS: Mapping[str, Program] = {
    "tensor parallel": tensor_parallel(),
    "sequence parallel": tensor_parallel(is_sequence=True),
    "a pipeline of two, GPipe": pipeline("ScheduleGPipe"),
    "a pipeline of two, 1F1B": pipeline("Schedule1F1B"),
    "experts, uneven": experts(UNEVEN),
    "experts, as the router says": experts(None),
    "attention with gathered keys": spread_attention(GatheredAttention),
    "attention by a ring": spread_attention(RingAttention),
    "a ring is the whole": ring_is_the_whole,
    "functional collectives": by_hand,
    "collectives in place": in_place_calls,
}
OF_FOUR: Mapping[str, Program] = {
    "tensor and data parallel": tensor_and_data_parallel,
    "tensor parallel": tensor_parallel(),
    "a pipeline of four": pipeline("Schedule1F1B"),
    "a ring of four": ring_is_the_whole,
    "experts, as the router says": experts(None),
}


@pytest.fixture(scope="module")
def of_two() -> dict[str, list[Any]]:
    return outcomes(PROGRAMS, patience=900)


@pytest.fixture(scope="module")
def of_four() -> dict[str, list[Any]]:
    return outcomes(OF_FOUR, world=4, patience=600)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_is_that_of_eager(name, of_two):
    assert_none_failed(of_two[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_training_on_four_ranks_is_that_of_eager(name, of_four):
    assert_none_failed(of_four[name])
