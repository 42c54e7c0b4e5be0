"""What torch's own transformer encoders do otherwise where nobody traces them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def as_torchs_encoders(part: nn.Module) -> None:
    """Let a part of a copy that is traced, if it is an encoder or decoder of torch's, give what it gives by itself."""
    if type(part).forward is nn.TransformerEncoder.forward:
        part.register_forward_pre_hook(_no_causal_guess(3, "is_causal"), with_kwargs=True)
        _with_zeros_in_padding(part)
    elif type(part).forward is nn.TransformerDecoder.forward:
        part.register_forward_pre_hook(_no_causal_guess(6, "tgt_is_causal"), with_kwargs=True)


def _no_causal_guess(place: int, name: str) -> Any:
    """Where nobody says if a mask is causal, torch's transformers look at its values to pick a kernel. The mask, which
    is used as it is then, means the same.
    """

    def say(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) > place:
            return (*args[:place], bool(args[place]), *args[place + 1 :]), kwargs
        return args, {**kwargs, name: bool(kwargs.get(name))}

    return say


def _with_zeros_in_padding(encoder: Any) -> None:
    """Where nothing trains, torch leaves padding out (`enable_nested_tensor`): what its layers give there is 0. The
    numbers of other positions are the same.
    """
    padding = list[Tensor]()

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        padding.clear()
        given = dict(zip(("src", "mask", "src_key_padding_mask"), args, strict=False)) | kwargs
        mask = given.get("src_key_padding_mask")
        if mask is not None and given.get("mask") is None and _leaves_out(encoder, given["src"]):
            padding.append(mask if mask.dtype == torch.bool else mask != 0)

    def zero(_: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not padding:
            return None
        out = padding[0]
        if getattr(encoder, "mask_check", True):  # it does so where padding stands at the ends alone
            out = out & ~(out[:, :-1] & ~out[:, 1:]).any()
        return output.masked_fill(out.unsqueeze(-1), 0)

    encoder.register_forward_pre_hook(see, with_kwargs=True)
    encoder.layers[-1].register_forward_hook(zero)


def _leaves_out(encoder: Any, src: Tensor) -> bool:
    """What torch asks before it does (`nn.TransformerEncoder.forward`), but for the values of the mask."""
    first = encoder.layers[0]
    if not torch.backends.mha.get_fastpath_enabled() or not getattr(encoder, "use_nested_tensor", False):
        return False
    if first.training or src.dim() != 3 or torch.is_autocast_enabled():
        return False
    of_layer = (first.self_attn, first.self_attn.out_proj, first.norm1, first.norm2, first.linear1, first.linear2)
    read = (src, *(tensor for part in of_layer for tensor in part.parameters(recurse=False)))
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in read))
