"""The artifact cache: what was compiled once is found again, in this process or another.

In: a key made of everything that compiled code depends on, and bytes with plain data to keep under it. Out: the same
bytes and data later, checked; or nothing, in which case they are made anew. Knows nothing of what they mean.
"""

from ferrite.runtime.cache.entry import About, Artifact
from ferrite.runtime.cache.facts import captured_key, graph_key, joint_key, kernel_key, source_digest
from ferrite.runtime.cache.key import Key, Uncacheable
from ferrite.runtime.cache.lookup import (
    Built,
    Difference,
    Outcome,
    differences,
    explain,
    nearest,
    open_store,
    remember,
)
from ferrite.runtime.cache.store import KINDS, Entry, Store

__all__ = [
    "KINDS",
    "About",
    "Artifact",
    "Built",
    "Difference",
    "Entry",
    "Key",
    "Outcome",
    "Store",
    "Uncacheable",
    "captured_key",
    "differences",
    "explain",
    "graph_key",
    "joint_key",
    "kernel_key",
    "nearest",
    "open_store",
    "remember",
    "source_digest",
]
