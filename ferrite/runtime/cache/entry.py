"""One entry of the cache as bytes: a head, a JSON text, and sections of bytes (object code).

    head       magic, format version, length of the JSON, length of the whole, SHA-256 of the JSON
    JSON       kind, components of the key, when it was made, metadata, and of the sections: places and SHA-256
    sections   one after the other, each at a multiple of 64 bytes

Data only: reading an entry runs nothing. Every byte is covered by a checksum or checked by value, so an entry that was
cut short, overwritten or written by another version shows when it is read. That is why nothing needs to be flushed to
the disk before it is published.

SHA-256 and not BLAKE2: processors have instructions for it, and it is several times as fast there.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAGIC = b"ferrite\n"
VERSION = 1
HEAD = struct.Struct("<8sIIQ32s")
ALIGNMENT = 64
LONGEST_JSON = 64 << 20


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
        body += bytes(-len(body) % ALIGNMENT)
    about = {
        "kind": kind,
        "components": dict(components),
        "made": made,
        "metadata": dict(artifact.metadata),
        "sections": places,
        "checksum": hashlib.sha256(body).hexdigest(),
    }
    text = json.dumps(about, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-(HEAD.size + len(text)) % ALIGNMENT)
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
    if length > min(LONGEST_JSON, size - HEAD.size):
        raise Damaged("its head is wrong")
    return length, checksum


def read_about(data: bytes, size: int) -> About:
    """The JSON of an entry; `data` must hold at least that much of it."""
    length, checksum = read_head(data, size)
    text = data[HEAD.size : HEAD.size + length]
    if hashlib.sha256(text).digest() != checksum:
        raise Damaged("its description is not what was written")
    start = HEAD.size + length
    about = json.loads(text)
    places = {name: (start + place, count) for name, (place, count) in about["sections"].items()}
    return About(about["kind"], about["components"], about["made"], about["metadata"], places, about["checksum"])


def decode(data: bytes) -> tuple[About, Artifact]:
    """A whole entry, every byte checked."""
    about = read_about(data, len(data))
    body = memoryview(data)[HEAD.size + read_head(data, len(data))[0] :]
    if hashlib.sha256(body).hexdigest() != about.checksum:
        raise Damaged("its contents are not what was written")
    sections = {name: data[start : start + count] for name, (start, count) in about.places.items()}
    return about, Artifact(sections, about.metadata)
