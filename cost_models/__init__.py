"""Hardware and steps: what one rank does, what a machine can do, how long it takes. No torch, no solver."""

from cost_models.curves import Curve
from cost_models.hardware import Hardware, HostLink, Link, Tier, known_hardware
from cost_models.price import link_of, links_of, seconds, stream_of
from cost_models.steps import COLLECTIVES, Collective, Comm, Compute, Loop, Move, Step, received_bytes

__all__ = [
    "COLLECTIVES",
    "Collective",
    "Comm",
    "Compute",
    "Curve",
    "Hardware",
    "HostLink",
    "Link",
    "Loop",
    "Move",
    "Step",
    "Tier",
    "known_hardware",
    "link_of",
    "links_of",
    "received_bytes",
    "seconds",
    "stream_of",
]
