"""From a plan, which may have kernels on several devices, to code; and from code to functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ferrite.codegen import Executable, print_host
from ferrite.ir.kernel import checks
from ferrite.runtime.cpu import KernelStore
from ferrite.schedule import Plan
from ferrite.targets.choose import Targets
from ferrite.targets.target import LoadedRun


class Stores(Protocol):
    def __call__(self, identity: str) -> KernelStore | None:
        """Where kernels for one kind of machine are kept."""


def executable_of(
    plan: Plan, targets: Targets, stores: Stores = lambda identity: None, checked: bool = False
) -> Executable:
    """`checked`: kernels compare every address with the bounds of its memory."""
    pairs = dict.fromkeys((launch.device, launch.kernel) for launch in plan.launches)
    numbers = {pair: number for number, pair in enumerate(pairs)}
    source = print_host(plan, numbers, {device: target.spelling for device, target in targets.items()}, checked)
    names: dict[int, str] = {}
    code: dict[str, bytes] = {}
    for device in dict.fromkeys(device for device, _kernel in pairs):
        kernels = [kernel for where, kernel in pairs if where == device]
        target = targets[device]
        made, more = target.compiled(kernels, stores(target.identity()), checked)
        names |= {numbers[device, kernel]: name for kernel, name in zip(kernels, made, strict=True)}
        code |= more
    complaints = [tuple(check.complaint for check in checks(kernel)) for _device, kernel in pairs]
    return Executable(source, tuple((names[number], complaints[number]) for number in range(len(pairs))), code)


def runs_of(executable: Executable, targets: Targets) -> list[LoadedRun]:
    """What runs each table of a host program."""
    tables = executable.source.runs
    loaded: dict[int, LoadedRun] = {}
    for device in dict.fromkeys(table.device for table in tables):
        places = [place for place, table in enumerate(tables) if table.device == device]
        used = {executable.kernels[call.kernel][0] for place in places for call in tables[place].calls}
        code = code_for(used, executable, len(places) == len(tables))
        runs = targets[device].loaded(executable.kernels, code, [tables[place] for place in places])
        loaded |= dict(zip(places, runs, strict=True))
    return [loaded[place] for place in range(len(tables))]


def code_for(used: set[str], executable: Executable, all_of_it: bool) -> Mapping[str, bytes]:
    """The code that one device needs: its kernels, and what is no kernel."""
    if all_of_it:
        return executable.code
    others = {name for name, _complaints in executable.kernels} - used
    return {name: code for name, code in executable.code.items() if name not in others}
