"""The driver as a function that Python calls like one of its own: no foreign-function layer between a program and its
kernels.

Most of what a small graph costs is what happens around its kernels; after large tensors have emptied the caches, all
the more: a call through ctypes then takes three times as long.

    ferrite_call(table, threads, word, ...)

`table` is what the function is bound to: an integer, the address of a table for the driver. The words fill the last
slots; one without an arena leaves out the first. Python's lock is given up while kernels run. Where one fails, the
table is called with what it left: result, value, extent, step; it raises the error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ferrite.codegen.llvm.driver import DRIVER, FAILURE_WORDS
from ferrite.codegen.llvm.words import FROM_PYTHON

NAME = "ferrite_call"
ENTRY = f"""{DRIVER}{FROM_PYTHON}
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyObject_CallObject(ptr, ptr)
declare ptr @PyTuple_New(i64)
declare i32 @PyTuple_SetItem(ptr, i64, ptr)
declare void @Py_DecRef(ptr)

define ptr @{NAME}(ptr %self, ptr %given, i64 %count) nounwind {{
entry:
  %address = call i64 @PyLong_AsLongLong(ptr %self)
  %table = inttoptr i64 %address to ptr
  %threads.object = load ptr, ptr %given, align 8
  %threads = call i64 @PyLong_AsLongLong(ptr %threads.object)
  %slots.at = getelementptr i64, ptr %table, i64 1
  %slots = load i64, ptr %slots.at, align 8
  %all = add i64 %slots, {FAILURE_WORDS}
  %words = alloca i64, i64 %all, align 16
  %numbers = call i1 @ferrite.from_python(ptr %given, i64 %count, ptr %words, i64 %slots)
  br i1 %numbers, label %run, label %wrong
wrong:
  ret ptr null
run:
  %state = call ptr @PyEval_SaveThread()
  %result = call i64 @ferrite_run(ptr %table, ptr %words, i64 %threads)
  call void @PyEval_RestoreThread(ptr %state)
  %good = icmp eq i64 %result, 0
  br i1 %good, label %done, label %failed
done:
  %zero = call ptr @PyLong_FromLongLong(i64 0)
  ret ptr %zero
failed:
  %left = call ptr @PyTuple_New(i64 {FAILURE_WORDS + 1})
  %first = call ptr @PyLong_FromLongLong(i64 %result)
  %first.set = call i32 @PyTuple_SetItem(ptr %left, i64 0, ptr %first)
  %failure = getelementptr i64, ptr %words, i64 %slots
  br label %tell
tell:
  %told = phi i64 [ 0, %failed ], [ %told.next, %tell ]
  %told.at = getelementptr i64, ptr %failure, i64 %told
  %told.word = load i64, ptr %told.at, align 8
  %told.object = call ptr @PyLong_FromLongLong(i64 %told.word)
  %told.next = add i64 %told, 1
  %told.set = call i32 @PyTuple_SetItem(ptr %left, i64 %told.next, ptr %told.object)
  %others = icmp slt i64 %told.next, {FAILURE_WORDS}
  br i1 %others, label %tell, label %raise
raise:
  %raised = call ptr @PyObject_CallObject(ptr %self, ptr %left)
  call void @Py_DecRef(ptr %left)
  ret ptr %raised
}}
"""
FASTCALL = 0x80  # METH_FASTCALL: called with an array of arguments and their number


class _Method(ctypes.Structure):
    """Python's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


class TableAddress(int):
    """The address of a table. What it is made of lives as long as it does; called, it raises what a failure means."""

    needs: Any
    fail: Callable[[int, int, int, int], None]

    def __call__(self, result: int, value: int, extent: int, step: int) -> None:
        self.fail(result, value, extent, step)


def bound(entry: int, table: TableAddress) -> Callable[..., int]:
    """The function at an address, bound to a table."""
    method = _Method(NAME.encode(), entry, FASTCALL, None)
    table.needs = table.needs, method
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    function: Callable[..., int] = new(ctypes.addressof(method), table, None)
    return function
