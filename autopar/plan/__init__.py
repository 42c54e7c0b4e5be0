"""Plans: the decision as a value, its file, its text and its picture."""

from autopar.plan.plan import Candidate, Choice, Delivery, Plan, PlanMismatch, read_once

__all__ = ["Candidate", "Choice", "Delivery", "Plan", "PlanMismatch", "read_once"]
