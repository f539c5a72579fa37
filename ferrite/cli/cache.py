"""`python -m ferrite cache`: what compiled code is kept, whether it is whole, and why something was compiled again."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ferrite.cache import KINDS, About, Entry, EntryStore, differences, nearest, open_store
from ferrite.debug import age, differences_table, side
from ferrite.errors import UserError
from ferrite.options import resolve

PASSES_RUN_ON = {"captured": "torch calls", "joint": "forward and backward"}  # by the kind of an entry
SHORT = 12  # characters of a digest that are shown

EXPLAIN = """
Without an entry: why the newest graph was compiled, that is what differs from the nearest older entry.
With one entry:   what it depends on, component by component.
With two:         what differs between them.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "cache",
        help="look at the cache of compiled code, check it, clear it",
        description="Look at the cache of compiled code. Its folder is that of the option cache_dir "
        "(FERRITE_CACHE_DIR); `python -m ferrite options` says where that is.",
    )
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = new_action(actions, "ls", list_entries, "list the entries, last used first")
    listing.add_argument("--kind", choices=KINDS, help="only entries of this kind")
    listing.add_argument("-n", "--number", type=int, default=30, help="at most so many (default 30; 0: all)")
    asking = new_action(actions, "explain", explain, "say what an entry depends on, or why one was made", EXPLAIN)
    asking.add_argument("entries", metavar="ENTRY", nargs="*", help="the beginning of a digest, as ls shows it")
    checking = new_action(actions, "verify", verify, "read every entry and check it; exits with 1 if one is damaged")
    checking.add_argument("--remove", action="store_true", help="remove the damaged ones; then the exit status is 0")
    clearing = new_action(actions, "clear", clear, "remove entries; asks first")
    clearing.add_argument("--kind", choices=KINDS, help="only entries of this kind")
    clearing.add_argument("--unused-days", type=float, metavar="DAYS", help="only those not used for so many days")
    clearing.add_argument("-y", "--yes", action="store_true", help="do not ask")


def new_action(actions: Any, name: str, run: Callable[..., int], about: str, more: str | None = None) -> Any:
    parser = actions.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="another cache folder than the option cache_dir's")
    parser.set_defaults(run=run)
    return parser


def store_of(chosen: argparse.Namespace) -> EntryStore:
    """The store to look at, whether or not compiling would use it."""
    where = {} if chosen.dir is None else {"cache_dir": chosen.dir}
    store = open_store(resolve({"cache": True, **where}))
    assert store is not None
    if (problem := store.examine()) is not None:
        raise UserError(f"{store.folder} is not used as a cache", {"because": problem})
    return store


# --- ls ---------------------------------------------------------------------------------------------------------------


def list_entries(chosen: argparse.Namespace) -> int:
    store = store_of(chosen)
    entries = sorted(store.entries(chosen.kind), key=lambda entry: -entry.used)
    shown = entries[: chosen.number] if chosen.number > 0 else entries
    table = new_table("entry", "kind", "size", "made", "used", "sections", "about")
    for entry in shown:
        about = store.about(entry)
        used = age(entry.used / 1e9)
        if about is None:
            table.add_row(entry.digest[:SHORT], entry.kind, size(entry.size), "", used, "", "[red]damaged[/]")
        else:
            made, count = age(about.made), str(len(about.places))
            table.add_row(entry.digest[:SHORT], entry.kind, size(entry.size), made, used, count, summary(about))
    console = Console(highlight=False)
    if shown:
        console.print(table)
    more = f", {len(entries) - len(shown)} more not shown" if len(shown) < len(entries) else ""
    total = size(sum(entry.size for entry in entries))
    print(f"{len(entries)} entries, {total} of at most {size(store.limit)}, in {store.folder}{more}")
    return 0


def summary(about: About) -> str:
    """What one sees at a glance: the direction of a graph, its inputs, and the torch it was made with."""
    facts = about.components
    inputs = sum(name.startswith("input ") for name in facts)
    what = PASSES_RUN_ON.get(about.kind, facts.get("direction", ""))
    parts = [what, f"{inputs} inputs" if inputs else "", about_torch(facts.get("torch", ""))]
    return ", ".join(part for part in parts if part)


def about_torch(version: str) -> str:
    return f"torch {version.split()[0]}" if version else ""


# --- explain ----------------------------------------------------------------------------------------------------------


