"""What communication costs: the formula, the text, what is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrite import UserError
from ferrite.__main__ import main
from ferrite.machines import GroupShape, InvalidNetwork, Link, Network, fitted, network_of, parse_network
from ferrite.options import Options
from ferrite.passes.post_grad.distributed.settings import network_for

NETWORK = Network(
    {"any": Link(1e-5, 1e11)}, {"any": Link(2e-5, 1e10), "all_reduce": Link(4e-5, 2e10)}, 8, "a test", 3e-5
)


def test_a_collective_takes_its_latencies_and_the_bytes_that_a_rank_sends():
    inside = GroupShape(4)
    assert NETWORK.seconds("all_gather", 4_000_000, inside) == pytest.approx(2 * 1e-5 + 3_000_000 / 1e11)
    assert NETWORK.seconds("all_reduce", 4_000_000, inside) == pytest.approx(2 * 1e-5 + 6_000_000 / 1e11)
    assert NETWORK.seconds("send", 4_000_000, inside) == pytest.approx(1e-5 + 4_000_000 / 1e11)
    assert NETWORK.seconds("all_reduce", 4_000_000, GroupShape(1)) == 0


def test_groups_are_known_by_their_shape():
    """So that groups of one dimension of a mesh cost the same on every rank."""
    assert GroupShape.of([0, 8, 16]) == GroupShape.of([3, 11, 19]) == GroupShape(3, 8)
    assert not NETWORK.crosses_machines(GroupShape(8))
    assert NETWORK.crosses_machines(GroupShape(9))
    assert NETWORK.crosses_machines(GroupShape(2, 8))
    assert NETWORK.link("all_reduce", GroupShape(2, 8)) == Link(4e-5, 2e10)
    assert NETWORK.link("broadcast", GroupShape(2, 8)) == Link(2e-5, 1e10)


def test_a_record_is_read_as_it_was_written():
    assert str(parse_network(str(NETWORK))) == str(NETWORK)
    assert parse_network(str(NETWORK)).seconds("all_gather", 10**6, GroupShape(16)) == pytest.approx(
        NETWORK.seconds("all_gather", 10**6, GroupShape(16))
    )


@pytest.mark.parametrize("bandwidth", [3.5e11, 1e9, 1.23e6, 4.0])
def test_slow_links_are_written_and_read(bandwidth):
    network = Network({"any": Link(1e-5, bandwidth)}, {"any": Link(2e-5, bandwidth)}, 8, "a test", 3e-5)
    found = parse_network(str(network)).link("all_gather", GroupShape(2))
    assert found.bandwidth == pytest.approx(bandwidth, rel=5e-3)


def test_a_record_may_say_nothing_of_calls():
    text = str(NETWORK).replace("call: 30.0 us\n", "")
    assert parse_network(text).call == pytest.approx(4e-6)
    assert parse_network(str(NETWORK)).call == pytest.approx(3e-5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("network record", "tuning record", "line 1: a record begins with 'network record'"),
        ("ranks per machine: 8", "ranks per machine: none", "'ranks per machine' is 'none'"),
        ("call: 30.0 us", "call: quick", "'call' is 'quick'"),
        ("any: 10.0 us, 100.00 GB/s", "any: fast", "line 7: 'any: fast' is no link"),
        ("any: 10.0 us", "all_scatter: 10.0 us", "kinds: all_gather"),
        ("inside a machine", "", "is neither 'where', 'ranks per machine' nor 'call'"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(old, new, message):
    with pytest.raises(InvalidNetwork, match=message):
        parse_network(str(NETWORK).replace(old, new))


def test_the_option_names_a_record(tmp_path: Path):
    import torch

    device = torch.device("cpu")
    assert network_for(Options(), device) is network_of("cpu")
    path = tmp_path / "network.txt"
    path.write_text(str(NETWORK))
    assert network_for(Options(network=path), device).where == "a test"
    path.write_text("nothing")
    with pytest.raises(UserError, match=r"which is no network record"):
        network_for(Options(network=path), device)
    with pytest.raises(UserError, match=r"No such file"):
        network_for(Options(network=tmp_path / "missing"), device)


def test_latency_and_bandwidth_explain_what_was_measured():
    link = fitted({size: 3e-5 + size / 2e9 for size in (1 << 10, 1 << 14, 1 << 20, 1 << 24)})
    assert link.latency == pytest.approx(3e-5)
    assert link.bandwidth == pytest.approx(2e9)
    assert fitted({1024: 1e-3, 4096: 0.5e-3}).bandwidth > 0  # times that shrink are noise


def test_comm_bench_alone_says_how_it_is_started(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["comm-bench", str(tmp_path / "network.txt")]) == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err


@pytest.mark.slow
def test_comm_bench_measures_two_ranks(tmp_path):
    import subprocess
    import sys

    path = tmp_path / "network.txt"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29613"]
    command += ["-m", "ferrite", "comm-bench", str(path), "--largest", "16"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    found = parse_network(path.read_text())
    assert found.ranks_per_machine == 2
    assert {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"} <= set(found.inside)
    assert 0 < found.seconds("all_reduce", 1 << 16, GroupShape(2)) < 1
    assert 0 < found.call < 0.1
