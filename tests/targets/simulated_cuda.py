"""A GPU that is not there: the target for CUDA as it is, with a driver that runs kernels in Triton's interpreter, on
memory of the CPU. Everything else is what runs on a GPU: machine code is made, though nothing runs it."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from ferrite.codegen import CudaSpelling, RecordedPart
from ferrite.codegen.llvm import LaunchStep
from ferrite.codegen.triton import unsupported_operation
from ferrite.codegen.triton.run import _mode, loaded
from ferrite.machines import GpuMachine
from ferrite.runtime.cuda import CudaKernel, Function, GpuKind, Recorder
from ferrite.runtime.cuda.driver import Graph, NodeParameters
from ferrite.runtime.cuda.recorded import dense_part
from ferrite.schedule.gpu import GpuScheduling
from ferrite.targets.cuda import CudaTarget

DTYPES = {
    "i1": torch.bool,
    "u8": torch.uint8,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    **{f"i{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
}
H200, A100 = GpuKind(90, 227 << 10), GpuKind(80, 163 << 10)


class Spelling(CudaSpelling):
    """Memory of the CPU; the stream has a number of its own."""

    def run_arguments(self, device: torch.device) -> tuple[str, ...]:
        return (str(SimulatedDriver.STREAM + (device.index or 0)),)

    def allocation(self, sizes: str, strides: str, dtype: torch.dtype, device: torch.device, count: int) -> str:
        return f"empty_strided({sizes}, {strides}, dtype={dtype})"

    def arena(self, size: int, device: torch.device) -> str:
        return self.allocation(f"({size},)", "(1,)", torch.uint8, device, size)


class Address:
    """What the interpreter takes for a tensor: it looks at memory by address."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


@dataclass
class Launched:
    entry: str
    programs: int
    threads: int
    words: list[int]
    aligned: bool
    way: str


