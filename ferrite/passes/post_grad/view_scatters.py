"""Writing a tensor over a view of another.

    y = slice_scatter(x, s, 0, 1, 3)        =>      copy_(slice(x, 0, 1, 3), s);  y is x

    t = slice_scatter(select(x, 0, 1), s)           written over a view of a view: both at once
    y = select_scatter(x, t, 0, 1)          =>      copy_(slice(select(x, 0, 1)), s);  y is x
    z = t + 1                                       z = select(y, 0, 1) + 1

`ferrite.passes.post_grad.reinplace` decides where x may be overwritten. A diagonal and the like can only be written, so
that they become a write in any case: into a copy of x where x must stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import begins_its_storage
from ferrite.graph import (
    VIEW_SCATTERS,
    Regions,
    argument,
    eager_refuses,
    fake_value,
    input_storages,
    is_elementwise,
    same_metadata,
    schema_of,
    storages_of,
)
from ferrite.passes.post_grad.higher_order import inherit
from ferrite.passes.post_grad.overwriting import MemoryUses, counts_from_the_start, each_element_once, same_but_place
from ferrite.rewrite import Writer

aten = torch.ops.aten
PASS = "reinplace_inplaceable_ops"

ALWAYS_WRITTEN = frozenset({aten.diagonal.default, aten.as_strided.default})


@dataclass(frozen=True)
class View:
    """A view operator with its arguments, but for the tensor."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def of(self, base: torch.fx.Node, writer: Writer) -> torch.fx.Node:
        return writer.call(self.operator, base, *self.args, **self.kwargs)


@dataclass(frozen=True)
class Write:
    """A source is written over the last of some views of a base, each of the one before it."""

    node: torch.fx.Node
    views: tuple[View, ...]
    absorbed: tuple[torch.fx.Node, ...] = ()  # the inner writes that this one does as well, the outermost first

    # Asked of the nodes each time: other writes that are done meanwhile replace arguments.
    @property
    def base(self) -> torch.fx.Node:
        base = self.node.args[0]
        assert isinstance(base, torch.fx.Node)
        return base

    @property
    def source(self) -> Any:
        return (self.node, *self.absorbed)[-1].args[1]

    @property
    def always(self) -> bool:
        """Whether there is no way to do it but by writing."""
        return any(view.operator in ALWAYS_WRITTEN for view in self.views)

    @property
    def reads(self) -> list[Any]:
        """What it reads besides its base."""
        given = (item for view in self.views for item in (*view.args, *view.kwargs.values()))
        return [self.source, *(item for item in given if isinstance(item, torch.fx.Node))]


# --- nested ones become one -------------------------------------------------------------------------------------------


def find_writes(graph: torch.fx.Graph, mode: Any) -> tuple[dict[torch.fx.Node, Write], int]:
    """Each write over views, nested ones as one, by its outermost node; and how many reads of inner results were
    redirected to views of the outer one, which then are the same."""
    writes: dict[torch.fx.Node, Write] = {}
    redirected = 0
    regions = Regions(graph)
    for node in list(graph.nodes):
        if node.target not in VIEW_SCATTERS or len(node.args) < 2 or not isinstance(node.args[0], torch.fx.Node):
            continue
        base, source, *where = node.args
        if refused(node) or counts_elsewhere(node):  # the former raises when it runs
            continue
        view = View(VIEW_SCATTERS[node.target], tuple(where), dict(node.kwargs))
        writes[node] = Write(node, (view,))
        inner = writes.get(source) if isinstance(source, torch.fx.Node) else None
        if inner is None or not is_view_of(inner.base, view, node, base) or not regions.same_region(source, node):
            continue
        moved = redirect(inner.node, node, view, regions, mode)
        if moved is not None:
            redirected += moved
            writes[node] = Write(node, (view, *inner.views), (inner.node, *inner.absorbed))
            del writes[inner.node]
    return writes, redirected


