"""CUDA's driver: loading machine code and launching it need neither a C compiler nor Triton."""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ferrite.capture import torch_runtime
from ferrite.codegen.llvm import LaunchStep, launches
from ferrite.codegen.triton import FAILURE_WORDS
from ferrite.runtime.cuda.kernels import CudaKernel

DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
UNASKED_SHARED_BYTES = 48 << 10  # shared memory that need not be asked for


class Function:
    """A kernel on one GPU. `address` is the driver's handle; the code is unloaded some time after this object."""

    def __init__(self, address: int) -> None:
        self.address = address


class Graph:
    """A CUDA graph that can be launched, by its handle, and the handles of its nodes."""

    def __init__(self, address: int, nodes: Sequence[int]) -> None:
        self.address, self.nodes = address, nodes


class Driver(Protocol):
    """What runs kernels need: a GPU's, or one that a test makes up."""

    def load(self, kernel: CudaKernel, device: int) -> Function:
        """Machine code, ready on a GPU."""

    def launch(
        self, function: Function, programs: int, threads: int, shared: int, stream: int, words: Sequence[int]
    ) -> None:
        """Start a kernel. Each parameter is the low bytes of a word of 64 bits."""

    def on(self, device: int) -> Any:
        """A context in which a GPU is the current one."""

    def memory(self, size: int, device: int) -> Any:
        """So many bytes of torch's, as a tensor."""

    def failure(self, device: int) -> int:
        """Where kernels of a GPU report an index that points outside."""

    def context(self, device: int) -> int:
        """The handle of the context in which torch uses a GPU."""

    def native_functions(self) -> Sequence[int]:
        """Addresses of what a native run calls; none where Python has to."""

    def graph(self, steps: Sequence[LaunchStep], device: int) -> Graph:
        """A CUDA graph of launches, one after the other, but for those that are free: what follows waits for all."""


class CudaError(RuntimeError):
    """The driver refused something."""


