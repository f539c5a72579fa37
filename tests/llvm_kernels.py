"""Compile kernels for this machine, run them, and hold them against the oracle."""

from __future__ import annotations

import ctypes
import functools
import mmap

import torch

from ferrite.codegen.llvm.build import load, object_code
from ferrite.codegen.llvm.emit import kernel_text
from ferrite.codegen.llvm.processor import host_processor
from ferrite.ir.kernel.interpret import run_kernel
from ferrite.ir.kernel.laws import verify_kernel
from ferrite.ir.kernel.parse import parse_kernel

SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)


@functools.cache
def native(source):
    """A kernel's text as a function of tensors and sizes: what it gives, and what it says about a failure."""
    kernel = verify_kernel(parse_kernel(source))
    code = object_code(kernel_text(kernel, host_processor(), "kernel"), host_processor(), 2)
    function = SIGNATURE(load({"kernel": code})["kernel"])

    def run(memory, sizes=(), threads=1):
        words = [tensor.data_ptr() for tensor in memory] + list(sizes)
        failure = (ctypes.c_int64 * 3)()
        result = function((ctypes.c_int64 * max(len(words), 1))(*words), threads, failure)
        return result, tuple(failure[:2])

    return run


def guarded(tensor):
    """A copy in memory whose surroundings are checked: what is written next to it shows."""
    room = torch.full([tensor.numel() * tensor.itemsize + 128], 0xAB, dtype=torch.uint8)
    inside = room[64:-64].view(tensor.dtype)
    inside.copy_(tensor.reshape(-1))
    return room, inside


def fenced(tensor, at_end):
    """A copy that lies at the begin or the end of memory: a read beyond it ends the process."""
    size = mmap.PAGESIZE
    pages = -(-max(tensor.numel() * tensor.itemsize, 1) // size)
    room = mmap.mmap(-1, (pages + 2) * size)
    base = ctypes.addressof(ctypes.c_char.from_buffer(room))
    libc = ctypes.CDLL(None)
    for page in (0, pages + 1):
        assert libc.mprotect(ctypes.c_void_p(base + page * size), ctypes.c_size_t(size), 0) == 0
    offset = size if not at_end else (pages + 1) * size - tensor.numel() * tensor.itemsize
    inside = torch.frombuffer(
        room, dtype=tensor.dtype, count=max(tensor.numel(), 1), offset=min(offset, (pages + 1) * size - tensor.itemsize)
    )
    if tensor.numel():
        inside.copy_(tensor.reshape(-1))
    _ROOMS.append(room)
    return inside[: tensor.numel()] if tensor.numel() else inside[:0]


_ROOMS = []  # they outlive the tensors in them


def both(source, memory, sizes=(), threads=1):
    """What the oracle and the machine make of the same memory."""
    expected = [tensor.reshape(-1).clone() for tensor in memory]
    run_kernel(parse_kernel(source), expected, sizes)
    rooms = [guarded(tensor) for tensor in memory]
    result, _ = native(source)([inside for _, inside in rooms], sizes, threads)
    assert result == 0
    for room, _ in rooms:
        around = torch.cat([room[:64], room[-64:]])
        assert bool((around == 0xAB).all()), "written outside"
    return expected, [inside for _, inside in rooms]


def bits(tensor):
    """The bits of a tensor, one NaN like the other."""
    if tensor.dtype.is_floating_point:
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return tensor.view(size)


def assert_bits(expected, made, what=""):
    if not torch.equal(bits(expected), bits(made)):
        places = torch.nonzero(bits(expected) != bits(made)).flatten()[:5].tolist()
        raise AssertionError(f"at {places}: {expected[places]} is expected, not {made[places]} {what}")


def assert_same(source, memory, sizes=(), threads=1):
    for place, (expected, made) in enumerate(zip(*both(source, memory, sizes, threads), strict=True)):
        assert_bits(expected, made, f"in memory {place}")


def assert_close(source, memory, sizes=(), threads=1, **tolerance):
    expected, made = both(source, memory, sizes, threads)
    torch.testing.assert_close(made, expected, equal_nan=True, **tolerance)
