"""Serve a model: `ferrite.freeze` makes its parameters constants, and computes ahead what depends on them alone.

    python examples/serve.py

A batch norm in eval mode becomes part of the weights before it. Batches of any size are served by one compilation.
"""

import time

import torch
from torch import nn

import ferrite


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(128, 256), nn.BatchNorm1d(256)
        self.second, self.third = nn.Linear(256, 256), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return torch.softmax(self.third(torch.relu(self.second(x))), -1)


torch.manual_seed(0)
model = Classifier()
for _ in range(3):  # the norm has seen something, as after training
    model(torch.randn(64, 128))
model.eval()

answer = ferrite.freeze(model, dynamic=True)

for size in (4, 8, 32):
    requests = torch.randn(size, 128)
    with torch.no_grad():
        expected = model(requests)
    torch.testing.assert_close(answer(requests), expected)
    start = time.perf_counter()
    for _ in range(100):
        answer(requests)
    print(f"batch of {size:2}: {(time.perf_counter() - start) * 10:.3f} ms a call")

record = ferrite.last_compile()
print(record)
print(f"compilations: {len(ferrite.recent_compiles())}")
print(f"batch norms left: {sum('batch_norm' in name for kernel in record.kernels for name in kernel.operators)}")
