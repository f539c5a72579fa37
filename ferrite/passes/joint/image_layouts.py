"""Convolutions of a training step on a GPU with the channels side by side, and so all that lies between them.

    convolution(x, w)                           =>      convolution(clone(x, channels last), w)
    convolution_backward(g, x, w)               =>      convolution_backward(g, clone(x, channels last), w)

and the same for `w`, of more than one place of a window: torch would copy it in forward, and in backward once more.
All of these copies stand at the beginning, where they are one kernel, and are saved for backward.

A GPU's library goes along channels that lie side by side; images that lie otherwise are copied before each of its
kernels and after it, which is a fifth of the time of a step of ResNet-50 on an H200. In inference a rule does this for
each convolution (`ferrite.passes.post_grad.gpu_convolutions`), where nobody sees other strides. Here everybody does:
what forward saves, backward reads, and gradients are results. So it is done for all at once: strides are computed
anew from the first convolution on, and where somebody could tell, a copy has those from before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ferrite.capture import known_contiguous
from ferrite.errors import Refusal
from ferrite.graph import CannotRun, MissingValue, compute, fake_value, is_elementwise, mode_of
from ferrite.passes.shared.cases import on_accelerator, whole_numbers
from ferrite.passes.shared.facts import gains_nothing_by_channels_last
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import (
    Case,
    GraphRule,
    Writer,
    inherit,
    only_ones_differ,
    same_strides,
    too_loose,
    who_could_tell,
)

aten = torch.ops.aten
CONVOLUTION, BACKWARD = aten.convolution.default, aten.convolution_backward.default
Values = Mapping[torch.fx.Node, Any]
# The places of the image and of the weights among the arguments.
IMAGE: Mapping[Any, int] = {CONVOLUTION: 0, BACKWARD: 1}
WEIGHT: Mapping[Any, int] = {CONVOLUTION: 1, BACKWARD: 2}


def problem_of(node: torch.fx.Node) -> Refusal | None:
    transposed: Any = node.args[6]
    groups: Any = node.args[8]
    return gains_nothing_by_channels_last(fake_value(node.all_input_nodes[0]), fake_value(node), transposed, groups)


@dataclass
class LayoutPlan:
    """`values`: of nodes that will lie otherwise. `images`: convolutions that take a copy of their image. `weights`:
    copies of weights, and `weighed` the convolutions that take one. `restored`: which operands of which nodes have to
    lie as before."""

    mode: Any
    values: dict[torch.fx.Node, Any] = field(default_factory=dict)
    images: list[torch.fx.Node] = field(default_factory=list)
    weights: dict[torch.fx.Node, Any] = field(default_factory=dict)
    weighed: list[torch.fx.Node] = field(default_factory=list)
    restored: list[tuple[torch.fx.Node, torch.fx.Node]] = field(default_factory=list)

    def visit(
        self, node: torch.fx.Node, channels_last: Mapping[torch.fx.Node, Any], takes_image: bool
    ) -> Refusal | None:
        """Look at a node whose operands have been looked at. `channels_last`: images with the channels side by side."""
        instead: dict[torch.fx.Node, Any] = {}
        if takes_image:
            image = node.args[IMAGE[node.target]]
            assert isinstance(image, torch.fx.Node)
            instead[image] = channels_last[image]
            self.images.append(node)
        if (weight := self.copied_weight(node)) is not None:
            instead[weight] = self.weights[weight]
            self.weighed.append(node)
        for operand in node.all_input_nodes:
            if operand not in self.values or operand in instead:
                continue
            old, new = fake_value(operand), self.values[operand]
            is_vague = only_ones_differ(old, new) and is_elementwise(node.target)
            if is_vague or who_could_tell(node, operand, restrided=True, moved_within=False) is not None:
                if (problem := self.restore(node, operand)) is not None:
                    return problem
                instead[operand] = old
        if node.op == "output" or not (takes_image or any(each in self.values for each in node.all_input_nodes)):
            return None
        new = self.computed(node, {**self.values, **instead})
        if new is None:  # as a view would, of what lies otherwise
            for operand in node.all_input_nodes:
                if operand in self.values and operand not in instead:
                    if (problem := self.restore(node, operand)) is not None:
                        return problem
                    instead[operand] = fake_value(operand)
            new = self.computed(node, {**self.values, **instead})
            if new is None:
                return Refusal(f"{node.name} cannot be computed on images that lie otherwise")
        if not same_strides(fake_value(node), new):
            self.values[node] = new
        return None

    def copied_weight(self, node: torch.fx.Node) -> torch.fx.Node | None:
        weight = node.args[WEIGHT[node.target]] if node.target in WEIGHT else None
        return weight if isinstance(weight, torch.fx.Node) and weight in self.weights else None

    def copy_weight(self, weight: Any) -> None:
        """From here on, convolutions take a copy of it, if that lies otherwise."""
        value = fake_value(weight)
        if weight not in self.values and known_contiguous(value) and not is_channels_last(value):
            with self.mode:
                self.weights[weight] = value.clone(memory_format=torch.channels_last)

    def computed(self, node: torch.fx.Node, values: Values) -> Any:
        try:
            return compute(node, self.mode, values)[0]
        except (CannotRun, MissingValue):
            return None

    def restore(self, node: torch.fx.Node, operand: torch.fx.Node) -> Refusal | None:
        old = fake_value(operand)
        if not isinstance(old, torch.Tensor):
            return Refusal(f"{node.name} is given several results of {operand.name} at once")
        if not known_contiguous(old) and not only_ones_differ(old, self.values[operand]):
            return Refusal(f"{node.name} needs {operand.name} with strides that no copy has")
        self.restored.append((node, operand))
        return None


def plan_of(gm: torch.fx.GraphModule) -> LayoutPlan | Refusal:
    found = gm.graph.find_nodes(op="call_function", target=CONVOLUTION)
    wanted = {node for node in found if problem_of(node) is None}
    if not wanted or not gm.graph.find_nodes(op="call_function", target=BACKWARD):
        return Refusal("there are no gradients of convolutions")
    mode: Any = mode_of(gm.graph)
    plan, channels_last = LayoutPlan(mode), dict[torch.fx.Node, Any]()
    for node in gm.graph.nodes:
        takes_image = False
        if node.target in IMAGE:
            image = node.args[IMAGE[node.target]]
            takes_image = image in channels_last if node.target is BACKWARD else node in wanted
            takes_image = takes_image and not is_channels_last(plan.values.get(image, fake_value(image)))
            if takes_image and image not in channels_last:
                with plan.mode:
                    channels_last[image] = fake_value(image).clone(memory_format=torch.channels_last)
        if node in wanted:
            plan.copy_weight(node.args[WEIGHT[CONVOLUTION]])
        if (problem := plan.visit(node, channels_last, takes_image)) is not None:
            return problem
        is_useless = takes_image and node.target is CONVOLUTION and node not in plan.values
        if is_useless and fake_value(node).device.type == "cuda":
            return Refusal("the kernel that torch takes lays out its result as before")
    return plan


def is_channels_last(value: torch.Tensor) -> bool:
    return value.is_contiguous(memory_format=torch.channels_last)


def carry_out(plan: LayoutPlan, gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The nodes that are new."""
    writer = Writer(gm.graph, plan.mode)
    old = {node: fake_value(node) for node in plan.values}
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in plan.images:
        place = IMAGE[node.target]
        image = node.args[place]
        assert isinstance(image, torch.fx.Node)
        if image not in copies:
            with gm.graph.inserting_before(node):
                copies[image] = writer.call(aten.clone.default, image, memory_format=torch.channels_last)
                inherit(copies[image], node)
        node.update_arg(place, copies[image])
    with_copied_weights(plan, gm.graph, writer)
    for node, value in plan.values.items():
        node.meta["val"] = value
    as_before: dict[torch.fx.Node, torch.fx.Node] = {}
    for node, operand in plan.restored:
        if operand not in as_before:
            with gm.graph.inserting_after(operand):
                value = old[operand]
                if only_ones_differ(value, plan.values[operand]):
                    made = writer.call(aten.as_strided.default, operand, list(value.shape), list(value.stride()))
                else:
                    made = writer.call(aten.clone.default, operand, memory_format=torch.contiguous_format)
                inherit(made, operand)
                as_before[operand] = made
        node.replace_input_with(operand, as_before[operand])
    return writer.made


