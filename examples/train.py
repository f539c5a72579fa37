"""Train a small language model, compiled and in eager side by side: the same losses.

    python examples/train.py

The text it learns is this program. Forward and backward are compiled; the optimizer is torch's.
"""

import copy
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import ferrite

WIDTH, HEADS, LAYERS, CONTEXT, BATCH, STEPS = 32, 4, 2, 32, 16, 41

text = Path(__file__).read_text()
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, length, _ = x.shape
        query, key, value = self.attend(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.think(self.between(x))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.places = nn.Embedding(len(letters), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(letters))

    def forward(self, tokens, targets):
        x = self.letters(tokens) + self.places(torch.arange(tokens.shape[1]))
        scores = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
        rows = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
        yield rows[:, :-1], rows[:, 1:]


def train(step, parameters):
    """The loss of each step, and the seconds of all but the first, which compiles."""
    optimizer, losses, start = torch.optim.AdamW(parameters, lr=3e-3), [], 0.0
    for tokens, targets in batches():
        loss = step(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        start = start or time.perf_counter()
    return losses, time.perf_counter() - start


torch.manual_seed(0)
model = LanguageModel()
in_eager = copy.deepcopy(model)

compiled_losses, compiled_seconds = train(torch.compile(model, backend="ferrite"), model.parameters())
eager_losses, eager_seconds = train(in_eager, in_eager.parameters())

print("step    compiled    eager")
for step in range(0, STEPS, 8):
    print(f"{step:4}    {compiled_losses[step]:8.4f} {eager_losses[step]:8.4f}")
farthest = max(abs(one - other) for one, other in zip(compiled_losses, eager_losses, strict=True))
print(f"farthest apart: {farthest:.1e}")
print(f"seconds for {STEPS - 1} steps: {compiled_seconds:.2f} compiled, {eager_seconds:.2f} in eager")

record = ferrite.last_compile()
kinds = " and ".join(graph.kind for graph in record.graphs)
print(f"{kinds}: {len(record.kernels)} kernels, {len(record.eager_calls)} calls of torch")
