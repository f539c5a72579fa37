"""What a replacement changes behind it.

A value that takes another's place may lie in other memory, and, where its rule says `layout="free"`, have other
strides. Views of it then lie there too, and what computes with it may lay out its own result otherwise:

    p = split(cat([a, b], 1))[0]        p has the strides of the concat    q = p.relu(): dense
    p = a                               p has those of a                   q = p.relu(): dense, so this is the end

`follow` computes the new values of users, users' users and so on, as far as they change, and refuses where somebody
could tell: an output would have other strides, an operator reads memory as it lies (`as_strided`), or promises
something about strides (custom operators), or would fail (`view`). The graph stays as it is meanwhile.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import (
    CannotRun,
    MissingValue,
    Values,
    alias_class,
    compute,
    fake_value,
    is_barrier,
    is_elementwise,
    is_known_operator,
    is_random,
    leaves,
    mutates,
    same_number,
    same_sizes,
    schema_of,
    storages_in,
    storages_of,
)
from ferrite.rewrite.visible import difference

# Nodes computed anew for one rewrite. So n rewrites cost at most n times this, whatever the graph; values that change
# so far behind a rewrite are rare, since most operators lay out their results without looking at their operands.
MAX_VALUES_BEHIND = 256
# Their results depend on where elements lie in memory, not only on which elements there are.
READS_MEMORY = frozenset(
    {"as_strided", "as_strided_copy", "as_strided_scatter", "as_strided_", "_reshape_alias", "slice_inverse"}
    | {"set", "resize", "_nested_view_from_buffer", "_nested_view_from_buffer_copy"}
)
STRIDE_CONTRACTS = frozenset({"needs_exact_strides", "needs_fixed_stride_order", "needs_contiguous_strides"})


def follow(replaced: Values, mode: Any) -> dict[torch.fx.Node, Any] | Refusal:
    """The new values of the replaced nodes and of everything behind them that changes, or who could tell."""
    walk = ChangedValues(replaced)
    for node in replaced:
        if (problem := walk.queue_users(node)) is not None:
            return problem
    while walk.waiting:
        node = heapq.heappop(walk.waiting)  # operands before users, so that each is computed once
        walk.computed += 1
        if walk.computed > MAX_VALUES_BEHIND:
            return Refusal(f"more than {MAX_VALUES_BEHIND} values behind it would change")
        new = computed_anew(node, mode, walk.values)
        if isinstance(new, Refusal):
            return new
        old = fake_value(node)
        stays = alias_class(node, old) == alias_class(node, new, walk.values)
        if stays and same_strides(old, new) and same_offsets(old, new):
            continue  # whoever reads it is left in peace
        walk.values[node] = new
        if (problem := walk.queue_users(node)) is not None:
            return problem
    return walk.values


class ChangedValues:
    """The values that have changed so far, and the nodes that read one of them and wait for their turn."""

    def __init__(self, replaced: Values) -> None:
        self.values = dict(replaced)
        self.seen = set(replaced)
        self.waiting: list[torch.fx.Node] = []
        self.computed = 0

    def queue_users(self, node: torch.fx.Node) -> Refusal | None:
        """Queue the users whose values may change with a node's, or say which of them could tell.

        Where the strides stay, only views of it change: they lie elsewhere.
        """
        old, new = fake_value(node), self.values[node]
        restrided, moved_within = not same_strides(old, new), not same_offsets(old, new)
        memory = storages_in(old)
        if not restrided and not moved_within and memory == storages_in(new):
            return None
        ambiguous = restrided and only_ones_differ(old, new)
        for user in node.users:
            if user in self.seen:
                continue
            if ambiguous and is_elementwise(user.target):
                return Refusal(
                    f"{user.name} may lay out its result by the strides of {node.name} along dimensions of one"
                )
            problem = who_could_tell(user, node, restrided, moved_within)
            if problem is not None:
                return problem
            if user.op != "output" and (restrided or not memory.isdisjoint(storages_of(user))):
                self.seen.add(user)
                heapq.heappush(self.waiting, user)
        return None


def computed_anew(node: torch.fx.Node, mode: Any, values: Values) -> Any:
    if node.meta.get("unbacked_bindings"):
        return Refusal(f"{node.name} has a size that only running it tells")
    try:
        new, _ = compute(node, mode, values, trying_out)
    except (CannotRun, MissingValue) as problem:
        return Refusal(f"{node.name} could not be computed on it: {problem.__cause__ or problem}")
    unlike = difference(fake_value(node), new, layout_matters=False)
    return new if unlike is None else Refusal(f"{node.name} would differ: {unlike}")


@contextlib.contextmanager
def trying_out(mode: Any) -> Iterator[None]:
    """For an operator that may fail: nothing is decided about symbols, and no failure of this thread is logged."""
    logger, own = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != own

    logger.addFilter(is_of_another_thread)
    try:
        with torch_api.deciding_nothing(mode):
            yield
    finally:
        logger.removeFilter(is_of_another_thread)


def who_could_tell(user: torch.fx.Node, value: torch.fx.Node, restrided: bool, moved_within: bool) -> Refusal | None:
    """Why a user's result, or the user itself, depends on how its operand lies in memory."""
    if user.op == "output":
        what = "other strides" if restrided else "another offset in its storage"
        return Refusal(f"output {value.name} would have {what}") if restrided or moved_within else None
    if reads_memory(user):
        return Refusal(f"{user.name} reads the memory of {value.name} as it lies")
    if not restrided:
        return None
    if mutates(user):
        return Refusal(f"{user.name} writes, and would write with other strides")
    if is_random(user):
        return Refusal(f"{user.name} draws random numbers in the order of the strides of {value.name}")
    if has_stride_contract(user):
        return Refusal(f"{user.name} may depend on the strides of {value.name}")
    return None


def reads_memory(node: torch.fx.Node) -> bool:
    """Whether an operator reads memory without regard to the shape and strides of its operand."""
    schema, target = schema_of(node.target), node.target
    if schema is not None:
        return str(schema.name).rpartition("::")[2] in READS_MEMORY
    return (target if isinstance(target, str) else getattr(target, "__name__", "")) in READS_MEMORY


def has_stride_contract(node: torch.fx.Node) -> bool:
    """Whether an operator is not known to compute the same on any strides: foreign and higher-order ones are not."""
    if schema_of(node.target) is None:
        return is_barrier(node) or isinstance(node.target, torch_api.HigherOrderOperator)
    if not is_known_operator(node):
        return True
    return any(tag.name in STRIDE_CONTRACTS for tag in node.target.tags)  # type: ignore[union-attr]


# --- how two values lie -----------------------------------------------------------------------------------------------


def strided(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


def same_strides(old: Any, new: Any) -> bool:
    pairs = zip(strided(old), strided(new), strict=True)
    return all(same_sizes(before.stride(), after.stride()) for before, after in pairs)


def only_ones_differ(old: Any, new: Any) -> bool:
    """Whether two values have other strides along dimensions of one alone. They address nothing, but torch orders the
    dimensions of an elementwise result by them, and fake tensors do so otherwise than real ones."""
    if same_strides(old, new):
        return False
    return all(
        same_number(first, second) or (type(size) is int and size == 1)
        for before, after in zip(strided(old), strided(new), strict=True)
        for size, first, second in zip(before.shape, before.stride(), after.stride(), strict=True)
    )


def same_offsets(old: Any, new: Any) -> bool:
    pairs = zip(strided(old), strided(new), strict=True)
    return all(same_number(before.storage_offset(), after.storage_offset()) for before, after in pairs)
