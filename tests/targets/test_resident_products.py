"""Matrix products whose programs stay and go through blocks, with factors loaded by descriptors, on a GPU that is
simulated: values, memory for descriptors, memory that no descriptor is there for."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ferrite.errors import Refusal
from ferrite.machines import GpuMachine
from ferrite.schedule.gpu import GpuScheduling, candidates
from ferrite.targets.trials import compiled_trials, reason_against
from ferrite.tune import Measured, ProductConfig, ProductProblem, configurations
from tests.targets.test_cuda_devices import gpus  # noqa: F401  # a fixture
from tests.targets.test_tuning import pictured

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

PROGRAMS = 3
CONFIG = ProductConfig(32, 32, 32, 4, 3, 4, resident=True)
product, wide_product = torch.ops.ferrite.product, torch.ops.ferrite.wide_product
# by name: a product, the sizes of its factors, the axes that these lie along, and whether both have descriptors
PRODUCTS: dict[str, Any] = {
    "linear": (lambda x, w: x @ w.t(), [(72, 80), (96, 80)], ("summed", "summed"), 2),
    "plain": (lambda x, w: x @ w, [(72, 80), (80, 96)], ("summed", "columns"), 2),
    "turned": (lambda x, w: x.t() @ w, [(80, 72), (80, 96)], ("rows", "columns"), 2),
    "batch": (lambda x, w: x @ w, [(2, 72, 80), (2, 80, 96)], ("summed", "columns"), 2),
    "ragged": (lambda x, w: x @ w.t(), [(33, 88), (35, 88)], ("summed", "summed"), 2),
    "odd": (lambda x, w: x @ w.t(), [(72, 83), (96, 83)], ("summed", "summed"), 0),
    "half odd": (lambda x, w: x @ w, [(72, 80), (80, 99)], ("summed", "columns"), 1),
}


def resident(target, function, sizes, problem):
    """A trial of a function of tensors in bfloat16, with programs that are resident."""
    target.scheduling = GpuScheduling(replace(GpuMachine(), multiprocessors=PROGRAMS))
    graph = pictured(function, *sizes)
    (trial,) = compiled_trials(graph, target, [configurations({problem: Measured(0, 0, CONFIG)})])
    assert not isinstance(trial, Refusal)
    return trial


def last_request(target):
    return list(target.simulated.functions.values())[-1].request


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(gpus, name):  # noqa: F811
    function, sizes, along, described = PRODUCTS[name]

    def own(x, w):
        left, right = (x.t(), w) if along[0] == "rows" else (x, w.t() if along[1] == "summed" else w)
        return [product(left, right)]

    exact = function(*(torch.empty(each) for each in sizes))
    summed = sizes[0][-2] if along[0] == "rows" else sizes[0][-1]
    batch = exact.shape[0] if exact.ndim == 3 else 1
    rows, columns = exact.shape[-2:]
    problem = ProductProblem("bf16", batch, rows, columns, summed, *along)
    trial = resident(gpus, own, sizes, problem)
    for _ in range(2):  # by Python, then by native code
        given = [torch.randn(*each).bfloat16() for each in sizes]
        exact = function(*(each.double() for each in given))
        assert not reason_against(trial(*given), [exact], [0.05])
    assert {each.programs for each in gpus.simulated.launched} == {PROGRAMS}
    assert last_request(gpus)["source"].count("make_tensor_descriptor(") == described


def layer(x, weight, bias, residual):
    y = (wide_product(x, weight.t()) + bias).to(x.dtype)
    return [torch.relu(y) + residual, y.sum()]


def test_what_follows_is_inside(gpus):  # noqa: F811
    sizes = [(72, 80), (96, 80), (96,), (72, 96)]
    trial = resident(gpus, layer, sizes, ProductProblem("bf16", 1, 72, 96, 80, "summed", "summed"))
    given = [torch.randn(*each).bfloat16() for each in sizes]
    x, weight, bias, residual = (each.double() for each in given)
    y = x @ weight.t() + bias
    assert not reason_against(trial(*given)[:1], [torch.relu(y) + residual], [0.05])


def test_memory_that_begins_elsewhere_is_read_by_pointers(gpus):  # noqa: F811
    sizes = [(72, 80), (96, 80)]
    problem = ProductProblem("bf16", 1, 72, 96, 80, "summed", "summed")
    trial = resident(gpus, lambda x, w: [product(x, w.t())], sizes, problem)
    memory = torch.randn(72 * 80 + 8).bfloat16()
    w = torch.randn(96, 80).bfloat16()
    for offset in (0, 1, 0, 3):
        x = memory[offset : offset + 72 * 80].view(72, 80)
        assert not reason_against(trial(x, w), [x.double() @ w.double().t()], [0.05])
        assert last_request(gpus)["constants"] == {"DESCRIPTORS": int(offset == 0)} or offset == 0


@pytest.mark.quick
def test_they_are_candidates_where_a_gpu_has_descriptors_and_blocks_for_most_multiprocessors():
    large = ProductProblem("bf16", 1, 4096, 4096, 4096, "summed", "summed")
    machine = GpuMachine()
    assert any(config.resident for config in candidates(large, machine))
    assert not any(config.resident for config in candidates(large, replace(machine, has_descriptors=False)))
    small = ProductProblem("bf16", 1, 256, 256, 4096, "summed", "summed")
    assert not any(config.resident for config in candidates(small, machine))


@pytest.mark.quick
def test_a_configuration_says_so_in_its_text():
    assert str(CONFIG).endswith("1 piece, resident")
    assert ProductConfig.parsed(str(CONFIG)) == CONFIG
    assert ProductConfig.parsed(str(replace(CONFIG, resident=False))) == replace(CONFIG, resident=False)
