"""Host programs: their text becomes a function, with the few helpers that it calls while it runs."""

from __future__ import annotations

import builtins
import functools
import itertools
import linecache
import marshal
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ferrite.capture import torch_runtime
from ferrite.codegen import HostSource
from ferrite.ir import Expr, Points, Symbol, advance_generator
from ferrite.ir.program import Program, frees, interpret, leaves, operator_at, stacked
from ferrite.runtime.boxed import Boxed, boxed
from ferrite.runtime.collective_errors import is_collective, with_place
from ferrite.runtime.collective_times import CollectiveTimes
from ferrite.runtime.cpu.pages import large_on_cpu
from ferrite.runtime.cuda.recorded import from_pool
from ferrite.runtime.cuda.runs import arena_from
from ferrite.runtime.profiler_ranges import Ranges, line_ranges, text_with_ranges

_numbers = itertools.count()


def load_host(
    source: HostSource,
    runs: Sequence[Callable[..., int]],
    objects: Mapping[str, Any],
    recorders: Sequence[Callable[..., Sequence[Any]]] = (),
    in_eager: Boxed | None = None,
    ranges: Ranges | None = None,
    watch: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    collectives: CollectiveTimes | None = None,
) -> Boxed:
    """The function that the text defines. `runs`: what runs each of its tables of kernels; `objects`: what it names
    beside its inputs; `recorders`: what records and replays each of its parts; `in_eager`: what runs instead where it
    says so, operator by operator; `ranges`: runs as a profiler likes to see them; `watch`: what to call instead of an
    operator, for those who measure; `collectives`: told when its collectives begin and are over, if it has any."""
    filename = f"<ferrite {source.function} {next(_numbers)}>"
    empty_on_first_cuda = (
        torch_runtime.empty_on_first_cuda() if "_first_cuda(" in source.text else torch_runtime.empty_on_cuda
    )
    namespace: dict[str, Any] = {
        **objects,
        "torch": torch,
        "empty_strided": torch.empty_strided,
        "empty_on_cpu": torch_runtime.empty_on_cpu,
        "empty_on_cuda": torch_runtime.empty_on_cuda,
        "empty_on_first_cuda": empty_on_first_cuda,
        "arena_on_first_cuda": arena_from(empty_on_first_cuda),
        "arena_on_cuda": arena_from(torch_runtime.empty_on_cuda),
        "stream_of": torch_runtime.current_stream_of,
        "large_on_cpu": large_on_cpu,
        "threads": torch.get_num_threads,
        "random_state": advance_generator,
        "is_recording": torch.cuda.is_current_stream_capturing,
        "view_of": view_of,
        "untracked_view": torch_runtime.quick_untracked_view,
        "taken_over": taken_over,
        "laid_out": laid_out,
        "saved": Saved(),
        "begin_of": begin_of,
        "end_of": end_of,
        "from_pool": from_pool,
        "leaves": leaves,
        "repeat": repeat,
        "in_eager": in_eager if "in_eager(" in source.text else None,  # it holds the graph
        "inf": float("inf"),
        "nan": float("nan"),
    }
    rows = source.text.split("\n")
    collectives = CollectiveTimes() if collectives is None else collectives
    collectives.rows = rows
    has_collectives = any(map(is_collective, source.operators.values()))
    for name, path in source.operators.items():
        operator = operator_at(path)
        if not callable(operator):  # torch makes a namespace of any name
            raise TypeError(f"{path} is no operator")
        called = torch_runtime.direct_call(operator)
        called = called if watch is None else watch(called)
        if is_collective(path):
            called = with_place(called, rows, source.lines, namespace, collectives.noted)
        namespace[name] = called
    for number, run in enumerate(runs):
        namespace[f"run_{number}"] = run
    for number, recorder in enumerate(recorders):
        namespace[f"recorded_{number}"] = recorder
    for number, program in enumerate(source.programs):
        namespace[f"interpret_{number}"] = interpreted(program, objects)
    for number, (value, symbols) in enumerate(source.scalars):
        namespace[f"scalar_{number}"] = scalar(value, symbols)
    text = source.commented
    code, names = code_of(source, filename)
    missing = [name for name in names if name not in namespace and not hasattr(builtins, name)]
    if missing:
        raise NameError(f"the host program names {missing[0]}, which is not there")
    exec(code, namespace)
    function: Boxed = namespace[source.function]
    if has_collectives:
        function = collectives.timed(function)
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    weakref.finalize(function, linecache.cache.pop, filename, None)
    name, plain_text, lines = source.function, source.text, source.lines  # the rest of a source is not held

    @functools.cache
    def profiled() -> Boxed:
        assert ranges is not None
        with_ranges = {**namespace, **ranges(), "line_range": line_ranges(lines)}
        exec(compile(text_with_ranges(plain_text, lines), filename, "exec"), with_ranges)
        return with_ranges[name]  # type: ignore[no-any-return]

    return boxed(torch_runtime.without_overrides(function, None if ranges is None else profiled))


