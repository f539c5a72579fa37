"""Attention written out by hand, found and written as scaled_dot_product_attention.

    softmax(q @ k.mT / 8 + mask, -1) @ v      =>      scaled_dot_product_attention(q, k, v, mask, scale=1 / 8)

    spellings  how programs write the steps, one before/after pair for each
    found      what a step does to the scores: a scale, a mask, a fill
    find       the way back from the last product to the first
    constants  what is known of masks and fills
    operands   query, key and value before they were flattened, copied and repeated for a product
    bias       what happens to the scores, as a factor and a bias
    write      the one call
    operators  the same for training, with masks that may leave nothing of a row
    worth      where it pays

One matcher serves two stages. Before autograd the calls are those of torch, and the new call brings its own backward
with it. In inference graphs, which arrive as ATen, products are flattened and softmaxes may be in parts.
"""

from ferrite.passes.shared.attention.rule import BEFORE_AUTOGRAD, FOR_INFERENCE

__all__ = ["BEFORE_AUTOGRAD", "FOR_INFERENCE"]
