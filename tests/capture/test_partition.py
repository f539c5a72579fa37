"""What the partitioner chose is in the record: what is kept for backward, what is computed again, and its bytes."""

from __future__ import annotations

from typing import Any

import torch

import ferrite


def saved_by(function: Any, *inputs: torch.Tensor, **options: Any) -> Any:
    compiled = torch.compile(function, backend="ferrite", options={"strict": True, **options})
    compiled(*inputs).sum().backward()
    return ferrite.last_compile().saved


def through_a_product(x, w):
    hidden = torch.tanh(x @ w)
    return torch.sin(hidden.cos().t())


def inputs():
    return torch.randn(8, 4), torch.randn(4, 16, requires_grad=True)


def test_cheap_values_are_computed_again_and_costly_ones_kept():
    saved = saved_by(through_a_product, *inputs())
    assert [value.operator for value in saved.kept] == ["aten.tanh.default"]
    assert [value.about for value in saved.kept] == ["f32[8, 16]"]
    assert [value.operator for value in saved.recomputed] == ["aten.cos.default"], "not its transpose, a view"
    assert saved.bytes == saved.recomputed_bytes == 8 * 16 * 4
    assert saved.inputs == 1, "x, whichever way round"
    assert saved.values == 2
    assert "hidden = torch.tanh(x @ w)" in str(saved.kept[0].line)


def test_nothing_is_computed_again_where_everything_is_kept():
    saved = saved_by(through_a_product, *inputs(), partition="save-all")
    assert saved.recomputed == ()
    assert {value.operator for value in saved.kept} >= {"aten.tanh.default", "aten.permute.default"}
    assert saved.bytes == 2 * 8 * 16 * 4, "two values that lie in one memory count once"


def test_the_printed_record_lists_both():
    saved_by(through_a_product, *inputs())
    text = str(ferrite.last_compile())
    rows = [line.split()[:4] for line in text.splitlines()]
    assert ["saved", "aten.tanh.default", "1", "512"] in rows
    assert ["recomputed", "aten.cos.default", "1", "512"] in rows
    assert "recomputed in backward: 1 values; keeping them would take 512 bytes" in text


def test_bytes_are_those_of_the_sizes_seen():
    compiled = torch.compile(lambda x: x.sum(1).exp(), backend="ferrite", dynamic=True, options={"strict": True})
    compiled(torch.randn(3, 4, requires_grad=True)).sum().backward()
    saved = ferrite.last_compile().saved
    (value,) = saved.kept
    assert value.about.startswith("f32[s")
    assert saved.bytes == 3 * 4
