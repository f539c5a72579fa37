"""The whole pre-grad stage, with every rewrite on, over programs that are easily got wrong.

Each program is compiled and compared with eager in everything a caller can see. Its graph goes through the stage alone
too, and there the stage keeps what it promises: inputs and outputs as they were, no guard, true metadata with lines of
the model, text that runs as Python, the user's tensors untouched, and nothing left to do for a second run.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ferrite.graph import model_line
from ferrite.graph.verify import Snapshot, count_guards, verify_graph
from ferrite.options import Options
from ferrite.passes import pre_grad_passes
from ferrite.passes.pre_grad.metadata import add_values
from tests.compare import assert_same_as_eager
from tests.torch_level import by_dynamo

EVERYTHING = {
    "horizontal": "always",
    "transpose_folding": "always",
    "eval_conv_bn": True,
    "kernel_rewrites": "always",
    "compress": ("lce-first", "lce-parts", "lce-matmul", "lce-simple", "dot-compress"),
}
PROGRAMS = {}


def floats(*shapes, gradient=True, dtype=torch.float32):
    return lambda: [torch.randn(shape).to(dtype).requires_grad_(gradient) for shape in shapes]


def program(make_inputs, *, backward=True, exact=True, no_grad=False, **options):
    """A program with its inputs; `exact=False`: random, or without a float64 twin, so it must be eager to the bit."""

    def keep(function):
        PROGRAMS[function.__name__.replace("_", " ")] = (function, make_inputs, backward, exact, no_grad, options)
        return function

    return keep


SIX = floats(*[(2, 3)] * 6)
ONE = floats((4, 6))


# --- writes, memory, modes --------------------------------------------------------------------------------------------


@program(SIX)
def a_member_is_written_between(*xs):
    own = [x * 2 for x in xs]
    first = [torch.tanh(x) for x in own[:5]]
    own[5].add_(1)
    return [*first, torch.tanh(own[5]), own[5]]


@program(SIX)
def members_in_place(*xs):
    own = [x * 2 for x in xs]
    return [F.relu(x, inplace=True).sum() for x in own], own


@program(SIX)
def results_written_by_a_function(*xs):
    found = [torch.clamp(x, -1, 1) for x in xs]
    return [torch.relu_(y).cos() for y in found]


@program(SIX)
def some_without_gradients(*xs):
    with torch.no_grad():
        inside = [torch.tanh(x) for x in xs]
    return [torch.tanh(x) for x in xs], inside


@program(floats(*[(3, 3)] * 6, gradient=False), backward=False, exact=False)
def some_under_autocast(*xs):
    with torch.autocast("cpu", torch.bfloat16):
        inside = [x @ x for x in xs]
    return [x @ x for x in xs], inside


@program(floats((4, 6), gradient=False), backward=False)
def a_join_of_pieces_written_and_returned(x):
    whole = torch.cat(x.split(2, 1), 1)
    whole.add_(1)
    return whole, torch.cat(x.split(3, 1), 1), x * 2


@program(SIX)
def members_returned(*xs):
    return [torch.tanh(x) for x in xs]


@program(ONE)
def the_only_section_returned(x):
    (piece,) = x.split(6, 1)
    return piece, piece + 1


@program(floats((2, 3, 6, 6), (4, 3, 3, 3), (4,), (4,), gradient=False), backward=False)
def a_weight_written_between_layer_and_norm(x, w, gamma, beta):
    own = w * 1
    y = torch.conv2d(x, own)
    own.zero_()
    return F.batch_norm(y, x.new_zeros(4), x.new_ones(4), gamma, beta, False, 0.1, 1e-5), own


@program(floats((5, 8), gradient=False), backward=False, exact=False)
def logits_written_before_sampling(logits):
    own = logits.clone()
    shares = F.softmax(own, -1)
    own.zero_()
    return torch.argmax(shares / torch.empty_like(shares).exponential_(1), dim=-1, keepdim=True), own


# --- conditions -------------------------------------------------------------------------------------------------------


@program(ONE)
def joined_along_another_dimension(x):
    return torch.cat(x.split(2, 0), 1) * 2, torch.cat(x.split(2, 1), 0) * 2


@program(ONE)
def items_in_another_order(x):
    items = x.unbind(1)
    return torch.cat(items[::-1]) * 2, torch.cat([*items[:5], items[0]]) * 2, torch.stack(items[::-1], 1) * 2


@program(floats((4, 3, 4, 5)))
def an_axis_that_moves_far(x):
    outcome = [torch.stack(x.unbind(0), dim) * 2 for dim in range(4)]
    outcome += [torch.cat(x.unbind(0), dim) * 2 for dim in range(3)]
    return outcome + [torch.stack(x.split(2, 0), dim) * 2 for dim in range(5)]


@program(floats((4, 6), (4, 6)))
def the_next_item_of_another_base(x, y):
    a, b = x.split(2, 1), y.split(2, 1)
    return torch.cat([a[0], a[1], b[2]], 1) * 2, torch.cat([a[0], y.unbind(1)[1][:, None], a[1]], 1) * 2


@program(ONE)
def sections_of_nothing(x):
    a, b, c, d = x.split([2, 0, 1, 3], 1)
    return torch.cat([a, b, c], 1) * 2, torch.cat([b, c], 1) * 2, torch.cat([a, b], 1) * 2, d * 2


@program(floats((4, 6), (3, 2)))
def a_foreign_operand_of_another_size(x, y):
    a, b, c = x.split(2, 1)
    return torch.cat([a, b, y, c], 0) * 2


@program(floats((4, 6)))
def reshaped_pieces_stacked(x):
    pieces = [piece.reshape(2, 4) for piece in x.split(2, 1)]
    return [torch.stack(pieces, dim) * 2 for dim in range(3)]


@program(floats((2, 3, 3), (2, 3, 3, 4)))
def a_diagonal_in_an_einsum(x, w):
    return torch.einsum("abb,abbd->abd", x, w) + 1


@program(floats((2, 3, 4), (2, 3, 4, 5)))
def an_einsum_of_rows(x, w):
    return torch.einsum("abc,abcd->abd", x, w) + 1


@program(floats((2, 3), (2, 3), gradient=False), backward=False, exact=False, executor="calls")  # eager's tanh
def joined_bits_and_dtypes(x, y):
    bits = torch.cat([(x * 2).view(torch.int32), y.view(torch.int32)]).view(torch.float32).tanh()
    return bits, torch.cat([(x * 9).long() + 1, y.half() * 2]).tanh()


@program(floats((8, 8), gradient=False), backward=False, exact=False)
def sampling_along_another_dimension(logits):
    noise = torch.empty_like(logits).exponential_()
    rows = torch.argmax(F.softmax(input=logits, dim=0) / noise, dim=-1, keepdim=True)
    return rows, torch.argmax(F.softmax(logits, -1) / torch.empty_like(logits).exponential_(2), -1)


@program(floats((2, 4, 8, 8), (6, 4, 3, 3), (6,), (6,), (6,)))
def a_norm_behind_a_layer_with_keywords(x, w, b, gamma, beta):
    y = F.conv2d(x, weight=w, bias=b, stride=2, padding=1)
    return F.batch_norm(y, running_mean=x.new_zeros(6), running_var=x.new_ones(6), weight=gamma, bias=beta)


def image_in_half():
    halves = [torch.randn(shape).bfloat16() for shape in ((2, 3, 6, 6), (4, 3, 3, 3))]
    return [*halves, torch.randn(4), torch.randn(4)]


@program(image_in_half, backward=False)
def a_norm_in_single_precision_behind_a_layer_in_half(x, w, gamma, beta):
    mean, variance = gamma.new_zeros(4), gamma.new_ones(4)
    return F.batch_norm(torch.conv2d(x, w), mean, variance, gamma, beta, False, 0.1, 1e-5)


@program(floats((2, 5, 5), (5, 5)))
def a_norm_behind_rows_of_rows(x, w):
    return F.batch_norm(F.linear(x, w), x.new_zeros(5), x.new_ones(5))


@program(floats((2, 4, 5, 5), (4, 3, 2, 2), (6,), (6,)))
def a_norm_behind_groups_transposed(x, w, gamma, beta):
    y = F.conv_transpose2d(x, w, groups=2)
    return F.batch_norm(y, x.new_zeros(6), x.new_ones(6), gamma, beta)


@program(floats((2, 3, 6, 6), (4, 3, 3, 3), gradient=False), backward=False, no_grad=True, freeze=True)
def a_layer_with_and_without_its_norm(x, w):
    return F.batch_norm(torch.conv2d(x, w), x.new_ones(4), x.new_ones(4)), torch.conv2d(x * 2, w)


@program(lambda: [torch.randn(2, 3).requires_grad_(), *(torch.randn(2, 3).double() for _ in range(5))])
def members_of_two_dtypes(*xs):
    return [torch.tanh(x) * 2 for x in xs]


@program(SIX)
def arguments_by_position(*xs):
    outcome = [F.dropout(x, 0.1, False) + 1 for x in xs]
    outcome += [torch.nan_to_num(x.log(), 7.0) * 2 for x in xs]
    return outcome + [torch.clamp(x, 0, 1) * 2 for x in xs]


@program(floats(*[(2, 3), (4, 3), (1,)] * 5))
def biases_of_one_element(*items):
    return [F.linear(*items[i : i + 3]).relu() for i in range(0, len(items), 3)]


# --- forms ------------------------------------------------------------------------------------------------------------


@program(floats((2, 3, 4), (2, 3, 5), (5, 3)))
def every_way_to_transpose(a, b, w):
    products = [x @ b for x in (a.permute((0, 2, 1)), torch.permute(a, dims=(0, 2, 1)), a.mT, a.transpose(-1, -2))]
    return [*products, torch.bmm(input=a.transpose(1, 2), mat2=b), F.linear(a.swapaxes(1, 2), w).cos()]


@program(floats((2, 3, 4), (5, 4), (5,)))
def a_transposed_layer_with_a_second_reader(x, w, b):
    y = F.linear(x, w, b)
    return y.permute(0, 2, 1).contiguous() * 2, y.sum()


@program(floats((2, 3, 4), (5, 4), (5,), gradient=False, dtype=torch.bfloat16), backward=False)
def a_transposed_layer_rounds_once(x, w, b):
    return F.linear(x, w, b).permute(0, 2, 1).contiguous() * 2


@program(floats(*[(2, 8), (8,), (8,)] * 5, gradient=False, dtype=torch.float16), backward=False)
def norms_round_once(*items):
    return [F.layer_norm(x, (8,), w, b) * 2 for x, w, b in zip(items[::3], items[1::3], items[2::3], strict=True)]


@program(ONE)
def names_of_numpy(x):
    return x.sum(axis=1, keepdims=True) + x.mean(axis=0), torch.concatenate(x.chunk(3, 1), axis=1) * 2  # type: ignore[call-arg]


@program(floats((2, 3), (2, 3), (4, 6), (4, 6)))
def compressions_of_embeddings(a, b, w, v):
    x = torch.stack([a.repeat(1, 2), b.repeat(1, 2)], 1)
    return (w[:, :2] @ x).relu(), (v[:, :2] @ x).relu(), torch.matmul(x @ x.mT, w[:2, :1])


EACH = pytest.mark.parametrize("name", PROGRAMS)


@EACH
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_it_is_eager(name, dynamic):
    function, make_inputs, backward, exact, no_grad, options = PROGRAMS[name]
    settings = {**EVERYTHING, **options}
    with torch.set_grad_enabled(not no_grad):
        assert_same_as_eager(function, make_inputs, backward=backward, exact=exact, options=settings, dynamic=dynamic)


@EACH
@pytest.mark.parametrize("symbolic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_stage_keeps_its_promises(name, symbolic):
    function, make_inputs, _, _, no_grad, more = PROGRAMS[name]
    options = Options(strict=True, **{**EVERYTHING, **more})
    inputs = make_inputs()
    with torch.set_grad_enabled(not no_grad):
        gm = by_dynamo(function, inputs, symbolic).gm
        kept_after_capture = [(each, each._version, each.detach().clone()) for each in inputs]
        kinds = [(node.name, node.type) for node in gm.graph.find_nodes(op="placeholder")]
        structure = torch.fx.node.map_arg(gm.graph.output_node().args, lambda node: "value")
        add_values(gm)
        before = Snapshot.of(gm)
        assert pre_grad_passes(gm, inputs, options) is gm
        add_values(gm)

    assert [(node.name, node.type) for node in gm.graph.find_nodes(op="placeholder")] == kinds
    assert torch.fx.node.map_arg(gm.graph.output_node().args, lambda node: "value") == structure
    assert count_guards(gm.graph) == before.guards
    verify_graph(gm, before, deep=True)
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and node.meta["val"] is not None]
    assert all(model_line(node) is not None for node in calls), [node.name for node in calls if not model_line(node)]
    for tensor, version, contents in kept_after_capture:
        assert tensor._version == version
        assert torch.equal(tensor, contents)
        assert tensor.grad is None

    code = gm.graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, "<text>", "exec"), namespace)
    assert callable(namespace["forward"])
    with torch.set_grad_enabled(not no_grad):
        text = written(gm)
        pre_grad_passes(gm, inputs, options)
    assert written(gm) == text, "a second run changes something"


def written(gm) -> str:
    """The graph as text, with nodes by their numbers: a second run may give them other names."""
    numbers = {node: f"%{number}" for number, node in enumerate(gm.graph.nodes)}
    lines = []
    for node in gm.graph.nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), numbers.get)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__qualname__", node.target)
        lines.append(f"{numbers[node]} = {name}({args}, {kwargs})")
    return "\n".join(lines)


@pytest.mark.quick
def test_the_order_in_which_rules_are_named_does_not_count():
    names = ["batch_tanh", "parallel_linear", "batch_sigmoid"]

    def function(x, *weights):
        layers = [F.linear(x, weight) for weight in weights]
        return [torch.tanh(y) for y in layers], [torch.sigmoid(y) for y in layers]

    found = set()
    for order in (names, names[::-1]):
        gm = torch.fx.symbolic_trace(lambda x, a, b, c, d, e: function(x, a, b, c, d, e))
        options = Options(strict=True, horizontal=order)
        found.add(pre_grad_passes(gm, [torch.rand(2, 3), *torch.rand(5, 4, 3)], options).code)
    assert len(found) == 1
    assert found.pop().count("tanh(") == 1
