"""What becomes of the forward values that backward reads: saved, recomputed, or offloaded to the host and fetched back.

regions    which values are recomputed together: layers, or stretches of what lies between them
widen      a graph in which every such value comes back as a node of backward: what a search decides on
once       graphs in which a weight that is gathered is kept for backward, or to its end
narrow     the graph that runs, once it is decided; and back to the graph that was traced
"""

from __future__ import annotations

from autopar.rewrite.apply_choices import narrowed, plain
from autopar.rewrite.expose_choices import DROP, MODES, OFFLOAD, RECOMPUTE, SAVE, Again, Widened, widened
from autopar.rewrite.gather_once import gathered_once, is_gathered_once, kept_whole

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
