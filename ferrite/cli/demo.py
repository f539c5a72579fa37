"""`python -m ferrite demo`: compile a small language model, train it, and show it equal to eager."""

from __future__ import annotations

import argparse
import copy
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from ferrite.debug import CompileRecord

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 256, 128, 4, 2, 64, 8


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        hidden: torch.Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + hidden


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.tokens(tokens) + self.places(places))
        return F.cross_entropy(self.head(self.norm(hidden))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="compile a small language model and show it equal to eager",
        description="Train a small language model for a few steps in eager and compiled; compare losses, gradients, "
        "speed and compile time.",
    )
    parser.add_argument("--steps", type=int, default=10, help="training steps (default 10)")
    parser.add_argument("--no-inductor", action="store_true", help="do not compare with PyTorch's own compiler")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    import ferrite

    console = Console(highlight=False)
    torch.manual_seed(0)
    model = LanguageModel()
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"A transformer language model, {count:,} parameters, {chosen.steps} training steps on CPU.\n")

    backends = ["eager", "ferrite"]
    if not chosen.no_inductor and shutil.which("g++"):
        backends.append("inductor")
    steps: dict[str, Callable[[], float]] = {}
    compile_seconds: dict[str, float] = {}
    for backend in backends:
        own = copy.deepcopy(model)
        compiled: Any = own if backend == "eager" else torch.compile(own, backend=backend)
        steps[backend] = training_step(own, compiled, tokens)
    losses: dict[str, list[float]] = {backend: [] for backend in backends}
    for backend, step in steps.items():
        with console.status(f"first step with {backend}"):
            start = time.perf_counter()
            losses[backend].append(step())
            compile_seconds[backend] = time.perf_counter() - start
    record = ferrite.last_compile()
    seconds: dict[str, list[float]] = {backend: [] for backend in backends}
    for _ in range(chosen.steps - 1):
        for backend, step in steps.items():  # turn by turn, so that noise of the machine meets all alike
            start = time.perf_counter()
            losses[backend].append(step())
            seconds[backend].append(time.perf_counter() - start)

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("", "first step, s", "later steps, ms", "speed", "last loss", "loss apart"):
        table.add_column(column, justify="left" if not column else "right")
    eager = statistics.median(seconds["eager"]) if seconds["eager"] else float("nan")
    worst = {}
    for backend in backends:
        median = statistics.median(seconds[backend]) if seconds[backend] else float("nan")
        worst[backend] = max(abs(a - b) for a, b in zip(losses[backend], losses["eager"], strict=True))
        table.add_row(
            backend,
            f"{compile_seconds[backend]:.2f}",
            f"{median * 1e3:.1f}",
            f"{eager / median:.2f}x",
            f"{losses[backend][-1]:.5f}",
            f"{worst[backend]:.1e}",
        )
    console.print(table)
    same = worst["ferrite"] <= 1e-4
    console.print(
        f"\n[{'green' if same else 'red'}]ferrite trains {'like eager' if same else 'DIFFERENTLY from eager'}[/]"
    )
    console.print(about(record) + NEXT)
    return 0 if same else 1


NEXT = """
What to try next:
  print(ferrite.last_compile())             every kernel, every call, and why
  print(ferrite.explain(model, x))          what takes the time, and what to try
  ferrite.report("page.html")               every stage beside the model's lines
  torch.compile(model, backend="ferrite")   your model; docs/options.md
  ferrite.freeze(model.eval())              parameters as constants
"""


def about(record: CompileRecord) -> str:
    """What was compiled, in a few lines: kernels, what stays torch's and why, and where the time went."""
    reasons = Counter(call.reason for call in record.eager_calls)
    calls = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in record.stages.items() if seconds >= 0.005)
    return (
        f"{len(record.kernels)} kernels compiled by ferrite, {len(record.eager_calls)} calls of torch's: {calls}.\n"
        f"Seconds by stage: {stages}.\n"
    )


def training_step(model: nn.Module, compiled: Any, tokens: torch.Tensor) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        optimizer.zero_grad()
        loss = compiled(tokens)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step
