"""Records of measurements: texts that are read back, merged, and refused elsewhere."""

from __future__ import annotations

import pytest

from ferrite.tune import (
    InvalidRecord,
    Measured,
    ProductConfig,
    ProductProblem,
    Record,
    Where,
    configurations,
    parsed,
)

pytestmark = pytest.mark.quick

HERE = Where("NVIDIA H200", "3.6.0", "2.11.0+cu128")
THIN = ProductProblem("bf16", 1, 8, 4096, 4096, "summed", "summed")
SQUARE = ProductProblem("f16", 2, 512, 512, 512)
FOUND = Measured(19.8, 14.2, ProductConfig(16, 32, 128, 4, 4, pieces=2))
OTHER = Measured(10.0, 12.5, ProductConfig(128, 128, 64, 8, 3))

TEXT = """\
tuning record
gpu: NVIDIA H200
triton: 3.6.0
torch: 2.11.0+cu128

product bf16 1 x 8 x 4096 x 4096, summed, summed
    torch: 19.8 us
    ours: 14.2 us with 16 x 32 x 128, 4 warps, 4 stages, 8 in a column, 2 pieces
"""


def test_a_record_is_a_text():
    assert str(Record(HERE, {THIN: FOUND})) == TEXT
    assert parsed(TEXT) == Record(HERE, {THIN: FOUND})
    assert parsed(str(Record(HERE))) == Record(HERE)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("tuning record", "something", "line 1"),
        ("triton: 3.6.0\n", "", "line 2"),
        ("19.8 us", "quick", "lines 6 to 8"),
        ("16 x 32", "16", "lines 6 to 8"),
        ("16 x 32", "17 x 32", "lines 6 to 8"),
        ("4 warps", "3 warps", "lines 6 to 8"),
        ("2 pieces", "0 pieces", "lines 6 to 8"),
        ("    torch: 19.8 us\n", "", "line 7: something is missing"),
    ],
)
def test_what_is_no_record_is_told(old, new, complaint):
    with pytest.raises(InvalidRecord, match=complaint):
        parsed(TEXT.replace(old, new))


def test_two_records_make_one():
    newer = Measured(19.0, 13.0, FOUND.config)
    merged = Record(HERE, {THIN: FOUND}).merged(Record(HERE, {THIN: newer, SQUARE: OTHER}))
    assert merged.products == {THIN: newer, SQUARE: OTHER}


def test_a_record_of_another_gpu_is_refused():
    other = Where("NVIDIA A100", HERE.triton, HERE.torch)
    refusal = parsed(TEXT).reason_against(other)
    assert refusal is not None
    assert "gpu NVIDIA H200, and here it is NVIDIA A100" in refusal.reason
    assert parsed(TEXT).reason_against(HERE) is None
    with pytest.raises(InvalidRecord, match="NVIDIA A100"):
        Record(HERE).merged(Record(other))


def test_pieces_have_a_configuration_too():
    found = configurations({THIN: FOUND})
    assert found[THIN] == FOUND.config
    assert found[ProductProblem("bf16", 2, 8, 4096, 2048, "summed", "summed")].pieces == 1
