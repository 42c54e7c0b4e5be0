"""emit: a plan becomes code. torch.fx GraphModules at local shapes, with functional collectives in them."""

from autopar.emit.emit import Program, emit, forward_only

__all__ = ["Program", "emit", "forward_only"]