class SimulatedDriver:
    """Runs what it is asked to launch at once, in the context and on the stream of its GPU alone. `natives`: whether it
    offers functions to the native launcher. `current`: the context that is, which belongs to whoever calls."""

    CONTEXT = 77  # of the first GPU; that of the second is one more
    STREAM = 7  # and so are their streams

    def __init__(self, natives: bool = True) -> None:
        self.functions: dict[int, CudaKernel] = {}
        self.devices: dict[int, int] = {}  # of functions
        self.launched: list[Launched] = []
        self.nodes: dict[int, tuple[int, NodeParameters, list[int]] | None] = {}
        self.graphs: dict[int, dict[int, tuple[int, NodeParameters, list[int]] | None]] = {}
        self.report = (ctypes.c_int64 * 4)()
        self.natives = natives
        self.current = self.CONTEXT
        self.pushed: list[int] = []  # contexts that are current again after the one that is
        self.capturing = 0
        self.renewed: list[int] = []
        self.separate: list[int] = []  # sizes of what was to lie in an arena
        self.refuses_to_renew = False
        self.free: list[bool] = []  # launches of the last graph that wait for nothing
        self.callbacks = self.driver_functions()

    # --- as Python asks -----------------------------------------------------------------------------------------------

    def load(self, kernel: CudaKernel, device: int) -> Function:
        function = Function(1000 + len(self.functions))
        self.functions[function.address], self.devices[function.address] = kernel, device
        return function

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.current = self.current, self.context(device)
        try:
            yield
        finally:
            self.current = before

    def context(self, device: int) -> int:
        return self.CONTEXT + device

    def memory(self, size: int, device: int) -> torch.Tensor:
        self.separate.append(size)
        return torch.empty(size, dtype=torch.uint8)

    def failure(self, device: int) -> int:
        return ctypes.addressof(self.report)

    def launch(
        self, function: Function, programs: int, threads: int, shared: int, stream: int, words: Sequence[int]
    ) -> None:
        self.run(function.address, programs, threads, stream, list(words), "python")

    def native_functions(self) -> Sequence[int]:
        return [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self.callbacks] if self.natives else []

    def graph(self, steps: Sequence[LaunchStep], device: int) -> Graph:
        first = 100_000 * (1 + len(self.graphs))
        self.free = [step.is_free for step in steps]
        self.nodes = dict.fromkeys(range(first, first + len(steps)))
        self.graphs[9000 + len(self.graphs)] = self.nodes
        return Graph(9000 + len(self.graphs) - 1, list(self.nodes))

    # --- as native code does ------------------------------------------------------------------------------------------

    def driver_functions(self) -> list[Any]:
        """Functions with the driver's own signatures, in the order of `launches.DRIVER_FUNCTIONS`."""
        pointer, number, words = ctypes.c_void_p, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)

        def get_current(place: Any) -> int:
            place[0] = self.current
            return 0

        def push(context: int) -> int:
            self.pushed.append(self.current)
            self.current = context
            return 0

        def pop(place: Any) -> int:
            place[0], self.current = self.current, self.pushed.pop()
            return 0

        def is_capturing(stream: int, place: Any) -> int:
            place[0] = self.capturing
            return 0

        def launch(*given: Any) -> int:
            function, programs, _y, _z, threads, _ty, _tz, _shared, stream, places, _extra = given
            self.run(function, programs, threads, stream, self.read(function, places), "native")
            return 0

        def renew(graph: int, node: int, given: Any) -> int:
            made = NodeParameters.from_buffer_copy(given[0])
            assert node in self.graphs[graph]
            self.renewed.append(node)
            if self.refuses_to_renew and len(self.renewed) % 2 == 0:
                return 1
            assert (made.grid_y, made.grid_z, made.block_y, made.block_z, made.extra) == (1, 1, 1, 1, None)
            places = ctypes.cast(made.parameters, words)
            self.graphs[graph][node] = made.function, made, self.read(made.function, places)
            return 0

        def launch_graph(graph: int, stream: int) -> int:
            for node in self.graphs[graph].values():
                assert node is not None
                function, made, read = node
                self.run(function, made.grid_x, made.block_x, stream, read, "graph")
            return 0

        kinds = (
            ctypes.CFUNCTYPE(ctypes.c_int, words),
            ctypes.CFUNCTYPE(ctypes.c_int, pointer),
            ctypes.CFUNCTYPE(ctypes.c_int, words),
            ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.POINTER(ctypes.c_int)),
            ctypes.CFUNCTYPE(ctypes.c_int, pointer, *(7 * (number,)), pointer, words, pointer),
            ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, ctypes.POINTER(NodeParameters)),
            ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer),
        )
        made = (get_current, push, pop, is_capturing, launch, renew, launch_graph)
        return [kind(function) for kind, function in zip(kinds, made, strict=True)]

    def read(self, function: int, places: Any) -> list[int]:
        """Parameters as the driver reads them: as many bytes as each has."""
        kernel = self.functions[function]
        types = [each for each in kernel.request["types"] if each != "constexpr"]
        widths = [ctypes.c_int32 if each == "i32" else ctypes.c_int64 for each in types]
        widths += [ctypes.c_int64] * kernel.scratch
        return [width.from_address(places[place]).value for place, width in enumerate(widths)]

    # --- both ---------------------------------------------------------------------------------------------------------

    def run(self, address: int, programs: int, threads: int, stream: int | None, words: list[int], way: str) -> None:
        device = self.devices[address]
        assert stream == self.STREAM + device
        assert self.current == self.context(device)
        kernel = self.functions[address]
        request = kernel.request
        self.launched.append(Launched(kernel.entry, programs, threads, words, bool(request["aligned"]), way))
        assert programs > 0
        assert threads == kernel.threads
        types = [each for each in request["types"] if each != "constexpr"]
        assert len(words) == len(types) + kernel.scratch
        scratch = words[len(types) :]
        if kernel.memory:  # for descriptors: at a multiple of 128 from where the arena begins, here a multiple of 64
            assert scratch[0] > 0
            assert scratch.pop(0) % 64 == 0
        assert not any(scratch)
        assert all(words[place] % 16 == 0 for place in request["aligned"])
        arguments = [
            Address(word, DTYPES[each[1:]]) if each.startswith("*") else word
            for word, each in zip(words, types, strict=False)
        ]
        function = loaded(request["source"], request["name"], True)
        with _mode(True), numpy.errstate(all="ignore"), addresses_are_tensors():
            function[(programs,)](*arguments, **request["constants"])
        assert not self.report[0], "an index points outside"


