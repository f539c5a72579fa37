"""Programs as text that `ferrite.ir.program.parse` reads back: Python syntax, stable, one operation after the other.

    def forward(s0, x):
        s0 = symbol(2, 1024)
        x = input(f32, [8, s0], strides=[s0, 1])
        buf0 = owned(f32, [8, s0], strides=[s0, 1])
        with compute(i0=8, i1=s0):  # net.py:41  y = x.sin()  (sin)
            v0: f32 = x[i0, i1]
            v1: f32 = sin(v0)
            buf0[i0, i1] = v1
        return buf0

What goes without saying is left out: an offset of 0, the device "cpu", empty lists. Origins are comments: they take no
part in equality. A sub-program is a function before the operation that uses it first.
"""

from __future__ import annotations

import itertools
import keyword
from collections.abc import Callable, Iterator, Sequence

from ferrite.ir.expr import Expr
from ferrite.ir.index.algebra import Axis, Index, Number, Symbol
from ferrite.ir.program import arguments as host
from ferrite.ir.program.attention_text import attention_text
from ferrite.ir.program.line_text import expression_text as expression_text
from ferrite.ir.program.loop_operations import Attention, Compute, Destination, Origin, Reduce, Scan, Sort, Store
from ferrite.ir.program.nodes import (
    Allocate,
    Assert,
    Bind,
    Buffer,
    Call,
    Collective,
    DeviceCopy,
    If,
    Invoke,
    Item,
    Operation,
    Output,
    Program,
    RandomState,
    Seeds,
    Template,
    UserKernel,
    Wait,
    While,
)
from ferrite.ir.program.operation_facts import axes_of, defines, returning, roots_of, symbols
from ferrite.ir.program.spelling import Values, argument_text, prefix_beside
from ferrite.ir.types import short

INDENT = "    "
MARK = "\0"  # between a line and the number of its value, while printing rows


def program_text(program: Program) -> str:
    return "\n".join(_ProgramText(program).lines()) + "\n"


def program_rows(program: Program) -> list[tuple[str, int | None, Expr | None]]:
    """The lines of the text, each with the number of its operation and the value in it that the line computes; None:
    of what stands around them."""
    values: list[Expr] = []

    def note(value: Expr) -> str:
        values.append(value)
        return f"{MARK}{len(values) - 1}"

    text = _ProgramText(program, note)
    lines = [line.partition(MARK) for line in text.lines()]
    numbers = [number for number, size in enumerate(text.sizes) for _ in range(size)]
    before = len(lines) - text.behind - len(numbers)
    operations = [*[None] * before, *numbers, *[None] * text.behind]
    return [
        (line, operation, values[int(value)] if value else None)
        for (line, _, value), operation in zip(lines, operations, strict=True)
    ]


