"""Models that between them use everything an entry of the cache holds; and a program that compiles them all.

    python compiled_cases.py FOLDER EXPECTED [without-llvm]

prints one line of JSON: for each case how the cache was asked, and whether the outputs are those in the file EXPECTED,
to the bit. It writes that file where there is none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import ferrite
from ferrite import cache

Function = Callable[..., Any]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(self.last(F.gelu(self.norm(self.first(x)))), -1) * torch.tensor([1.0, -2.0, 0.5, 3.0])


def gathered(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)[places] + 1


def branching(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: torch.sin(y) * 2, lambda y: torch.exp(y) - 1, (x,))


def scaled_by_size(x: torch.Tensor) -> torch.Tensor:
    """Needs numbers that follow from sizes: in kernels, and as an argument of a call."""
    return torch.addmm(torch.cumsum(x * (x.shape[0] + 0.5), 0), x, x.t() @ x, alpha=x.shape[0] / 3)


def written(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x.sort(-1).values.view(-1)[::2]


def drawn(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5, training=True) + torch.randn_like(x)


def trained(compiled: Function, x: torch.Tensor) -> list[torch.Tensor]:
    net = Net()
    x.requires_grad_()
    loss = compiled(net)(x).square().sum()
    loss.backward()
    return [loss.detach(), x.grad, *(parameter.grad for parameter in net.parameters())]


def inferred(compiled: Function, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        return [compiled(Net().eval())(x)]


def called(function: Function) -> Function:
    return lambda compiled, *inputs: [compiled(function)(*inputs), *inputs]


# Name -> what to do with a compiler and inputs, the shapes of inputs, and options beside those of all.
CASES: dict[str, tuple[Function, tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "inference": (inferred, ((5, 8),), {}),
    "frozen": (inferred, ((5, 8),), {"freeze": True}),
    "weights in panels": (inferred, ((5, 8),), {"freeze": True, "own_products": "always"}),
    "training": (trained, ((5, 8),), {}),
    "branching": (called(branching), ((6, 3),), {}),
    "sizes": (called(scaled_by_size), ((7, 3),), {"dynamic": True}),
    "written": (called(written), ((4, 6),), {}),
    "drawn": (called(drawn), ((4, 6),), {}),
}


def run(name: str, folder: Path) -> tuple[list[torch.Tensor], list[str]]:
    """The outputs of a case, and how the cache was asked for its graphs."""
    function, shapes, settings = CASES[name]
    options = {"strict": True, "cache": True, "cache_dir": folder, **settings}
    dynamic = options.pop("dynamic", None)
    torch.compiler.reset()
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    outputs = function(lambda model: ferrite.compile(model, dynamic=dynamic, **options), *inputs)
    return outputs, [f"{each.what}: {each.result}" for each in ferrite.last_compile().cache]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def main(folder: Path, file: Path) -> dict[str, Any]:
    results = {name: run(name, folder) for name in CASES}
    if not file.exists():
        torch.save({name: outputs for name, (outputs, _asked) in results.items()}, file)
    expected = torch.load(file)
    return {name: [asked, same(outputs, expected[name])] for name, (outputs, asked) in results.items()}


if __name__ == "__main__":
    if "without-llvm" in sys.argv:
        sys.modules["llvmlite"] = None  # importing it raises ImportError
    cache.source_digest = lambda store: "as they are"  # ferrite may be edited between one run and the other
    torch.set_num_threads(1)
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
