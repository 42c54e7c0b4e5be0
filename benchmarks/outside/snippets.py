"""Training snippets as tutorials and example folders have them, in nothing but torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.outside.script import Batch, Script, adamw, cross_entropy, images, of_x, to_target, tokens


class Digits(nn.Module):
    """The convolutional net of the first lesson on handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.fc1, self.fc2 = nn.Linear(2304, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv2(functional.relu(self.conv1(x)))), 2)
        return functional.log_softmax(self.fc2(functional.relu(self.fc1(torch.flatten(x, 1)))), dim=1)


class Words(nn.Module):
    """A recurrent language model with its hidden state handed in and out."""

    def __init__(self, kind: str, tied: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.encoder, self.decoder = nn.Embedding(100, 32), nn.Linear(32, 100)
        if kind in ("LSTM", "GRU"):
            self.rnn = getattr(nn, kind)(32, 32, 2)
        else:
            self.rnn = nn.RNN(32, 32, 2, nonlinearity="relu")
        if tied:
            self.decoder.weight = self.encoder.weight

    def start(self, n: int) -> Any:
        zeros = next(self.parameters()).new_zeros(2, n, 32)
        return (zeros, zeros) if self.kind == "LSTM" else zeros

    def forward(self, ids: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        made, hidden = self.rnn(self.encoder(ids), hidden)
        return functional.log_softmax(self.decoder(made).view(-1, 100), dim=1), hidden


def _words(n: int) -> Batch:
    ids = tokens(n, 9, 100).t()
    return {"x": ids[:-1].contiguous(), "y": ids[1:].reshape(-1)}


def _run_words(model: Any, batch: Batch) -> Any:
    return model(batch["x"], model.start(batch["x"].shape[1]))


def _nll(out: Any, batch: Batch) -> Tensor:
    return functional.nll_loss(out[0] if isinstance(out, tuple) else out, batch["y"])


class Positions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        table, at = torch.zeros(64, width), torch.arange(64).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table[:, 0::2], table[:, 1::2] = torch.sin(at * rate), torch.cos(at * rate)
        self.register_buffer("table", table.unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.size(0), :]


class Sentences(nn.Module):
    """nn.TransformerEncoder with a causal mask that is made at the first call and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        self.embed, self.positions = nn.Embedding(100, 32), Positions(32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0), 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(32, 100)

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or self.mask.size(0) != len(x):
            self.mask = nn.Transformer.generate_square_subsequent_mask(len(x))
        made = self.encoder(self.positions(self.embed(x) * math.sqrt(32)), mask=self.mask.to(self.decoder.weight.dtype))
        return functional.log_softmax(self.decoder(made), dim=-1).view(-1, 100)


class Translate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(100, 32), nn.Embedding(100, 32)
        self.net = nn.Transformer(32, 4, 2, 2, 64, 0.0, batch_first=True)
        self.out = nn.Linear(32, 100)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.size(1) - 1, dtype=self.out.weight.dtype)
        padding = x == 5
        made = self.net(
            self.source(x), self.target(y[:, :-1]), tgt_mask=mask, src_key_padding_mask=padding,
            memory_key_padding_mask=padding, tgt_is_causal=True,
        )  # fmt: skip
        return functional.cross_entropy(self.out(made).transpose(1, 2), y[:, 1:], label_smoothing=0.1)


class Autoencoder(nn.Module):
    """Variational; the noise is an argument, as random numbers rightly differ."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mean, self.spread = nn.Linear(196, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.fc3, self.fc4 = nn.Linear(8, 64), nn.Linear(64, 196)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = functional.relu(self.fc1(x.view(-1, 196)))
        mean, spread = self.mean(h), self.spread(h)
        z = mean + noise * torch.exp(0.5 * spread)
        return torch.sigmoid(self.fc4(functional.relu(self.fc3(z)))), mean, spread


def _vae_loss(out: Any, batch: Batch) -> Tensor:
    made, mean, spread = out
    told = functional.binary_cross_entropy(made, batch["x"].view(-1, 196), reduction="sum")
    return (told - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())) / 1000


def _generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def _discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
    )  # fmt: skip


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(2 * 144, 32), nn.ReLU(inplace=True), nn.Linear(32, 1))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.sigmoid(self.head(torch.cat((self.tower(a), self.tower(b)), 1)))