def with_copied_weights(plan: LayoutPlan, graph: torch.fx.Graph, writer: Writer) -> None:
    """Copies of parameters follow the inputs, with nothing in between; others are made where what they copy is."""
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in plan.weighed:
        weight = plan.copied_weight(node)
        assert weight is not None
        if weight not in copies:
            before = last if weight.op == "placeholder" else weight
            with graph.inserting_after(before):
                copies[weight] = writer.call(aten.clone.default, weight, memory_format=torch.channels_last)
            inherit(copies[weight], node)
            copies[weight].meta["recompute"] = CheckpointPolicy.MUST_SAVE
            last = copies[weight] if before is last else last
    for node in plan.weighed:
        weight = plan.copied_weight(node)
        assert weight is not None
        node.update_arg(WEIGHT[node.target], copies[weight])


WINDOW = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def step(x: Any, weight: Any, tangent: Any) -> Any:
    """A layer and its gradients, of which nobody sees how they lie: `meta` lays out less than it says."""
    y = aten.convolution.default(x, weight, None, *WINDOW)
    gradient = aten.threshold_backward.default(tangent, y, 0)
    found = aten.convolution_backward.default(gradient, x, weight, [16], *WINDOW, [True, True, True])
    return y.relu().mean((2, 3)), found[0].mean((2, 3)), found[1].mean((2, 3)), found[2]


