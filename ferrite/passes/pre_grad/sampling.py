"""Sampling without a softmax.

    argmax(softmax(l) / E)  =  argmax(l - log(E))           E: fresh noise, exponential with rate 1

Both sides take the logarithm of each other row by row, and a softmax only shifts its row. The noise itself is drawn as
before, so that the same numbers come from the generator and, where rounding does not decide, the same index comes out.

The right side is written as `argmax((l - m) - log(E)) * isfinite(m)`, m the maximum of the row: shifted, large logits
lose no precision against the noise, and a row without a softmax (NaN or infinity in it, or nothing but minus infinity)
gives index 0, as in eager. Half precision is computed in float32.

As calls of torch a softmax is one kernel and this is several, which takes about a fifth longer; compiled, it saves a
pass over the row: 0.9 of the time on a CPU, where drawing the noise is most of it.

The draw is a write, so this cannot be an ordinary rule: it looks itself whether anything it moves is written meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value, is_barrier, mode_of, model_line, mutates, same_sizes, storages_of, stream_of
from ferrite.passes.pre_grad.predicates import sole_user
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.passes.shared.kernel_rules import KernelRules
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, GraphRule, Writer, apply_rules, arguments_of, count_uses, difference, inherit

aten = torch.ops.aten
DRAWS = ("exponential_", torch.Tensor.exponential_, aten.exponential_.default)
# They look at their operand's shape alone.
UNFILLED = (torch.empty_like, aten.empty_like.default)


@dataclass(frozen=True)
class Sampling:
    """The calls that draw one index per row."""

    argmax: torch.fx.Node
    quotient: torch.fx.Node
    softmax: torch.fx.Node
    noise: torch.fx.Node  # as the quotient reads it
    buffer: torch.fx.Node  # what the noise is drawn into
    draw: torch.fx.Node
    dim: int

    @property
    def logits(self) -> torch.fx.Node:
        logits: torch.fx.Node = arguments_of(self.softmax)["self"]
        return logits


class GumbelArgmax(GraphRule):
    name = "gumbel_argmax"
    purpose = "the index that argmax(softmax / exponential noise) draws is found without the softmax"
    numerics = "rounded"
    targets = (aten.argmax.default,)

    def apply(self, gm: torch.fx.GraphModule, context: PassContext) -> int:
        total = 0
        for node in gm.graph.find_nodes(op="call_function", target=aten.argmax.default):
            if context.fuel.left and not isinstance(self.rewrite(gm, node), Refusal):
                context.fuel.spend()
                context.count(self.name)
                total += 1
        return total

    def explain(self, gm: torch.fx.GraphModule, context: PassContext) -> Mapping[torch.fx.Node, Refusal | None]:
        refusals: dict[torch.fx.Node, Refusal | None] = {}
        for node in gm.graph.find_nodes(op="call_function", target=aten.argmax.default):
            found = sampling_at(node)
            outcome = found if isinstance(found, Refusal) else written(gm, found)
            if isinstance(outcome, Writer):
                outcome.take_back()
            refusals[node] = outcome if isinstance(outcome, Refusal) else None
        return refusals

    def rewrite(self, gm: torch.fx.GraphModule, node: torch.fx.Node) -> Refusal | None:
        found = sampling_at(node)
        if isinstance(found, Refusal):
            return found
        writer = written(gm, found)
        if isinstance(writer, Refusal):
            return writer
        line = model_line(found.argmax)
        for made in writer.made:
            inherit(made, found.argmax)
            made.meta["rewritten"] = (self.name, (str(line),) if line is not None else ())
        found.argmax.replace_all_uses_with(writer.made[-1])
        for old in (found.argmax, found.quotient):
            gm.graph.erase_node(old)
        if found.softmax in found.buffer.all_input_nodes:
            found.buffer.replace_input_with(found.softmax, unsoftened(found, writer))
        gm.graph.erase_node(found.softmax)
        return None


# --- matching ---------------------------------------------------------------------------------------------------------


def sampling_at(argmax: torch.fx.Node) -> Sampling | Refusal:
    given = arguments_of(argmax)
    quotient = given["self"]
    if not isinstance(quotient, torch.fx.Node) or quotient.target is not aten.div.Tensor:
        return Refusal("it is no index of a quotient")
    if sole_user(quotient) is not argmax:
        return Refusal(f"{quotient.name} is read by others too")
    operands = arguments_of(quotient)
    softmax, noise = operands["self"], operands["other"]
    if not isinstance(softmax, torch.fx.Node) or softmax.target is not aten.softmax.int:
        return Refusal("what is divided is no softmax")
    if type(given["dim"]) is not int or arguments_of(softmax)["dim"] != given["dim"]:
        return Refusal("softmax and argmax are along different dimensions")
    drawn = draw_of(noise)
    if drawn is None:
        return Refusal("the divisor is no exponential noise with rate 1 of its own")
    buffer, draw = drawn
    found = Sampling(argmax, quotient, softmax, noise, buffer, draw, given["dim"])
    return reader_problem(found) or value_problem(found) or order_problem(found) or found


def draw_of(noise: Any) -> tuple[torch.fx.Node, torch.fx.Node] | None:
    """The tensor that noise is drawn into and the draw, where the two are for one reader alone."""
    if not isinstance(noise, torch.fx.Node):
        return None
    if noise.target in DRAWS:
        buffer, draw = noise.args[0], noise
    else:
        buffer, draw = noise, next((user for user in noise.users if user.target in DRAWS), noise)
    if draw.target not in DRAWS or not isinstance(buffer, torch.fx.Node) or draw.args[0] is not buffer:
        return None
    rate = draw.args[1] if len(draw.args) > 1 else draw.kwargs.get("lambd", 1)
    if type(rate) not in (int, float) or rate != 1 or buffer.op not in ("call_function", "call_method"):
        return None
    return buffer, draw


def reader_problem(found: Sampling) -> Refusal | None:
    """The softmax is read by the quotient, and by what makes room for the noise; the noise by the quotient alone."""
    for reader in found.softmax.users:
        room = reader is found.buffer and reader.target in UNFILLED
        if (reader is not found.quotient and not room) or count_uses(reader, found.softmax) != 1:
            return Refusal(f"{found.softmax.name} is read by others too")
    readers = {*found.buffer.users, *found.draw.users} - {found.draw}
    if readers != {found.quotient} or count_uses(found.quotient, found.noise) != 1:
        return Refusal(f"{found.noise.name} is read by others too")
    return None


def value_problem(found: Sampling) -> Refusal | None:
    logits, noise = fake_value(found.logits), fake_value(found.noise)
    if not all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in (logits, noise)):
        return Refusal("the logits are no real numbers")
    quotient = fake_value(found.quotient)
    if not same_sizes(quotient.shape, logits.shape):
        return Refusal("there is more noise than logits")
    if not logits.dim() or not torch_api.known_true(logits.shape[found.dim] >= 1):
        return Refusal("there may be nothing to choose from")
    if len({stream_of(node) for node in (found.softmax, found.quotient, found.argmax)}) > 1:
        return Refusal("the calls run on different streams")
    return None


def order_problem(found: Sampling) -> Refusal | None:
    """Logits are read later than before, and so is the noise: neither may be written in between."""
    memory = storages_of(found.logits) | storages_of(found.noise)
    node = found.softmax
    if not storages_of(found.logits).isdisjoint(storages_of(found.noise)):
        return Refusal("the noise overwrites the logits")
    if not found.draw < found.quotient:
        return Refusal("the noise is drawn after the quotient")
    while node is not found.argmax:
        node = node.next
        if is_barrier(node):
            return Refusal(f"{node.name} may switch a mode")
        if mutates(node) and node is not found.draw:
            operands = (storages_of(operand) for operand in node.all_input_nodes)
            if not memory.isdisjoint(frozenset().union(*operands)):
                return Refusal(f"{node.name} writes what is read here")
    return None


# --- writing ----------------------------------------------------------------------------------------------------------


def written(gm: torch.fx.GraphModule, found: Sampling) -> Writer | Refusal:
    """The right side, unread as yet; its last node is the index."""
    writer = Writer(gm.graph, mode_of(gm.graph))
    try:
        write(gm.graph, writer, found)
        unlike = difference(fake_value(found.argmax), fake_value(writer.made[-1]))
        problem = room_problem(found, writer) if unlike is None else Refusal(unlike)
    except BaseException:
        writer.take_back()
        raise
    if problem is not None:
        writer.take_back()
        return problem
    return writer


def write(graph: torch.fx.Graph, writer: Writer, found: Sampling) -> None:
    logits, dtype = found.logits, arguments_of(found.softmax)["dtype"]
    if dtype is not None and dtype != fake_value(logits).dtype:
        with graph.inserting_before(found.softmax):
            logits = writer.call(aten.to.dtype, logits, dtype)
    with graph.inserting_before(found.argmax):
        wide = torch.promote_types(fake_value(found.quotient).dtype, torch.float32)
        logits, noise = (cast(writer, node, wide) for node in (logits, found.noise))
        peak = writer.call(aten.amax.default, logits, [found.dim], True)
        shifted = writer.call(aten.sub.Tensor, logits, peak)
        score = writer.call(aten.sub.Tensor, shifted, writer.call(aten.log.default, noise))
        keep = arguments_of(found.argmax)["keepdim"]
        index = writer.call(aten.argmax.default, score, found.dim, keep)
        peak = peak if keep else writer.call(aten.squeeze.dim, peak, found.dim)
        writer.call(aten.mul.Tensor, index, writer.call(aten.isfinite.default, peak))


def cast(writer: Writer, node: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    return node if fake_value(node).dtype == dtype else writer.call(aten.to.dtype, node, dtype)


def unsoftened(found: Sampling, writer: Writer) -> torch.fx.Node:
    """What has the shape and dtype of the softmax: the logits, or their cast, which stands first."""
    first = writer.made[0]
    return first if first < found.softmax else found.logits


def room_problem(found: Sampling, writer: Writer) -> Refusal | None:
    """Room made after the example of the softmax must look the same after that of the logits: it is filled in order."""
    if found.softmax not in found.buffer.all_input_nodes:
        return None
    with found.buffer.graph.inserting_before(found.argmax):
        like = Writer(found.buffer.graph, writer.fake_mode)
        like.call(found.buffer.target, unsoftened(found, writer), *found.buffer.args[1:], **found.buffer.kwargs)
        unlike = difference(fake_value(found.buffer), fake_value(like.made[0]))
        like.take_back()
    return None if unlike is None else Refusal(unlike)


# --- what it fires on -------------------------------------------------------------------------------------------------


def sample(logits: Any) -> Any:
    return chosen(F.softmax(logits, -1))


def chosen(probs: Any) -> Any:
    return torch.argmax(probs / torch.empty_like(probs).exponential_(1), dim=-1, keepdim=True)


def sample_in_steps(logits: Any) -> Any:
    noise = torch.empty_like(logits)
    noise.exponential_()
    return logits.softmax(dim=-1).div(noise).argmax(-1)


def sample_at_rate_two(logits: Any) -> Any:
    return torch.argmax(logits.softmax(-1) / torch.empty_like(logits).exponential_(2), dim=-1)


def sample_overwritten(logits: Any) -> Any:
    logits = logits * 1
    quotient = logits.softmax(-1) / torch.empty_like(logits).exponential_()
    logits.zero_()
    return quotient.argmax(-1), logits


def sample_twice(logits: Any) -> Any:
    noise = torch.empty_like(logits).exponential_()
    return torch.argmax(logits.softmax(-1) / noise, -1), noise


def sample_with_temperature(logits: Any) -> Any:
    return torch.argmax(logits.softmax(-1) ** 2.0 / torch.empty_like(logits).exponential_(), -1)


def rows() -> list[torch.Tensor]:
    return [torch.randn(5, 7)]


GUMBEL_RULE = GumbelArgmax()
GumbelArgmax.examples = (
    Case("noise of rate 1, shaped like the softmax", sample, rows),
    Case("in steps, at the default rate, without keepdim", sample_in_steps, rows),
    Case(
        "a softmax in another dtype",
        lambda logits: chosen(F.softmax(logits, -1, dtype=torch.float64)),
        lambda: [torch.randn(3, 9, requires_grad=True)],
    ),
    Case("half precision", sample, lambda: [torch.randn(4, 6).bfloat16()]),
)
GumbelArgmax.near_misses = (
    Case("softmax along another dimension", lambda logits: chosen(F.softmax(logits, 0)), lambda: [torch.randn(6, 6)]),
    Case("another rate", sample_at_rate_two, rows),
    Case("the logits are written before the index is found", sample_overwritten, rows),
    Case("the noise is read by others too", sample_twice, rows),
    Case("a temperature behind the softmax", sample_with_temperature, rows),
    Case("nothing is drawn", lambda logits, other: torch.argmax(logits.softmax(-1) / other, -1), lambda: rows() * 2),
)
KERNEL_RULES = KernelRules(everywhere=(GUMBEL_RULE,))


@pre_grad_pass(rules=(GUMBEL_RULE,))
def apply_gumbel_max_trick(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Sampling by argmax(softmax / noise) needs no softmax, where kernels are compiled and gumbel_argmax is on."""
    rules = KERNEL_RULES.wanted(context.options) if context.options.gumbel_argmax else ()
    return apply_rules(gm, rules, context)
