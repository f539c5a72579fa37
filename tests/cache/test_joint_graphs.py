"""What the joint passes make of a graph of forward and backward, through the cache: from an entry it is what they make.

The graphs behind the partitioner are the same then, and so are their keys.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

import ferrite
from ferrite.__main__ import main
from ferrite.cache import Key, graph_key, joint_key, open_store
from ferrite.cache import rewritten_graph as captured
from ferrite.capture import capture, torch_api
from ferrite.capture.edits import Before, make
from ferrite.errors import FerriteWarning, NotCached
from ferrite.graph import fake_value
from ferrite.graph.aliases import storages_in
from ferrite.graph.facts import leaves
from ferrite.graph.order import users_in_order
from ferrite.options import resolve
from ferrite.passes import joint_graph_passes
from ferrite.runtime import run_in_eager
from tests.models.architectures import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("artifact_cache")
aten = torch.ops.aten


class Seen:
    """One training step: the joint graph behind its passes, the graphs cut from it with their keys, and the numbers."""

    def __init__(self) -> None:
        self.joint: list[Any] = []
        self.parts: list[Any] = []
        self.keys: list[str] = []
        self.numbers: list[torch.Tensor] = []
        self.record: Any = None

    @property
    def result(self) -> str:
        return self.record.joint.result


def text_of(gm: torch.fx.GraphModule) -> list[Any]:
    """All that later stages can see of a graph, values and the memory they share included."""
    storages: dict[Any, int] = {}
    rows = []
    for node in gm.graph.nodes:
        held = [leaf for leaf in leaves(fake_value(node)) if isinstance(leaf, torch.Tensor)]
        notes = [str(node.meta.get(key)) for key in ("partitioner_tag", "recompute", "stack_trace", "original_aten")]
        rows.append(
            (
                node.op,
                node.name,
                node.target,
                repr(node.args),
                repr(node.kwargs),
                [user.name for user in node.users],
                [(each.dtype, each.device, str(tuple(each.shape)), str(each.stride())) for each in held],
                [sorted(storages.setdefault(s, len(storages)) for s in storages_in(each)) for each in held],
                notes,
                sorted(set(node.meta) - {"rewritten"}),
            )
        )
    return rows


@pytest.fixture
def one_thread():
    """Gradients that eager adds up by index differ from run to run otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def train(monkeypatch, one_thread):
    """One step of a model, its graphs run by eager, and all that was seen."""
    partition = torch_api.min_cut_partition

    def step(model, inputs, **settings) -> Seen:
        seen = Seen()

        def watched(gm, example_inputs, _compile_graph, *rest):
            def in_eager(graph):
                seen.parts.append([graph.kind, *text_of(graph.gm)])
                seen.keys.append(graph_key(graph, resolve(), target="any", sources="0").digest)
                return run_in_eager(graph.gm)

            return capture(gm, example_inputs, in_eager, *rest)

        def watched_partition(joint, *args, **kwargs):
            seen.joint.append(text_of(joint))
            return partition(joint, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr("ferrite.backend.capture", watched)
            patch.setattr(torch_api, "min_cut_partition", watched_partition)
            seen.numbers = one_step(model, inputs, **settings)
        seen.record = ferrite.last_compile()
        return seen

    return step


def one_step(model: Any, inputs: Any, **settings: Any) -> list[torch.Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model, given = copy.deepcopy(model), copy.deepcopy(inputs)
    compiled = ferrite.compile(model, **{"strict": True, **settings})
    answer = compiled(**given) if isinstance(given, dict) else compiled(*given)
    results = [each for each in torch.utils._pytree.tree_leaves(answer) if isinstance(each, torch.Tensor)]
    sum(each.float().sum() for each in results if each.requires_grad).backward()
    left = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
    gradients = [each.grad for each in (*left, *tensors_in(given)) if each.grad is not None]
    return [each.detach() for each in (*results, *left, *gradients)] + [torch.random.get_rng_state()]


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def assert_same(first: Seen, second: Seen) -> None:
    for one, other in zip([*first.joint, *first.parts], [*second.joint, *second.parts], strict=True):
        assert len(one) == len(other)
        for row, same in zip(one, other, strict=True):
            assert row == same
    assert first.keys == second.keys
    assert len(first.keys) >= 2
    for one, other in zip(first.numbers, second.numbers, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert first.record.rewrites == second.record.rewrites
    assert done(first.record) == done(second.record)
    assert first.record.saved == second.record.saved


def done(record: Any) -> list[Any]:
    return [(each.name, each.nodes_before, each.nodes_after, each.facts) for each in record.passes["joint"]]


# --- graphs -----------------------------------------------------------------------------------------------------------


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = torch.nn.Linear(8, 7), torch.nn.Linear(7, 8), torch.nn.LayerNorm(8)

    def forward(self, x):
        y = F.dropout(self.first(self.norm(x)).relu(), 0.5, self.training)
        return self.second(y.t().t().view(-1, 7)) * torch.ones_like(x)


class Counts(torch.nn.Module):
    """Reads a buffer that it writes: what was read has to be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(8))
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        y = x * self.seen.clone() * self.weight
        self.seen.add_(x.detach().sum(0))
        return y


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x)


X = torch.arange(32.0).reshape(4, 8) / 7
SENTENCES = torch.linspace(-1, 1, 96).reshape(2, 3, 16)
COUNTER = {"rng": "counter"}
PADDED = {"pad_mm": "always"}


def own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


CASES = {
    "small": (Small, X, {}),
    "small, random numbers by counter": (Small, X, COUNTER),
    "small, padded products": (Small, X, PADDED),
    "small, of any size": (Small, X, {"dynamic": True}),
    "small, random numbers by counter, of any size": (Small, X, {**COUNTER, "dynamic": True}),
    "small, half precision": (lambda: Small().bfloat16(), X.bfloat16(), {}),
    "a transformer": (Encoder, SENTENCES, {}),
    "a transformer, random numbers by counter": (Encoder, SENTENCES, COUNTER),
    "a transformer, of any size": (Encoder, SENTENCES, {"dynamic": True}),
    "an input that is written": (Counts, X, {}),
    "required passes alone": (Counts, X, {"joint": False}),
    "everything saved": (Small, X, {"partition": "save-all"}),
}


SLOW = {
    "a transformer, of any size",
    "a transformer, random numbers by counter",
    "small, random numbers by counter, of any size",
}


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in CASES])
def test_a_graph_from_the_cache_is_what_passes_make(train, name):
    build, values, settings = CASES[name]
    model = build()
    first, second = (train(model, (own(values),), **settings) for _ in range(2))
    assert [first.result, second.result] == ["miss", "hit"]
    assert_same(first, second)


def test_these_graphs_have_all_kinds_of_edits():
    """The cases above say little where passes only take nodes away."""
    torch.manual_seed(0)
    for settings, model, values in ((COUNTER, Small(), X), ({}, Counts(), X)):
        one_step(model, (own(values),), executor="calls", **settings)
    store = open_store(resolve())
    rows = [row for entry in store.entries("joint") for row in store.about(entry).metadata["nodes"]]
    edited = [row for row in rows if isinstance(row, dict)]
    assert any("is" in row and "call" in row for row in edited)
    assert any("like" in row and row.get("computed") for row in edited)
    assert ["dict", ["recompute", ["path", "torch.utils.checkpoint:CheckpointPolicy.MUST_SAVE"]]] in [
        row.get("said") for row in edited
    ]


QUICK = ("resnet",)


TRAINS = [name for name, architecture in ARCHITECTURES.items() if architecture.trains]


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in TRAINS]
)
def test_a_model_from_the_cache_is_what_passes_make(train, name):
    architecture = ARCHITECTURES[name]
    model = architecture.model().train()
    if name not in QUICK:  # some models break their graphs otherwise the first time
        train(model, architecture.inputs(), cache=False)
    first, second = (train(model, architecture.inputs()) for _ in range(2))
    assert [first.result, second.result] == ["miss", "hit"]
    assert_same(first, second)


def test_kernels_are_found_behind_it():
    torch.manual_seed(0)
    model = Small()
    first = one_step(model, (own(X),), executor="native")
    second = one_step(model, (own(X),), executor="native")
    assert [each.result for each in ferrite.last_compile().asked] == ["hit"] * 4
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# --- hits and misses --------------------------------------------------------------------------------------------------


def stepped(model: Any, *inputs: Any, **settings: Any) -> Any:
    one_step(model, tuple(map(own, inputs)), executor="calls", **settings)
    return ferrite.last_compile().joint


def test_a_hit_runs_no_pass(monkeypatch):
    model = Small()
    assert stepped(model, X).result == "miss"
    rewrites = ferrite.last_compile().passes["joint"]
    monkeypatch.setattr("ferrite.backend.JOINT", None)
    assert stepped(model, X).result == "hit"
    found = ferrite.last_compile().passes["joint"]
    assert [each.rewrites for each in found] == [each.rewrites for each in rewrites]
    assert {(each.seconds, each.note) for each in found if each.rewrites} == {(0.0, captured.FROM_CACHE)}


def adds_nothing(gm, context):
    return 0


def fails(gm, context):
    raise RuntimeError("not today")


def hook(graph):
    return None


def test_what_passes_depend_on_misses():
    model, step = Small(), ferrite.graph_pass(stage="joint", name="own")(adds_nothing)
    cases = [{}, {"skip": ("pointless_views",)}, {"passes": (step,)}, {"joint_custom_post_pass": hook}, COUNTER]
    assert [stepped(model, X, **case).result for case in cases] == ["miss"] * len(cases)
    assert [stepped(model, X, **case).result for case in cases] == ["hit"] * len(cases)
    assert stepped(model, X[:2]).result == "miss"
    assert {each.name for each in ferrite.explain_cache().joint.differences} >= {"input 2", "input 7"}
    assert stepped(Small().double(), X.double()).result == "miss"
    torch.set_float32_matmul_precision("high")
    try:
        assert stepped(model, X).result == "miss"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_pass_of_another_stage_does_not_matter():
    step = ferrite.graph_pass(stage="post_grad", name="own")(adds_nothing)
    model = Small()
    stepped(model, X)
    assert stepped(model, X, passes=(step,)).result == "hit"


def test_what_is_said_to_the_partitioner_counts():
    policy = CheckpointPolicy.MUST_SAVE

    def graph(tag: str, recompute: Any) -> Key:
        gm = torch.fx.symbolic_trace(lambda x: torch.ops.aten.relu.default(x))
        for node in gm.graph.nodes:
            node.meta |= {"val": X.to("meta"), "partitioner_tag": tag}
        relu = next(node for node in gm.graph.nodes if node.op == "call_function")
        relu.meta |= {} if recompute is None else {"recompute": recompute}
        return joint_key(gm, resolve(), sources="0")

    keys = [graph("is_forward", None), graph("is_backward", None), graph("is_forward", policy)]
    assert len(set(keys)) == 3
    assert graph("is_forward", policy) == keys[2]


def test_inference_asks_nothing():
    torch.compiler.reset()
    ferrite.compile(Small().eval(), strict=True)(X)
    with torch.no_grad():
        torch.compiler.reset()
        ferrite.compile(Small().eval(), strict=True)(X)
    assert ferrite.last_compile().joint is None


def test_without_the_cache_passes_run():
    outcome = stepped(Small(), X, cache=False)
    assert (outcome.result, outcome.reason) == ("off", "option cache")


# --- what is not kept -------------------------------------------------------------------------------------------------


def branching(x):
    return torch.cond(x.sum() > 0, lambda y: torch.sin(y) * 2, lambda y: torch.exp(y) - 1, (x,))


def makes_constant(gm, context):
    """A pass that gives the graph a tensor: data of an entry it is not."""
    node = next(node for node in gm.graph.nodes if node.op == "call_function")
    gm.register_buffer("made", torch.zeros(1))
    with gm.graph.inserting_before(node):
        made = gm.graph.get_attr("made")
    made.meta["val"] = fake_value(node).fake_mode.from_tensor(gm.made, static_shapes=True)
    return 1


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (branching, {}, "it holds another graph"),
        (torch.sin, {"fuel": 100}, "option fuel"),
        (torch.sin, {"passes": (ferrite.graph_pass(stage="joint", name="own")(makes_constant),)}, "a get_attr"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_kept_says_why(function, options, reason):
    for _ in range(2):
        outcome = stepped(function, X, **options)
        assert outcome.result == "not kept"
        assert reason in outcome.reason
    assert not list(open_store(resolve()).entries("joint"))


def test_a_failing_pass_is_seen_every_time():
    step = ferrite.graph_pass(stage="joint", name="fails")(fails)
    for _ in range(2):
        with pytest.warns(FerriteWarning, match="not today"):
            outcome = stepped(torch.sin, X, passes=(step,), strict=False)
        assert outcome.result == "not kept"


# --- what is wrong with an entry --------------------------------------------------------------------------------------


def whole(row):
    return {"is": row} if isinstance(row, int) else row


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows: rows[:-1],
        lambda rows: [*rows[:-1], 1000],
        lambda rows: [{**row, "call": ["call_function", "os:system", ["tuple"], None]} for row in map(whole, rows)],
        # Edits that can be made, up to a value that cannot be computed.
        lambda rows: [{**whole(row), "computed": True} if isinstance(row, dict) else row for row in broken_call(rows)],
        lambda rows: "nothing",
    ],
)
def test_an_entry_that_makes_no_sense_is_made_anew(damage):
    torch.manual_seed(0)
    model = Small()
    expected = one_step(model, (own(X),), executor="calls", **COUNTER)
    store = open_store(resolve())
    (entry,) = store.entries("joint")
    about = store.about(entry)
    metadata = {**about.metadata, "nodes": damage(about.metadata["nodes"])}
    store.publish(Key.of("joint", about.components), {}, metadata)
    for result in ("miss", "hit"):
        found = one_step(model, (own(X),), executor="calls", **COUNTER)
        assert ferrite.last_compile().joint.result == result
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def broken_call(rows):
    """The last call that was made has an operand too many."""
    place = max(place for place, row in enumerate(rows) if isinstance(row, dict) and "like" in row)
    op, path, args, kwargs = rows[place]["call"]
    return [*rows[:place], {**rows[place], "call": [op, path, [*args, *args[1:]], kwargs]}, *rows[place + 1 :]]


def test_a_damaged_file_is_ignored_and_made_anew(capsys):
    model = Small()
    stepped(model, X)
    store = open_store(resolve())
    (entry,) = store.entries("joint")
    path = store.folder / "joint" / entry.digest
    path.chmod(0o600)
    held = bytearray(path.read_bytes())
    held[-1] ^= 1
    path.write_bytes(held)
    assert main(["cache", "verify"]) == 1
    assert "joint" in capsys.readouterr().out
    assert [stepped(model, X).result for _ in range(2)] == ["miss", "hit"]
    assert main(["cache", "verify"]) == 0


# --- edits of graphs with values --------------------------------------------------------------------------------------


def traced() -> torch.fx.GraphModule:
    """A functional graph with values: a view, and a chain behind it."""

    def function(x):
        y = aten.permute.default(aten.permute.default(x, [1, 0]), [1, 0])
        return aten.mul.Tensor(aten.native_dropout.default(y, 0.5, True)[0], 1)

    return torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(X)


def test_values_are_computed_as_passes_have_them():
    one, other = traced(), traced()
    before = Before(one)
    joint_graph_passes(one, options=resolve(COUNTER))
    rows = json.loads(json.dumps(before.edits(one)))
    assert any(isinstance(row, dict) and row.get("computed") for row in rows)
    make(other, rows)
    other.graph.lint()
    assert text_of(one) == text_of(other)


def test_a_value_that_no_call_gives_is_refused():
    gm = traced()
    before = Before(gm)
    node = next(node for node in gm.graph.nodes if node.target is aten.mul.Tensor)
    node.meta["val"] = node.meta["val"].double()
    with pytest.raises(NotCached, match="not what its call gives"):
        before.edits(gm)


def test_edits_that_fail_leave_the_graph_as_it_was():
    one, other = traced(), traced()
    before = Before(one)
    joint_graph_passes(one, options=resolve(COUNTER))
    was = text_of(other)
    with pytest.raises(Exception, match="fails on the values"):
        make(other, broken_call(before.edits(one)))
    assert text_of(other) == was


def test_a_made_node_stands_for_the_very_operator_of_its_origin():
    gm = traced()
    for node in gm.graph.nodes:
        node.meta["original_aten"] = aten.native_dropout.default
    joint_graph_passes(gm, options=resolve(COUNTER))
    made = [node for node in gm.graph.nodes if "rewritten" in node.meta]
    assert made
    assert all(node.meta["original_aten"] is aten.native_dropout.default for node in made)


def test_users_stand_as_in_the_graph():
    gm = torch.fx.symbolic_trace(lambda x: (x + 1, x + 2, x + 3))
    x, first, second, third, _output = gm.graph.nodes
    first.args = (second, 1)
    third.append(first)
    second.args, third.args, first.args = (x, 2), (x, 3), (x, 1)
    first.prepend(second)
    assert list(x.users) != [third, second, first]
    users_in_order(gm.graph)
    assert list(x.users) == [third, second, first]


def test_a_graph_inside_has_no_key():
    gm = torch.fx.symbolic_trace(lambda x: x)
    gm.inner = torch.fx.symbolic_trace(lambda x: x)
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.get_attr("inner")
    with pytest.raises(NotCached, match="another graph"):
        joint_key(gm, resolve(), sources="0")


# --- reports ----------------------------------------------------------------------------------------------------------


def test_commands_and_reports_show_it(capsys):
    model = Small()
    stepped(model, X)
    assert "joint graph: miss, entry " in str(ferrite.explain_cache())
    stepped(model, X)
    assert "joint graph: hit, entry " in str(ferrite.explain_cache())
    assert "joint graph" in str(ferrite.last_compile())
    capsys.readouterr()
    assert main(["cache", "ls", "--kind", "joint"]) == 0
    assert "forward and backward, " in capsys.readouterr().out
    (entry,) = open_store(resolve()).entries("joint")
    assert main(["cache", "explain", entry.digest[:12]]) == 0
    assert "tags" in capsys.readouterr().out
