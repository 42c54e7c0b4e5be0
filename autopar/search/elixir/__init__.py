"""Elixir's search as a baseline: one chunk size, blocks that cache chunks on the GPU, and who lives on the host.

Elixir, arXiv 2212.05339. Numbers in, numbers out: neither operators nor time, which is what autopar adds. Only
`placing` knows graphs: it asks the search about a traced model, for the policy `elixir`.
"""

from autopar.search.elixir.belady import move_count
from autopar.search.elixir.chunks import DoesNotFit, Parameter
from autopar.search.elixir.residence import AUTHORS_MACHINE, Gains, MachineRates, Training, gains
from autopar.search.elixir.search import Chunk, ElixirPlan, elixir_search

__all__ = [
    "AUTHORS_MACHINE",
    "Chunk",
    "DoesNotFit",
    "ElixirPlan",
    "Gains",
    "MachineRates",
    "Parameter",
    "Training",
    "elixir_search",
    "gains",
    "move_count",
]
