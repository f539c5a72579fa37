"""Calls: operators that run in eager, and operators that torch takes apart for us."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ferrite.capture import torch_api, torch_operators
from ferrite.errors import NotLowered, Refusal
from ferrite.ir import SHORT, Expr
from ferrite.ir.index import ZERO, Index, Number, Symbol
from ferrite.ir.program import Buffer, Call, CallArgument, Constant, Literal, Ref, Scalar, Size, Template
from ferrite.ir.program import arguments as host
from ferrite.lower.arguments import literal_text
from ferrite.lower.assertions import bind_sizes
from ferrite.lower.context import Context
from ferrite.lower.effects import effect_of, writes_in_graphs
from ferrite.lower.scalars import on_the_host, read
from ferrite.lower.table import COMPOSED, template_kind
from ferrite.lower.value import Box, Value, whole

aten = torch.ops.aten


class Calls(Context):
    composing = False
    assumes_sizes = False  # whether the node at hand has sizes that torch only takes for granted

    def apply(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
        raise NotImplementedError

    def before_call(self) -> None:
        """Put into memory what should be there before the next call."""
        raise NotImplementedError

    # --- eager --------------------------------------------------------------------------------------------------------

    def eager_call(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        reason: str,
        effect: str | None = None,
        wrap: Callable[[Call], Any] | None = None,
        written: Sequence[Value] | None = None,
    ) -> Any:
        """One call in eager. What it writes is read by pending values first; what it returns is in memory."""
        name = torch_api.operator_name(target)
        where: str | Constant = name if name is not None else self.object(target, "operator")
        written = self.written_values(target, args, kwargs) if written is None else written
        arguments = tuple(map(self.argument, args))
        keywords = tuple((key, self.argument(value)) for key, value in kwargs.items())
        for value in written:
            storage = self.buffers[self.realise(value.box)].storage
            if self.buffers[self.buffer_of(value, self.picture(value))].storage != storage:
                raise HalfLowered(f"{target} would write to a copy: its operand does not lie as eager has it")
            self.before_write(storage)
        writes = tuple(dict.fromkeys(self.buffers[self.realise(value.box)].name for value in written))
        effect = effect or effect_of(target, args, kwargs)
        results: list[str | Symbol | None] = []
        aliases: list[tuple[str, str]] = []
        values = self.results(target, args, kwargs, out, results, aliases)
        packed = isinstance(out, (tuple, list))
        self.before_call()
        call = Call(
            where, arguments, keywords, tuple(results), packed, writes, tuple(aliases), effect, reason, self.origin
        )
        kind = template_kind(target) if self.unsupported(args, kwargs, out) is None else None
        self.add(wrap(call) if wrap is not None else Template(kind, call) if kind else call)  # type: ignore[arg-type]
        for result, fake in zip(results, flat(out), strict=True):
            if isinstance(result, str) and isinstance(fake, torch.Tensor):
                trusted = torch_operators.sizes_follow(target) and not self.assumes_sizes
                bind_sizes(self, result, fake, name or str(target), trusted)
        return values

    def results(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        names: list[str | Symbol | None],
        aliases: list[tuple[str, str]],
    ) -> Any:
        """Values for what a call returns; fills in their names and what memory they share."""
        shared = self.shared_values(target, args, kwargs)

        def made(fake: Any, place: int, owner: Any = None) -> Any:
            if isinstance(fake, (tuple, list)):
                if place < len(shared) and isinstance(shared[place], list):  # a list of operands comes back
                    return [made(item, place, owner) for item, owner in zip(fake, shared[place], strict=True)]
                return [made(item, place if len(shared) == 1 else number) for number, item in enumerate(fake)]
            owner = owner or (shared[place] if place < len(shared) else None)
            owner = owner if isinstance(owner, Value) else None
            if isinstance(fake, torch.Tensor):
                value = self.result(fake, owner)
                assert value.box.buffer is not None
                names.append(value.box.buffer)
                if owner is not None:
                    aliases.append((value.box.buffer, self.buffers[self.realise(owner.box)].storage))
                return value
            if isinstance(fake, torch.SymInt) and isinstance(index := self.sizes.index(fake), Symbol):
                self.bound.add(index)
                names.append(index)
                return index
            names.append(None)
            return fake

        return made(out, 0)

    def result(self, fake: torch.Tensor, owner: Value | None) -> Value:
        """A value for what a call returns: memory of its own, or a window on that of its owner."""
        name = f"buf{len(self.buffers)}"
        if fake.layout is not torch.strided:
            return self.foreign(name, fake)
        box = Box(self.shape(fake), fake.dtype, fake.device, buffer=name)
        kind: str = "owned"
        base: str | None = None
        offset: Index = ZERO
        if owner is not None:
            kind, base, offset = "view", self.buffers[self.realise(owner.box)].storage, self.offset_in(owner, fake)
        strides = self.sizes.indices(fake.stride())
        self.buffers[name] = Buffer(name, fake.dtype, box.sizes, strides, offset, fake.device, kind, base)  # type: ignore[arg-type]
        return Value(box, box.sizes, whole(box).coordinates, fake)

    def foreign(self, name: str, fake: torch.Tensor) -> Value:
        """A tensor that only calls understand: it has elements, but none that lie somewhere."""
        box = Box(self.shape(fake), fake.dtype, fake.device, buffer=name)
        self.buffers[name] = Buffer(name, fake.dtype, (), (), ZERO, fake.device, "foreign")
        return Value(box, box.sizes, whole(box).coordinates, fake)

    def offset_in(self, owner: Value, fake: torch.Tensor) -> Index:
        """Where a view that a call returns begins in its owner's storage: as far from it as in torch's picture."""
        found = self.strided(owner)
        if found is None or owner.fake is None:
            return ZERO
        apart = found[1] - self.sizes.index(owner.fake.storage_offset())
        return self.sizes.index(fake.storage_offset()) + apart * owner.dtype.itemsize // fake.dtype.itemsize

    def written_values(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Value]:
        if writes_in_graphs(args, kwargs):  # which of its operands, only the graphs could tell
            return [leaf for leaf in flat((list(args), dict(kwargs))) if isinstance(leaf, Value)]
        names = torch_operators.written_arguments(target)
        if not names:
            return []
        bound = torch_operators.bound_arguments(target, tuple(args), kwargs)
        return [value for name in names for value in flat(bound[name]) if isinstance(value, Value)]

    def shared_values(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """For each result the value whose memory it shares, a list of them where the result is one, or None."""
        names = torch_operators.shared_arguments(target)
        if not any(names):
            return []
        bound = torch_operators.bound_arguments(target, tuple(args), kwargs)
        found = [bound[name] if name is not None else None for name in names]
        return [list(value) if isinstance(value, (list, tuple)) else value for value in found]

    def argument(self, value: Any) -> CallArgument:
        """A value as an argument of a call: tensors in memory, as eager would have them."""
        match value:
            case Value():
                return Ref(self.buffer_of(value, self.picture(value)))
            case Number():
                return Literal(str(value.value))
            case Index():
                return Size(value)
            case Expr():
                return Scalar(on_the_host(self, value))
            case Constant():
                return value
            case torch.SymInt():
                return self.argument(self.sizes.index(value))
            case torch.SymFloat() | torch.SymBool():
                return Scalar(on_the_host(self, read(self, value)))
            case list() | tuple():
                items = tuple(map(self.argument, value))
                return host.Sequence("list" if isinstance(value, list) else "tuple", items)  # type: ignore[arg-type]
            case dict():
                pairs = tuple((literal_text(key) or repr(key), self.argument(item)) for key, item in value.items())
                return host.Mapping(pairs)  # type: ignore[arg-type]
        text = literal_text(value)
        return Literal(text) if text is not None else self.object(value, type(value).__name__)

    def picture(self, value: Value) -> torch.Tensor | None:
        """Eager's strides for an argument, where they are known: calls may depend on them."""
        fake = value.fake
        return fake if fake is not None and fake.layout is torch.strided else None

    def object(self, value: Any, hint: str) -> Constant:
        for name, known in self.objects.items():
            if known is value:
                return Constant(name)
        name = f"object{len(self.objects)}_{hint}" if hint.isidentifier() else f"object{len(self.objects)}"
        self.objects[name] = value
        return Constant(name)

    def constant(self, tensor: torch.Tensor) -> Value:
        """A real tensor that a decomposition made: a number, or a constant of the program."""
        sizes = self.sizes.indices(tensor.shape)
        if not sizes:
            return self.fill((), torch_operators.number_in(tensor), tensor.dtype, tensor.device)
        name = self.object(tensor, "tensor").name
        box = Box(sizes, tensor.dtype, tensor.device, buffer=name)
        strides = self.sizes.indices(tensor.stride())
        self.buffers[name] = Buffer(name, tensor.dtype, sizes, strides, ZERO, tensor.device, "constant")
        return whole(box)

    # --- composing ----------------------------------------------------------------------------------------------------

    def unsupported(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Refusal | None:
        """Why no loop can be made of this call, whatever the operator."""
        fakes = [value.fake for value in flat((args, list(kwargs.values()))) if isinstance(value, Value)]
        for fake in (*fakes, *flat(out)):
            if not isinstance(fake, torch.Tensor):
                continue
            if fake.layout is not torch.strided:
                return Refusal(f"a tensor of layout {str(fake.layout).removeprefix('torch.')}")
            if fake.dtype not in SHORT:
                return Refusal(f"elements of type {fake.dtype}")
            if fake.is_quantized or fake.is_mkldnn:
                return Refusal("an opaque tensor")
        return None

    def compose(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
        """Run torch's decomposition on pictures of the tensors, lowering every operator it calls."""
        function = COMPOSED.get(target) or torch_operators.decomposition(target)
        if function is None:
            raise NotLowered("torch has no decomposition of it")
        seen = Seen(self.numbers)
        fake_args, fake_kwargs = seen.pictured(args), seen.pictured(dict(kwargs))
        mode = self.mode_of([*flat((fake_args, list(fake_kwargs.values()))), *flat(out)])
        try:
            with torch.no_grad(), self.deciding_nothing(mode), mode, Watch(self, seen):
                result = function(*fake_args, **fake_kwargs)
        except (NotLowered, HalfLowered):
            raise
        except Exception as problem:
            raise NotLowered(f"its decomposition fails: {first_line(problem)}") from problem
        if result is NotImplemented:
            raise NotLowered("its decomposition does not cover this case")
        return seen.values_of(result)

    def deciding_nothing(self, mode: Any) -> AbstractContextManager[None]:
        """While a decomposition runs, nothing is decided about sizes; one inside another is in force already."""
        return nullcontext() if self.composing else self.composition(mode)

    @contextmanager
    def composition(self, mode: Any) -> Iterator[None]:
        self.composing = True
        try:
            with torch_api.deciding_nothing(mode):
                yield
        finally:
            self.composing = False

    def mode_of(self, fakes: Sequence[Any]) -> Any:
        """The fake mode that pictures belong to."""
        modes = (getattr(fake, "fake_mode", None) for fake in fakes)
        found = next((mode for mode in modes if mode is not None), None)
        if found is None:
            raise NotLowered("no tensor to work on")
        return found


class HalfLowered(Exception):
    """A lowering gave up after it had written to memory: a bug of that lowering."""


class Seen:
    """Which value each picture of a tensor stands for."""

    def __init__(self, numbers: Mapping[Expr, Any]) -> None:
        self.numbers = numbers
        self.values: dict[int, tuple[torch.Tensor, Value]] = {}

    def pictured(self, tree: Any) -> Any:
        if isinstance(tree, Value):
            if tree.fake is None:
                raise NotLowered("an operand without a picture")
            fake = tree.fake.detach() if id(tree.fake) in self.values else tree.fake
            self.values[id(fake)] = (fake, tree)
            return fake
        if isinstance(tree, (list, tuple)):
            return type(tree)(map(self.pictured, tree))
        if isinstance(tree, dict):
            return {key: self.pictured(value) for key, value in tree.items()}
        if isinstance(tree, Index):
            if isinstance(tree, Number):
                return tree.value
            raise NotLowered("a size that came out of an expression")
        if isinstance(tree, Expr):
            if tree not in self.numbers:
                raise NotLowered("a number that is known only when it runs")
            return self.numbers[tree]
        return tree

    def values_of(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            found = self.values.get(id(tree))
            if found is None:
                raise NotLowered("its decomposition makes a tensor of its own")
            return found[1]
        if isinstance(tree, (list, tuple)):
            return [self.values_of(item) for item in tree]
        return tree

    def remember(self, fakes: Any, values: Any) -> None:
        if isinstance(fakes, torch.Tensor) and isinstance(values, Value):
            self.values[id(fakes)] = (fakes, values)
        elif isinstance(fakes, (list, tuple)) and isinstance(values, (list, tuple)):
            for fake, value in zip(fakes, values, strict=True):
                self.remember(fake, value)


class Watch(torch_api.DispatchMode):
    """Sees the operators a decomposition calls on pictures, and lowers each."""

    def __init__(self, calls: Calls, seen: Seen) -> None:
        super().__init__()
        self.calls, self.seen = calls, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in IGNORED:
            return out
        values = self.calls.apply(func, self.read(args), self.read(kwargs), out)
        self.seen.remember(out, values)
        return out

    def read(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: self.read(value) for key, value in tree.items()}
        if isinstance(tree, tuple):
            return tuple(map(self.read, tree))
        if isinstance(tree, list):
            return [self.read(item) for item in tree]
        if not isinstance(tree, torch.Tensor):
            return tree
        if id(tree) not in self.seen.values and not torch_api.is_fake(tree):
            return self.calls.constant(tree)
        return self.seen.values_of(tree)


# Questions about a tensor, not computations.
IGNORED = frozenset(
    {
        aten.sym_size.int,
        aten.sym_stride.int,
        aten.sym_numel.default,
        aten.sym_storage_offset.default,
        aten.is_same_size.default,
        torch.ops.prim.device.default,
    }
)


def flat(tree: Any) -> list[Any]:
    if isinstance(tree, (tuple, list)):
        return [leaf for item in tree for leaf in flat(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in flat(item)]
    return [tree]


def first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"[:160]
