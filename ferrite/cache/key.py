"""The key of an entry: named components, each a short text.

A component says a fact that compiled code depends on: the version of torch, an option, what an input looks like. They
are kept apart, and not only as one digest, so that a miss can be explained: by the nearest entry, and what differs.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

MAX_COMPONENT_CHARACTERS = 200  # characters of a component that are kept as they are


@dataclass(frozen=True, eq=False)
class Key:
    """Made by `Key.of`. Two keys are the same if their digests are."""

    kind: str
    components: Mapping[str, str]

    @staticmethod
    def of(kind: str, components: Mapping[str, str]) -> Key:
        return Key(kind, {name: shortened(components[name]) for name in sorted(components)})

    @functools.cached_property
    def digest(self) -> str:
        return digest_of(json.dumps([self.kind, dict(self.components)], sort_keys=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def digest_of(text: str | bytes) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass") if isinstance(text, str) else text).hexdigest()


def shortened(text: str) -> str:
    """A text that can be read, or the digest of a long one.

    >>> shortened("2.13.0")
    '2.13.0'
    >>> shortened("x" * 1000)
    'sha256 44f8354494a5ba03ba1792a8d3e9c534'
    """
    return text if len(text) <= MAX_COMPONENT_CHARACTERS else f"sha256 {digest_of(text)[:32]}"
