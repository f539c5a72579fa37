"""Which targets compile a graph, by the types of their devices. Operators on any other device are calls."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping

import torch

from ferrite.errors import Refusal, layout, warn_user
from ferrite.options import Options
from ferrite.runtime.cuda import CudaError, libcuda
from ferrite.targets.cpu import CPU, INTERPRETER
from ferrite.targets.cuda import CUDA, CudaTarget, triton_version
from ferrite.targets.target import Target

OLDEST_CAPABILITY = (8, 0)
OLDEST_TRITON = (3, 6)  # that kernels were compiled with
Targets = Mapping[str, Target]


def targets_for(options: Options, devices: Collection[str] = ("cpu",)) -> Targets:
    """Those that a graph is compiled for, and looked up for, by the types of devices that it has values on. It may have
    been compiled elsewhere: loading needs no compiler."""
    if options.executor == "interpreter":
        return {"cpu": INTERPRETER}
    if options.executor != "native":
        return {}
    found: dict[str, Target] = {"cuda": CUDA} if "cuda" in devices and cuda_is_here() else {}
    return found if found and "cpu" not in devices else {"cpu": CPU, **found}


def attention_on(targets: Targets, options: Options) -> frozenset[str]:
    """The types of devices on which attention with functions of the user is a kernel of our own. On a processor not
    where every sum is to be rounded as torch's products round it."""
    is_strict = options.numerics == "strict"
    return frozenset(
        device
        for device, target in targets.items()
        if isinstance(target, CudaTarget) or (target is CPU and not is_strict)
    )


def buildable(targets: Targets) -> Targets:
    """Those whose compilers are here; on the devices of the others every operator is a call."""
    missing = {
        device
        for device, target in targets.items()
        if (target is CPU and not llvm_is_here()) or (target is CUDA and not triton_is_here())
    }
    return {device: target for device, target in targets.items() if device not in missing}


@functools.lru_cache
def cuda_is_here() -> bool:
    """Whether kernels can run on the GPUs of this process. Why they cannot is said once."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    refusal = reason_against_gpus()
    if refusal is not None:
        no_kernels(refusal.reason, "")
    return refusal is None


def reason_against_gpus() -> Refusal | None:
    """Why no kernels are made for the GPUs that torch sees; None where they are."""
    found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    text = ", ".join(f"{major}.{minor}" for major, minor in sorted(found))
    if len(found) > 1:
        return Refusal(f"GPUs of compute capability {text}: kernels are made for one kind at a time")
    if min(found) < OLDEST_CAPABILITY:
        oldest = ".".join(map(str, OLDEST_CAPABILITY))
        return Refusal(f"a compute capability of {text}: kernels need {oldest} or later")
    try:
        libcuda().version()
    except (OSError, CudaError) as problem:
        return Refusal(str(problem))
    return None


@functools.lru_cache
def triton_is_here() -> bool:
    try:
        import triton  # noqa: F401  # only here: a program of calls does not need it
    except (ImportError, OSError) as problem:
        no_kernels(f"{type(problem).__name__}: {problem}", "pip install triton")
        return False
    version = triton_version()
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TRITON:
        no_kernels(
            f"Triton {version} is older than {'.'.join(map(str, OLDEST_TRITON))}", "pip install --upgrade triton"
        )
        return False
    return True


def no_kernels(reason: str, remedy: str) -> None:
    facts = {
        "because": reason,
        "what happens": "operators on the GPU run one by one, as in eager",
        **({"to change that": remedy} if remedy else {}),
        "to say no more": 'torch.compile(..., options={"executor": "calls"})',
    }
    warn_user(layout("ferrite: nothing is compiled to kernels for the GPU", facts))


@functools.lru_cache
def llvm_is_here() -> bool:
    """Whether kernels can be compiled; where they cannot, that is said once."""
    try:
        import llvmlite.binding  # noqa: F401  # only here: a program of calls does not need it
    except (ImportError, OSError) as problem:
        facts = {
            "because": f"{type(problem).__name__}: {problem}",
            "what happens": "operators run one by one, as in eager",
            "to change that": "pip install llvmlite",
            "to say no more": 'torch.compile(..., options={"executor": "calls"})',
        }
        headline = "ferrite: without llvmlite nothing is compiled to kernels"
        warn_user(layout(headline, facts))
        return False
    return True
