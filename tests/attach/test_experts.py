"""Layers of experts of transformers: products of rows, whichever way the library would compute them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import autopar
from autopar.ir.work import EXPERTS
from autopar.trace import capture, graph_of
from tests.processes.compare import loss_of, near, same_gradients, same_steps

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "intermediate_size": 48, "max_position_embeddings": 32, "use_cache": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "head_dim": 8}),  # turned weights, biases, a gate of its own
    "deepseek": ("DeepseekV3", {  # experts that all tokens go to, groups of experts
        "n_routed_experts": 4, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "num_key_value_heads": 4,
    }),
    "nemotron": ("NemotronH", {  # no gate
        "layers_block_type": ["moe", "attention"], "n_routed_experts": 4, "moe_intermediate_size": 24, "head_dim": 8,
        "moe_shared_expert_intermediate_size": 24, "n_group": 1, "topk_group": 1, "num_hidden_layers": 2,
    }),
}  # fmt: skip


def made(name: str, **more: Any) -> nn.Module:
    torch.manual_seed(3)
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**(SIZES | {"num_experts_per_tok": 2} | options | more))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # gradients of what is zero, or one, would be right too often
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (4, 12))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def operators(model: nn.Module, inputs: dict[str, Any]) -> list[str]:
    return [node.op for node in graph_of(capture(model, (), inputs)).nodes]


@pytest.mark.parametrize("how", ["eager", "grouped_mm", "batched_mm", None])
@pytest.mark.parametrize(
    "name", [name if name == "mixtral" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_a_model_trains_with_its_numbers(one: DeviceMesh, name: str, how: str | None) -> None:
    plain, inputs = made(name, experts_implementation=how or "eager"), batch()
    plain.config._experts_implementation = how
    found = operators(plain, inputs)
    assert EXPERTS[0] in found and EXPERTS[1] in found and not any("sort" in op or "grouped" in op for op in found)
    same_steps(plain, autopar.compile(copy.deepcopy(plain), one), inputs, steps=2)


def test_the_loss_beside_it_too(one: DeviceMesh) -> None:
    """Tokens are counted by expert, with a mask and without."""
    plain, inputs = made("mixtral"), batch() | {"output_router_logits": True}
    for given in (inputs, {name: value for name, value in inputs.items() if name != "attention_mask"}):
        parallel = autopar.compile(copy.deepcopy(plain), one)
        ours, wanted = parallel(**given), plain(**given)
        near(ours.aux_loss, wanted.aux_loss, 1e-6, "the loss of the router")
        plain.zero_grad()
        loss_of(ours).backward(), loss_of(wanted).backward()
        same_gradients(plain, parallel)


@functools.wraps(ALL_EXPERTS_FUNCTIONS["batched_mm"])
def twice(layer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return 2 * ALL_EXPERTS_FUNCTIONS["grouped_mm"](layer, hidden_states, top_k_index, top_k_weights)


@pytest.mark.parametrize("where", ["_local_mapping", "_global_mapping"])
def test_a_way_of_the_users_own_stays(one: DeviceMesh, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """`ExpertsInterface.register` writes to the one, assignment to the other."""
    plain, inputs = made("mixtral", experts_implementation="batched_mm"), batch()
    monkeypatch.setitem(getattr(ALL_EXPERTS_FUNCTIONS, where), "batched_mm", twice)
    assert EXPERTS[0] not in operators(plain, inputs)
    near(autopar.compile(copy.deepcopy(plain), one)(**inputs).loss, plain(**inputs).loss, 1e-5, where)
    monkeypatch.undo()
    assert EXPERTS[0] in operators(plain, inputs) and "get_interface" not in vars(ALL_EXPERTS_FUNCTIONS)


def test_a_layer_of_the_users_own_is_what_its_forward_says(one: DeviceMesh) -> None:
    """Computed in turn it is its own forward, whatever gate it has beside; together, what the library makes of that."""

    class Own(MixtralExperts):
        def _apply_gate(self, made: Tensor) -> Tensor:
            return made[..., ::2].tanh() * made[..., 1::2]

    for how in ("eager", "grouped_mm"):  # the former loops over experts that are hit
        plain, inputs = made("mixtral", experts_implementation=how), batch()
        for layer in plain.model.layers:
            layer.mlp.experts.__class__ = Own
        parallel = autopar.compile(copy.deepcopy(plain), one)
        same_steps(plain, parallel, inputs, steps=2)


def test_experts_may_be_called_with_keywords(one: DeviceMesh) -> None:
    plain, inputs = made("mixtral"), batch()
    for layer in plain.model.layers:
        experts, called = layer.mlp.experts, type(layer.mlp.experts).forward

        def named(x: Tensor, ids: Tensor, weights: Tensor, experts: Any = experts, called: Any = called) -> Tensor:
            return called(experts, hidden_states=x, top_k_index=ids, top_k_weights=weights)

        experts.forward = named
    loss = autopar.compile(plain, one)(**inputs).loss
    for layer in plain.model.layers:
        vars(layer.mlp.experts).pop("forward", None)
    near(loss, made("mixtral")(**inputs).loss, 1e-5, "loss")


def test_under_autocast_products_are_made_as_the_library_makes_them(one: DeviceMesh) -> None:
    for how in ("eager", "grouped_mm"):
        plain, inputs = made("mixtral", experts_implementation=how), batch()
        parallel = autopar.compile(copy.deepcopy(plain), one)
        with torch.autocast("cpu", torch.bfloat16):
            ours, wanted = parallel(**inputs), plain(**inputs)
        near(ours.loss, wanted.loss, 2**-7, how)


def test_a_model_that_has_run_may_have_the_librarys_hooks(one: DeviceMesh) -> None:
    """transformers hangs them on layers when it is first asked for hidden states, or for scores of routers."""
    plain, inputs = made("mixtral"), batch() | {"output_router_logits": True, "output_hidden_states": True}
    plain(**inputs)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    ours, wanted = parallel(**inputs), plain(**inputs)
    assert len(ours.hidden_states) == len(wanted.hidden_states) == 3
    for mine, theirs in zip(ours.hidden_states, wanted.hidden_states, strict=True):
        near(mine, theirs, 1e-5, "hidden states")
