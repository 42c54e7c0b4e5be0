"""The plan as one meets it: a value with a file, a text and a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from autopar.ir.outside import Rules
from autopar.plan import store
from autopar.plan.dot import to_dot
from autopar.plan.explain import explain
from autopar.plan.glance import to_fragment
from autopar.plan.value import PlanValue
from autopar.rules.outside import given


class Plan(PlanValue):
    """Every decision, with what was predicted of it: see `PlanValue` for its parts. How its step is simulated, as a
    trace for a viewer, `autopar.simulate.timeline.to_trace` writes; all of it as one page, `autopar.page.write_html`.
    """

    def save(self, path: str | Path) -> None:
        """Write as JSON: to a temporary file first, then renamed, so that no half plan is ever seen."""
        store.save(self, Path(path))

    @staticmethod
    def load(path: str | Path, rules: Rules | Iterable[Rules] | None = None) -> Plan:
        """Read and check. `rules`: those of users' packages that it was made with. Raises PlanMismatch where the file
        is cut short, edited, of another version or made with other rules, and OSError where there is no file to be
        read.
        """
        return store.load(Path(path), Plan, given(rules))

    @staticmethod
    def loads(text: str, origin: str, rules: Rules | Iterable[Rules] | None = None) -> Plan:
        """The plan in the text of such a file. `origin` names it in errors: a path, or the rank that sent it."""
        return store.loads(text, origin, Plan, given(rules))

    def to_dot(self) -> str:
        """The plan as a Graphviz graph; see `autopar.plan.dot`."""
        return to_dot(self)

    def explain(self) -> str:
        """The plan as one screen of text; see `autopar.plan.explain`."""
        return explain(self)

    def _repr_html_(self) -> str:
        """What a notebook shows; the whole page is made by `autopar.page.to_html`."""
        return to_fragment(self)
