"""From a question to an answer: hits, misses and why, and object code that runs in another process."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time

import pytest

import ferrite
from ferrite.cache import (
    Artifact,
    EntryStore,
    Key,
    Lookup,
    NewEntry,
    Outcome,
    differences,
    explain,
    look_up,
    nearest,
    open_store,
)
from ferrite.debug.record import start_record
from ferrite.errors import NotCached, Refusal
from ferrite.options import Options
from tests.cache import cached_compile


@pytest.fixture
def store(tmp_path) -> EntryStore:
    return EntryStore(tmp_path / "artifacts", 1 << 20)


def graph(**components: str) -> Key:
    return Key.of("graph", {"operators": "aten.mm", "torch": "2.13", "input 2": "f32", "input 10": "f32", **components})


def whole(artifact: Artifact) -> Artifact:
    return artifact


def look(store: EntryStore | None, key: Key, read=whole) -> Lookup:
    return look_up(store, lambda: key, "forward graph", read)


def ask(store: EntryStore | None, key: Key, **built) -> Outcome:
    """Look for an entry, and make it where there is none."""
    return look(store, key).publish(lambda: NewEntry({"code": b"1"}, {}, **built))


@pytest.mark.quick
def test_what_was_published_is_found(store):
    first = look(store, graph())
    assert (first.found, first.keeps, first.outcome.result) == (None, True, "miss")
    published = first.publish(lambda: NewEntry({"code": b"machine code"}, {"steps": (1, 2)}))
    assert (published.result, published.reason) == ("miss", "")
    second = look(store, graph())
    assert (second.keeps, second.outcome.result, second.outcome.key) == (False, "hit", graph())
    assert second.found.sections == {"code": b"machine code"}
    assert second.found.metadata == {"steps": [1, 2]}


def never() -> NewEntry:
    raise AssertionError("it is described, and nobody keeps it")


@pytest.mark.quick
def test_what_cannot_be_kept_is_not_described(store):
    def no_key() -> Key:
        raise NotCached("it calls model.f, a function without an operator's name")

    without_key = look_up(store, no_key, "forward graph", whole)
    assert (without_key.found, without_key.keeps, without_key.outcome.result) == (None, False, "not kept")
    assert without_key.publish(never).reason.startswith("it calls model.f")
    ask(store, graph())
    for lookup, result in ((look(None, graph()), "off"), (look(store, graph()), "hit")):
        assert lookup.publish(never).result == result


@pytest.mark.quick
def test_what_was_built_may_say_that_it_is_not_to_be_kept(store):
    assert ask(store, graph(), refusal=Refusal("packed weights have no text")).reason == "packed weights have no text"
    assert ask(store, graph()).result == "miss"
    assert ask(store, graph()).result == "hit"


@pytest.mark.quick
def test_what_cannot_be_written_down_is_not_kept(store):
    outcome = look(store, graph()).publish(lambda: NewEntry({}, {"n": object()}))
    assert outcome.result == "not kept"
    assert outcome.reason.startswith("it cannot be written down: TypeError")
    assert list(store.entries()) == []


@pytest.mark.quick
def test_a_key_that_fails_is_an_error_only_where_that_was_asked_for(store):
    def fail() -> Key:
        raise RuntimeError("no text today")

    assert look_up(store, fail, "graph", whole).outcome.reason == "no key could be made: RuntimeError: no text today"
    with pytest.raises(RuntimeError, match="no text today"):
        look_up(store, fail, "graph", whole, strict=True)


@pytest.mark.quick
def test_the_cache_can_be_switched_off(tmp_path):
    assert open_store(Options(cache=False, cache_dir=tmp_path)) is None
    store = open_store(Options(cache_dir=tmp_path, cache_size=3))
    assert store.limit == 3 << 20
    assert store.folder == tmp_path / "artifacts"
    assert open_store(Options(cache_dir=tmp_path, cache_size=3)) is store
    assert ask(None, graph()).result == "off"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.quick
def test_a_failing_description_leaves_nothing(store):
    def fail() -> NewEntry:
        raise RuntimeError("no code")

    with pytest.raises(RuntimeError, match="no code"):
        look(store, graph()).publish(fail)
    assert list(store.entries()) == []


@pytest.mark.quick
def test_a_reader_can_reject_an_entry(store):
    def refuse(artifact: Artifact) -> Artifact:
        raise ValueError("not in this process")

    ask(store, graph())
    refused = look(store, graph(), refuse)
    assert (refused.found, refused.keeps) == (None, True)
    assert refused.outcome.reason == "its entry could not be used: ValueError: not in this process"
    assert list(store.entries()) == []
    told = refused.publish(lambda: NewEntry({"code": b"2"}, {}, note="a kernel was made anew")).reason
    assert told == "its entry could not be used: ValueError: not in this process; a kernel was made anew"
    assert look(store, graph()).found.sections == {"code": b"2"}


# --- why --------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_differences_are_named_and_in_order():
    found = differences(graph(threads="2").components, graph(**{"input 2": "f64", "input 10": "f64"}).components)
    assert [(each.name, each.there, each.here) for each in found] == [
        ("input 2", "f32", "f64"),
        ("input 10", "f32", "f64"),
        ("threads", "2", None),
    ]
    assert differences(graph().components, graph().components) == []


@pytest.mark.quick
def test_the_nearest_entry_is_one_of_the_same_operators(store):
    ask(store, graph(operators="aten.add"))
    ask(store, graph(torch="2.11", target="other", llvm="other"))
    ask(store, graph(torch="2.12", target="other"))
    found = nearest(store, "graph", graph().components, time.time() + 1)
    assert found[1].components["torch"] == "2.12"
    assert nearest(store, "kernel", graph().components, time.time() + 1) is None


@pytest.mark.quick
def test_a_miss_is_explained_by_what_was_there_before(store):
    assert explain(ask(store, graph())) is None  # the first
    outcome = ask(store, graph(torch="2.12"))
    ask(store, graph(torch="2.12", target="made later, and nearer"))
    _entry, found = explain(outcome)
    assert [(each.name, each.there, each.here) for each in found] == [("torch", "2.13", "2.12")]


@pytest.mark.quick
def test_explain_cache_says_which_component_differed(store):
    record = start_record(Options(), None)
    record.cache.append(ask(store, graph()))
    record.cache.append(ask(store, graph()))
    record.cache.append(ask(store, graph(**{"input 2": "f32 [9, 16]", "calls": "x" * 300})))
    report = ferrite.explain_cache()
    assert [each.outcome.result for each in report.graphs] == ["miss", "hit", "miss"]
    assert [each.name for each in report.graphs[2].differences] == ["calls", "input 2"]
    lines = str(report).splitlines()
    assert lines[0].startswith(f"forward graph: miss, entry {graph().digest[:12]}")
    assert lines[1] == "  there was no entry to compare with"
    assert lines[2].startswith("forward graph: hit")
    assert lines[4] == f"  the nearest entry, {graph().digest[:12]}, differs in"
    assert lines[6].split() == ["input", "2", "f32", "f32", "[9,", "16]"]
    assert "calls" not in str(report)  # it follows from the input
    assert "cache" in str(record)


@pytest.mark.quick
def test_explain_cache_without_questions(store):
    record = start_record(Options(), None)
    assert str(ferrite.explain_cache()) == "the last compilation did not ask the cache"
    record.cache.append(ask(None, graph()))
    assert str(ferrite.explain_cache()) == "forward graph: off, option cache"


# --- object code ------------------------------------------------------------------------------------------------------

LLVM = """
define i64 @triple(i64 %x) {
  %y = mul i64 %x, 3
  ret i64 %y
}
"""


def machine():
    binding = pytest.importorskip("llvmlite.binding")
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding, binding.Target.from_default_triple().create_target_machine(jit=True)


@pytest.mark.quick
def test_object_code_is_loaded_from_memory(store):
    """The file may lie where nothing can be executed, or be gone: it is only read."""
    binding, target = machine()
    key = Key.of("kernel", {"text": LLVM})
    store.publish(key, {"triple": target.emit_object(binding.parse_assembly(LLVM))}, {})
    code = store.fetch(key).sections["triple"]
    assert store.path(key).stat().st_mode & 0o111 == 0
    store.path(key).unlink()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    triple = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(engine.get_function_address("triple"))
    assert triple(14) == 42


def compile_elsewhere(size: int) -> list[list[object]]:
    done = subprocess.run(
        [sys.executable, cached_compile.__file__, str(size)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "7"},  # no order of a set is the same
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_another_process_finds_what_the_first_compiled(artifact_cache):
    first, second = compile_elsewhere(5), compile_elsewhere(6)  # both with the settings that torch begins with
    assert [row[:2] for row in first] == [["forward", "miss"], ["backward", "miss"]]
    assert [row[:3] for row in second] == [["forward", "hit", []], ["backward", "hit", []]]
    assert [row[3:] for row in first] == [row[3:] for row in second]
