"""What only GPUs of NVIDIA need: code from Triton, loaded and launched through CUDA's driver."""

from ferrite.runtime.cuda.driver import CudaError, Driver, Function, LibCuda, libcuda
from ferrite.runtime.cuda.graphs import Recordable, graphs_of
from ferrite.runtime.cuda.kernels import (
    CudaKernel,
    GpuKind,
    build,
    built_from,
    kernel_from,
    launcher_of,
    source_of,
    writers_in,
)
from ferrite.runtime.cuda.recording import Recorder, Recordings
from ferrite.runtime.cuda.runs import cuda_run

__all__ = [
    "CudaError",
    "CudaKernel",
    "Driver",
    "Function",
    "GpuKind",
    "LibCuda",
    "Recordable",
    "Recorder",
    "Recordings",
    "build",
    "built_from",
    "cuda_run",
    "graphs_of",
    "kernel_from",
    "launcher_of",
    "libcuda",
    "source_of",
    "writers_in",
]