IMAGES = ((2, 16, 12, 12), (16, 16, 3, 3), (2, 16, 12, 12))


class ImageLayouts(GraphRule):
    name = "training_channels_last_on_gpu"
    purpose = "convolutions of a training step in 16 bits on a GPU run with the channels side by side"
    numerics = "rounded"
    layout = "free"
    targets = (CONVOLUTION,)

    def apply(self, gm: torch.fx.GraphModule, context: PassContext) -> int:
        if too_loose(self, context.options) is not None or not context.fuel.left:
            return 0
        plan = plan_of(gm)
        if isinstance(plan, Refusal):
            return 0
        for made in carry_out(plan, gm):
            made.meta["rewritten"] = (self.name, ())
        context.fuel.spend()
        context.count(self.name)
        return 1

    def explain(self, gm: torch.fx.GraphModule, context: PassContext) -> Mapping[torch.fx.Node, Refusal | None]:
        nodes = [node for node in gm.graph.nodes if node.target in self.targets]
        off = too_loose(self, context.options)
        plan = plan_of(gm) if nodes and off is None else None
        off = off or (plan if isinstance(plan, Refusal) else None)
        return {node: problem_of(node) or off for node in nodes}

    examples = (
        Case("a layer and its gradients", on_accelerator(step), whole_numbers(*IMAGES, dtype=torch.bfloat16)),
        Case("in float16", on_accelerator(step), whole_numbers(*IMAGES, dtype=torch.float16)),
    )
    near_misses = (
        Case("on a cpu", step, whole_numbers(*IMAGES, dtype=torch.bfloat16)),
        Case("single precision", on_accelerator(step), whole_numbers(*IMAGES)),
        Case("channels side by side", on_accelerator(step), whole_numbers(*IMAGES, last=True, dtype=torch.bfloat16)),
        Case(
            "no gradients",
            on_accelerator(lambda x, w, t: aten.convolution.default(x, w, None, *WINDOW) + t),
            whole_numbers(*IMAGES, dtype=torch.bfloat16),
        ),
    )


IMAGE_LAYOUTS = ImageLayouts()


@graph_pass(stage="joint", rules=(IMAGE_LAYOUTS,), after="joint_patterns")
def channels_last_in_training(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Convolutions of a training step on a GPU, and what lies between them, with the channels side by side."""
    return 0 if context.is_inference else IMAGE_LAYOUTS.apply(gm, context)
