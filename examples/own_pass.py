"""A pass of one's own: RMS norm and the quantisation behind it become one operator, as vLLM does it.

    python examples/own_pass.py

A library brings three operators that write their results into memory they are given. A model calls two of them, one
after the other; a rule of ten lines puts the third in their place. Below, the same as a pass that was written for
Inductor's hook and pattern matcher: it runs as it is.
"""

import torch
import torch.nn.functional as F
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement

import ferrite
from ferrite.rewrite import Rule, apply_rules

EPSILON = 1e-6


# What a library of kernels brings. In earnest these would be written in CUDA or Triton.
@torch.library.custom_op("norms::rms_norm", mutates_args={"result"})
def rms_norm(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    result.copy_(F.rms_norm(x, x.shape[-1:], weight, epsilon))


@torch.library.custom_op("norms::quantize", mutates_args={"result"})
def quantize(result: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> None:
    result.copy_((x / scale).round().clamp(-128, 127))


@torch.library.custom_op("norms::rms_norm_quantize", mutates_args={"result"})
def rms_norm_quantize(
    result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, epsilon: float
) -> None:
    result.copy_((F.rms_norm(x, x.shape[-1:], weight, epsilon) / scale).round().clamp(-128, 127))


norms = torch.ops.norms


def model(x, weight, scale):
    x = torch.relu(x) * 2
    normed = torch.empty_like(x)
    norms.rms_norm(normed, x, weight, EPSILON)
    quantized = torch.empty_like(x, dtype=torch.int8)
    norms.quantize(quantized, normed, scale)
    return quantized


def written(operator, result, **inputs):
    """A call of an operator that writes `result`, as graphs have it: it gives what that would hold."""
    functional = torch.ops.higher_order.auto_functionalized_v2
    return functional(operator, **inputs, _result_base_index=0, _all_bases=[result])[1]


def two_calls(x, weight, scale, normed, result):
    norm = written(norms.rms_norm.default, normed, x=x, weight=weight, epsilon=EPSILON)
    return written(norms.quantize.default, result, x=norm, scale=scale)


def one_call(x, weight, scale, normed, result):
    return written(norms.rms_norm_quantize.default, result, x=x, weight=weight, scale=scale, epsilon=EPSILON)


# --- the pass ---------------------------------------------------------------------------------------------------------

norm_and_quantize = Rule("norm_and_quantize", "a norm that only a quantisation reads", before=two_calls, after=one_call)


@ferrite.graph_pass(before="reinplace_inplaceable_ops")
def fuse_norm_and_quantize(gm, context):
    """A norm and the quantisation of its result are one operator."""
    return apply_rules(gm, [norm_and_quantize], context)


# --- the same, written for Inductor -----------------------------------------------------------------------------------


class FuseNormAndQuantize:
    def __init__(self):
        self.patterns = PatternMatcherPass()
        x, weight, scale = torch.empty(5, 4), torch.empty(4), torch.empty(1)
        inputs = [x, weight, scale, torch.empty(5, 4), torch.empty(5, 4, dtype=torch.int8)]
        register_replacement(two_calls, one_call, inputs, fwd_only, self.patterns)

    def __call__(self, graph):
        self.patterns.apply(graph)

    def uuid(self):
        return "norm and quantisation, 1"


# --- both -------------------------------------------------------------------------------------------------------------

x, weight, scale = torch.randn(32, 256), torch.rand(256), torch.tensor([0.05])
expected = model(x, weight, scale)
settings = {
    "no pass": {},
    "a rule": {"passes": [fuse_norm_and_quantize]},
    "Inductor's": {"post_grad_custom_post_pass": FuseNormAndQuantize()},
}
for name, options in settings.items():
    torch.compiler.reset()
    compiled = ferrite.compile(model, strict=True, **options)
    with torch.no_grad():
        assert torch.equal(compiled(x, weight, scale), expected)
    record = ferrite.last_compile()
    print(f"{name:<10} calls {', '.join(call.operator for call in record.eager_calls)}")
    if name == "a rule":
        print(f"{'':<10} rewrites: {record.rewrites['norm_and_quantize']}")
