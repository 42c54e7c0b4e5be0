"""A script as a user writes it, for torchrun."""

import os

import torch
import torch.distributed as dist
from torch import nn

import autopar


def main() -> None:
    try:
        autopar.init_mesh("cpu", data=2, tensor=3)
    except ValueError as error:
        assert "has 6 ranks, but 2 processes run" in str(error)
    else:
        raise AssertionError("a mesh of 6 on 2 processes")
    mesh = autopar.init_mesh("cpu", data=2)
    torch.manual_seed(int(os.environ["RANK"]))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    parallel = autopar.compile(model, mesh)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    x = torch.linspace(-1, 1, 64).reshape(8, 8)
    losses: list[float] = []
    for _ in range(20):
        loss = (parallel(x) - x[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses
    everyone: list[object] = [None, None]
    dist.all_gather_object(everyone, losses)
    assert everyone[0] == everyone[1], "ranks disagree"
    print("trained and agreed", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
