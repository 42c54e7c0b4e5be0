"""Train a small GPT-2 on the source of Python's standard library: a whole training script, as one would write it.

    python examples/train_lm.py                                      # one process
    torchrun --nproc-per-node 2 examples/train_lm.py --steps 400     # two; takes up the run of one where it stopped

Mixed precision, gradient accumulation, clipping, warmup and cosine, evaluation, and checkpoints that any number of
processes goes on from: started again with the same --out, it continues behind the last whole checkpoint. Nothing in it
asks how many ranks there are, but for the part of each batch that a rank loads. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

SEED, CLIP_NORM, WEIGHT_DECAY, KEPT_CHECKPOINTS = 1337, 1.0, 0.1, 2
SIZES = {"tiny": (2, 64, 2), "small": (6, 384, 6)}  # layers, width, heads


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="updates of the whole run")
    parser.add_argument("--stop-after", type=int, help="save and leave after so many updates of the --steps")
    parser.add_argument("--batch", type=int, default=16, help="sequences of an update, of all ranks together")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches that an update is made of")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=6e-4, help="learning rate behind the warmup")
    parser.add_argument("--warmup", type=int, default=20, help="updates")
    # Processors without instructions for bfloat16 take ten times as long for its products, or more.
    fast = "bf16" if torch.cuda.is_available() else "fp32"
    parser.add_argument("--precision", choices=("bf16", "fp32"), default=fast, help="of products; weights are fp32")
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--workers", type=int, default=1, help="processes that load data, per rank")
    parser.add_argument("--out", type=Path, default=Path("train-out"), help="log and checkpoints")
    args = parser.parse_args()
    if args.batch % args.accumulate:
        parser.error(f"a --batch of {args.batch} sequences has no {args.accumulate} equal micro-batches")
    transformers.logging.set_verbosity_error()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    mesh = autopar.init_mesh(device)  # all ranks that torchrun started; without it, a mesh of one
    try:
        train(args, mesh, device)
    finally:
        dist.destroy_process_group()


def train(args: argparse.Namespace, mesh: dist.device_mesh.DeviceMesh, device: str) -> None:
    micro = args.batch // args.accumulate
    example = torch.zeros(micro, args.sequence, dtype=torch.long)  # the whole batch: planning looks at its shape
    autocast = torch.autocast(device, torch.bfloat16, enabled=args.precision == "bf16")
    with autocast:  # plan what will be called: weights stay float32, products are made in bfloat16
        # inputs="local": each rank loads its own part of a batch, so that loading is shared out as computing is. (The
        # default takes whole batches, the same on every rank: simpler where loading costs nothing.)
        model = autopar.compile(
            gpt2(args), mesh, inputs="local", example_kwargs={"input_ids": example, "labels": example}
        )
    optimizer = torch.optim.AdamW(weight_groups(model), lr=args.rate, betas=(0.9, 0.95), fused=True)
    schedule = LambdaLR(optimizer, lambda step: rate_at(step, args.warmup, args.steps))
    begun = load(args.out, model, optimizer, schedule)

    text, held_out = read_text()
    micro_batches = iter(loader(text, args, model, begun * args.accumulate))
    record(args.out, f"begin {begun}", ranks=mesh.size())
    until = min(args.steps, args.stop_after or args.steps)
    for step in range(begun + 1, until + 1):
        started = time.perf_counter()
        # What is dropped hangs on the step alone: a run that was resumed drops what an uninterrupted one does.
        torch.manual_seed(SEED + step)
        model.manual_seed(SEED + step)
        model.train()
        total = 0.0
        for _ in range(args.accumulate):
            ids = next(micro_batches).to(device)
            with autocast:
                loss = model(input_ids=ids, labels=ids).loss / args.accumulate  # of the whole micro-batch
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        speed = args.batch * args.sequence / (time.perf_counter() - started)
        record(args.out, f"step {step}", loss=total, rate=rate, norm=norm.item(), tokens_per_s=speed)
        if step % args.eval_every == 0 or step == args.steps:
            record(args.out, f"eval {step}", held_out=evaluate(model, held_out, args, autocast, device))
        if step % args.save_every == 0 or step == until:
            save(args.out, step, model, optimizer, schedule)


def gpt2(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(SEED)
    layers, width, heads = SIZES[args.size]
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=256, n_positions=args.sequence,
        resid_pdrop=args.dropout, embd_pdrop=args.dropout, attn_pdrop=args.dropout,
        bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def weight_groups(model: nn.Module) -> list[dict[str, object]]:
    """Matrices decay, biases and norms do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]


