"""Look for what was built before; publish what was built now.

    lookup = look_up(store, make_key, "forward graph", read)
    if lookup.found is None:
        built = ...
        outcome = lookup.publish(lambda: NewEntry(sections, metadata))

A graph that cannot be cached is built all the same, and the outcome says why. What differs from the nearest entry is
found out when somebody asks: a miss costs nothing more than the build.

An entry that its reader cannot use is a miss like any other, with a reason: `read` says so by an exception of any kind.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from ferrite.cache.entry import About, Artifact
from ferrite.cache.folder import Unusable, full_path
from ferrite.cache.key import Key
from ferrite.cache.store import Entry, EntryStore, words_of
from ferrite.errors import NotCached, Refusal
from ferrite.options import Options

Found = TypeVar("Found")
Result = Literal["hit", "miss", "not kept", "off"]
ARTIFACTS = "artifacts"


@dataclass(frozen=True)
class Outcome:
    """How one question to the cache went."""

    what: str
    result: Result
    reason: str = ""
    key: Key | None = None
    store: EntryStore | None = None
    at: float = 0.0  # when it was asked, seconds since 1970
    seconds: float = 0.0  # for the key and for reading


@dataclass(frozen=True)
class NewEntry:
    """What is published: sections of bytes and plain data; `refusal` says why it is not to be kept, if it is not;
    `note` what else is to be known of it."""

    sections: Mapping[str, bytes]
    metadata: Mapping[str, Any]
    refusal: Refusal | None = None
    note: str = ""


@dataclass(frozen=True)
class Difference:
    """A component that an entry has otherwise; None where one side has none."""

    name: str
    there: str | None
    here: str | None


@functools.lru_cache(maxsize=32)
def _store(folder: Path, megabytes: int) -> EntryStore:
    try:
        folder = full_path(folder)
    except Unusable as problem:
        store = EntryStore(Path(os.sep) / folder, megabytes << 20)  # a place that nobody looks at
        store.give_up(problem, reads=False)
        return store
    return EntryStore(folder / ARTIFACTS, megabytes << 20, folder)


def open_store(options: Options) -> EntryStore | None:
    """The store that the options name, one for the whole process; None if the cache is off."""
    return _store(options.cache_folder(), options.cache_size) if options.cache else None


class Lookup(Generic[Found]):
    """One question to the cache. `found`: what the reader made of an entry, or None: then what is built instead may be
    published."""

    def __init__(self, outcome: Outcome, found: Found | None = None) -> None:
        self.outcome, self.found = outcome, found

    @property
    def keeps(self) -> bool:
        """Whether there is a place for what will be built."""
        return self.outcome.result == "miss"

    def publish(self, describe: Callable[[], NewEntry]) -> Outcome:
        """Keep what was built, if that can be. `describe` is called only where there is a place for it."""
        if not self.keeps:
            return self.outcome
        store, key = self.outcome.store, self.outcome.key
        assert store is not None
        assert key is not None
        built = describe()
        if built.refusal is not None:
            self.outcome = replace(self.outcome, result="not kept", reason=built.refusal.reason)
            return self.outcome
        try:
            store.publish(key, built.sections, built.metadata)
        except (TypeError, ValueError, RecursionError, MemoryError) as problem:
            reason = f"it cannot be written down: {words_of(problem)}"
            self.outcome = replace(self.outcome, result="not kept", reason=reason)
        else:
            told = [note for note in (self.outcome.reason, built.note, store.problem) if note]
            self.outcome = replace(self.outcome, reason="; ".join(told))
        return self.outcome


def look_up(
    store: EntryStore | None,
    make_key: Callable[[], Key],
    what: str,
    read: Callable[[Artifact], Found],
    strict: bool = False,
    takes: bool = True,
) -> Lookup[Found]:
    """What `read` makes of the entry of a key. Where it fails, the entry is removed: it is a miss. `strict`: a key that
    cannot be made for a reason nobody foresaw is an error. `takes`: otherwise an entry stays where it is, and what it
    has is built again, to be looked at."""
    if store is None:
        return Lookup(Outcome(what, "off", "option cache"))
    start, now = time.perf_counter(), time.time()
    try:
        key = make_key()
    except NotCached as refused:
        return Lookup(Outcome(what, "not kept", refused.refusal.reason, None, store, now))
    except Exception as failure:
        if strict:
            raise
        return Lookup(Outcome(what, "not kept", f"no key could be made: {words_of(failure)}", None, store, now))
    looked = store.look(key)
    seconds, refusal = time.perf_counter() - start, looked.refusal
    if looked.artifact is not None and not takes:
        return Lookup(Outcome(what, "hit", "compiled again for the report", key, store, now, seconds))
    if looked.artifact is not None:
        try:
            return Lookup(Outcome(what, "hit", "", key, store, now, seconds), read(looked.artifact))
        except Exception as failure:  # whatever is wrong with an entry costs the entry
            store.discard(key)
            refusal = Refusal(words_of(failure))
    reason = "" if refusal is None else f"its entry could not be used: {refusal.reason}"
    return Lookup(Outcome(what, "miss", reason, key, store, now, seconds))


# --- why it was a miss ------------------------------------------------------------------------------------------------


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[Difference]:
    """The components in which two keys differ, in the order of their names."""
    names = [name for name in {*there, *here} if there.get(name) != here.get(name)]
    return [Difference(name, there.get(name), here.get(name)) for name in sorted(names, key=in_words)]


def in_words(name: str) -> list[tuple[int, str]]:
    """So that `input 2` comes before `input 10`."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split()]


def nearest(store: EntryStore, kind: str, here: Mapping[str, str], before: float) -> tuple[Entry, About] | None:
    """The older entry with the fewest differences. One with the same operators, in another version or for other
    sizes, is nearer than any other graph."""
    described = ((entry, store.about(entry)) for entry in store.entries(kind))
    older = [(entry, about) for entry, about in described if about is not None and about.made < before]

    def distance(found: tuple[Entry, About]) -> tuple[bool, int, int]:
        entry, about = found
        other = any(about.components.get(name) != here.get(name) for name in ("operators", "text"))
        return other, len(differences(about.components, here)), -entry.used

    return min(older, key=distance, default=None)


def explain(outcome: Outcome) -> tuple[Entry, list[Difference]] | None:
    """The entry that a miss came nearest to, and in what it differs; None where there was no other."""
    if outcome.key is None or outcome.store is None:
        return None
    found = nearest(outcome.store, outcome.key.kind, outcome.key.components, outcome.at)
    return None if found is None else (found[0], differences(found[1].components, outcome.key.components))
