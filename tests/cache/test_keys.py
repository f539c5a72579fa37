"""Keys: everything that compiled code depends on is in them, by name; nothing else is."""

from __future__ import annotations

import ast
import functools
import importlib
import math
import os
import re
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ferrite
from ferrite.cache import EntryStore, Key, differences, graph_key, kernel_key, key_components, source_digest
from ferrite.cache.graph_text import READ
from ferrite.cache.identities import identity
from ferrite.capture import CapturedGraph, capture
from ferrite.errors import NotCached
from ferrite.options import Options
from ferrite.runtime import run_in_eager

ROOT = Path(__file__).parents[2]


def keys_of(function, *args, dynamic=False, options=None, change=lambda graph: graph, backward=False, **more):
    """The keys of the graphs that a call makes, each taken where the compiler would."""
    found = []

    def backend(gm, inputs):
        def compile_graph(graph: CapturedGraph):
            given = {"target": "cpu", "sources": "0", **more}
            try:
                found.append(graph_key(change(graph), options or Options(), **given))
            except NotCached as reason:
                found.append(reason)
            return run_in_eager(graph.gm)

        return capture(gm, inputs, compile_graph, options or Options())

    torch.compiler.reset()
    result = torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    if backward:
        result.backward()
    for each in found:
        if isinstance(each, NotCached):
            raise each
    return found


def key_of(function, *args, **settings) -> Key:
    (found,) = keys_of(function, *args, **settings)
    return found


def changed(first: Key, second: Key) -> list[str]:
    return [each.name for each in differences(first.components, second.components)]


def scaled(x):
    return (x * 2.0).relu()


X = torch.arange(12.0).reshape(3, 4)


def test_the_same_graph_has_the_same_key():
    def other_names(tensor):
        doubled = tensor * 2.0
        return doubled.relu()

    assert key_of(scaled, X) == key_of(scaled, X + 1) == key_of(other_names, X)
    assert key_of(scaled, X).digest == key_of(scaled, X).digest


@pytest.mark.parametrize(
    ("function", "value", "names"),
    [
        (lambda x: (x * 3.0).relu(), X, ["calls"]),
        (lambda x: (x * 2).relu(), X, ["calls"]),
        (lambda x: (x + 2.0).relu(), X, ["calls", "operators"]),
        (scaled, torch.ones(3, 5), ["input 0", "strides"]),
        (scaled, torch.ones(4, 3).t(), ["input 0", "strides"]),
        (scaled, X.double(), ["input 0"]),
        (scaled, torch.ones(13)[1:].view(3, 4), ["input 0"]),
    ],
)
def test_a_difference_in_the_graph_is_named(function, value, names):
    assert changed(key_of(scaled, X), key_of(function, value)) == names


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, 1.0), (1, True), (math.inf, -math.inf), (math.nan, 0.0)])
def test_numbers_that_compare_alike_or_not_at_all_are_told_apart(one, other):
    def fill(number):
        return lambda x: torch.ops.aten.full([2], number, dtype=torch.float32) + x

    assert changed(key_of(fill(one), torch.ones(2)), key_of(fill(other), torch.ones(2))) == ["calls"]


def test_what_is_known_of_inputs_by_position_counts():
    plain = key_of(scaled, X)
    static = key_of(scaled, X, change=lambda graph: replace(graph, static_inputs=frozenset((0,))))
    donated = key_of(scaled, X, change=lambda graph: replace(graph, donated_inputs=frozenset((0,))))
    assert changed(plain, static) == changed(plain, donated) == changed(static, donated) == ["input 0"]


def test_parameters_count_by_their_looks_and_constants_by_their_values():
    def with_constant(number):
        return lambda x: x + torch.tensor([1.0, number])

    linear, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    assert not torch.equal(linear.weight, other.weight)
    assert key_of(linear, X) == key_of(other, X)
    one, same, two = (key_of(with_constant(number), torch.ones(2)) for number in (2.0, 2.0, 3.0))
    assert one == same
    assert changed(one, two) == ["constants"]


def test_forward_and_backward_differ():
    found = keys_of(lambda x: scaled(x).sum(), X.clone().requires_grad_(), backward=True)
    assert [key.components["direction"] for key in found] == ["forward", "backward"]


# --- symbols ----------------------------------------------------------------------------------------------------------


def test_symbols_count_by_what_is_known_of_them_and_by_magnitude():
    small = key_of(scaled, torch.ones(5, 7), dynamic=True)
    assert small == key_of(scaled, torch.ones(6, 4), dynamic=True)
    assert changed(small, key_of(scaled, torch.ones(5, 7000), dynamic=True)) == ["symbols"]
    one_symbol = changed(small, key_of(scaled, torch.ones(5, 5), dynamic=True))
    assert {"input 1", "input 2", "symbols"} <= set(one_symbol)


