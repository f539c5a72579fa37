"""The native function that programs call: words in, errors out, and what it keeps alive."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref

import pytest
import torch

from ferrite.codegen.host.runs import KernelCall, RunTable
from ferrite.codegen.llvm.build import load, object_code
from ferrite.codegen.llvm.driver import pack_steps
from ferrite.codegen.llvm.entry import ENTRY, NAME, TableAddress, bound
from ferrite.codegen.llvm.processor import host_processor
from ferrite.codegen.llvm.words import IMMEDIATE
from ferrite.runtime.cpu import Kernels, native_run

WAIT = """
define i64 @wait(ptr %words, i64 %threads, ptr %failure) nounwind {
entry:
  %flag = load ptr, ptr %words
  br label %again
again:
  %now = load atomic i64, ptr %flag monotonic, align 8
  %set = icmp ne i64 %now, 0
  br i1 %set, label %done, label %again
done:
  ret i64 0
}
"""
TOLD = """
define i64 @told(ptr %words, i64 %threads, ptr %failure) nounwind {
  %out = load ptr, ptr %words
  %second.at = getelementptr i64, ptr %words, i64 1
  %second = load i64, ptr %second.at
  store i64 %second, ptr %out
  %threads.at = getelementptr i64, ptr %out, i64 1
  store i64 %threads, ptr %threads.at
  ret i64 0
}
"""
FAILS = """
define i64 @fails(ptr %words, i64 %threads, ptr %failure) nounwind {
  store i64 70, ptr %failure
  %extent.at = getelementptr i64, ptr %failure, i64 1
  store i64 5, ptr %extent.at
  ret i64 2
}
"""


def kernels_of(name, source, complaints=()):
    addresses = load({name: object_code(source, host_processor()), NAME: object_code(ENTRY, host_processor())})
    return Kernels([addresses[name]], [complaints], addresses[NAME])


def test_words_fill_the_last_slots():
    out = torch.zeros(2, dtype=torch.int64)
    kernels = kernels_of("told", TOLD)
    for slots, given in ((2, (out.data_ptr(), -(1 << 62))), (3, (out.data_ptr(), -(1 << 62)))):
        first = slots - 2  # the first of three slots is the arena's, and there is none
        run = native_run(RunTable(0, slots, (KernelCall(0, ((first, 0), (first + 1, 7))),)), kernels)
        out.zero_()
        run(3, *given)
        assert out.tolist() == [-(1 << 62) + 7, 3]


def test_a_failure_is_the_error_of_its_step():
    kernels = kernels_of("fails", FAILS, ("first", "IndexError: {index} of {size}"))
    run = native_run(RunTable(0, 1, (KernelCall(0, ((0, 0),)),)), kernels)
    with pytest.raises(IndexError, match=r"^70 of 5$"):
        run(1, 0)


def test_what_is_no_number_is_an_error_and_nothing_runs():
    out = torch.zeros(2, dtype=torch.int64)
    run = native_run(RunTable(0, 2, (KernelCall(0, ((0, 0), (1, 0))),)), kernels_of("told", TOLD))
    for given in ((1, out.data_ptr(), "2"), (1.5, out.data_ptr(), 2), (1, out.data_ptr(), 1 << 80)):
        with pytest.raises((TypeError, OverflowError)):
            run(*given)
    assert out.tolist() == [0, 0]


def test_pythons_lock_is_free_while_kernels_run():
    flag = torch.zeros(1, dtype=torch.int64)
    run = native_run(RunTable(0, 1, (KernelCall(0, ((0, 0),)),)), kernels_of("wait", WAIT))
    thread = threading.Thread(target=run, args=(1, flag.data_ptr()))
    thread.start()
    flag.fill_(1)  # never reached, if the kernel kept the lock
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_function_keeps_its_table_and_leaves_nothing_behind():
    address = load({NAME: object_code(ENTRY, host_processor())})[NAME]
    steps = pack_steps([], 0)
    kept = ctypes.create_string_buffer(steps, len(steps))
    table = TableAddress(ctypes.addressof(kept))
    table.needs, table.fail = kept, lambda *left: None
    gone = weakref.ref(kept)
    function = bound(address, table)
    del table, kept
    gc.collect()
    assert gone() is not None
    before = sys.getrefcount(None)
    assert [function(1) for _ in range(1000)] == [0] * 1000
    assert abs(sys.getrefcount(None) - before) < 100
    del function
    gc.collect()
    assert gone() is None


def test_failures_leave_nothing_behind():
    run = native_run(
        RunTable(0, 1, (KernelCall(0, ((IMMEDIATE, 0),)),)), kernels_of("fails", FAILS, ("a", "IndexError: {index}"))
    )
    seen = []

    def failing(count):
        for _ in range(count):
            with pytest.raises(IndexError):
                run(1, 0)
        gc.collect()
        seen.append(sys.getallocatedblocks())

    for _ in range(4):
        failing(200)
    assert seen[-1] - seen[1] < 200, seen  # each failure makes a tuple and four numbers