def rate_at(step: int, warmup: int, steps: int) -> float:
    """The share of the full rate: up in a line, then down along a cosine to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


# --- data ------------------------------------------------------------------------------------------------------------


def read_text() -> tuple[Tensor, Tensor]:
    """Bytes to train on, and the last tenth, to evaluate on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    split = len(text) * 9 // 10
    return text[:split], text[split:]


class Pieces(Dataset[Tensor]):
    """The text in pieces of one sequence."""

    def __init__(self, text: Tensor, sequence: int) -> None:
        self.text, self.sequence = text, sequence

    def __len__(self) -> int:
        return len(self.text) // self.sequence

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * self.sequence :][: self.sequence].long()


class Parts(Sampler[list[int]]):
    """This rank's part of every batch, from batch `begin` on, epoch after epoch without end.

    A batch is the same for any number of ranks, so that its number is all that has to be remembered of the data.
    torch's DistributedSampler would do for runs that start at the beginning of an epoch.
    """

    def __init__(self, count: int, batch: int, begin: int, rank: int, ranks: int) -> None:
        if batch % ranks:
            raise ValueError(f"a micro-batch of {batch} sequences has no {ranks} equal parts; choose another --batch")
        self.count, self.batch, self.begin, self.rank, self.ranks = count, batch, begin, rank, ranks

    def __iter__(self) -> Iterator[list[int]]:
        per_epoch, part = self.count // self.batch, self.batch // self.ranks
        epoch, number = divmod(self.begin, per_epoch)
        while True:
            order = torch.randperm(self.count, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
            for first in range(number * self.batch, per_epoch * self.batch, self.batch):
                yield order[first + self.rank * part :][:part]
            epoch, number = epoch + 1, 0


def loader(text: Tensor, args: argparse.Namespace, model: autopar.ParallelModule, begin: int) -> DataLoader[Tensor]:
    pieces, micro = Pieces(text, args.sequence), args.batch // args.accumulate
    parts = Parts(len(pieces), micro, begin, model.data_rank, model.data_ranks)
    return DataLoader(pieces, batch_sampler=parts, num_workers=args.workers, pin_memory=torch.cuda.is_available())


@torch.no_grad()
def evaluate(
    model: autopar.ParallelModule, text: Tensor, args: argparse.Namespace, autocast: torch.autocast, device: str
) -> float:
    """The mean loss of the same held-out batches, every time. Every rank takes part, and every rank gets it."""
    model.eval()
    total = 0.0
    for _, ids in zip(range(args.eval_batches), loader(text, args, model, 0), strict=False):
        with autocast:
            total += model(input_ids=ids.to(device), labels=ids.to(device)).loss.item()
    return total / args.eval_batches


# --- checkpoints and log ---------------------------------------------------------------------------------------------


def save(out: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LambdaLR) -> None:
    """Every rank writes what it holds. Until all of it is there the folder has another name, so that a run that is
    killed here leaves the last checkpoint as it was.
    """
    whole, unfinished = out / f"step-{step:08}", out / "unfinished"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed here
    dist.barrier()
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "schedule": schedule.state_dict(), "step": torch.tensor(step)}
    dcp.save(state, checkpoint_id=unfinished)  # returns when all ranks have written
    if dist.get_rank() == 0:
        unfinished.rename(whole)
        for old in checkpoints(out)[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)
    dist.barrier()


def load(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LambdaLR) -> int:
    """The last checkpoint's step, everything as it was behind it; 0 where there is none. Whatever number of ranks has
    written it: each reads the pieces that it holds now.
    """
    found: list[Path | None] = [None]
    if dist.get_rank() == 0:  # one rank chooses: others may see a shared file system a little later
        found = [next(reversed(checkpoints(out)), None)]
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        return 0
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "schedule": schedule.state_dict(), "step": torch.tensor(0)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
        dcp.load(state, checkpoint_id=found[0])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    schedule.load_state_dict(state["schedule"])
    return int(state["step"])


def checkpoints(out: Path) -> list[Path]:
    """Whole ones, the last one last."""
    return sorted(out.glob("step-*"))


def record(out: Path, what: str, **numbers: float) -> None:
    """Rank 0 prints a line and adds it to the log."""
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "log.jsonl").open("a") as log:
            log.write(json.dumps({"what": what, **numbers}) + "\n")
        print(what, *(f"{name} {number:.5g}" for name, number in numbers.items()), sep="  ", flush=True)


if __name__ == "__main__":
    main()
