"""What a compiled program needs of torch while it runs, in the least time: calls, memory, streams, storages.

Part of the door to private APIs (`torch_api`). A host program makes hundreds of calls and tensors in microseconds each:
what is here goes past frames of Python, checks and dispatch that were answered when the program was compiled.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C._dynamo import guards as _guards
from torch.autograd import profiler as _profiler

from ferrite.capture.torch_api import BoxedCallable

# --- calls ------------------------------------------------------------------------------------------------------------

# Operators that Python's own binding finds at once: it reads arguments by a parser of torch's, where calls by schema go
# through a stack of boxed values, which takes as long as a small product. Same names, same order, nothing to choose.
BOUND_TO_PYTHON = frozenset(
    f"aten.{name}.default"
    for name in (
        "_int_mm",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "addmm",
        "baddbmm",
        "bmm",
        "convolution",
        "embedding",
        "mm",
        "native_dropout",
        "native_group_norm",
        "native_layer_norm",
    )
)


def direct_call(operator: Any) -> Any:
    """What does the same as an operator in the least time."""
    if is_drawn_again(operator):
        return on_the_gpu_of_its_operands(operator)
    if type(operator) is not torch._ops.OpOverload:
        return operator
    if str(operator) in BOUND_TO_PYTHON:
        return getattr(torch._C._VariableFunctions, operator._schema.name.removeprefix("aten::"), operator._op)
    return operator._op  # what calling it calls, after one frame of Python


def is_drawn_again(operator: Any) -> bool:
    """Whether it is one of those that draw the numbers of a checkpoint twice: a GPU's state is that of the current one
    to them, whichever one draws."""
    return isinstance(operator, torch._ops.HigherOrderOperator) and operator.name() in DRAWN_AGAIN


DRAWN_AGAIN = ("run_and_save_rng_state", "run_with_rng_state")


def on_the_gpu_of_its_operands(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The same, while the GPU that its operands or results are on is the current one."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = (*args, kwargs.get("device"))
        devices = (getattr(each, "device", each) for each in given if isinstance(each, torch.Tensor | torch.device))
        gpu = next((each for each in devices if each.type == "cuda"), None)
        if gpu is None:
            return operator(*args, **kwargs)
        with torch.cuda.device(gpu):
            return operator(*args, **kwargs)

    return call


def without_overrides(function: BoxedCallable, profiled: Callable[[], BoxedCallable] | None = None) -> BoxedCallable:
    """The same, as if no mode that watches torch's functions were active: what such a mode does is in the graph, since
    it was traced; calls of the compiled program would go through it a second time. `profiled`: gives what runs instead
    while a profiler does."""

    @functools.wraps(function)
    def run(args: list[Any]) -> Sequence[Any]:
        if not torch._C._len_torch_function_stack():
            if _profiler._is_profiler_enabled and profiled is not None:
                return profiled()(args)
            return function(args)
        with torch._C.DisableTorchFunction():
            return function(args)

    return run


# --- memory -----------------------------------------------------------------------------------------------------------

# `torch.empty_strided` for the CPU, of sizes, strides and a dtype: past the dispatcher, which takes longer than memory.
empty_on_cpu: Callable[..., torch.Tensor] = _guards._empty_strided_cpu  # type: ignore[attr-defined]


def empty_on_cuda(sizes: Any, strides: Any, dtype: torch.dtype, index: int) -> torch.Tensor:
    """The same for a GPU; the short way knows the current one alone."""
    if torch._C._cuda_getDevice() == index:
        made: torch.Tensor = _guards._empty_strided_cuda(sizes, strides, dtype)  # type: ignore[attr-defined]
        return made
    return torch.empty_strided(sizes, strides, dtype=dtype, device=f"cuda:{index}")


def empty_as(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of its own for a tensor that lies as another does."""
    sizes, strides = tuple(tensor.shape), tensor.stride()
    if tensor.device.type == "cuda":
        return empty_on_cuda(sizes, strides, tensor.dtype, tensor.device.index)
    return empty_on_cpu(sizes, strides, tensor.dtype)


def empty_on_first_cuda() -> Callable[..., torch.Tensor]:
    """The same for the first GPU, of sizes, strides and a dtype. Where there is no other, that is the current one: a
    program that makes a hundred tensors need not ask a hundred times."""
    if torch.cuda.device_count() == 1:
        short: Callable[..., torch.Tensor] = _guards._empty_strided_cuda  # type: ignore[attr-defined]
        return short
    return functools.partial(empty_on_cuda, index=0)


