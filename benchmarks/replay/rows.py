"""Published rows as values: what was run, what was measured, and where it is written."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, TypeVar

from autopar.ir.mesh import Mesh, parse_mesh
from benchmarks.replay.recompute import POLICIES
from cost_models.hardware import Hardware

USES = ("reported", "fit", "not modelled")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a row stands: link, date, the profile of its machine, and what has to be known of it."""

    url: str
    date: str
    hardware: str
    about: str


@dataclass(frozen=True)
class Row:
    """One published run; see the data file for the meaning of its fields."""

    name: str
    use: str
    source: Source
    model: str
    sequence: int
    local_batch: int
    mesh: Mesh
    recompute: str
    compile: bool
    float8: bool
    tokens_per_s: float
    memory_gib: float | None = None
    async_tp: bool = False
    why: str = ""

    def __post_init__(self) -> None:
        if self.use not in USES:
            raise ValueError(f"row {self.name}: use is {self.use!r}, must be one of {', '.join(USES)}")
        if (self.use == "not modelled") != bool(self.why):
            raise ValueError(f"row {self.name}: a row that is not modelled says why, and no other does")
        if self.use != "not modelled" and self.recompute not in POLICIES:
            raise ValueError(f"row {self.name} has something that is not modelled, but is {self.use}")

    @property
    def tensor_ranks(self) -> int:
        return self.mesh.size("tensor") if "tensor" in self.mesh.names else 1

    @property
    def kind(self) -> str:
        """What sets the run apart from most: rows of one kind are summed up together."""
        long = self.sequence > 2 * 8192
        words = {"long sequences": long, "float8": self.float8, "asynchronous tensor parallel": self.async_tp}
        return ", ".join(word for word, holds in words.items() if holds)

    @property
    def batch(self) -> int:
        """Sequences of one step, on all ranks together."""
        return self.local_batch * self.mesh.size("data")

    @property
    def tokens(self) -> int:
        """Tokens of one step, on all ranks together."""
        return self.batch * self.sequence

    def step_seconds(self, tokens_per_s: float) -> float:
        """Seconds of a step at so many tokens per second and GPU."""
        return self.tokens / (tokens_per_s * self.mesh.ranks)

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step, as published."""
        return self.step_seconds(self.tokens_per_s)


@dataclass(frozen=True)
class Table:
    """Every row of the data file, and the row that each machine is fitted on."""

    rows: tuple[Row, ...]
    sources: Mapping[str, Source]
    fitted_on: Mapping[str, Row]  # profile -> row

    def row(self, name: str) -> Row:
        return row_of(self.rows, name)


class Named(Protocol):
    """A row of a data file."""

    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Named)


def row_of(rows: Sequence[R], name: str) -> R:
    """The row of that name. Raises ValueError, which lists the names that there are."""
    found = next((row for row in rows if row.name == name), None)
    if found is None:
        raise ValueError(f"no row {name!r}; known rows: {', '.join(row.name for row in rows)}")
    return found


def machine(name: str) -> Hardware:
    """The profile of that name, from this folder or from those that come with autopar."""
    file = resources.files("benchmarks.replay") / f"{name}.toml"
    return Hardware.load(Path(str(file)) if file.is_file() else name)


def read(name: str = "torchtitan.toml") -> dict[str, Any]:
    return tomllib.loads((resources.files("benchmarks.replay") / name).read_text(encoding="utf-8"))


def torchtitan() -> Table:
    """The rows of `torchtitan.toml`."""
    document = read()
    sources = {name: Source(**entry) for name, entry in document["sources"].items()}
    rows = tuple(
        Row(name=name, **{**entry, "source": sources[entry["source"]], "mesh": parse_mesh(entry["mesh"])})
        for name, entry in document["rows"].items()
    )
    by_name = {row.name: row for row in rows}
    fitted_on = {profile: by_name[entry["row"]] for profile, entry in document["fitted"].items()}
    if sorted((row.source.hardware, row.name) for row in rows if row.use == "fit") != sorted(
        (profile, row.name) for profile, row in fitted_on.items()
    ):
        raise ValueError('[fitted] must name, for each machine, the one row with use = "fit"')
    return Table(rows, sources, fitted_on)
