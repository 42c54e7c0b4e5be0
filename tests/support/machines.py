"""Hardware for tests: no latency, so that bytes and flops alone decide, and links as fast as a test wants them."""

from __future__ import annotations

from cost_models.hardware import Hardware, HostLink, Link, Tier

LEAST = 1e-10  # the smallest latency that a profile may have


def machine(link: float = 1e12, *, flops: float = 1e12, memory: float = 1e12) -> Hardware:
    """Links of `link` bytes/s, `flops` per second in any unit and precision, device memory of `memory` bytes/s."""
    name = f"test-{link:g}-{flops:g}-{memory:g}"
    rates = dict.fromkeys(("float64", "float32", "bfloat16", "float16"), flops)
    tier, wire = Tier(10**15, memory), Link(LEAST, link)
    tiers, links = {"hbm": tier, "host": tier}, {"intra": wire, "inter": wire}
    return Hardware(name, 64, LEAST, flops, rates, tiers, links, HostLink(link, link))


FAST = machine()  # splitting always pays: a rank reads another's memory as fast as its own
SLOW = machine(1e10)  # weights are worth keeping whole as long as they fit
WIRES = machine(1e9, flops=1e15, memory=1e15)  # only what is sent costs anything
