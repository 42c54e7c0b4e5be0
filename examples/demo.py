"""See autopar work: train a small GPT-2 on 2 processes, and check that it learns exactly what one process learns.

    python examples/demo.py                                    # starts 2 processes on this machine's CPU; 2 minutes
    python examples/demo.py --long                             # 200 steps in the place of 25
    torchrun --nproc-per-node 4 examples/demo.py --steps 50    # or uses those that torchrun started

A GPT-2 of 10.8 million parameters, with random weights, reads the source of Python's standard library, byte by byte.
autopar traces it, searches for the fastest way to train it on the processes at hand, and runs what it found. Then the
plain model is trained on one process, from the same weights, on the same batches; the losses must agree. Nothing is
downloaded. Dropout is off, as two runs that drop different values cannot be compared.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo_report import History, compare, draw, relative, say, write_losses

if TYPE_CHECKING:  # the process that only starts others does not wait for torch
    from torch import Tensor, nn

SEED = 0
BATCH, SEQUENCE = 8, 64  # of all processes together
STEPS, LONG = 25, 200
LEARNING_RATE, WARMUP, CLIP_NORM = 3e-4, 20, 1.0
PROMPT, SAMPLE_BYTES = b"    def __init__(self", 160


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, help=f"training steps of each run (default: {STEPS}; --long: {LONG})")
    parser.add_argument("--long", action="store_true", help=f"the long comparison, of {LONG} steps")
    parser.add_argument("--processes", type=int, default=2, help="processes to start (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where results go (default: %(default)s)")
    parser.add_argument("--hardware", help="the machine to plan for: a profile's name or file (default: cpu-gloo)")
    parser.add_argument("--memory", help="memory that each process may use, such as 100MiB (default: what is free)")
    args = parser.parse_args()
    if args.steps is None:
        args.steps = LONG if args.long else STEPS
    if args.steps < 1 or args.processes < 1:
        parser.error("--steps and --processes must be at least 1")
    return work(args) if "RANK" in os.environ else launch(args.processes)


# --- processes -------------------------------------------------------------------------------------------------------


def launch(processes: int) -> int:
    """Run this file once per rank, as `torchrun --nproc-per-node` does; the first failure, or Ctrl-C, ends all."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    shared = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    print(f"starting {processes} processes; each loads torch and transformers first", flush=True)
    command = [sys.executable, *sys.argv]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    try:
        while None in [rank.poll() for rank in ranks]:
            if failed := next((rank.returncode for rank in ranks if rank.returncode), 0):
                grace = time.monotonic() + 5  # the others have the same trouble: let them say so
                while None in [rank.poll() for rank in ranks] and time.monotonic() < grace:
                    time.sleep(0.1)
                return failed
            time.sleep(0.1)
        return next((rank.returncode for rank in ranks if rank.returncode), 0)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    finally:
        for rank in ranks:
            rank.terminate()
        for rank in ranks:
            rank.wait()


