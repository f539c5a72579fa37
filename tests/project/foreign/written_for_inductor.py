"""Tests as others write them: run by `test_yardstick.py` through the tool, never by the suite itself."""

import os
import time
import unittest
from unittest import mock

import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.nn import of_another_torch


def double(x):
    return x * 2


class Foreign(unittest.TestCase):
    def test_a_default_backend(self):
        x = torch.arange(5.0)
        assert torch.equal(torch.compile(double)(x), x + x)

    def test_an_option_of_inductor(self):
        x = torch.arange(5.0)
        assert torch.equal(torch.compile(double, options={"max_fusion_size": 3})(x), x + x)
        assert torch.equal(torch.compile(double, backend="inductor", mode="max-autotune-no-cudagraphs")(x), x + x)

    def test_death(self):
        os.abort()

    def test_wrong_values(self):
        x = torch.arange(5.0)
        torch.testing.assert_close(torch.compile(double)(x), x)

    def test_sleep(self):
        time.sleep(600)

    def test_insides(self):
        torch.compile(double)(torch.arange(5.0))
        found = counters["inductor"]["pattern_matcher_count"]
        assert found == 1

    def test_what_ferrite_does_not_compile(self):
        x = torch.arange(5.0)
        with mock.patch("ferrite.backend.lower_graph", side_effect=ValueError("not today")):
            assert torch.equal(torch.compile(double)(x), x + x)

    def test_a_name_that_torch_lacks(self):
        of_another_torch(5)

    def test_a_counter(self):
        counter = CompileCounter()
        x = torch.arange(5.0)
        assert torch.equal(torch.compile(double, backend=counter)(x), x + x)
        assert counter.frame_count == 1
