"""To which library torch gives matrix products on this machine, as far as that is a reason to give it others.

Builds of torch for Arm have two: OpenBLAS, and oneDNN on top of the Arm Compute Library. Those for x86 have MKL.
"""

from __future__ import annotations

from typing import Any

import torch


def has_arm_compute_library() -> bool:
    """Whether torch has it, on a processor without wide vectors."""
    mkldnn: Any = torch.backends.mkldnn
    ask = getattr(mkldnn, "is_acl_available", None)  # which older releases do not say
    built = mkldnn.is_available() and ask is not None and ask()
    return bool(built) and torch.backends.cpu.get_cpu_capability() == "DEFAULT"


def uses_arm_compute_library() -> bool:
    """Whether products of float32 go there, as far as torch's settings tell."""
    settings = bool(torch.backends.mkldnn.enabled) and not may_round_operands("cpu")
    return settings and has_arm_compute_library()


def uses_mkl_with_wide_vectors() -> bool:
    """Whether products of float32 go to MKL, on a processor with AVX-512."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and torch.backends.mkl.is_available() and not may_round_operands("cpu")


def in_use() -> str | None:
    """The name of the library that products of float32 go to, where that decides about kernels of our own
    (`ferrite.machines.beside_torch`)."""
    if uses_arm_compute_library():
        return "Arm Compute Library"
    return "MKL with AVX-512" if uses_mkl_with_wide_vectors() else None


def may_round_operands(device_type: str) -> bool:
    """Whether the user lets products of float32 round what they multiply to fewer bits, on such a device.

    The setting of one backend answers whichever way it was set. `torch.get_float32_matmul_precision` and `allow_tf32`
    raise an error where backends differ: after `torch.backends.cuda.matmul.fp32_precision = "tf32"`.
    """
    backends: Any = torch.backends
    backend = backends.cuda if device_type == "cuda" else backends.mkldnn
    return backend.matmul.fp32_precision in ("tf32", "bf16")
