"""Irrational constants, each as a sum of floats: the nearest one, the nearest to what remains, and once more.

>>> PI["double"][:2]
(3.141592653589793, 1.2246467991473532e-16)
"""

from __future__ import annotations

import struct
from fractions import Fraction

Parts = tuple[float, float, float]


def rounded(number: float) -> float:
    """A number as a float of 32 bits holds it."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def _parts(exact: Fraction, element: str) -> Parts:
    found = []
    for _ in range(3):
        part = rounded(float(exact)) if element == "float" else float(exact)
        found.append(part)
        exact -= Fraction(part)
    return found[0], found[1], found[2]


def in_parts(digits: str) -> dict[str, Parts]:
    return {element: _parts(Fraction(digits), element) for element in ("float", "double")}


PI = in_parts("3.1415926535897932384626433832795028841971693993751058209749446")
HALF_PI = {element: (parts[0] / 2, parts[1] / 2, parts[2] / 2) for element, parts in PI.items()}
LN2 = in_parts("0.69314718055994530941723212145817656807550013436025525412068001")
LOG2_OF_E = in_parts("1.4426950408889634073599246810018921374266459541529859341354494")
LOG10_OF_E = in_parts("0.43429448190325182765112891891660508229439700580366656611445378")
LOG10_OF_2 = in_parts("0.30102999566398119521373889472449302676818988146210854131042746")
DIGAMMA_ZERO = in_parts("1.4616321449683623412626595423257213284681962040064463512959884")  # the only positive one