class _ProgramText:
    def __init__(self, program: Program, note: Callable[[Expr], str] = lambda value: "") -> None:
        self.program, self.note = program, note
        self.sizes: list[int] = []  # lines of each operation
        self.behind = 0  # lines behind the last of them
        self.symbols = symbols_of(program)
        names = {*input_names(program), *(buffer.name for buffer in program.buffers)}
        names |= {symbol.name for symbol in self.symbols}
        names |= {axis.name for operation in program.operations for axis in axes_of(operation)}
        self.prefix = prefix_beside(names)
        self.defs: dict[int, str] = {}
        self.values = Values(self.prefix)

    def lines(self, name: str | None = None) -> list[str]:
        head, shown = [], name or self.program.name
        if shown != self.program.name or not is_name(shown):
            shown = shown if is_name(shown) else "program"
            head = [f"@named({self.program.name!r})"]
        body = [
            *(symbol.declared for symbol in self.symbols),
            *(f"{item.name} = opaque()" for item in self.program.inputs if isinstance(item, host.Constant)),
            *(f"{buffer.name} = {buffer_text(buffer)}" for buffer in self.program.buffers),
        ]
        for operation in self.program.operations:
            self.values = Values(self.prefix)
            self.values.note = self.note
            lines = self.operation(operation)
            self.sizes.append(len(lines))
            body += lines
        self.values = Values(self.prefix)
        outputs = [self.output(item) for item in self.program.outputs]
        values = self.values.take()
        self.behind = len(values) + 1
        body += values
        # A lone tuple keeps a comma: without it, it would read as several outputs.
        comma = "," if len(outputs) == 1 and outputs[0].startswith("(") else ""
        body.append(f"return {', '.join(outputs)}{comma}".rstrip())
        return [*head, f"def {shown}({', '.join(input_names(self.program))}):", *(INDENT + line for line in body)]

    def output(self, item: Output) -> str:
        match item:
            case str():
                return item
            case Number():
                return f"size({item})"  # alone, it would read as a literal
            case Index():
                return item.text
            case host.Ref(name):
                return f"ref({name})"
        return argument_text(item, self.values)

    # --- operations ---------------------------------------------------------------------------------------------------

    def operation(self, operation: Operation) -> list[str]:
        note = comment(operation.origin)
        match operation:
            case Compute():
                self.values.declare(*roots_of(operation))
                return block(f"compute({axes_text(operation.axes)})", self.stores(operation.stores), note)
            case Reduce():
                over = f"over({axes_text(operation.reduced)})"
                head = f"reduce({operation.kind!r}, axes({axes_text(operation.axes)}), {over})"
                return self.loop(head, "reduced", operation.values, operation.destinations, note)
            case Scan():
                along = f"along({axes_text([operation.along])})"
                head = f"scan({operation.combine.name!r}, axes({axes_text(operation.axes)}), {along})"
                return self.loop(
                    head, "scanned", operation.values, operation.destinations, note, self.combine(operation)
                )
            case Sort():
                flags = flags_text(descending=operation.descending, stable=operation.stable)
                head = f"sort(axes({axes_text(operation.axes)}), along({axes_text([operation.along])}){flags})"
                return self.loop(head, "sorted", operation.keys, operation.destinations, note)
            case Attention():
                head, lines = attention_text(operation, self.values)
                return block(head, lines, note)
        before, statement = self.statement(operation)
        return [*before, *self.values.take(), statement + note]

    def loop(
        self,
        head: str,
        word: str,
        values: Sequence[Expr],
        destinations: Sequence[Destination | None],
        note: str,
        before: Sequence[str] = (),
    ) -> list[str]:
        """A reduction, scan or sort: values, then `destination, _ = word(value)`."""
        self.values.declare(*values)
        right = f"{word}({', '.join(map(self.values.value, values))})"
        left = ", ".join(
            "_" if item is None else self.values.element(item.buffer, item.coordinates) for item in destinations
        )
        statement = f"{left} = {right}" if destinations else right
        return block(head, [*before, *self.values.take(), statement], note)

    def combine(self, operation: Scan) -> list[str]:
        """The function of a scan that has no name of its own."""
        if not operation.combine.results:
            return []
        values = Values(self.prefix)
        values.declare(*operation.combine.results)
        results = f"results({', '.join(map(values.value, operation.combine.results))})"
        return block("combine()", [*values.take(), results], "")

    def stores(self, stores: Sequence[Store]) -> list[str]:
        statements = []
        for store in stores:
            place = self.values.element(store.buffer, store.coordinates)
            value = self.values.value(store.value)
            statements.append(f"{place} = {value}" if store.mode == "set" else f"{place}.{store.mode}({value})")
        return [*self.values.take(), *statements]

    def statement(self, operation: Operation) -> tuple[list[str], str]:
        """An operation in one line, and the functions it needs before it."""
        match operation:
            case Call():
                return [], self.call(operation)
            case Template():
                return [], f"template({operation.kind!r}, {self.call(operation.call)})"
            case Collective():
                return [], f"collective({self.call(operation.call)})"
            case Wait():
                return [], f"wait({self.call(operation.call)}, holds=[{', '.join(operation.holds)}])"
            case UserKernel():
                return [], f"user_kernel({self.call(operation.call)})"
            case DeviceCopy():
                flag = "" if operation.blocking else ", blocking=False"
                return [], f"copy({operation.source}, {operation.target}{flag})"
            case Allocate():
                return [], f"allocate({operation.target})"
            case Seeds():
                return [], f"seeds({operation.target})"
            case RandomState():
                draws = ", ".join(f"({symbol.name}, {blocks})" for symbol, blocks in operation.draws)
                aligned = f", aligned=[{', '.join(operation.aligned)}]" if operation.aligned else ""
                even = ", ".join(f"({index}, {divisor})" for index, divisor in operation.multiples)
                even = f", multiples=[{even}]" if even else ""
                return [], f"random_state({str(operation.device)!r}, {operation.seed.name}, [{draws}]{aligned}{even})"
            case Item():
                return [], f"{operation.symbol.name} = item({operation.source})"
            case Bind():
                return [], f"{operation.symbol.name} = bind({operation.buffer}, {operation.query!r}, {operation.axis})"
            case Assert():
                said = repr(operation.message)
                if operation.error is not RuntimeError:
                    said = f"{operation.error.__name__}({said})"
                return [], f"assert {self.values.value(operation.condition)}, {said}"
        return self.control_flow(operation)

    def control_flow(self, operation: Operation) -> tuple[list[str], str]:
        match operation:
            case If():
                before, (then, otherwise) = self.functions(operation.then, operation.otherwise)
                said = operation.predicate
                return before, f"branch({said}, {then}, {otherwise}, {self.operands(operation)})"
            case While():
                before, (condition, body) = self.functions(operation.condition, operation.body)
                carried = ", ".join(argument_text(item, self.values) for item in operation.carried)
                constants = ", ".join(argument_text(item, self.values) for item in operation.constants)
                results = f"results=[{results_text(operation.results)}]{flags_text(stacked=operation.stacked)}"
                return before, f"loop({condition}, {body}, [{carried}], [{constants}], {results})"
            case Invoke():
                before, (body,) = self.functions(operation.body)
                return before, f"invoke({body}, {self.operands(operation)})"
        raise TypeError(f"no text for {type(operation).__name__}")

    def operands(self, operation: If | Invoke) -> str:
        operands = ", ".join(argument_text(item, self.values) for item in operation.operands)
        return f"[{operands}], results=[{results_text(operation.results)}]"

    def functions(self, *programs: Program) -> tuple[list[str], list[str]]:
        """The lines that define sub-programs not met before, and the names of all."""
        lines: list[str] = []
        for program in programs:
            if id(program) not in self.defs:
                base = program.name if is_name(program.name) else "program"
                choices = itertools.chain([base], (f"{base}_{count}" for count in itertools.count(1)))
                name = next(choice for choice in choices if choice not in self.defs.values())
                self.defs[id(program)] = name
                lines += _ProgramText(program).lines(name)
        return lines, [self.defs[id(program)] for program in programs]

    def call(self, call: Call) -> str:
        operator = (
            f"constant({call.operator.name!r})" if isinstance(call.operator, host.Constant) else repr(call.operator)
        )
        args = ", ".join(argument_text(item, self.values) for item in call.args)
        kwargs = ", ".join(f"{name!r}: {argument_text(item, self.values)}" for name, item in call.kwargs)
        aliases = ", ".join(f"({result}, {buffer})" for result, buffer in call.aliases)
        parts = [
            f"call({operator}, [{args}]",
            f"kwargs={{{kwargs}}}" if kwargs else "",
            f"results=[{results_text(call.results)}]",
            "packed=True" if call.packed else "",
            f"writes=[{', '.join(call.writes)}]" if call.writes else "",
            f"aliases=[{aliases}]" if aliases else "",
            f"effect={call.effect!r}" if call.effect is not None else "",
            f"reason={call.reason!r}" if call.reason else "",
        ]
        return ", ".join(filter(None, parts)) + ")"


