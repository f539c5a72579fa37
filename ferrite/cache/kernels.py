"""Kernels on disk: object code by the text of a kernel, for all processes that share a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ferrite.cache.key_components import kernel_key, source_digest
from ferrite.cache.store import EntryStore
from ferrite.errors import Refusal


@dataclass(frozen=True)
class KernelCache:
    """`target` and `sources` as for the key of a graph. `problems`: what was wrong with entries that could not be
    used."""

    store: EntryStore
    target: str
    sources: str
    problems: list[str] = field(default_factory=list)

    def fetch(self, name: str, text: str, check: Callable[[str, bytes], Refusal | None]) -> bytes | None:
        """Object code that can be loaded under a name. What cannot is removed, and made anew."""
        key = kernel_key(text, target=self.target, sources=self.sources)
        found = self.store.look(key)
        code = b"" if found.artifact is None else found.artifact.sections.get("code", b"")
        refusal = found.refusal if found.artifact is None else check(name, code)
        if refusal is not None:
            self.store.discard(key)
            self.problems.append(f"the entry of {name} could not be used: {refusal.reason}")
        return None if refusal is not None or found.artifact is None else code

    def publish(self, text: str, code: bytes) -> None:
        self.store.publish(kernel_key(text, target=self.target, sources=self.sources), {"code": code}, {})


class KernelCaches:
    """For each kind of machine that a graph has kernels for, the cache of its kernels; none without a store."""

    def __init__(self, store: EntryStore | None) -> None:
        self.store = store
        self.problems: list[str] = []

    def __call__(self, identity: str) -> KernelCache | None:
        if self.store is None:
            return None
        return KernelCache(self.store, identity, source_digest(self.store), self.problems)
