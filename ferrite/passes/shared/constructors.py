"""Make constants where they are read: on the accelerator, instead of on the host with a copy on every use.

    c = arange(n, device=cpu)                c = arange(n, device=gpu)
    d = c * 2                         =>     d = c * 2                       # follows its operand
    y = index(x_gpu, [d])                    y = index(x_gpu, [d])

A constructor moves if everything that depends on it may move with it, up to nodes that live on the accelerator anyway.
Constructors that meet in a node move together or not at all. Rank-0 inputs on the host can be treated alike: one copy
for all those of a dtype, at the top of the graph.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ferrite.graph import fake_value

Node = torch.fx.Node

aten, prims = torch.ops.aten, torch.ops.prims
OPERATOR: Any = type(aten.add.Tensor)
INDEX_PUT = {aten.index_put.default, aten.index_put_.default}
# Their kernels take operands on the host for a result on the accelerator.
TAKES_HOST_OPERANDS = {
    aten.index.Tensor,
    *INDEX_PUT,
    aten.copy.default,
    aten.copy_.default,
    aten.slice_scatter.default,
}
# They read the shape of a tensor, not its memory.
ASKS_FOR_SHAPE = {
    aten.sym_size.int,
    aten.sym_stride.int,
    aten.sym_numel.default,
    aten.sym_storage_offset.default,
}
HOST_ONLY = {aten.from_file.default, aten._pin_memory.default}
EXPLICIT_COPIES = {aten._to_copy.default, prims.device_put.default}
MASKS = (torch.bool, torch.uint8)
ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


def move_constructors_to_gpu(
    graph: torch.fx.Graph, target: str | None = None, allow_outputs: bool = False, allow_inputs: bool = False
) -> int:
    """Move what can be moved to the accelerator of this machine, or to devices of type `target`; how many moved."""
    if target is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            return 0
        target = found.type
    return ConstructorMover(target, allow_outputs, allow_inputs)(graph)


@dataclass
class ConstructorMover:
    """Moves constructors on the host to the one device of type `target` that a graph uses.

    `allow_outputs`: values that the graph returns may move; only for a caller who moves them back or hides them.
    `allow_inputs`: rank-0 inputs on the host move too, by a copy at the top.
    `random_in_order`: what draws random numbers stays, since every device has a stream of its own.
    """

    target: str
    allow_outputs: bool = False
    allow_inputs: bool = False
    random_in_order: bool = True

    def __call__(self, graph: torch.fx.Graph) -> int:
        devices = {tensor.device for node in graph.nodes for tensor in tensors_of(fake_value(node))}
        devices = {device for device in devices if device.type == self.target}
        if len(devices) != 1:
            return 0
        (device,) = devices
        constructors = [node for node in graph.nodes if self.is_constructor(node)]
        inputs = [node for node in graph.find_nodes(op="placeholder") if is_cpu_scalar_tensor(node)]
        if not self.allow_inputs:
            inputs = []
        movable = self.find_movable_constructors(graph, constructors, inputs)
        changed = copy_inputs([node for node in inputs if node in movable], device)
        for node in constructors:
            if node in movable:
                node.update_kwarg("device", device)
                changed.append(node)
        refresh(changed)
        return len(movable)

    def is_constructor(self, node: Node) -> bool:
        """Makes one tensor on the host from no tensor, and can be told to make it elsewhere."""
        value = fake_value(node)
        if not is_operator(node) or not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return False
        if value.layout is not torch.strided or value.is_quantized or node.target in HOST_ONLY:
            return False
        if node.kwargs.get("pin_memory") or node.kwargs.get("generator") is not None:
            return False  # pinned memory exists on the host only, and a generator belongs to its device
        if any(tensors_of(fake_value(operand)) for operand in node.all_input_nodes):
            return False
        schema = schema_of(node)
        has_device = any(argument.name == "device" and argument.kwarg_only for argument in schema.arguments)
        return has_device and not schema.is_mutable and not (self.random_in_order and draws_random_numbers(node))

    def is_on_target_device(self, node: Node) -> bool:
        device = get_node_device(node)
        return device is not None and device.type == self.target

    def all_inputs_are_cpu_scalar_or_on_target_device(self, node: Node) -> bool:
        return all(
            (tensor.device.type == "cpu" and tensor.dim() == 0) or tensor.device.type == self.target
            for operand in node.all_input_nodes
            for tensor in tensors_of(fake_value(operand))
        )

    def cannot_be_moved(self, node: Node) -> bool:
        """Whether a node holds its operands on the host, wherever it lives itself."""
        if node.op == "output":
            return not self.allow_outputs
        if node.target is operator.getitem:
            return False
        if not is_operator(node) or node.target in HOST_ONLY or node.kwargs.get("pin_memory"):
            return True
        if self.random_in_order and draws_random_numbers(node):
            return True
        if any(isinstance(a, torch.device) and a.type != self.target for a in (*node.args, *node.kwargs.values())):
            return True  # asks for another device in so many words
        if schema_of(node).is_mutable and not allow_cpu_device(node):
            return True
        return depends_on_data(node) or is_index_put_and_requires_h2d_sync_for_gpu_value(node)

    def find_movable_constructors(
        self, graph: torch.fx.Graph, constructors: list[Node], inputs: list[Node]
    ) -> set[Node]:
        """Those of the candidates that nothing downstream holds on the host. Looks at each edge once."""
        waiting = get_cpu_indeg_count(graph)
        fates = Fates()
        blocked: set[Node] = set()
        read_on_target: set[Node] = set()
        aliases = set(inputs)  # values that share memory with an input
        queue = deque((*constructors, *inputs))
        while queue:
            node = queue.popleft()
            for user in node.users:
                if node.op == "placeholder" and keeps_input(user, node):
                    continue
                if self.cannot_be_moved(user) or (node in aliases and (user.op == "output" or writes_to(user, node))):
                    blocked.add(node)
                    continue
                if user.op == "output" or user.target in ASKS_FOR_SHAPE:
                    continue
                fates.make_dependencies_equivalent(node, user)
                waiting[user] -= 1
                if self.is_on_target_device(user):
                    is_copy = user.target in EXPLICIT_COPIES
                    if self.takes_as_it_is(user):
                        waiting[user] = 0  # the other operands may stay where they are
                    elif not is_copy and not is_cpu_scalar_tensor(node):
                        blocked.add(node)  # not a number beside tensors: an operand that belongs on the host
                    if not is_copy:
                        read_on_target.add(user)
                elif {tensor.device.type for tensor in tensors_of(fake_value(user))} != {"cpu"}:
                    blocked.add(node)  # no tensor, or some here and some there
                elif waiting[user] == 0:
                    queue.append(user)
                if node in aliases and shares_memory(user):
                    aliases.add(user)
        blocked.update(node for node in fates.parent if waiting[node] > 0)
        useful = {fates.root(node) for node in read_on_target}
        blocked.update(node for node in inputs if fates.root(node) not in useful)  # a copy would be all it gains
        lost = {fates.root(node) for node in blocked}
        return {node for node in (*constructors, *inputs) if fates.root(node) not in lost}

    def takes_as_it_is(self, user: Node) -> bool:
        """For a user on the target: whether it does not matter where any of its operands on the host lives."""
        return allow_cpu_device(user) or (
            self.allow_inputs and self.all_inputs_are_cpu_scalar_or_on_target_device(user)
        )


class Fates:
    """Nodes that move together or not at all: union-find."""

    def __init__(self) -> None:
        self.parent: dict[Node, Node] = {}

    def root(self, node: Node) -> Node:
        while (above := self.parent.get(node, node)) is not node:
            self.parent[node] = self.parent.get(above, above)  # halves the path, which keeps later searches short
            node = above
        return node

    def make_dependencies_equivalent(self, node: Node, user: Node) -> None:
        self.parent.setdefault(user, user)
        self.parent[self.root(user)] = self.root(node)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in the value of a node, which may be a list or tuple of them."""
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def get_node_device(node: Node) -> torch.device | None:
    value = fake_value(node)
    return value.device if isinstance(value, torch.Tensor) else None


