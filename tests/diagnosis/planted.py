"""Bugs to be found: each function puts one into the compiler of this process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import torch

from ferrite.codegen.llvm import kernel_text
from ferrite.ir import op
from ferrite.passes import all_rules
from ferrite.runtime.cpu import kernels
from ferrite.schedule.fusion import fuse
from ferrite.schedule.fusion.groups import Fit, fit


def model(x, w, b):
    y = torch.cos(x) + 1
    h = torch.tanh(x @ w + b)
    return torch.softmax(h, -1), y.sum(0)


def wrong_rule() -> None:
    """A product and a bias that become one operator are half as much again."""
    rule = next(rule for rule in all_rules("post_grad") if rule.name == "addmm")
    right = rule.after
    object.__setattr__(rule, "after", lambda **bound: torch.ops.aten.mul.Tensor(right(**bound), 1.5))


def wrong_fusion() -> None:
    """What is fused behind something that reads the same memory has the wrong sign."""

    def wrong_fit(group, member, *args, **settings):
        found = fit(group, member, *args, **settings)
        operation = member.operation
        if not isinstance(found, Fit) or not hasattr(operation, "stores"):
            return found
        operation = found.member.operation
        stores = tuple(dataclasses.replace(store, value=op("neg", store.value)) for store in operation.stores)
        wrong = dataclasses.replace(found.member, operation=dataclasses.replace(operation, stores=stores))
        return dataclasses.replace(found, member=wrong)

    vars(fuse)["fit"] = wrong_fit


def change_kernels(edit: Callable[[str], str]) -> None:
    """Kernels with a tanh in them have another text."""

    def text(kernel, processor, name, checked=False):
        made = kernel_text(kernel, processor, name, checked)
        return edit(made) if "tanh" in made else made

    vars(kernels)["kernel_text"] = text


def wrong_kernel() -> None:
    call = re.compile(r"(%\S+) = (call <(\d+) x float> @ferrite_tanh_\w+\(.*?\))")
    change_kernels(lambda text: call.sub(r"\1.right = \2\n  \1 = fneg <\3 x float> \1.right", text))


ENTRY = re.compile(r"(define i64 @[^\n]*\n)entry:\n")
WAITING = """wait:
  %slow.at = alloca i64
  br label %slow
slow:
  %slow.i = phi i64 [ 0, %wait ], [ %slow.next, %slow ]
  store volatile i64 %slow.i, ptr %slow.at
  %slow.next = add i64 %slow.i, 1
  %slow.more = icmp ult i64 %slow.next, 3000000
  br i1 %slow.more, label %slow, label %entry
entry:
"""


def slow_kernel() -> None:
    """Tens of times as slow as eager, and still over within the time for which a processor is given to somebody, so
    that the least of some calls is without others. On one thread: threads that wait for each other, where others have
    the machine, take as long with a kernel that is right."""
    torch.set_num_threads(1)
    change_kernels(lambda text: ENTRY.sub(lambda found: found[1] + WAITING, text))


def crashing_kernel() -> None:
    crash = "entry:\n  store volatile i64 0, ptr inttoptr (i64 8 to ptr)\n"
    change_kernels(lambda text: ENTRY.sub(lambda found: found[1] + crash, text))
