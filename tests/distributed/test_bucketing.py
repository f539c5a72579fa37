"""Collectives that become one: which, how large, in which order. Values are compared in `test_two_ranks.py`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ferrite
from ferrite.machines import Link, Network
from tests.distributed.programs import RANKS, collectives, count, gathered, passed, reduced, scattered
from tests.graphs import named, target_names
from tests.ranks import imagined_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with imagined_ranks(8):
        yield


def layers(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for weight in weights:
        x = torch.relu(x @ gathered(weight))
    return x


def six_layers() -> list[torch.Tensor]:
    return [torch.randn(4, 128), *(torch.randn(16, 128) for _ in range(6))]  # 65,536 bytes gathered, each


def bucketed(function: Any, *inputs: torch.Tensor, kind: str = "ag", **settings: Any) -> torch.fx.GraphModule:
    names = {"ag": "bucket_all_gather", "rs": "bucket_reduce_scatter", "ar": "bucket_all_reduce"}
    dynamic = settings.pop("dynamic", False)
    distributed = {f"bucket_{kind}": settings}
    return passed(function, *inputs, steps=(names[kind],), distributed=distributed, dynamic=dynamic)


@pytest.mark.parametrize(("cap", "left"), [(100, 1), (0.2, 2), (0.14, 3), (0.08, 6)])
def test_buckets_are_filled_up_to_their_cap(cap, left):
    assert count(bucketed(layers, *six_layers(), cap_mb=cap), "all_gather") == left


def test_the_first_bucket_may_be_smaller():
    gm = bucketed(layers, *six_layers(), cap_mb=100, first_mb=0.14)
    sizes = [node.meta["val"].numel() for node in gm.graph.nodes if "all_gather" in str(node.target)]
    assert sizes == [2 * 16384, 4 * 16384]


def test_one_that_needs_another_is_in_a_later_bucket():
    def chain(a, b, c):
        first = gathered(a)
        second = gathered(b + first[:1, :8])
        return first, second, gathered(c)

    gm = bucketed(chain, *(torch.randn(2, 8) for _ in range(3)))
    assert count(gm, "all_gather") == 2


def twice(collective: Any) -> Any:
    return lambda x: collective(collective(x))


def test_one_that_sends_on_what_another_brought_is_in_a_later_bucket():
    """Nothing is computed between the two."""

    def chain(a, b):
        return gathered(gathered(a)), gathered(b).t()

    gm = bucketed(chain, torch.randn(2, 8), torch.randn(2, 8))
    assert count(gm, "all_gather") == 2
    for kind, name, function in (("rs", "reduce_scatter", scattered), ("ar", "all_reduce", reduced)):
        gm = bucketed(twice(function), torch.randn(64, 8), kind=kind)
        assert count(gm, name) == 2


@pytest.mark.parametrize(
    ("other", "left"),
    [(lambda c: gathered(c.double()), 2), (lambda c: gathered(c, "0"), 1), (lambda c: gathered(c.int()), 2)],
)
def test_types_are_kept_apart(other, left):
    gm = bucketed(lambda a, c: (gathered(a), other(c)), torch.randn(2, 8), torch.randn(2, 8))
    assert count(gm, "all_gather") == left


def test_bytes_of_several_types_are_packed_where_each_fits():
    def mixed(a, b, c):
        return gathered(a), gathered(b), gathered(c)

    inputs = torch.randint(0, 9, (7,), dtype=torch.uint8), torch.randn(3), torch.randn(5, dtype=torch.float64)
    gm = bucketed(mixed, *inputs, style="opaque_multidtype")
    assert count(gm, "all_gather") == 1
    (pack,) = (node for node in gm.graph.nodes if "pack_bucket" in str(node.target))
    dtypes = [operand.meta["val"].dtype for operand in pack.args[0]]
    assert dtypes == [torch.float64, torch.float32, torch.uint8]
    assert pack.meta["val"].shape == (40 + 12 + 7 + 5,)  # up to the next eight


def test_a_result_that_is_read_before_the_wait_is_left_alone():
    c10d = torch.ops._c10d_functional

    def early(a, b, c):
        start = c10d.all_gather_into_tensor(a, 8, "0")
        return start, c10d.wait_tensor(start), gathered(b), gathered(c)

    gm = bucketed(early, *(torch.randn(2, 8) for _ in range(3)))
    assert count(gm, "all_gather") == 2


def test_groups_are_kept_apart():
    with_groups = torch.distributed.new_group(list(range(4)))
    name = with_groups.group_name
    gm = bucketed(lambda a, b: (gathered(a), gathered(b, name, 4)), torch.randn(2, 8), torch.randn(2, 8))
    assert count(gm, "all_gather") == 2


def test_sums_of_one_kind_are_one():
    def sums(a, b, c):
        return scattered(a), scattered(b), scattered(c, "avg"), scattered(a * 2)

    gm = bucketed(sums, *(torch.randn(16, 3) for _ in range(3)), kind="rs")
    assert count(gm, "reduce_scatter") == 2
    outputs = list(gm.graph.output_node().args[0])
    storages = {output.meta["val"].untyped_storage()._cdata for output in outputs}
    assert len(storages) == 4  # no two results share memory that did not before


def test_all_reduces_of_one_kind_are_one():
    gm = bucketed(
        lambda a, b: (reduced(a), reduced(b), reduced(a * 2, "max")), torch.randn(3, 5), torch.randn(7), kind="ar"
    )
    assert count(gm, "all_reduce") == 2


@pytest.mark.parametrize(("kind", "style"), [("ag", "coalesced"), ("rs", "coalesced"), ("ar", "coalesced")])
def test_a_list_needs_no_packing(kind, style):
    function = {"ag": gathered, "rs": scattered, "ar": reduced}[kind]
    gm = bucketed(lambda a, b: (function(a), function(b)), torch.randn(8, 3), torch.randn(16), kind=kind, style=style)
    names = target_names(gm)
    assert sum("coalesced" in name for name in names) == 1
    assert not any("aten.cat" in name for name in names)
    assert count(gm, "wait_tensor") == 2


def test_unknown_sizes_stay_unknown():
    gm = bucketed(lambda a, b: (gathered(a), gathered(b)), torch.randn(6, 8), torch.randn(5, 7), dynamic=True)
    assert count(gm, "all_gather") == 1
    assert all(isinstance(output.meta["val"].shape[0], torch.SymInt) for output in gm.graph.output_node().args[0])


def test_gathers_of_parameters_lead_back_to_one_input():
    def mixed(a, b, c):
        return gathered(a.bfloat16()), gathered(b.bfloat16()), gathered((b + c).bfloat16())

    inputs = [torch.randn(2, 8) for _ in range(3)]
    assert count(bucketed(mixed, *inputs), "all_gather") == 1
    assert count(bucketed(mixed, *inputs, which="fsdp"), "all_gather") == 2


def test_sums_of_gradients_go_on_to_outputs():
    def mixed(a, b, c):
        return scattered(a).float(), scattered(b), scattered(c) + a[:2]

    inputs = [torch.randn(16, 8) for _ in range(3)]
    assert count(bucketed(mixed, *inputs, kind="rs"), "reduce_scatter") == 1
    assert count(bucketed(mixed, *inputs, kind="rs", which="fsdp"), "reduce_scatter") == 2


def test_a_bucket_begins_before_the_first_is_needed():
    order = collectives(bucketed(layers, *six_layers(), cap_mb=0.2))
    assert order == [*("all_gather_into_tensor", "wait_tensor"), *["mm"] * 3] * 2


def test_a_bucket_of_sums_begins_when_the_last_is_known():
    def backward(x, *weights):
        grads = []
        for weight in weights:
            x = x @ weight
            grads.append(scattered(x))
        return grads

    gm = bucketed(backward, *(torch.randn(8, 8) for _ in range(5)), kind="rs", cap_mb=0.0006)
    assert collectives(gm) == [
        *("mm", "mm", "reduce_scatter_tensor"),
        "mm",
        "mm",
        "reduce_scatter_tensor",
        *["wait_tensor"] * 2,
    ]


def test_the_parts_of_a_bucket_say_where_they_are_from():
    gm = bucketed(layers, *six_layers())
    start = next(node for node in gm.graph.nodes if "all_gather" in str(node.target))
    assert start.meta["members_of_bucket"] == 6
    assert start.meta.get("stack_trace") == next(n for n in named(gm).values() if "wait" in n.name).meta.get(
        "stack_trace"
    )


def test_the_cost_model_merges_where_latency_is_most_of_it():
    """Six small gathers with nothing to hide them behind."""
    gm = passed(layers, *six_layers(), steps=("bucket_all_gather",), distributed="auto")
    assert count(gm, "all_gather") < 6


def test_the_cost_model_leaves_large_ones_apart():
    """Each takes far longer than its latency, and is hidden behind the layer before it."""

    def large(x, *weights):
        for weight in weights:
            x = x @ gathered(weight)
        return x

    inputs = [torch.empty(65536, 8192, device="meta"), *(torch.empty(1024, 8192, device="meta") for _ in range(4))]
    gm = passed(large, *inputs, steps=("bucket_all_gather",), distributed="auto")
    assert count(gm, "all_gather") == 4
    starts = [node for node in gm.graph.nodes if "all_gather" in str(node.target)]
    assert all("gain nothing" in node.meta["why_not_moved"] for node in starts)


def test_the_cost_model_keeps_to_a_bound_of_memory(tmp_path):
    """Each gathered weight has 200 MB. Where all are read again at the end, all buckets would be there beside them."""

    def fn(x, *shards, times):
        whole = [gathered(shard) for shard in shards]
        for weight in whole * times:
            x = x + (x @ weight).sum(1, keepdim=True)
        return x

    slow = {"any": Link(1.0, 1e15)}
    network = tmp_path / "network.txt"
    network.write_text(str(Network(slow, slow, RANKS)))
    inputs = [torch.empty(64, 8192, device="meta"), *(torch.empty(1024, 6400, device="meta") for _ in range(8))]
    counts = {}
    for times in (1, 2):
        with ferrite.using(network=network):
            program = functools.partial(fn, times=times)
            gm = passed(program, *inputs, steps=("bucket_all_gather",), distributed="auto")
        counts[times] = count(gm, "all_gather")
    assert counts[1] == 4, "two at a time"
    assert 4 < counts[2] < 8


def test_nothing_happens_that_nobody_asked_for():
    gm = passed(layers, *six_layers(), steps=("bucket_all_gather",), distributed="off")
    assert count(gm, "all_gather") == 6
    gm = passed(layers, *six_layers(), steps=("bucket_all_gather",), distributed=["bucket_rs"])
    assert count(gm, "all_gather") == 6


def test_parts_that_leave_are_made_when_the_whole_is_there():
    """Gradients in a bucket: copied out of it at once, so that it can be given up before what follows."""

    def fn(x, y):
        both = scattered(x), scattered(y)
        z = y
        for _ in range(4):
            z = z @ y
        return *both, z

    inputs = torch.randn(64, 64), torch.randn(64, 64)
    steps = ("bucket_reduce_scatter", "overlap_scheduling")
    gm = passed(fn, *inputs, steps=steps, distributed={"bucket_rs": {}, "overlap": {"compute": 1e6}})
    names = [name.split(".")[1] for name in target_names(gm) if "." in name]
    clones = [place for place, name in enumerate(names) if name == "clone"]
    assert len(clones) == 2
    assert names.index("wait_tensor") < clones[0]
    assert max(clones) < len(names) - 1 - names[::-1].index("mm")
