"""Why places that are accessed are inside of their buffers, as a dump tells it: facts, which have sources."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ferrite.ir.program.access_facts import FACTS
from tests.compare import assert_same_as_eager, reset

quick = pytest.mark.quick
NO_PROOF = "no proof"


@pytest.fixture
def told(tmp_path):
    """The lines about the accesses of a function, which has eager's results; none of an address is outside."""

    def tell(fn, make_inputs, **settings) -> list[str]:
        options = {"dump_dir": str(tmp_path), "check_bounds": True}
        assert_same_as_eager(fn, make_inputs, options=options, fullgraph=True, **settings)
        files = sorted(tmp_path.glob("*/accesses.txt"), key=lambda file: file.parent.name)
        return [line.strip() for file in files for line in lines_of(file)]

    return tell


def lines_of(file: Path) -> list[str]:
    text = file.read_text()
    file.unlink()
    return text.splitlines()


def facts_in(lines: list[str]) -> set[str]:
    found = {line.rpartition(": ")[2] for line in lines if line.startswith(("reads ", "writes "))}
    return found | {"sizes" for line in lines if line.endswith("follow from sizes") and not line.startswith("0 ")}


def randn(*shapes):
    return lambda: [torch.randn(shape) for shape in shapes]


def numbers():
    return [torch.randn(6, 3), torch.tensor([5, 0, 2])]


def begins_like(x, y):
    return x[: y.shape[0]] + y


PROGRAMS = {
    "sizes": (lambda x: x[1::2].t().sin().sum(0), randn((7, 4))),
    "check": (lambda x, i: x[i] * 2, numbers),
    # the places of an interpolation are computed in floats, and cut at the ends
    "form": (lambda x: F.interpolate(x[None], size=7, mode="nearest") + 1, randn((2, 3))),
    "mask": (lambda x: F.pad(x, (2, 1)).exp(), randn((3, 4))),
    "relation": (begins_like, randn((6, 3), (4, 3))),
    "nothing": (lambda x: torch.cat([x, x[:0]]) + x.new_zeros(0, 3).sin().sum(0), randn((4, 3))),
}


@quick
@pytest.mark.lengthy
@pytest.mark.parametrize("fact", PROGRAMS)
def test_every_place_has_a_fact(fact, told):
    for dynamic in (False, True):
        found = facts_in(told(*PROGRAMS[fact], dynamic=dynamic))
        assert NO_PROOF not in found
        assert dynamic != (fact == "relation") or fact in found


@quick
def test_all_facts_are_shown():
    assert list(PROGRAMS) == list(FACTS)


@quick
def test_a_fact_is_told_with_its_place(told):
    lines = told(*PROGRAMS["check"])
    assert any(line.startswith("reads arg0_1 at data(") and line.endswith(", of 6: check") for line in lines), lines
    assert any("x[i] * 2" in line for line in lines), "with the line of the model"


# --- facts have a source: without it there is no proof ----------------------------------------------------------------


def test_a_guard_is_a_source(told, monkeypatch):
    """That a part is no longer than the whole is guarded by torch, and by nobody else."""
    program = PROGRAMS["relation"]
    assert NO_PROOF not in facts_in(told(*program, dynamic=True))
    reset()
    monkeypatch.setattr("ferrite.capture.size_facts.related", lambda value: iter(()))
    assert NO_PROOF in facts_in(told(*program, dynamic=True))


def first_four(x):
    z = x.nonzero()
    torch._check(z.size(0) == 4)
    return z[:4] + z, z[3] * 2


def test_an_assertion_is_a_source(told):
    """What follows from it is known behind it, and it is compared when the program runs."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        inputs = torch.tensor([1.0, 0.0, 2.0, 3.0, 4.0])
        assert NO_PROOF not in facts_in(told(first_four, lambda: [inputs]))
        reset()
        compiled = torch.compile(first_four, backend="ferrite", options={"strict": True}, fullgraph=True)
        compiled(inputs)
        for other in (torch.ones(3), torch.ones(7)):
            with pytest.raises(RuntimeError, match="Runtime assertion failed"):
                compiled(other)
