"""A solver for assignment problems with pairwise costs and memory limits; numbers in, numbers out.

problem = Problem(costs, edges, usages, limits={"hbm": 80e9})
solution = solve(problem)
"""

from solver.backends import BACKENDS
from solver.driver import solve
from solver.presolve import REDUCTIONS
from solver.problem import Edge, EdgeUsage, Problem, Usage
from solver.referee import Evaluation, evaluate, tenants
from solver.solution import BackendError, Explanation, Shortage, Solution

__all__ = [
    "BACKENDS",
    "REDUCTIONS",
    "BackendError",
    "Edge",
    "EdgeUsage",
    "Evaluation",
    "Explanation",
    "Problem",
    "Shortage",
    "Solution",
    "Usage",
    "evaluate",
    "solve",
    "tenants",
]
