"""The list of benchmarks has all that can be run, and says of each what it is."""

from __future__ import annotations

import importlib.util

from benchmarks.__main__ import commands


def test_every_benchmark_is_listed_and_can_be_found() -> None:
    found = commands()
    assert {"benchmarks.replay", "benchmarks.outside", "benchmarks.faults", "benchmarks.opt_30b"} <= found.keys()
    for name, about in found.items():
        assert importlib.util.find_spec(name) is not None and len(about) > 20, name
