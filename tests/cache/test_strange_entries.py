"""Entries that are whole, and say something strange: always a miss with a reason, never a graph in eager."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import operator
import os
import weakref
from typing import Any

import pytest
import torch

import ferrite
from ferrite.cache import Artifact, EntryStore, Key, folder, open_store, source_digest
from ferrite.cache import store as stores
from ferrite.cache.codec import Strange, decode, fields_of
from ferrite.cache.compiled_graph import GraphEntry
from ferrite.cache.constant_storage import KeptObject, tensor_from
from ferrite.cache.entry import HEAD, MAGIC, MAX_ENTRY_BYTES, VERSION, encode
from ferrite.cache.laws import check_graph
from ferrite.codegen.llvm.image import Image, is_image
from ferrite.debug.graph_record import from_data
from ferrite.debug.record import GraphRecord
from ferrite.graph import Places
from ferrite.options import resolve
from ferrite.runtime import host_code

KEY = Key.of("graph", {"torch": "2.13"})


# --- what an entry says of itself -------------------------------------------------------------------------------------


def sealed(text: bytes, body: bytes = b"", more: int = 0) -> bytes:
    """An entry with checksums that are right."""
    head = HEAD.pack(MAGIC, VERSION, len(text), HEAD.size + len(text) + len(body) + more, hashlib.sha256(text).digest())
    return head + text + body


def saying(**changed: Any) -> bytes:
    """An entry with other facts than it should have; DROP leaves one out."""
    about = {
        "kind": "graph",
        "components": dict(KEY.components),
        "made": 1.0,
        "metadata": {},
        "sections": {},
        "checksum": hashlib.sha256(b"").hexdigest(),
        **changed,
    }
    return sealed(json.dumps({name: value for name, value in about.items() if value is not DROP}).encode())


DROP = object()
STRANGE = {
    "nested": sealed(b"[" * 200_000 + b"]" * 200_000),
    "nested inside": sealed(saying()[HEAD.size :].replace(b'"metadata": {}', b'"metadata": ' + b"[" * 100_000)),
    "no text": sealed(b"\xff\xfe\xff"),
    "a list": sealed(b"[]"),
    "a number of many digits": sealed(b'{"made": ' + b"9" * 5000 + b"}"),
    **{f"no {name}": saying(**{name: DROP}) for name in ("kind", "components", "made", "metadata", "sections")},
    "no checksum": saying(checksum=DROP),
    "kind": saying(kind=["graph"]),
    "components": saying(components={"torch": 2.13}),
    "components in a list": saying(components=[]),
    "made": saying(made="today"),
    "made at no time": saying(made=float("nan")),
    "made late": saying(made=1e300),
    "metadata": saying(metadata=[1]),
    "half a character": saying(metadata={"text": "\ud800"}),
    "section": saying(sections={"code": 3}),
    "section outside": saying(sections={"code": [0, 100]}),
    "section before": saying(sections={"code": [-8, 8]}),
    "section of no length": saying(sections={"code": [0, -1]}),
    "section by words": saying(sections={"code": ["0", "1"]}),
    "section of floats": saying(sections={"code": [0.0, 0.0]}),
}


@pytest.mark.quick
@pytest.mark.parametrize("what", STRANGE)
def test_a_strange_description_is_a_miss(tmp_path, what):
    store = EntryStore(tmp_path / "artifacts", 1 << 20)
    store.publish(KEY, {}, {})
    store.path(KEY).write_bytes(STRANGE[what])
    (entry,) = store.entries()
    assert store.about(entry) is None
    assert store.problem_of(entry)
    found = store.look(KEY)
    assert found.artifact is None
    assert found.refusal
    assert not store.path(KEY).exists()
    store.publish(KEY, {}, {})
    assert store.fetch(KEY) == Artifact({}, {})


@pytest.mark.quick
def test_a_plain_description_is_a_hit(tmp_path):
    """That of which the strange ones are made."""
    store = EntryStore(tmp_path / "artifacts", 1 << 20)
    store.publish(KEY, {}, {"n": 1})
    store.path(KEY).write_bytes(saying(metadata={"text": "\U0001f600 größe"}))
    assert store.fetch(KEY).metadata == {"text": "\U0001f600 größe"}


@pytest.mark.quick
@pytest.mark.parametrize("grows", ["file", "file and head"])
def test_a_huge_file_is_not_read(tmp_path, monkeypatch, grows):
    """200 GB that take no place on the disk."""
    store = EntryStore(tmp_path / "artifacts", 1 << 20)
    store.publish(KEY, {"code": b"x" * 1000}, {})
    path, size = store.path(KEY), 200 << 30
    if grows == "file and head":
        text = saying()[HEAD.size :]
        path.write_bytes(sealed(text, more=size - HEAD.size - len(text)))
    os.truncate(path, size)
    read, real = [], folder.read_all
    monkeypatch.setattr(stores, "read_all", lambda descriptor, count: read.append(count) or real(descriptor, count))
    (entry,) = store.entries()
    assert store.about(entry) is None
    assert store.problem_of(entry) in ("longer than it says", f"larger than {MAX_ENTRY_BYTES >> 20} MiB")
    assert store.look(KEY).refusal
    assert sum(read) < 1000
    assert not path.exists()


@pytest.mark.quick
def test_an_entry_too_large_to_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "MAX_ENTRY_BYTES", 1000)
    store = EntryStore(tmp_path / "artifacts", 1 << 20)
    store.publish(KEY, {"code": b"x" * 2000}, {})
    assert list(store.entries()) == []


@pytest.mark.quick
def test_a_digest_of_sources_that_is_none_is_made_anew(tmp_path):
    store = EntryStore(tmp_path / "artifacts", 1 << 20)
    right = source_digest(store)
    (entry,) = store.entries("sources")
    key = Key.of("sources", store.about(entry).components)
    for metadata in ({}, {"digest": 3}, {"digest": "../../etc"}):
        store.publish(key, {}, metadata)
        source_digest.cache_clear()
        assert source_digest(store) == right
        assert store.fetch(key).metadata == {"digest": right}
    source_digest.cache_clear()


# --- what a reader makes of it ----------------------------------------------------------------------------------------


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    halves = torch.cat([x, x * 2], 1).split(x.shape[1], 1)
    hidden = (halves[0] @ w).relu() + 0.5
    return torch.softmax(hidden, -1).square().sum() + (hidden.sin() @ w.T).sum() + halves[1].mean()


def step() -> tuple[torch.Tensor, torch.Tensor]:
    """One step of training, compiled anew: four entries of three kinds."""
    torch.manual_seed(0)
    torch.compiler.reset()
    x, w = torch.randn(5, 4), torch.randn(4, 6, requires_grad=True)
    answer = torch.compile(model, backend="ferrite", options={"strict": True})(x, w)
    answer.backward()
    return answer.detach(), w.grad


def outcomes() -> dict[str, Any]:
    record = ferrite.last_compile()
    return {each.what: each for each in (record.captured, record.joint, *record.cache)}


@pytest.fixture
def entries(artifact_cache) -> dict[str, tuple[Key, Artifact]]:
    """The entries of the model, by what they are of."""
    step()
    store = open_store(resolve())
    return {what: (each.key, store.fetch(each.key)) for what, each in outcomes().items()}


def changed(metadata: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value in one place; DROP takes it away."""
    whole = at = copy.deepcopy(metadata)
    for part in path[:-1]:
        at = at[part]
    if value is DROP:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return whole


