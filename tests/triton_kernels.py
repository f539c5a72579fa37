"""Kernels run twice: element by element, and as Triton source, on a GPU where there is one."""

from __future__ import annotations

import numpy
import pytest
import torch

from ferrite.ir.expr import Expr
from ferrite.ir.index.algebra import axis, symbol
from ferrite.ir.kernel.interpret import run_kernel
from ferrite.ir.kernel.laws import verify_kernel
from ferrite.ir.kernel.nodes import Kernel, Loop, Pointer, Store
from ferrite.ir.kernel.parse import parse_kernel
from tests.loop_kernels import text

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


# --- kernels ----------------------------------------------------------------------------------------------------------

IN_PLACE = text("""
    def kernel(x, n):
        n = symbol(1, 64)
        x = pointer(f32, 'both')
        with sum(f32) as total:
            for j in reduction(n, lanes=4):
                v0: f32 = x[j]
                total.update(v0)
        for j in vector(n, lanes=4):
            v1: f32 = x[j]
            v2: f32 = add(v1, total)
            x[j] = v2
        for k in serial(3):
            for i in vector(n, lanes=4):
                v3: f32 = x[-i + k*n + n - 1]
                x[i + k*n + n].mul(v3)
""")

TRIANGLE = text("""
    def kernel(x, out, n):
        n = symbol(0, 50)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for i in vector(n, lanes=4):
            with sum(f32) as total:
                for j in reduction(i + 1, lanes=4):
                    v0: f32 = x[i*n + j]
                    total.update(v0)
            last: f32 = let(total)
            for k in serial(i):
                out[i*n + k] = last
            v1: i64 = index((i - 3) // 2 + (i - 3) % 5)
            v2: f32 = cast(v1)
            out[i*n + i] = v2
""")

CONDITIONS = text("""
    def kernel(x, out, n, m):
        n = symbol(0, 40)
        m = symbol(0, 40)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for i in parallel(n):
            v0: i64 = index(i)
            v1: b8 = gt(v0, i64(0))
            if v1:
                with amin(f32) as least, sum(i64) as count:
                    for j in reduction(m, lanes=4):
                        v2: f32 = x[i*m + j]
                        v3: b8 = gt(v2, f32(0.0))
                        if v3:
                            v4: f32 = x[i*m + j]
                            least.update(v4)
                            count.update(i64(1))
                    for j in reduction(2, lanes=2):
                        count.update(i64(10))
                out[2*i] = least
                v5: f32 = cast(count)
                out[2*i + 1] = v5
""")

OWN_MAXIMUM = text("""
    def kernel(x, out, n):
        n = symbol(1, None)
        x = pointer(i32, 'read')
        out = pointer(i32, 'write')
        with own(i32) as best:
            with combine(best):
                v0: i32 = param(0)
                v1: i32 = param(1)
                v2: i32 = maximum(v0, v1)
                results(v2)
            for j in reduction(n, lanes=4):
                v3: i32 = x[j]
                best.update(v3)
        out[0] = best
""")

TILE_SUMS = text("""
    def kernel(x, out, n):
        n = symbol(0, None)
        x = pointer(bf16, 'read')
        out = pointer(bf16, 'both')
        for i in parallel(n):
            tile = scratch(f32, [1, 6])
            for j in vector(6, lanes=4):
                tile[0, j] = f32(0.5)
            for k in unrolled(3):
                for j in vector(6, lanes=4):
                    v0: bf16 = x[18*i + 6*k + j]
                    v1: f32 = cast(v0)
                    tile[0, j].add(v1)
            for j in vector(6, lanes=4):
                v2: f32 = tile[0, j]
                v3: bf16 = cast(v2)
                out[6*i + j].add(v3)
""")

COUNTS = text("""
    def kernel(which, counts, most, n):
        n = symbol(0, None)
        which = pointer(i64, 'read')
        counts = pointer(i64, 'both')
        most = pointer(i32, 'both')
        for i in parallel(n):
            for j in vector(2, lanes=2):
                v0: i64 = which[i]
                v1: i64 = index(j)
                counts[data(v0, 4)].atomic_add(v1)
                v2: i64 = index(i - j)
                v3: i32 = cast(v2)
                most[0].atomic_amax(v3)
""")

