"""Containers that forward writes to hold on each rank what the plain model puts there."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.attach.test_written_containers import FORMS, ROWS, Net, appended, given, new_entries, table, train_alike
from tests.processes.compare import near
from tests.processes.worker import Ranks

OF_ROWS = [new_entries, appended]


def check_whole_batches(ranks: Ranks) -> None:
    for form, make in FORMS.items():
        plain = Net(form).double()
        parallel = autopar.compile(copy.deepcopy(plain), ranks.mesh())
        for number in range(2):
            train_alike(plain, parallel, make, number)


def check_rows_of_each_rank(ranks: Ranks) -> None:
    """Each rank's own batch has its own rows."""
    count = ROWS // ranks.count
    own = slice(count * ranks.rank, count * (ranks.rank + 1))
    for form in OF_ROWS:
        plain = Net(form).double()
        parallel = autopar.compile(copy.deepcopy(plain), ranks.mesh(), inputs="local")
        for number in range(2):
            (x, y), mine = given(number), [one[own].clone() for one in given(number)]
            wanted, ours = table(x, y, number), table(mine[0], mine[1], number)
            plain(wanted)
            parallel(ours)
            assert [*ours] == [*wanted] and ours["x"] is mine[0]
            for key in {"h", "logits"} & wanted.keys():
                near(ours[key], wanted[key][own], 1e-12, key)
            for place, one in enumerate(wanted["list"]):
                near(ours["list"][place], one[own], 1e-12, f"list {place}")


def check_in_stages_and_micro_batches(ranks: Ranks) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, batch: dict[str, Any]) -> Tensor:
            x = batch["x"]
            for number, layer in enumerate(self.layers):
                x = batch[f"h{number}"] = layer(x).tanh()
            batch["loss"] = (x * batch.pop("y").unsqueeze(-1)).square().mean()
            return batch["loss"]

    plain = Deep().double()
    stages = init_device_mesh("cpu", (ranks.count,), mesh_dim_names=("pipe",))
    for mesh in (ranks.mesh(), stages):
        parallel = autopar.compile(copy.deepcopy(plain), mesh, micro_batches=2)
        for number in range(2):
            train_alike(plain, parallel, lambda x, y, number: {"x": x, "y": y}, number)
