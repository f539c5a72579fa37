"""Plans for a GPU that is not there: functions to kernels, and kernels run one after the other on memory of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from ferrite.codegen.triton import unsupported_operation
from ferrite.codegen.triton.run import run
from ferrite.ir.kernel.interpret import run_kernel
from ferrite.ir.kernel.nodes import Kernel, Loop, walk
from ferrite.ir.program.interpret import Interpreter
from ferrite.lower.graph import LoweredProgram, lower_module
from ferrite.machines import GpuMachine
from ferrite.schedule.gpu import GpuScheduling
from ferrite.schedule.plan import make_plan
from ferrite.schedule.steps import Plan, Run
from tests.lower.lowered import traced

MACHINE = GpuMachine()
# So small that a few elements need several blocks, loops and pieces.
TINY = GpuMachine(
    multiprocessors=1,
    flat_block=16,
    rows_block=16,
    kept_elements=16,
    one_program_elements=64,
    step_elements=16,
    column_block=16,
    row_step_elements=16,
    again_step_elements=16,
    line_bytes=16,
    sector_bytes=16,
    thread_elements=1,
    row_elements=1,
    window_elements=1,
    column_elements=1,
    few_column_elements=1,
    held_column_elements=1,
    sort_thread_elements=1,
    reduced_elements=1,
    random_elements=1,
    kept_column_elements=1,
    tile_bytes=16,
    tile_elements=1,
)
# Few programs, so that what small tensors have in columns is kept from row to row.
FEW_PROGRAMS = GpuMachine(
    multiprocessors=2,
    row_programs=4,
    shared_elements=64,
    min_kept_columns=1,
    kept_elements=256,
    one_program_elements=64,
    one_program_points=64,
    max_held_elements=64,
)


def scheduling(machine: GpuMachine = MACHINE) -> GpuScheduling:
    """For operations on the CPU, where tests have their memory."""
    return GpuScheduling(machine, unsupported_operation, device="cpu")


def lowered(fn: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> LoweredProgram:
    return lower_module(traced(fn, *inputs, dynamic=dynamic))


def plan_of(
    fn: Callable[..., Any], *inputs: torch.Tensor, machine: GpuMachine = MACHINE, dynamic: bool = False
) -> Plan:
    """The plan of a function of these inputs, every step of it verified."""
    return make_plan(lowered(fn, *inputs, dynamic=dynamic).program, {"cpu": scheduling(machine)}, verify=True)


def kernels_of(fn: Callable[..., Any], *inputs: torch.Tensor, machine: GpuMachine = MACHINE) -> list[Kernel]:
    plan = plan_of(fn, *inputs, machine=machine)
    assert not plan.not_compiled, plan.not_compiled
    return [launch.kernel for launch in plan.launches]


def loops(kernel: Kernel, kind: str) -> list[Loop]:
    return [item for item in walk(kernel.body) if isinstance(item, Loop) and item.kind == kind]


def run_plan(plan: Plan, inputs: Sequence[Any], objects: Any, triton: bool = True) -> list[Any]:
    """What a plan gives: launches in Triton's interpreter, or as kernels; what stands between in the program's."""
    program = Interpreter(plan.program, objects)
    program.take(list(inputs))
    for step in plan.steps:
        if not isinstance(step, Run):
            program.step(step)
            continue
        for launch in step.launches:
            pairs = zip(launch.arguments, launch.kernel.arguments, strict=True)
            memory = [flat(program.tensor(name)).view(pointer.dtype) for name, pointer in pairs]
            sizes = [program.number(size) for size in launch.sizes]
            if triton:
                with numpy.errstate(all="ignore"):  # lanes that do not count divide by zero
                    run(launch.kernel, memory, sizes)
            else:
                run_kernel(launch.kernel, memory, sizes)
    return [program.output(item) for item in plan.program.outputs]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory behind a tensor, from its first element on."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return tensor.as_strided((count,), (1,), tensor.storage_offset())


def assert_as_eager(
    fn: Callable[..., Any],
    *inputs: torch.Tensor,
    machine: GpuMachine = MACHINE,
    dynamic: bool = False,
    triton: bool = True,
    calls: bool = False,
    **tolerance: float,
) -> Plan:
    """A function through the scheduler and Triton's interpreter. `calls`: some operations may be no kernels."""
    made = lowered(fn, *inputs, dynamic=dynamic)
    plan = make_plan(made.program, {"cpu": scheduling(machine)}, verify=True)
    assert calls or not plan.not_compiled, plan.not_compiled
    results = run_plan(plan, [each.clone() for each in inputs], made.objects, triton)
    expected = pytree.tree_leaves(fn(*(each.clone() for each in inputs)))
    tolerance = tolerance or {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(results, expected, equal_nan=True, check_stride=False, **tolerance)
    return plan
