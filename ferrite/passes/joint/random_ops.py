"""Calls that draw random numbers become pure functions of one key, with the option rng="counter".

    a = rand([4])                            key = random_key(0, device=cpu)
    b, mask = native_dropout(x, 0.5, True)   a = random(key, 0, [4], "uniform", float32)
                                      =>     mask = random(key, 1, [8], "uniform", float32) < 0.5
                                             b = x * mask * 2.0

The key is drawn from the default generator of the device when the graph runs, so that a seed still decides all numbers.
The numbers are others than eager's. Each device has a key of its own, and so has the backward part: run twice, it draws
twice. Calls with a generator of their own stay, and so do those whose arguments eager must look at first, and those
that draw until something fits. The record of the pass says which, and why.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_operators
from ferrite.errors import Refusal
from ferrite.graph import fake_value, mode_of, stream_of
from ferrite.ir import DIGITS
from ferrite.passes.joint import counter_rng as counter_rng  # defines torch.ops.ferrite
from ferrite.passes.joint.views import in_backward
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import AnyRule, Case, GraphRule, Writer, apply_rules, arguments_of, inherit, too_loose

aten = torch.ops.aten
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MAX_INT64 = 2**63 - 1


@dataclass(frozen=True)
class Draw:
    """One call that draws, with what writes another in its place."""

    node: torch.fx.Node
    writer: Writer
    key: torch.fx.Node
    index: int

    @property
    def given(self) -> dict[str, Any]:
        return arguments_of(self.node)

    @property
    def look(self) -> torch.Tensor:
        """How the result looks; of several, the first."""
        found: torch.Tensor = first_value(self.node)
        return found

    def numbers(self, kind: str, dtype: torch.dtype | None = None, **bounds: int) -> torch.fx.Node:
        function = torch.ops.ferrite.random.default
        return self.writer.call(function, self.key, self.index, self.sizes(), kind, dtype or self.look.dtype, **bounds)

    def sizes(self) -> list[Any]:
        """As the call has them, or those of its operand."""
        if "size" in self.given:
            return list(self.given["size"])
        operand, shape = self.node.args[0], self.look.shape
        ask = aten.sym_size.int
        return [n if isinstance(n, int) else self.writer.call(ask, operand, dim) for dim, n in enumerate(shape)]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return self.writer.call(target, *args, **kwargs)

    def as_wanted(self, wide: torch.fx.Node) -> torch.fx.Node:
        """Numbers in double precision as the call has them."""
        dtype = self.look.dtype
        return wide if dtype is torch.float64 else self.call(aten._to_copy.default, wide, dtype=dtype)


def uniform(draw: Draw) -> tuple[torch.fx.Node, ...]:
    return (draw.numbers("uniform"),)


def normal(draw: Draw) -> tuple[torch.fx.Node, ...]:
    return (draw.numbers("normal"),)


def integer(draw: Draw) -> tuple[torch.fx.Node, ...]:
    return (draw.numbers("integer", low=draw.given.get("low", 0), high=draw.given["high"]),)


def uniform_between(draw: Draw) -> tuple[torch.fx.Node, ...]:
    low, high = draw.given["from"], draw.given["to"]
    return (draw.call(aten.add.Tensor, draw.call(aten.mul.Tensor, draw.numbers("uniform"), high - low), low),)


def normal_around(draw: Draw) -> tuple[torch.fx.Node, ...]:
    mean, spread = draw.given["mean"], draw.given["std"]
    return (draw.call(aten.add.Tensor, draw.call(aten.mul.Tensor, draw.numbers("normal"), spread), mean),)


def bernoulli(draw: Draw) -> tuple[torch.fx.Node, ...]:
    hit = draw.call(aten.lt.Scalar, draw.numbers("uniform", torch.float32), draw.given["p"])
    return (draw.call(aten._to_copy.default, hit, dtype=draw.look.dtype),)


def bernoulli_of(draw: Draw) -> tuple[torch.fx.Node, ...]:
    """Each element has a chance of its own."""
    hit = draw.call(torch.ops.ferrite.random_hits.default, draw.key, draw.index, draw.given["self"])
    return (draw.call(aten._to_copy.default, hit, dtype=draw.look.dtype),)


def exponential(draw: Draw) -> tuple[torch.fx.Node, ...]:
    return (draw.call(aten.div.Tensor, draw.numbers("exponential"), draw.given["lambd"]),)


def log_normal(draw: Draw) -> tuple[torch.fx.Node, ...]:
    return (draw.call(aten.exp.default, *normal_around(draw)),)


def cauchy(draw: Draw) -> tuple[torch.fx.Node, ...]:
    """The tangent of an angle that is as likely as any other, in double precision: its tails go far."""
    centred = draw.call(aten.sub.Tensor, draw.numbers("uniform", torch.float64), 0.5)
    found = draw.call(aten.tan.default, draw.call(aten.mul.Tensor, centred, math.pi))
    found = draw.call(aten.mul.Tensor, found, draw.given["sigma"])
    return (draw.as_wanted(draw.call(aten.add.Tensor, found, draw.given["median"])),)


def geometric(draw: Draw) -> tuple[torch.fx.Node, ...]:
    """An exponential number with the rate -log(1 - p), rounded up: 1 at least, since it is never 0."""
    drawn = draw.numbers("exponential", torch.float64)
    found = draw.call(aten.ceil.default, draw.call(aten.div.Tensor, drawn, -math.log1p(-draw.given["p"])))
    return (draw.as_wanted(draw.call(aten.clamp_min.default, found, 1)),)


def dropout(draw: Draw) -> tuple[torch.fx.Node, ...]:
    chance = 1 - draw.given["p"]
    mask = draw.call(aten.lt.Scalar, draw.numbers("uniform", torch.float32), chance)
    kept = draw.call(aten.mul.Tensor, draw.given["input"], mask)
    return draw.call(aten.mul.Tensor, kept, 1 / chance), mask


# Each operator, and what it becomes; the dtypes it may have.
WRITTEN: Mapping[Any, Callable[[Draw], tuple[torch.fx.Node, ...]]] = {
    aten.rand.default: uniform,
    aten.rand_like.default: uniform,
    aten.randn.default: normal,
    aten.randn_like.default: normal,
    aten.randint.default: integer,
    aten.randint.low: integer,
    aten.randint_like.default: integer,
    aten.randint_like.low_dtype: integer,
    aten.uniform.default: uniform_between,
    aten.normal_functional.default: normal_around,
    aten.bernoulli.p: bernoulli,
    aten.bernoulli.default: bernoulli_of,
    aten.exponential.default: exponential,
    aten.log_normal.default: log_normal,
    aten.cauchy.default: cauchy,
    aten.geometric.default: geometric,
    aten.native_dropout.default: dropout,
}
# What no formula of a known number of draws gives.
LEFT: Mapping[Any, str] = {
    **dict.fromkeys(
        (aten.poisson.default, aten.binomial.default, aten._standard_gamma.default, aten._sample_dirichlet.default),
        "how many numbers it draws depends on its operand",
    ),
    aten.multinomial.default: "eager looks at its weights first, and draws without putting back",
    aten.randperm.default: "a permutation is no function of single places",
}
# The largest exponential number that is drawn in double precision.
MAX_EXPONENTIAL = 53 * math.log(2)


def first_value(node: torch.fx.Node) -> Any:
    value = fake_value(node)
    return value[0] if isinstance(value, (tuple, list)) else value


def problem_of(node: torch.fx.Node) -> Refusal | None:
    """Why a call stays as it is."""
    if node.target in LEFT:
        return Refusal(LEFT[node.target])
    given, value, how = arguments_of(node), first_value(node), WRITTEN[node.target]
    if given.get("generator") is not None:
        return Refusal("it has a generator of its own")
    if given.get("pin_memory") or value.layout is not torch.strided:
        return Refusal("it is in pinned memory, or not strided")
    if not torch_operators.known_contiguous(value):
        return Refusal("it has strides of its own")
    if value.dtype not in DTYPES.get(how, tuple(DIGITS)):
        return Refusal(f"its dtype is {value.dtype}")
    if how is geometric and 0 < given["p"] < 1 and beyond(value.dtype, given["p"]):
        return Refusal(f"{value.dtype} does not hold its largest number")
    return argument_problem(how, given) or users_problem(node)


DTYPES: Mapping[Any, tuple[torch.dtype, ...]] = {integer: INTEGERS, geometric: (*DIGITS, *INTEGERS)}


def beyond(dtype: torch.dtype, p: float) -> bool:
    return not dtype.is_floating_point and MAX_EXPONENTIAL / -math.log1p(-p) >= torch.iinfo(dtype).max


def argument_problem(how: Any, given: Mapping[str, Any]) -> Refusal | None:
    """What eager would refuse, or cannot be known yet, is left to it."""
    numbers = [
        given[name]
        for name in ("low", "high", "from", "to", "mean", "std", "p", "lambd", "median", "sigma")
        if name in given
    ]
    if not all(isinstance(number, (int, float)) for number in numbers):
        return Refusal("a parameter is not known")
    if how is integer and not 0 < given["high"] - given.get("low", 0) <= MAX_INT64:
        return Refusal("there are no such integers, or too many")
    if how is uniform_between and given["from"] > given["to"]:
        return Refusal("the bounds are the wrong way round")
    if how is normal_around and given["std"] < 0:
        return Refusal("the deviation is negative")
    if how is log_normal and not given["std"] > 0:
        return Refusal("the deviation is not positive")
    if how is exponential and not given["lambd"] > 0:
        return Refusal("the rate is not positive")
    if how is cauchy and not given["sigma"] > 0:
        return Refusal("the spread is not positive")
    if how is geometric and not 0 < given["p"] < 1:
        return Refusal("the chance is not between 0 and 1, both left out")
    if how is bernoulli and not 0 <= given["p"] <= 1:
        return Refusal("the chance is not between 0 and 1")
    if how is dropout and not (given["train"] is True and 0 < given["p"] < 1):
        return Refusal("nothing is dropped, or everything")
    return None


def users_problem(node: torch.fx.Node) -> Refusal | None:
    several = isinstance(fake_value(node), (tuple, list))
    if several and any(user.target is not operator.getitem for user in node.users):
        return Refusal("its results are passed on together")
    return None


def dropped_or_kept(x: Any) -> Any:
    """True everywhere, whatever was drawn."""
    result, mask = aten.native_dropout.default(x + 1, 0.5, True)
    return (result == 0) | mask


class ReplaceRandom(GraphRule):
    name = "replace_random"
    purpose = "random numbers are a function of one key and the number of the call"
    numerics = "redrawn"
    layout = "kept"
    targets = (*WRITTEN, *LEFT)

    def apply(self, gm: torch.fx.GraphModule, context: PassContext) -> int:
        keys: dict[Hashable, torch.fx.Node] = {}
        total = 0
        writer = Writer(gm.graph, mode_of(gm.graph))
        for node, problem in self.explain(gm, context).items():
            if problem or not context.fuel.left:
                continue
            with gm.graph.inserting_before(node):
                key = self.key_for(node, writer, keys)
                made = len(writer.made)
                results = WRITTEN[node.target](Draw(node, writer, key, total))
            for new in writer.made[made:]:
                inherit(new, node)
                new.meta["rewritten"] = (self.name, ())
            replace(node, results)
            context.fuel.spend()
            context.count(self.name)
            total += 1
        return total

    def key_for(self, node: torch.fx.Node, writer: Writer, keys: dict[Hashable, torch.fx.Node]) -> torch.fx.Node:
        device = first_value(node).device
        place = (device, in_backward(node), stream_of(node))
        if place not in keys:
            key = writer.call(torch.ops.ferrite.random_key.default, len(keys), device=device)
            if in_backward(node):  # it depends on nothing, so that a partitioner would draw it in the forward part
                key.meta["partitioner_tag"] = "must_be_in_backward"
            inherit(key, node)
            keys[place] = key
        return keys[place]

    def explain(self, gm: torch.fx.GraphModule, context: PassContext) -> Mapping[torch.fx.Node, Refusal | None]:
        nodes = [node for node in gm.graph.nodes if node.target in self.targets]
        off = None if context.options.rng == "counter" else Refusal("the option rng is not 'counter'")
        off = off or too_loose(self, context.options)
        return {node: off or problem_of(node) for node in nodes}

    # The numbers are others than before, so the examples show what does not depend on them.
    examples = tuple(
        Case(label, function, lambda: [torch.rand(4, 3)], {"rng": "counter"})
        for label, function in {
            "rand": lambda x: torch.rand(4, 3) < 1,
            "rand in half precision": lambda x: torch.rand(4, 3, dtype=torch.float16) < 1,
            "randn": lambda x: x + torch.randn(4, 3, dtype=torch.float64) * 0,
            "randint": lambda x: torch.randint(5, (4, 3)) // 5,
            "randint from": lambda x: torch.randint(-3, 0, (4,), dtype=torch.int32) < 0,
            "rand_like": lambda x: torch.rand_like(x) >= 0,
            "randn_like": lambda x: x + torch.randn_like(x) * 0,
            "randint_like": lambda x: torch.randint_like(x, 1, dtype=torch.int64),
            "dropout": dropped_or_kept,
            "bernoulli": lambda x: aten.bernoulli.p(x, 1.0),
            "a chance for each": lambda x: torch.bernoulli((x < 2).float()),
            "exponential": lambda x: aten.exponential.default(x, 2.0) > 0,
            "log_normal": lambda x: aten.log_normal.default(x, 0.0, 1.0) > 0,
            "cauchy": lambda x: aten.cauchy.default(x, 0.0, 1.0).isfinite(),
            "geometric": lambda x: aten.geometric.default(x, 0.5) >= 1,
            "geometric, as integers": lambda x: aten.geometric.default(x.long(), 0.25) >= 1,
            "between": lambda x: aten.uniform.default(x, 2.0, 3.0) > 1,
            "around": lambda x: aten.normal_functional.default(x, 1.0, 0.0),
            "two calls": lambda x: torch.rand(4) + torch.rand(4) < 2,
        }.items()
    )
    near_misses = (
        Case("not asked for", lambda x: torch.rand(4) < 1, lambda: [torch.rand(4)]),
        *(
            Case(label, function, lambda: [torch.rand(4, 3)], {"rng": "counter"})
            for label, function in {
                "nothing is dropped": lambda x: torch.native_dropout(x, 0.0, True)[0],
                "not while training": lambda x: torch.native_dropout(x, 0.5, False)[0],
                "complex": lambda x: torch.rand(4, dtype=torch.complex64).abs() < 2,
                "strides of its own": lambda x: torch.rand_like(x.t()) < 1,
                "as many draws as it takes": lambda x: torch.poisson(x) >= 0,
                "small integers of large numbers": lambda x: aten.geometric.default(x.to(torch.uint8), 0.01) >= 0,
            }.items()
        ),
        Case("strict", lambda x: torch.rand(4) < 1, lambda: [torch.rand(4)], {"rng": "counter", "numerics": "strict"}),
    )


def replace(node: torch.fx.Node, results: tuple[torch.fx.Node, ...]) -> None:
    if isinstance(fake_value(node), (tuple, list)):
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            node.graph.erase_node(user)
    else:
        node.replace_all_uses_with(results[0])
    node.graph.erase_node(node)


REPLACE_RANDOM = ReplaceRandom()
RANDOM_RULES: tuple[AnyRule, ...] = (REPLACE_RANDOM,)


@graph_pass(stage="joint", rules=RANDOM_RULES, after="scaled_softmax")
def replace_random(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Random numbers become a function of one key and the number of the call, with the option rng="counter"."""
    count = apply_rules(gm, RANDOM_RULES, context)
    if context.options.rng == "counter" and context.fuel.left:
        for node, problem in REPLACE_RANDOM.explain(gm, context).items():
            context.facts[f"{node.target} left to eager: {problem.reason if problem is not None else ''}"] += 1
    return count
