"""Transformers' Trainer with a parallel module: a subclass of a few methods, and an ordinary call of it.

    python examples/trainer.py                                   # one process
    torchrun --nproc-per-node 2 examples/trainer.py --batch 4    # two, with the same batches: 4 sequences on each

Needs accelerate (pip install -e '.[demo]'). Checkpoints are taken up again with --resume, also by another number of
processes: weights are in the format of transformers, what belongs to the optimizer in torch's distributed one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import autopar

SEQUENCE, SAMPLES, SEED = 32, 144, 0


class ParallelTrainer(Trainer):
    """A Trainer for what `autopar.compile(..., inputs="local", example_kwargs=...)` returns.

    Planned before the trainer is made, so that states of the optimizer are loaded as they will lie.
    """

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, **_: model  # it is parallel already: no DDP around it

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[Any]:
        return self.accelerator.autocast()  # bf16=True: accelerate would have put it around the model's forward

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        # With the number of tokens of all ranks the model's loss is already that of the whole batch. Trainer multiplies
        # it by the ranks, as DDP would divide by them. A loss that Trainer makes itself (label smoothing, a function
        # of one's own) is that of a rank's own rows, as under DDP.
        by_the_model = self.label_smoother is None and self.compute_loss_func is None
        if by_the_model and num_items_in_batch is not None and self.accelerator.num_processes > 1:
            if not self.args.average_tokens_across_devices:
                raise ValueError("average_tokens_across_devices=False counts each rank's own tokens; leave it True")
            num_items_in_batch = num_items_in_batch * self.accelerator.num_processes
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        weights = self.model.full_state_dict()  # every rank sends its pieces, rank 0 gets them
        if self.args.should_save:
            before = dict(vars(self.model.config))
            self._save(output_dir, state_dict=weights)
            vars(self.model.config).update(before)  # saving wrote the dtype into it; ranks have to have the same one

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        dcp.save(self._states(), checkpoint_id=Path(output_dir, "states"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            states = self._states()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
                dcp.load(states, checkpoint_id=Path(checkpoint, "states"))
            set_optimizer_state_dict(self.model, self.optimizer.optimizer, states["optimizer"])
            self.lr_scheduler.load_state_dict(states["schedule"])

    def _states(self) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(self.model, self.optimizer.optimizer)
        return {"optimizer": optimizer, "schedule": self.lr_scheduler.state_dict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8, help="updates")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and micro-batch")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in --out")
    parser.add_argument("--out", type=Path, default=Path("trainer-out"))
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = autopar.init_mesh(device)  # before TrainingArguments, which joins the processes that are there
    set_seed(SEED)
    whole = torch.zeros(args.batch * mesh.size(), SEQUENCE, dtype=torch.long)
    # num_items_in_batch: what Trainer passes along with each batch
    example = {"input_ids": whole, "labels": whole, "num_items_in_batch": torch.tensor(1.0)}
    with torch.autocast(device, torch.bfloat16, enabled=args.bf16):
        model = autopar.compile(gpt2(), mesh, inputs="local", example_kwargs=example)
    trainer = ParallelTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.out), use_cpu=device == "cpu", max_steps=args.steps, seed=SEED, bf16=args.bf16,
            per_device_train_batch_size=args.batch, per_device_eval_batch_size=args.batch,
            gradient_accumulation_steps=2, learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=2,
            logging_steps=1, eval_strategy="steps", eval_steps=4, save_steps=4, report_to=[], disable_tqdm=True,
            dataloader_drop_last=True,
        ),
        train_dataset=Bytes(0, SAMPLES),
        eval_dataset=Bytes(SAMPLES, SAMPLES + 16),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=args.resume)
    if trainer.is_world_process_zero():
        (args.out / "history.json").write_text(json.dumps(trainer.state.log_history))
    dist.destroy_process_group()


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=SEQUENCE,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class Bytes(Dataset[dict[str, Tensor]]):
    """This file, byte by byte, over and over: samples `first` to `last`. Some labels are left out, as padding is."""

    def __init__(self, first: int, last: int) -> None:
        text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
        text = text.repeat(math.ceil(last * SEQUENCE / len(text)))
        self.rows = text[first * SEQUENCE : last * SEQUENCE].view(-1, SEQUENCE)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.rows[index].clone()
        labels[SEQUENCE - index % 8 :] = -100
        return {"input_ids": self.rows[index], "labels": labels}


if __name__ == "__main__":
    main()
