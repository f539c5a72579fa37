"""When the threads of a program must wait for each other.

Statements run in order, but a program has many threads, and one may load what another has stored. So a barrier stands
between two statements that touch the same pointer, unless both only read it. The threads of one warp run in step: what
they load is on its way before any of them stores, so that there a store need not wait for a load. That counts in loops
whose loads Triton starts some iterations ahead: it does not where there is a barrier.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ferrite.ir import Data, Load, Sum
from ferrite.ir.kernel import INDEPENDENT, Kernel, Loop, Statement, Store, nodes_in, walk


class Barriers:
    """What was touched since the last barrier. Only pointers that the kernel writes matter."""

    def __init__(self, kernel: Kernel) -> None:
        self.pointers = frozenset(pointer.name for pointer in kernel.pointers if pointer.access != "read")
        self.is_one_warp = kernel.warps == 1
        self.read: frozenset[str] = frozenset()
        self.written: frozenset[str] = frozenset()

    def before(self, statement: Statement) -> bool:
        """Whether a barrier must stand before a statement, which is done then."""
        loads, stores = self.loads(statement), self.stores(statement)
        touched = self.written if self.is_one_warp else self.read | self.written
        waits = bool(loads & self.written or stores & touched)
        if waits:
            self.clear()
        self.read, self.written = self.read | loads, self.written | stores
        return waits

    def between_iterations(self, loop: Loop) -> bool:
        """Whether an iteration of a loop in order must wait for the one before it.

        A lane stays with its thread, whose stores come in order. But where lanes are of a loop inside, another thread
        may have the same element in the next iteration.
        """
        stores = [item for item in walk(loop.body) if isinstance(item, Store) and item.buffer in self.pointers]
        names = [store.buffer for store in stores]
        nodes = [item for statement in walk(loop.body) for item in nodes_in(statement)]
        loads = [item for item in nodes if isinstance(item, Load) and item.buffer in names]
        places = {store.buffer: store.coordinates for store in stores if _keeps_apart(loop, store)}
        blocks = any(isinstance(item, Loop) and item.kind in INDEPENDENT for item in walk(loop.body))
        waits = (
            any(store.mode != "set" for store in stores)
            or any(places.get(load.buffer) != load.coordinates for load in loads)
            or len(set(names)) < len(names)
            or (blocks and len(places) < len(stores))
        )
        if waits:
            self.clear()
        return waits

    @contextmanager
    def perhaps(self) -> Iterator[None]:
        """What runs inside may not run at all: what was touched before still counts after."""
        read, written = self.read, self.written
        yield
        self.read, self.written = self.read | read, self.written | written

    def loads(self, statement: Statement) -> frozenset[str]:
        found = {item.buffer for item in nodes_in(statement) if isinstance(item, Load)}
        if isinstance(statement, Store) and statement.mode != "set":
            found.add(statement.buffer)
        return self.pointers & found

    def stores(self, statement: Statement) -> frozenset[str]:
        return self.pointers & {statement.buffer} if isinstance(statement, Store) else frozenset()

    def clear(self) -> None:
        self.read = self.written = frozenset()


def _keeps_apart(loop: Loop, store: Store) -> bool:
    """Whether iterations surely store to different elements: each moves on farther than it reaches."""
    step, reach = 0, 0
    inside = {item.axis for item in walk(loop.body) if isinstance(item, Loop)}
    terms = store.coordinates[0].terms if isinstance(store.coordinates[0], Sum) else ((store.coordinates[0], 1),)
    for item, factor in terms:
        if item is loop.axis:
            step = abs(factor)
        elif item in inside and item.high is not None:
            reach += abs(factor) * item.high
        elif not item.atoms.isdisjoint({loop.axis, *inside}) or any(isinstance(atom, Data) for atom in item.atoms):
            return False
    return step > reach
