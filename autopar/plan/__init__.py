"""Plans: the decision as a value, its file, its text and its picture."""

from autopar.plan.plan import Choice, Delivery, Plan, PlanMismatch, read_once

__all__ = ["Choice", "Delivery", "Plan", "PlanMismatch", "read_once"]
