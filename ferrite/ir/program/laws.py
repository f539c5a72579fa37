"""The laws of a program; a program that breaks one is a bug of the stage that made it.

P1   names are identifiers and name one thing: buffer, symbol, object, or axis of an operation
P2   inputs that are buffers, and only they, are of kind input or donated (a foreign one may be either)
P3   what is read or written is a buffer of the program; coordinates are as many as it has dimensions
P4   what is read was given, or written before; so are the outputs. A sub-program may be given memory that it fills
P5   a symbol is defined once, and before it is used: by an input, or by an operation
P6   an expression uses the axes of its operation; results of a reduction only those that are not reduced
P7   a load has the type of its buffer; so has a stored value
P8   operands and results have types that fit the operator; arithmetic on narrow floats is explicit
P9   sizes, strides and offsets are made of symbols and numbers; strides are as many as sizes; no size is negative
P10  a view, and nothing else, has a base; the base is no view; no view reaches outside memory that is ours
P11  a constant is never written
P12  results of a call are memory of their own, and none twice; one that shares memory is a view of it
P13  reductions, scans and sorts are known, and take and give as many values as their kind says
P14  operands fit the inputs of a sub-program, results its outputs; the sub-program keeps the laws
P15  between a collective and its wait, nobody writes what it reads, nor touches what it writes
P16  what is asked of a buffer fits it: one element for an item or predicate, i64 for seeds, equal ends of a copy
P17  parts of attention differ along the axes that they may, scores are added up in 32 or 64 bits, blocks have sides;
     gradients of keys have lists of rows, where there are lists
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Sequence

from ferrite.ir.expr import symbols_in
from ferrite.ir.index.algebra import ZERO, Index, Symbol, never_negative
from ferrite.ir.invalid import InvalidProgram
from ferrite.ir.program import arguments as host
from ferrite.ir.program.nodes import (
    Bind,
    Buffer,
    Call,
    Collective,
    If,
    Invoke,
    Operation,
    Program,
    RandomState,
    Wait,
    While,
    call_of,
)
from ferrite.ir.program.operation_facts import Access, arguments_of, axes_of, defines, reads, returning, symbols, writes
from ferrite.ir.program.operation_laws import check_operation, typed

GIVEN = ("input", "donated")


def verify_program(program: Program) -> Program:
    """The program itself, if it keeps every law. Linear in its size."""
    _Check(program, set()).run()
    return program


class _Check:
    def __init__(self, program: Program, checked: set[int]) -> None:
        self.program = program
        self.checked = checked  # sub-programs that keep the laws, by identity
        self.buffers = {buffer.name: buffer for buffer in program.buffers}
        self.defined_symbols: set[Symbol] = set()
        self.written: set[str] = set()  # storages that hold something
        self.made: set[str] = set()  # results of calls
        self.in_exchange: dict[str, bool] = {}  # storages that a collective uses: whether it writes them

    def run(self) -> None:
        self.names()
        self.inputs()
        for buffer in self.program.buffers:
            self.buffer(buffer)
        for operation in self.program.operations:
            self.operation(operation)
        for output in self.program.outputs:
            self.operation(returning(output))
        if self.in_exchange:
            raise InvalidProgram(
                "P15", f"the program ends before the collective with {', '.join(self.in_exchange)} does"
            )

    # --- names, inputs, buffers ---------------------------------------------------------------------------------------

    def names(self) -> None:
        taken: set[str] = set()
        objects = [item.name for item in self.program.inputs if isinstance(item, host.Constant)]
        for name in (*(buffer.name for buffer in self.program.buffers), *objects):
            check_name(name)
            if name in taken:
                raise InvalidProgram("P1", f"{name} names two things")
            taken.add(name)
        self.taken = taken
        self.by_name: dict[str, Symbol] = {}

    def name_symbol(self, symbol: Symbol) -> None:
        if symbol.name in self.taken or self.by_name.setdefault(symbol.name, symbol) is not symbol:
            raise InvalidProgram("P1", f"{symbol.name} names two things")
        check_name(symbol.name)

    def inputs(self) -> None:
        given: set[str] = set()
        for item in self.program.inputs:
            if isinstance(item, Symbol):
                self.define(item, "the inputs")
            elif isinstance(item, str):
                buffer = self.buffers.get(item)
                if buffer is None or buffer.kind not in (*GIVEN, "foreign") or item in given:
                    raise InvalidProgram(
                        "P2", f"input {item} is {buffer.kind if buffer else 'no buffer'}, or given twice"
                    )
                given.add(item)
        for buffer in self.program.buffers:
            if buffer.kind in GIVEN and buffer.name not in given:
                raise InvalidProgram("P2", f"{buffer.name} is {buffer.kind}, but no input")
            if buffer.kind == "constant":
                given.add(buffer.name)
        self.written |= given

    def define(self, symbol: Symbol, where: str) -> None:
        self.name_symbol(symbol)
        if symbol in self.defined_symbols:
            raise InvalidProgram("P5", f"{symbol} is defined twice, again by {where}")
        self.defined_symbols.add(symbol)

    def buffer(self, buffer: Buffer) -> None:
        if len(buffer.sizes) != len(buffer.strides):
            raise InvalidProgram("P9", f"{buffer.name} has {len(buffer.sizes)} sizes and {len(buffer.strides)} strides")
        for index in (*buffer.sizes, *buffer.strides, buffer.offset):
            for atom in index.atoms:
                if not isinstance(atom, Symbol):
                    raise InvalidProgram("P9", f"{atom} in the layout of {buffer.name}")
                self.name_symbol(atom)
        if any(size.high is not None and size.high < 0 for size in buffer.sizes):
            raise InvalidProgram("P9", f"{buffer.name} has a negative size")
        if (buffer.kind == "view") != (buffer.base is not None):
            raise InvalidProgram("P10", f"{buffer.name} is {buffer.kind}, with base {buffer.base}")
        if buffer.base is not None:
            self.view(buffer, self.buffers.get(buffer.base))

    def view(self, buffer: Buffer, base: Buffer | None) -> None:
        if base is None or base.kind == "view":
            raise InvalidProgram("P10", f"the base of {buffer.name} is {'a view' if base else 'no buffer'}")
        if ZERO in buffer.sizes:
            return
        outside = buffer.offset.high is not None and buffer.offset.high < 0
        if base.kind == "owned":  # how much more memory lies around what a caller gives, nobody says
            end, limit = _bytes(buffer), _bytes(base)
            outside = outside or never_negative(end - limit - 1)
        if outside:
            raise InvalidProgram("P10", f"{buffer.name} reaches outside {base.name}")

    # --- operations ---------------------------------------------------------------------------------------------------

    def operation(self, operation: Operation) -> None:
        word = type(operation).__name__
        self.axes(operation)
        self.symbols_known(symbols(operation), word)
        if isinstance(operation, If | While | Invoke):
            self.sub_programs(operation)
        read, written = reads(operation), writes(operation)
        for access in read:
            self.reads(access, operation)
        for access in written:
            self.writes(access, operation)
        check_operation(operation, self.buffers)
        if isinstance(operation, RandomState):
            asked = {each for index, _ in operation.multiples for each in symbols_in(index)}
            if not asked.issubset(each for each in self.program.inputs if isinstance(each, Symbol)):
                raise InvalidProgram("P16", "what must be a multiple is asked before anything is done, of inputs alone")
        self.collective(operation, read, written)
        call = call_of(operation)
        if call is not None:
            self.call(call)
        for symbol in defines(operation):
            self.define(symbol, word)
        self.written |= {self.buffers[access.buffer].storage for access in written}

    def axes(self, operation: Operation) -> None:
        seen: set[str] = set()
        for axis in axes_of(operation):
            if axis.name in seen or axis.name in self.taken or axis.name in self.by_name:
                raise InvalidProgram("P1", f"{axis} names two things in {type(operation).__name__}")
            check_name(axis.name)
            seen.add(axis.name)

    def symbols_known(self, used: Iterable[Symbol], where: str) -> None:
        for symbol in used:
            self.name_symbol(symbol)
            if symbol not in self.defined_symbols:
                raise InvalidProgram("P5", f"{symbol} is used by {where} before it is defined")

    def found(self, name: str) -> Buffer:
        buffer = self.buffers.get(name)
        if buffer is None:
            raise InvalidProgram("P3", f"{name} is no buffer of the program")
        return buffer

    def reads(self, access: Access, operation: Operation) -> None:
        buffer = self.accessed(access)
        if buffer.storage not in self.written:
            raise InvalidProgram("P4", f"{buffer.name} is read by {type(operation).__name__} before it is written")
        if not isinstance(operation, Bind):  # it asks for what defines the symbols
            self.layout_known(buffer)

    def writes(self, access: Access, operation: Operation) -> None:
        buffer = self.accessed(access)
        if self.found(buffer.storage).kind == "constant":
            raise InvalidProgram("P11", f"{buffer.name} is a constant, and {type(operation).__name__} writes it")
        if access.coordinates is not None:
            self.layout_known(buffer)

    def accessed(self, access: Access) -> Buffer:
        buffer = self.found(access.buffer)
        if access.coordinates is not None and len(access.coordinates) != len(buffer.sizes):
            counts = f"{len(access.coordinates)} coordinates, but {len(buffer.sizes)} dimensions"
            raise InvalidProgram("P3", f"{counts} in {buffer.name}")
        return buffer

    def layout_known(self, buffer: Buffer) -> None:
        """What a call returns may have sizes that are asked for afterwards; whoever uses it needs them."""
        for index in (*buffer.sizes, *buffer.strides, buffer.offset):
            self.symbols_known(symbols_in(index), f"the layout of {buffer.name}")

    def call(self, call: Call) -> None:
        for name in call.results:
            if not isinstance(name, str):
                continue
            self.result(name)
        for result, buffer in call.aliases:
            made, owner = self.found(result), self.found(buffer)
            foreign = "foreign" in (made.kind, owner.kind)  # only calls know how such memory is laid out
            if not foreign and made.storage != owner.storage:
                raise InvalidProgram("P12", f"{result} shares the memory of {buffer}, but is no view of it")
            if result not in call.results:
                raise InvalidProgram("P12", f"{result} is no result of {call.operator}")

    def result(self, name: str) -> None:
        if self.found(name).kind in (*GIVEN, "constant") or name in self.made:
            raise InvalidProgram("P12", f"{name} is a result, and already something else")
        self.made.add(name)

    def collective(self, operation: Operation, read: Sequence[Access], written: Sequence[Access]) -> None:
        touched = {self.buffers[access.buffer].storage: False for access in read}
        touched |= {self.buffers[access.buffer].storage: True for access in written}
        if isinstance(operation, Wait):
            for name in operation.holds:
                if self.in_exchange.pop(self.found(name).storage, None) is None:
                    raise InvalidProgram("P15", f"{name} is waited for, but no collective uses it")
            touched = {}
        for name, writing in touched.items():
            if name in self.in_exchange and (writing or self.in_exchange[name]):
                raise InvalidProgram("P15", f"{type(operation).__name__} touches {name} before the collective is done")
        if isinstance(operation, Collective):
            self.in_exchange |= touched

    # --- sub-programs -------------------------------------------------------------------------------------------------

    def sub_programs(self, operation: If | While | Invoke) -> None:
        operands = arguments_of(operation)
        match operation:
            case If():
                bodies = [operation.then, operation.otherwise]
            case While():
                self.inner(operation.condition, operands)
                if len(operation.condition.outputs) != 1:
                    raise InvalidProgram("P14", "the condition of a While has one output")
                if len(operation.body.outputs) != len(operation.carried):
                    raise InvalidProgram("P14", "the body of a While gives as many values as are carried")
                bodies = [operation.body]
            case Invoke():
                bodies = [operation.body]
        for body in bodies:
            self.inner(body, operands)
            if len(operation.results) != len(body.outputs):
                raise InvalidProgram(
                    "P14", f"{len(operation.results)} results from {len(body.outputs)} outputs of {body.name}"
                )
            for result, output in zip(operation.results, body.outputs, strict=True):
                if isinstance(result, Symbol) != isinstance(output, Index) and result is not None:
                    raise InvalidProgram("P14", f"{result} does not fit an output of {body.name}")
        for name in operation.results:
            if isinstance(name, str):
                self.result(name)

    def inner(self, body: Program, operands: Sequence[object]) -> None:
        if len(operands) != len(body.inputs):
            raise InvalidProgram("P14", f"{len(operands)} operands for {len(body.inputs)} inputs of {body.name}")
        buffers = {buffer.name: buffer for buffer in body.buffers}
        for operand, item in zip(operands, body.inputs, strict=True):
            if isinstance(item, host.Constant):
                continue
            if isinstance(item, str) != isinstance(operand, host.Ref):
                raise InvalidProgram("P14", f"operand {operand} does not fit input {item} of {body.name}")
            if isinstance(operand, host.Ref) and isinstance(item, str) and item in buffers:
                given, wanted = self.found(operand.name), buffers[item]
                if (given.dtype, len(given.sizes)) != (wanted.dtype, len(wanted.sizes)):
                    raise InvalidProgram("P14", f"operand {typed(given)}, but input {typed(wanted)}")
        if id(body) not in self.checked:
            _Check(body, self.checked).run()
            self.checked.add(id(body))


def check_name(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or name == "_":
        raise InvalidProgram("P1", f"{name!r} is no identifier")


def _bytes(buffer: Buffer) -> Index:
    """How many bytes from the start of its storage a buffer reaches, where it has elements at all."""
    end = buffer.offset + 1
    for size, stride in zip(buffer.sizes, buffer.strides, strict=True):
        end = end + (size - 1) * stride
    return end * buffer.dtype.itemsize
