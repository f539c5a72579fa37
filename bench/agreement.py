"""Whether a compiled function computes what eager computes: a wrong one is reported, never timed.

Ours is held to the rule of the tests, everything observable included: values may be no farther from a float64 run than
eager's, within a small factor. Inductor promises less, so that only its values, types and shapes are looked at, with
more room: it shall not be left out of the comparison for being a little less exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bench.backends import OURS
from tests.compare import UPCAST, assert_no_farther, assert_same_tree, tensors_in

ROOM = 50.0  # how much farther than ours others may be off


def disagreement(backend: str, found: Any, eager: Any, exact: Any, terms: float = 0.0) -> str | None:
    """What is wrong with what a backend computed, or None. `exact` is None where values must be equal to the bit."""
    try:
        if backend == OURS:
            assert_same_tree(found, eager, exact, "results", terms)
        else:
            assert_near(tensors_in(found), tensors_in(eager), tensors_in(eager if exact is None else exact))
    except AssertionError as problem:
        return str(problem).splitlines()[0][:200]
    return None


def assert_near(found: list[torch.Tensor], eager: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    assert len(found) == len(eager) == len(exact), f"{len(found)} tensors instead of {len(eager)}"
    for i, (mine, theirs, true) in enumerate(zip(found, eager, exact, strict=True)):
        assert_same_form(mine, theirs, f"tensor {i}")
        if theirs.dtype in UPCAST:
            assert_no_farther(mine, theirs, true, f"tensor {i}", factor=2 * ROOM, ulps=4 * ROOM)


def assert_same_form(mine: torch.Tensor, theirs: torch.Tensor, where: str) -> None:
    for fact in ("dtype", "shape"):
        assert getattr(mine, fact) == getattr(theirs, fact), f"{where}: {fact} {getattr(mine, fact)}"


def disagreement_of_models(
    backend: str, found: Any, eager: Any, exact: Any, nudged: Sequence[tuple[Any, Any]] = ()
) -> str | None:
    """The same for what a whole model computes: {"outputs": ..., "gradients": [...]}.

    Errors of many layers meet in every value, so that one element says little about whose are larger: the length of
    the error counts, of each output alone and of all gradients together. `nudged` has what eager and float64 compute
    where weights and inputs are rounded otherwise: eager's largest error counts, since at one point it may be right by
    luck. With one image, a batch norm of few values multiplies any rounding, and errors differ tenfold by chance.
    """
    try:
        runs = [tensors_in(run["outputs"]) for run in (found, eager, exact)]
        others = [[tensors_in(run["outputs"]) for run in pair] for pair in nudged]
        assert len({len(tensors) for tensors in runs}) == 1, "another number of outputs"
        for i, (mine, theirs, true) in enumerate(zip(*runs, strict=True)):
            assert_same_form(mine, theirs, f"output {i}")
            if theirs.dtype in UPCAST:
                limit = largest_error([([theirs], [true]), *(([off[i]], [right[i]]) for off, right in others)])
                assert_shorter_error(backend, [mine], [theirs], [true], f"output {i}", limit)
        if eager["gradients"]:
            parts = [run["gradients"] for run in (found, eager, exact)]
            pairs = [(off["gradients"], right["gradients"]) for off, right in nudged]
            assert_shorter_error(backend, *parts, "gradients", largest_error([(parts[1], parts[2]), *pairs]))
    except AssertionError as problem:
        return str(problem).splitlines()[0][:200]
    return None


Tensors = Sequence[torch.Tensor]


def in_a_row(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The length of the difference, where both are finite."""
    return float((found - exact)[found.isfinite() & exact.isfinite()].norm())


def largest_error(pairs: Sequence[tuple[Tensors, Tensors]]) -> float:
    return max(error(in_a_row(eager), in_a_row(exact)) for eager, exact in pairs)


def assert_shorter_error(
    backend: str,
    mine: Tensors,
    theirs: Tensors,
    true: Tensors,
    where: str,
    eager_error: float,
    factor: float = 2.0,
    ulps: float = 4.0,
) -> None:
    room = 1.0 if backend == OURS else ROOM
    ours, eager, exact = map(in_a_row, (mine, theirs, true))
    assert torch.equal(ours.isfinite(), eager.isfinite()), f"{where}: infinity or NaN in other places than in eager"
    missed = error(ours, exact)
    size = float(exact[eager.isfinite() & exact.isfinite()].norm())
    allowed = factor * eager_error + ulps * torch.finfo(theirs[0].dtype).eps * size
    assert missed <= room * allowed, f"{where}: off by {missed:.3g}, eager by {eager_error:.3g}"
