"""Frozen weights that are stored as the kernels of our own products read them."""

from __future__ import annotations

import pytest
import torch

import ferrite
from ferrite.capture import product_libraries
from ferrite.machines import host_machine
from ferrite.passes.freezing import panels
from ferrite.targets.cpu import CPU
from tests.compare import assert_no_farther, reset

OWN = {"own_products": "always", "strict": True, "check_bounds": True}


class Layer(torch.nn.Module):
    def __init__(self, inner: int, columns: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(inner, columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


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


def test_a_batch_of_rows_in_double_precision():
    model, x = Layer(40, 30).double(), torch.randn(3, 4, 40, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(frozen(model)(x), model(x))
    assert bytes_in_panels() > 0


def test_a_weight_is_stored_once_for_all_graphs(monkeypatch):
    made = []
    monkeypatch.setattr(panels, "packed", lambda *given, pack=panels.packed: made.append(pack(*given)) or made[-1])
    model = Layer(40, 30)
    few = frozen(model, dynamic=False)
    few(torch.randn(4, 40))
    few(torch.randn(9, 40))
    assert len(ferrite.last_compile().graphs) == 1
    assert len(made) == 1


def test_a_weight_that_was_written_is_stored_anew():
    model, x = Layer(40, 30), torch.randn(4, 40)
    ours = frozen(model)
    ours(x)
    with torch.no_grad():
        model.linear.weight.add_(1)
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
