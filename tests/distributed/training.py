"""Small models that are trained on several ranks, in eager and compiled; and what must be equal of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.compare import reset

STRICT = {"strict": True}
STEPS = 10
WIDTH, HEADS, TOKENS, BATCH = 32, 4, 8, 4


class Block(nn.Module):
    """One layer of a transformer. The projections are apart, as plans of tensor parallel modules name them."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.size = width // heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (self.heads(project(x)) for project in (self.query, self.key, self.value))
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)


class Transformer(nn.Module):
    depth = 2

    def __init__(self, layers: int | None = None, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers or self.depth))
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def of_one_layer(program: Callable[[int], Any]) -> Callable[[int], Any]:
    """The same program with half the model, which takes half as long to compile."""

    def run(rank: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Transformer, "depth", 1)
            return program(rank)

    return run


@dataclass
class Trained:
    """What came of training: losses of this rank, whole gradients of the first step, whole parameters of the last."""

    losses: list[float]
    gradients: list[torch.Tensor]
    parameters: list[torch.Tensor]


def batches(rank: int, steps: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator("cpu").manual_seed(100 + rank)
    for _ in range(steps):
        drawn = (torch.randn(BATCH, TOKENS, WIDTH, generator=draws, device="cpu") for _ in range(2))
        yield tuple(each.to(device()) for each in drawn)


def device() -> torch.device:
    """Where the programs run: `tests/gpu_ranks.py` says so for some."""
    return torch.get_default_device()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that ranks have parts of, all of it."""
    found = tensor.detach()
    return (found.full_tensor() if hasattr(found, "full_tensor") else found).clone()


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x).float(), y)


def train(
    make: Callable[[], tuple[nn.Module, Callable[..., Any]]],
    data: Sequence[tuple[torch.Tensor, torch.Tensor]],
    loss: Callable[..., torch.Tensor] = loss_of,
    prepare: Callable[[nn.Module, int], None] = lambda _module, _step: None,
    steps_each: int = 1,
) -> Trained:
    """Train what `make` gives, a module and what is called: an optimizer's step after every `steps_each` batches.
    `prepare` is called before each batch."""
    torch.manual_seed(0)
    module, called = make()
    # one by one: torch's lists of tensors take no module of which a part alone is spread
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, foreach=False)
    losses, gradients = [], list[torch.Tensor]()
    for step, (x, y) in enumerate(data):
        prepare(module, step)
        value = loss(called, x, y)
        value.backward()
        losses.append(value.item())
        if (step + 1) % steps_each == 0:
            gradients = gradients or [whole(each.grad) for each in module.parameters() if each.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return Trained(losses, gradients, [whole(each) for each in module.parameters()])


def assert_trained_alike(found: Trained, wanted: Trained, half: bool = False, everywhere: bool = True) -> None:
    """Losses and gradients are the uncompiled run's, and parameters are equal on all ranks. `half`: products were
    rounded to 16 bits. `everywhere`: each rank has all parameters."""
    near = {"rtol": 2e-2, "atol": 2e-3} if half else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(wanted.losses), **near)
    assert len(found.gradients) == len(wanted.gradients) > 0
    for mine, theirs in zip(
        [*found.gradients, *found.parameters], [*wanted.gradients, *wanted.parameters], strict=True
    ):
        torch.testing.assert_close(mine, theirs, **near)
    if everywhere:
        assert_equal_on_ranks(found.parameters)


def assert_equal_on_ranks(tensors: Sequence[torch.Tensor]) -> None:
    flat = torch.cat([each.detach().reshape(-1).float() for each in tensors])
    all_of_them = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, flat)
    for other in all_of_them:
        assert torch.equal(other, flat)


def compiled(module: Any, **more: Any) -> Any:
    return torch.compile(module, backend="ferrite", options=STRICT, **more)


def compare(
    build: Callable[[bool], tuple[nn.Module, Callable[..., Any]]], rank: int, steps: int = STEPS, **how: Any
) -> Trained:
    """Train what `build` makes, told whether to compile it; both ways must be alike."""
    data = list(batches(rank, steps))
    checks = {name: how.pop(name) for name in ("half", "everywhere") if name in how}
    wanted = train(lambda: build(False), data, **how)
    reset()
    found = train(lambda: build(True), data, **how)
    assert_trained_alike(found, wanted, **checks)
    return found
