"""From a program to a plan, in steps over one frozen value: `STEPS` is the order.

    prepare         reductions in the forms that the devices like; memory that nobody sees laid out as what is beside it
    bodies          sub-programs have plans of their own
    fuse            operations become groups, and groups that need nothing of each other one where that is quicker
    arrange         groups become kernels, equal ones once
    postpone        small kernels whose results only leave run at the end, where a device makes one launch of equal ones
    reuse_in_place  a kernel writes where something lies that it reads for the last time
    form_runs       launches that follow each other are one native call
    group_launches  launches of a run that are alike and independent are one, where a device likes that
    split_runs      but not where that holds much more memory than two would
    plan_memory     what only a run needs lies in memory of the run
    finish          what a device does with a whole run

Each step can be seen (`observe`, and the option `dump_dir`) and bisected: one fusion, one kernel that waits, one reuse,
one group, one split spends one unit of fuel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from ferrite.ir.kernel import canonical, verify_kernel
from ferrite.ir.program import Allocate, If, Invoke, Program, While, bodies_of, verify_program
from ferrite.pipeline import Fuel
from ferrite.schedule.fusion.fuse import Order
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.horizontal import HorizontalFusion
from ferrite.schedule.fusion.repeats import Repeat, Repeats
from ferrite.schedule.laws import verify_schedule
from ferrite.schedule.memory.arena import Arenas
from ferrite.schedule.memory.in_place import InPlaceReuse, later, with_views
from ferrite.schedule.memory.liveness import last_uses_of, private
from ferrite.schedule.memory.split_runs import with_split_runs
from ferrite.schedule.postpone import Postponement
from ferrite.schedule.schedule import Schedule, ScheduleItem
from ferrite.schedule.steps import Launch, Plan, Run, Step, device_type
from ferrite.schedule.target import Schedulings

Observe = Callable[[str, Schedule], None]


def make_plan(
    program: Program,
    schedulings: Schedulings,
    *,
    verify: bool = False,
    fuel: Fuel | None = None,
    observe: Observe | None = None,
) -> Plan:
    """`verify`: check the laws after every step. `observe` sees what each step made."""
    fuel = fuel or Fuel(None)
    schedule = Schedule(program, schedulings, tuple(map(ScheduleItem, program.operations)))
    for step in STEPS:
        schedule = step(schedule, fuel, verify)
        if verify:
            verify_schedule(schedule)
        if observe is not None:
            observe(step.__name__, schedule)
    return plan_of(schedule)


# --- the steps --------------------------------------------------------------------------------------------------------


def prepare(schedule: Schedule, fuel: Fuel, verify: bool) -> Schedule:
    program = schedule.program
    for scheduling in schedule.schedulings.values():
        program = scheduling.prepared(program)
    if verify:
        verify_program(program)
    return replace(schedule, program=program, items=tuple(map(ScheduleItem, program.operations)))


def bodies(schedule: Schedule, fuel: Fuel, verify: bool) -> Schedule:
    def planned(item: ScheduleItem) -> ScheduleItem:
        if not isinstance(item.work, If | While | Invoke):
            return item
        found = [make_plan(body, schedule.schedulings, verify=verify, fuel=fuel) for body in bodies_of(item.work)]
        return replace(item, bodies=tuple(found))

    return replace(schedule, items=tuple(map(planned, schedule.items)))


def fuse(schedule: Schedule, fuel: Fuel, verify: bool) -> Schedule:
    ordered = Order(schedule.program, schedule.schedulings, fuel).run()
    HorizontalFusion(ordered.items, schedule.buffer_table, schedule.schedulings, fuel).run()
    plans = {id(item.work): item.bodies for item in schedule.items if item.bodies}
    items = [
        ScheduleItem(work, ordered.not_compiled.get(place), plans.get(id(work), ()))
        for place, work in enumerate(ordered.items)
        if not isinstance(work, Group) or work.members  # a group without any has become part of an earlier one
    ]
    return replace(schedule, items=tuple(items), not_fused=tuple(ordered.not_fused))


def arrange(schedule: Schedule, fuel: Fuel, verify: bool) -> Schedule:
    works = [item.work for item in schedule.items]
    inside = private(schedule.program, works, schedule.buffer_table)  # type: ignore[arg-type]
    repeats = Repeats(schedule.buffer_table, schedule.schedulings)

    def arranged(place: int, item: ScheduleItem) -> ScheduleItem:
        if not isinstance(item.work, Group):
            return item
        found = repeats.of(item.work, inside.get(place, ()))
        if verify and not found.is_first:
            check_repeat(found, inside.get(place, ()), schedule)
        return replace(item, work=found)

    return replace(schedule, items=tuple(itertools.starmap(arranged, enumerate(schedule.items))))


def check_repeat(repeat: Repeat, inside: tuple[str, ...], schedule: Schedule) -> None:
    """A group that has the kernel of an earlier one would have got the same."""
    built = schedule.schedulings[device_type(repeat.group.device)].arranged(repeat.group, inside, schedule.buffer_table)
    verify_kernel(built.kernel)
    if canonical(built.kernel, {}) != repeat.kernel({}) or built.arguments != repeat.arguments:
        raise AssertionError(f"groups that are no repeats of each other have one signature:\n{built.kernel}")


def postpone(schedule: Schedule, fuel: Fuel, verify: bool) -> Schedule:
    order = Postponement(schedule).order(fuel)
    return schedule if order is None else replace(schedule, items=tuple(schedule.items[place] for place in order))


def reuse_in_place(schedule: Schedule, fuel: Fuel, verify: bool) -> Schedule:
    works = [item.work.group if isinstance(item.work, Repeat) else item.work for item in schedule.items]
    reuse = InPlaceReuse(schedule.program, works, schedule.buffer_table)  # type: ignore[arg-type]

    def launched(place: int, item: ScheduleItem) -> ScheduleItem:
        if not isinstance(item.work, Repeat):
            return item
        repeat = item.work
        reused = reuse.at(place, repeat.group, repeat.arguments) if fuel.left else {}
        for _ in reused:
            fuel.spend()
        kernel = repeat.kernel({old: later(old, reused)[-1] for old in reused})
        arguments = tuple(reuse.storage(name) for name in repeat.arguments if name not in reused)
        device = repeat.group.device
        return replace(item, work=Launch(kernel, arguments, repeat.sizes, repeat.group.operations, device))

    items = tuple(itertools.starmap(launched, enumerate(schedule.items)))
    return replace(
        schedule,
        program=with_views(schedule.program, reuse.in_place),
        items=items,
        in_place=reuse.in_place,
        seen_elsewhere=frozenset(reuse.storage(name) for name in reuse.shared),
    )


def form_runs(schedule: Schedule, fuel: Fuel, verify: bool) -> Schedule:
    """Memory is made when it is first needed: nothing runs where it is only allocated."""
    items = [item for item in schedule.items if not isinstance(item.work, Allocate)]

    def device_of(item: ScheduleItem) -> str | None:
        return item.work.device if isinstance(item.work, Launch) else None

    found: list[ScheduleItem] = []
    for device, some in itertools.groupby(items, device_of):
        if device is None:
            found += some
        else:
            found.append(ScheduleItem(Run(tuple(launches(some)))))
    return replace(schedule, items=tuple(found))


def launches(items: Iterator[ScheduleItem]) -> Iterator[Launch]:
    return (item.work for item in items if isinstance(item.work, Launch))


def group_launches(schedule: Schedule, fuel: Fuel, verify: bool) -> Schedule:
    """Before memory is planned, which follows the order of launches."""
    buffers = schedule.buffer_table.buffers
    leaving = {buffers[name].storage for name in schedule.program.outputs if isinstance(name, str)}

    def grouped(item: ScheduleItem) -> ScheduleItem:
        if not isinstance(item.work, Run):
            return item
        scheduling = schedule.schedulings[device_type(item.work.launches[0].device)]
        return replace(item, work=scheduling.grouped(item.work, schedule.buffer_table, leaving, fuel))

    return replace(schedule, items=tuple(map(grouped, schedule.items)))


def split_runs(schedule: Schedule, fuel: Fuel, verify: bool) -> Schedule:
    arenas = Arenas(schedule.program, schedule.buffer_table, schedule.schedulings, schedule.seen_elsewhere)
    parts = with_split_runs(schedule.program, steps_of(schedule), arenas, fuel)
    items = [
        replace(item, work=part) for item, some in zip(schedule.items, parts, strict=True) for part in some
    ]  # what is not a run has one part: itself
    return replace(schedule, items=tuple(items))


def plan_memory(schedule: Schedule, fuel: Fuel, verify: bool) -> Schedule:
    arenas = Arenas(schedule.program, schedule.buffer_table, schedule.schedulings, schedule.seen_elsewhere)
    planned = arenas.planned(steps_of(schedule))
    return replace(schedule, items=tuple(map(with_work, schedule.items, planned)))


def finish(schedule: Schedule, fuel: Fuel, verify: bool) -> Schedule:
    def finished(item: ScheduleItem) -> ScheduleItem:
        if not isinstance(item.work, Run):
            return item
        scheduling = schedule.schedulings[device_type(item.work.launches[0].device)]
        return replace(item, work=scheduling.finished(item.work, schedule.buffer_table))

    return replace(schedule, items=tuple(map(finished, schedule.items)))


STEPS = (
    prepare,
    bodies,
    fuse,
    arrange,
    postpone,
    reuse_in_place,
    form_runs,
    group_launches,
    split_runs,
    plan_memory,
    finish,
)


def with_work(item: ScheduleItem, work: Step) -> ScheduleItem:
    return replace(item, work=work)


def steps_of(schedule: Schedule) -> list[Step]:
    """The items, once they are runs and operations."""
    return [item.work for item in schedule.items]  # type: ignore[misc]


def plan_of(schedule: Schedule) -> Plan:
    """What the steps came to, with what each item leaves behind."""
    steps = steps_of(schedule)
    return Plan(
        schedule.program,
        tuple(steps),
        last_uses_of(schedule.program, steps, schedule.buffer_table),
        {place: item.refusal for place, item in enumerate(schedule.items) if item.refusal is not None},
        schedule.not_fused,
        {place: item.bodies for place, item in enumerate(schedule.items) if item.bodies},
        schedule.in_place,
    )


__all__ = ["STEPS", "make_plan"]