def test_names_of_symbols_do_not_count():
    """torch names a symbol after the argument it comes from."""

    def one(x):
        return x * x.shape[0]

    def other(first_of_all, x):
        return x * x.shape[0]

    assert key_of(one, torch.ones(5), dynamic=True) == key_of(other, None, torch.ones(5), dynamic=True)


def test_a_guard_counts():
    def multiple(x):
        return scaled(x) if x.shape[0] % 8 == 0 else x

    free, bound = key_of(scaled, torch.ones(16), dynamic=True), key_of(multiple, torch.ones(16), dynamic=True)
    assert changed(free, bound) == ["symbols"]
    assert "Mod(s0, 8)" in bound.components["symbols"]


def test_a_range_counts():
    def with_at_most(longest):
        x = torch.ones(16)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=longest)
        return key_of(scaled, x, dynamic=None)

    assert with_at_most(100) == with_at_most(100)
    assert changed(with_at_most(100), with_at_most(200)) == ["symbols"]


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_what_is_known_of_a_size_that_depends_on_data_counts():
    def with_at_most(longest):
        def function(x):
            count = x[0].item()
            torch._check(count >= 0)
            torch._check(count <= longest)
            return x.new_zeros(count)

        return key_of(function, torch.tensor([3, 4]))

    assert with_at_most(8) == with_at_most(8)
    assert "symbols" in changed(with_at_most(8), with_at_most(9))


def test_graphs_inside_count():
    def chosen_by(inner):
        return lambda x: torch.cond(x.sum() > 0, lambda y: inner(y) + 1, lambda y: y * 2, (x,))

    assert key_of(chosen_by(torch.sin), X) == key_of(chosen_by(torch.sin), X)
    assert changed(key_of(chosen_by(torch.sin), X), key_of(chosen_by(torch.cos), X)) == ["calls", "operators"]


def test_what_an_operator_of_the_users_declares_counts():
    def declared(tags):
        with torch.library._scoped_library("ferrite_test_keys", "FRAGMENT") as library:
            library.define("twice(Tensor x) -> Tensor", tags=tags)
            library.impl("twice", lambda x: x * 2, "CPU")
            library.impl("twice", lambda x: torch.empty_like(x), "Meta")
            return key_of(lambda x: torch.ops.ferrite_test_keys.twice(x), X)

    assert declared(()) == declared(())
    assert changed(declared(()), declared((torch.Tag.needs_exact_strides,))) == ["calls", "operators"]


def test_making_a_key_adds_no_guard():
    counts = []

    def count_around(graph):
        values = [node.meta.get("val") for node in graph.gm.graph.nodes]
        guards = next(each for each in values if isinstance(each, torch.Tensor)).fake_mode.shape_env.guards  # type: ignore[attr-defined]
        counts.append(len(guards))
        graph_key(graph, Options(), target="", sources="")
        counts.append(len(guards))
        return graph

    key_of(lambda x: x.view(-1, 2).sum(0), torch.ones(6, 4), dynamic=True, change=count_around)
    assert counts[0] == counts[1]


# --- what is around ---------------------------------------------------------------------------------------------------


def test_options_that_change_code_count_by_name():
    plain = key_of(scaled, X)
    assert changed(plain, key_of(scaled, X, options=Options(numerics="strict"))) == ["option numerics"]
    fused = Options(post_grad_fusions={"batch_aten_tanh": {}})
    assert changed(plain, key_of(scaled, X, options=fused)) == ["option post_grad_fusions"]
    assert key_of(scaled, X, options=Options(strict=True, cache_size=3, cache_dir=Path("x"))) == plain


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dump_dir": Path("d")}, "every stage is to be written down"),
        ({"fuel": 3}, "rewrites are being counted"),
        ({"fail_at": "lower"}, "a stage is to fail"),
        ({"check_numerics": ["warn"]}, "checked while it is compiled"),
    ],
)
def test_options_that_ask_for_the_stages_to_run(options, reason):
    with pytest.raises(NotCached, match=reason):
        key_of(scaled, X, options=Options(**options))


def test_the_state_of_torch_counts():
    plain = key_of(scaled, X)
    try:
        torch.set_default_dtype(torch.float64)
        assert changed(plain, key_of(scaled, X)) == ["default dtype"]
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert changed(plain, key_of(scaled, X)) == ["deterministic"]
        torch.use_deterministic_algorithms(False)
        assert key_of(scaled, X) == plain
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def test_the_precision_of_products_counts():
    backends: Any = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
    plain, before = key_of(scaled, X), [each.fp32_precision for each in backends]
    try:
        torch.set_float32_matmul_precision("high")
        assert changed(plain, key_of(scaled, X)) == ["precision"]
    finally:
        torch.set_float32_matmul_precision("highest")
        for each, precision in zip(backends, before, strict=True):
            each.fp32_precision = precision
    assert key_of(scaled, X) == plain


