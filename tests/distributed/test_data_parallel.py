"""What data parallel programs look like: averages of gradients, parameters in inputs, sums of sums, shared rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # defines its operators

from ferrite.pipeline import PassFailure
from tests.distributed.programs import RANKS, collectives, count, gathered, passed, reduced, scattered
from tests.graphs import target_names
from tests.ranks import imagined_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
aten = torch.ops.aten


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with imagined_ranks(RANKS):
        yield


# --- averages of gradients --------------------------------------------------------------------------------------------


def averaged(x: torch.Tensor, by: int = RANKS, group: str = "0") -> torch.Tensor:
    return reduced(aten.div.Tensor(x, by), group=group)


def fused(function: Any, *inputs: torch.Tensor, **settings: Any) -> torch.fx.GraphModule:
    return passed(function, *inputs, steps=("fuse_ddp_communication",), distributed={"ddp_fuse": settings})


def gradients(x, *weights):
    found = []
    for weight in weights:
        x = x @ weight
        found.append(averaged(x))
    return found


def test_averages_are_one_division_and_one_sum():
    gm = fused(gradients, *(torch.randn(8, 8) for _ in range(4)))
    names = target_names(gm)
    assert names.count("aten.div.Tensor") == 1
    assert collectives(gm) == ["mm", "mm", "mm", "all_reduce", "wait_tensor"]


def test_the_first_bucket_is_small():
    sizes = [torch.randn(512, 512)] * 5  # a megabyte each
    gm = fused(gradients, *sizes, bucket_mb=2.2)
    assert count(gm, "all_reduce") == 3  # one, then two and one
    assert collectives(gm)[:2] == ["mm", "all_reduce"]


def test_the_cost_model_says_how_large_buckets_are():
    """The last ones are waited for, and so small; those before are hidden, and large."""
    inputs = [torch.empty(8192, 1024, device="meta"), *(torch.empty(1024, 1024, device="meta") for _ in range(40))]

    def backward(x, *weights):
        found = []
        for weight in weights:
            for _ in range(3):
                x = x @ weight
            found.append(averaged(weight * 2))
        return x, *found

    gm = passed(backward, *inputs, steps=("fuse_ddp_communication",), distributed="auto")
    members = [node.meta.get("members_of_bucket", 1) for node in gm.graph.nodes if "all_reduce" in str(node.target)]
    assert sum(members) == 40
    assert 1 < len(members) < 40
    assert members[-1] < max(members)


def test_a_list_needs_no_packing():
    gm = fused(gradients, *(torch.randn(8, 8) for _ in range(4)), style="coalesced")
    assert sum("coalesced" in name for name in target_names(gm)) == 1
    assert count(gm, "wait_tensor") == 3


def test_waits_are_put_off_or_not():
    def two_groups_of_one(x, y):
        return averaged(x @ y), averaged(y @ x), (x @ y) @ x

    inputs = torch.randn(8, 8), torch.randn(8, 8)
    assert collectives(fused(two_groups_of_one, *inputs))[-1] == "wait_tensor"
    kept = collectives(fused(two_groups_of_one, *inputs, delay_waits=False))
    assert kept.index("wait_tensor") == kept.index("all_reduce") + 1


@pytest.mark.parametrize(
    "other",
    [
        lambda x: averaged(x.double()),  # another type
        lambda x: averaged(x, 4),  # another divisor
        lambda x: reduced(x),  # nothing is divided
        lambda x: reduced(aten.div.Tensor(x, RANKS), "max"),  # no sum
        lambda x: averaged(x) + 1,  # more is done with it
    ],
)
def test_what_is_no_average_like_the_others_is_left_alone(other):
    gm = fused(lambda x, y: (averaged(x), averaged(y), other(x)), torch.randn(8), torch.randn(8))
    assert count(gm, "all_reduce") == 2


def test_averages_go_into_gradients():
    def accumulate(x, y, into, other):
        first, second = averaged(x), averaged(y)
        aten.copy_.default(into, first)
        aten.copy_.default(other, second)
        return ()

    gm = fused(accumulate, *(torch.randn(8) for _ in range(4)))
    assert count(gm, "all_reduce") == 1
    assert target_names(gm).count("aten.copy_.default") == 2


def test_a_division_that_others_read_stays():
    def fn(x, y):
        half = aten.div.Tensor(x, RANKS)
        return reduced(half), averaged(y), half * 2

    gm = fused(fn, torch.randn(8), torch.randn(8))
    assert count(gm, "all_reduce") == 1
    assert target_names(gm).count("aten.div.Tensor") == 2


# --- sums of sums -----------------------------------------------------------------------------------------------------


def deduplicated(function: Any, *inputs: torch.Tensor, distributed: Any = ("dedup_reduce_scatter",)) -> Any:
    return passed(function, *inputs, steps=("dedup_reduce_scatter",), distributed=distributed)


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda a, b, c: scattered(a) + scattered(b), 1),
        (lambda a, b, c: scattered(a) + scattered(b) + scattered(c), 1),
        (lambda a, b, c: (scattered(a) + scattered(b)) + (scattered(c) + scattered(a * 2)), 1),
        (lambda a, b, c: scattered(a, "avg") + scattered(b, "avg"), 1),
        (lambda a, b, c: torch.add(scattered(a), scattered(b), alpha=5), 2),
        (lambda a, b, c: scattered(a, "max") + scattered(b, "max"), 2),
        (lambda a, b, c: scattered(a) + scattered(b, "avg"), 2),
        (lambda a, b, c: scattered(a) + scattered(b.double()), 2),
    ],
)
def test_sums_of_reduce_scatters(function, left):
    assert count(deduplicated(function, *(torch.randn(8, 3) for _ in range(3))), "reduce_scatter") == left


def test_one_that_others_read_is_no_term():
    def fn(a, b):
        first = scattered(a)
        return first + scattered(b), first

    assert count(deduplicated(fn, torch.randn(8), torch.randn(8)), "reduce_scatter") == 2


def test_halves_are_rounded_once_more_only_if_asked_for():
    inputs = torch.randn(8, dtype=torch.bfloat16), torch.randn(8, dtype=torch.bfloat16)
    gm = deduplicated(lambda a, b: scattered(a) + scattered(b), *inputs, distributed="auto")
    assert count(gm, "reduce_scatter") == 2
    assert count(deduplicated(lambda a, b: scattered(a) + scattered(b), *inputs), "reduce_scatter") == 1


# --- parameters in inputs ---------------------------------------------------------------------------------------------


def resized(x: torch.Tensor, size: int) -> None:
    torch.ops.inductor.resize_storage_bytes_.default(x, size)


def filled(parameter: torch.Tensor, value: torch.Tensor) -> None:
    torch.ops.fsdp.copy_.default(parameter, value)


def cleaned(function: Any, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    return passed(function, *inputs, steps=("remove_fsdp2_unsharded_param_graph_input_usage",), distributed="auto")


def test_a_parameter_is_read_where_it_was_gathered():
    def fn(p, shard, x):
        resized(p, 16)
        filled(p, shard * 2)
        y = torch.cat([p, x])
        resized(p, 0)
        return y

    gm = cleaned(fn, torch.randn(4), torch.randn(4), torch.randn(4))
    assert target_names(gm) == ["aten.mul.Tensor", "aten.cat.default"]
    cat = gm.graph.find_nodes(op="call_function", target=aten.cat.default)[0]
    assert [node.name for node in cat.args[0]] == ["mul", "x_1"]


def test_a_layer_that_is_used_twice_reads_what_was_copied_last():
    def fn(p, shard):
        results = []
        for factor in (2, 3):
            resized(p, 16)
            filled(p, shard * factor)
            results.append(torch.sin(p))
            resized(p, 0)
        return results

    gm = cleaned(fn, torch.randn(4), torch.randn(4))
    assert target_names(gm) == ["aten.mul.Tensor", "aten.sin.default"] * 2


def test_a_parameter_that_grows_in_another_graph_is_used_as_it_is():
    def fn(p, shard):
        filled(p, shard * 2)
        y = torch.sin(p)
        resized(p, 0)
        return y

    with pytest.warns(UserWarning, match="is made in one graph and given up in another"):
        gm = cleaned(fn, torch.randn(4), torch.randn(4))
    assert "fsdp.copy_.default" in target_names(gm)


def test_a_parameter_that_the_user_changes_is_an_error():
    def fn(p, shard):
        resized(p, 16)
        filled(p, shard * 2)
        p.view(2, 2).add_(1)
        y = torch.sin(p)
        resized(p, 0)
        return y

    with pytest.raises(PassFailure) as failure:
        cleaned(fn, torch.randn(4), torch.randn(4))
    assert "which FSDP owns" in str(failure.value.__cause__)


# --- shared rows ------------------------------------------------------------------------------------------------------


def decomposed(function: Any, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    return passed(function, *inputs, steps=("decompose_collectives",), distributed=["decompose_comms"])


def orthogonalised(shard):
    """Two steps of an iteration that optimizers use, on the whole matrix; each rank keeps its rows."""
    x = gathered(shard)
    x = x / torch.ops.aten.linalg_vector_norm.default(x)
    for _ in range(2):
        gram = x.t() @ x
        x = 1.5 * x - 0.5 * (x @ gram)
    return x.split(shard.shape[0])[0]


def test_rows_that_are_shared_out_again_are_not_gathered():
    gm = decomposed(orthogonalised, torch.randn(4, 6))
    assert count(gm, "all_gather") == 0
    assert count(gm, "all_reduce") == 3  # the norm, and two products of the rows with each other
    assert gm.graph.output_node().args[0].meta["val"].shape == (4, 6)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.cumsum(0),  # rows depend on rows
        lambda x: x.softmax(0),
        lambda x: x.flip(0),
    ],
)
def test_rows_that_need_each_other_are_gathered(change):
    def fn(shard):
        x = gathered(shard)
        gram = x.t() @ x
        y = change(x @ gram @ (x.t() @ x))
        return y.split(shard.shape[0])[0]

    assert count(decomposed(fn, torch.randn(4, 6)), "all_gather") == 1


def test_rows_that_leave_the_graph_are_gathered():
    def fn(shard):
        x = gathered(shard)
        y = x @ (x.t() @ x) @ (x.t() @ x)
        return y.split(shard.shape[0])[0], x

    assert count(decomposed(fn, torch.randn(4, 6)), "all_gather") == 1
    other = decomposed(lambda s: (gathered(s) @ (gathered(s).t() @ gathered(s))).split(4)[1], torch.randn(4, 6))
    assert count(other, "all_gather") == 3  # the part of another rank is taken
