"""A dozen small programs as text, whole: the host program of every graph, and the kernels that it runs.

`pytest --update-golden tests/codegen/test_whole_programs.py` writes the files anew; their difference is what a change
of the compiler did, to be read before it is committed. The plain facts that a file shows stand beside its program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import ferrite
from ferrite.lower.ops import special
from ferrite.machines import Machine
from ferrite.schedule.cpu import CpuScheduling
from ferrite.targets.cpu import CPU, CpuTarget, refusal_of_operation
from tests.compare import compile_strict

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("llvm_kernels")]


@dataclass(frozen=True)
class Case:
    """`kernels`: how many different ones; `contains` and `lacks`: in the host program."""

    function: Callable[..., Any]
    inputs: Callable[[], Sequence[Any]]
    kernels: int
    contains: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    dynamic: bool = False
    backward: bool = False


def softmax(x):
    return torch.softmax(x * 2, -1)


def layer_norm(x, weight, bias):
    return F.layer_norm(x, (64,), weight, bias)


def column_sum(x):
    return x.relu().sum(0)


def concat_and_a_reader_of_a_part(x, y):
    both = torch.cat([x.sin(), y], 1)
    return both, both[:, 8:] + 1


def scatter(x, where, values):
    return x.index_add(0, where, values * 2)


def training_step(x, first, second):
    return F.mse_loss(torch.relu(x @ first) @ second, x)


def dynamic_shapes(x, y):
    return (x + y).relu(), x.shape[0] * 2


def product_with_an_epilogue(x, w, b):
    return F.gelu(x @ w + b)


def reduction_in_two_steps(x):
    return (x * x).sum()


def update_of_an_input(x, y):
    x.add_(y).relu_()
    return x.sum(-1)


def dropout(x):
    return F.dropout(x, 0.5) * 2


def transposed_copy(x):
    return x.t().contiguous() + 1


def rand(*sizes: int, **more: Any) -> torch.Tensor:
    return torch.rand(sizes, **more)


CASES = (
    Case(softmax, lambda: [rand(8, 64)], kernels=1),
    Case(layer_norm, lambda: [rand(8, 64), rand(64), rand(64)], kernels=1),
    Case(column_sum, lambda: [rand(64, 48)], kernels=1),
    Case(concat_and_a_reader_of_a_part, lambda: [rand(4, 8), rand(4, 8)], kernels=1, lacks=("op_aten_cat",)),
    Case(scatter, lambda: [rand(6, 8), torch.tensor([0, 5, 0]), rand(3, 8)], kernels=2, lacks=("op_aten_index_add",)),
    Case(
        *(training_step, lambda: [rand(8, 16), rand(16, 32, requires_grad=True), rand(32, 16, requires_grad=True)]),
        kernels=4,
        contains=("def forward", "def backward", "op_aten_mm("),
        backward=True,
    ),
    Case(dynamic_shapes, lambda: [rand(5, 8), rand(5, 8)], kernels=1, contains=(", 2*s",), dynamic=True),
    Case(
        product_with_an_epilogue, lambda: [rand(8, 16), rand(16, 32), rand(32)], kernels=1, contains=("op_aten_addmm(",)
    ),
    Case(reduction_in_two_steps, lambda: [rand(1024, 1024)], kernels=2),
    Case(update_of_an_input, lambda: [rand(8, 16), rand(8, 16)], kernels=1, lacks=("op_aten",)),
    Case(dropout, lambda: [rand(8, 16)], kernels=1, contains=("op_aten_bernoulli__float(",)),
    Case(transposed_copy, lambda: [rand(32, 48)], kernels=1),
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of all kernels that are compiled, arranged for one machine whatever this one is."""
    texts: list[str] = []
    compiled = CpuTarget.compiled

    def keep(self: CpuTarget, kernels: Sequence[Any], *more: Any) -> Any:
        texts.extend(str(kernel) for kernel in kernels)
        return compiled(self, kernels, *more)

    monkeypatch.setattr(CPU, "scheduling", CpuScheduling(Machine(), refusal_of_operation))
    monkeypatch.setattr(CpuTarget, "compiled", keep)
    monkeypatch.setattr(special, "host_machine", Machine)  # on some processors relu has other words
    return texts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.function.__name__)
def test_whole_program(case: Case, kernels: list[str], golden: Any) -> None:
    results, gradients = [], []
    options = {"product_layouts": "off"}  # which is quicker depends on the machine
    compiled = compile_strict(case.function, dynamic=case.dynamic, fullgraph=True, options=options)
    for function in (case.function, compiled):
        torch.manual_seed(0)
        inputs = case.inputs()
        torch.manual_seed(1)
        results.append(function(*inputs))
        if case.backward:
            results[-1].backward()
        gradients.append([value.grad for value in inputs])
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*gradients)
    host = "\n".join(without_lines(graph.source) for graph in ferrite.last_compile().graphs)
    assert golden == "\n".join([host, *(without_lines(text) for text in kernels)])
    assert len(set(kernels)) == case.kernels
    assert all(text in host for text in case.contains)
    assert not any(text in host for text in case.lacks)


def without_lines(text: str) -> str:
    """Without the numbers of lines in this file: they change whenever something is added above."""
    return re.sub(r"(?<=test_whole_programs\.py):\d+", "", text)