def is_cpu_scalar_tensor(node: Node) -> bool:
    value = fake_value(node)
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() == 0


def is_operator(node: Node) -> bool:
    """Whether a node calls an operator of torch's own, whose arguments and devices we know."""
    target: Any = node.target
    return isinstance(target, OPERATOR) and target.namespace in ("aten", "prims")


def schema_of(node: Node) -> Any:
    target: Any = node.target
    return target._schema


def allow_cpu_device(node: Node) -> bool:
    return node.target in TAKES_HOST_OPERANDS


def draws_random_numbers(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def has_mask(node: Node) -> bool:
    """Whether index or index_put selects by a mask."""
    indices: Any = node.args[1]
    return any(index is not None and fake_value(index).dtype in MASKS for index in indices)


def depends_on_data(node: Node) -> bool:
    """Whether the host needs the contents of an operand, for a number or a shape: it would wait for the device."""
    tags = getattr(node.target, "tags", ())
    if node.target is aten.index.Tensor:
        return has_mask(node)
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def is_index_put_and_requires_h2d_sync_for_gpu_value(node: Node) -> bool:
    """A masked write of one number: a fill, as long as the host can read the number without asking the device."""
    if node.target not in INDEX_PUT or not has_mask(node):
        return False
    value = fake_value(node.args[2])  # type: ignore[arg-type]
    # Where the count is not known it may be one.
    return value.device.type == "cpu" and not statically_known_true(value.numel() != 1)


def get_cpu_indeg_count(graph: torch.fx.Graph) -> dict[Node, int]:
    """For every node, how many different operands live on the host; one used twice arrives once, so it counts once."""
    counts = dict.fromkeys(graph.nodes, 0)

    def add_cpu_inp(node: Node) -> None:
        if any(tensor.device.type == "cpu" for tensor in tensors_of(fake_value(node))):
            for user in node.users:
                counts[user] += 1

    for node in graph.nodes:
        add_cpu_inp(node)
    return counts


def shares_memory(node: Node) -> bool:
    """Whether a node returns (part of) the memory of an operand."""
    if not is_operator(node):
        return True  # takes an element out of a tuple
    return any(result.alias_info is not None for result in schema_of(node).returns)


def keeps_input(user: Node, node: Node) -> bool:
    """Whether a user needs the input itself: it writes to it or returns it."""
    return user.op == "output" or (user.target is aten.copy_.default and user.args[0] is node)


def writes_to(user: Node, node: Node) -> bool:
    return is_operator(user) and schema_of(user).is_mutable and user.args[0] is node


def copy_inputs(inputs: list[Node], device: torch.device) -> list[Node]:
    """One copy to the device per dtype, and the readers of the inputs moved over to it. Returns what is new.

    Dtypes are kept apart because cat would promote them. Even a single input goes through cat: its result is memory
    of our own, so an asynchronous copy cannot see what happens to the input afterwards.
    """
    new: list[Node] = []
    by_dtype: dict[torch.dtype, list[Node]] = {}
    for node in inputs:
        by_dtype.setdefault(fake_value(node).dtype, []).append(node)
    first = inputs[0].graph.find_nodes(op="placeholder")[-1].next if inputs else None
    for dtype, group in by_dtype.items():
        graph = group[0].graph
        with graph.inserting_before(first):
            rows = [graph.call_function(aten.unsqueeze.default, (node, 0)) for node in group]
            ours = graph.call_function(aten.cat.default, (list(rows),))
            there = graph.call_function(aten._to_copy.default, (ours,), {"device": device, "non_blocking": True})
            parts = graph.call_function(aten.unbind.int, (there,))
            new += [*rows, ours, there, parts]
            for position, (node, row) in enumerate(zip(group, rows, strict=True)):
                part = graph.call_function(operator.getitem, (parts, position))
                part.meta.update({key: node.meta[key] for key in ORIGIN if key in node.meta})
                new.append(part)
                readers = [user for user in node.users if user is not row and not keeps_input(user, node)]
                for user in readers:
                    user.replace_input_with(node, part)
                skip_copies(readers, part, dtype, device)
    return new


def skip_copies(readers: list[Node], part: Node, dtype: torch.dtype, device: torch.device) -> None:
    """Explicit copies to the device have nothing left to do; those whose memory may be seen outside still copy."""
    for copy in readers:
        value = fake_value(copy)
        if copy.target not in EXPLICIT_COPIES or (value.dtype, value.device) != (dtype, device):
            continue
        if all(map(only_reads, copy.users)):
            copy.replace_all_uses_with(part)
            copy.graph.erase_node(copy)


def only_reads(node: Node) -> bool:
    """Whether a node leaves its operands as they are and returns none of their memory."""
    return is_operator(node) and not shares_memory(node) and not schema_of(node).is_mutable


def refresh(nodes: Iterable[Node]) -> None:
    """Compute the fake values of nodes anew, and of what follows from them until a value stays the same."""
    outdated = dict.fromkeys(nodes)
    if not outdated:
        return
    graph = next(iter(outdated)).graph
    tensors = (tensor for node in graph.nodes for tensor in tensors_of(fake_value(node)))
    fake_mode = next((tensor.fake_mode for tensor in tensors if hasattr(tensor, "fake_mode")), nullcontext())
    for node in graph.nodes:
        if node not in outdated or node.op != "call_function":
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), fake_value)
        with fake_mode, torch.no_grad():
            value = node.target(*args, **kwargs)
        if "val" not in node.meta or not same_metadata(value, node.meta["val"]):
            node.meta["val"] = value
            outdated.update(dict.fromkeys(node.users))


def same_metadata(left: Any, right: Any) -> bool:
    """Whether two fake values look alike for certain; adds no guard."""
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same_metadata, left, right))
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return type(left) is type(right) and statically_known_true(left == right)
    if plain_facts(left) != plain_facts(right):
        return False
    numbers = zip(numbers_of(left), numbers_of(right), strict=True)
    return all(statically_known_true(one == other) for one, other in numbers)


def plain_facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.layout, tensor.dim(), tensor.is_conj(), tensor.is_neg()


def numbers_of(tensor: torch.Tensor) -> Iterator[int | torch.SymInt]:
    yield from tensor.shape
    if tensor.layout is torch.strided:
        yield from tensor.stride()
        yield tensor.storage_offset()
