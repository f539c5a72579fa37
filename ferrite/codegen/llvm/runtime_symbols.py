"""The functions of the process that generated code may call: OpenMP's, libm's, libc's and Python's, by name and
address."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
import sys
from pathlib import Path

PARALLEL = ("GOMP_parallel", "omp_get_num_threads", "omp_get_thread_num")
PYTHON = (
    "PyErr_Occurred",
    "PyEval_RestoreThread",
    "PyEval_SaveThread",
    "PyLong_AsLongLong",
    "PyLong_FromLongLong",
    "PyObject_CallObject",
    "PyObject_Vectorcall",
    "PyTuple_New",
    "PyTuple_SetItem",
    "Py_DecRef",
)
MEMORY = ("malloc", "free", "memcpy", "memmove", "memset")
_REAL = (
    "acos acosh asin asinh atan atan2 atanh ceil cos cosh erf erfc exp exp2 expm1 floor fma fmax fmin fmod hypot "
    "ldexp lgamma log log10 log1p log2 nearbyint nextafter pow rint round roundeven sin sincos sinh "
    "sqrt tan tanh tgamma trunc"
)
MATH = tuple(name + suffix for name in _REAL.split() for suffix in ("", "f"))


def loaded_libraries() -> list[str]:
    """The files of the libraries in this process."""
    if sys.platform == "darwin":
        system = ctypes.CDLL(None)
        system._dyld_get_image_name.restype = ctypes.c_char_p
        names = [system._dyld_get_image_name(place) for place in range(system._dyld_image_count())]
        return [name.decode() for name in names if name]
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    lines = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
    return list(dict.fromkeys(line[5] for line in lines if len(line) == 6 and line[5].startswith("/")))


@functools.cache
def openmp_library() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded, so that both share one pool of threads."""
    import torch

    home = str(Path(torch.__file__).parent)
    found = [path for path in loaded_libraries() if os.path.basename(path).startswith(("libgomp", "libomp", "libiomp"))]
    for path in sorted(found, key=lambda path: not path.startswith((home, f"{home}.libs"))):
        library = ctypes.CDLL(path)
        if all(hasattr(library, name) for name in PARALLEL):
            return library
    return None


@functools.cache
def runtime_symbols() -> dict[str, int]:
    """Name and address of each function there is; without an OpenMP runtime those of `PARALLEL` are missing."""
    names = (*PARALLEL, *PYTHON, *MATH, *MEMORY)
    return {name: address for name in names if (address := runtime_symbol(name)) is not None}


@functools.cache
def runtime_symbol(name: str) -> int | None:
    """The address of one function; None where there is none. Only its own library is looked for."""
    library: ctypes.CDLL | None = None
    if name in PARALLEL:
        library = openmp_library()
    elif name in PYTHON:
        library = ctypes.pythonapi
    elif name in MATH:
        library = _math()
    elif name in MEMORY:
        library = _process()
    return None if library is None else _address(library, name)


@functools.cache
def _math() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libm.so.6")  # asking the system for its name starts a process
    except OSError:
        return ctypes.CDLL(ctypes.util.find_library("m"))  # None where libc has it


@functools.cache
def _process() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _address(library: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        return None
