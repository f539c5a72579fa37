"""What every contract test shares: a clean compiler, and both kinds of shapes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compare import reset


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    reset()
    yield
    reset()


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.lengthy)], ids=["static", "dynamic"])
def dynamic(request: pytest.FixtureRequest) -> bool:
    """Whether sizes are symbols. `make check` has those of `test_dynamic_shapes.py`, `make test` all."""
    return bool(request.param)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["static", "dynamic"])
def rarely_dynamic(request: pytest.FixtureRequest) -> bool:
    """The same for wide tables of cases: the symbolic half is left to the long sweeps."""
    return bool(request.param)
