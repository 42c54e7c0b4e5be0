"""The errors that a user meets, each one sentence: what, how much, why, and what to do next."""

from __future__ import annotations


class TraceError(RuntimeError):
    """The model could not be captured as one graph; the message names the line of the model."""


class PlanMismatch(ValueError):
    """A plan does not fit the model, the inputs, the mesh or this version; the message says which part differs."""


class CheckFailed(ValueError):
    """What the model's forward checks of its values does not hold; the message names the line of the model."""


class Infeasible(RuntimeError):
    """No plan fits: the message names the least memory that would do, the instant of the peak and the largest tenants.

    With `enough` bytes there is a plan, which a search finds if it has the time; with less than `at_least` bytes none
    does, however long it takes. None: not known. A search counts on the safe side, as it does not know yet which
    layouts will be changed (`autopar.assemble.liveness`), so a plan may turn out to take a little less than either.
    """

    def __init__(self, message: str, at_least: float | None = None, enough: float | None = None) -> None:
        super().__init__(message)
        self.at_least, self.enough = at_least, enough


class NoAnswerInTime(RuntimeError):
    """The time limit passed before any plan was found."""


class NotCut(ValueError):
    """The step of this model cannot run in so many micro-batches; the message says which line keeps it from that."""


class BadArgument(ValueError):
    """The command line cannot be followed; the message is one sentence for the user."""