@contextlib.contextmanager
def addresses_are_tensors() -> Iterator[None]:
    """Memory is where it is: the interpreter has no device to copy it from."""
    from triton.runtime.interpreter import GridExecutor

    kept = GridExecutor._init_args_hst, GridExecutor._restore_args_dev
    GridExecutor._init_args_hst = lambda self, arguments, named: (arguments, named)
    GridExecutor._restore_args_dev = lambda self, *given: None
    try:
        yield
    finally:
        GridExecutor._init_args_hst, GridExecutor._restore_args_dev = kept


class Memory:
    """Where a tensor is, without holding it: a GPU's graphs know addresses."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.sizes, self.strides = tensor.dtype, tuple(tensor.shape), tensor.stride()
        reach = 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        self.address, self.bytes = tensor.data_ptr(), reach * tensor.element_size() if tensor.numel() else 0

    def tensor(self) -> torch.Tensor:
        if not self.bytes:
            return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype)
        memory = (ctypes.c_char * self.bytes).from_address(self.address)
        return torch.frombuffer(memory, dtype=self.dtype).as_strided(self.sizes, self.strides)


class SimulatedGraphs:
    """Records by running a part, and taking back what that did; replays by running it again on the same memory.

    As if each recording had its results in memory that all those before it in the same pool had freed, and write to.
    """

    def __init__(self) -> None:
        self.capturing = False
        self.ordered = 0
        self.recorded = 0
        self.replayed = 0
        self.fails = ""
        self.most = 1 << 40
        self.can_wait, self.waited = True, 0
        self.pool: list[list[weakref.ref[torch.Tensor]]] = []  # results of those that share one

    def is_recording(self) -> bool:
        return self.capturing

    def in_order(self) -> None:
        self.ordered += 1

    def can_wait_for_all(self) -> bool:
        return self.can_wait

    def after_all(self) -> bool:
        self.waited += self.can_wait
        return self.can_wait

    def most_kept(self) -> int:
        return self.most

    def record(self, part: Any, given: list[Any], keeps: bool) -> tuple[Sequence[Any], Any]:
        if self.fails:
            raise RuntimeError(self.fails)
        self.recorded += 1
        memory = [Memory(x) if isinstance(x, torch.Tensor) else x for x in given]
        before = [dense_part(x).clone() if isinstance(x, torch.Tensor) else x for x in given]
        state = torch.get_rng_state()
        results = list(part(list(given)))
        owners = {id(x): x for x in results if isinstance(x, torch.Tensor)}
        for new, old in zip(given, before, strict=True):
            if isinstance(new, torch.Tensor):
                dense_part(new).copy_(old)
        torch.set_rng_state(state)
        taken = {x.untyped_storage()._cdata for x in given if isinstance(x, torch.Tensor)}
        del given, before
        mine = [place for place, x in enumerate(results) if id(x) in owners]
        mine = [place for place in mine if results[place].untyped_storage()._cdata not in taken]
        own = {place: results[place] for place in mine}  # a graph knows addresses, and holds no tensor of others
        for result in own.values():
            result.fill_(7)  # nothing is computed yet
        number = len(self.pool)
        if not keeps:
            self.pool.append([weakref.ref(result) for result in own.values()])

        def replay() -> None:
            self.replayed += 1
            later = [] if keeps else self.pool[number + 1 :]
            for result in (reference() for references in later for reference in references):
                if result is not None:
                    result.fill_(7)
            made = part([x.tensor() if isinstance(x, Memory) else x for x in memory])
            for place, result in own.items():
                dense_part(result).copy_(dense_part(made[place], dense_part(result)))

        return results, replay


class SimulatedTarget(CudaTarget):
    spelling = Spelling()
    processor = H200
    scheduling = GpuScheduling(GpuMachine(), unsupported_operation, device="cpu")

    def __init__(self, natives: bool = True) -> None:
        self.driver = self.simulated = SimulatedDriver(natives)
        self.graphs = SimulatedGraphs()

    def recorder(self, part: RecordedPart) -> Recorder:
        return Recorder(part, lambda: self.graphs)

    def identity(self) -> str:
        return "a simulated GPU"