# --- pieces -----------------------------------------------------------------------------------------------------------


def block(head: str, body: Sequence[str], note: str) -> list[str]:
    return [f"with {head}:{note}", *(INDENT + line for line in body or ["pass"])]


def axes_text(axes: Sequence[Axis]) -> str:
    return ", ".join(f"{axis.name}={axis.extent}" for axis in axes)


def results_text(results: Sequence[str | Symbol | None]) -> str:
    return ", ".join(item.name if isinstance(item, Symbol) else str(item) for item in results)


def flags_text(**flags: bool) -> str:
    return "".join(f", {name}=True" for name, value in flags.items() if value)


def buffer_text(buffer: Buffer) -> str:
    parts = [
        f"{buffer.kind}({short(buffer.dtype)}, [{', '.join(map(str, buffer.sizes))}]",
        f"strides=[{', '.join(map(str, buffer.strides))}]",
        "" if buffer.offset.text == "0" else f"offset={buffer.offset}",
        "" if str(buffer.device) == "cpu" else f"device={str(buffer.device)!r}",
        "" if buffer.base is None else f"base={buffer.base}",
    ]
    return ", ".join(filter(None, parts)) + ")"


def comment(origin: Origin) -> str:
    """Where an operation comes from, behind its first line."""
    nodes = f"({', '.join(origin.nodes)})" if origin.nodes else ""
    text = "  ".join(filter(None, [str(origin.line) if origin.line else "", nodes]))
    return f"  # {' '.join(text.splitlines())}" if text else ""


def is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def input_names(program: Program) -> list[str]:
    return [item if isinstance(item, str) else item.name for item in program.inputs]


def symbols_of(program: Program) -> list[Symbol]:
    """Every symbol of a program, in the order of first use."""
    found: dict[Symbol, None] = {}
    for group in _symbol_groups(program):
        found.update(dict.fromkeys(sorted(group, key=lambda symbol: symbol.name)))
    return list(found)


def _symbol_groups(program: Program) -> Iterator[list[Symbol]]:
    for item in program.inputs:
        yield [item] if isinstance(item, Symbol) else []
    for buffer in program.buffers:
        for index in (*buffer.sizes, *buffer.strides, buffer.offset):
            yield [atom for atom in index.atoms if isinstance(atom, Symbol)]
    for operation in program.operations:
        yield [*symbols(operation), *defines(operation)]
    for output in program.outputs:
        yield list(symbols(returning(output)))