def work(args: argparse.Namespace) -> int:
    """One rank. Returns the exit status."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the starting process, which ends this one
    try:
        import torch.distributed as dist
        import transformers

        import autopar  # noqa: F401
    except ImportError as error:
        if os.environ["RANK"] == "0":
            print(f"{error}; install what the demo needs: pip install -e '.[demo]'", file=sys.stderr)
        return 1
    transformers.logging.set_verbosity_error()
    try:
        return demo(args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# --- the demo --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """What training on all processes came to: `loss` on a batch that was held out."""

    plan: Any
    history: History
    held_out: Tensor
    loss: float


def demo(args: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    import autopar

    began = time.perf_counter()
    torch.set_num_threads(1)
    mesh = autopar.init_mesh("cpu", ranks=int(os.environ["WORLD_SIZE"]))

    text, origin = read_text()
    model = gpt2()
    count = sum(parameter.numel() for parameter in model.parameters())
    say(f"GPT-2, {count / 1e6:.1f} million parameters, float32, on {mesh.size()} processes of one thread each")
    say(f"text: {len(text) / 1e6:.1f} MB, {origin}; one token per byte; {BATCH} x {SEQUENCE} tokens a step")

    # From here on `parallel` is used as `model` would be: the same calls, the same optimizers, the same names.
    parallel = parallelised(model, mesh, text, args)
    if parallel is None:
        return 3

    say(f"\n--- training on {mesh.size()} processes, {args.steps} steps\n")
    history, optimizer = train(parallel, text, args.steps)
    held_out = next(batches(text, held_out=True))
    with torch.no_grad():
        loss = parallel.eval()(**as_inputs(held_out)).loss.item()
    save(parallel, optimizer, args.out, args.hardware)

    if dist.get_rank() > 0:
        dist.barrier()  # the rest is for one process; this one waits
        return 0
    agrees = learns_the_same(model, text, Trained(parallel.plan, history, held_out, loss), args)
    say(f"\n--- written to {args.out.resolve()}\n")
    for path in sorted(args.out.iterdir()):
        if path.name in WRITTEN:
            say(f"    {path.name:<12} {WRITTEN[path.name]}")
    more = "" if args.steps >= LONG else f"; --long (make demo ARGS=--long) trains for {LONG} steps"
    say(f"\n{time.perf_counter() - began:.0f} s in all{more}")
    dist.barrier()
    return 0 if agrees else 1


def parallelised(model: nn.Module, mesh: Any, text: Tensor, args: argparse.Namespace) -> Any:
    """What autopar makes of the model; None where rank 0 has said why there is no plan."""
    import torch.distributed as dist

    import autopar

    say("tracing it, and searching for the fastest way to train it here ...")
    started = time.perf_counter()
    example = next(batches(text))
    try:
        parallel = autopar.compile(
            model, mesh, example_kwargs=as_inputs(example), hardware=args.hardware, memory=args.memory
        )
    except (autopar.Infeasible, autopar.NoAnswerInTime, ValueError) as error:
        say(f"\nno plan: {error}")
        return None
    except RuntimeError:
        if dist.get_rank() == 0:
            raise
        return None  # rank 0 says what is wrong
    say(f"\n--- the plan, found in {time.perf_counter() - started:.1f} s\n")
    say(parallel.plan.explain())
    return parallel


def learns_the_same(model: nn.Module, text: Tensor, ours: Trained, args: argparse.Namespace) -> bool:
    """Train the model on this one process, load what all have saved, and say whether the losses agree."""
    say("\n--- the same on one process, in plain PyTorch\n")
    alone, _ = train(model, text, args.steps, beside=ours.history)
    trained = gpt2()
    loaded = load(trained, args.out, ours.held_out)
    agrees = compare(ours.history, alone, (ours.loss, *loaded), ours.plan, args.hardware is None)
    say(f"\n--- what it writes after {PROMPT.decode().strip()!r}, {args.steps} steps young\n")
    say(sample(trained, PROMPT, SAMPLE_BYTES))
    write_losses(args.out / "losses.csv", ours.history, alone)
    draw(args.out / "loss.png", ours.history, alone, int(os.environ["WORLD_SIZE"]))
    return agrees


WRITTEN = {
    "plan.json": "the plan: autopar.compile(model, mesh, plan='plan.json') runs it without a search",
    "plan.html": "the plan as a page for a browser: its modules, the step over time, memory",
    "plan.dot": "its picture: dot -Tsvg plan.dot -o plan.svg",
    "loss.png": "both loss curves, and their difference",
    "losses.csv": "the numbers behind them",
    "checkpoint": "weights and optimizer, by torch.distributed.checkpoint",
    "model.pt": "the weights alone, which the plain model loads",
}


def gpt2() -> nn.Module:
    """The model, with the same random weights at every call."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(SEED)
    config = GPT2Config(
        n_layer=6, n_embd=384, n_head=6, vocab_size=256, n_positions=SEQUENCE,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def read_text() -> tuple[Tensor, str]:
    """Real text that every machine has, and where it is from."""
    import torch

    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8), f"{folder}/*.py"


