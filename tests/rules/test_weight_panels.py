"""Frozen weights that are stored as the kernels of our own products and convolutions read them."""

from __future__ import annotations

import pytest
import torch

import ferrite
from ferrite.capture import product_libraries
from ferrite.machines import host_machine
from ferrite.passes.freezing import panels
from ferrite.targets.cpu import CPU
from tests.compare import assert_no_farther, reset

OWN = {"own_products": "always", "own_convolutions": "always", "strict": True, "check_bounds": True}


class Layer(torch.nn.Module):
    def __init__(self, inner: int, columns: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(inner, columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Windows(torch.nn.Module):
    def __init__(self, inner: int, channels: int, window: int | tuple[int, int], **how: int) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(inner, channels, window, **how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x).relu()


def frozen(model, **options):
    reset()
    return ferrite.freeze(model.eval(), **{**OWN, **options})


def bytes_in_panels() -> int:
    (graph,) = ferrite.last_compile().graphs
    return sum(done.facts.get("bytes in panels", 0) for done in graph.passes)


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(2, 40, 16), (5, 24, 50), (37, 1030, 97), (300, 16, 130)], ids=str
)
def test_layers_of_any_sizes(rows, inner, columns):
    model, x = Layer(inner, columns), torch.randn(rows, inner)
    ours = frozen(model)(x)
    with torch.no_grad():
        exact = Layer.double(model)(x.double())
        assert_no_farther(ours, model.float()(x), exact, "result")
    width = host_machine().panel_columns(torch.float32)
    assert bytes_in_panels() == 4 * inner * -(-columns // width) * width
    assert len(ferrite.last_compile().kernels) == 1


@pytest.mark.parametrize(
    ("image", "model"),
    [
        ((1, 16, 9, 10), Windows(16, 40, 3, padding=1)),
        ((2, 24, 5, 7), Windows(24, 33, 1)),
        ((2, 5, 11, 12), Windows(5, 18, (2, 5), stride=2, dilation=2)),
        ((1, 160, 6, 6), Windows(160, 50, 3)),  # in pieces
        ((1, 4, 40, 45), Windows(4, 200, 2)),  # in blocks
    ],
    ids=lambda item: str(getattr(item, "convolution", item)),
)
@pytest.mark.parametrize(
    "layout",
    [torch.contiguous_format, pytest.param(torch.channels_last, marks=pytest.mark.slow)],
    ids=["by places", "by channels"],
)
def test_convolutions_of_any_windows(image, model, layout):
    x = torch.randn(image).to(memory_format=layout)
    ours = frozen(model)(x)
    with torch.no_grad():
        eager = model(x)
        exact = Windows.double(model)(x.double())
        model.float()
    assert_no_farther(ours, eager, exact, "result")
    assert ours.stride() == eager.stride()
    width, weight = host_machine().panel_columns(torch.float32), model.convolution.weight
    assert bytes_in_panels() == 4 * weight[0].numel() * -(-len(weight) // width) * width


def test_a_channel_by_itself_is_not_stored():
    model = torch.nn.Conv2d(16, 16, 3, groups=16)
    frozen(model)(torch.randn(1, 16, 9, 9))
    assert bytes_in_panels() == 0


def test_a_batch_of_rows_in_double_precision():
    model, x = Layer(40, 30).double(), torch.randn(3, 4, 40, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(frozen(model)(x), model(x))
    assert bytes_in_panels() > 0


BOTH = pytest.mark.parametrize(
    ("model", "sizes"),
    [(Layer(40, 30), [(4, 40), (9, 40)]), (Windows(4, 18, 3), [(1, 4, 8, 8), (2, 4, 7, 9)])],
    ids=["linear", "convolution"],
)


@BOTH
def test_a_weight_is_stored_once_for_all_graphs(monkeypatch, model, sizes):
    made = []
    monkeypatch.setattr(panels, "packed", lambda *given, pack=panels.packed: made.append(pack(*given)) or made[-1])
    ours = frozen(model, dynamic=False)
    for size in sizes:
        ours(torch.randn(size))
    assert len(ferrite.last_compile().graphs) == 1
    assert len(made) == 1


@BOTH
def test_a_weight_that_was_written_is_stored_anew(model, sizes):
    x = torch.randn(sizes[0])
    ours = frozen(model)
    ours(x)
    with torch.no_grad():
        next(model.parameters()).add_(1)
        torch.testing.assert_close(ours(x), model(x))


def test_the_model_alone_has_its_weights():
    model, x = Layer(40, 30), torch.randn(4, 40)
    frozen(model, weight_layouts="off")(x)
    assert bytes_in_panels() == 0
    frozen(model)(x[:1])
    assert bytes_in_panels() == 0


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_panels_are_as_wide_as_tiles(dtype):
    assert host_machine().panel_columns(dtype) == CPU.scheduling.machine.panel_columns(dtype)


@pytest.mark.parametrize(("rows", "is_taken"), [(8, True), (128, False)])
def test_beside_mkl_few_rows_decide(monkeypatch, rows, is_taken):
    monkeypatch.setattr(product_libraries, "uses_arm_compute_library", lambda: False)
    monkeypatch.setattr(product_libraries, "uses_mkl_with_wide_vectors", lambda: True)
    model, x = Layer(512, 512), torch.randn(rows, 512)
    with torch.no_grad():
        torch.testing.assert_close(frozen(model, own_products="auto")(x), model(x))
    assert (bytes_in_panels() > 0) == is_taken
