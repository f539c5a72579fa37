"""The builder of a program: what it has so far, and the few ways to add to it.

Every lowering is `f(ctx, *args)`, where `ctx` is the builder: tensors arrive as `Value`, sizes as `Index` or int,
everything else as it is. It returns values, and nothing is computed until something needs memory. `ctx.out` is torch's
fake value of the result.

What can be made of these few ways are functions over a builder, by idea: `memory` (where values lie), `loops`
(reductions, scans, sorts), `stores` (writing to memory that is there already), `scalars` (numbers), `assertions`,
`arguments` and `calls` (operators that run in eager), `apply` (any call of a graph), `bodies` (graphs inside a graph).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from typing import Any, Literal

import torch

from ferrite.ir import ZERO, Axis, Expr, Index, Symbol, as_index, cast, const, contiguous_strides, index_value
from ferrite.ir.program import NOWHERE, Buffer, Compute, Operation, Origin, Store, has_effect
from ferrite.lower.materialise import SinceCall
from ferrite.lower.sizes import Sizes
from ferrite.lower.value import Box, Value, broadcast_place, own_axes, whole

CPU = frozenset({"cpu"})
# How many threads a kernel of torch that draws random numbers has at most on a GPU; None where that is not known, or
# where it does not draw as expected. Kernels are of two kinds, which differ in who draws what.
DrawingKernel = Literal["dropout", "distribution"]
RandomThreads = Callable[[torch.device, DrawingKernel], int | None]


def no_threads(device: torch.device, kernel: DrawingKernel) -> None:
    """What is drawn is left to torch."""


class Builder:
    """The program of one graph so far.

    `kernels_on`: types of devices that kernels can be made for. `random_threads`: of GPUs whose kernels can make
    eager's random numbers (see `cuda_random`). `outer`: the builder of the graph that this one is a part of;
    sizes, objects and bodies are the same for both. `attention_on`: types of devices on which attention is a kernel.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        kernels_on: Container[str] = CPU,
        outer: Builder | None = None,
        random_threads: RandomThreads = no_threads,
        attention_on: Container[str] = (),
    ) -> None:
        self.kernels_on = kernels_on
        self.attention_on: Container[str] = attention_on if outer is None else outer.attention_on
        self.random_threads = random_threads
        self.sizes: Sizes = Sizes() if outer is None else outer.sizes
        self.objects: dict[str, Any] = {} if outer is None else outer.objects
        self.bodies: dict[tuple[Any, ...], Any] = {} if outer is None else outer.bodies  # see `bodies.body_of`
        # the program
        self.buffers: dict[str, Buffer] = {}
        self.operations: list[Operation] = []
        self.computed: list[tuple[str, Expr]] = []  # values as they were lowered, by the node that they are of
        self.random_state: int | None = None  # the place of a `RandomState` that nothing else with an effect came after
        # what is known of numbers
        self.symbols: dict[str, Expr] = {}  # numbers that are no index, by the names torch has for them
        self.numbers: dict[Expr, Any] = {}  # and torch's fake value of such a number
        self.bound: set[Symbol] = set()  # symbols that have their values by now
        self.given: set[Symbol] = set()  # those that are inputs
        self.asserted: set[Expr] = set()  # conditions on them that hold by now
        # what is still open
        self.pending: dict[Box, None] = {}  # boxes whose expressions read memory that may still be written
        self.since_call = SinceCall(graph)
        self.pending_collectives: list[Any] = []  # collectives that nobody has waited for
        # the node at hand
        self.node: torch.fx.Node | None = None
        self.position = 0  # of the node in its graph
        self.origin: Origin = NOWHERE
        self.assumes_sizes = False  # whether the node has sizes that torch only takes for granted
        # the call at hand, which may be a part of the node's
        self.out: Any = None
        self.operator: Any = None
        self.composing = False  # whether a decomposition is running
        self.because = ""  # of one, why it is: a reason for the calls in it

    # --- numbers ------------------------------------------------------------------------------------------------------

    def index(self, value: Index | int | torch.SymInt) -> Index:
        return value if isinstance(value, Index) else self.sizes.index(value)

    def shape(self, fake: torch.Tensor) -> tuple[Index, ...]:
        return self.sizes.indices(fake.shape)

    # --- the call at hand ---------------------------------------------------------------------------------------------

    @property
    def out_sizes(self) -> tuple[Index, ...]:
        """The sizes torch gives the (first) result."""
        fake = self.out[0] if isinstance(self.out, (tuple, list)) else self.out
        return self.shape(fake)

    @property
    def out_dtype(self) -> torch.dtype:
        fake = self.out[0] if isinstance(self.out, (tuple, list)) else self.out
        dtype: torch.dtype = fake.dtype
        return dtype

    def is_used(self, number: int) -> bool:
        """Whether anything reads this one of several results; yes, where that is not known."""
        node = self.node
        if node is None or node.target is not self.operator:  # inside something that was taken apart
            return True
        return any(user.target is not operator.getitem or user.args[1] == number for user in node.users)

    # --- values -------------------------------------------------------------------------------------------------------

    def lazy(self, sizes: Sequence[Index | int], expr: Expr, device: torch.device) -> Value:
        """A tensor whose elements are an expression over its own axes; computed where it is used."""
        box = Box(tuple(map(as_index, sizes)), expr.dtype, device, expr=expr, origins=(self.origin,))
        if expr.loads:
            self.pending[box] = None
        return whole(box)

    def elements(self, value: Value | Index | Expr | bool | int | float | complex, sizes: Sequence[Index]) -> Expr:
        """The element of a value, broadcast to sizes, over the axes of those sizes. Numbers become constants."""
        if isinstance(value, Value):
            return value.at(broadcast_place(value.sizes, sizes))
        if isinstance(value, Expr):
            return value
        if isinstance(value, Index):
            return index_value(value)
        kind = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}[type(value)]
        return const(value, kind)

    def fill(
        self,
        sizes: Sequence[Index | int],
        value: bool | int | float | complex,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Value:
        return self.lazy(sizes, const(value, dtype), device)

    def convert(self, value: Value, dtype: torch.dtype) -> Value:
        if value.dtype == dtype:
            return value
        return self.lazy(value.sizes, cast(self.elements(value, value.sizes), dtype), value.device)

    # --- operations and memory ----------------------------------------------------------------------------------------

    def add(self, operation: Operation) -> None:
        self.operations.append(operation)
        if has_effect(operation):
            self.random_state = None

    def new_buffer(self, box: Box, strides: Sequence[Index] | None = None, kind: Any = "owned", name: str = "") -> str:
        name = name or f"buf{len(self.buffers)}"
        strides = tuple(strides) if strides is not None else contiguous_strides(box.sizes)
        self.buffers[name] = Buffer(name, box.dtype, box.sizes, strides, ZERO, box.device, kind)
        return name

    def new_view(
        self, base: Buffer, dtype: torch.dtype, sizes: Sequence[Index], strides: Sequence[Index], offset: Index
    ) -> str:
        """A view of a buffer's storage."""
        name = f"view{len(self.buffers)}"
        new = Buffer(name, dtype, tuple(sizes), tuple(strides), offset, base.device, "view", base.storage)
        self.buffers[name] = new
        return name

    def realise(self, box: Box) -> str:
        """Put a pending box into memory, where eager would have it."""
        if box.buffer is not None and box.expr is None:
            return box.buffer
        assert box.expr is not None
        box.buffer = self.new_buffer(box, box.strides)
        axes = own_axes(box.sizes)
        origin = next((origin for origin in box.origins if origin is not NOWHERE), self.origin)
        loops = tuple(axis for axis in axes if isinstance(axis, Axis))
        self.add(Compute(loops, (Store(box.buffer, axes, box.expr),), origin))
        box.expr = None
        self.pending.pop(box, None)
        return box.buffer

    def before_write(self, storage: str) -> None:
        """Pending values that read this storage read it now, before it changes."""
        for box in list(self.pending):
            if box.expr is not None and any(self.buffers[name].storage == storage for name in box.expr.loads):
                self.realise(box)

    def before_call(self) -> None:
        """Put into memory what should be there before the next call."""
        for box in self.since_call.to_memory(self.position):
            self.realise(box)
