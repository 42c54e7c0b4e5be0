"""Whether gloo keeps several collectives in flight without corrupting memory: plain torch, nothing of autopar.

    MALLOC_PERTURB_=165 torchrun --nproc-per-node 2 benchmarks/gloo_in_flight.py ag,ag,ag,ag,ag,rs 3000

Launches the named collectives (ag: all-gather, rs: reduce-scatter, ar: all-reduce, aa: all-to-all), waits for them from
the last to the first, and compares what they give. See docs/design/0018.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor

SIDE = 64
FUNCTIONS = torch.ops._c10d_functional


def launch(kind: str, x: Tensor, group: str) -> Tensor:
    match kind:
        case "ag":
            return FUNCTIONS.all_gather_into_tensor.default(x.clone(), 2, group)
        case "rs":
            return FUNCTIONS.reduce_scatter_tensor.default(x.clone(), "sum", 2, group)
        case "ar":
            return FUNCTIONS.all_reduce.default(x.clone(), "sum", group)
        case "aa":
            return FUNCTIONS.all_to_all_single.default(x.clone(), [SIDE // 2] * 2, [SIDE // 2] * 2, group)
        case _:
            raise SystemExit(f"no collective {kind!r}; known: ag, rs, ar, aa")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", help="with commas between")
    parser.add_argument("rounds", type=int)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, group, wrong = dist.get_rank(), dist.group.WORLD.group_name, 0
    torch.manual_seed(rank)
    wait = FUNCTIONS.wait_tensor.default
    mine = slice(rank * SIDE // 2, (rank + 1) * SIDE // 2)
    for _ in range(args.rounds):
        sent = [(kind, torch.randn(SIDE, SIDE)) for kind in args.kinds.split(",")]
        flying = [(kind, x, launch(kind, x, group)) for kind, x in sent]
        for kind, x, launched in reversed(flying):
            found = wait(launched)
            if kind == "ag":
                wrong += not torch.equal(found[rank * SIDE : (rank + 1) * SIDE], x)
            elif kind in ("ar", "rs"):
                whole = wait(launch("ar", x, group))
                wrong += not torch.equal(found, whole if kind == "ar" else whole[mine])
    print(f"rank {rank}: {wrong} wrong results", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
