"""Sizes, and products of sizes, that vectors want to be multiples of some power of two.

Where rows lie apart by a size, they begin where a vector can be loaded if it is a multiple of 16; of 8 or 4 will do for
shorter ones. Where a block ends at a product, its mask does not part a vector if that is a multiple, though no size
need be one. Code is made for what sizes are likely to be; the host sees whether they are.
"""

from __future__ import annotations

import math

from ferrite.codegen.triton.launch import EVEN_ELEMENTS
from ferrite.ir import Axis, Index, Load, Product, Sum, Symbol
from ferrite.ir.kernel import Kernel, Loop, Store, nodes_in, walk

MIN_EVEN = 4  # elements: of less, a load is hardly longer


def row_strides(kernel: Kernel) -> set[Symbol]:
    """Sizes that some axis takes steps of through memory."""
    found: set[Symbol] = set()
    for statement in walk(kernel.body):
        loads = [item for item in nodes_in(statement) if isinstance(item, Load)]
        places = [index for load in loads for index in load.coordinates]
        places += statement.coordinates if isinstance(statement, Store) else ()
        for term in [term for place in places if isinstance(place, Sum) for term, _factor in place.terms]:
            if isinstance(term, Product) and any(isinstance(factor, Axis) for factor in term.factors):
                found.update(factor for factor in term.factors if isinstance(factor, Symbol))
    return found


def partly_even(kernel: Kernel) -> list[tuple[Symbol, int]]:
    """Those that are likely to be multiples of 4 or 8, but not of 16, each with that; none of which a product is."""
    strides = row_strides(kernel).difference(*(product.factors for product in even_products(kernel)))
    return [(size, size.likely) for size in kernel.sizes if size in strides and size.likely in (4, 8)]


def even_products(kernel: Kernel) -> list[Product]:
    """Extents of blocks that are products of sizes, and likely to be multiples of 16 though no size need be one."""
    loops = [item for item in walk(kernel.body) if isinstance(item, Loop) and item.lanes > 1]
    extents: dict[Index, None] = dict.fromkeys(item.axis.extent for item in loops)
    found = []
    for extent in extents:
        if isinstance(extent, Product) and all(isinstance(each, Symbol) for each in extent.factors):
            parts = [each.likely or 1 for each in extent.factors if isinstance(each, Symbol)]
            if math.prod(parts) % EVEN_ELEMENTS == 0 and max(parts) < EVEN_ELEMENTS:
                found.append(extent)
    return found