def refused(node: torch.fx.Node) -> bool:
    names = [parameter.name for parameter in schema_of(node.target).arguments[2:]]  # type: ignore[union-attr]
    base, source = (fake_value(each) if isinstance(each, torch.fx.Node) else None for each in node.args[:2])
    if not isinstance(base, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    return eager_refuses(node.target, base.shape, source.shape, [argument(node, name) for name in names])


def counts_elsewhere(node: torch.fx.Node) -> bool:
    """Whether the view that a call writes over need not be the same view of a copy of its base: `as_strided` counts
    places of the storage, of which eager copies all.

        torch.as_strided_scatter(x.sin()[3:], y, (2, 2), (1, 2), 0)  # changes one element of the part
    """
    base = node.args[0]
    if node.target is not aten.as_strided_scatter.default or not isinstance(base, torch.fx.Node):
        return False
    if base.op == "get_attr" or not storages_of(base).isdisjoint(input_storages(node.graph)):
        return True  # where it begins in its storage nobody knows
    return not begins_its_storage(fake_value(base))


def is_view_of(found: torch.fx.Node, view: View, scatter: torch.fx.Node, base: torch.fx.Node) -> bool:
    """Whether a node is the view of `base` that a scatter writes over."""
    if found.target is not view.operator or not found.args or not isinstance(found.args[0], torch.fx.Node):
        return False
    names = [parameter.name for parameter in schema_of(view.operator).arguments[1:]]  # type: ignore[union-attr]
    alike = all(argument(found, name) == argument(scatter, name) for name in names)
    return alike and same_value(found.args[0], base)


def same_value(first: Any, second: Any) -> bool:
    """Whether two nodes are one, or the same views of one."""
    while first is not second:
        if not isinstance(first, torch.fx.Node) or not isinstance(second, torch.fx.Node):
            return False
        if first.target is not second.target or first.target not in VIEW_SCATTERS.values():
            return False
        if first.args[1:] != second.args[1:] or first.kwargs != second.kwargs:
            return False
        first, second = first.args[0], second.args[0]
    return True


def redirect(inner: torch.fx.Node, outer: torch.fx.Node, view: View, regions: Regions, mode: Any) -> int | None:
    """Let all but `outer` that read an inner result read the view of the outer one that it became; how many did. None,
    and nothing changed, where someone could tell the two apart."""
    users = [user for user in inner.users if user is not outer]
    if not users:
        return 0
    for user in users:
        if user < outer or counts_from_the_start(user) or not regions.same_region(user, outer):
            return None
    writer = Writer(inner.graph, mode)
    with inner.graph.inserting_before(min(users)):
        new = view.of(outer, writer)
    if not each_element_once(fake_value(new)) or not same_but_place(fake_value(inner), fake_value(new)):
        writer.take_back()
        return None
    inherit(writer.made, inner, PASS)
    regions.adopt(new, outer)
    for user in users:
        user.replace_input_with(inner, new)
    return len(users)


# --- where it pays ----------------------------------------------------------------------------------------------------


class Materialised:
    """Which values are put into memory whatever happens to a write: those that are not computed element by element
    inside what is around them. Linear to build."""

    def __init__(self, graph: torch.fx.Graph, memory: MemoryUses) -> None:
        self.memory = memory
        self.read_whole: set[torch.fx.Node] = set()  # what reaches a node that needs it in memory
        self.written: set[torch.fx.Node] = set()  # scatters that became writes
        for node in reversed(graph.nodes):
            for operand in node.all_input_nodes:
                transparent = node.target in VIEW_SCATTERS or memory.only_looks(node, operand)
                if node in self.read_whole if transparent else not elementwise(node):
                    self.read_whole.add(operand)

    def pays(self, write: Write) -> bool:
        """Whether a write saves memory traffic, which it does not where the whole is computed element by element."""
        if write.always or self.memory.in_input(write.base):
            return True
        return self.made(write.base) and write.node in self.read_whole

    def made(self, node: torch.fx.Node) -> bool:
        while node.op == "call_function" and node.args and isinstance(node.args[0], torch.fx.Node):
            if not self.memory.only_looks(node, node.args[0]):
                break
            node = node.args[0]
        return node in self.written if node.target in VIEW_SCATTERS else not elementwise(node)


def elementwise(node: torch.fx.Node) -> bool:
    return node.target is aten.copy_.default or is_elementwise(node.target)


# --- writing ----------------------------------------------------------------------------------------------------------


def expand(write: Write, mode: Any, *, in_place: bool) -> bool:
    """Write over the views of the base, or of a copy of it; whether that was possible."""
    graph = write.node.graph
    writer = Writer(graph, mode)
    whole = write.base
    with graph.inserting_before(write.node):
        if not in_place:
            whole = writer.call(aten.clone.default, write.base)
            if not same_metadata(fake_value(whole), fake_value(write.node)):
                writer.take_back()
                return False
        place = whole
        for view in write.views:
            place = view.of(place, writer)
        writer.call(aten.copy_.default, place, write.source)
    inherit(writer.made, write.node, PASS)
    write.node.replace_all_uses_with(whole)
    for node in (write.node, *write.absorbed):
        base: Any = node.args[0]
        graph.erase_node(node)
        erase_dead_views(base)
    return True


def erase_dead_views(node: torch.fx.Node) -> None:
    while not node.users and node.target in VIEW_SCATTERS.values():
        base: Any = node.args[0]
        node.graph.erase_node(node)
        node = base
