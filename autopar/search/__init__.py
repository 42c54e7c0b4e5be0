"""Find a plan: from Python (`search`), or on the command line (`python -m autopar.search`)."""

from autopar.search.limits import size
from autopar.search.request import Request
from autopar.search.search import Question, answer, ask, search

__all__ = ["Question", "Request", "answer", "ask", "search", "size"]
