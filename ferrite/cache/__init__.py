"""The artifact cache: what was compiled once is found again, in this process or another.

In: a key made of everything that compiled code depends on, and bytes with plain data to keep under it. Out: the same
bytes and data later, checked; or nothing, in which case they are made anew. Knows nothing of what they mean.
"""

from ferrite.cache.entry import About, Artifact
from ferrite.cache.key import Key, Uncacheable
from ferrite.cache.keys import captured_key, graph_key, joint_key, kernel_key, source_digest
from ferrite.cache.lookup import (
    Built,
    Difference,
    Lookup,
    Outcome,
    differences,
    explain,
    look_up,
    nearest,
    open_store,
)
from ferrite.cache.store import KINDS, Entry, Store

__all__ = [
    "KINDS",
    "About",
    "Artifact",
    "Built",
    "Difference",
    "Entry",
    "Key",
    "Lookup",
    "Outcome",
    "Store",
    "Uncacheable",
    "captured_key",
    "differences",
    "explain",
    "graph_key",
    "joint_key",
    "kernel_key",
    "look_up",
    "nearest",
    "open_store",
    "source_digest",
]