def batches(text: Tensor, held_out: bool = False) -> Iterator[Tensor]:
    """Random pieces of the text, the same ones at every call; held out is its last tenth."""
    import torch

    split = len(text) * 9 // 10
    part = text[split:] if held_out else text[:split]
    generator = torch.Generator().manual_seed(SEED)
    while True:
        starts = torch.randint(0, len(part) - SEQUENCE, (BATCH,), generator=generator)
        yield torch.stack([part[start : start + SEQUENCE] for start in starts.tolist()]).long()


def as_inputs(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "labels": ids}


# --- training --------------------------------------------------------------------------------------------------------


def train(module: nn.Module, text: Tensor, steps: int, beside: History | None = None) -> tuple[History, Any]:
    """An ordinary training loop. It does not know whether `module` is plain or parallel."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARMUP) * (1 - step / steps)
    )
    history, every = History(), max(1, steps // 10)
    say("    step      loss  tokens/s" + ("  difference" if beside else ""))
    for step, ids in zip(range(1, steps + 1), batches(text), strict=False):
        started = time.perf_counter()
        loss = module(**as_inputs(ids)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        history.losses.append(loss.item())
        history.seconds.append(time.perf_counter() - started)
        if step == 1 or step % every == 0 or step == steps:
            speed = BATCH * SEQUENCE / statistics.median(history.seconds[-every:])
            difference = f"  {relative(history, beside)[-1]:10.1e}" if beside else ""
            say(f"    {step:4}  {history.losses[-1]:8.5f}  {speed:8,.0f}{difference}")
    return history, optimizer


# --- saving and loading ----------------------------------------------------------------------------------------------


def save(parallel: Any, optimizer: Any, out: Path, hardware: str | None) -> None:
    """The plan, by one rank; what was learned by all, twice: each rank its own part, with the optimizer; and the whole
    weights in one file.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

    from autopar.machine.device import hardware_or_here
    from autopar.page import write_html

    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        parallel.plan.save(out / "plan.json")
        (out / "plan.dot").write_text(parallel.plan.to_dot())
        write_html(parallel.plan, out / "plan.html", hardware_or_here(hardware, "cpu"), model="GPT-2 of the demo")
    dist.barrier()
    weights, optimizer_state = get_state_dict(parallel, optimizer)
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # of the run before
    dcp.save({"model": weights, "optimizer": optimizer_state}, checkpoint_id=out / "checkpoint")
    whole = get_model_state_dict(parallel, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save(whole, out / "model.pt")


def load(plain: nn.Module, out: Path, held_out: Tensor) -> tuple[float, float]:
    """Load each of the two into a plain model, on one process; the held-out loss it then has."""
    import torch
    import torch.distributed.checkpoint as dcp

    def held_out_loss() -> float:
        with torch.no_grad():
            return plain.eval()(**as_inputs(held_out)).loss.item()

    plain.load_state_dict(torch.load(out / "model.pt", weights_only=True))
    from_file = held_out_loss()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    weights = plain.state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")  # it is
        dcp.load({"model": weights}, checkpoint_id=out / "checkpoint", no_dist=True)
    plain.load_state_dict(weights)
    return from_file, held_out_loss()


# --- the end ---------------------------------------------------------------------------------------------------------


def sample(model: nn.Module, prompt: bytes, count: int) -> str:
    """`count` bytes drawn from the model after `prompt`."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        for _ in range(count):
            logits = model(input_ids=ids[:, -SEQUENCE:]).logits[0, -1] / 0.7
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, drawn[None]], dim=1)
    text = bytes(ids[0].tolist()).decode("utf-8", "replace")
    return "\n".join(("    | " + line).rstrip() for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
