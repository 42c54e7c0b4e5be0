"""A step in stages as one meets it: a value with a file and a text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from autopar.ir.outside import Rules
from autopar.rules.outside import given
from autopar.search import pipeline_file
from autopar.search.pipeline_told import explain
from autopar.search.pipeline_value import PipelineValue


class Pipeline(PipelineValue):
    """Every decision of a step in pipeline stages, with what was predicted of it: see `PipelineValue` for its parts.
    `python -m autopar.search --mesh pipe=4,... -o FILE` writes one, and `autopar.compile(plan=)` runs it.
    """

    def save(self, path: str | Path) -> None:
        """Write as JSON: to a temporary file first, then renamed, so that no half pipeline is ever seen."""
        pipeline_file.save(self, path)

    @staticmethod
    def load(path: str | Path, rules: Rules | Iterable[Rules] | None = None) -> Pipeline:
        """Read and check. `rules`: those of users' packages that it was made with. Raises PlanMismatch where the file
        is cut short, edited, of another version or inconsistent, and OSError where there is no file to be read.
        """
        return pipeline_file.load(path, Pipeline, given(rules))

    @staticmethod
    def loads(text: str, origin: str, rules: Rules | Iterable[Rules] | None = None) -> Pipeline:
        """The pipeline in the text of such a file. `origin` names it in errors: a path, or the rank that sent it."""
        return pipeline_file.loads(text, origin, Pipeline, given(rules))

    def dumps(self) -> str:
        """The text of its file: the same for the same pipeline, in any process."""
        return pipeline_file.dumps(self)

    def explain(self) -> str:
        """What it is and takes, and a line for each stage."""
        return explain(self)
