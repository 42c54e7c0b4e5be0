"""emit: a plan becomes code. torch.fx GraphModules at local shapes, with functional collectives in them."""

from autopar.emit.emit import emit
from autopar.emit.emitted import Emitted
from autopar.emit.inference import forward_only

__all__ = ["Emitted", "emit", "forward_only"]