class Upscale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5, 1, 2), nn.Conv2d(16, 4, 3, 1, 1)
        self.shuffle = nn.PixelShuffle(2)
        for conv in (self.conv1, self.conv2):
            nn.init.orthogonal_(conv.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.shuffle(self.conv2(functional.relu(self.conv1(x))))


class Sine(nn.Module):
    """Two LSTM cells stepped by a loop over time, which then go on from what they said."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 16), nn.LSTMCell(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, future: int = 2) -> Tensor:
        outputs: list[Tensor] = []
        h1 = c1 = h2 = c2 = torch.zeros(x.size(0), 16, dtype=x.dtype)
        for column in x.split(1, dim=1):
            h1, c1 = self.lstm1(column, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs += [self.linear(h2)]
        for _ in range(future):
            h1, c1 = self.lstm1(outputs[-1], (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs += [self.linear(h2)]
        return torch.cat(outputs, dim=1)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(3, 8), self._block(8, 16)
        self.pool, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.last, self.out = self._block(24, 8), nn.Conv2d(8, 5, 1)

    @staticmethod
    def _block(given: int, made: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        return self.out(self.last(torch.cat([a, self.up(self.down2(self.pool(a)))], 1)))


def _bag() -> nn.Module:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.fc = nn.EmbeddingBag(100, 32), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.embedding(x))

    return Bag()


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.5 * grad


class Domains(nn.Module):
    """Features that a second head shall not tell domains by: its gradient is reversed."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(392, 32), nn.ReLU())
        self.classes, self.domains = nn.Linear(32, 10), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.features(x)
        return self.classes(made), self.domains(Reverse.apply(made))


def _domain_loss(out: Any, batch: Batch) -> Tensor:
    return functional.cross_entropy(out[0], batch["y"]) + functional.cross_entropy(out[1], batch["y"] % 2)


def _triplets(out: Any, batch: Batch) -> Tensor:
    return functional.triplet_margin_loss(out, out.roll(1, 0), out.roll(2, 0))


def _pairs(n: int) -> Batch:
    return {"a": torch.randn(n, 1, 16, 16), "b": torch.randn(n, 1, 16, 16)}


def _encoder(n: int) -> Batch:
    return {"x": torch.randn(n, 8, 32), "y": torch.randn(n, 8, 32)}


SCRIPTS = [
    Script("snippet/mnist", (), Digits, lambda n: images(n, 28, channels=1), of_x, _nll, told="no dropout"),
    Script("snippet/words LSTM", (), lambda: Words("LSTM"), _words, _run_words, _nll, clip=0.25),
    Script("snippet/words GRU tied", (), lambda: Words("GRU", True), _words, _run_words, _nll, clip=0.25),
    Script("snippet/words RNN", (), lambda: Words("RNN"), _words, _run_words, _nll, clip=0.25),
    Script("snippet/words Transformer", (), Sentences, _words, of_x, _nll, clip=0.25, told="no dropout"),
    Script(
        "snippet/translation nn.Transformer", (), Translate, lambda n: {"x": tokens(n, 8, 100), "y": tokens(n, 9, 100)},
        optimizer=adamw, told="no dropout",
    ),
    Script(
        "snippet/vae", (), Autoencoder, lambda n: {"x": torch.rand(n, 1, 14, 14), "noise": torch.randn(n, 8)},
        loss=_vae_loss, optimizer=adamw,
    ),
    Script(
        "snippet/dcgan generator", (), _generator,
        lambda n: {"x": torch.randn(n, 16, 1, 1), "y": torch.randn(n, 3, 16, 16)}, of_x, to_target,
    ),
    Script(
        "snippet/dcgan discriminator", (), _discriminator, lambda n: {"x": torch.randn(n, 3, 16, 16)}, of_x,
        lambda out, batch: functional.binary_cross_entropy(out.view(-1), torch.ones_like(out.view(-1))),
    ),
    Script(
        "snippet/siamese", (), Siamese, _pairs,
        loss=lambda out, batch: functional.binary_cross_entropy(out.squeeze(1), torch.ones(len(out), dtype=out.dtype)),
    ),
    Script(
        "snippet/super resolution", (), Upscale,
        lambda n: {"x": torch.randn(n, 1, 12, 12), "y": torch.randn(n, 1, 24, 24)}, of_x, to_target,
    ),
    Script(
        "snippet/time sequence", (), Sine, lambda n: {"x": torch.randn(n, 6), "y": torch.randn(n, 8)}, of_x, to_target,
    ),
    Script(
        "snippet/unet", (), UNet, lambda n: {"x": torch.randn(n, 3, 24, 24), "y": torch.randint(0, 5, (n, 24, 24))},
        of_x, cross_entropy, adamw,
    ),
    Script(
        "snippet/bag of words", (), _bag, lambda n: {"x": tokens(n, 8, 100), "y": torch.randint(0, 10, (n,))},
        of_x, cross_entropy,
    ),
    Script(
        "snippet/triplets", (), lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 64), nn.PReLU(), nn.Linear(64, 16)),
        lambda n: {"x": torch.randn(n, 3, 4, 4)}, of_x, _triplets,
    ),
    Script("snippet/reversed gradients", (), Domains, lambda n: images(n, 16), of_x, _domain_loss),
    Script(
        "snippet/encoder layers norm first", (), lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True), 2,
            enable_nested_tensor=False,
        ), _encoder, of_x, to_target, told="no dropout",
    ),
]  # fmt: skip
