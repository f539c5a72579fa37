"""The machines that code is made for, as data."""

from __future__ import annotations

import functools
import platform
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """`lanes`: elements of 32 bits in a vector register. `half`: it converts 16-bit floats by itself.

    `saturates`: what a conversion from float to integer gives where the number does not fit: the nearest there is (0
    for NaN), or the least integer.
    """

    name: str
    triple: str
    cpu: str
    features: str
    lanes: int
    half: bool = True
    saturates: bool = False


AVX2 = Target("avx2", "x86_64-unknown-linux-gnu", "haswell", "", 8)
AVX512 = Target("avx512", "x86_64-unknown-linux-gnu", "skylake-avx512", "-prefer-256-bit", 16)
PORTABLE_X86 = Target("portable-x86", "x86_64-unknown-linux-gnu", "x86-64", "", 4, half=False)
PORTABLE_ARM = Target("portable-arm", "aarch64-unknown-linux-gnu", "generic", "+neon", 4, saturates=True)
TARGETS = {target.name: target for target in (AVX2, AVX512, PORTABLE_X86, PORTABLE_ARM)}


@functools.cache
def host_target() -> Target:
    """The machine this process runs on."""
    import llvmlite.binding as llvm

    features = {name for name, there in llvm.get_host_cpu_features().items() if there}
    arm = platform.machine().lower() in ("aarch64", "arm64")
    if arm:
        lanes = 4  # scalable vectors are used as 128 bits
    elif {"avx512f", "avx512vl", "avx512dq", "avx512bw"} <= features:
        lanes = 16
    else:
        lanes = 8 if "avx2" in features else 4
    return Target(
        "host",
        host_triple(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten() + (",-prefer-256-bit" if lanes == 16 else ""),
        lanes,
        half=arm or "f16c" in features,
        saturates=arm,
    )


def host_triple() -> str:
    import llvmlite.binding as llvm

    triple: str = llvm.get_process_triple()
    return triple if sys.platform != "win32" else f"{triple}-elf"


def portable_target() -> Target:
    """What every machine of this family runs."""
    arm = platform.machine().lower() in ("aarch64", "arm64")
    return PORTABLE_ARM if arm else PORTABLE_X86
