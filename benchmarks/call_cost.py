"""What a call of a parallel module costs beside its program: `python -m benchmarks.call_cost`.

On one process, of a GPT-2 with 148 parameters: microseconds to read the call, to find its program again and to compare
what it was traced with (the guards), to gather what the program reads, and to announce a step (a forward and its
backward) to other ranks; and a step's forward, its backward and the optimizer beside those of the plain module, whose
kernels have nearly nothing to do. That is what the host of a GPU works while it launches.
Processor time of one thread, so that other work on the machine counts little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.attach.invoke import parameters_of
from autopar.attach.module import call_of
from autopar.attach.programs import Key, found
from autopar.trace.ambient import ambient_state

ROUNDS, CALLS = 15, 100


def microseconds(work: Callable[[], object], calls: int = CALLS) -> float:
    """Of one call: the median of rounds."""
    times: list[float] = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        for _ in range(calls):
            work()
        times.append((time.process_time() - begin) / calls * 1e6)
    return median(times)


def works_of(model: nn.Module, kwargs: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    """What is timed of a model: name -> work."""

    def step() -> None:
        model.zero_grad()
        model(**kwargs).loss.backward()

    step()
    optimizers = {kind: torch.optim.AdamW(model.parameters(), 1e-4, **{kind: True}) for kind in ("foreach", "fused")}
    updates = {f"AdamW, {kind}": one.step for kind, one in optimizers.items()}
    return {"forward": lambda: model(**kwargs), "forward, backward": step, **updates}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # attention that drops has a kernel on a GPU, and on a CPU none
    config = GPT2Config(n_layer=12, n_embd=64, n_head=2, vocab_size=256, n_positions=64, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, 256, (2, 16))
    mesh = autopar.init_mesh("cpu", data=1)
    parallel = autopar.compile(model, mesh)  # with an example its parameters on one rank would be plain tensors
    parallel(input_ids=ids, labels=ids)
    state, kwargs = parallel._autopar, {"input_ids": ids, "labels": ids}
    call = call_of(parallel, (), kwargs)
    key = Key(call.key, True, ambient_state())
    prepared = found(state, key)
    assert prepared is not None
    guards = prepared.guards
    print(f"parameters {len([*model.parameters()])}, guarded places {len(guards.fixed) + len(guards.changing)}")
    print(f"read the call          {microseconds(lambda: call_of(parallel, (), kwargs)):8.1f} us")
    print(f"find it, guards        {microseconds(lambda: found(state, key)):8.1f} us")
    print(f"gather parameters      {microseconds(lambda: parameters_of(prepared)):8.1f} us")

    def announced() -> None:
        for _ in range(2):
            with state.watch.call(prepared.told):
                pass

    print(f"announce a step        {microseconds(announced):8.1f} us, and each second")
    print(f"  tell where it is     {microseconds(lambda: state.watch._calls.report(1, None, ()).dumps()):8.1f} us")
    print("of a step              plain  parallel")
    works = [works_of(one, kwargs) for one in (model, parallel)]
    for name in works[0]:
        plain_us, parallel_us = (microseconds(one[name], 5) for one in works)
        print(f"{name:18}  {plain_us:8.1f}  {parallel_us:8.1f} us, {parallel_us / plain_us:.2f} times")


if __name__ == "__main__":
    main()