def first_call(rows: list[Any]) -> int:
    """The first row of a graph that passes made another call of, with operands."""
    return next(at for at, row in enumerate(rows) if type(row) is dict and row.get("call", ["output"])[0] != "output")


def strange_rows(rows: list[Any]) -> dict[str, Any]:
    """Rows of a rewritten graph that make no graph."""
    at = first_call(rows)
    call = rows[at]["call"]
    others = {
        "places that are not there": [*rows[:-1], 10**6],
        "a place from the end": [-1, *rows[1:]],
        "no nodes": [],
        "a node twice": [rows[0], *rows],
        "another order": rows[::-1],
        "an input gone": rows[1:],
        "a number": 3,
        "no call": changed(rows, (at, "call"), [1, 2]),
        "another kind of node": changed(rows, (at, "call", 0), "placeholder"),
        "nothing to call": changed(rows, (at, "call", 1), "torch:nothing"),
        "no function": changed(rows, (at, "call", 1), "torch:nn" if call[0] == "call_function" else 7),
        "arguments of no kind": changed(rows, (at, "call", 2), ["list"]),
        "an operand from the end": changed(rows, (at, "call", 2), ["tuple", ["node", -1]]),
        "an operand behind": changed(rows, (at, "call", 2), ["tuple", ["node", len(rows) - 1]]),
        "a number out of range": changed(rows, (at, "call", 2), ["tuple", 10**30]),
        "a float": changed(rows, (at, "call", 2), ["tuple", 0.5]),
        "a kind of data that is none": changed(rows, (at, "call", 2), ["tuple", ["pickle", "x"]]),
    }
    made = next((at for at, row in enumerate(rows) if type(row) is dict and "name" in row), None)
    if made is not None:
        others["a name that is taken"] = changed(rows, (made, "name"), "l_x_")
        others["a name that is none"] = changed(rows, (made, "name"), "import os")
        others["metadata of nobody"] = changed(rows, (made, "like"), [-1, "stack_trace"])
    return others


