"""What becomes of the forward values that backward reads: saved, recomputed, or offloaded to the host and fetched back.

regions    which values are recomputed together: layers, or stretches of what lies between them
widen      a graph in which every such value comes back as a node of backward: what a search decides on
once       graphs in which a weight that is gathered is kept for backward, or to its end
narrow     the graph that runs, once it is decided; and back to the graph that was traced
"""

from __future__ import annotations

from autopar.saving.narrow import narrowed, plain
from autopar.saving.once import gathered_once, is_gathered_once, kept_whole
from autopar.saving.widen import DROP, MODES, OFFLOAD, RECOMPUTE, SAVE, Again, Widened, widened

__all__ = [
    "DROP",
    "MODES",
    "OFFLOAD",
    "RECOMPUTE",
    "SAVE",
    "Again",
    "Widened",
    "gathered_once",
    "is_gathered_once",
    "kept_whole",
    "narrowed",
    "plain",
    "widened",
]
