"""Kernels to machine code for a GPU, with all that a launch has to know. Equal kernels are compiled once: in a process,
and for all processes that share a cache.

What is kept of a kernel is a line of JSON and the code behind it:

    {"entry": "kernel_5f..", "threads": 128, "shared": 0, "pointers": 2, "sizes": 0, "programs": 512, ..}

Code is made for pointers that are multiples of 16 bytes: torch's memory begins at such places, and so does all that is
planned inside of it. A tensor from outside may begin anywhere: for that the same source is compiled again, when such a
tensor comes. So it is with sizes that rows lie apart by, where the first was a multiple of 16: rows of such a size
begin where a vector can be loaded. And so it is with all else that code promises of sizes, as that indices fit into 32
bits: the host program computes a word for it, which is a multiple of 16 where that holds.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch

from ferrite.codegen.llvm import Loaded, launches
from ferrite.codegen.triton import (
    ALIGNMENT,
    DESCRIPTOR_BYTES,
    DESCRIPTORS,
    OPTIONS,
    LaunchConfig,
    fixed_launch,
    row_strides,
    table_lengths,
    writer_source,
    written,
)
from ferrite.errors import NotGenerated, Refusal, RefusedKernels
from ferrite.ir import Number, Symbol, short
from ferrite.ir.kernel import Kernel
from ferrite.runtime.code_memory import CodeMemory, KernelStore
from ferrite.runtime.cuda import compile as triton_compiler
from ferrite.runtime.cuda.workers import WORKERS
from ferrite.runtime.host_code import Unit, functions_of, object_codes

MAX_INT32 = (1 << 31) - 1
POINTER = ("u64", "b64")
NUMBERS = {"i32": ("u32", "b32", "s32"), "i64": ("u64", "b64", "s64")}
TYPES = {torch.bool: "i1", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}

KNOWN = CodeMemory(max_bytes=16 << 20)


@dataclass(frozen=True)
class CudaUnit:
    """A kernel to compile: what it goes by, the request to the compiler, and what is known of its launch."""

    name: str
    request: dict[str, Any] = field(hash=False)
    facts: dict[str, Any] = field(hash=False)

    @property
    def text(self) -> str:
        """All that the code depends on."""
        return json.dumps(self.request, sort_keys=True)


@dataclass(frozen=True)
class CudaKernel:
    """Code for one kind of GPU. Its arguments are so many `pointers`, so many `sizes`, the memory for failures where it
    `checks`, and `scratch` pointers that Triton adds, and that nothing uses. `programs`: how many instances run; None
    where the host program says that. `promises`: constants of the source, each of which is about a word that the host
    program computes, and has to be 0 where that is no multiple of 16. `rows`: of a grouped kernel, whose one pointer is
    a table, what stands there behind the addresses of each problem. `addresses`: how many there are in it. `memory`:
    the first scratch pointer is memory for descriptors, behind all other arguments of a call. `request`: how to compile
    the same for other pointers."""

    entry: str
    threads: int
    shared: int
    pointers: int
    sizes: int
    checks: bool
    promises: Sequence[str]
    scratch: int
    programs: int | None
    rows: Sequence[Sequence[int]]
    addresses: int
    memory: bool
    request: dict[str, Any] = field(repr=False, hash=False)
    code: bytes = field(repr=False)

    @property
    def promised(self) -> list[int]:
        """Places of arguments that must be multiples of 16: pointers, sizes, and words behind them."""
        given = [place for place in self.request["aligned"] if place < self.pointers + self.sizes]
        return given + [place for place, name in self.words.items() if self.request["constants"][name]]

    @property
    def words(self) -> dict[int, str]:
        """Constants that are promises, by the places of what they are about."""
        return dict(enumerate(self.promises, self.pointers + self.sizes + (self.programs is None)))

    def without(self, places: Collection[int]) -> CudaKernel:
        """The same with no promise about some arguments. Where one is a pointer, or in a table, with no promise."""
        sizes = not self.rows and all(place >= self.pointers for place in places)
        kept = [place for place in self.request["aligned"] if sizes and place not in places]
        request = {**self.request, "aligned": kept}
        broken = {name: 0 for place, name in self.words.items() if place in places}
        request["constants"] = {**request["constants"], **broken}
        if self.rows:
            request["constants"] = {ALIGNMENT: 1}
        elif self.memory and not sizes:  # a descriptor is there for memory that begins where it should
            request["constants"] = {**request["constants"], DESCRIPTORS: 0}
        made = code_of([CudaUnit(name_of(request), request, facts_of(self))])
        return kernel_from(made[name_of(request)])


@dataclass(frozen=True)
class GpuKind:
    """The kind of GPU that code is made for: its compute capability, 90 for 9.0, and bytes that a program can share."""

    capability: int
    shared: int


def unit_of(kernel: Kernel, processor: GpuKind) -> CudaUnit:
    """Raises NotGenerated where there is no source."""
    kernel = replace(kernel, origins=())  # where it comes from does not matter
    digest = hashlib.blake2b(str(kernel).encode(), digest_size=12).hexdigest()
    made = written(kernel, f"kernel_{digest}")
    launch = made.launch
    types = [f"*{type_name(pointer.dtype)}" for pointer in launch.pointers]
    types += ["i32" if size.high is not None and size.high <= MAX_INT32 else "i64" for size in launch.sizes]
    types += ["*i64"] if launch.checks else []
    constants = launch.constants(None)
    types += ["constexpr"] * len(constants)
    if launch.rows:
        types, constants = ["*i64", "constexpr"], {ALIGNMENT: triton_compiler.ALIGNED_BYTES}
    options = {**OPTIONS, "num_warps": launch.warps(None)}
    if launch.checks:  # Triton's assertions are kept, those about overflow are not
        options |= {"debug": True, "sanitize_overflow": False}
    request = {
        "source": made.source,
        "name": launch.name,
        "types": types,
        "constants": constants,
        "aligned": [place for place, each in enumerate(types) if each.startswith("*")],
        "options": options,
        **asdict(processor),
    }
    if launch.descriptors:
        request["memory"] = launch.descriptors * DESCRIPTOR_BYTES
    if not launch.rows:
        even = even_strides(kernel)
        places = [len(launch.pointers) + place for place, size in enumerate(launch.sizes) if size in even]
        request["aligned"] = sorted([*request["aligned"], *places])
    return CudaUnit(name_of(request), request, launch_facts(fixed_launch(kernel)))


def even_strides(kernel: Kernel) -> set[Symbol]:
    """Sizes that rows lie apart by, and that are likely to be multiples of 16."""
    return {size for size in row_strides(kernel) if size.likely and size.likely % triton_compiler.ALIGNED_BYTES == 0}


def launch_facts(launch: LaunchConfig) -> dict[str, Any]:
    return {
        "pointers": 1 if launch.rows else len(launch.pointers),
        "sizes": len(launch.sizes),
        "checks": bool(launch.checks),
        "promises": [name for name, _word in launch.promises],
        "programs": launch.programs.value if isinstance(launch.programs, Number) else None,
        "rows": launch.rows,
        "addresses": len(launch.pointers) if launch.rows else 0,
        "memory": launch.descriptors > 0,
    }


def facts_of(kernel: CudaKernel) -> dict[str, Any]:
    names = ("pointers", "sizes", "checks", "promises", "programs", "rows", "addresses", "memory")
    return {name: getattr(kernel, name) for name in names}


def name_of(request: dict[str, Any]) -> str:
    return "cuda_" + hashlib.blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=12).hexdigest()


def type_name(dtype: torch.dtype) -> str:
    if dtype.is_floating_point and dtype.itemsize == 1:
        return "u8"  # their bits
    return TYPES.get(dtype) or short(dtype)


# --- code -------------------------------------------------------------------------------------------------------------


def build(
    kernels: Sequence[Kernel], processor: GpuKind, store: KernelStore | None = None
) -> tuple[list[str], dict[str, bytes]]:
    """The name of each kernel, and its code, with what a launch needs, by name."""
    units, refused = [], dict[int, Refusal]()
    for place, kernel in enumerate(kernels):
        try:
            units.append(unit_of(kernel, processor))
        except NotGenerated as error:
            refused[place] = error.refusal
    if refused:
        raise RefusedKernels(refused)
    lengths = sorted({length for kernel in kernels for length in table_lengths(kernel)})
    writers = {writer_name(length): writer_of(length, processor) for length in lengths}
    code = code_of([*units, *writers.values()], store)
    tables = {name: code.pop(unit.name) for name, unit in writers.items()}
    return [unit.name for unit in units], {**code, **tables, **launcher_code(store)}


def source_of(kernel: Kernel, processor: GpuKind) -> str:
    """The text that Triton is given."""
    return str(unit_of(kernel, processor).request["source"])


def built_from(kernel: Kernel, processor: GpuKind, text: str) -> tuple[str, bytes]:
    """Another text for a kernel, edited by hand: the name that its code goes by, and the code."""
    unit = unit_of(kernel, processor)
    request = {**unit.request, "source": text}
    name = name_of(request)
    return name, code_of([CudaUnit(name, request, unit.facts)])[name]


def launcher_code(store: KernelStore | None) -> dict[str, bytes]:
    """The native function that launches runs, for the processor of this process; none where there is no LLVM."""
    if find_spec("llvmlite") is None:
        return {}
    return object_codes([Unit(launches.NAME, launches.ENTRY, lambda target: launches.ENTRY)], store)


def launcher_of(code: Mapping[str, bytes]) -> Loaded | None:
    """The same, ready to be called."""
    return functions_of({launches.NAME: code[launches.NAME]})[launches.NAME] if launches.NAME in code else None


def code_of(units: Sequence[CudaUnit], store: KernelStore | None = None) -> dict[str, bytes]:
    """By name: from this process, else from the store, else from Triton."""

    def compiled(new: Sequence[CudaUnit]) -> list[bytes]:
        made = answers([unit.request for unit in new])
        refused = {
            unit.name: Refusal(answer["refusal"]) for unit, answer in zip(new, made, strict=True) if "refusal" in answer
        }
        if refused:
            good = [(unit, answer) for unit, answer in zip(new, made, strict=True) if unit.name not in refused]
            KNOWN.remember({unit.name: packed(unit, answer) for unit, answer in good})
            places = {place: refused[unit.name] for place, unit in enumerate(units) if unit.name in refused}
            raise RefusedKernels(places)
        return [packed(unit, answer) for unit, answer in zip(new, made, strict=True)]

    return KNOWN.code_of(units, store, reason_to_refuse, compiled)


def answers(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return WORKERS.answers(requests, triton_compiler.answered)


def packed(unit: CudaUnit, answer: dict[str, Any]) -> bytes:
    if "error" in answer:
        raise RuntimeError(f"Triton cannot compile {unit.request['name']}: {answer['error']}")
    facts = {key: answer[key] for key in ("entry", "threads", "shared")}
    facts["scratch"] = scratch_parameters(unit.request["types"], answer["parameters"])
    line = json.dumps({**unit.facts, **facts, "request": unit.request})
    return line.encode() + b"\n" + base64.b64decode(answer["code"])


def scratch_parameters(types: Sequence[str], found: Sequence[str]) -> int:
    """How many pointers Triton has put behind the arguments of the source. What looks different is not launched."""
    wanted = [POINTER if each.startswith("*") else NUMBERS[each] for each in types if each != "constexpr"]
    same = len(found) >= len(wanted) and all(each in kinds for each, kinds in zip(found, wanted, strict=False))
    extra = found[len(wanted) :]
    if not same or any(each not in POINTER for each in extra):
        raise RuntimeError(f"this version of Triton passes {list(types)} as {list(found)}")
    return len(extra)


def kernel_from(code: bytes) -> CudaKernel:
    line, _, binary = code.partition(b"\n")
    facts = json.loads(line)
    return CudaKernel(**facts, code=binary)


def reason_to_refuse(name: str, code: bytes) -> Refusal | None:
    """Why code from elsewhere cannot be loaded; None where it can."""
    try:
        kernel = kernel_from(code)
    except (ValueError, TypeError) as problem:
        return Refusal(f"{type(problem).__name__}: {problem}")
    return None if kernel.code.startswith(b"\x7fELF") else Refusal("it holds no machine code")


# --- tables of grouped kernels ----------------------------------------------------------------------------------------


def writer_name(words: int) -> str:
    """What the code of a kernel goes by that writes so many words of a table."""
    return f"write_{words}_words"


def writer_of(words: int, processor: GpuKind) -> CudaUnit:
    request = {
        "source": writer_source(writer_name(words), words),
        "name": writer_name(words),
        "types": ["*i64", *["i64"] * words],
        "constants": {},
        "aligned": [0],
        "options": {**OPTIONS, "num_warps": 1},
        **asdict(processor),
    }
    facts = {"pointers": 1, "sizes": words, "checks": False, "promises": (), "programs": 1}
    facts |= {"rows": (), "addresses": 0, "memory": False}
    return CudaUnit(name_of(request), request, facts)


def writers_in(code: Mapping[str, bytes]) -> dict[int, CudaKernel]:
    """The kernels that write tables, by how many words."""
    found = [kernel_from(code[name]) for name in code if name.startswith("write_")]
    return {kernel.sizes: kernel for kernel in found}
