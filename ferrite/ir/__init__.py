"""The representations below FX, all of them frozen plain data.

`program`: what a graph computes: buffers, and operations in order, over scalar expressions (`expr`) and index
arithmetic (`index`). `laws` are its laws, `text` and `parse` its text, `interpret` its meaning; `arguments` are what
calls in it are given.
`kernel`: how a piece of a program is computed: loops, tiles, accumulators. `kernel_laws`, `kernel_text`, `kernel_parse`
and `run_kernel` are the same for kernels; `canonical` makes equal ones equal.
"""

from ferrite.ir.evaluate import Points, out_of_bounds
from ferrite.ir.expr import (
    COMPLAINT,
    Cast,
    Const,
    Data,
    Expr,
    IndexValue,
    Load,
    Local,
    Masked,
    Op,
    Param,
    Random,
    cast,
    const,
    data,
    data_atoms,
    data_of,
    index_value,
    indices_of,
    load,
    masked,
    nodes_of,
    op,
    rewrite_indices,
    rewrite_loads,
    rewrite_nodes,
    symbols_in,
    with_parts,
)
from ferrite.ir.index.algebra import Index
from ferrite.ir.intern import Interned
from ferrite.ir.intervals import interval
from ferrite.ir.invalid import InvalidProgram
from ferrite.ir.philox import DIGITS, KEY_STEPS, MULTIPLIERS, ROUNDS, WORD, philox
from ferrite.ir.random import MAX_RANDOM_OPERATORS, PLACE_BITS
from ferrite.ir.scalar import OPERATORS, STOPPING
from ferrite.ir.states import STATES, both, choose, compare, either, params
from ferrite.ir.types import NARROW, SHORT, arithmetic_type, bits_of, foldable, is_integer, short, value_of

__all__ = [
    "COMPLAINT",
    "DIGITS",
    "KEY_STEPS",
    "MAX_RANDOM_OPERATORS",
    "MULTIPLIERS",
    "NARROW",
    "OPERATORS",
    "PLACE_BITS",
    "ROUNDS",
    "SHORT",
    "STATES",
    "STOPPING",
    "WORD",
    "Cast",
    "Const",
    "Data",
    "Expr",
    "Index",
    "IndexValue",
    "Interned",
    "InvalidProgram",
    "Load",
    "Local",
    "Masked",
    "Op",
    "Param",
    "Points",
    "Random",
    "arithmetic_type",
    "bits_of",
    "both",
    "cast",
    "choose",
    "compare",
    "const",
    "data",
    "data_atoms",
    "data_of",
    "either",
    "foldable",
    "index_value",
    "indices_of",
    "interval",
    "is_integer",
    "load",
    "masked",
    "nodes_of",
    "op",
    "out_of_bounds",
    "params",
    "philox",
    "rewrite_indices",
    "rewrite_loads",
    "rewrite_nodes",
    "short",
    "symbols_in",
    "value_of",
    "with_parts",
]
