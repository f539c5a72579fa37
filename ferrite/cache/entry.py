"""One entry of the cache as bytes: a head, a JSON text, and sections of bytes (object code).

    head       magic, format version, length of the JSON, length of the whole, SHA-256 of the JSON
    JSON       kind, components of the key, when it was made, metadata, and of the sections: places and SHA-256
    sections   one after the other, each at a multiple of 64 bytes

Data only: reading an entry runs nothing. Every byte is covered by a checksum or checked by value, so an entry that was
cut short, overwritten or written by another version shows when it is read. That is why nothing needs to be flushed to
the disk before it is published.

A checksum says nothing about meaning. What an entry says of itself is checked here, too: types, places inside the
file, sizes before anything is read. What its metadata says is for those to check who know what it means.

SHA-256 and not BLAKE2: processors have instructions for it, and it is several times as fast there.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAGIC = b"ferrite\n"
VERSION = 2
HEAD = struct.Struct("<8sIIQ32s")
ALIGNMENT_BYTES = 64
MAX_JSON_BYTES = 64 << 20
MAX_ENTRY_BYTES = 256 << 20  # bytes of an entry: many times what a large model needs, and what any machine can read
SMALL_ENTRY_BYTES = 4 << 20  # bytes that are read without a look at the head first
MAX_SECONDS = 1 << 40  # seconds since 1970
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a character, as JSON may have it


class Damaged(Exception):
    """What is wrong with the bytes of an entry."""


@dataclass(frozen=True)
class About:
    """What an entry says of itself, without its sections."""

    kind: str
    components: Mapping[str, str]
    made: float  # seconds since 1970
    metadata: Mapping[str, Any]
    places: Mapping[str, tuple[int, int]] = field(repr=False)  # name -> start and length in the file
    checksum: str = field(repr=False)


@dataclass(frozen=True)
class Artifact:
    """What a compilation left: sections of bytes and plain data. Their meaning is their maker's."""

    sections: Mapping[str, bytes]
    metadata: Mapping[str, Any]


def encode(kind: str, components: Mapping[str, str], artifact: Artifact, made: float) -> bytes:
    """The bytes of an entry. Metadata that is not plain JSON is a TypeError or ValueError."""
    body, places = bytearray(), {}
    for name, section in artifact.sections.items():
        places[name] = (len(body), len(section))
        body += section
        body += bytes(-len(body) % ALIGNMENT_BYTES)
    about = {
        "kind": kind,
        "components": dict(components),
        "made": made,
        "metadata": dict(artifact.metadata),
        "sections": places,
        "checksum": hashlib.sha256(body).hexdigest(),
    }
    text = json.dumps(about, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-(HEAD.size + len(text)) % ALIGNMENT_BYTES)
    whole = HEAD.size + len(text) + len(body)
    return HEAD.pack(MAGIC, VERSION, len(text), whole, hashlib.sha256(text).digest()) + text + bytes(body)


def read_head(data: bytes, size: int) -> tuple[int, bytes]:
    """Length and checksum of the JSON of an entry that is `size` bytes long; `data` begins like the entry."""
    if len(data) < HEAD.size:
        raise Damaged("cut short" if size else "empty")
    magic, version, length, whole, checksum = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise Damaged("not an entry")
    if version != VERSION:
        raise Damaged(f"of format version {version}, not {VERSION}")
    if whole != size:
        raise Damaged("cut short" if size < whole else "longer than it says")
    if size > MAX_ENTRY_BYTES:
        raise Damaged(f"larger than {MAX_ENTRY_BYTES >> 20} MiB")
    if length > min(MAX_JSON_BYTES, size - HEAD.size):
        raise Damaged("its head is wrong")
    return length, checksum


def read_about(data: bytes, size: int) -> About:
    """The JSON of an entry; `data` must hold at least that much of it."""
    length, checksum = read_head(data, size)
    text = data[HEAD.size : HEAD.size + length]
    if hashlib.sha256(text).digest() != checksum:
        raise Damaged("its description is not what was written")
    try:
        return described(text, HEAD.size + length, size)
    except RecursionError:
        raise Damaged("its description is nested too deeply") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as problem:
        raise Damaged(f"its description makes no sense: {type(problem).__name__}: {problem}") from None


def described(text: bytes, start: int, size: int) -> About:
    """What the JSON says. `start`: where sections begin in the file; `size`: where it ends. ValueError and other
    errors say what is wrong."""
    about = json.loads(text)
    kind, components, made, metadata = (about[name] for name in ("kind", "components", "made", "metadata"))
    if type(kind) is not str or type(metadata) is not dict:
        raise ValueError("a kind is a word, and metadata has names")
    if type(components) is not dict or not set(map(type, components.values())) <= {str}:
        raise ValueError("components of a key are texts")
    if type(made) not in (int, float) or not 0 <= made < MAX_SECONDS:
        raise ValueError("it was made at no time")
    if (b"\\ud" in text or b"\\uD" in text) and SURROGATE.search(text):  # nobody could print it
        json.dumps(metadata, ensure_ascii=False).encode()
    places = {name: (start + place, count) for name, (place, count) in about["sections"].items()}
    for name, (place, count) in places.items():
        if type(place) is not int or type(count) is not int or not start <= place <= place + count <= size:
            raise ValueError(f"its section {name} lies outside")
    return About(kind, components, made, metadata, places, about["checksum"])


def read(read_more: Callable[[int], bytes], size: int) -> tuple[About, Artifact]:
    """A whole entry of so many bytes, every byte checked. `read_more` gives the next bytes of the file, at most as
    many as it is asked for; not more than an entry may have is ever asked for."""
    if size <= SMALL_ENTRY_BYTES:
        return decode(read_more(size))
    head = read_more(HEAD.size)
    read_head(head, size)
    return decode(head + read_more(size - len(head)))


def decode(data: bytes) -> tuple[About, Artifact]:
    about = read_about(data, len(data))
    body = memoryview(data)[HEAD.size + read_head(data, len(data))[0] :]
    if hashlib.sha256(body).hexdigest() != about.checksum:
        raise Damaged("its contents are not what was written")
    sections = {name: data[start : start + count] for name, (start, count) in about.places.items()}
    return about, Artifact(sections, about.metadata)
