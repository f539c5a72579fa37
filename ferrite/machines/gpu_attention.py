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
    rows, and for those of keys; in 16 bits, and in 32 for all three. Those that were not measured by
    `bench/attention_blocks.py`, for long rows and in 32 bits, were taken by a rule."""

    # Measured (batch 4, 16 heads, length 4096, bf16; microseconds with a causal mask, and with a bias looked up):
    # width 64, result: 394 and 1082 (432 and 1114 with 128 x 64, 4 warps, 3 stages)
    #           rows: 450 and 1083 (665 and 1670 with 128 x 64, 8 warps, 2 stages), keys: 666 and 1650 (817 and 2079)
    # width 128, result: 635 with 2 stages and 4 warps (818 with 3 and 8), rows: 833 and 1951 (919 and 2056),
    #           keys: 1069 and 2369 (1207 and 2638)
    results: tuple[tuple[int, AttentionBlocks], ...] = (
        (64, AttentionBlocks(64, 64, warps=4, stages=3)),
        (128, AttentionBlocks(128, 64, warps=4, stages=2)),
        (256, AttentionBlocks(64, 32, warps=4, stages=3)),
    )
    row_gradients: tuple[tuple[int, AttentionBlocks], ...] = (
        (64, AttentionBlocks(64, 64, warps=4, stages=3)),
        (128, AttentionBlocks(64, 64, warps=4, stages=2)),
        (256, AttentionBlocks(64, 32, warps=4, stages=1)),
    )
    key_gradients: tuple[tuple[int, AttentionBlocks], ...] = (
        (64, AttentionBlocks(64, 128, warps=4, stages=2)),
        (128, AttentionBlocks(64, 64, warps=4, stages=2)),
        (256, AttentionBlocks(32, 32, warps=4, stages=1)),
    )
    in_32_bits: tuple[tuple[int, AttentionBlocks], ...] = (
        (64, AttentionBlocks(64, 32, warps=4, stages=2)),
        (128, AttentionBlocks(32, 32, warps=4, stages=2)),
        (256, AttentionBlocks(16, 16, warps=4, stages=1)),
    )

    # Keys that a program has at least, where several share those of a row.
    # Measured: decoding with 8 heads of 128 in bf16, 1024 keys: 11.0 us with 64, 12.0 with 128, 15.4 with 256, 21.9
    # with 512; 4096 keys: 16.2, 16.9, 17.8 and 23.0; 16384 keys, or a batch of 8: within 2 % from 32 to 256.
    min_piece_keys: int = 64

    def blocks(self, itemsize: int, width: int, backward: bool, by_keys: bool) -> AttentionBlocks:
        table = self.results if not backward else self.key_gradients if by_keys else self.row_gradients
        if itemsize > 2:
            table = self.in_32_bits
        return next((blocks for longest, blocks in table if width <= longest), table[-1][1])


ATTENTION_BLOCKS = AttentionMachine()