class LibCuda:
    """The driver of this machine."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        self.launch_kernel = self.library.cuLaunchKernel
        self.launch_kernel.argtypes = (
            ctypes.c_void_p,
            *(7 * (ctypes.c_uint,)),
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
        self.contexts: dict[int, int] = {}
        self.failures: dict[int, int] = {}
        self.events: dict[int, ctypes.c_void_p] = {}
        self.functions: weakref.WeakValueDictionary[tuple[bytes, int], Function] = weakref.WeakValueDictionary()
        self.unused: list[tuple[str, ctypes.c_void_p, int]] = []

    def check(self, result: int, what: str) -> None:
        if result:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(result, ctypes.byref(text))
            raise CudaError(f"CUDA error: {(text.value or b'unknown error').decode()} ({what})")

    def call(self, name: str, *arguments: Any) -> None:
        self.check(getattr(self.library, name)(*arguments), name)

    def version(self) -> int:
        found = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    # --- contexts -----------------------------------------------------------------------------------------------------

    def context(self, device: int) -> int:
        """The context that torch uses on a GPU."""
        if device not in self.contexts:
            torch.cuda.init()
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("cuDeviceGet", ctypes.byref(handle), device)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
            self.contexts[device] = context.value or 0
        return self.contexts[device]

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        wanted, current = self.context(device), ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value == wanted:
            yield
            return
        self.call("cuCtxPushCurrent_v2", ctypes.c_void_p(wanted))
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(current))

    def can_wait_for_all(self) -> bool:
        return hasattr(self.library, "cuCtxRecordEvent")  # since CUDA 12.5

    def wait_for_all(self, device: int, stream: int) -> None:
        """Let a stream wait for whatever a GPU was given so far, on any stream. The driver refuses while some stream is
        being captured."""
        with self.on(device):
            if device not in self.events:
                event = ctypes.c_void_p()
                self.call("cuEventCreate", ctypes.byref(event), DISABLE_TIMING)
                self.events[device] = event
            self.call("cuCtxRecordEvent", ctypes.c_void_p(self.context(device)), self.events[device])
            self.call("cuStreamWaitEvent", ctypes.c_void_p(stream), self.events[device], 0)

    def memory(self, size: int, device: int) -> Any:
        return torch_runtime.empty_on_cuda((size,), (1,), torch.uint8, device)

    # --- kernels ------------------------------------------------------------------------------------------------------

    def load(self, kernel: CudaKernel, device: int) -> Function:
        found = self.functions.get((kernel.code, device))
        if found is None:
            self.clear()
            found = self.functions[kernel.code, device] = self.loaded(kernel, device)
        return found

    def loaded(self, kernel: CudaKernel, device: int) -> Function:
        module, handle = ctypes.c_void_p(), ctypes.c_void_p()
        with self.on(device):
            self.call("cuModuleLoadData", ctypes.byref(module), kernel.code)
            self.call("cuModuleGetFunction", ctypes.byref(handle), module, kernel.entry.encode())
            if kernel.shared > UNASKED_SHARED_BYTES:
                self.call("cuFuncSetAttribute", handle, MAX_DYNAMIC_SHARED, kernel.shared)
        function = Function(handle.value or 0)
        self.later(function, "cuModuleUnload", module, device)
        return function

    def later(self, owner: Any, name: str, handle: ctypes.c_void_p, device: int) -> None:
        """Call a function on a handle when its owner is gone, and something else is loaded: not at once, since the
        owner may go while a stream is being captured, where such calls are forbidden."""
        weakref.finalize(owner, self.unused.append, (name, handle, device)).atexit = False

    def clear(self) -> None:
        while self.unused:
            name, handle, device = self.unused.pop()
            with self.on(device):
                self.call(name, handle)

    def launch(
        self, function: Function, programs: int, threads: int, shared: int, stream: int, words: Sequence[int]
    ) -> None:
        values = (ctypes.c_uint64 * len(words))(*words)
        first = ctypes.addressof(values)
        places = (ctypes.c_void_p * len(words))(*(first + 8 * place for place in range(len(words))))
        result = self.launch_kernel(function.address, programs, 1, 1, threads, 1, 1, shared, stream, places, None)
        self.check(result, "cuLaunchKernel")

    def failure(self, device: int) -> int:
        if device not in self.failures:
            made = ctypes.c_void_p()  # torch's memory may belong to a graph that is being captured
            with self.on(device):
                self.call("cuMemAlloc_v2", ctypes.byref(made), ctypes.c_size_t(8 * FAILURE_WORDS))
                self.call("cuMemsetD8_v2", made, ctypes.c_ubyte(0), ctypes.c_size_t(8 * FAILURE_WORDS))
            self.failures[device] = made.value or 0
        return self.failures[device]

    # --- runs ---------------------------------------------------------------------------------------------------------

    def native_functions(self) -> Sequence[int]:
        found = (getattr(self.library, name) for name in launches.DRIVER_FUNCTIONS)
        return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found]

    def graph(self, steps: Sequence[LaunchStep], device: int) -> Graph:
        """Each node is given its arguments before a launch: what they are now does not matter."""
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        nodes: list[ctypes.c_void_p] = []
        last: list[ctypes.c_void_p] = []  # that nothing waits for so far
        with self.on(device):
            self.call("cuGraphCreate", ctypes.byref(graph), 0)
            for step in steps:
                count = len(step.arguments)
                values = (ctypes.c_uint64 * count)()
                places = (ctypes.c_void_p * count)(*(ctypes.addressof(values) + 8 * place for place in range(count)))
                first = ctypes.cast(places, ctypes.c_void_p)
                given = NodeParameters(step.function, 1, 1, 1, step.threads, 1, 1, step.shared, first, None)
                awaited = [] if step.is_free else last
                node, before = ctypes.c_void_p(), (ctypes.c_void_p * max(len(awaited), 1))(*awaited)
                many = ctypes.c_size_t(len(awaited))
                self.call("cuGraphAddKernelNode", ctypes.byref(node), graph, before, many, ctypes.byref(given))
                nodes.append(node)
                last = [*last, node] if step.is_free else [node]
            self.call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_ulonglong(0))
        made = Graph(ready.value or 0, [node.value or 0 for node in nodes])
        for name, handle in (("cuGraphExecDestroy", ready), ("cuGraphDestroy", graph)):
            self.later(made, name, handle, device)
        return made


class NodeParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS, as its first version has it."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
    )


@functools.cache
def libcuda() -> LibCuda:
    return LibCuda()