def bytecode_of(source: HostSource, objects: Iterable[str]) -> bytes:
    """The text compiled, with the names that it expects beside it. Comments do not matter: they stand behind what is on
    their lines. `objects`: names of constants and the like."""
    code = compile(source.text, "<ferrite>", "exec")
    expected = {*source.operators, *objects, *numbered_names(source)}
    return marshal.dumps((code, sorted(names_in(code) & expected)))


def numbered_names(source: HostSource) -> Iterator[str]:
    """What is in the namespace once for each run, small program, number and part."""
    numbered: dict[str, Sequence[object]] = {"run": source.runs, "interpret": source.programs}
    numbered |= {"scalar": source.scalars, "recorded": source.parts}
    for name, many in numbered.items():
        yield from (f"{name}_{number}" for number in range(len(many)))


def code_of(source: HostSource, filename: str) -> tuple[types.CodeType, Sequence[str]]:
    """The text compiled, and names that must be there for it, where these are known."""
    if not source.bytecode:
        return compile(source.text, filename, "exec"), ()
    code, names = marshal.loads(source.bytecode)
    if not isinstance(code, types.CodeType):
        raise TypeError("the host program is not code")
    return in_file(code, filename), names


def names_in(code: types.CodeType) -> set[str]:
    """Names that code has to look up, attributes and functions in it included."""
    return set(code.co_names).union(*(names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def in_file(code: types.CodeType, filename: str) -> types.CodeType:
    """The same code, and the functions in it, as if compiled from another file: tracebacks name it."""
    inner = (in_file(each, filename) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=filename, co_consts=tuple(inner))


def view_of(
    base: torch.Tensor, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], offset: int
) -> torch.Tensor:
    """Another view of a tensor's memory, which autograd knows; the offset counts from where the tensor begins."""
    if dtype == base.dtype:
        return base.as_strided(sizes, strides, base.storage_offset() + offset)
    start = base.storage_offset() * base.dtype.itemsize // dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=base.device)
    return view.set_(base.untyped_storage(), start + offset, sizes, strides)


def taken_over(old: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A tensor in the memory of another one that is no longer needed. It is no view: autograd tells those apart. Nor is
    the storage asked for, which would count as a user from then on: autograd adds no other gradient in place then."""
    new = torch.empty(0, dtype=old.dtype, device=old.device)
    memory = old if old.is_contiguous() else old.as_strided((0,), (1,))
    new.set_(memory, 0, sizes, strides)  # type: ignore[call-overload]
    return new


def laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """What a call gave, with the strides that kernels expect of it."""
    if tensor.dim() != len(strides):
        raise RuntimeError(f"a call gave a tensor of {tensor.dim()} dimensions where {len(strides)} were forecast")
    where = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if tensor.numel() == 0 or all(size == 1 or mine == wanted for size, mine, wanted in where):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class Saved:
    """What a backward program is given, which has the types and strides that kernels expect, or is mended. As long as
    it looks as it did when there was nothing to mend, one question is enough."""

    MAX_LOOKS = 8  # as sizes change

    def __init__(self) -> None:
        self.looks = 0
        self.as_before: Callable[..., bool] = lambda *tensors: False

    def differ(self, *tensors: torch.Tensor) -> bool:
        return not self.as_before(*tensors)

    def mended(
        self, tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], strides: Sequence[Sequence[int]]
    ) -> Sequence[torch.Tensor]:
        made = [laid_out(each.to(dtype), wanted) for each, dtype, wanted in zip(tensors, dtypes, strides, strict=True)]
        if self.looks < self.MAX_LOOKS and all(new is old for new, old in zip(made, tensors, strict=True)):
            self.looks += 1
            self.as_before = torch_runtime.looks_of(tensors)
        return made


def begin_of(tensor: torch.Tensor) -> int:
    """Where the storage behind a tensor begins."""
    return tensor.untyped_storage().data_ptr()


def end_of(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return storage.data_ptr() + storage.nbytes()


def repeat(condition: Boxed, body: Boxed, given: list[Any], carried: int, keep: bool) -> list[Any]:
    """Run a body on the carried values while a condition says yes."""
    values, constants = given[:carried], given[carried:]
    values = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
    history: list[list[Any]] = []
    while bool(condition([*values, *constants])[0]):
        values = list(body([*values, *constants]))
        if keep:
            history.append(values)
    if keep:
        values = [stacked(column) for column in zip(*(history or [values]), strict=True)]
    return values


def interpreted(program: Program, objects: Mapping[str, Any]) -> Callable[[list[Any]], None]:
    dying = frees(program)

    def run(args: list[Any]) -> None:
        interpret(program, args, objects, dying)

    return run


def scalar(value: Expr, symbols: Sequence[Symbol]) -> Callable[..., Any]:
    def evaluate(*numbers: int) -> Any:
        return Points((), dict(zip(symbols, numbers, strict=True)), no_memory)(value).item()

    return evaluate


def no_memory(name: str) -> torch.Tensor:
    raise ValueError(f"a number asks for memory: {name}")
