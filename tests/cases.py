"""Long lists of cases: some run each time, all of them in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def seldom(cases: Iterable[Any], *slow: Any) -> list[Any]:
    """All cases; those named are slow."""
    every = list(cases)
    assert not (unknown := [case for case in slow if case not in every]), unknown
    return [pytest.param(case, marks=pytest.mark.slow) if case in slow else case for case in every]
