"""Plans: the decision as a value, its file, its text and its picture."""

from autopar.plan.plan import RESIDENCES, Candidate, Choice, Delivery, Plan, PlanMismatch, read_once

__all__ = ["RESIDENCES", "Candidate", "Choice", "Delivery", "Plan", "PlanMismatch", "read_once"]
