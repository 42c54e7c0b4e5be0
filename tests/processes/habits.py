"""A training script in the style of small GPT repositories that were written for DistributedDataParallel.

Seeds that differ between ranks, batches that each draws for itself, an optimizer that the model makes, micro-batches,
autocast, a scaler that is off, clipping, and an evaluation. Five lines are another's than there; they are marked.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import autopar
from tests.processes.compare import near, whole
from tests.processes.worker import Ranks

BATCH, BLOCK, VOCABULARY = 4, 16, 64  # of each rank


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (part.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, layers: int = 2, width: int = 64, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(BLOCK, width)
        self.h = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self, rate: float) -> torch.optim.AdamW:
        held = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        decay = [parameter for parameter in held.values() if parameter.dim() >= 2]
        others = [parameter for parameter in held.values() if parameter.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-6)  # eps: key biases get nothing but noise


@dataclass
class Run:
    """What a run leaves: the losses of its updates and evaluations, the batches that this rank drew, the model."""

    losses: list[float]
    evaluations: list[float]
    drawn: list[tuple[Tensor, Tensor]]
    model: Any


def _train(ranks: Ranks, bfloat16: bool, given: list[tuple[Tensor, Tensor]] | None, initial: Any = None) -> Run:
    """The script on all ranks; or, with `given` batches, as it is for one process."""
    parallel = given is None
    seed_offset = ranks.rank if parallel else 0
    torch.manual_seed(1337 + seed_offset)
    data = torch.randint(VOCABULARY, (4096,), generator=torch.Generator().manual_seed(0))
    context = torch.autocast("cpu", torch.bfloat16) if bfloat16 else contextlib.nullcontext()
    drawn, left = list[tuple[Tensor, Tensor]](), iter(given or ())

    def get_batch() -> tuple[Tensor, Tensor]:
        if not parallel:
            return next(left)
        ix = torch.randint(len(data) - BLOCK, (BATCH,))
        x = torch.stack([data[i : i + BLOCK] for i in ix])
        y = torch.stack([data[i + 1 : i + 1 + BLOCK] for i in ix])
        drawn.append((x, y))
        return x, y

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()
        losses = torch.zeros(2)
        for k in range(2):
            X, Y = get_batch()
            with context:
                _, loss = model(X, Y)
            losses[k] = loss.item()
        model.train()
        return losses.mean().item()

    model: Any = GPT()
    if parallel:  # 1: `import autopar`, 2: this line, before the optimizer, 3: none for DistributedDataParallel
        model = autopar.compile(model, ranks.mesh(), inputs="local")
    else:
        model.load_state_dict(initial)
    raw_model = model  # 4: not model.module
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = raw_model.configure_optimizers(3e-3)
    X, Y = get_batch()
    run = Run([], [], drawn, raw_model)
    for iter_num in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * 0.5 * (1 + math.cos(math.pi * iter_num / 6))
        if iter_num % 3 == 0:  # 5: on all ranks, and not `and master_process`
            run.evaluations.append(estimate_loss())
        total = 0.0
        for _ in range(2):
            with context:
                _, loss = model(X, Y)
                loss = loss / 2
            X, Y = get_batch()
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        run.losses.append(total)
    return run


def _compare(ranks: Ranks, bfloat16: bool, tolerance: float) -> None:
    torch.manual_seed(1337)
    initial = GPT().state_dict()  # what rank 0 draws, whose weights win
    run = _train(ranks, bfloat16, None)
    together: list[tuple[Tensor, Tensor]] = []
    for pair in run.drawn:
        every = [[torch.empty_like(mine) for _ in range(ranks.count)] for mine in pair]
        for mine, theirs in zip(pair, every, strict=True):
            dist.all_gather(theirs, mine)
        assert not every[0][0].equal(every[0][1]), "ranks drew the same batch"
        together.append((torch.cat(every[0]), torch.cat(every[1])))
    alone = _train(ranks, bfloat16, together, initial)
    near(torch.tensor(run.losses), torch.tensor(alone.losses), tolerance, "losses")
    near(torch.tensor(run.evaluations), torch.tensor(alone.evaluations), tolerance, "evaluations")
    if not bfloat16:
        for (name, ours), theirs in zip(run.model.named_parameters(), alone.model.parameters(), strict=True):
            near(whole(ours.detach()), theirs.detach(), 1e-3, name)
    weights = run.model.full_state_dict()
    if ranks.rank == 0:
        GPT().load_state_dict(weights)


def check_a_script_with_a_seed_for_each_rank(ranks: Ranks) -> None:
    _compare(ranks, bfloat16=False, tolerance=1e-5)


def check_the_same_in_bfloat16(ranks: Ranks) -> None:
    _compare(ranks, bfloat16=True, tolerance=1e-3)  # products are rounded to 8 bits, elsewhere where rows are split
