"""Find a plan: from Python (`search`), or on the command line (`python -m autopar.search`)."""

from autopar.search.limits import size
from autopar.search.search import Question, answer, ask, search

__all__ = ["Question", "answer", "ask", "search", "size"]
