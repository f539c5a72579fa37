"""Ask the cache before building, and remember how it went.

    artifact, outcome = remember(store, make_key, build, "forward graph")

`build` runs on a miss alone. A graph that cannot be cached is built all the same, and the outcome says why. What
differs from the nearest entry is found out when somebody asks: a miss costs nothing more than the build.

An entry that its reader cannot use is a miss like any other, with a reason: `use` says so by an exception of any kind.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ferrite.options import Options
from ferrite.runtime.cache.entry import About, Artifact
from ferrite.runtime.cache.folder import Unusable, full_path
from ferrite.runtime.cache.key import Key, Uncacheable
from ferrite.runtime.cache.store import Entry, Found, Store, words_of

Result = Literal["hit", "miss", "not kept", "off"]
ARTIFACTS = "artifacts"


@dataclass(frozen=True)
class Outcome:
    """How one question to the cache went."""

    what: str
    result: Result
    reason: str = ""
    key: Key | None = None
    store: Store | None = None
    at: float = 0.0  # when it was asked, seconds since 1970
    seconds: float = 0.0  # for the key and for reading


@dataclass(frozen=True)
class Built:
    """What `build` returns: sections of bytes and plain data; `reason` says why it is not to be kept, if it is not;
    `note` what else is to be known of it."""

    sections: Mapping[str, bytes]
    metadata: Mapping[str, Any]
    reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class Difference:
    """A component that an entry has otherwise; None where one side has none."""

    name: str
    there: str | None
    here: str | None


@functools.lru_cache(maxsize=32)
def _store(folder: Path, megabytes: int) -> Store:
    try:
        folder = full_path(folder)
    except Unusable as problem:
        store = Store(Path(os.sep) / folder, megabytes << 20)  # a place that nobody looks at
        store.give_up(problem, reads=False)
        return store
    return Store(folder / ARTIFACTS, megabytes << 20, folder)


def open_store(options: Options) -> Store | None:
    """The store that the options name, one for the whole process; None if the cache is off."""
    return _store(options.cache_folder(), options.cache_size) if options.cache else None


def remember(
    store: Store | None,
    make_key: Callable[[], Key],
    build: Callable[[], Built],
    what: str,
    use: Callable[[Artifact], object] | None = None,
) -> tuple[Artifact, Outcome]:
    """The artifact of a key, from the cache or from `build`, and how that went. `use` is given one from the cache;
    where it fails, the entry is removed and made anew."""
    if store is None:
        return without_cache(build(), Outcome(what, "off", "option cache"))
    start, now = time.perf_counter(), time.time()
    try:
        key = make_key()
    except Uncacheable as reason:
        return without_cache(build(), Outcome(what, "not kept", str(reason), None, store, now))
    found = store.look(key)
    seconds = time.perf_counter() - start
    if found.artifact is not None:
        problem = reason_to_refuse(found.artifact, use)
        if problem is None:
            return found.artifact, Outcome(what, "hit", "", key, store, now, seconds)
        store.discard(key)
        found = Found(None, problem)
    built = build()
    if built.reason:
        return without_cache(built, Outcome(what, "not kept", built.reason, key, store, now, seconds))
    notes = [f"its entry could not be used: {found.problem}" if found.problem else "", built.note]
    try:
        artifact = store.publish(key, built.sections, built.metadata)
    except (TypeError, ValueError, RecursionError, MemoryError) as problem:
        unwritten = f"it cannot be written down: {words_of(problem)}"
        return without_cache(built, Outcome(what, "not kept", unwritten, key, store, now, seconds))
    told = "; ".join(note for note in [*notes, store.problem] if note)
    return artifact, Outcome(what, "miss", told, key, store, now, seconds)


def reason_to_refuse(artifact: Artifact, use: Callable[[Artifact], object] | None) -> str | None:
    """Why an entry cannot be used; None where it is in use now."""
    try:
        if use is not None:
            use(artifact)
    except Exception as problem:  # whatever is wrong with an entry costs the entry
        return words_of(problem)
    return None


def without_cache(built: Built, outcome: Outcome) -> tuple[Artifact, Outcome]:
    return Artifact(dict(built.sections), built.metadata), outcome


# --- why it was a miss ------------------------------------------------------------------------------------------------


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[Difference]:
    """The components in which two keys differ, in the order of their names."""
    names = [name for name in {*there, *here} if there.get(name) != here.get(name)]
    return [Difference(name, there.get(name), here.get(name)) for name in sorted(names, key=in_words)]


def in_words(name: str) -> list[tuple[int, str]]:
    """So that `input 2` comes before `input 10`."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split()]


def nearest(store: Store, kind: str, here: Mapping[str, str], before: float) -> tuple[Entry, About] | None:
    """The older entry with the fewest differences. One with the same operators, in another version or for other
    sizes, is nearer than any other graph."""
    known = ((entry, store.about(entry)) for entry in store.entries(kind))
    older = [(entry, about) for entry, about in known if about is not None and about.made < before]

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
