"""Plans: the decision as a value, its file, its text and its picture."""

from autopar.plan.plan import Plan
from autopar.plan.value import RESIDENCES, Candidate, Choice, Delivery, read_once

__all__ = ["RESIDENCES", "Candidate", "Choice", "Delivery", "Plan", "read_once"]
