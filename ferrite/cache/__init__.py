"""The artifact cache: what was compiled once is found again, in this process or another.

In: a key made of everything that compiled code depends on, and bytes with plain data to keep under it. Out: the same
bytes and data later, checked; or nothing, in which case they are made anew. Knows nothing of what they mean.
"""

from ferrite.cache.codec import Strange, decode, encode
from ferrite.cache.compiled_graph import as_entry, from_entry
from ferrite.cache.entry import About, Artifact
from ferrite.cache.folder import Unusable, check_folder, full_path, make_folders, make_shared, write_folder, write_over
from ferrite.cache.kernels import KernelCaches
from ferrite.cache.key import Key
from ferrite.cache.key_components import captured_key, graph_key, joint_key, kernel_key, source_digest
from ferrite.cache.laws import check_passes
from ferrite.cache.lookup import (
    Difference,
    Lookup,
    NewEntry,
    Outcome,
    differences,
    explain,
    look_up,
    nearest,
    open_store,
)
from ferrite.cache.rewritten_graph import BeforePasses, KnownSizes, edit_as
from ferrite.cache.store import KINDS, Entry, EntryStore

__all__ = [
    "KINDS",
    "About",
    "Artifact",
    "BeforePasses",
    "Difference",
    "Entry",
    "EntryStore",
    "KernelCaches",
    "Key",
    "KnownSizes",
    "Lookup",
    "NewEntry",
    "Outcome",
    "Strange",
    "Unusable",
    "as_entry",
    "captured_key",
    "check_folder",
    "check_passes",
    "decode",
    "differences",
    "edit_as",
    "encode",
    "explain",
    "from_entry",
    "full_path",
    "graph_key",
    "joint_key",
    "kernel_key",
    "look_up",
    "make_folders",
    "make_shared",
    "nearest",
    "open_store",
    "source_digest",
    "write_folder",
    "write_over",
]
