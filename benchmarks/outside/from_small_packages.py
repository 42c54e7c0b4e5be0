"""Models of many small packages, each called as its README has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.outside.script import Batch, Script, adamw, cross_entropy, images, of_x, to_target, tokens


def _made(path: str, **options: Any) -> Callable[[], nn.Module]:
    """`package.module:Class` or `package.module:Class.method` with these arguments."""

    def model() -> nn.Module:
        module, _, name = path.partition(":")
        return attrgetter(name)(import_module(module))(**options)

    return model


def _script(
    name: str, path: str, batch: Callable[[int], Batch], loss: Any = to_target, told: str = "", **options: Any
) -> Script:
    needs = (path.partition(":")[0].partition(".")[0],)
    return Script(name, needs, _made(path, **options), batch, of_x, loss, adamw, told=told)


def _rows(*shape: int, out: tuple[int, ...] | None = None) -> Callable[[int], Batch]:
    return lambda n: {"x": torch.randn(n, *shape), "y": torch.randn(n, *(shape if out is None else out))}


def _sentences(n: int) -> Batch:
    ids = tokens(n, 17, 100)
    return {"x": ids[:, :-1].contiguous(), "y": ids[:, 1:].contiguous()}


def _next_word(out: Any, batch: Batch) -> Tensor:
    return functional.cross_entropy(out.transpose(1, 2), batch["y"])


def _segments(n: int) -> Batch:
    return {"x": torch.randn(n, 3, 64, 64), "y": torch.randint(0, 4, (n, 64, 64))}


def _quantized(out: Any, batch: Batch) -> Tensor:
    return functional.mse_loss(out[0], batch["y"]) + out[-1].sum()


def _text_model(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        import x_transformers as x

        layers = getattr(x, kind)(dim=32, depth=2, heads=4, **options)
        return x.TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers)

    return model


def _autoregressive() -> nn.Module:
    import x_transformers as x

    layers = x.Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True)
    return x.AutoregressiveWrapper(x.TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers))


class Graphs(nn.Module):
    """Two layers of a graph net on a fixed graph."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import torch_geometric.nn as g

        made = {
            "GCN": lambda a, b: g.GCNConv(a, b),
            "GCN without added loops": lambda a, b: g.GCNConv(a, b, add_self_loops=False),
            "GAT": lambda a, b: g.GATConv(a, b // 4, heads=4),
            "SAGE": lambda a, b: g.SAGEConv(a, b),
            "GIN": lambda a, b: g.GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))),
        }[kind]
        self.one, self.two, self.head = made(16, 32), made(32, 32), nn.Linear(32, 5)
        at = torch.arange(20)
        self.register_buffer("edges", torch.stack((torch.cat((at, at)), torch.cat(((at + 1) % 20, (at * 3) % 20)))))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.elu(self.two(functional.elu(self.one(x, self.edges)), self.edges)))


def _nodes(n: int) -> Batch:
    return {"x": torch.randn(20, 16), "y": torch.randint(0, 5, (20,))}


class Rotary(nn.Module):
    """Attention with rotary embeddings of a package."""

    def __init__(self) -> None:
        super().__init__()
        from rotary_embedding_torch import RotaryEmbedding

        self.rotary, self.qkv, self.out = RotaryEmbedding(dim=8), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (4, 8)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        q, k = self.rotary.rotate_queries_or_keys(q), self.rotary.rotate_queries_or_keys(k)
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def _einops() -> nn.Module:
    from einops.layers.torch import EinMix, Rearrange, Reduce

    return nn.Sequential(
        Rearrange("b c (h p) (w q) -> b (h w) (c p q)", p=4, q=4),
        EinMix("b t c -> b t d", weight_shape="c d", bias_shape="d", c=48, d=32), nn.GELU(),
        EinMix("b t c -> b s c", weight_shape="t s", bias_shape="s", t=16, s=8),
        Reduce("b s c -> b c", "mean"), nn.Linear(32, 10),
    )  # fmt: skip


def _mamba() -> nn.Module:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=32, n_layers=2))


