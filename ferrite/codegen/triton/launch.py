"""How a kernel is started on a device: data beside its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ferrite.codegen.triton.float8 import FORMATS
from ferrite.ir import Atom, Data, Index, Symbol, evaluate, symbol
from ferrite.ir.kernel import Pointer

MAX_PROGRAMS = (1 << 31) - 1  # of one dimension of a grid
FAILURE_WORDS = 4  # number of the check that failed, or 0; the value; the extent; how many failed
ALIGNMENT = "ALIGNMENT"  # a constant of a grouped kernel: what the addresses of its table are multiples of, in bytes
NARROW = "NARROW"  # a constant: whether all indices fit into 32 bits
EVEN = "EVEN_"  # the beginning of constants: whether a product of sizes is a multiple of 16
EVEN_ELEMENTS = 16
DESCRIPTORS = "DESCRIPTORS"  # a constant: whether blocks may be loaded by descriptors of what lies behind pointers
DESCRIPTOR_BYTES = 128  # of memory for each that a program makes
# Of a kernel that was not arranged for a GPU, which would say how many warps it has (see `grid`): no speed rests on it.
ELEMENTS_OF_A_WARP, MAX_WARPS = 256, 8
# How the source is compiled for CUDA: a product and a sum may be one instruction with one rounding, as in the kernels
# of torch itself; the smallest numbers are not zero.
OPTIONS = {"enable_fp_fusion": True, "enable_reflect_ftz": False}

# Element types that a kernel may have, by their names in Triton. Floats of 8 bits are their bits.
TYPES = {
    **dict.fromkeys(FORMATS, "tl.uint8"),
    torch.bool: "tl.int1",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.uint8: "tl.uint8",
    torch.uint16: "tl.uint16",
    torch.uint32: "tl.uint32",
    torch.uint64: "tl.uint64",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}


@dataclass(frozen=True)
class Block:
    """A constant of the source: how many elements of an axis are done at once, a power of two.

    The smallest one that covers `extent`, and `most` at most: small problems get small blocks.
    """

    name: str
    extent: Index
    most: int

    @property
    def symbol(self) -> Symbol:
        return symbol(self.name, 1, self.most)

    @property
    def for_all_sizes(self) -> int:
        return self.most if self.extent.atoms else self.size({})

    def size(self, values: dict[Atom, int]) -> int:
        return min(self.most, power_of_two(int(evaluate(self.extent, values))))


@dataclass(frozen=True)
class LaunchConfig:
    """Arguments are the pointers, the sizes, memory for a failure if there are `checks`, and the blocks by name. Of a
    grouped kernel, which has `rows`, they are a table of the pointers and rows (`ferrite.codegen.triton.grouped`), and
    the alignment of these pointers.

    `promises`: constants that are 1 where a number over the sizes is a multiple of 16, else 0. Code is made for 1.

    `programs`: how many instances run, over the sizes and blocks. A check that fails writes its number, from 1 on, the
    value and the extent to the first words of the failure; what the kernel wrote is of no use then.
    """

    name: str
    pointers: tuple[Pointer, ...]
    sizes: tuple[Symbol, ...]
    blocks: tuple[Block, ...]
    programs: Index
    checks: tuple[Data, ...]
    fixed_warps: int = 0  # what the kernel says; 0: by the size of its blocks
    rows: tuple[tuple[int, ...], ...] = ()
    descriptors: int = 0  # that a program makes
    promises: tuple[tuple[str, Index], ...] = ()

    @property
    def memory(self) -> int:
        """Bytes that a launch needs for descriptors."""
        return self.descriptors * DESCRIPTOR_BYTES * int(evaluate(self.programs, {})) if self.descriptors else 0

    def values(self, sizes: Sequence[int] | None) -> dict[Atom, int]:
        """Sizes and blocks, once the sizes are known; without them, blocks that do for all sizes."""
        if sizes is None:
            return {block.symbol: block.for_all_sizes for block in self.blocks}
        known: dict[Atom, int] = dict(zip(self.sizes, sizes, strict=True))
        return {**known, **{block.symbol: block.size(known) for block in self.blocks}}

    def constants(self, sizes: Sequence[int] | None) -> dict[str, int]:
        values = self.values(sizes)
        found = {block.name: values[block.symbol] for block in self.blocks}
        for name, word in self.promises:
            found[name] = int(sizes is None or evaluate(word, values) % EVEN_ELEMENTS == 0)
        return {**found, DESCRIPTORS: 1} if self.descriptors else found

    def instances(self, sizes: Sequence[int]) -> int:
        count = int(evaluate(self.programs, self.values(sizes)))
        if count > MAX_PROGRAMS:
            raise ValueError(f"{self.name} would need {count} programs; a grid has {MAX_PROGRAMS} at most")
        return count

    def warps(self, sizes: Sequence[int] | None) -> int:
        """What the kernel says; else enough for the largest block to be spread, and no more."""
        if self.fixed_warps:
            return self.fixed_warps
        elements = 1
        for name, size in self.constants(sizes).items():
            elements *= size if name not in (DESCRIPTORS, *dict(self.promises)) else 1
        return max(1, min(MAX_WARPS, power_of_two(elements) // ELEMENTS_OF_A_WARP))


def power_of_two(count: int) -> int:
    """The smallest one that is not below a count."""
    return 1 << max(count - 1, 0).bit_length()
