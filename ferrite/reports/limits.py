"""What a device can do at most, measured in a moment: the roof of the roofline picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ferrite.debug import CompileRecord
from ferrite.reports.data import Limits

ROUNDS = 5
CPU_BYTES, CPU_SIDE = 64 << 20, 1024
GPU_BYTES, GPU_SIDE = 1 << 30, 8192


def limits_of(records: Sequence[CompileRecord]) -> tuple[Limits, ...]:
    """Of every device that has kernels or calls in the records."""
    devices = dict.fromkeys(
        device.partition(":")[0]
        for record in records
        for details in record.details
        if details.compiled is not None
        for device in ("cpu", *(device for device, _ in details.compiled.plan.kernels))
    )
    return tuple(measured(device) for device in devices if device == "cpu" or torch.cuda.is_available())


def measured(device: str) -> Limits:
    """Bytes that a copy reads and writes, and multiplications and additions of a matrix product: in float32 on a CPU,
    in bfloat16 on a GPU."""
    count, side = (GPU_BYTES, GPU_SIDE) if device == "cuda" else (CPU_BYTES, CPU_SIDE)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.no_grad():
        source = torch.zeros(count, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        left = torch.ones(side, side, dtype=dtype, device=device)
        return Limits(
            device,
            2 * count / fastest(lambda: target.copy_(source), device),
            2 * side**3 / fastest(lambda: left @ left, device),
        )


def fastest(work: Callable[[], object], device: str) -> float:
    def once() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(ROUNDS))
