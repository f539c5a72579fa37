"""How attention is arranged on a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionBlocks:
    """A program has `outer` rows and goes through the keys `inner` at a time, `stages` blocks of which are under way;
    of gradients of keys it has keys and goes through rows."""

    outer: int
    inner: int
    warps: int
    stages: int


@dataclass(frozen=True)
class AttentionMachine:
    """Blocks by the length of a row of queries or values, up to which each holds, for the result, for gradients of
    rows, and for those of keys; in 16 bits, and in 32 for all three. Taken by a rule, not tuned: what they give is in
    bench/results/flex-attention.md."""

    results: tuple[tuple[int, AttentionBlocks], ...] = (
        (64, AttentionBlocks(128, 64, warps=4, stages=3)),
        (128, AttentionBlocks(128, 64, warps=8, stages=3)),
        (256, AttentionBlocks(64, 32, warps=4, stages=3)),
    )
    row_gradients: tuple[tuple[int, AttentionBlocks], ...] = (
        (64, AttentionBlocks(128, 64, warps=8, stages=2)),
        (128, AttentionBlocks(128, 64, warps=8, stages=2)),
        (256, AttentionBlocks(64, 32, warps=4, stages=1)),
    )
    key_gradients: tuple[tuple[int, AttentionBlocks], ...] = (
        (64, AttentionBlocks(128, 64, warps=8, stages=2)),
        (128, AttentionBlocks(128, 64, warps=8, stages=2)),
        (256, AttentionBlocks(32, 32, warps=4, stages=1)),
    )
    in_32_bits: tuple[tuple[int, AttentionBlocks], ...] = (
        (64, AttentionBlocks(64, 32, warps=4, stages=2)),
        (128, AttentionBlocks(32, 32, warps=4, stages=2)),
        (256, AttentionBlocks(16, 16, warps=4, stages=1)),
    )

    # Keys that a program has at least, where several share those of a row. Not measured.
    min_piece_keys: int = 256

    def blocks(self, itemsize: int, width: int, backward: bool, by_keys: bool) -> AttentionBlocks:
        table = self.results if not backward else self.key_gradients if by_keys else self.row_gradients
        if itemsize > 2:
            table = self.in_32_bits
        return next((blocks for longest, blocks in table if width <= longest), table[-1][1])


ATTENTION_BLOCKS = AttentionMachine()
