"""Pipelines small enough to try every cut, one large one, and slow and plain ways to price them."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np

from solver import PipelineProblem, StageTable, additive_stages


def random_pipeline(seed, layers=None, devices=None, options=None, whole=True):
    """1 to 6 layers on 1 to 4 devices, options of several times and bytes, some forbidden, limits that bind or forbid.

    Whole numbers, so that sums are exact and many cuts cost the same; or not, where `whole` is False.
    """
    rng = np.random.default_rng(seed)
    layers = layers or int(rng.choice([1, 2, 3, 4, 5, 6], p=[0.04, 0.06, 0.15, 0.25, 0.25, 0.25]))
    devices = devices or int(rng.choice([1, 2, 3, 4], p=[0.05, 0.15, 0.3, 0.5]))
    options = options or int(rng.integers(1, 4))
    groups = tuple(int(n) for n in rng.permutation([2, 3, 4])[: rng.integers(0, 3)])
    groups = groups if groups and rng.random() < 0.15 else (*groups, 1)
    shape = (layers, layers, len(groups), options)
    first, last, group = np.ogrid[:layers, :layers, : len(groups)]
    length = (np.abs(last - first) + 1.0)[..., None]
    share = np.array(groups)[group][..., None]

    def draw(low, high, size=shape):
        return rng.integers(low, high, size).astype(float) if whole else rng.uniform(low, high, size)

    # of each: what differs at random, and what grows with the layers and falls with the devices, mixed anew each time
    seconds = draw(1, 9) + np.ceil(rng.choice([0, 8, 25]) * length / share ** rng.choice([0.0, 0.5, 1.0]))
    fixed = draw(0, 12) + np.ceil(rng.choice([0, 6]) * length / share)
    saved = draw(0, 7) + np.ceil(rng.choice([0, 3]) * length / share)
    seconds[rng.random(shape) < rng.choice([0.0, 0.1, 0.4])] = np.inf
    batches = int(rng.integers(1, 7))
    needed = fixed + rng.integers(1, 4) * saved
    return PipelineProblem(
        StageTable(seconds, fixed, saved),
        groups,
        devices,
        batches,
        send_s=draw(0, 6, layers - 1),
        limit_bytes=math.inf if rng.random() < 0.2 else float(np.quantile(needed, rng.uniform(0.05, 0.9))),
        use_all=bool(rng.random() < 0.25),
    )


def every_cut(problem):
    """(seconds, bytes of the fullest device) of every cut whose devices are allowed; limits are not looked at."""
    table, layers, batches = problem.stages, problem.stages.layers, problem.micro_batches
    for count in range(1, layers + 1):
        if count * min(problem.groups) > problem.devices:
            return
        for cuts in itertools.combinations(range(1, layers), count - 1):
            bounds = (0, *cuts, layers)
            ways = []
            for number, (first, end) in enumerate(itertools.pairwise(bounds)):
                in_flight = min(batches, count - number)
                send_s = problem.send_s[end - 1] if end < layers else 0
                ways.append(
                    [
                        (
                            table.seconds[first, end - 1, group, option] + send_s,
                            table.fixed_bytes[first, end - 1, group, option]
                            + in_flight * table.saved_bytes[first, end - 1, group, option],
                            devices,
                        )
                        for group, devices in enumerate(problem.groups)
                        for option in range(table.seconds.shape[3])
                        if table.seconds[first, end - 1, group, option] < np.inf
                    ]
                )
            for chosen in itertools.product(*ways):
                stage_s, nbytes, devices = zip(*chosen, strict=True)
                used = sum(devices)
                if used == problem.devices or (used < problem.devices and not problem.use_all):
                    yield sum(stage_s) + (batches - 1) * max(stage_s), max(nbytes)


def textbook(problem):
    """Alpa's dynamic program in its direct form: all caps, smallest first, one stage after the other."""
    table, layers, batches = problem.stages, problem.stages.layers, problem.micro_batches
    latency = table.seconds + np.append(problem.send_s, 0.0)[:, None, None]
    spans = list(itertools.combinations(range(layers + 1), 2))
    best = math.inf
    for cap in sorted({float(v) for first, end in spans for v in latency[first, end - 1].ravel() if v < np.inf}):
        if batches * cap >= best:
            break

        @cache
        def least(stages, first, devices, cap=cap):
            if stages == 0:
                done = first == layers and (devices == 0 or not problem.use_all)
                return (0.0, 0.0) if done else (math.inf, math.inf)
            found = [(math.inf, math.inf)]
            for end in range(first + 1, layers + 1):
                for group, taken in enumerate(problem.groups):
                    if taken > devices:
                        continue
                    rest = least(stages - 1, end, devices - taken)
                    for option, seconds in enumerate(latency[first, end - 1, group]):
                        held = min(batches, stages) * table.saved_bytes[first, end - 1, group, option]
                        if (
                            seconds <= cap
                            and table.fixed_bytes[first, end - 1, group, option] + held <= problem.limit_bytes
                        ):
                            found.append((seconds + rest[0], max(seconds, rest[1])))
            return min(found)

        totals = [least(stages, 0, problem.devices) for stages in range(1, layers + 1)]
        best = min([best, *(total + (batches - 1) * largest for total, largest in totals if total < math.inf)])
    return best


