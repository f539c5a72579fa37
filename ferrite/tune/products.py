"""Matrix products as problems, and how a kernel on a GPU is arranged for one: both are plain data, with a text each.

problem         product bf16 1 x 512 x 4096 x 1024, summed, columns
configuration   128 x 256 x 64, 8 warps, 3 stages, 8 in a column, 1 piece
                128 x 256 x 64, 8 warps, 4 stages, 8 in a column, 1 piece, resident
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

MIN_BLOCK, MAX_BLOCK, MAX_WARPS = 16, 512, 32  # of a side; of a program
MAX_SUMS = 32 * 256  # of a warp: more than all registers of its threads
Along = Literal["rows", "columns", "summed", "neither"]


@dataclass(frozen=True, order=True)
class ProductProblem:
    """`dtype`: of the factors, by its short name. `batch`: so many products at once. `left`, `right`: the axis along
    which the elements of a factor lie side by side in memory."""

    dtype: str
    batch: int
    rows: int
    columns: int
    summed: int
    left: Along = "summed"
    right: Along = "columns"

    PATTERN: ClassVar = re.compile(r"product (\w+) (\d+) x (\d+) x (\d+) x (\d+), (\w+), (\w+)")

    def __str__(self) -> str:
        sizes = " x ".join(map(str, (self.batch, self.rows, self.columns, self.summed)))
        return f"product {self.dtype} {sizes}, {self.left}, {self.right}"

    @staticmethod
    def parsed(text: str) -> ProductProblem | None:
        found = ProductProblem.PATTERN.fullmatch(text)
        if found is None:
            return None
        batch, rows, columns, summed = map(int, found.groups()[1:5])
        dtype, left, right = found[1], found[6], found[7]
        return ProductProblem(dtype, batch, rows, columns, summed, left, right)  # type: ignore[arg-type]

    def in_pieces(self, pieces: int) -> ProductProblem:
        """The problem that is left when every sum is made of so many, which are added up afterwards."""
        return replace(self, batch=self.batch * pieces, summed=self.summed // pieces)


@dataclass(frozen=True, order=True)
class ProductConfig:
    """`rows`, `columns`, `summed`: of the blocks that a program multiplies at once. `stages`: blocks of the factors
    whose loads are under way. `in_column`: blocks of rows that programs go through before the next block of columns, so
    that those which run at one time share what they read. `pieces`: parts of each sum, which are added up by another
    kernel; they divide it. `resident`: there is a program for each multiprocessor, which goes through blocks of the
    result, and has factors loaded by descriptors."""

    rows: int
    columns: int
    summed: int
    warps: int
    stages: int
    in_column: int = 8
    pieces: int = 1
    resident: bool = False

    PATTERN: ClassVar = re.compile(
        r"(\d+) x (\d+) x (\d+), (\d+) warps, (\d+) stages, (\d+) in a column, (\d+) pieces?(, resident)?"
    )

    def __str__(self) -> str:
        blocks = " x ".join(map(str, (self.rows, self.columns, self.summed)))
        pieces = f"{self.pieces} piece{'s' if self.pieces > 1 else ''}{', resident' if self.resident else ''}"
        return f"{blocks}, {self.warps} warps, {self.stages} stages, {self.in_column} in a column, {pieces}"

    @staticmethod
    def parsed(text: str) -> ProductConfig | None:
        found = ProductConfig.PATTERN.fullmatch(text)
        config = None
        if found is not None:
            rows, columns, summed, warps, stages, in_column, pieces = map(int, found.groups()[:7])
            config = ProductConfig(rows, columns, summed, warps, stages, in_column, pieces, found[8] is not None)
        return config if config is not None and config.is_possible else None

    @property
    def is_possible(self) -> bool:
        """Whether a program can be so: a text may have any numbers."""
        blocks, counts = (self.rows, self.columns, self.summed), (self.stages, self.in_column, self.pieces)
        powers = all(each & (each - 1) == 0 for each in (*blocks, self.warps))
        return (
            powers
            and min(blocks) >= MIN_BLOCK
            and max(blocks) <= MAX_BLOCK
            and 1 <= self.warps <= MAX_WARPS
            and (min(counts) >= 1 and self.rows * self.columns <= MAX_SUMS * self.warps)
        )

    def shared_bytes(self, itemsize: int) -> int:
        """Of the blocks of both factors that are there at once."""
        return (self.rows + self.columns) * self.summed * itemsize * self.stages

    def programs(self, problem: ProductProblem) -> int:
        blocks = math.ceil(problem.rows / self.rows) * math.ceil(problem.columns / self.columns)
        return problem.batch * self.pieces * blocks


# Blocks that are worth measuring, the large ones first. A product has those that it is large enough for.
CANDIDATES = (
    ProductConfig(128, 256, 64, warps=8, stages=4, resident=True),
    ProductConfig(128, 256, 64, warps=8, stages=3, resident=True),
    ProductConfig(128, 128, 64, warps=8, stages=4, resident=True),
    ProductConfig(128, 256, 64, warps=8, stages=4),
    ProductConfig(128, 256, 64, warps=8, stages=3),
    ProductConfig(256, 128, 64, warps=8, stages=3),
    ProductConfig(128, 128, 64, warps=8, stages=4),
    ProductConfig(128, 128, 64, warps=4, stages=4),
    ProductConfig(128, 128, 32, warps=4, stages=5),
    ProductConfig(128, 64, 64, warps=4, stages=4),
    ProductConfig(64, 128, 64, warps=4, stages=4),
    ProductConfig(64, 64, 64, warps=4, stages=5),
    ProductConfig(64, 64, 128, warps=4, stages=3),
    ProductConfig(32, 64, 128, warps=4, stages=4),
    ProductConfig(16, 64, 128, warps=4, stages=5),
    ProductConfig(16, 32, 256, warps=4, stages=4),
    ProductConfig(16, 16, 256, warps=2, stages=5),
)
# The same for factors of 32 bits, which are multiplied one by one: every product of a step is an instruction. A step
# has so many that sums of steps are as exact as a library's.
WIDE_CANDIDATES = (
    ProductConfig(64, 64, 32, warps=4, stages=3),
    ProductConfig(64, 64, 32, warps=8, stages=3),
    ProductConfig(32, 64, 32, warps=4, stages=3),
    ProductConfig(16, 64, 32, warps=4, stages=4),
    ProductConfig(16, 32, 64, warps=4, stages=4),
    ProductConfig(16, 16, 128, warps=4, stages=4),
)