PLANES = text("""
    def kernel(x, out, a, b, c):
        a = symbol(0, 9)
        b = symbol(1, 9)
        c = symbol(1, None)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for i in parallel(a):
            for k in parallel(c):
                v0: f32 = x[i]
                first: f32 = let(v0)
                with prod(f32) as total:
                    for j in reduction(b, lanes=4):
                        v1: f32 = x[i*b*c + j*c + k]
                        v2: f32 = add(v1, first)
                        total.update(v2)
                out[i*c + k] = total
""")

TWO_CHECKS = text("""
    def kernel(where, there, source, out, n):
        n = symbol(0, None)
        where = pointer(i64, 'read')
        there = pointer(i32, 'read')
        source = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for i in vector(n, lanes=4):
            v0: i64 = where[i]
            v1: i32 = there[data(v0, n)]
            v2: f32 = source[data(v1, 4)]
            out[i] = v2
""")

BIG = text("""
    def kernel(out, n):
        n = symbol(1, 100000)
        out = pointer(i64, 'write')
        for i in vector(3, lanes=4):
            v0: i64 = index(n*n + i*n*n - n)
            out[i] = v0
""")

ROWS_IN_ORDER = text("""
    def kernel(x, out, n):
        n = symbol(0, None)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for k in serial(n):
            for j in vector(6, lanes=4):
                v0: f32 = x[8*k + j]
                out[8*k + j] = v0
""")

# What a GPU's own scheduler writes: blocks are said.
ROW_SCANS = text("""
    def kernel(x, out, totals, rows, n):
        rows = symbol(0, None)
        n = symbol(0, None)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        totals = pointer(f32, 'write')
        warps = 1
        for i in vector(rows, lanes=2):
            with sum(f32) as total:
                for j in scan(n, lanes=8):
                    v0: f32 = x[i*n + j]
                    total.update(v0)
                    v1: f32 = mul(total, f32(2.0))
                    out[i*n + j] = v1
            totals[i] = total
""")

LINEAR_SCANS = text("""
    def kernel(x, y, out, n):
        n = symbol(0, None)
        x = pointer(f32, 'read')
        y = pointer(f32, 'read')
        out = pointer(f32, 'write')
        warps = 1
        with own(f32, f32) as (a, b):
            with combine(a):
                v0: f32 = param(0)
                v1: f32 = param(2)
                v2: f32 = mul(v0, v1)
                v3: f32 = param(1)
                v4: f32 = mul(v3, v1)
                v5: f32 = param(3)
                v6: f32 = add(v4, v5)
                results(v2, v6)
            for j in scan(n, lanes=8):
                v7: f32 = x[j]
                v8: f32 = y[j]
                a.update(v7, v8)
                out[j] = b
""")

SORTED_ROWS = text("""
    def kernel(x, out, least, rows, n):
        rows = symbol(0, None)
        n = symbol(0, 16)
        x = pointer(i64, 'read')
        out = pointer(i64, 'write')
        least = pointer(i64, 'write')
        warps = 1
        for i in vector(rows, lanes=2):
            with amin(i64) as key:
                for j in sort(n, lanes=16):
                    v0: i64 = x[i*n + j]
                    key.update(v0)
                    v1: i64 = index(j)
                    v2: i64 = add(key, v1)
                    out[i*n + j] = v2
            least[i] = key
""")

BLOCKS = text("""
    def kernel(x, out, rows):
        rows = symbol(0, None)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        warps = 1
        for i in vector(rows, lanes=4):
            row = scratch(f32, [16])
            with sum(f32) as total:
                for j in reduction(16, lanes=16):
                    v0: f32 = x[16*i + j]
                    v1: f32 = exp(v0)
                    e: f32 = let(v1)
                    row[j] = e
                    total.update(e)
            for k in vector(3, lanes=4):
                for j in vector(16, lanes=16):
                    v2: f32 = row[j]
                    v3: f32 = div(v2, total)
                    v4: f32 = x[16*i + j]
                    v5: f32 = add(v3, v4)
                    out[48*i + 16*k + j] = v5
""")

COMPLEX = text("""
    def kernel(x, out, n):
        n = symbol(0, None)
        x = pointer(c64, 'read')
        out = pointer(f32, 'write')
        for i in vector(n, lanes=4):
            v0: c64 = x[i]
            v1: f32 = real(v0)
            out[i] = v1
""")
