"""What index arithmetic costs, beside the same in sympy.

    python -m bench.index [--layers 12] [--rounds 7]

The indices are those of a captured transformer: views, permutations, slices and splits of attention and of image
patches, from the coordinates of what is stored to flat offsets, and from these to the coordinates of what is loaded.
Every index is built in three ways: by ferrite; in sympy with `floor` and `Mod`; in sympy with torch's own functions for
the purpose. Sympy gets `expand`, not `simplify`, which takes much longer. Both start each round with empty tables, turn
by turn. Seconds are those of the processor, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from bench.measure import write
from ferrite.ir import algebra as own


@dataclass(frozen=True)
class Algebra:
    """One way to do arithmetic on indices."""

    name: str
    size: Callable[[str], Any]
    axis: Callable[[str, Any], Any]
    divide: Callable[[Any, Any], Any]
    remainder: Callable[[Any, Any], Any]
    finish: Callable[[Any], Any]
    start: Callable[[], None]


def sympy_algebra(name: str, divide: Callable[[Any, Any], Any], remainder: Callable[[Any, Any], Any]) -> Algebra:
    return Algebra(
        name,
        lambda text: sympy.Symbol(text, integer=True, positive=True),
        lambda text, _: sympy.Symbol(text, integer=True, nonnegative=True),
        divide,
        remainder,
        sympy.expand,
        sympy.core.cache.clear_cache,
    )


ALGEBRAS = (
    Algebra(
        "ferrite",
        lambda text: own.symbol(text, 1, None),
        own.axis,
        lambda top, bottom: top // bottom,
        lambda top, bottom: top % bottom,
        lambda made: made,
        own.forget,
    ),
    sympy_algebra("sympy, floor and Mod", lambda top, bottom: sympy.floor(top / bottom), sympy.Mod),
    sympy_algebra("sympy, torch's functions", FloorDiv, lambda top, bottom: ModularIndexing(top, 1, bottom)),
)


class Views:
    """Views as functions of coordinates, from what is asked for to what is there."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra

    def axes(self, *sizes: Any) -> list[Any]:
        return [self.algebra.axis(f"i{place}", self.as_size(size)) for place, size in enumerate(sizes)]

    def as_size(self, size: Any) -> Any:
        return own.as_index(size) if self.algebra.name == "ferrite" else sympy.sympify(size)

    def flat(self, coordinates: Sequence[Any], sizes: Sequence[Any]) -> Any:
        offset: Any = self.as_size(0)
        for coordinate, size in zip(coordinates, sizes, strict=True):
            offset = offset * size + coordinate
        return self.algebra.finish(offset)

    def split(self, offset: Any, sizes: Sequence[Any]) -> list[Any]:
        """The coordinates of an offset, the last first split off."""
        found: list[Any] = []
        for size in reversed(sizes[1:]):
            found.insert(0, self.algebra.finish(self.algebra.remainder(offset, self.as_size(size))))
            offset = self.algebra.finish(self.algebra.divide(offset, self.as_size(size)))
        return [offset, *found]

    def reshape(self, coordinates: Sequence[Any], new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
        return self.split(self.flat(coordinates, new), old)


def attention(views: Views, batch: Any, length: Any, heads: int, width: int) -> Iterator[Any]:
    """Queries, keys and values from one product; rotary halves; scores; the result back in rows."""
    whole = heads * width
    b, h, s, d = views.axes(batch, heads, length, width)
    for which in range(3):  # view(b, s, 3, h, d).permute(2, 0, 3, 1, 4)[which]
        place = views.reshape(
            (b, s, views.as_size(which), h, d), (batch, length, 3, heads, width), (batch, length, 3 * whole)
        )
        yield views.flat(place, (batch, length, 3 * whole))
        # rotary embedding: cat(x[..., width//2:], x[..., :width//2])
        turned = views.algebra.finish(views.algebra.remainder(d + width // 2, views.as_size(width)))
        place = views.reshape(
            (b, s, views.as_size(which), h, turned), (batch, length, 3, heads, width), (batch, length, 3 * whole)
        )
        yield views.flat(place, (batch, length, 3 * whole))
    # matrix products take three dimensions: (b*h, s, d)
    bh, s, d = views.axes(batch * heads, length, width)
    place = views.reshape((bh, s, d), (batch * heads, length, width), (batch, heads, length, width))
    yield views.flat((place[0], place[2], place[1], place[3]), (batch, length, heads, width))
    # scores (b*h, s, s) seen as (b, h, s, s) for the mask, and back
    bh, s, t = views.axes(batch * heads, length, length)
    place = views.reshape((bh, s, t), (batch * heads, length, length), (batch, heads, length, length))
    yield views.flat(place, (batch, heads, length, length))
    # the result: view(b, h, s, d).transpose(1, 2).reshape(b, s, h*d)
    b, s, e = views.axes(batch, length, whole)
    h, d = views.split(e, (heads, width))
    yield views.flat(
        views.reshape((b, h, s, d), (batch, heads, length, width), (batch * heads, length, width)),
        (batch * heads, length, width),
    )
    # rows for the linear layer: (b*s, e), and the sum of both streams back in (b, s, e)
    row, e = views.axes(batch * length, whole)
    yield views.flat(views.reshape((row, e), (batch * length, whole), (batch, length, whole)), (batch, length, whole))


def patches(views: Views, batch: Any, channels: int, high: int, patch: int) -> Iterator[Any]:
    """Images cut into patches and windows, shifted, and put together again."""
    count = high // patch
    sizes = (batch, channels, count, patch, count, patch)
    b, rows, e = views.axes(batch, count * count, channels * patch * patch)
    (y, x), (c, u, v) = views.split(rows, (count, count)), views.split(e, (channels, patch, patch))
    yield views.flat(
        views.reshape((b, c, y, u, x, v), sizes, (batch, channels, high, high)), (batch, channels, high, high)
    )
    b, y, x, c = views.axes(batch, high, high, channels)
    moved = [views.algebra.finish(views.algebra.remainder(at + patch // 2, views.as_size(high))) for at in (y, x)]
    place = views.reshape((b, *moved, c), (batch, high, high, channels), (batch, count, patch, count, patch, channels))
    order = (place[0], place[1], place[3], place[2], place[4], place[5])
    windows = (batch * count * count, patch * patch, channels)
    yield views.flat(views.reshape(order, (batch, count, count, patch, patch, channels), windows), windows)


def transformer(algebra: Algebra, layers: int, symbolic: bool) -> list[Any]:
    views = Views(algebra)
    batch, length = (algebra.size("s0"), algebra.size("s1")) if symbolic else (8, 128)
    made: list[Any] = []
    for _ in range(layers):
        made += attention(views, batch, length, heads=12, width=64)
        made += patches(views, batch, channels=96, high=56, patch=7)
    return made


def operations(made: Any) -> int:
    """Divisions and remainders that are left."""
    text = (
        str(made).replace("floor", "//").replace("FloorDiv", "//").replace("ModularIndexing", "%").replace("Mod", "%")
    )
    return text.count("//") + text.count("%")


def measured(algebra: Algebra, layers: int, symbolic: bool) -> tuple[float, int, int]:
    """Seconds for all indices, how many there are, and how many divisions are left in them."""
    algebra.start()
    gc.collect()
    start = time.process_time()
    made = transformer(algebra, layers, symbolic)
    seconds = time.process_time() - start
    return seconds, len(made), sum(map(operations, made))


def report(layers: int, rounds: int) -> Iterator[str]:
    for title, depth in (
        ("One layer", 1),
        (f"{layers} layers: all but the first find what the first has made", layers),
    ):
        for symbolic in (False, True):
            yield f"## {title}, {'symbolic' if symbolic else 'static'} batch and length"
            yield ""
            yield "| | indices | microseconds per index | divisions left | ferrite's time, times |"
            yield "|---|---|---|---|---|"
            turns = [[measured(algebra, depth, symbolic) for algebra in ALGEBRAS] for _ in range(rounds)]
            for place, algebra in enumerate(ALGEBRAS):
                _, count, left = turns[0][place]
                each = statistics.median(turn[place][0] for turn in turns) / count * 1e6
                ratio = statistics.median(turn[place][0] / turn[0][0] for turn in turns)
                yield f"| {algebra.name} | {count} | {each:.0f} | {left} | {ratio:.1f} |"
            yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    lines = []
    for line in report(chosen.layers, chosen.rounds):
        print(line, flush=True)
        lines.append(line)
    write("index", "Index arithmetic", lines)


if __name__ == "__main__":
    main()
