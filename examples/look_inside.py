"""Compile a training step with symbolic sizes and look at everything ferrite did.

    python examples/look_inside.py

The record has graphs, the time of each stage, kernels, calls of torch with their reasons, and the generated program.
"""

import torch
from torch import nn

import ferrite


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), labels)


model = Classifier()
step = ferrite.compile(model, dynamic=True, strict=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for size in (32, 48, 17):  # one compilation serves all of them
    optimizer.zero_grad()
    loss = step(torch.randn(size, 20), torch.randint(0, 3, (size,)))
    loss.backward()
    optimizer.step()
    print(f"batch of {size}: loss {loss.item():.4f}")

record = ferrite.last_compile()
print()
print(record)
print("\nThe forward graph runs as this program:\n")
print(record.graphs[0].source)