PARTS, RECORDED = (list(fields_of(kind)) for kind in (GraphEntry, GraphRecord))


def part(name: str) -> tuple[str, int]:
    """Where a part of an executable stands in an entry."""
    return "graph", PARTS.index(name)


def recorded(name: str) -> tuple[str, int]:
    return "record", RECORDED.index(name)


def strange_graph(data: Any) -> dict[str, Any]:
    """What an entry of a compiled graph cannot say."""
    runs, operators, lines = (data["graph"][PARTS.index(name)] for name in ("runs", "operators", "lines"))
    (at, run), *_ = [(at, run) for at, run in enumerate(runs) if run[2]]
    call, called = (*part("runs"), at, 2, 0), next(iter(operators))
    inputs = len(data["record"][RECORDED.index("inputs")])
    return {
        **{f"no {name}": changed(data, (name,), DROP) for name in data},
        **{f"no {name} in the graph": changed(data, part(name), DROP) for name in PARTS},
        **{f"no {name} in the record": changed(data, recorded(name), DROP) for name in RECORDED},
        **{f"{name} is a number": changed(data, (name,), 3) for name in data},
        **{f"{name} in the graph is None": changed(data, part(name), None) for name in PARTS},
        **{f"{name} in the record is 0.5": changed(data, recorded(name), 0.5) for name in RECORDED},
        "a kernel that is not there": changed(data, (*part("kernels"), 0, 0), "kernel_of_nobody"),
        "another number of kernels": changed(data, part("kernels"), []),
        "a kernel from the end": changed(data, (*call, 0), -1),
        "a kernel out of range": changed(data, (*call, 0), 10**6),
        "an argument less": changed(data, (*call, 1, 0), DROP),
        "a slot out of range": changed(data, (*call, 1, 0, 0), run[1]),
        "a slot before all": changed(data, (*call, 1, 0, 0), -2),
        "an offset before its memory": changed(data, (*call, 1, 0), [0, -8]),
        "an offset that is no number": changed(data, (*call, 1, 0, 1), "8"),
        "an arena of no size": changed(data, (*part("runs"), at, 0), -1),
        "more slots than a stack has": changed(data, (*part("runs"), at, 1), 10**9),
        "a region outside": changed(data, (*part("runs"), at, 3), [[0, 10**6, 2]]),
        "a region without threads": changed(data, (*part("runs"), at, 3), [[0, 1, 0]]),
        "an operator that is none": changed(data, (*part("operators"), called), "os:system"),
        "an operator gone": changed(data, (*part("operators"), called), DROP),
        "a run gone": changed(data, part("runs"), []),
        "a line of no node": changed(data, part("lines"), [[1, 10**6]]),
        "a line that is not there": changed(data, part("lines"), [[10**6, place] for _row, place in lines]),
        "an object of no node": changed(data, part("objects"), {"x": [[10**6, 0], "", [], []]}),
        "an object that is a node": changed(data, part("objects"), {"x": [[inputs, 1], "", [], []]}),
        "a constant of no bytes": changed(data, part("objects"), {"x": [None, "torch.float32", [], []]}),
        "a pass without a name": changed(data, (*recorded("passes"), 0, 0), None),
        "a pass of other numbers": changed(data, (*recorded("passes"), 0, 2), -1),
        "programs that are none": changed(data, part("programs"), ["def f(:"]),
    }


