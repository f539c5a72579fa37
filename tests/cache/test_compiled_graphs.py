"""Compiled graphs through the cache: found again in this process and in others, rebuilt where anything is wrong."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import weakref
from pathlib import Path

import pytest
import torch

import ferrite
from ferrite import backend, cache
from ferrite.__main__ import main
from ferrite.cache import Key, open_store
from ferrite.cache.codec import decode, encode
from ferrite.cache.compiled_graph import GraphEntry
from ferrite.cache.constant_storage import MAX_TENSOR_BYTES, KeptObject, found_objects, kept_objects
from ferrite.capture import torch_operators
from ferrite.errors import FerriteWarning, NotCached
from ferrite.graph.places import Places
from ferrite.lower import lower_graph
from ferrite.options import resolve
from ferrite.runtime import host_code
from tests.cache import compiled_cases
from tests.cache.compiled_cases import CASES, Net, gathered
from tests.fresh_process import FreshProcess

pytestmark = pytest.mark.usefixtures("artifact_cache")

PARTS = [field.name for field in dataclasses.fields(GraphEntry)]  # in the order in which an entry has them


def graphs() -> list:
    return list(open_store(resolve()).entries("graph"))


def asked() -> list[str]:
    return [outcome.result for outcome in ferrite.last_compile().cache]


def compiled(function, *inputs, **options):
    """What a function gives when it is compiled anew."""
    torch.compiler.reset()
    return ferrite.compile(function, **{"strict": True, **options})(*inputs)


def forget_kernels(monkeypatch) -> None:
    """As in a process that has just begun."""
    monkeypatch.setattr(host_code.KNOWN, "code", {})
    monkeypatch.setattr(host_code, "_loaded", weakref.WeakValueDictionary())


def without_llvm(monkeypatch) -> None:
    def refuse(*_args):
        raise AssertionError("LLVM was asked to compile")

    forget_kernels(monkeypatch)
    monkeypatch.setattr(host_code, "object_code", refuse)


# --- other processes --------------------------------------------------------------------------------------------------


def start(folder: Path, expected: Path, *more: str) -> FreshProcess:
    return FreshProcess(compiled_cases.__file__, str(folder), str(expected), *more)


def answer_of(process: FreshProcess) -> dict:
    done = process.result()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def elsewhere(shared) -> dict:
    """All cases in two processes at once, and then in one that has no LLVM: what the latter says of each case."""
    files = [shared / "one.pt", shared / "other.pt"]
    for process in [start(shared / "cache", file) for file in files]:
        asked = [result for results, _same in answer_of(process).values() for result in results]
        assert all(result.endswith((": miss", ": hit")) for result in asked)
    one, other = map(torch.load, files)
    assert all(compiled_cases.same(one[case], other[case]) for case in CASES)
    return answer_of(start(shared / "cache", files[0], "without-llvm"))


@pytest.mark.parametrize("case", CASES)
def test_another_process_compiles_nothing(elsewhere, case):
    """Whichever of two processes at once wrote an entry, a third needs neither stages nor LLVM, and no bit differs."""
    results, same = elsewhere[case]
    assert results
    assert all(result.endswith(": hit") for result in results)
    assert same


def test_the_cases_use_all_that_an_entry_holds(elsewhere, shared):
    store = open_store(resolve({"cache_dir": shared / "cache"}))
    found = [store.about(entry).metadata for entry in store.entries("graph")]
    assert len(found) == len(CASES) + 1  # training has two
    for part in ("lines", "operators", "runs", "programs", "scalars", "objects"):
        assert any(each["graph"][PARTS.index(part)] for each in found), part


# --- hits -------------------------------------------------------------------------------------------------------------


def test_a_hit_runs_no_stage(monkeypatch):
    net, x = Net(), torch.randn(5, 8)
    with torch.no_grad():
        first = compiled(net, x)
        record = ferrite.last_compile()
        assert asked() == ["miss"]
        without_llvm(monkeypatch)
        for stage in ("lower_graph", "make_plan", "executable_of"):
            monkeypatch.setattr(backend, stage, None)
        second = compiled(net, x)
    assert asked() == ["hit"]
    assert torch.equal(first, second)
    again = ferrite.last_compile()
    assert set(again.stages) == {"pre_grad", "capture", "cache"}
    (one,), (other,) = record.graphs, again.graphs
    assert (one.source, one.kernels, one.eager_calls, one.inputs) == (
        other.source,
        other.kernels,
        other.eager_calls,
        other.inputs,
    )
    assert record.rewrites == again.rewrites
    assert one.kernels
    assert "compiled_cases.py" in one.source


def test_errors_of_indices_are_eagers_on_a_hit():
    x, good, bad = torch.randn(6, 3), torch.tensor([1, 5]), torch.tensor([1, 6])
    with pytest.raises(IndexError) as eager:
        gathered(x, bad)
    for result in ("miss", "hit"):
        torch.compiler.reset()
        function = ferrite.compile(gathered, strict=True)
        torch.testing.assert_close(function(x, good), gathered(x, good))
        assert asked() == [result]
        with pytest.raises(IndexError) as ours:
            function(x, bad)
        assert str(ours.value) == str(eager.value)


def test_another_size_of_a_dynamic_graph_is_a_hit():
    def function(x):
        return torch.softmax(x * x.shape[0], -1)

    for rows, result in ((5, "miss"), (7, "hit")):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(function, x, dynamic=True), function(x))
        assert asked() == [result]


def test_lines_of_the_model_are_those_of_today():
    def function(x):
        return torch.sin(x) + 1

    def moved(x):
        return torch.sin(x) + 1

    places = []
    for each in (function, moved):
        compiled(each, torch.randn(9))
        (graph,) = ferrite.last_compile().graphs
        (kernel,) = graph.kernels
        (line,) = kernel.lines
        assert str(line) in graph.source
        places.append(line.line)
    assert asked() == ["hit"]
    assert places[1] - places[0] == moved.__code__.co_firstlineno - function.__code__.co_firstlineno


# --- misses -----------------------------------------------------------------------------------------------------------


def test_an_option_that_changes_code_misses_and_is_named():
    x = torch.randn(5, 8)
    compiled(torch.sin, x)
    compiled(torch.sin, x, post_grad=False)
    assert asked() == ["miss"]
    (explained,) = ferrite.explain_cache().graphs
    assert [each.name for each in explained.differences] == ["option post_grad"]
    compiled(torch.sin, x, post_grad=False)
    assert asked() == ["hit"]


def test_another_form_of_an_operator_misses(monkeypatch):
    """What lowering puts in its place is compiled in."""
    with torch.library._scoped_library("ferrite_cache", "FRAGMENT") as library:
        library.define("changed(Tensor x) -> Tensor")
        library.impl("changed", lambda x: x * 2, "CompositeExplicitAutograd")
        operator = torch.ops.ferrite_cache.changed.default
        x = torch.randn(5)
        for form, result in ((twice, "miss"), (twice, "hit"), (added, "miss")):
            monkeypatch.setitem(torch._decomp.decomposition_table, operator, form)
            torch_operators.decomposition.cache_clear()  # as in another process
            torch.testing.assert_close(compiled(lambda x: operator(x), x), x * 2)
            assert asked() == [result]


def twice(x):
    return x * 2


def added(x):
    return x + x


def test_the_command_shows_what_was_compiled(capsys, monkeypatch):
    forget_kernels(monkeypatch)
    compiled(torch.sin, torch.randn(5, 8))
    compiled(torch.sin, torch.randn(6, 8))
    assert str(ferrite.explain_cache()).count("input 0") == 2  # of its torch calls, and of what they become
    capsys.readouterr()
    assert main(["cache", "ls"]) == 0
    listed = capsys.readouterr().out
    assert listed.count("inference, 1 inputs") == 2
    assert listed.count(" kernel ") == 3  # two, and the driver
    assert main(["cache", "explain"]) == 0
    assert "input 0" in capsys.readouterr().out
    assert main(["cache", "verify"]) == 0


def test_without_the_cache_nothing_is_written():
    compiled(torch.sin, torch.randn(5), cache=False)
    assert asked() == ["off"]
    assert not Path(os.environ["FERRITE_CACHE_DIR"]).exists()


def test_a_kernel_is_shared_by_graphs(monkeypatch):
    def function(x):
        return torch.sin(x) + 1, x @ x

    x = torch.randn(8, 8)
    forget_kernels(monkeypatch)
    compiled(lambda x: torch.sin(x) + 1, x)
    without_llvm(monkeypatch)
    torch.testing.assert_close(compiled(function, x), function(x))
    assert asked() == ["miss"]


# --- what is wrong with an entry --------------------------------------------------------------------------------------


def damage_bytes(entry) -> None:
    data = bytearray(entry.path.read_bytes())
    data[len(data) // 2] ^= 1
    entry.path.write_bytes(data)


def damage_metadata(entry) -> None:
    """Whole, but not what a reader of this version can use."""
    store = open_store(resolve())
    about = store.about(entry)
    about.metadata["graph"][PARTS.index("text")] = "def inference(args):\n    return [unknown"
    store.publish(Key.of("graph", about.components), {}, about.metadata)


def damage_code(entry) -> None:
    store = open_store(resolve())
    about = store.about(entry)
    store.publish(Key.of("graph", about.components), {}, about.metadata)


@pytest.mark.parametrize("damage", [damage_bytes, damage_metadata, damage_code])
def test_a_damaged_entry_is_built_anew(damage):
    x = torch.randn(5, 8)
    compiled(torch.sin, x)
    (entry,) = graphs()
    damage(entry)
    for result in ("miss", "hit"):
        torch.testing.assert_close(compiled(torch.sin, x), torch.sin(x))
        assert asked() == [result]


# --- what is not kept -------------------------------------------------------------------------------------------------


def test_what_compiling_decided_about_sizes_is_not_kept(monkeypatch):
    def deciding(graph, *about):
        size = next(node.meta["val"] for node in graph.gm.graph.nodes)
        assert bool(size < 100)  # torch guards on it
        return lower_graph(graph, *about)

    monkeypatch.setattr(backend, "lower_graph", deciding)
    x = torch.randn(9, 4)
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.sin, x, dynamic=True), torch.sin(x))
        (outcome,) = ferrite.last_compile().cache
        assert (outcome.result, outcome.reason) == ("not kept", "compiling it decided something about its sizes")


def test_a_failing_pass_is_seen_every_time():
    @ferrite.graph_pass(stage="post_grad", name="fails")
    def fails(gm, context):
        raise RuntimeError("not today")

    for _ in range(2):
        with pytest.warns(FerriteWarning, match="not today"):
            compiled(torch.sin, torch.randn(9), passes=(fails,), strict=False)
        assert asked() == ["not kept"]
    assert graphs() == []


def test_a_key_that_cannot_be_made_costs_the_cache_alone(monkeypatch):
    def fail(*_args, **_kwargs):
        raise RuntimeError("no text today")

    monkeypatch.setattr(cache, "graph_key", fail)
    x = torch.randn(9)
    torch.testing.assert_close(compiled(torch.sin, x, strict=False), torch.sin(x))
    (outcome,) = ferrite.last_compile().cache
    assert (outcome.result, outcome.reason) == ("not kept", "no key could be made: RuntimeError: no text today")
    with pytest.raises(ferrite.CompilerBug):
        compiled(torch.sin, torch.randn(8))


def places_of(function) -> Places:
    return Places(torch.fx.symbolic_trace(function))


@pytest.mark.quick
def test_objects_are_kept_by_place_or_by_value():
    held = torch.randn(3)
    places = places_of(lambda x: x + held)
    made = torch.randn(2, 3, 4).permute(2, 0, 1)
    objects = {"held": held, "made": made, "bits": torch.tensor([True, False]), "none": torch.empty(0, 3)}
    kept, sections = kept_objects(objects, places.index())
    assert kept["held"] == KeptObject(places.index().place_of(held))
    kind = dict[str, KeptObject]
    again = decode(kind, json.loads(json.dumps(encode(kind, kept))))
    assert again == kept
    found = found_objects(again, sections, places)
    assert found["held"] is held
    for name in ("made", "bits", "none"):
        torch.testing.assert_close(found[name], objects[name], rtol=0, atol=0)
        assert found[name].stride() == objects[name].stride()


WHOLE = torch.arange(8.0)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("objects", "reason"),
    [
        ({"x": io.StringIO()}, "it needs a StringIO that its graph does not hold"),
        ({"x": torch.nn.Linear(2, 2)}, "a graph inside it is run in eager"),
        ({"x": torch.zeros(2, 2).to_sparse()}, "it needs a Tensor that its graph does not hold"),
        ({"x": torch.zeros(2, requires_grad=True)}, "more than numbers"),
        ({"x": torch.zeros(MAX_TENSOR_BYTES + 1, dtype=torch.int8)}, "larger than 1 MiB"),
        ({"x": torch.zeros(3).expand(2, 3)}, "does not lie densely"),
        ({"x": WHOLE[:4], "y": WHOLE[4:]}, "shares memory with another"),
    ],
)
def test_other_objects_cannot_be_kept(objects, reason):
    with pytest.raises(NotCached, match=reason):
        kept_objects(objects, places_of(lambda x: x).index())