def test_target_sources_and_what_else_is_baked_in_count():
    plain = key_of(scaled, X)
    assert changed(plain, key_of(scaled, X, target="cpu with avx512f")) == ["target"]
    assert changed(plain, key_of(scaled, X, sources="1")) == ["sources"]
    assert changed(plain, key_of(scaled, X, more={"threads": "2"})) == ["threads"]
    kernel = kernel_key("kernel text", target="cpu", sources="0")
    assert kernel.kind == "kernel"
    assert changed(kernel, kernel_key("other text", target="cpu", sources="0")) == ["text"]
    assert changed(kernel, kernel_key("kernel text", target="x", sources="0", more={"level": "3"})) == [
        "level",
        "target",
    ]


def test_the_versions_are_those_in_use(monkeypatch):
    plain = key_of(scaled, X)
    assert plain.components["torch"].startswith(torch.__version__)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(ferrite, "__version__", "9.9.9")
    monkeypatch.setattr(key_components, "llvm_version", lambda: "llvmlite 99")
    assert changed(plain, key_of(scaled, X)) == ["ferrite", "llvm", "torch"]


# --- what has no key --------------------------------------------------------------------------------------------------


def replaced(value):
    def change(graph):
        call = next(node for node in graph.gm.graph.nodes if node.op == "call_function")
        graph.gm.held = value
        with graph.gm.graph.inserting_before(call), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of an attribute that is no tensor
            graph.gm.graph.get_attr("held")
        return graph

    return change


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "it holds a builtins.object"),
        (test_a_range_counts, "a function without an operator's name"),
        (torch.ones(2).to_sparse(), "a constant is a Tensor of layout torch.sparse_coo"),
        (torch.Generator(), "it holds a torch._C.Generator"),
    ],
)
def test_what_no_text_describes_has_no_key(value, reason):
    with pytest.raises(NotCached, match=reason):
        key_of(scaled, X, change=replaced(value))


# Metadata of nodes that ferrite reads and that cannot change what a captured graph compiles to.
IRRELEVANT = {
    "val": "follows from the inputs, or is written as the looks of a value",
    "left_to_eager": "such a graph runs as it is, and the cache is not asked",
    "example_value": "the same, before autograd has seen the graph",
    "grapharg": "where Dynamo found an input",
    "stack_trace": "lines of the model",
    "nn_module_stack": "lines of the model",
    "source_fn_stack": "lines of the model",
    "rewritten": "what a report says",
    "recompute": "read by the partitioner, before",
    "partitioner_tag": "read by the partitioner, before",
    "enters_autocast": "on graphs of torch calls, before",
    "folded_from": "on graphs of torch calls, before",
    "place_in_order": "set and read by one pass",
    "drawn_in_program": "set and read by one pass",
    "needs_no_copy": "set and read after the key is made",
    "user_kernel": "the process that loads an entry launches its own; what it writes is in the text of the call",
    "index_inside": "set and read after the key is made",
    "memory of the model": "set and read while freezing",
    "why_not_moved": "what a report says",
    "decisions about collectives": "set and read after the key is made; the record in an entry has them",
    "members_of_bucket": "set and read after the key is made",
    "part_of_collective": "set and read after the key is made",
}


def metadata_keys(tree: ast.Module, constants: dict[str, str]) -> set[str]:
    """The keys that a module uses on something called `meta`."""
    found = set()
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") == "meta":
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asks = node.func.attr in ("get", "pop", "setdefault") and getattr(node.func.value, "attr", "") == "meta"
            key = node.args[0] if asks else None
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            found.add(key.value)
        elif isinstance(key, ast.Name) and key.id in constants:
            found.add(constants[key.id])
    return found


def test_all_metadata_that_ferrite_reads_is_accounted_for():
    texts = [path.read_text() for path in sorted((ROOT / "ferrite").rglob("*.py"))]
    constants = dict(re.findall(r'^([A-Z_]+) = "([^"\n]*)"', "\n".join(texts), re.MULTILINE))
    used = set().union(*(metadata_keys(ast.parse(text), constants) for text in texts if ".meta" in text))
    assert {"val", "unbacked_bindings", "written_after"} <= used, "the check itself finds nothing"
    assert used <= READ | set(IRRELEVANT)
    assert not READ & set(IRRELEVANT)


# --- users' passes ----------------------------------------------------------------------------------------------------

