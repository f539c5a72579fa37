"""Kernels that compare every address with the bounds of its memory: what lies outside is reported, and not touched."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch

from ferrite.codegen.llvm.bounds import codes_of_bounds
from ferrite.codegen.llvm.build import load, object_code
from ferrite.codegen.llvm.emit import kernel_text
from ferrite.codegen.llvm.processor import host_processor
from ferrite.ir.expr import rewrite_indices
from ferrite.ir.index.algebra import Axis, number
from ferrite.ir.kernel.nodes import checks
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.schedule.cpu import CpuScheduling
from tests.compare import assert_same_as_eager, reset
from tests.llvm_kernels import SIGNATURE
from tests.loop_kernels import text

quick = pytest.mark.quick


def run(source, memory, sizes=(), room=None, threads=1):
    """What a checked kernel gives, and the failing index and extent. `room`: elements that each tensor may have."""
    kernel = parse_kernel(source)
    code = object_code(kernel_text(kernel, host_processor(), "kernel", checked=True), host_processor(), 2)
    function = SIGNATURE(load({"kernel": code})["kernel"])
    words = [tensor.data_ptr() for tensor in memory] + list(sizes)
    for tensor, count in zip(memory, room or [tensor.numel() for tensor in memory], strict=True):
        words += [tensor.data_ptr(), tensor.data_ptr() + count * tensor.itemsize]
    failure = (ctypes.c_int64 * 3)()
    return function((ctypes.c_int64 * len(words))(*words), threads, failure), tuple(failure[:2])


def shifted(load_at, store_at, lanes, kind="vector"):
    return text(f"""
        def kernel(x, out, n):
            n = symbol(0, 1000)
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            for i in {kind}(n, lanes={lanes}):
                v0: f32 = x[{load_at}]
                out[{store_at}] = v0
    """)


@quick
@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("count", [1, 3, 4, 7, 35])
def test_what_is_inside_is_done(lanes, count):
    x, out = torch.randn(count), torch.zeros(count)
    assert run(shifted("n - 1 - i", "i", lanes), [x, out], [count])[0] == 0
    assert torch.equal(out, x.flip(0))


@quick
@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize(
    ("load_at", "store_at", "pointer", "writes", "index"),
    [("i + 1", "i", 0, 0, None), ("i - 2", "i", 0, 0, -2), ("i", "i + 3", 1, 1, None), ("i", "i - 1", 1, 1, -1)],
)
def test_what_is_outside_is_reported_and_not_touched(lanes, load_at, store_at, pointer, writes, index):
    """Tensors lie in larger memory here, so that a mistake would not end the process."""
    source, count = shifted(load_at, store_at, lanes), 13
    rooms = [torch.full([64], float(number)) for number in range(2)]
    x, out = (room[16 : 16 + count] for room in rooms)
    result, (place, extent) = run(source, [x, out], [count])
    codes = codes_of_bounds(parse_kernel(source), 0)
    assert (result, extent) == (codes[pointer] + writes, count)
    assert place == index if index is not None else place >= count - lanes + 1
    around = torch.cat([rooms[1][:16], rooms[1][16 + count :]])
    assert torch.equal(around, torch.ones_like(around))


@quick
def test_masked_loads_may_point_anywhere():
    source = text("""
        def kernel(x, out, n):
            n = symbol(0, 1000)
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            for i in vector(n, lanes=4):
                v0: i64 = index(i)
                v1: b8 = ge(v0, i64(2))
                v2: f32 = x[i - 2]
                v3: f32 = masked(v1, v2, f32(0.0))
                out[i] = v3
    """)
    x, out = torch.randn(11), torch.zeros(11)
    assert run(source, [x, out], [11])[0] == 0
    assert torch.equal(out, torch.cat([torch.zeros(2), x[:-2]]))


@quick
def test_tiles_have_bounds():
    source = text("""
        def kernel(x, out):
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            t = scratch(f32, [8])
            for i in serial(8):
                v0: f32 = x[i]
                t[i] = v0
            for j in serial(9):
                v1: f32 = t[j]
                out[j] = v1
    """)
    x, out = torch.randn(8), torch.zeros(9)
    result, (place, extent) = run(source, [x, out])
    assert (result, place, extent) == (codes_of_bounds(parse_kernel(source), 0)[-1], 8, 8)


@quick
def test_checks_of_indices_come_first():
    source = text("""
        def kernel(x, at, out, n):
            n = symbol(0, 1000)
            x = pointer(f32, 'read')
            at = pointer(i64, 'read')
            out = pointer(f32, 'write')
            for i in serial(n):
                v0: i64 = at[i]
                v1: f32 = x[data(v0, 5)]
                out[i] = v1
    """)
    assert len(checks(parse_kernel(source))) == 1
    memory = [torch.randn(5), torch.tensor([0, 7]), torch.zeros(2)]
    assert run(source, memory, [2]) == (1, (7, 5))
    assert run(source, memory, [2], room=[0, 2, 2])[0] == 2


# --- through the front door -------------------------------------------------------------------------------------------

CHECKED = {"check_bounds": True}


def mixed(x, y, at):
    joined = torch.cat([x, y])
    normal = torch.nn.functional.layer_norm(joined, [8])
    return joined[:3].sin(), torch.softmax(normal, -1), normal.t().contiguous(), joined[at].sum(0), joined.cumsum(1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_programs_have_the_same_results(dynamic):
    def make():
        return [torch.randn(40, 8), torch.randn(5, 8), torch.tensor([0, 44, 3, 3])]

    assert_same_as_eager(mixed, make, options=CHECKED, dynamic=dynamic)


def test_training_has_the_same_results():
    def make():
        return [torch.randn(12, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True), torch.tensor([0, 3, 3])]

    assert_same_as_eager(mixed, make, options=CHECKED, backward=True)


def test_a_kernel_that_would_go_outside_says_where(monkeypatch):
    """The scheduler is made to go one element too far."""
    arranged = CpuScheduling.arranged

    def too_far(*args):
        built = arranged(*args)
        return dataclasses.replace(built, kernel=one_further(built.kernel))

    def one_further(kernel):
        def moved(statement):
            if hasattr(statement, "body"):
                return dataclasses.replace(statement, body=tuple(map(moved, statement.body)))
            if not hasattr(statement, "value"):
                return statement
            axes = {atom: atom + number(1) for atom in statement.value.atoms if isinstance(atom, Axis)}
            return dataclasses.replace(statement, value=rewrite_indices(statement.value, axes))

        return dataclasses.replace(kernel, body=tuple(map(moved, kernel.body)))

    monkeypatch.setattr(CpuScheduling, "arranged", too_far)
    reset()
    compiled = torch.compile(lambda x: x * 2 + 1, backend="ferrite", options=CHECKED)
    with pytest.raises(RuntimeError, match=r"kernel add reads element \d+ of arg0_1, which has 7, for test_checked"):
        compiled(torch.randn(7))
