"""Lower: a plan becomes one program, the list of everything that one rank does in a step."""

from autopar.lower.lower import Lowering, lower
from autopar.lower.program import Program

__all__ = ["Lowering", "Program", "lower"]
