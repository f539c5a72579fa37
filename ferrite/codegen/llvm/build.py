"""LLVM text to object code, object code to addresses in this process.

Text is made with explicit vectors, each value once and as far out as it may be. So few passes are left to run, and
most of the time is instruction selection. Every compilation has a context of its own, and LLVM's long calls run
without llvmlite's lock: many threads may compile at once.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Mapping
from typing import Any

from ferrite.codegen.llvm.executable_memory import Loaded
from ferrite.codegen.llvm.processor import Processor, host_processor
from ferrite.codegen.llvm.runtime_symbols import PARALLEL, runtime_symbols

ASSEMBLY, OBJECT = 0, 1
_lock = threading.Lock()
_alive: list[Any] = []  # what stays as long as the process lives
_numbers = itertools.count()
_pipelines: list[Any] = []  # for the next compilations: llvmlite never frees one

# Where torch runs without OpenMP: a team of one.
SERIAL_TEAM = """
define void @GOMP_parallel(ptr %function, ptr %data, i32 %threads, i32 %flags) nounwind {
  call void %function(ptr %data)
  ret void
}
define i32 @omp_get_num_threads() nounwind {
  ret i32 1
}
define i32 @omp_get_thread_num() nounwind {
  ret i32 0
}
"""


def object_code(text: str, processor: Processor, level: int = 2) -> bytes:
    """An object file. `level`: 0 to 3, how hard the code generator tries."""
    return _compile(text, processor, level, OBJECT)


def assembly(text: str, processor: Processor, level: int = 2) -> str:
    """The same as a person reads it."""
    return _compile(text, processor, level, ASSEMBLY).decode()


def load(objects: Mapping[str, bytes]) -> dict[str, int]:
    """The address of each function in the object that goes by its name. They stay as long as the process lives."""
    loaded = {name: link(name, code) for name, code in objects.items()}
    _alive.extend(loaded.values())
    return {name: each.address for name, each in loaded.items()}


def link(name: str, code: bytes) -> Loaded:
    """The function in an object that goes by a name."""
    import llvmlite.binding as llvm

    with _lock:
        library = llvm.JITLibraryBuilder().add_jit_library("process")
        library.add_object_img(code)
        library.export_symbol(name)
        linked = library.link(_linker(), f"kernels{next(_numbers)}")
    return Loaded(linked[name], linked)


@functools.cache
def _linker() -> Any:
    """One linker for the process, in which the symbols of the process have their names."""
    import llvmlite.binding as llvm

    _initialize()
    linker = llvm.create_lljit_compiler(None, use_jit_link=True)
    library = llvm.JITLibraryBuilder()
    symbols = runtime_symbols()
    if PARALLEL[0] not in symbols:
        library.add_object_img(object_code(SERIAL_TEAM, host_processor()))
    for name, address in symbols.items():
        library.import_symbol(name, address)
    _alive.append(library.link(linker, "process"))
    return linker


# --- compiling --------------------------------------------------------------------------------------------------------


def _compile(text: str, processor: Processor, level: int, form: int) -> bytes:
    import llvmlite.binding as llvm

    _initialize()
    raw = _calls()
    context = llvm.create_context()
    machine = _machine(processor, level)
    options = llvm.create_pipeline_tuning_options(min(level, 2))
    passes = llvm.create_pass_builder(machine, options)
    source = ctypes.c_char_p(text.encode())
    with llvm.ffi.OutputString() as problem:
        module = llvm.ModuleRef(raw.LLVMPY_ParseAssembly(context, source, problem), context)
        if problem:
            raise RuntimeError(f"{problem}\n{text}")
    try:
        pipeline = _pipelines.pop()
    except IndexError:
        pipeline = _pipeline()
    raw.LLVMPY_RunNewModulePassManager(pipeline, module, passes)
    _pipelines.append(pipeline)
    with llvm.ffi.OutputString() as problem:
        buffer = raw.LLVMPY_TargetMachineEmitToMemory(machine, module, form, problem)
        if not buffer:
            raise RuntimeError(str(problem))
    try:
        library = llvm.ffi.lib
        return ctypes.string_at(library.LLVMPY_GetBufferStart(buffer), library.LLVMPY_GetBufferSize(buffer))
    finally:
        llvm.ffi.lib.LLVMPY_DisposeMemoryBuffer(buffer)
        module.close()


def _pipeline() -> Any:
    """Functions of vector math go in place, variables into registers, and what became plain is made plain."""
    import llvmlite.binding as llvm

    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    return passes


def _machine(processor: Processor, level: int) -> Any:
    import llvmlite.binding as llvm

    found = llvm.Target.from_triple(processor.triple)
    return found.create_target_machine(
        cpu=processor.cpu, features=processor.features, opt=level, reloc="pic", codemodel="small", jit=False
    )


@functools.cache
def _initialize() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


@functools.cache
def _calls() -> ctypes.CDLL:
    """The three calls that take long, from the same library, but without the lock around llvmlite's own."""
    from llvmlite.binding import ffi

    library = ctypes.CDLL(ffi.lib._name)
    for name in ("LLVMPY_ParseAssembly", "LLVMPY_RunNewModulePassManager", "LLVMPY_TargetMachineEmitToMemory"):
        declared = getattr(ffi.lib, name)
        call = getattr(library, name)
        call.argtypes, call.restype = declared.argtypes, declared.restype
    return library
