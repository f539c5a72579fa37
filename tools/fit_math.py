"""Write the polynomials of the vector math functions, fitted from their definitions.

python tools/fit_math.py             every fit anew (some minutes)
python tools/fit_math.py EXP LOG     these; the others stay as they are
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

from fit import Fit
from math_specs import ELEMENTARY, SPECIAL, Spec

FOLDER = Path(__file__).parents[1] / "ferrite" / "codegen" / "coefficients"
FILES = {FOLDER / "elementary.py": ELEMENTARY, FOLDER / "special.py": SPECIAL}
HEAD = '''"""Coefficients, lowest power first: made by tools/fit_math.py, not by hand.

Each is the best fit in the sense of Chebyshev, with coefficients rounded to the type. The error beside it is that of
the rounded coefficients in exact arithmetic, relative to what the function gives.
"""

# fmt: off
'''


def numbers(values: tuple[float, ...], indent: str) -> str:
    lines, line = [], indent
    for value in values:
        word = f"{value!r}, "
        if len(line) + len(word) > 118:
            lines.append(line.rstrip())
            line = indent
        line += word
    return "\n".join([*lines, line.rstrip()])


def block(name: str, spec: Spec) -> str:
    lines, entries = [f"# {spec.meaning}"], []
    for element, fit in spec.fits().items():
        size = str(len(fit.coefficients))
        if len(fit.denominator) > 1:
            size += f" over {len(fit.denominator)}"
        lines.append(f"# {element}: {size} coefficients on {spec.range(element)}, error 2^{math.log2(fit.error):.1f}")
        entries.append(entry(element, fit))
    return "\n".join([*lines, f"{name} = {{", *entries, "}"]) + "\n"


def entry(element: str, fit: Fit) -> str:
    if len(fit.denominator) == 1:
        return f'    "{element}": (\n{numbers(fit.coefficients, " " * 8)}\n    ),'
    parts = (f"        (\n{numbers(part, ' ' * 12)}\n        )," for part in (fit.coefficients, fit.denominator))
    return "\n".join([f'    "{element}": (', *parts, "    ),"])


def renew(path: Path, specs: dict[str, Spec], names: list[str]) -> None:
    """Fit what is named, or everything; other blocks of the file stay."""
    old = path.read_text() if path.exists() and names else ""
    found = re.finditer(r"((?:^#.*\n)+(\w+) = \{\n(?:.+\n)+?\}\n)", old, re.MULTILINE)
    blocks = {match[2]: match[1] for match in found}
    for name in names or specs:
        if name in specs:
            blocks[name] = block(name, specs[name])
            print(blocks[name].split(" = {")[0], flush=True)
    path.write_text("\n".join([HEAD, *(blocks[name] for name in specs)]))


def main(names: list[str]) -> None:
    for path, specs in FILES.items():
        renew(path, specs, names)


if __name__ == "__main__":
    main(sys.argv[1:])