def assert_a_miss(what: str, key: Key, artifact: Artifact, metadata: Any) -> None:
    """Compiling makes the entry anew, and gives the same as before."""
    store = open_store(resolve())
    store.publish(key, artifact.sections, metadata)
    expected = step_in_eager()
    for result in ("miss", "hit"):
        torch.testing.assert_close(step(), expected)
        assert outcomes()[what].result == result
        assert ("could not be used" in outcomes()[what].reason) == (result == "miss")
        assert all(each.result == "hit" for name, each in outcomes().items() if name != what)
        assert all(graph.failure is None for graph in ferrite.last_compile().graphs)


def step_in_eager() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(5, 4), torch.randn(4, 6, requires_grad=True)
    answer = model(x, w)
    answer.backward()
    return answer.detach(), w.grad


SOME = {
    "captured graph": ("places that are not there", "an operand from the end"),
    "joint graph": ("an operand behind",),
    "forward graph": ("no record", "a kernel from the end", "an operator gone"),
}


@pytest.mark.parametrize(("what", "strange"), [(what, each) for what, some in SOME.items() for each in some])
def test_a_strange_entry_is_built_anew(entries, what, strange):
    key, artifact = entries[what]
    if what == "forward graph":
        assert_a_miss(what, key, artifact, strange_graph(artifact.metadata)[strange])
    else:
        rows = strange_rows(artifact.metadata["nodes"])[strange]
        assert_a_miss(what, key, artifact, {**artifact.metadata, "nodes": rows})


@pytest.mark.slow
@pytest.mark.parametrize("what", ["captured graph", "joint graph", "forward graph", "backward graph"])
def test_every_strange_entry_is_built_anew(entries, what):
    key, artifact = entries[what]
    if what in ("captured graph", "joint graph"):
        rows = strange_rows(artifact.metadata["nodes"])
        cases = {name: {**artifact.metadata, "nodes": each} for name, each in rows.items()}
        cases["no passes"] = changed(artifact.metadata, ("passes",), DROP)
        cases["passes of other numbers"] = changed(artifact.metadata, ("passes", 0, 3), "many")
    else:
        cases = strange_graph(artifact.metadata)
    for metadata in cases.values():
        assert_a_miss(what, key, artifact, metadata)


def test_what_a_graph_cannot_say_is_said(entries):
    """Every strange entry breaks a law or cannot be loaded; here those that break a law, without compiling."""
    _key, artifact = entries["forward graph"]
    places = Places(torch.fx.symbolic_trace(lambda x: functools.reduce(operator.add, [x] * 100)))

    def read(metadata: Any) -> None:
        check_graph(decode(GraphEntry, metadata["graph"], places), artifact.sections, len(places.nodes))
        from_data(metadata["record"], places, "forward", "")

    read(artifact.metadata)
    lawful = []
    for name, metadata in strange_graph(artifact.metadata).items():
        with contextlib.suppress(Strange, KeyError, ferrite.UserError):
            read(metadata)
            lawful.append(name)
    # what cannot be told before objects are looked for, programs are read or the host program is loaded
    assert set(lawful) <= {
        "an operator that is none",
        "an operator gone",
        "a run gone",
        "an object that is a node",
        "a line that is not there",  # of the nodes here no lines are known
    }


def test_a_strange_entry_that_cannot_be_removed_is_a_miss(entries, monkeypatch):
    """As in a folder that can only be read: what is there is found again and again."""
    key, artifact = entries["captured graph"]
    other, graph = entries["forward graph"]
    store = open_store(resolve())
    store.publish(key, {}, {**artifact.metadata, "nodes": [10**6]})
    store.publish(other, graph.sections, {**graph.metadata, "record": None})
    monkeypatch.setattr(stores, "remove", lambda path: False)
    monkeypatch.setattr(EntryStore, "_write", lambda *args: None)
    for _ in range(2):
        torch.testing.assert_close(step(), step_in_eager())
        found = outcomes()
        assert [found[what].result for what in ("captured graph", "forward graph")] == ["miss", "miss"]
        assert found["joint graph"].result == found["backward graph"].result == "hit"


