"""What the host does around a GPU's work, measured without a GPU.

    python -m bench.gpu_host [--rounds 200] [--only PATTERN ..]

Programs are compiled for a GPU, run on memory of the CPU, and launch nothing: functions stand for the driver's that
return at once. So the time of a call is that of the host: guards, wrappers, allocations, addresses, arguments, and
torch's own calls on tiny tensors. `inside` is the part in ferrite's own function. Times are the least of many turns, in
microseconds; compare those of one run with each other.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import ferrite.backend
from ferrite.codegen import CudaSpelling
from ferrite.codegen.llvm import LaunchStep
from ferrite.codegen.triton import unsupported_operation
from ferrite.machines import GpuMachine
from ferrite.runtime import load_host
from ferrite.runtime.cuda import CudaKernel, Function, GpuKind
from ferrite.runtime.cuda.driver import Graph
from ferrite.schedule.gpu import GpuScheduling
from ferrite.targets.cuda import CudaTarget

CONTEXT = 77
# In the order of `ferrite.codegen.llvm.launches.DRIVER_FUNCTIONS`.
DRIVER = f"""
define i32 @current(ptr %place) {{
  store i64 {CONTEXT}, ptr %place, align 8
  ret i32 0
}}
define i32 @captures(ptr %stream, ptr %place) {{
  store i32 0, ptr %place, align 4
  ret i32 0
}}
define i32 @good() {{
  ret i32 0
}}
"""


class Spelling(CudaSpelling):
    """Memory of the CPU, by the function that is nearest to the one for a GPU."""

    def run_arguments(self, device: torch.device) -> tuple[str, ...]:
        return ("threads()",)  # as long as it takes to ask for a stream

    def allocation(self, sizes: str, strides: str, dtype: torch.dtype, device: torch.device, count: int) -> str:
        return f"empty_on_cpu({sizes}, {strides}, {dtype})"

    def arena(self, size: int, device: torch.device) -> str:
        return self.allocation(f"({size},)", "(1,)", torch.uint8, device, size)


class IdleDriver:
    """Launches nothing."""

    def __init__(self) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine()
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(DRIVER), machine)
        self.engine.finalize_object()
        names = ("current", "good", "good", "captures", "good", "good", "good")
        self.natives = [self.engine.get_function_address(name) for name in names]
        self.report = (ctypes.c_int64 * 4)()

    def load(self, kernel: CudaKernel, device: int) -> Function:
        return Function(1000)

    def launch(self, *given: Any) -> None:
        pass

    def on(self, device: int) -> Any:
        return contextlib.nullcontext()

    def memory(self, size: int, device: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def failure(self, device: int) -> int:
        return ctypes.addressof(self.report)

    def context(self, device: int) -> int:
        return CONTEXT

    def native_functions(self) -> Sequence[int]:
        return self.natives

    def graph(self, steps: Sequence[LaunchStep], device: int) -> Graph:
        return Graph(9000, range(1, 1 + len(steps)))


class IdleTarget(CudaTarget):
    spelling = Spelling()
    processor = GpuKind(90, 227 << 10)
    scheduling = GpuScheduling(GpuMachine(), unsupported_operation, device="cpu")

    def __init__(self) -> None:
        self.driver = IdleDriver()

    def identity(self) -> str:
        return "an idle GPU"


# --- programs ---------------------------------------------------------------------------------------------------------


def many(count: int) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    given = [torch.randn(64 + 16 * place) for place in range(count)]
    return lambda *tensors: [tensor.cos() for tensor in tensors], given


class Layer(torch.nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.norm, self.after = torch.nn.LayerNorm(size), torch.nn.LayerNorm(size)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(size, size) for _ in range(4))
        self.up, self.down = torch.nn.Linear(size, 2 * size), torch.nn.Linear(2 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


def transformer(layers: int = 12) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    return torch.nn.Sequential(*(Layer() for _ in range(layers))).eval(), [torch.randn(2, 4, 16)]


PROGRAMS: dict[str, Callable[[], tuple[Callable[..., Any], list[torch.Tensor]]]] = {
    "1 kernel": lambda: many(1),
    "10 kernels": lambda: many(10),
    "100 kernels": lambda: many(100),
    "transformer of 12 layers": transformer,
}


# --- measuring --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def boxes() -> Iterator[list[Any]]:
    """Functions that ferrite gives to AOTAutograd while this lasts, and what each was called with last."""
    found: list[Any] = []

    def load(*given: Any) -> Any:
        made = load_host(*given)

        def called(args: list[Any]) -> Any:
            called.last = list(args)  # type: ignore[attr-defined]
            return made(args)

        called._boxed_call, called.made = True, made  # type: ignore[attr-defined]
        found.append((called, made, given[0]))
        return called

    with mock.patch.object(ferrite.backend, "load_host", load):
        yield found


def microseconds(function: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - start) / count * 1e6


def measured(name: str, rounds: int, show: bool) -> dict[str, float]:
    function, given = PROGRAMS[name]()
    torch._dynamo.reset()
    target = IdleTarget()
    with torch.no_grad(), boxes() as found:
        with mock.patch.object(ferrite.backend, "targets_for", return_value={"cpu": target}):
            run = torch.compile(function, backend="ferrite", options={"strict": True}, fullgraph=True)
            for _ in range(3):
                run(*given)
        called, made, source = found[-1]
        if show:
            print(source.text)
        inputs = called.last
        ways = {
            "eager": lambda: function(*given),
            "call": lambda: run(*given),
            "inside": lambda: made(list(inputs)),
        }
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, each in ways.items():
                taken[way].append(microseconds(each, 10))
    return {way: min(numbers) for way, numbers in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--show", action="store_true", help="print host programs")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name in PROGRAMS:
        if not chosen.only or any(pattern in name for pattern in chosen.only):
            found = measured(name, chosen.rounds, chosen.show)
            print(f"{name:28}", *(f"{way} {number:8.1f}" for way, number in found.items()), flush=True)


if __name__ == "__main__":
    main()
