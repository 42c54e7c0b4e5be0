"""A solver for assignment problems with pairwise costs and memory limits; numbers in, numbers out.

problem = Problem(costs, edges, usages, limits={"hbm": 80e9})
solution = solve(problem)

And one for another problem, cutting a chain of layers into pipeline stages.

problem = PipelineProblem(stages, groups=(1, 2, 4), devices=8, micro_batches=16, send_s=send_s, limit_bytes=80e9)
solution = cut_pipeline(problem)
"""

from solver.backends import BACKENDS
from solver.cut import cut, inside
from solver.cutting import PipelineSolution, cut_pipeline
from solver.driver import solve
from solver.pipeline import (
    PipelineCost,
    PipelineProblem,
    Stage,
    StageOption,
    StageTable,
    Value,
    additive_stages,
    chain_cuts,
    pipeline_cost,
    stage_table,
)
from solver.presolve import REDUCTIONS
from solver.problem import Edge, EdgeUsage, Index, Problem, Usage
from solver.referee import Evaluation, evaluate, tenants
from solver.solution import BackendError, Explanation, Prices, Shortage, Solution

__all__ = [
    "BACKENDS",
    "REDUCTIONS",
    "BackendError",
    "Edge",
    "EdgeUsage",
    "Evaluation",
    "Explanation",
    "Index",
    "PipelineCost",
    "PipelineProblem",
    "PipelineSolution",
    "Prices",
    "Problem",
    "Shortage",
    "Solution",
    "Stage",
    "StageOption",
    "StageTable",
    "Usage",
    "Value",
    "additive_stages",
    "chain_cuts",
    "cut",
    "cut_pipeline",
    "evaluate",
    "inside",
    "pipeline_cost",
    "solve",
    "stage_table",
    "tenants",
]
