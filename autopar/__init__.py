"""autopar: an automatic parallelization compiler for PyTorch.

mesh = autopar.init_mesh("cuda", data=8, tensor=8)
parallel = autopar.compile(model, mesh)
loss = parallel(ids, labels=labels)     # means what model(ids, labels=labels) means
loss.backward()
"""

from autopar import optim
from autopar._version import __version__
from autopar.attach.module import ParallelModule
from autopar.compile import compile
from autopar.emit.check_rule import check_rule
from autopar.errors import CheckFailed, Infeasible, NoAnswerInTime, PlanMismatch, TraceError
from autopar.ir.outside import OperatorRule, Rules
from autopar.machine.device import Devices, init_mesh
from autopar.plan import Plan
from autopar.search.pipeline import Pipeline

__all__ = [
    "CheckFailed",
    "Devices",
    "Infeasible",
    "NoAnswerInTime",
    "OperatorRule",
    "ParallelModule",
    "Pipeline",
    "Plan",
    "PlanMismatch",
    "Rules",
    "TraceError",
    "__version__",
    "check_rule",
    "compile",
    "init_mesh",
    "optim",
]