PASS = """
import functools
import helper_of_pass

LIMIT = 3

def rewrite(gm):
    return helper_of_pass.count(gm) + LIMIT

def limited(number):
    def inner(gm):
        return number
    return inner

class Rewrite:
    def __init__(self, number):
        self.number = number

    def __call__(self, gm):
        return self.number

class Named(Rewrite):
    def uuid(self):
        return self.number
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module with passes, and one that it imports; `load` loads both as they are now."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "own_pass.py").write_text(PASS)
    (tmp_path / "helper_of_pass.py").write_text("def count(gm):\n    return 1\n")

    def load():
        for name in ("own_pass", "helper_of_pass"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("own_pass")

    yield load
    for name in ("own_pass", "helper_of_pass"):
        sys.modules.pop(name, None)


def test_a_pass_is_known_by_the_files_it_comes_from(own, tmp_path):
    before = identity(own().rewrite)
    assert before == identity(own().rewrite)
    (tmp_path / "helper_of_pass.py").write_text("def count(gm):\n    return 2\n")
    assert identity(own().rewrite) != before
    (tmp_path / "helper_of_pass.py").write_text("def count(gm):\n    return 1\n")
    assert identity(own().rewrite) == before
    (tmp_path / "own_pass.py").write_text(PASS.replace("LIMIT = 3", "LIMIT = 4"))
    assert identity(own().rewrite) != before


def test_a_pass_is_known_by_what_it_holds(own):
    made = own()
    assert identity(made.limited(1)) == identity(made.limited(1)) != identity(made.limited(2))
    assert identity(made.Rewrite(1)) == identity(made.Rewrite(1)) != identity(made.Rewrite(2))
    assert identity(made.Rewrite(1).__call__) != identity(made.Rewrite(2).__call__)
    partial = functools.partial
    assert identity(partial(made.rewrite, 1)) == identity(partial(made.rewrite, 1)) != identity(partial(made.rewrite))
    assert identity(made.Named("a")) == identity(made.Named("a")) != identity(made.Named("b"))
    assert identity(made.limited(made.rewrite)) != identity(made.limited(len))
    for held in (object(), torch.ones(2), {"deep": [object()]}):
        with pytest.raises(NotCached, match=r"which has no text: give it a method uuid|nothing is known"):
            identity(made.limited(held))
    with pytest.raises(NotCached, match="says by its uuid"):
        identity(made.Named(None))


def test_a_pass_written_at_a_prompt_has_no_identity(monkeypatch):
    namespace = {"__name__": "__main__"}
    exec("def rewrite(gm): return 1", namespace)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)  # a worker's has none
    with pytest.raises(NotCached, match="not written in a file of its own module"):
        identity(namespace["rewrite"])
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    with pytest.raises(NotCached, match="written at a prompt"):
        identity(namespace["rewrite"])


def test_own_passes_count_where_they_are_still_to_run(own):
    made = own()
    plain = key_of(scaled, X)

    def names(stage, function):
        return changed(plain, key_of(scaled, X, options=Options(passes=(ferrite.graph_pass(function, stage=stage),))))

    assert names("post_grad", made.rewrite) == ["pass rewrite"]
    assert names("pre_grad", made.rewrite) == []  # it shows in the graph
    hooked = Options(post_grad_custom_post_pass=(made.limited(1),))
    assert changed(plain, key_of(scaled, X, options=hooked)) == ["option post_grad_custom_post_pass 0"]
    with pytest.raises(NotCached, match="which has no text"):
        key_of(scaled, X, options=Options(joint_custom_pre_pass=(made.limited(object()),)))


# --- ferrite's own sources --------------------------------------------------------------------------------------------


def test_a_change_to_the_sources_is_seen(tmp_path, monkeypatch):
    package = tmp_path / "ferrite"
    shutil.copytree(ROOT / "ferrite" / "cache", package / "cache")
    (package / "__init__.py").write_text("a = 1\n")
    monkeypatch.setattr(key_components, "__file__", str(package / "cache" / "key_components.py"))
    store = EntryStore(tmp_path / "artifacts", 1 << 20)

    def digest() -> str:
        source_digest.cache_clear()
        return source_digest(store)

    before = digest()
    reads = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (reads.append(path), real(path))[1])
    assert digest() == before
    assert reads == []  # known by what the file system says
    times = (package / "__init__.py").stat()
    (package / "__init__.py").write_text("a = 2\n")
    os.utime(package / "__init__.py", ns=(times.st_atime_ns, times.st_mtime_ns))  # same size, same time
    assert digest() != before
    (package / "__init__.py").write_text("a = 1\n")
    assert digest() == before
    (package / "new.py").write_text("")
    assert digest() != before
    source_digest.cache_clear()


def test_without_a_store_the_sources_are_read():
    source_digest.cache_clear()
    assert len(source_digest(None)) == 64
    assert source_digest(None) == source_digest(None)
