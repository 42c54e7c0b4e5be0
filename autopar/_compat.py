"""Every private name of torch that autopar uses, under our own names. Nothing else imports from `torch._*`.

Tried on torch 2.11.0 and 2.13.0; of 2.12 only the source was read. Each entry is executed by tests/test_compat.py.
"""

from __future__ import annotations

import torch.distributed._functional_collectives as functional_collectives  # makes collectives known to autograd: see below
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

# Without `functional_collectives` imported, a raw `_c10d_functional` op that meets autograd gives silently wrong gradients.

__all__ = [
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "LocalTensor",
    "LocalTensorMode",
    "aot_export_joint_with_descriptors",
    "functional_collectives",
    "mutated_inputs",
    "num_tangents",
]


def mutated_inputs(joint: object) -> list[int]:
    """Indices, among the flat inputs, of the buffers the model writes; their new values are the first outputs."""
    return list(joint._aot_state.fw_metadata.mutated_inp_runtime_indices)  # type: ignore[attr-defined]


def differentiable_outputs(joint: object) -> list[int]:
    """Indices, among the model's flat outputs, of those that have a tangent, in the order of the tangents."""
    metadata = joint._aot_state.fw_metadata  # type: ignore[attr-defined]
    found: list[int] = []
    for index, info in enumerate(metadata.output_info):
        if info.requires_grad and issubclass(info.raw_type, object) and "non_alias" in info.output_type.name:
            found.append(index)
    return found


def num_tangents(joint: object) -> int:
    return len(joint._aot_state.fw_metadata.traced_tangents)  # type: ignore[attr-defined]
