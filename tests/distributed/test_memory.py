"""Memory of programs whose collectives were merged and moved: little more than that of the program as it came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ferrite
from bench.distributed import gathered
from bench.memory import peak_bytes
from ferrite.machines import Link, Network
from tests.compare import reset
from tests.ranks import imagined_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
LAYERS, WIDTH, ROWS, RANKS = 2, 64, 64, 2


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with imagined_ranks(RANKS):
        yield


@pytest.fixture(scope="module")
def network(tmp_path_factory: Any) -> Any:
    """On which a collective takes as long as some layers."""
    link = {"any": Link(5e-4, 1e9)}
    path = tmp_path_factory.mktemp("network") / "network.txt"
    path.write_text(str(Network(link, link, RANKS)))
    return path


def test_a_training_step_holds_little_more(network):
    """Gathered weights are copied out of their bucket when it is there, though they are saved for backward, and the
    bucket goes."""
    sizes = [(4 * WIDTH // RANKS, WIDTH), (WIDTH // RANKS, 4 * WIDTH)] * LAYERS
    parameters = [(torch.randn(size) * 0.1).requires_grad_() for size in sizes]

    def model(x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(parameters[::2], parameters[1::2], strict=True):
            x = x + torch.nn.functional.linear(torch.nn.functional.gelu(x @ gathered(up).t()), gathered(down))
        return x

    x = torch.randn(ROWS, WIDTH)
    peaks, counts = [], []
    for distributed in ("off", "auto"):
        reset()
        options = {"strict": True, "distributed": distributed, "network": network}
        run = torch.compile(model, backend="ferrite", fullgraph=True, dynamic=False, options=options)

        def step(run: Any = run) -> None:
            for each in parameters:
                each.grad = None
            run(x).square().mean().backward()

        peaks.append(peak_bytes(step))
        counts.append(ferrite.last_compile().communication.collectives)
    assert counts[1] <= counts[0] / 2
    weights = sum(each.numel() * each.element_size() for each in parameters) * RANKS
    assert weights > 0.2 * peaks[0], "a bucket would be too small to be seen"
    assert peaks[1] <= 1.05 * peaks[0]
