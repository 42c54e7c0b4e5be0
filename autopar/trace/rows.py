"""Functions of torch that treat each row of a tensor by itself, by name (without underscores): tables for `masked`."""

_ELEMENTWISE = """
    add radd sub rsub rmul rdiv rtruediv rpow mul div truediv true_divide floordiv floor_divide mod fmod remainder
    pow neg abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan tanh sigmoid relu gelu
    silu elu selu leaky_relu softplus logsigmoid logit hardtanh clamp clip clamp_min clamp_max where eq ne lt le gt
    ge logical_and logical_or logical_not and or xor invert bitwise_and bitwise_or bitwise_not float double half
    bfloat16 long int bool to type_as detach contiguous clone maximum minimum lerp sign round floor ceil trunc isnan
    isinf isfinite nan_to_num atan2 acos asin atan sinh cosh asinh acosh atanh erf erfc lgamma digamma masked_fill
    xlogy addcmul addcdiv negative absolute special_xlog1py pos
"""
_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow neg abs invert and or xor eq ne lt le gt ge
    matmul getitem pos iadd isub imul itruediv ifloordiv imod ipow iand ior ixor
"""
_LOSSES = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
    poisson_nll_loss gaussian_nll_loss soft_margin_loss triplet_margin_loss margin_ranking_loss hinge_embedding_loss
"""
_ALONG = """
    softmax log_softmax logsumexp sum mean amax amin argmax argmin max min var std cumsum squeeze unsqueeze gather
    any all prod
"""

# Each number of a row by itself.
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
# What Python's operators on rows are called.
OPERATORS = _OPERATORS.split()
# A term for each number, then put together as `reduction` says.
LOSSES = frozenset(_LOSSES.split())
# Along dims of a row: name -> (the place of `dim`, its default).
ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(_ALONG.split(), (1, None)),
    **dict.fromkeys(("normalize", "cosine_similarity"), (2, 1)),
    **dict.fromkeys(("norm", "vector_norm"), (2, None)),
    **dict.fromkeys(("chunk", "split", "tensor_split", "split_with_sizes"), (2, 0)),
    **dict.fromkeys(("narrow", "select", "unbind"), (1, 0)),
    **{"glu": (1, -1), "flip": (1, None), "sort": (1, -1), "argsort": (1, -1), "topk": (2, -1)},
}
# In the last dims of a row, with weights that are no rows: name -> how many dims a row needs.
ROWWISE = {"linear": 1, "matmul": 1, "layer_norm": 1, "rms_norm": 1, "embedding": 0, "one_hot": 0}
# Of each of a batch by itself: name -> how many dims a row needs.
OF_A_BATCH = {
    **{f"{kind}{dims}d": dims + 1 for kind in ("conv", "conv_transpose", "max_pool", "avg_pool") for dims in (1, 2, 3)},
    **{f"adaptive_{kind}_pool{dims}d": dims + 1 for kind in ("max", "avg") for dims in (1, 2, 3)},
    **dict.fromkeys(("group_norm", "interpolate"), 2),
}
# What puts several together.
CATS = ("cat", "concat", "concatenate", "stack")
