"""The parameters of an OPT model and the steps of its training, each layer recomputed before its backward."""

from autopar.search.elixir import Parameter

VOCABULARY, POSITIONS = 50272, 2050
HIDDEN_AND_LAYERS = {"6.7B": (4096, 32), "13B": (5120, 40), "30B": (7168, 48)}


def opt(model):
    """(parameters, steps), one step per module and {bias, weight} in that order; tied `emb` is in no step."""
    h, layers = HIDDEN_AND_LAYERS[model]
    square = [(f"{name}.{part}", numel) for name in "qkvo" for part, numel in (("bias", h), ("weight", h * h))]
    norm1, norm2, last = ([(f"{name}.bias", h), (f"{name}.weight", h)] for name in ("ln1", "ln2", "lnf"))
    wide = [("fc1.bias", 4 * h), ("fc1.weight", 4 * h * h), ("fc2.bias", h), ("fc2.weight", 4 * h * h)]
    layer = norm1 + square + norm2 + wide
    blocks = [[(f"{number}.{name}", numel) for name, numel in layer] for number in range(layers)]
    position = [("pos.weight", POSITIONS * h)]

    parameters = [Parameter("emb.weight", VOCABULARY * h, tied=True)]
    parameters += [Parameter(*what) for group in (position, *blocks, last) for what in group]
    modules = [[(block[at][0], block[at + 1][0]) for at in range(0, len(block), 2)] for block in blocks]
    pos, lnf = [("pos.weight",)], [("lnf.bias", "lnf.weight")]
    forward = pos + [step for module in modules for step in module] + lnf
    backward = [step for module in reversed(modules) for step in module + module[::-1]]
    return parameters, forward + lnf + backward + pos


def hidden(model):
    return HIDDEN_AND_LAYERS[model][0]


def checkpoint_elements(model):
    """Of one layer."""
    return 12 * hidden(model) ** 2 + 13 * hidden(model)