@functools.cache
def empty_on(device: str) -> Callable[..., torch.Tensor]:
    """What makes memory on a device, of sizes, strides and a dtype, in the least time."""
    where = torch.device(device)
    if where.type != "cuda":
        return empty_on_cpu
    return functools.partial(empty_on_cuda, index=where.index) if where.index else empty_on_first_cuda()


def current_stream_of(index: int) -> int:
    """The driver's handle of the current stream of a GPU."""
    handle: int = torch._C._cuda_getCurrentRawStream(index)
    return handle


# --- tensors that are there -------------------------------------------------------------------------------------------


def looks_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that says, of as many tensors, whether all look as these do: types, sizes, strides, devices. It keeps
    none of them. One call for hundreds of tensors takes a third of the time that asking each takes."""
    sizes: Any = [list(each.shape) for each in tensors]
    strides: Any = [list(each.stride()) for each in tensors]
    guards = _guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guards.check
    return check


def storage_handle(tensor: torch.Tensor) -> int:
    """What tells the memory behind a tensor from any other that is in use."""
    handle: int = tensor.untyped_storage()._cdata
    return handle


def users_of_storages(handles: Sequence[int]) -> list[int]:
    """How many have each memory: tensors, views among them."""
    return list(map(torch._C._storage_Use_Count, handles))


def holders_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How many hold each tensor: first those in Python, then torch itself, as autograd does what it saves."""
    return [*map(sys.getrefcount, tensors), *map(torch.Tensor._use_count, tensors)]  # type: ignore[attr-defined]


def addresses_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where the first elements are. Hundreds are asked for in every step of a model: no frame of Python for each."""
    return list(map(torch.Tensor.data_ptr, tensors))


def untracked_view(tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int = 0) -> torch.Tensor:
    """A tensor in the memory of another, from so many elements behind where that begins. Autograd takes it for no view
    of it; changes to one do not count as changes to the other."""
    made: torch.Tensor = _guards._reinterpret_tensor(tensor, sizes, strides, offset)  # type: ignore[attr-defined]
    return made


# The same with all four arguments, in no frame of Python.
quick_untracked_view: Callable[..., torch.Tensor] = _guards._reinterpret_tensor  # type: ignore[attr-defined]


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Each into each, in as few launches as torch needs."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(targets, sources)


# --- process groups ---------------------------------------------------------------------------------------------------


def process_group(name: str) -> Any | None:
    """The process group of this process that has a name; None where there is none."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed import distributed_c10d

    # A group that is written in Python is another object where C++ gives it back, of which nobody knows the ranks.
    for group, its_name in distributed_c10d._world.pg_names.items():
        if its_name == name:
            return group
    try:
        return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
    except (RuntimeError, ValueError, KeyError):
        return None


def ranks_of_group(name: str) -> tuple[int, ...] | None:
    """The ranks of a process group by its name, as the whole job counts them; None where it is not known."""
    group = process_group(name)
    return None if group is None else tuple(torch.distributed.get_process_group_ranks(group))


def has_symmetric_memory(name: str) -> bool:
    """Whether the ranks of a process group read each other's memory, because somebody has asked torch for it."""
    symmetric = sys.modules.get("torch.distributed._symmetric_memory")  # nobody has, if it was not imported
    return symmetric is not None and bool(symmetric.is_symm_mem_enabled_for_group(name))


def opens_symmetric_memory(name: str) -> bool:
    """Whether this process reads the memory of the other ranks of a group. All of them must ask at the same time."""
    symmetric = sys.modules["torch.distributed._symmetric_memory"]
    if symmetric._is_test_mode:  # there is none, and nobody will read it
        return True
    try:
        symmetric.get_symm_mem_workspace(name, min_size=1)
    except RuntimeError:
        return False
    return True


def store_of_job() -> Any | None:
    """Where the processes of this job leave notes for each other; None without one, or where they are only imagined."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed import distributed_c10d

    if torch.distributed.get_backend() == "fake" or torch.distributed.get_world_size() < 2:
        return None
    return distributed_c10d._get_default_store()


def begin_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Begin to add up a tensor over all ranks, as a compiled program does."""
    from torch.distributed import distributed_c10d

    name = distributed_c10d._get_process_group_name(distributed_c10d._get_default_group())
    found: torch.Tensor = torch.ops._c10d_functional.all_reduce(tensor, "sum", name)
    return found


def end_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for what `begin_sum` gave."""
    found: torch.Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return found