SMALL_VIT: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 4}
PICTURE = lambda n: images(n, 32)  # noqa: E731
VOLUME = _rows(1, 16, 16, 16, out=(2, 16, 16, 16))
QUANTIZE = "no codes drawn from data"
SCRIPTS = [
    Script("x-transformers/decoder", ("x_transformers",), _text_model("Decoder"), _sentences, of_x, _next_word, adamw),
    Script(
        "x-transformers/many options", ("x_transformers",), _text_model(
            "Decoder", rotary_pos_emb=True, ff_glu=True, ff_swish=True, use_rmsnorm=True, attn_qk_norm=True,
            attn_kv_heads=2, ff_no_bias=True,
        ), _sentences, of_x, _next_word, adamw,
    ),
    Script(
        "x-transformers/encoder alibi", ("x_transformers",), _text_model("Encoder", alibi_pos_bias=True), _sentences,
        of_x, _next_word, adamw,
    ),
    Script("x-transformers/autoregressive", ("x_transformers",), _autoregressive, lambda n: {"x": tokens(n, 17, 100)},
           of_x, lambda out, batch: out, adamw),
    _script("vit-pytorch/ViT", "vit_pytorch:ViT", PICTURE, cross_entropy, mlp_dim=64, **SMALL_VIT),
    _script("vit-pytorch/SimpleViT", "vit_pytorch:SimpleViT", PICTURE, cross_entropy, mlp_dim=64, **SMALL_VIT),
    _script(
        "vit-pytorch/CvT", "vit_pytorch.cvt:CvT", PICTURE, cross_entropy, num_classes=10, s1_emb_dim=16, s2_emb_dim=16,
        s3_emb_dim=32, s2_heads=2, s3_heads=2, s3_depth=1,
    ),
    _script(
        "vit-pytorch/CCT", "vit_pytorch.cct:CCT", PICTURE, cross_entropy, img_size=(32, 32), embedding_dim=32,
        n_conv_layers=1, num_layers=2, num_heads=2, mlp_ratio=2, num_classes=10, dropout_rate=0.0,
        attention_dropout=0.0, stochastic_depth_rate=0.0, told="no dropout",
    ),
    _script("perceiver-pytorch", "perceiver_pytorch:Perceiver", lambda n: {
        "x": torch.randn(n, 8, 8, 3), "y": torch.randint(0, 10, (n,))}, cross_entropy, input_channels=3, input_axis=2,
        num_freq_bands=4, max_freq=10.0, depth=2, num_latents=8, latent_dim=32, cross_heads=1, latent_heads=2,
        cross_dim_head=8, latent_dim_head=8, num_classes=10),
    _script("performer-pytorch", "performer_pytorch:PerformerLM", _sentences, _next_word, num_tokens=100,
            max_seq_len=32, dim=32, depth=2, heads=4, dim_head=8, causal=False, feature_redraw_interval=None),
    _script("linformer", "linformer:LinformerLM", _sentences, _next_word, num_tokens=100, dim=32, seq_len=16, depth=2,
            heads=4, k=8),
    _script("nystrom-attention", "nystrom_attention:Nystromformer", _rows(16, 32), dim=32, dim_head=8, heads=4,
            depth=2, num_landmarks=4),
    _script("g-mlp", "g_mlp_pytorch:gMLP", _sentences, _next_word, num_tokens=100, dim=32, depth=2, seq_len=16),
    _script("mlp-mixer", "mlp_mixer_pytorch:MLPMixer", PICTURE, cross_entropy, image_size=32, channels=3, patch_size=8,
            dim=32, depth=2, num_classes=10),
    _script("siren", "siren_pytorch:SirenNet", _rows(2, out=(3,)), dim_in=2, dim_hidden=32, dim_out=3, num_layers=2),
    _script("conformer", "conformer:Conformer", _rows(12, 32), dim=32, depth=1, dim_head=8, heads=4,
            conv_kernel_size=7),
    _script("axial-attention", "axial_attention:AxialAttention", _rows(32, 8, 8), dim=32, dim_index=1, heads=4,
            num_dimensions=2),
    _script("minGRU", "minGRU_pytorch.minLM:minLM", _sentences, _next_word, num_tokens=100, dim=32, depth=2),
    _script("lambda-networks", "lambda_networks:LambdaLayer", _rows(16, 8, 8), dim=16, dim_out=16, n=8, dim_k=8,
            heads=4, dim_u=1),
    _script("linear-attention-transformer", "linear_attention_transformer:LinearAttentionTransformerLM", _sentences,
            _next_word, num_tokens=100, dim=32, heads=4, depth=1, max_seq_len=16, causal=True),
    replace(_script(
        "efficientnet-pytorch", "efficientnet_pytorch:EfficientNet.from_name", lambda n: images(n, 64), cross_entropy,
        model_name="efficientnet-b0", num_classes=10, image_size=64, drop_connect_rate=0.0, dropout_rate=0.0,
        told="no dropped paths",
    ), clip=1.0),
    _script("vector-quantize/VectorQuantize", "vector_quantize_pytorch:VectorQuantize", _rows(16, 32), _quantized,
            dim=32, codebook_size=16, learnable_codebook=True, ema_update=False),
    _script("vector-quantize/FSQ", "vector_quantize_pytorch:FSQ", _rows(16, 32), lambda out, b: functional.mse_loss(
        out[0], b["y"]), dim=32, levels=[8, 5, 5, 5]),
    Script("rotary-embedding-torch", ("rotary_embedding_torch",), Rotary, _rows(16, 32), of_x, to_target, adamw),
    Script("einops layers", ("einops",), _einops, lambda n: images(n, 16), of_x, cross_entropy, adamw),
    *(
        Script(f"torch-geometric/{kind}", ("torch_geometric",), lambda kind=kind: Graphs(kind), _nodes, of_x,
               cross_entropy, adamw) for kind in ("GCN", "GCN without added loops", "GAT", "SAGE", "GIN")
    ),
    _script("neuraloperator/FNO", "neuralop.models:FNO", _rows(1, 16, 16), n_modes=(6, 6), in_channels=1,
            out_channels=1, hidden_channels=16, n_layers=2),
    _script("neuraloperator/UNO", "neuralop.models:UNO", _rows(1, 16, 16), in_channels=1, out_channels=1,
            hidden_channels=8, n_layers=3, uno_out_channels=[8, 8, 8], uno_n_modes=[[4, 4], [4, 4], [4, 4]],
            uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2, 2]], channel_mlp_skip="linear"),
    *(
        _script(f"segmentation-models/{kind}", f"segmentation_models_pytorch:{kind}", _segments, cross_entropy,
                encoder_name="resnet18", encoder_weights=None, classes=4) for kind in ("Unet", "FPN", "DeepLabV3Plus")
    ),
    _script("monai/UNet", "monai.networks.nets:UNet", VOLUME, spatial_dims=3, in_channels=1, out_channels=2,
            channels=(4, 8, 16), strides=(2, 2), num_res_units=1),
    _script("monai/SegResNet", "monai.networks.nets:SegResNet", VOLUME, spatial_dims=3, init_filters=8, out_channels=2,
            blocks_down=(1, 1), blocks_up=(1,)),
    _script("monai/UNETR", "monai.networks.nets:UNETR", VOLUME, in_channels=1, out_channels=2, img_size=(16, 16, 16),
            feature_size=4, hidden_size=24, mlp_dim=32, num_heads=4),
    _script("monai/DenseNet", "monai.networks.nets:DenseNet", _rows(1, 32, 32, out=(3,)), spatial_dims=2,
            in_channels=1, out_channels=3, init_features=8, growth_rate=8, block_config=(2, 2)),
    Script("mambapy", ("mambapy",), _mamba, _rows(8, 32), of_x, to_target, adamw),
    Script("reformer-pytorch", ("reformer_pytorch",), _made(
        "reformer_pytorch:ReformerLM", num_tokens=100, dim=32, depth=1, max_seq_len=16, heads=2, bucket_size=4,
        n_hashes=2, causal=True), _sentences, of_x, _next_word, adamw),
]  # fmt: skip
