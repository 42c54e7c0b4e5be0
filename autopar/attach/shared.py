"""Models that share parameters, each compiled by itself: from its first call on each has values of its own.

In one process the two train one parameter; here they would train two, apart, without a word. A model that is compiled
again is no such case, and neither is what is frozen.
"""

from __future__ import annotations

import warnings
import weakref

from torch import Tensor, nn

from autopar.ir.words import count_of

# Parallel module -> the model that it was made of, and its parameters; kept while somebody has all of them.
_MADE_OF: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], list[weakref.ref[Tensor]]]] = (
    weakref.WeakKeyDictionary()
)


def tell_of_shared(model: nn.Module, parallel: nn.Module) -> None:
    """Warn where another model, of which there is a parallel module, has some of the same parameters."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for made_of, parameters in [*_MADE_OF.values()]:
        held = (parameter for one in parameters if (parameter := one()) is not None)
        shared = [name_of[id(one)] for one in held if id(one) in name_of]
        if shared and made_of() is not model:
            names = ", ".join(shared[:3]) + (", ..." if len(shared) > 3 else "")
            warnings.warn(
                f"the model shares {count_of(len(shared), 'parameter')} ({names}) with another one that is compiled "
                "already, and from its first call on each trains values of its own: put both into one module and "
                "compile that, or let the second be a copy (copy.deepcopy)",
                stacklevel=4,
            )
            break
    _MADE_OF[parallel] = weakref.ref(model), [weakref.ref(parameter) for parameter in model.parameters()]
