"""What a device can do at most, measured in a moment: the roof of the roofline picture."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ferrite.debug import CompileRecord
from ferrite.reports.data import Limits
from ferrite.runtime import least_seconds

CPU_COPY_BYTES, CPU_MATRIX_SIDE = 64 << 20, 1024
GPU_COPY_BYTES, GPU_MATRIX_SIDE = 1 << 30, 8192


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
    count, side = (GPU_COPY_BYTES, GPU_MATRIX_SIDE) if device == "cuda" else (CPU_COPY_BYTES, CPU_MATRIX_SIDE)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.no_grad():
        source = torch.zeros(count, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        left = torch.ones(side, side, dtype=dtype, device=device)
        return Limits(
            device,
            2 * count / least_seconds(lambda: target.copy_(source)),
            2 * side**3 / least_seconds(lambda: left @ left),
        )
