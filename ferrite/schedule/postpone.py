"""Small kernels whose results only leave the program run at its end, beside those that are equal: there a device makes
one launch of them.

    launch sums of a, in pieces         launch sums of a, in pieces
    launch the pieces of a, added       call mm(...)
    call mm(...)                    =>  launch sums of b, in pieces
    launch sums of b, in pieces         launch the pieces of a, added, and those of b, and so on
    launch the pieces of b, added

So it is with the gradients of all norms and biases of a model: each is a sum in pieces, and adding the pieces up takes
less time than starting a kernel. What such kernels read is held until then, so it is little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ferrite.ir.kernel import checks
from ferrite.pipeline import Fuel
from ferrite.schedule.fusion.horizontal import touched
from ferrite.schedule.fusion.repeats import Repeat
from ferrite.schedule.memory.arena import exact_bytes
from ferrite.schedule.schedule import Schedule
from ferrite.schedule.steps import device_type


class Postponement:
    """The kernels of a schedule that may wait, and where they wait for."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.buffers = schedule, schedule.buffer_table.buffers
        outputs = (name for name in schedule.program.outputs if isinstance(name, str))
        self.leaving = {self.buffers[name].storage for name in outputs}
        self.rules = {device: each.postponing for device, each in schedule.schedulings.items()}

    def order(self, fuel: Fuel) -> list[int] | None:
        """The places of all items, in their new order; None where it is the old one."""
        found = self.worth_it(dict(self.waiting())) if any(self.rules.values()) else {}
        moved: set[int] = set()
        for place in found:
            if fuel.left:
                fuel.spend()
                moved.add(place)
        if not moved:
            return None
        last = {repeat.group.device: place for place, repeat in self.repeats()}
        after: dict[int, list[int]] = {}
        for place in sorted(moved):
            after.setdefault(last[found[place].group.device], []).append(place)
        stays = ([] if place in moved else [place] for place in range(len(self.schedule.items)))
        return [each for place, here in enumerate(stays) for each in (*here, *after.get(place, ()))]

    def repeats(self) -> Iterator[tuple[int, Repeat]]:
        for place, item in enumerate(self.schedule.items):
            if isinstance(item.work, Repeat):
                yield place, item.work

    def worth_it(self, waiting: dict[int, Repeat]) -> dict[int, Repeat]:
        """Those that have enough like them, the last ones first, while what they keep is little."""
        alike = Counter(id(repeat.pattern) for repeat in waiting.values())
        kept: Counter[str] = Counter()
        found = {}
        for place, repeat in sorted(waiting.items(), reverse=True):
            device = device_type(repeat.group.device)
            rule = self.rules[device]
            size = sum(self.bytes_kept(name) for name in repeat.arguments)
            if rule is not None and alike[id(repeat.pattern)] >= rule.alike and kept[device] + size <= rule.kept:
                kept[device] += size
                found[place] = repeat
        return found

    def waiting(self) -> Iterator[tuple[int, Repeat]]:
        """Small kernels with results that nothing behind them touches, and which read what nothing there writes."""
        read_later: set[str] = set()
        written_later: set[str] = set()
        for place, item in reversed(list(enumerate(self.schedule.items))):
            work = item.work.group if isinstance(item.work, Repeat) else item.work
            read, written = touched(work, self.schedule.buffer_table)  # type: ignore[arg-type]
            if isinstance(item.work, Repeat) and self.is_small(item.work):
                is_new = all(self.buffers[name].kind == "owned" for name in written)  # an error is not to change inputs
                is_last = written.isdisjoint(read_later) and (read | written).isdisjoint(written_later)
                if is_new and is_last:
                    yield place, item.work
            read_later |= read
            written_later |= written

    def is_small(self, repeat: Repeat) -> bool:
        rule, kernel = self.rules.get(device_type(repeat.group.device)), repeat.pattern.kernel
        if rule is None or kernel.sizes or checks(kernel):
            return False
        sizes = [exact_bytes(self.buffers[name]) for name in repeat.arguments]
        return None not in sizes and sum(size or 0 for size in sizes) <= rule.bytes

    def bytes_kept(self, name: str) -> int:
        """Of what the program makes, or was given for good, and does not return."""
        buffer = self.buffers[name]
        is_kept = buffer.kind in ("owned", "donated") and name not in self.leaving
        return (exact_bytes(buffer) or 0) if is_kept else 0
