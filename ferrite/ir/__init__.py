"""The representations below FX, all of them frozen plain data.

`program`: what a graph computes: buffers, and operations in order, over scalar expressions (`expr`) and index
arithmetic (`index`). `laws` are its laws, `text` and `parse` its text, `interpret` its meaning; `arguments` are what
calls in it are given.
`kernel`: how a piece of a program is computed: loops, tiles, accumulators. `kernel_laws`, `kernel_text`, `kernel_parse`
and `run_kernel` are the same for kernels; `canonical` makes equal ones equal.
"""

from ferrite.ir.index.algebra import Index  # before its parts, `sums` and `division`, which build on it

__all__ = ["Index"]
