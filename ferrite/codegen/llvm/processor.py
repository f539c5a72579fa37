"""The processors that LLVM makes code for, as data."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import platform
import sys
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Processor:
    """`lanes`: elements of 32 bits in a vector register. `half`: it converts 16-bit floats by itself.

    `saturates`: what a conversion from float to integer gives where the number does not fit: the nearest there is (0
    for NaN), or the least integer. `destroys_addend`: a multiply-add leaves its result where the addend was.
    `registers`: for vectors. `byte_dots`: the instruction that adds four products of bytes to each sum: of unsigned
    with signed ones (x86, "vnni"), of signed ones (Arm, "dotprod"), or none.
    """

    name: str
    triple: str
    cpu: str
    features: str
    lanes: int
    half: bool = True
    saturates: bool = False
    destroys_addend: bool = False
    registers: int = 16
    byte_dots: Literal["vnni", "dotprod"] | None = None


AVX2 = Processor("avx2", "x86_64-unknown-linux-gnu", "haswell", "", 8)
AVX512 = Processor("avx512", "x86_64-unknown-linux-gnu", "skylake-avx512", "-prefer-256-bit", 16, registers=32)
AVX512_VNNI = replace(AVX512, name="avx512-vnni", cpu="cascadelake", byte_dots="vnni")
PORTABLE_X86 = Processor("portable-x86", "x86_64-unknown-linux-gnu", "x86-64", "", 4, half=False)
PORTABLE_ARM = Processor(
    "portable-arm",
    "aarch64-unknown-linux-gnu",
    "generic",
    "+neon",
    4,
    saturates=True,
    destroys_addend=True,
    registers=32,
)
PROCESSORS = {each.name: each for each in (AVX2, AVX512, AVX512_VNNI, PORTABLE_X86, PORTABLE_ARM)}


@functools.cache
def host_processor() -> Processor:
    """The machine this process runs on."""
    import llvmlite.binding as llvm

    host = llvm.get_host_cpu_features()
    features = {name for name, there in host.items() if there}
    arm = platform.machine().lower() in ("aarch64", "arm64")
    if arm:
        lanes = 4  # scalable vectors are used as 128 bits
        host["disable-ldp"] = host["disable-stp"] = True  # pairs of loads have uneven steps: memory is fetched later
    elif {"avx512f", "avx512vl", "avx512dq", "avx512bw"} <= features:
        lanes = 16
        host["prefer-256-bit"] = False
    else:
        lanes = 8 if "avx2" in features else 4
    return Processor(
        "host",
        host_triple(),
        llvm.get_host_cpu_name(),
        host.flatten(),
        lanes,
        half=arm or "f16c" in features,
        saturates=arm,
        destroys_addend=arm,
        registers=32 if arm or lanes == 16 else 16,
        byte_dots=byte_dots(features, lanes),
    )


def byte_dots(features: set[str], lanes: int) -> Literal["vnni", "dotprod"] | None:
    """On x86 there are two extensions with the same instruction: one of vectors of 512 bits, one of shorter ones."""
    if "dotprod" in features:
        return "dotprod"
    has_long = lanes == 16 and "avx512vnni" in features
    return "vnni" if has_long or (lanes == 8 and "avxvnni" in features) else None


@functools.cache
def machine_text() -> str:
    """What `host_processor` follows from, for one version of LLVM; where the system says it, LLVM is not loaded."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            said = file.read(1 << 14)  # some processors of the machine, not hundreds
    except OSError:
        return repr(host_processor()) if importlib.util.find_spec("llvmlite") else "no LLVM"
    rows = [line.split(b":", 1) for line in said.splitlines()[:-1] if b":" in line]
    facts = sorted({(name.strip().lower(), value.strip()) for name, value in rows if name.strip().lower() in TELLING})
    words = [value.decode(errors="replace") for name, value in facts if name not in (b"flags", b"features")]
    return f"{' '.join(words)} {hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


# What /proc/cpuinfo says of a processor's kind, on x86 and Arm; the rest changes by the minute or from core to core.
TELLING = frozenset(
    name.encode()
    for name in ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "features", "cpu implementer",
                 "cpu architecture", "cpu variant", "cpu part", "cpu revision")
)  # fmt: skip


def host_triple() -> str:
    import llvmlite.binding as llvm

    triple: str = llvm.get_process_triple()
    return triple if sys.platform != "win32" else f"{triple}-elf"