def explain(chosen: argparse.Namespace) -> int:
    store, console = store_of(chosen), Console(highlight=False)
    match chosen.entries:
        case []:
            return explain_newest(store, console)
        case [one]:
            entry, about = find(store, one)
            console.print(f"{entry.kind} {entry.digest}, made {age(about.made)} ago, depends on")
            table = new_table("component", "value")
            for name, value in about.components.items():
                table.add_row(name, side(value))
            console.print(table)
        case [one, other]:
            compare(console, find(store, one), find(store, other))
        case _:
            raise UserError("explain takes two entries at most", {"got": str(len(chosen.entries))})
    return 0


def explain_newest(store: EntryStore, console: Console) -> int:
    known = ((entry, store.about(entry)) for entry in store.entries("graph"))
    newest = max(((entry, about) for entry, about in known if about is not None), key=made, default=None)
    if newest is None:
        print(f"no graph is kept in {store.folder}")
        return 0
    entry, about = newest
    closest = nearest(store, "graph", about.components, about.made)
    if closest is None:
        console.print(f"{entry.digest[:SHORT]} is the oldest graph here: there was nothing to find")
        return 0
    compare(console, closest, newest)
    return 0


def made(found: tuple[Entry, About]) -> float:
    return found[1].made


def compare(console: Console, there: tuple[Entry, About], here: tuple[Entry, About]) -> None:
    found = differences(there[1].components, here[1].components)
    names = f"{here[0].kind} {here[0].digest[:SHORT]} and {there[0].kind} {there[0].digest[:SHORT]}"
    if not found:
        console.print(f"{names} do not differ")
        return
    console.print(f"{names}, {age(there[1].made)} old, differ in")
    console.print(differences_table(found))


def find(store: EntryStore, beginning: str) -> tuple[Entry, About]:
    """The one entry whose digest begins so."""
    found = [entry for entry in store.entries() if beginning and entry.digest.startswith(beginning.lower())]
    if len(found) != 1:
        what = f"{len(found)} entries begin" if found else "no entry begins"
        names = ", ".join(sorted(entry.digest[:SHORT] for entry in found)[:5])
        raise UserError(
            f"{what} with {beginning!r}", {"found": names, "in": str(store.folder), "all": "python -m ferrite cache ls"}
        )
    about = store.about(found[0])
    if about is None:
        raise UserError(
            f"entry {found[0].digest[:SHORT]} is damaged", {"to change that": "python -m ferrite cache verify --remove"}
        )
    return found[0], about


# --- verify and clear -------------------------------------------------------------------------------------------------


def verify(chosen: argparse.Namespace) -> int:
    store, console = store_of(chosen), Console(highlight=False)
    entries = sorted(store.entries(), key=lambda entry: entry.digest)
    table, removed = new_table("entry", "kind", "problem", "done"), 0
    for entry in track(entries, "checking", console=console, transient=True, disable=not console.is_terminal):
        problem = store.problem_of(entry)
        if problem is not None:
            gone = chosen.remove and store.remove(entry)
            removed += gone
            table.add_row(entry.digest[:SHORT], entry.kind, side(problem), "removed" if gone else "")
    left = store.sweep() if chosen.remove else 0
    if table.row_count:
        console.print(table)
    abandoned = f", {left} files removed that were left behind half written" if left else ""
    print(f"{len(entries) - table.row_count} of {len(entries)} entries are whole{abandoned}")
    return 1 if table.row_count > removed else 0


def clear(chosen: argparse.Namespace) -> int:
    store = store_of(chosen)
    before = time.time() - (chosen.unused_days or 0.0) * 86400
    entries = [entry for entry in store.entries(chosen.kind) if chosen.unused_days is None or entry.used / 1e9 < before]
    if not entries:
        print(f"nothing to remove in {store.folder}")
        return 0
    what = f"{len(entries)} entries, {size(sum(entry.size for entry in entries))}, in {store.folder}"
    if not chosen.yes and not agreed(what):
        print("nothing was removed")
        return 1
    removed = sum(map(store.remove, entries))
    store.sweep()
    print(f"removed {removed} of {what}")
    return 0 if removed == len(entries) else 1


def agreed(what: str) -> bool:
    """Ask; where nobody can answer, say how to go on."""
    if not sys.stdin.isatty():
        raise UserError(f"this would remove {what}", {"to go on": "python -m ferrite cache clear --yes"})
    return input(f"Remove {what}? [y/N] ").strip().lower() in ("y", "yes")


def new_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        right = column in ("size", "made", "used", "sections")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table


def size(count: int) -> str:
    """Bytes in the unit that fits.

    >>> size(3 << 20)
    '3.0 MiB'
    """
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= length:
            return f"{count / length:.1f} {unit}"
    return f"{count} B"
