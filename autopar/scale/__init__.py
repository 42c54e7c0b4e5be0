"""How a plan scales: its closed forms, and what becomes of it at other sizes (`python -m autopar.scale plan.json`)."""

from autopar.scale.elsewhere import DoesNotSplit, graph_at, plan_at
from autopar.scale.forms import OperatorForms, Totals, Work, operator_forms, totals
from autopar.scale.grow import growth_of, growth_where_possible
from autopar.scale.growth import CannotGrow, Growth, usual_sources

__all__ = [
    "CannotGrow",
    "DoesNotSplit",
    "Growth",
    "OperatorForms",
    "Totals",
    "Work",
    "graph_at",
    "growth_of",
    "growth_where_possible",
    "operator_forms",
    "plan_at",
    "totals",
    "usual_sources",
]