@pytest.mark.parametrize("section", [b"", b"\x7fELF but nothing else", b"ferrite image 1\n", "places", "name"])
def test_a_strange_kernel_is_compiled_anew(artifact_cache, monkeypatch, section):
    def function(x):
        return (x * 0.321 + 6.54).cos()

    monkeypatch.setattr(host_code.KNOWN, "code", {})
    monkeypatch.setattr(host_code, "_loaded", weakref.WeakValueDictionary())
    x = torch.rand(7)
    torch.compile(function, backend="ferrite", options={"strict": True})(x)
    store = open_store(resolve())
    for entry in store.entries("kernel"):
        key = Key.of("kernel", store.about(entry).components)
        code = store.fetch(key).sections["code"]
        if not is_image(code):
            pytest.skip("kernels are no images here")
        image = Image.read(code)
        if section == "places":
            code = bytes(Image(image.code, image.exports, image.words, 1 << 30))
        elif section == "name":
            code = bytes(Image(image.code, {"another": 0}, image.words, image.fixed))
        store.publish(key, {"code": section if isinstance(section, bytes) else code}, {})
    for entry in store.entries("graph"):
        store.remove(entry)
    torch.compiler.reset()
    monkeypatch.setattr(host_code.KNOWN, "code", {})
    monkeypatch.setattr(host_code, "_loaded", weakref.WeakValueDictionary())
    ours = torch.compile(function, backend="ferrite", options={"strict": True})(x)
    torch.testing.assert_close(ours, function(x))
    (outcome,) = ferrite.last_compile().cache
    assert outcome.result == "miss"
    assert outcome.reason.count("could not be used") == 2  # the kernel and the driver
    for entry in store.entries("kernel"):
        code = store.fetch(Key.of("kernel", store.about(entry).components)).sections["code"]
        assert len(code) > 100


@pytest.mark.quick
@pytest.mark.parametrize(
    "how",
    [
        KeptObject(None, "torch.nn", (2,), (1,)),
        KeptObject(None, "torch.float32", (1 << 40,), (1,)),
        KeptObject(None, "torch.float32", (2,), (1 << 19,)),
        KeptObject(None, "torch.float32", (-2,), (1,)),
        KeptObject(None, "torch.float32", (3,), (1,)),
        KeptObject(None, "torch.float32", (2,), ()),
    ],
)
def test_a_constant_of_strange_looks_takes_no_memory(how, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("memory was taken")

    assert tensor_from(KeptObject(None, "torch.float32", (2,), (1,)), bytes(8)).tolist() == [0.0, 0.0]
    monkeypatch.setattr(torch, "empty_strided", refuse)
    with pytest.raises(ValueError, match="a constant"):
        tensor_from(how, bytes(8))


def test_an_entry_that_leads_to_a_failure_is_forgotten(entries, monkeypatch, tmp_path):
    """Passes may have been remembered wrongly: next time they run."""
    key, _artifact = entries["captured graph"]
    store = open_store(resolve())

    def fail(*_args):
        raise RuntimeError("not today")

    with monkeypatch.context() as patch:
        patch.setattr("ferrite.backend.capture", fail)
        with pytest.raises(ferrite.CompilerBug):
            step()
    assert not store.path(key).exists()
    torch.testing.assert_close(step(), step_in_eager())
    assert outcomes()["captured graph"].result == "miss"


def test_what_cannot_be_written_down_is_compiled_all_the_same(artifact_cache, monkeypatch):
    monkeypatch.setattr("ferrite.cache.rewritten_graph.passes_data", lambda passes: [float("nan")])
    torch.testing.assert_close(step(), step_in_eager())
    found = outcomes()["captured graph"]
    assert found.result == "not kept"
    assert "it cannot be written down" in found.reason


def test_encode_is_what_the_tests_make_by_hand():
    data = encode("graph", KEY.components, Artifact({}, {}), 1.0)
    assert json.loads(data[HEAD.size :]) == json.loads(saying()[HEAD.size :])
