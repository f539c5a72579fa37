"""torch's own tables through the front door: a few entries each time, all of them in the long sweep.

`python -m bench.operators` runs the same calls in child processes, survives those that kill it, and prints a table.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's operator samples need it")

from tests.tables.entries import WAYS, Sample, dtypes_of, entries, samples
from tests.tables.judge import Verdict, compared, judge
from tests.tables.layouts import LAYOUTS
from tests.tables.together import judge_together, verdicts

# How many entries there were when the sweep was written: fewer would mean that it has stopped to look at a table.
LEAST = {"op": 550, "foreach": 40, "hop": 8, "custom": 8, "autograd_function": 10, "module": 90, "optimizer": 10}
FEW = [
    ("op:atan2", "float32", "edges", "static"),
    ("op:cumsum", "int64", "expanded", "static"),
    ("op:logical_xor", "bool", "backwards", "static"),
    ("op:nn.functional.layer_norm", "bfloat16", "as given", "static"),
    ("op:matmul", "complex64", "transposed", "static"),
    ("op:max.reduction_no_dim", "float32", "empty", "static"),
    ("op:nn.functional.dropout", "float32", "as given", "static"),
    ("custom:NumpyMulCustomOp", "float32", "as given", "static"),
    ("autograd_function:NumpySortAutogradFunction", "float32", "as given", "static"),
    ("module:nn.modules.batchnorm.BatchNorm2d.train", "float32", "transposed", "static"),
    ("module:nn.modules.activation.MultiheadAttention.eval", "float32", "as given", "static"),
    ("op:scatter_add", "float32", "as given", "backward"),
    ("op:prod", "complex64", "as given", "backward"),
    ("op:nn.functional.interpolate.bicubic", "float32", "as given", "backward"),
    ("custom:NumpyCubeCustomOp", "float32", "as given", "backward"),
    ("module:nn.modules.linear.Linear.train", "float32", "transposed", "backward"),
    ("module:nn.modules.conv.LazyConv1d.train", "float32", "as given", "backward"),
    ("op:nn.functional.max_unpool1d", "float32", "empty", "dynamic"),
    ("op:index_select", "float32", "as given", "errors"),
    ("op:tensor_split", "float32", "as given", "static"),
    ("hop:scan.simple", "float32", "as given", "static"),
    ("optimizer:SGD", "float32", "as given", "static"),
]


def failed(name: str, dtype: torch.dtype, way: str, layout: str, limit: int) -> list[Verdict]:
    chosen = [(entries()[name], sample, layout) for sample in samples(entries()[name], dtype, way, limit)]
    return [verdict for verdict in verdicts(chosen, way) if verdict.failed]


def test_no_table_has_shrunk():
    for table, least in LEAST.items():
        assert sum(name.startswith(f"{table}:") for name in entries()) >= least, table


@pytest.mark.parametrize("way", ["static", "backward", "dynamic", "errors"])
def test_a_few_entries(way):
    few = [(entries()[name], getattr(torch, dtype), layout) for name, dtype, layout, how in FEW if how == way]
    chosen = [(entry, sample, layout) for entry, dtype, layout in few for sample in samples(entry, dtype, way, 1)]
    assert len(chosen) == len(few)
    found = zip(few, verdicts(chosen, way), strict=True)
    assert [(entry.name, verdict) for (entry, _, _), verdict in found if verdict.failed] == []


def test_the_judge_sees_what_differs():
    entry = entries()["op:atan2"]
    error = compared(entry, None, [torch.ones(1)], IndexError("far"))
    other = compared(entry, None, ValueError("near"), IndexError("far"))
    assert (error.kind, other.kind) == ("no error", "other error")
    assert compared(entry, None, IndexError("near"), IndexError("far")) is None


def as_sample(fn, *tensors):
    return Sample(lambda wrap: wrap(fn), (tensors[0], tensors[1:], {}))


def test_eager_that_differs_by_how_elements_lie_is_no_measure():
    """The gradient of `hardtanh` for NaN is one thing in a vector and another in the rest of a row."""
    entry = entries()["op:nn.functional.hardtanh"]

    def verdict(wrong):
        def fn(x):
            result = torch.nn.functional.hardtanh(x)
            return result + wrong * x.detach().nan_to_num() if torch.compiler.is_compiling() else result

        return judge(entry, as_sample(fn, torch.full((37,), 0.5, requires_grad=True)), "edges", "backward").kind

    assert verdict(0) in ("foreign", "passed")  # where eager has no vectors, it is the same
    assert verdict(1) == "wrong"


def test_what_differs_among_others_is_judged_alone():
    entry = entries()["op:atan2"]

    def other_when_compiled(x):
        return x + 1 if torch.compiler.is_compiling() else x + 2

    def in_two_graphs(x):
        torch._dynamo.graph_break()
        return x + 1

    def refused(x):
        return x @ torch.ones(7)

    good = (entry, as_sample(torch.sin, torch.randn(4)), "as given")
    for function, way in [(other_when_compiled, "static"), (in_two_graphs, "static"), (refused, "static")]:
        bad = (entry, as_sample(function, torch.ones(3)), "as given")
        kinds = [verdict and verdict.kind for verdict in judge_together([good, bad, good, good], way)]
        assert kinds[1] is None
        assert kinds[2:] == ["passed", "passed"]


def test_gradients_of_several_calls_are_told_apart():
    entry = entries()["op:atan2"]
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)

    def no_gradient(x):
        return x + 1

    def wrong_gradient(x):
        return x * 3 + (x.detach() if torch.compiler.is_compiling() else x) - x.detach()

    functions = [(torch.sin, x), (no_gradient, y), (wrong_gradient, x), (torch.cos, x)]
    chosen = [(entry, as_sample(function, tensor), "as given") for function, tensor in functions]
    kinds = [verdict and verdict.kind for verdict in judge_together(chosen, "backward")]
    assert kinds == ["passed", "passed", None, "passed"]


def test_numbers_that_data_decides_are_compiled_where_torch_can():
    entry = entries()["op:nonzero"]
    found = [judge(entry, sample, "as given", "static") for sample in samples(entry, torch.float32, "static", 1)]
    assert [verdict.kind for verdict in found] == ["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", list(entries()))
def test_every_entry(name, way):
    entry = entries()[name]
    layouts = ["as given"] if way == "errors" or entry.kind == "optimizer" else list(LAYOUTS)
    found = []
    for dtype in sorted(dtypes_of(entry, way), key=str):
        for layout in layouts:
            if layout != "edges" or entry.takes_edges:
                limit = 1000 if way == "errors" else 3
                found += [(dtype, layout, verdict) for verdict in failed(name, dtype, way, layout, limit)]
    assert found == []
