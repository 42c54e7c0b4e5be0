"""A model in the script that trains it: the script's variables are none of the model's, unless it reads them."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

SCRIPT = """
import torch
from torch import nn
import autopar

class Helper:
    def scaled(self, x):
        return x * FACTOR

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.helper = Helper()
        self.x, self.loss, self.step = nn.Linear(4, 4), nn.MSELoss(), 2.0

    def out(self, x):
        return self.helper.scaled([self.x(one) for one in (x,)][0] * self.step)

    def forward(self, x, y):
        return self.loss(self.out(x), y)

torch.manual_seed(0)
net = Net()
plain = Net()
plain.load_state_dict(net.state_dict())
parallel = autopar.compile(net, mesh)
losses, loss, out, x = [], 0.0, [], 1
for step in range(4):
    rate = 1.0 + step
    x, y = torch.randn(2, 3, 4)
    loss, wanted = parallel(x, y), plain(x, y)
    loss.backward()
    out = [loss.item(), step]
    losses.append((loss.item(), wanted.item()))
"""


@pytest.mark.filterwarnings("ignore:the model is traced and planned for the 4th time")
@pytest.mark.parametrize("reads", [False, True])
def test_variables_are_called_as_attributes_are(one: DeviceMesh, reads: bool) -> None:
    script: dict[str, Any] = {"__name__": "script", "mesh": one}
    exec(compile(SCRIPT.replace("FACTOR", "rate" if reads else "1.0"), "script.py", "exec"), script)
    assert all(ours == pytest.approx(theirs, rel=1e-6) for ours, theirs in script["losses"])
    programs = sum(map(len, script["parallel"]._autopar.programs.values()))
    assert programs == (4 if reads else 1)