def play_1f1b(forward_s, backward_s, send_s, batches):
    """(seconds, most micro-batches in flight per stage) of 1F1B, played event by event; half a send goes each way."""
    count = len(forward_s)
    queues = []
    for stage in range(count):
        ahead = min(batches, count - 1 - stage)
        steady = [(kind, batch + shift) for batch in range(batches) for kind, shift in (("F", ahead), ("B", 0))]
        warm = [("F", batch) for batch in range(ahead)]
        queues.append([task for task in warm + steady if task[1] < batches][::-1])
    done, clock, held, most = {}, [0.0] * count, [0] * count, [0] * count
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                kind, batch = queue[-1]
                if kind == "F":
                    before = None if stage == 0 else ("F", stage - 1, batch)
                    sent_s = 0.0 if stage == 0 else send_s[stage - 1] / 2
                else:
                    before = ("F", stage, batch) if stage == count - 1 else ("B", stage + 1, batch)
                    sent_s = 0.0 if stage == count - 1 else send_s[stage] / 2
                if before is not None and before not in done:
                    break
                ready = 0.0 if before is None else done[before] + sent_s
                clock[stage] = max(ready, clock[stage]) + (forward_s if kind == "F" else backward_s)[stage]
                done[kind, stage, batch] = clock[stage]
                held[stage] += 1 if kind == "F" else -1
                most[stage] = max(most[stage], held[stage])
                queue.pop()
    return max(clock), tuple(most)


def large_pipeline(limit_bytes):
    """96 uneven layers, 64 devices in groups of 1, 2, 4, ... 64, 128 micro-batches; options to keep or to recompute.

    A group of n devices is less than n times as fast; recomputing takes a third longer and saves 0.15 of the bytes.
    """
    rng = np.random.default_rng(0)
    groups = (1, 2, 4, 8, 16, 32, 64)
    share = np.array(groups, dtype=float)[None, :, None]
    layer_s = rng.uniform(0.01, 0.03, (96, 1, 1))
    seconds = layer_s / share * (1 + 0.05 * np.log2(share) * np.sqrt(share)) * [1.0, 1.33]
    fixed, saved = (layer_s * nbytes / share * keeps for nbytes, keeps in ((300e9, [1, 1]), (100e9, [1, 0.15])))
    table = additive_stages(seconds, fixed, saved)
    return PipelineProblem(table, groups, 64, 128, rng.uniform(0.5e-3, 1.5e-3, 95), limit_bytes)
