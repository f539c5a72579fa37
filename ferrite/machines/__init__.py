"""All that is measured about machines: numbers that passes, lowering and scheduling decide by, and where each is from.

    any_machine     what is asked of every device: what calls and copies cost, and what memory does beside work
    cpu             processors: caches, vectors, threads, tiles; what calls of torch cost
    beside_torch    where kernels of our own are as fast as those of the libraries that torch has
    gpu             GPUs; gpu_attention: how attention is arranged there
    network         links between processes: what collectives cost

A number about a machine is a field here, with its measurement beside it, and nowhere else a constant. Passes and
lowering, which have a device and no target, ask `machine_of` (or `host_machine` and `gpu_machine`, where the device is
known to be one); a target has the same machine, with what it asked the hardware. A new one is added to `MACHINES`.
"""

from ferrite.machines.any_machine import AnyMachine
from ferrite.machines.beside_torch import (
    UNMEASURED,
    AttentionSizes,
    BesideArmComputeLibrary,
    BesideMkl,
    BesideTorch,
    DepthwiseWindow,
    MatrixProduct,
    beside_cublas,
)
from ferrite.machines.by_device import MACHINES, gpu_machine, host_machine, machine_of
from ferrite.machines.cpu import NEOVERSE_N1, XEON, Machine
from ferrite.machines.gpu import H200, MATRIX_UNIT_BYTES, MATRIX_UNIT_SIDE, GpuMachine, MatrixSpeeds
from ferrite.machines.gpu_attention import AttentionBlocks, AttentionMachine
from ferrite.machines.network import GroupShape, InvalidNetwork, Link, Network, fitted, network_of, parse_network

__all__ = [
    "H200",
    "MACHINES",
    "MATRIX_UNIT_BYTES",
    "MATRIX_UNIT_SIDE",
    "NEOVERSE_N1",
    "UNMEASURED",
    "XEON",
    "AnyMachine",
    "AttentionBlocks",
    "AttentionMachine",
    "AttentionSizes",
    "BesideArmComputeLibrary",
    "BesideMkl",
    "BesideTorch",
    "DepthwiseWindow",
    "GpuMachine",
    "GroupShape",
    "InvalidNetwork",
    "Link",
    "Machine",
    "MatrixProduct",
    "MatrixSpeeds",
    "Network",
    "beside_cublas",
    "fitted",
    "gpu_machine",
    "host_machine",
    "machine_of",
    "network_of",
    "parse_network",
]
