"""Index arithmetic as Triton source.

Indices are mathematical integers; here they are 32 bits wide where bounds prove that no step leaves them, and 64
elsewhere. Triton divides towards zero, so a dividend that may be negative goes through a helper.
"""

from __future__ import annotations

from collections.abc import Callable

from ferrite.ir import Atom, FloorDiv, Index, Max, Min, Mod, Number, Product, Sum

LIMIT = (1 << 31) - (1 << 14)  # room for the lanes of a block that lie beyond the extent
Look = Callable[[Atom], tuple[str, bool]]  # the text of an atom, and whether it is surely 64 bits wide


def reach(index: Index) -> int | None:
    """The greatest magnitude that an index has."""
    return None if index.low is None or index.high is None else max(abs(index.low), abs(index.high))


def is_narrow(index: Index) -> bool:
    """Whether 32 bits hold it."""
    most = reach(index)
    return most is not None and most < LIMIT


def widened(text: str) -> str:
    return f"tl.cast({text}, tl.int64)"


class IndexText:
    """Prints indices. `atom` is asked for the text of what arithmetic does not look into."""

    def __init__(self, atom: Look, needs: Callable[[str], object]) -> None:
        self.atom, self.needs = atom, needs

    def text(self, index: Index) -> tuple[str, bool]:
        match index:
            case Number():
                return str(index.value), not is_narrow(index)
            case Atom():
                return self.atom(index)
            case Sum():
                return self.sum(index)
            case Product():
                return self.product(index)
            case FloorDiv() | Mod():
                return self.division(index)
            case Min() | Max():
                return self.choice(index)
        raise TypeError(f"no index: {index!r}")

    def operand(self, index: Index, wide: bool = False) -> tuple[str, bool]:
        """In brackets where it must be, made 64 bits wide where it is not surely so."""
        text, is_wide = self.text(index)
        if wide and not is_wide:
            return widened(text), True
        grouped = isinstance(index, Sum | Product | FloorDiv | Mod) or text.startswith("-")
        return (f"({text})" if grouped else text), is_wide

    def sum(self, index: Sum) -> tuple[str, bool]:
        # Every partial sum must fit: one part may be of 64 bits, and what wrapped before it joins is lost.
        total: int | None = abs(index.constant)
        for item, factor in index.terms:
            most = reach(item)
            total = None if total is None or most is None else total + abs(factor) * most
        wide = total is None or total >= LIMIT
        text = ""
        for item, factor in index.terms:
            part, _ = self.operand(item, wide)
            part = part if abs(factor) == 1 else f"{part} * {abs(factor)}"
            sign = " - " if factor < 0 else " + "
            text = text + sign + part if text else ("-" if factor < 0 else "") + part
        if index.constant:
            text += f" {'-' if index.constant < 0 else '+'} {abs(index.constant)}"
        return text, wide

    def product(self, index: Product) -> tuple[str, bool]:
        total: int | None = 1
        for factor in index.factors:
            most = reach(factor)
            total = None if total is None or most is None else total * max(most, 1)
        wide = total is None or total >= LIMIT
        return " * ".join(self.operand(factor, wide)[0] for factor in index.factors), wide

    def division(self, index: FloorDiv | Mod) -> tuple[str, bool]:
        top, top_wide = self.operand(index.top)
        bottom, bottom_wide = self.operand(index.bottom)
        wide = top_wide or bottom_wide
        if index.top.low is not None and index.top.low >= 0:
            return f"{top} {'//' if isinstance(index, FloorDiv) else '%'} {bottom}", wide
        name = "floor_divide" if isinstance(index, FloorDiv) else "floor_modulo"
        self.needs(name)
        return f"{name}({top}, {bottom})", wide

    def choice(self, index: Min | Max) -> tuple[str, bool]:
        name = "tl.minimum" if isinstance(index, Min) else "tl.maximum"
        parts = [self.text(item) for item in index.items]
        text = parts[0][0]
        for part, _ in parts[1:]:
            text = f"{name}({text}, {part})"
        return text, any(wide for _, wide in parts)
