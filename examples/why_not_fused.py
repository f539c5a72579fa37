"""Finding out why two operations are not in one kernel, and why a rewrite did not happen.

    python examples/why_not_fused.py

The record knows every pair that was held against each other. `ferrite.why` asks a rule of the graph passes: where it
had a candidate, and which condition failed there. The page that `ferrite.report` writes has the same, in its sections
"Fusion" and "Passes".
"""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite

# --- kernels ----------------------------------------------------------------------------------------------------------


def model(x):
    weights = torch.exp(x)
    return weights, weights.cumsum(0), weights.sum(1)


x = torch.randn(64, 32)
torch.testing.assert_close(ferrite.compile(model, strict=True)(x), model(x))

record = ferrite.last_compile()
for kernel in record.kernels:
    print(f"kernel {kernel.name}: {', '.join(kernel.operators)}")
print(record.why_not_fused("exp", "sum_1"))
print(record.why_not_fused("exp", "cumsum"))

# --- rewrites ---------------------------------------------------------------------------------------------------------


def biased(x, w, b):
    product = x @ w
    return product + b


def read_twice(x, w, b):
    product = x @ w
    return product + b, product.sum()


print("\nA bias becomes part of the product before it:")
for function in (biased, read_twice):
    graph = make_fx(function, tracing_mode="fake")(torch.rand(4, 8), torch.rand(8, 16), torch.rand(16))
    print(f"  {function.__name__}:", *ferrite.why(graph, "addmm"))
