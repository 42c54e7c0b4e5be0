"""Hugging Face accelerate around a parallel module: what changes in a script that was written for it.

    python examples/with_accelerate.py                                   # one process
    torchrun --nproc-per-node 2 examples/with_accelerate.py              # or accelerate launch --num_processes 2

Needs accelerate (pip install -e '.[demo]'). The lines that autopar changes are marked; the rest is accelerate's own
example of a loop. The same samples make up each update on one process with --batch 8 and on two with --batch 4.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

SEQUENCE, SAMPLES, SEED = 32, 256, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8, help="updates")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and micro-batch")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--out", type=Path, default=Path("accelerate-out"), help="losses and weights")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = autopar.init_mesh(device)  # autopar: before the Accelerator, which joins the processes that are there
    accelerator = Accelerator(
        cpu=device == "cpu", mixed_precision=args.mixed_precision, gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # the same order for any number of ranks
    )  # fmt: skip
    set_seed(SEED)
    model = autopar.compile(gpt2(), mesh, inputs="local")  # autopar: each rank passes its part, as accelerate deals it
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / args.steps)))
    loader = DataLoader(TensorDataset(samples()), batch_size=args.batch, shuffle=True, drop_last=True)
    optimizer, loader = accelerator.prepare(optimizer, loader)  # autopar: all but the model, which is parallel already

    losses, micro_losses = list[float](), list[Tensor]()
    while len(losses) < args.steps:
        for (ids,) in loader:
            with accelerator.accumulate(model):
                with accelerator.autocast():  # autopar: prepare() would have put it around model.forward
                    loss = model(input_ids=ids, labels=ids).loss  # of the batch of all ranks: nothing to gather
                accelerator.backward(loss)
                micro_losses.append(loss.detach())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                schedule.step()  # once per update; a prepared schedule makes as many steps as there are ranks
                losses.append(torch.stack(micro_losses).mean().item())
                micro_losses.clear()
                accelerator.print(f"step {len(losses)}  loss {losses[-1]:.5f}")
            if len(losses) == args.steps:
                break

    weights = model.full_state_dict()  # autopar: on all ranks; rank 0 gets what the plain model loads
    if accelerator.is_main_process:
        args.out.mkdir(parents=True, exist_ok=True)
        torch.save(weights, args.out / "model.pt")
        (args.out / "losses.json").write_text(json.dumps(losses))
    # To go on later, save with torch.distributed.checkpoint as examples/train_lm.py does: accelerator.save_state()
    # writes on one rank, which has but its own pieces.
    accelerator.wait_for_everyone()
    dist.destroy_process_group()


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=SEQUENCE,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def samples() -> Tensor:
    """This file, byte by byte, over and over."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    return text.repeat(math.ceil(SAMPLES * SEQUENCE / len(text)))[: SAMPLES * SEQUENCE].view(SAMPLES, SEQUENCE)


if __name__ == "__main__":
    main()
