"""The kernels that the scheduler makes for a CPU, printed as Triton: the level is neutral."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ferrite.codegen.triton import unsupported
from ferrite.ir.expr import Load
from ferrite.ir.kernel.nodes import Store, nodes_in, walk
from ferrite.machines import Machine
from ferrite.schedule.cpu import CpuScheduling
from ferrite.schedule.plan import make_plan
from tests.lower.lowered import program_of
from tests.triton_kernels import DEVICES, assert_same_results

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

ROWS, IMAGES, PLACES = torch.randn(5, 37), torch.randn(2, 3, 6, 6), torch.tensor([3, 0, 5, 5])
FUNCTIONS = {
    "softmax": (lambda x: x.softmax(-1), [ROWS]),
    "layer norm": (lambda x, w: F.layer_norm(x, (37,), w, w), [ROWS, torch.randn(37)]),
    "gelu": (lambda x: F.gelu(x) * x.sigmoid(), [ROWS]),
    "columns": (lambda x: (x * x).sum(0), [ROWS]),
    "all": (lambda x: (x.sum(), x.amax(1), x.argmax(0), (x > 0).any(1)), [ROWS]),
    "embedding": (lambda w, i: F.embedding(i, w) * 2, [torch.randn(6, 8), PLACES]),
    "index_add": (lambda x, i, s: x.index_add(0, i, s), [torch.randn(6, 8), PLACES, torch.randn(4, 8)]),
    "bfloat16": (lambda x, y: (x * y + x).relu(), [ROWS.bfloat16(), torch.randn(37).bfloat16()]),
    "transpose": (lambda x: (x.t() + 1).contiguous(), [ROWS]),
    "cumulative sum": (lambda x: x.cumsum(1), [ROWS]),
    "max pool": (lambda x: F.max_pool2d(x, 2), [IMAGES]),
    "pad": (lambda x: F.pad(x, (1, 2, 3, 1)), [IMAGES]),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), [IMAGES]),
    "integers": (lambda x: (x // 3 + x % 5) ^ 2, [torch.randint(-9, 9, (30,))]),
}


def kernels_of(name):
    function, inputs = FUNCTIONS[name]
    plan = make_plan(program_of(function, *inputs), {"cpu": CpuScheduling(Machine())}, verify=True)
    return list(dict.fromkeys(launch.kernel for launch in plan.launches))


def memory_for(kernel):
    """Random numbers, as many as the kernel reaches; integers that are places of all that is indexed here."""
    reach = dict.fromkeys((pointer.name for pointer in kernel.pointers), 1)
    for statement in walk(kernel.body):
        accesses: list[Any] = [item for item in nodes_in(statement) if isinstance(item, Load)]
        for access in [*accesses, *([statement] if isinstance(statement, Store) else [])]:
            if access.buffer in reach:
                reach[access.buffer] = max(reach[access.buffer], access.coordinates[0].high + 1)
    return [
        torch.randn(reach[pointer.name]).to(pointer.dtype)
        if pointer.dtype.is_floating_point
        else torch.randint(0, 4, (reach[pointer.name],)).to(pointer.dtype)
        for pointer in kernel.pointers
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS, ids=lambda name: name.replace(" ", "-"))
def test_a_scheduled_kernel_computes_the_same(name, device):
    kernels = kernels_of(name)
    assert kernels
    for kernel in kernels:
        assert unsupported(kernel) is None
        assert not kernel.sizes
        assert_same_results(kernel, memory_for(kernel), (), device, rtol=1e-5, atol=1e-5)
