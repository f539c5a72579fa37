"""Print a plan as Python: allocate, call, run kernels, free. Runs of kernels are one native call each.

For `F.softmax(x @ w, -1)` the text is, all of it:

    def inference(args):
        arg0_1, arg1_1, = args
        args.clear()
        buf2 = op_aten_mm(arg0_1, arg1_1)
        del arg0_1, arg1_1
        run_0(threads(), buf2.data_ptr())  # net.py:7  return F.softmax(x @ w, -1)
        buf5 = buf2
        return [buf5]

The softmax takes over the memory of the product (`ferrite.schedule.memory.in_place`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ferrite.codegen.host.pieces import (
    comparison,
    first_line,
    gives_contiguous,
    gives_tensors,
    numbers,
    read_by_strides,
    tensors_of,
)
from ferrite.codegen.host.recording import PartLines, Recording, Segment, segments, with_parts
from ferrite.codegen.host.runs import KernelNumbers, run_table, slot_text
from ferrite.codegen.host.small_programs import small_program
from ferrite.codegen.host.source import HostSource
from ferrite.codegen.host.spelling import EagerSpelling, HostSpelling
from ferrite.codegen.host.views import UntrackedViews, untracked_views_of
from ferrite.graph import ModelLine
from ferrite.ir import Expr, Index, Symbol
from ferrite.ir.program import (
    Assert,
    Bind,
    Buffer,
    Call,
    CallArgument,
    DeviceCopy,
    If,
    Invoke,
    Item,
    Operation,
    RandomState,
    Scalar,
    Size,
    Template,
    While,
    arguments_of,
    call_of,
    defines,
    writes,
)
from ferrite.ir.program import arguments as host
from ferrite.schedule import BufferTable, Plan, Run, accessed, likely

WORD = re.compile(r"\w+")
INDENT = "    "
Spellings = Mapping[str, HostSpelling]
ALIGNMENT_BYTES = 16  # bytes: see `RandomState`
MARK = "\0"  # between a line of text and the number of its remark, while printing


def print_host(
    plan: Plan,
    kernels: KernelNumbers,
    spellings: Spellings,
    checked: bool = False,
    recording: Recording | None = None,
) -> HostSource:
    """`kernels`: the number of each kernel of the plan. `spellings`: what differs by device, by the types of those that
    have kernels. `checked`: kernels are given the bounds of their memory. `recording`: parts are to be recorded."""
    source, remarks = HostSource(plan.program.name, checked=checked), list[ModelLine]()
    printer = _Printer(plan, source, kernels, spellings, plan.program.name, remarks, recording)
    rows = [row.split(MARK) for row in printer.function()]
    source.text = "\n".join(row[0] for row in rows) + "\n"
    source.lines = {place: remarks[int(row[1])] for place, row in enumerate(rows) if len(row) > 1}
    return source


def named_objects(source: HostSource, objects: Mapping[str, Any]) -> dict[str, Any]:
    """The objects that a host program does name: lowering knows of more."""
    words = {word for text in (source.text, *map(str, source.programs)) for word in WORD.findall(text)}
    return {name: value for name, value in objects.items() if name in words}


class _Printer:
    def __init__(
        self,
        plan: Plan,
        source: HostSource,
        kernels: KernelNumbers,
        spellings: Spellings,
        name: str,
        remarks: list[ModelLine],
        recording: Recording | None = None,
        is_body: bool = False,
    ) -> None:
        self.recording, self.is_body = recording, is_body
        self.plan, self.source, self.kernels, self.name, self.remarks = plan, source, kernels, name, remarks
        self.spellings = spellings
        self.program = plan.program
        self.buffer_table = BufferTable(plan.program)
        self.there = {item for item in self.program.inputs if isinstance(item, str)}  # tensors under their names
        self.laid_out = set(read_by_strides(plan))
        self.bound = {item.name for item in self.program.inputs if isinstance(item, Symbol)}  # symbols with values
        self.given_objects = {item.name for item in self.program.inputs if isinstance(item, host.Constant)}
        self.to_lay_out: list[str] = []  # results whose strides have symbols without one
        self.untracked = UntrackedViews()

    def function(self) -> Iterator[str]:
        for place, plans in self.plan.bodies.items():
            for number, body in enumerate(plans):
                name = self.body_name(place, number)
                inner = _Printer(body, self.source, self.kernels, self.spellings, name, self.remarks, is_body=True)
                yield from inner.function()
                yield ""
        names = [item.name if isinstance(item, Symbol | host.Constant) else item for item in self.program.inputs]
        found: list[Segment] = []
        if self.recording is not None:
            found, self.source.not_recorded = segments(self.plan, self.recording)
        stretches, parts = list(self.stretches(found)), list[str]()
        outputs = list(map(self.output, self.program.outputs))
        lines = [*(line for stretch in stretches for line in stretch.lines), f"{INDENT}return [{', '.join(outputs)}]"]
        if found and self.recording is not None:
            given = self.name, stretches, names, outputs, found, self.plan, self.recording
            parts, lines, self.source.parts = with_parts(*given)
        yield from parts
        yield f"def {self.name}(args):"
        if names:
            yield f"{INDENT}({', '.join(names)},) = args"
        if states := [step for step in self.plan.steps if isinstance(step, RandomState)]:
            yield INDENT + self.without_random_state(states)
        yield f"{INDENT}args.clear()"
        yield from lines

    def stretches(self, found: Sequence[Segment]) -> Iterator[PartLines]:
        """The lines behind that, by the parts that they belong to."""
        yield self.stretch(self.beginning())
        parts = {place: number for number, each in enumerate(found) for place in range(each.first, each.last + 1)}
        self.untracked = untracked_views_of(self.plan, self.buffer_table, parts)
        last = parts.get(len(self.plan.steps) - 1)
        for part, places in itertools.groupby(range(len(self.plan.steps)), parts.get):
            before = set(self.there) if part is not None else set()
            lines = [line for place in places for line in self.step_and_frees(place)]
            if part is not None and part == last:  # views of what it makes are made once, with it
                made = self.there - before
                lines += self.results(item for item in self.program.outputs if self.memory_of(item) in made)
            yield self.stretch(lines, part)
        yield self.stretch(self.results(self.program.outputs))

    def stretch(self, lines: Iterable[str], part: int | None = None) -> PartLines:
        indented = [INDENT + line for line in lines]
        return PartLines(part, indented, frozenset(self.there | self.bound | self.given_objects))

    def beginning(self) -> Iterator[str]:
        """What was given may not lie as the program says."""
        given = sorted(self.there - self.written())
        if self.is_body:  # it may have been traced for operands that lie otherwise, as parts of a `map` do
            yield from self.received(given)
        elif self.program.name == "backward":  # what the forward program keeps for it may be results of calls
            yield from self.saved(given)

    def step_and_frees(self, place: int) -> Iterator[str]:
        yield from self.step(place, self.plan.steps[place])
        dead = sorted(self.dead(place))
        if dead:
            self.there -= set(dead)
            yield f"del {', '.join(dead)}"

    def results(self, outputs: Iterable[object]) -> Iterator[str]:
        for item in outputs:
            if isinstance(item, str):
                yield from self.made(item)

    def memory_of(self, output: object) -> str | None:
        """The tensor whose memory a result looks at, whatever it is a view of."""
        if not isinstance(output, str):
            return None
        buffer = self.buffer_table.buffers[output]
        while buffer.storage != buffer.name:
            buffer = self.buffer_table.buffers[buffer.storage]
        return buffer.name

    def dead(self, place: int) -> Iterator[str]:
        """Tensors that nothing needs after a step."""
        for name in self.plan.last_uses[place]:
            if name in self.untracked.stands_for:
                if self.untracked.is_over(name):
                    yield self.untracked.stands_for[name]
            elif name in self.there:
                yield name

    def body_name(self, place: int, number: int) -> str:
        return f"{self.name}_body_{place}_{number}"

    def spelling(self, device: torch.device) -> HostSpelling:
        return self.spellings.get(device.type) or EagerSpelling()

    # --- memory -------------------------------------------------------------------------------------------------------

    def made(self, name: str) -> Iterator[str]:
        """Lines that make a buffer's tensor, where it is not there yet."""
        buffer = self.buffer_table.buffers[name]
        if self.untracked.stands_for.get(name, name) in self.there or buffer.kind == "constant":
            return
        if name in self.untracked.stands_for:
            yield from self.made(buffer.storage)
            at = f"{numbers(buffer.sizes)}, {numbers(buffer.strides)}, {buffer.offset.text}"
            yield f"{name} = untracked_view({buffer.storage}, {at})"
        elif buffer.kind == "view":
            yield from self.made(buffer.storage)
            yield f"{name} = {self.in_place(buffer) if name in self.plan.in_place else self.view(buffer)}"
        else:
            shape, strides = numbers(buffer.sizes), numbers(buffer.strides)
            many = math.prod(map(likely, buffer.sizes)) * buffer.dtype.itemsize
            spelling = self.spelling(buffer.device)
            yield f"{name} = {spelling.allocation(shape, strides, buffer.dtype, buffer.device, many)}"
        self.there.add(name)

    def view(self, buffer: Buffer) -> str:
        base = buffer.storage
        at = f"{numbers(buffer.sizes)}, {numbers(buffer.strides)}, {buffer.offset.text}"
        return f"view_of({base}, {buffer.dtype}, {at})"

    def in_place(self, buffer: Buffer) -> str:
        """Memory that was another tensor's, as a tensor that is no view: nobody else has it any more."""
        base = self.buffer_table.buffers[buffer.storage]
        if (base.sizes, base.strides) == (buffer.sizes, buffer.strides):
            return base.name
        looks = f"{numbers(buffer.sizes)}, {numbers(buffer.strides)}"
        # what the program made itself may look otherwise from now on; what was given to it stays as it is
        return f"{base.name}.as_strided_({looks})" if base.kind == "owned" else f"taken_over({base.name}, {looks})"

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, place: int, step: Run | Operation) -> Iterator[str]:
        if isinstance(step, Run):
            yield from self.run(step)
            return
        if place in self.plan.bodies:
            yield from self.control(place, step)
            return
        call = call_of(step)
        if call is not None:
            yield from self.call(call, step)
            return
        match step:
            case Bind():
                yield from self.made(step.buffer)
                query = "storage_offset()" if step.query == "offset" else f"{step.query}({step.axis})"
                yield f"{step.symbol.name} = {step.buffer}.{query}"
                yield from self.bind(step.symbol)
            case Item():
                yield from self.made(step.source)
                yield f"{step.symbol.name} = int({step.source}.item())"
                yield from self.bind(step.symbol)
            case DeviceCopy():
                yield from self.made(step.source)
                yield from self.made(step.target)
                yield self.device_copy(step)
            case RandomState():
                yield from self.random_state(step)
            case Assert():
                yield f"if not {self.scalar(step.condition)}:"
                yield f"{INDENT}raise {step.error.__name__}({step.message!r})"
            case _:
                yield from self.interpreted(step)

    def without_random_state(self, states: Sequence[RandomState]) -> str:
        """Where what they say cannot be known, or does not hold: while the user records a CUDA graph, only kernels of
        torch learn where its generator will be."""
        aligned = dict.fromkeys(name for step in states for name in step.aligned)
        addresses = " | ".join(f"{name}.data_ptr()" for name in aligned)
        unaligned = f" or ({addresses}) % {ALIGNMENT_BYTES}" if aligned else ""
        multiples = dict.fromkeys(pair for step in states for pair in step.multiples)
        uneven = "".join(f" or ({index.text}) % {divisor}" for index, divisor in multiples)
        return f"if is_recording(){unaligned}{uneven}: return in_eager(args)"

    def random_state(self, step: RandomState) -> Iterator[str]:
        """Each draw begins where the one before it ends."""
        (first, taken), *others = step.draws
        total = taken
        for _symbol, blocks in others:
            total = total + blocks
        yield f"{step.seed.name}, {first.name} = random_state({step.device.index or 0}, {total.text})"
        for (before, blocks), (symbol, _) in itertools.pairwise(step.draws):
            yield f"{symbol.name} = {before.name} + {blocks.text}"
        for symbol in defines(step):
            yield from self.bind(symbol)

    def device_copy(self, copy: DeviceCopy) -> str:
        source, target = (self.buffer_table.buffers[name] for name in (copy.source, copy.target))
        if not source.sizes and source.device.type == "cpu":  # by value: nobody waits for anything
            return f"{target.name}.fill_({source.name})"
        return f"{target.name}.copy_({source.name}, non_blocking={not copy.blocking})"

    def run(self, run: Run) -> Iterator[str]:
        where = self.buffer_table.buffers[run.launches[0].arguments[0]].device
        spelling = self.spelling(where)
        table, slots = run_table(run, self.buffer_table.buffers, self.kernels, spelling, self.source.checked)
        for slot in slots:
            if isinstance(slot, str):
                yield from self.made(slot)
        number = len(self.source.runs)
        self.source.runs.append(table)
        for each in table.parallel_regions:
            yield f"# kernels {each.first} to {each.first + each.count - 1} of run_{number}: together, one thread each"
        words = [slot_text(slot, spelling, self.buffer_table.buffers) for slot in slots]
        if table.arena:
            yield f"arena = {spelling.arena(table.arena, where)}"
            words.insert(0, spelling.address("arena"))
        call = f"run_{number}({', '.join([*spelling.run_arguments(where), *words])})"
        yield self.remarked(call, first_line(run))
        if table.arena:
            yield "del arena"

    def call(self, call: Call, step: Operation) -> Iterator[str]:
        for name in tensors_of(step):
            yield from self.made(name)
        function = call.operator.name if isinstance(call.operator, host.Constant) else self.operator(call.operator)
        texts = [self.argument(item) for item in call.args]
        texts += [f"{name}={self.argument(value)}" for name, value in call.kwargs]
        value = f"{function}({', '.join(texts)})"
        yield self.remarked(self.assigned(call, value), step.origin.line)
        if not isinstance(step, Template):  # products have the types of their operands
            yield from self.as_forecast(call.results)
        if not gives_contiguous(call, self.buffer_table.buffers):
            yield from self.received(call.results)

    def as_forecast(self, results: Iterable[str | Symbol | None]) -> Iterator[str]:
        """Kernels read elements of the type that torch forecast, which an operator may not have given."""
        for item in results:
            if isinstance(item, str) and item in self.laid_out:
                buffer = self.buffer_table.buffers[item]
                if buffer.kind not in ("view", "foreign"):
                    yield f"if {item}.dtype != {buffer.dtype}: {item} = {item}.to({buffer.dtype})"

    def saved(self, names: Sequence[str]) -> Iterator[str]:
        """The same for all that a backward program is given, at once: there may be hundreds, and they are as they were
        at the call before."""
        buffers = [self.buffer_table.buffers[name] for name in names if name in self.laid_out]
        buffers = [each for each in buffers if each.kind not in ("view", "foreign")]
        known = [each for each in buffers if self.symbols(each.strides) <= self.bound]
        if known:
            found = "".join(f"{each.name}, " for each in known).rstrip()
            dtypes = "".join(f"{each.dtype}, " for each in known).rstrip()
            strides = "".join(f"{numbers(each.strides)}, " for each in known).rstrip()
            yield f"if saved.differ({found}): ({found}) = saved.mended(({found}), ({dtypes}), ({strides}))"
        others = [each.name for each in buffers if each not in known]
        yield from self.as_forecast(others)
        yield from self.received(others)

    def symbols(self, indices: Iterable[Index]) -> set[str]:
        return {atom.name for index in indices for atom in index.atoms if isinstance(atom, Symbol)}

    def received(self, results: Iterable[str | Symbol | None]) -> Iterator[str]:
        """What is left to do with what a call gave. Strides may be in terms of sizes that are asked for after it."""
        for item in results:
            if isinstance(item, Symbol):
                yield f"{item.name} = int({item.name})"
                yield from self.bind(item)
            elif item in self.laid_out and self.buffer_table.buffers[item].kind not in ("view", "foreign"):
                self.to_lay_out.append(item)
        yield from self.lay_out()

    def bind(self, symbol: Symbol) -> Iterator[str]:
        """A symbol has its value from here on."""
        self.bound.add(symbol.name)
        yield from self.lay_out()

    def lay_out(self) -> Iterator[str]:
        waiting, self.to_lay_out = self.to_lay_out, []
        for name in waiting:
            strides = self.buffer_table.buffers[name].strides
            if not self.symbols(strides) <= self.bound:
                self.to_lay_out.append(name)
                continue
            yield f"if {name}.stride() != {numbers(strides)}: {name} = laid_out({name}, {numbers(strides)})"

    def written(self) -> set[str]:
        """Inputs that the program writes, and the caller sees it: a copy could not stand for them."""
        accesses = (access for operation in self.program.operations for access in writes(operation))
        storages = {self.buffer_table.buffers[access.buffer].storage for access in accesses}
        return {name for name in storages if self.buffer_table.buffers[name].kind == "input"}

    def assigned(self, call: Call, value: str) -> str:
        names = ["_" if item is None else item.name if isinstance(item, Symbol) else item for item in call.results]
        self.there.update(item for item in call.results if isinstance(item, str))
        if all(name == "_" for name in names):
            return value
        if call.packed:  # what is not needed is not held
            if gives_tensors(call) == len(names):
                return f"{', '.join(names)}{',' * (len(names) == 1)} = {value}" + ("; del _" if "_" in names else "")
            return f"{', '.join(names)}, *_ = leaves({value}); del _"
        return f"{names[0]} = {value}"

    def operator(self, path: str) -> str:
        name = "op_" + path.removesuffix(".default").replace(".", "_").replace("::", "_")
        self.source.operators[name] = path
        return name

    def control(self, place: int, step: Operation) -> Iterator[str]:
        for name in tensors_of(step):
            yield from self.made(name)
        given = f"[{', '.join(map(self.argument, arguments_of(step)))}]"
        names = [self.body_name(place, number) for number in range(len(self.plan.bodies[place]))]
        assert isinstance(step, If | While | Invoke)
        match step:
            case If():
                said = step.predicate if isinstance(step.predicate, str) else step.predicate.text
                value = f"({names[0]} if {said} else {names[1]})({given})"
            case While():
                value = f"repeat({names[0]}, {names[1]}, {given}, {len(step.carried)}, {step.stacked})"
            case Invoke():
                value = f"{names[0]}({given})"
        results = ["_" if item is None else item.name if isinstance(item, Symbol) else item for item in step.results]
        self.there.update(item for item in step.results if isinstance(item, str))
        yield (f"[{', '.join(results)}] = {value}" if results else value) + ("; del _" if "_" in results else "")
        yield from self.received(step.results)

    def interpreted(self, step: Operation) -> Iterator[str]:
        for name in sorted(accessed(step)):
            yield from self.made(name)
        program = small_program(step, self.buffer_table.buffers)
        number = len(self.source.programs)
        self.source.programs.append(program)
        given = [item.name if isinstance(item, Symbol) else str(item) for item in program.inputs]
        yield self.remarked(f"interpret_{number}([{', '.join(given)}])", step.origin.line)

    def remarked(self, text: str, line: ModelLine | None) -> str:
        if line is None:
            return text
        self.remarks.append(line)
        return f"{text}{MARK}{len(self.remarks) - 1}"

    # --- arguments ----------------------------------------------------------------------------------------------------

    def argument(self, argument: CallArgument) -> str:
        match argument:
            case host.Ref(name) | host.Constant(name):
                return self.untracked.stands_for.get(name, name)
            case host.Literal(text):
                return text
            case Size(index):
                return index.text
            case Scalar(value):
                return self.scalar(value)
            case host.Sequence("list", items):
                return f"[{', '.join(map(self.argument, items))}]"
            case host.Sequence(_, items):
                return f"({', '.join(map(self.argument, items))}{',' if len(items) == 1 else ''})"
            case host.Mapping(items):
                return "{" + ", ".join(f"{key}: {self.argument(value)}" for key, value in items) + "}"
            case host.Slice(start, stop, step):
                return f"slice({self.argument(start)}, {self.argument(stop)}, {self.argument(step)})"
        raise TypeError(f"no argument: {argument!r}")

    def scalar(self, value: Expr) -> str:
        if (text := comparison(value)) is not None:
            return text
        symbols = tuple(sorted((atom for atom in value.atoms if isinstance(atom, Symbol)), key=lambda item: item.name))
        number = len(self.source.scalars)
        self.source.scalars.append((value, symbols))
        return f"scalar_{number}({', '.join(symbol.name for symbol in symbols)})"

    def output(self, item: object) -> str:
        match item:
            case str():
                return item
            case Index():
                return item.text
        return self.argument(item)  # type: ignore[arg-type]
