"""Kernels run twice: element by element, and as Triton source, on a GPU where there is one."""

from __future__ import annotations

import numpy
import pytest
import torch

from ferrite.ir.expr import Expr
from ferrite.ir.index import axis, symbol
from ferrite.ir.kernel import Kernel, Loop, Pointer, Store
from ferrite.ir.kernel_laws import verify_kernel
from ferrite.ir.kernel_parse import parse_kernel
from ferrite.ir.run_kernel import run_kernel

COUNT = symbol("n", 0, None)
PLACE = axis("i", COUNT)
ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_A_GPU)]


def kernel_of(source: str) -> Kernel:
    return verify_kernel(parse_kernel(source))


def elementwise(inputs: dict[str, torch.dtype], values: list[Expr]) -> Kernel:
    """One vector loop that stores every value, at PLACE, to a pointer of its own: o0, o1 and so on."""
    outputs = [Pointer(f"o{number}", value.dtype, "write") for number, value in enumerate(values)]
    stores = tuple(Store(pointer.name, (PLACE,), value) for pointer, value in zip(outputs, values, strict=True))
    pointers = [Pointer(name, dtype) for name, dtype in inputs.items()]
    return verify_kernel(Kernel((*pointers, *outputs), (COUNT,), (Loop(PLACE, "vector", stores, lanes=4),)))


def run_triton(kernel, memory, sizes=(), device="cpu"):
    """What is in memory afterwards."""
    from ferrite.codegen.triton.run import run

    made = [tensor.reshape(-1).clone().to(device) for tensor in memory]
    with numpy.errstate(all="ignore"):  # lanes that do not count divide by zero
        run(kernel, made, sizes)
    return [tensor.cpu() for tensor in made]


def run_both(kernel, memory, sizes=(), device="cpu"):
    """What is in memory after each of the two: element by element, and as Triton."""
    expected = [tensor.reshape(-1).clone() for tensor in memory]
    run_kernel(kernel, expected, sizes)
    return expected, run_triton(kernel, memory, sizes, device)


def assert_same_bits(made, expected, what=""):
    """Equal, with the sign of zero; any NaN equals any other."""
    assert made.dtype == expected.dtype
    same = made == expected
    if made.is_floating_point():
        same = same & (made.signbit() == expected.signbit()) | made.isnan() & expected.isnan()
    assert bool(same.all()), f"{what}: {made[~same][:4].tolist()}, expected {expected[~same][:4].tolist()}"


def assert_same_results(kernel, memory, sizes=(), device="cpu", rtol=2e-6, atol=2e-6):
    expected, made = run_both(kernel, memory, sizes, device)
    torch.testing.assert_close(made, expected, rtol=rtol, atol=atol, equal_nan=True)
    return made
