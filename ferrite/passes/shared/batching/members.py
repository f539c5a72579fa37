"""Which calls can be made as one: what must be equal among them, and why a call is no candidate."""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import Aliases, GradientFlow, Regions, fake_value, mutates, stream_of
from ferrite.rewrite import arguments_of, reads_memory

# Why a call with these arguments, and these values of its operands, is no member.
Problem = Callable[[Mapping[str, Any], tuple[torch.Tensor, ...]], Refusal | None]
# Of a graph: what a node that is a member shares with its like, or why it is none.
Kinship = Callable[[torch.fx.Graph], Callable[[torch.fx.Node], Hashable | Refusal]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a fusion may be told.

    `same_parent` and `same_users` let only those calls be members whose first operands, whose users are calls of the
    same operators. `broadcast_bias` spells out how a bias spreads. `external_lib` asks for a fusion only where the
    kernel library is installed.
    """

    depth: int = 5
    min_members: int = 5
    max_members: int = 300
    same_parent: bool = False
    same_users: bool = False
    broadcast_bias: bool = False
    external_lib: bool = False


Place = tuple[torch.device, int | None, str, bool]  # device, region, stream, and whether it requires a gradient


class Look(NamedTuple):
    """What must be equal among members; the names are those of what two calls can differ in."""

    operator: Any
    device: torch.device
    region: int | None
    stream: str
    gradient: bool
    shared: tuple[Hashable, ...]
    dtypes: tuple[tuple[str, torch.dtype], ...]
    shapes: tuple[Hashable, ...]
    arguments: tuple[tuple[str, type, str], ...]
    parent: Hashable
    users: Hashable


class Membership(Protocol):
    """What a fusion says of its members: see `ferrite.passes.shared.batching.search.Fusion`."""

    @property
    def name(self) -> str: ...
    @property
    def operands(self) -> Mapping[Any, tuple[str, ...]]: ...
    @property
    def problem(self) -> Problem: ...
    @property
    def optional(self) -> tuple[str, ...]: ...
    @property
    def shared(self) -> tuple[str, ...]: ...
    @property
    def free(self) -> tuple[str, ...]: ...
    @property
    def kinship(self) -> Kinship | None: ...
    @property
    def before_autograd(self) -> bool: ...
    @property
    def copies_returned(self) -> bool: ...


class Members:
    """The candidates of one fusion in one graph. `keys` has the look of each that may be fused, `alone` that of those
    which have too few like them; `refused` has why a call of the same operators is no candidate. `returned` has those
    whose memory the caller gets."""

    def __init__(self, graph: torch.fx.Graph, settings: Settings, fusion: Membership, *, is_inference: bool) -> None:
        self.settings, self.fusion = settings, fusion
        self.aliases, self.regions = Aliases(graph), Regions(graph)
        self.gradients = GradientFlow(graph, not is_inference) if fusion.before_autograd else None
        writers = (node for node in graph.nodes if mutates(node)) if fusion.before_autograd else ()
        operands = (self.aliases.of(operand) for node in writers for operand in node.all_input_nodes)
        self.written = frozenset().union(*operands)
        self.returned: set[torch.fx.Node] = set()
        self.kin = fusion.kinship(graph) if fusion.kinship is not None else None
        found = {node: self.look_of(node) for node in graph.nodes if node.target in fusion.operands}
        self.refused = {node: look for node, look in found.items() if isinstance(look, Refusal)}
        looks = {node: look for node, look in found.items() if not isinstance(look, Refusal)}
        self.sizes = collections.Counter(looks.values())
        self.keys = {node: look for node, look in looks.items() if self.sizes[look] >= settings.min_members}
        self.alone = {node: look for node, look in looks.items() if node not in self.keys}

    def look_of(self, node: torch.fx.Node) -> Look | Refusal:
        arguments, result, wanted = arguments_of(node), fake_value(node), self.fusion.operands[node.target]
        if is_fused(node, self.fusion.name):
            return Refusal("it is the result of a fusion")
        given = {name: fake_value(item) for name, item in arguments.items() if isinstance(item, torch.fx.Node)}
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        if not isinstance(result, torch.Tensor) or not tensors.keys() >= set(wanted):
            return Refusal("an operand is no tensor, or has no metadata")
        everything = (result, *tensors.values())
        if any((value.device, value.layout) != (result.device, torch.strided) for value in everything):
            return Refusal("it is not all strided and on one device")
        problem = (
            self.memory_problem(node)
            or self.gradient_problem(node, everything)
            or self.fusion.problem(arguments, tuple(tensors[name] for name in wanted))
        )
        if problem is not None:
            return problem
        place = (result.device, self.regions.of(node), str(stream_of(node)), self.needs_gradient(node))
        if self.kin is None:
            return self.look(node, arguments, tensors, place)
        kin = self.kin(node)
        return kin if isinstance(kin, Refusal) else Look(self.fusion.name, *place, (kin,), (), (), (), None, None)

    def needs_gradient(self, node: torch.fx.Node) -> bool:
        return self.gradients is not None and node in self.gradients.required

    def look(self, node: torch.fx.Node, arguments: Mapping[str, Any], tensors: Mapping[str, Any], place: Place) -> Look:
        shared, free = self.fusion.shared, self.fusion.free
        stacked = (*self.fusion.operands[node.target], *self.fusion.optional)
        apart = (*shared, *free)
        # The type belongs to it: 1 and 1.0 and True are equal, but promote differently.
        others = ((name, item) for name, item in arguments.items() if name not in tensors and name not in apart)
        return Look(
            node.target,
            *place,
            tuple(identity(arguments[name]) for name in shared),
            tuple((name, value.dtype) for name, value in tensors.items() if name not in free),
            tuple(shape_key(tensors[name]) for name in stacked if name in tensors and name not in apart),
            tuple((name, type(item), str(item)) for name, item in others),
            operator_of(arguments[stacked[0]]) if self.settings.same_parent else None,
            tuple(map(operator_of, node.users)) if self.settings.same_users else None,
        )

    def memory_problem(self, node: torch.fx.Node) -> Refusal | None:
        if not self.aliases.of(node).isdisjoint(self.aliases.output_storages):
            if not self.fusion.copies_returned:
                return Refusal("the caller gets it, and would get its neighbours' memory with it")
            self.returned.add(node)
        if not self.aliases.of(node).isdisjoint(self.written):
            return Refusal("its memory is written to")
        return Refusal("its memory is read as it lies") if any(map(reads_memory, node.users)) else None

    def gradient_problem(self, node: torch.fx.Node, values: tuple[torch.Tensor, ...]) -> Refusal | None:
        if self.gradients is None:
            return None
        if not all(torch_api.is_fake(value) and not value.is_quantized for value in values):
            return Refusal("a tensor has a type of its own")
        if not node.users:
            return Refusal("nobody reads it")
        if node in self.gradients.required and node not in self.gradients.reached:
            return Refusal("no gradient reaches it, but would with the others")
        return None

    def refusals(self) -> Iterator[tuple[torch.fx.Node, Refusal]]:
        yield from self.refused.items()
        refusals = {look: self.too_few(look) for look in set(self.alone.values())}
        yield from ((node, refusals[look]) for node, look in self.alone.items())

    def too_few(self, look: Look) -> Refusal:
        text = f"{self.sizes[look]} calls look like it, {self.settings.min_members} are wanted"
        others = [each for each in self.sizes if each != look]
        if not others:
            return Refusal(text)
        alike = max(others, key=lambda each: sum(map(operator.eq, look, each)))
        (what, *_) = (name for name, mine, its in zip(Look._fields, look, alike, strict=True) if mine != its)
        return Refusal(f"{text}; {self.sizes[alike]} others differ in {what}")


def is_fused(node: torch.fx.Node, name: str) -> bool:
    """Whether a node is of what a fusion made."""
    return bool(node.meta.get("rewritten", ("",))[0] == name)


def shape_key(value: torch.Tensor) -> Hashable:
    """Equal only for shapes that are equal whatever the symbols in them are."""
    return tuple(size if isinstance(size, int) else torch_api.expression(size) for size in value.shape)


def identity(item: Any) -> Hashable:
    """Equal only for one and the same value: a node, or reads of one attribute of the module."""
    if isinstance(item, torch.fx.Node) and item.op == "get_attr":
        return (item.op, item.target)
    return item if isinstance(item, torch.fx.Node) else str(item)


def operator_of(node: torch.fx.Node) -> Hashable:
    return node.target if node.op == "call_function" else node.op
