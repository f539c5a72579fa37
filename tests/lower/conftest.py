"""Tests of lowering look at the programs that the compiler made: it keeps them while they run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lower import lowered


@pytest.fixture(autouse=True)
def kept_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("ferrite.backend.lower_graph", lowered.lower_and_keep)
    yield
    lowered.LOWERED.clear()
