"""The judge of the sweep: what rounding explains passes, what it does not is a difference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's operator samples need it")

from tests.lower.sweep import Reference, values_differ

pytestmark = pytest.mark.quick
CANCELLING = torch.linspace(-8, 8.003, 101)


def judged(function, tensors, mine):
    return values_differ(mine, function(*tensors), 0, Reference(function, tensors, []), names_type=False)


def test_a_sum_that_cancels_may_be_off_by_what_its_terms_are_rounded_to():
    assert judged(torch.sum, [CANCELLING], torch.sum(CANCELLING) + 2**-20) is None


def test_so_may_one_in_double_precision_and_labels_stay_labels():
    terms, labels = torch.tensor([8.3, -8.1, 1.7, -1.7], dtype=torch.float64), torch.tensor([1.0, 1, -1, 1]).double()
    loss = lambda x, y: torch.where(y == 1, x, 0).sum() + torch.where(y == -1, x, 0).sum()  # noqa: E731
    right = loss(terms, labels)
    assert judged(loss, [terms, labels], right + 2**-50) is None
    assert "farther" in judged(loss, [terms, labels], right + 2**-45)


def test_a_sum_that_cancels_may_not_be_off_by_more():
    assert "farther" in judged(torch.sum, [CANCELLING], torch.sum(CANCELLING) + 2**-14)


def test_where_a_result_jumps_only_eager_is_right():
    given = torch.tensor([2.0, 3.5])
    assert "farther" in judged(torch.floor, [given], torch.tensor([1.0, 3.0]))


def test_a_result_that_no_rounding_moves_is_exact_but_for_its_own():
    given = torch.tensor([2.0, 3.5])
    assert judged(torch.neg, [given], torch.tensor([-2.0, -3.5 - 2**-22])) is None
    assert "farther" in judged(torch.neg, [given], torch.tensor([-2.0, -3.5 - 2**-18]))


def test_integers_are_compared_exactly():
    given = torch.tensor([2, 3])
    assert judged(torch.neg, [given], torch.tensor([-2, -4])) == "1 elements differ"
