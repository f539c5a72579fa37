"""Parts of a host program that a GPU can record as a whole, and replay: work of one GPU that waits for nothing.

    def inference(args):                       def inference_part_0(args):
        (x, w,) = args                             (x, w,) = args
        args.clear()                               args.clear()
        given = [x, w]                =>           y = op_aten_mm(x, w)
        del x, w                                   run_0(stream_of(0), y.data_ptr())
        [y] = recorded_0(inference_part_0, given)  return [y]
        return [y]

What stands between two parts (copies from and to other devices, numbers that the host reads, control flow) stays in the
program itself, with a reason in the record. `ferrite.runtime.cuda.recording` has what `recorded_0` does. It knows which
results leave the program, and gives them memory of their own; others that leave go through `from_pool`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from ferrite.capture import torch_api
from ferrite.codegen.host.pieces import names_in, tensors_of
from ferrite.errors import ModelLine, Refusal
from ferrite.ir import Symbol
from ferrite.ir.program import Assert, Bind, Buffer, Call, Collective, Item, Operation, UserKernel, call_of, writes
from ferrite.ir.program import arguments as host
from ferrite.schedule import BufferTable, Plan, Run

INDENT = "    "
MIN_LAUNCHES = 3  # fewer are as quick without: inputs of a part are copied

# Operators of torch that wait for the GPU, ask its driver for memory, or keep something on the host from call to call.
WAITING = re.compile(
    r"nonzero|masked_select|unique|bincount|hist|repeat_interleave|_local_scalar|item|equal\b|is_nonzero|allclose|"
    r"linalg|cholesky|lu_|qr|svd|eig|lstsq|ormqr|triangular|fft|sparse|nested|segment_reduce|ctc_loss|rnn|lstm|gru|"
    r"embedding_bag|multinomial|poisson|binomial|grouped_mm|_assert_scalar|pin_memory|record_stream|set_data|resize|_foreach"
)
RANDOM = "random"  # the effect of drawing from torch's own generator, which recordings know of
MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Recording:
    """What is asked of a host program: types of devices that can record, and results that only the backward program
    sees. Those may stay where a recording has them. `lends_gradients`: so may its results."""

    devices: frozenset[str]
    kept: frozenset[int] = frozenset()
    lends_gradients: bool = False


@dataclass(frozen=True)
class RecordedPart:
    """A function of a host program. `written`: inputs that it writes. `sizes_vary`: calls may differ in sizes.
    `leaving`: results that the program returns to its user, and `saved`: those that it returns for the backward program
    alone, by their places; the program itself looks at neither. `lends_gradients`: what leaves does so in the memory of
    its recordings. `keeps`: there are results that do not leave, and stay in that memory in any case."""

    device: str
    inputs: int
    written: tuple[int, ...]
    sizes_vary: bool
    leaving: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    lends_gradients: bool = False
    keeps: bool = False


@dataclass(frozen=True)
class PartLines:
    """Lines of a host program that follow each other and belong to one part, or to none. `bound`: names that stand for
    something after them."""

    part: int | None
    lines: list[str]
    bound: frozenset[str]


@dataclass(frozen=True)
class Segment:
    """Steps of a plan that can be recorded: places from `first` to `last`."""

    first: int
    last: int
    device: str


# --- which steps ------------------------------------------------------------------------------------------------------


def segments(plan: Plan, recording: Recording) -> tuple[list[Segment], tuple[Refusal, ...]]:
    """Steps that follow each other and can be recorded; and why others cannot, or need not, be."""
    table, decided = BufferTable(plan.program), decided_by_data(plan)
    found: list[Segment] = []
    refusals: list[Refusal] = []
    first: int | None = None
    device, work = "", 0

    def finish(last: int) -> None:
        if first is None or not work:
            return
        if work >= MIN_LAUNCHES:
            found.append(Segment(first, last, device))
        else:
            refusals.append(Refusal(f"too few launches to record: {work}", line_of(plan.steps[first])))

    for place, step in enumerate(plan.steps):
        where = device_of(step, plan, place, table, recording.devices, decided)
        if isinstance(where, Refusal) or (device and where and where != device):
            finish(place - 1)
            first, device, work = None, "", 0
        if isinstance(where, Refusal):
            refusals.append(where.at(line_of(step)))
            continue
        if first is None:
            first = place
        device = device or where
        work += len(step.launches) if isinstance(step, Run) else bool(where)
    finish(len(plan.steps) - 1)
    return found, tuple(refusals)


def device_of(
    step: Run | Operation, plan: Plan, place: int, table: BufferTable, devices: Collection[str], decided: set[str]
) -> str | Refusal:
    """The device of a step, nothing where it needs none; or why it cannot be recorded."""
    if isinstance(step, Run):
        names = [name for launch in step.launches for name in launch.arguments]
        if {size.name for launch in step.launches for size in launch.sizes} & decided:
            return Refusal("a size that data decides")
    elif isinstance(step, Assert) or (isinstance(step, Bind) and step.query != "offset"):
        return ""
    elif place in plan.bodies:
        return Refusal("which steps there are is known when it runs")
    elif isinstance(step, Item):
        return Refusal("the host reads a number")
    else:
        call = call_of(step)
        if call is None:
            return Refusal(f"{type(step).__name__} is a step of the host")
        masked = any(table.buffers[name].dtype in MASKS for name in tensors_of(step))
        if (refusal := reason_against(call, step, masked)) is not None:
            return refusal
        names = [*tensors_of(step), *(item for item in call.results if isinstance(item, str))]
    buffers = [table.buffers[name] for name in names if name in table.buffers]
    if any(symbols_of(buffer) & decided for buffer in buffers):
        return Refusal("a size that data decides")
    found = {str(buffer.device) for buffer in buffers}
    if len(found) != 1:
        return Refusal("it has tensors on several devices, or on none")
    (device,) = found
    if torch.device(device).type not in devices:
        return Refusal(f"it runs on {device}")
    return device


def reason_against(call: Call, step: Operation, masked: bool) -> Refusal | None:
    """Why a call cannot be recorded; None where it can. `masked`: some operand may be a mask."""
    if isinstance(step, Collective) or call.effect not in (None, RANDOM):
        return Refusal("it has an effect beside its results")
    if any(isinstance(item, Symbol) for item in call.results):
        return Refusal("data decide what it gives")
    if isinstance(step, UserKernel):
        return None  # it is compiled, and tuned, by the time of the second call
    if isinstance(call.operator, host.Constant):
        return Refusal("nothing is known of what it does")
    if not call.operator.startswith(("aten.", "prims.")):
        return Refusal("it is no operator of torch's own")
    if WAITING.search(call.operator) is not None or (masked and call.operator.startswith("aten.index")):
        return Refusal(f"{call.operator} may wait for the GPU")
    if torch_api.is_unsafe_to_record(call.operator):
        return Refusal(f"torch says that {call.operator} cannot be recorded")
    given = [value for name, value in call.kwargs if name == "generator"]
    if call.operator.endswith(".generator") or any(value != host.Literal("None") for value in given):
        return Refusal("it has a generator of its own")
    return None


def decided_by_data(plan: Plan) -> set[str]:
    """Names of numbers that are read from memory, given by calls, or sizes of what calls give."""
    found: set[str] = set()
    for step in plan.steps:
        if isinstance(step, Item) or (isinstance(step, Bind) and step.buffer not in plan.program.inputs):
            found.add(step.symbol.name)
        elif not isinstance(step, Run) and (call := call_of(step)) is not None:
            found |= {item.name for item in call.results if isinstance(item, Symbol)}
    return found


def symbols_of(buffer: Buffer) -> set[str]:
    indices = (*buffer.sizes, *buffer.strides, buffer.offset)
    return {atom.name for index in indices for atom in index.atoms if isinstance(atom, Symbol)}


def line_of(step: Run | Operation) -> ModelLine | None:
    if isinstance(step, Run):
        lines = (each.origin.line for launch in step.launches for each in launch.operations)
        return next((line for line in lines if line is not None), None)
    return step.origin.line


# --- the text ---------------------------------------------------------------------------------------------------------


def with_parts(
    name: str,
    stretches: Sequence[PartLines],
    inputs: Sequence[str],
    outputs: Sequence[str],
    found: Sequence[Segment],
    plan: Plan,
    recording: Recording,
) -> tuple[list[str], list[str], list[RecordedPart]]:
    """Functions for the parts, the lines of the program with calls of them, and what is known of each part.
    `stretches`: the program's lines between the one that takes its arguments and the one that returns; `inputs` and
    `outputs`: names that the one binds, and what the other reads."""
    used = [list(dict.fromkeys(word for line in each.lines for word in names_in(line))) for each in stretches]
    last_used = {word: place for place, words in enumerate(used) for word in words}
    returned = {each for text in outputs for each in names_in(text)}
    seen = {text for place, text in enumerate(outputs) if place not in recording.kept}
    table = BufferTable(plan.program)
    sizes_vary = any(map(symbols_of, plan.program.buffers)) or any(isinstance(x, Symbol) for x in plan.program.inputs)
    functions: list[str] = []
    lines: list[str] = []
    parts: list[RecordedPart] = []
    settled: set[str] = set()  # what leaves in memory of its own, or in memory that is lent
    bound = frozenset(inputs)
    for place, stretch in enumerate(stretches):
        before, bound = bound, stretch.bound
        if stretch.part is None:
            lines += stretch.lines
            continue
        given = [each for each in used[place] if each in before]
        gone = [each for each in given if each not in bound]
        read = {each for each in bound - before if last_used.get(each, -1) > place}
        results = sorted(read | ((bound - before) & returned))
        function = f"{name}_part_{stretch.part}"
        taken = [f"{INDENT}({', '.join(given)},) = args"] if given else []
        functions += [f"def {function}(args):", *taken, f"{INDENT}args.clear()", *stretch.lines]
        functions += [f"{INDENT}return [{', '.join(results)}]", ""]
        received = f"[{', '.join(results)}] = " if results else ""
        lines.append(f"{INDENT}given = [{', '.join(given)}]")
        lines += [f"{INDENT}del {', '.join(gone)}"] if gone else []
        lines += [f"{INDENT}{received}recorded_{stretch.part}({function}, given)", f"{INDENT}del given"]
        segment = found[stretch.part]
        steps = plan.steps[segment.first : segment.last + 1]
        written = {table.buffers[each].storage for step in steps for each in written_by(step) if each in table.buffers}
        places = (at for at, each in enumerate(given) if each in table.buffers and storage(table, each) in written)
        only_returned = [(at, each) for at, each in enumerate(results) if each not in read]
        leaving = tuple(at for at, each in only_returned if each in seen)
        saved = tuple(at for at, each in only_returned if each not in seen)
        about = segment.device, len(given), tuple(places), sizes_vary, leaving, saved, recording.lends_gradients
        parts.append(RecordedPart(*about, keeps=len(leaving) < len(results)))
        settled.update(results[at] for at in leaving)
    left = [at for at, text in enumerate(outputs) if at not in recording.kept and text not in settled]
    left = [at for at in left if not bound.isdisjoint(names_in(outputs[at]))]
    text = f"[{', '.join(outputs)}]"
    lines.append(f"{INDENT}return from_pool({text}, {left})" if left else f"{INDENT}return {text}")
    return functions, lines, parts


def storage(table: BufferTable, name: str) -> str:
    return table.buffers[name].storage


def written_by(step: Run | Operation) -> Iterator[str]:
    if not isinstance(step, Run):
        yield from (access.buffer for access in writes(step))
        call = call_of(step)
        yield from call.writes if call is not None else ()
        return
    for launch in step.launches:
        yield from (access.buffer for operation in launch.operations for access in writes(operation))
    yield from (tensor for tensor, _offset in step.borrowed_space.values())
