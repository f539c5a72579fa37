"""The pieces of models that passes are measured on: each pass fires by itself on one of them, and nothing changes."""

from __future__ import annotations

import pytest
import torch

from bench.pieces import PIECES
from bench.rewrites import before_and_after, captured
from ferrite.passes import PRE_GRAD

pytestmark = pytest.mark.slow
STEPS = list(dict.fromkeys(piece.step for piece in PIECES))
# They wait for a kernel, or for a GPU: see docs/rewrites_that_choose.md.
ONLY_IF_ASKED = {"use_triton_lce_replace_normal_LCE", "linear_permute_fusion", "permute_linear_fusion"}


@pytest.mark.parametrize("step", STEPS)
def test_a_piece_on_which_it_fires(step):
    found = set()
    for piece in (piece for piece in PIECES if piece.step == step):
        for training in piece.kinds():
            with torch.set_grad_enabled(training):
                gm, inputs = captured(piece, piece.inputs(training, "cpu"))
                before, after, how = before_and_after(piece, gm, inputs)
            found.add(how)
            with torch.no_grad():
                torch.testing.assert_close(after(*inputs), before(*inputs), rtol=1e-4, atol=1e-4)
    assert ("yes" in found) is (step not in ONLY_IF_ASKED)
    assert "asked" in found or step not in ONLY_IF_ASKED


def test_every_pass_is_one_of_the_stage():
    assert set(STEPS) <= {name for step in PRE_GRAD.passes for name in (step.name, *step.names)}
