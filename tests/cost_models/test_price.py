"""Laws that prices obey on every machine, and the few numbers that were published."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from cost_models import (
    COLLECTIVES,
    Comm,
    Compute,
    Hardware,
    Link,
    Loop,
    Move,
    known_hardware,
    link_of,
    links_of,
    received_bytes,
    seconds,
    stream_of,
)

MACHINES = [Hardware.load(name) for name in known_hardware()]
SIZES = [1, 1000, 2**20, 2**21, 10**9]
every_machine = pytest.mark.parametrize("hardware", MACHINES, ids=lambda hardware: hardware.name)
every_collective = pytest.mark.parametrize("collective", COLLECTIVES)


@every_machine
@every_collective
def test_one_rank_pays_nothing(hardware, collective):
    assert seconds(Comm(collective, "x", 1, 10**9), hardware, links_of(hardware, ["x"], [1])) == 0


@every_machine
@every_collective
def test_more_bytes_are_never_cheaper(hardware, collective):
    for names, sizes in ((["x"], [8]), (["x", "y"], [2, 8]), (["x"], [64])):
        links = links_of(hardware, names, sizes)
        prices = [seconds(Comm(collective, "x", sizes[0], nbytes), hardware, links) for nbytes in [0, *SIZES]]
        assert all(less <= more for less, more in pairwise(prices))


@every_machine
def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather(hardware):
    links = links_of(hardware, ["x", "y"], [4, 4])
    for axis in ("x", "y"):
        price = {name: seconds(Comm(name, axis, 4, 2**24), hardware, links) for name in COLLECTIVES}
        assert price["all_reduce"] == pytest.approx(price["reduce_scatter"] + price["all_gather"], rel=1e-12)


@every_machine
@every_collective
@pytest.mark.parametrize("reach", ["intra", "inter"])
def test_a_faster_link_is_never_slower(hardware, collective, reach):
    old = hardware.links[reach]
    for faster in (Link(old.latency_s / 2, old.bytes_per_s), Link(old.latency_s, old.bytes_per_s * 2)):
        better = replace(hardware, links={**hardware.links, reach: faster})
        for names, sizes in ((["x"], [16]), (["x", "y"], [4, 8]), (["x"], [6]), (["x", "y"], [3, 5])):
            comm = Comm(collective, "x", sizes[0], 10**8)
            before = seconds(comm, hardware, links_of(hardware, names, sizes))
            assert seconds(comm, better, links_of(better, names, sizes)) <= before * (1 + 1e-12)


@every_machine
@every_collective
def test_an_outer_axis_is_never_cheaper_than_its_nic(hardware, collective):
    # (2, ranks per node): the groups of the outer axis have one rank on each node (autoparallel #527).
    links = links_of(hardware, ["outer", "inner"], [2, hardware.ranks_per_node])
    assert links["inner"] == hardware.links["intra"]
    comm = Comm(collective, "outer", 2, 10**9)
    nic_s = received_bytes(comm) / hardware.links["inter"].bytes_per_s
    assert seconds(comm, hardware, links) >= nic_s


@every_collective
def test_a_group_over_several_nodes_never_beats_the_nics_of_a_node(collective):
    h100 = Hardware.load("h100-sxm")
    for size in (16, 12, 9, 64):
        comm = Comm(collective, "x", size, 10**9)
        price = seconds(comm, h100, links_of(h100, ["x"], [size]))
        # What a full node must at least take in from outside, over all of its NICs.
        assert price >= 10**9 * (size - 8) / size / (8 * h100.links["inter"].bytes_per_s)


def test_ranks_per_node_matter():
    # 8 ranks on 8 nodes are not 8 of 64 ranks on one node (autoparallel #457).
    h100 = Hardware.load("h100-sxm")
    spread = replace(h100, ranks_per_node=1)
    comm = Comm("all_gather", "x", 8, 10**9)
    near, far = (seconds(comm, machine, links_of(machine, ["x"], [8])) for machine in (h100, spread))
    assert link_of(spread, ["x"], [8], "x").bytes_per_s == h100.links["inter"].bytes_per_s
    assert far > 5 * near


def test_the_group_of_an_axis_decides_its_link():
    h100 = Hardware.load("h100-sxm")
    intra, inter = h100.links["intra"], h100.links["inter"]

    def rate(names, sizes, axis):
        return link_of(h100, names, sizes, axis).bytes_per_s

    assert link_of(h100, ["d", "t"], [8, 8], "t") == intra
    assert rate(["d", "t"], [8, 8], "d") == inter.bytes_per_s  # one rank on each node: its own NIC
    assert rate(["d", "t"], [4, 4], "d") == 2 * inter.bytes_per_s  # two on each
    assert rate(["d"], [64], "d") == min(intra.bytes_per_s, 8 * inter.bytes_per_s)  # rings through all 8 NICs
    assert link_of(h100, ["d", "t"], [2, 4], "d") == intra  # 8 ranks are one node
    assert rate(["d"], [9], "d") == inter.bytes_per_s  # eight and one: the single rank's NIC decides
    assert rate(["d", "t"], [4, 3], "t") == inter.bytes_per_s  # only the group 6, 7 | 8 crosses; all wait for it
    assert link_of(h100, ["d", "t"], [8, 1], "t") == intra
    assert rate(["d", "t"], [2, 9], "t") == inter.bytes_per_s  # 8 + 1 and 7 + 2: the worse group decides
    assert link_of(h100, ["d", "t"], [8, 8], "d").latency_s == pytest.approx(inter.latency_s)
    # 64 ranks on 8 nodes: 63 hops, 7 of them between nodes.
    mean_s = (56 * intra.latency_s + 7 * inter.latency_s) / 63
    assert link_of(h100, ["d"], [64], "d").latency_s == pytest.approx(mean_s)


def test_an_all_to_all_does_not_share_the_nics_as_a_ring_does():
    # Each rank sends 8/16 of its bytes through its own NIC; a ring uses all eight of the node (autoparallel #464).
    h100 = Hardware.load("h100-sxm")
    links = links_of(h100, ["x"], [16])
    gather, exchange = (seconds(Comm(name, "x", 16, 2**30), h100, links) for name in ("all_gather", "all_to_all"))
    assert exchange > 3 * gather
    nic_s = 2**30 * 8 / 16 / h100.links["inter"].bytes_per_s
    assert exchange == pytest.approx(nic_s, rel=0.02)  # the rest is latency: 15 messages
    inside = links_of(h100, ["x"], [8])
    gather, exchange = (seconds(Comm(name, "x", 8, 2**30), h100, inside) for name in ("all_gather", "all_to_all"))
    assert exchange == gather  # inside a node each receives (g - 1) / g of the bytes from its neighbours


def test_the_price_does_not_jump_with_the_number_of_ranks():
    # Published for a rival: 1,142 us on 8 ranks, 14,636 us on 4 (its model changed with world % 8).
    h100 = Hardware.load("h100-sxm")
    prices = [
        seconds(Comm("all_reduce", "x", ranks, 2**28), h100, links_of(h100, ["x"], [ranks])) for ranks in range(2, 9)
    ]
    assert all(less < more < 2 * less for less, more in pairwise(prices))


def test_fitted_nvlink_points_are_replayed():
    # t = lat + output bytes / rate, all-gather, H100 (meta-pytorch/autoparallel). Our figures are from the 8 ranks.
    h100 = Hardware.load("h100-sxm")
    for ranks, latency_s, rate, tolerance in ((8, 30e-6, 394e9, 0.005), (4, 17e-6, 434e9, 0.08)):
        links = links_of(h100, ["x"], [ranks])
        for nbytes in (2**26, 2**29):
            predicted = seconds(Comm("all_gather", "x", ranks, nbytes), h100, links)
            assert predicted == pytest.approx(latency_s + nbytes / rate, rel=tolerance)


def test_groups_that_share_a_nic_share_its_rate():
    # Frontera: one NIC for 4 ranks. A ring over all 16 ranks has it alone; two groups in a node have half of it each.
    rtx = Hardware.load("rtx5000")
    assert link_of(rtx, ["x"], [16], "x").bytes_per_s == pytest.approx(4.02e9)
    assert link_of(rtx, ["x"], [4], "x").bytes_per_s == 5.15e9
    assert link_of(rtx, ["r", "c"], [8, 2], "r").bytes_per_s == pytest.approx(4.02e9 / 2)


def test_an_unknown_axis_is_named():
    h100 = Hardware.load("h100-sxm")
    with pytest.raises(ValueError, match="no mesh axis 'z'; this mesh has x, y"):
        link_of(h100, ["x", "y"], [2, 2], "z")
    with pytest.raises(ValueError, match="axis 'z', which has no link; known: x"):
        seconds(Comm("all_gather", "z", 2, 8), h100, links_of(h100, ["x"], [2]))


@every_machine
def test_compute_is_a_roofline(hardware):
    launch, hbm = hardware.launch_s, hardware.tiers["hbm"].bytes_per_s
    assert seconds(Compute("mm", 1e15, 1.0), hardware, {}) == 1e15 / hardware.rate("float32", "matmul") + launch
    assert seconds(Compute("add", 1.0, 1e12, kind="elementwise"), hardware, {}) == 1e12 / hbm + launch
    assert seconds(Compute("view", 0, 0, kernels=0), hardware, {}) == 0
    assert seconds(Compute("norm", 0, 0, kernels=3), hardware, {}) == 3 * launch
    by_host = 1e9 / hardware.tiers["host"].bytes_per_s
    assert seconds(Compute("adamw", 1e3, 1e9, kind="host"), hardware, {}) == by_host + (hardware.dispatch_s or 0)


@every_machine
def test_a_move_pays_the_host_link(hardware):
    assert seconds(Move("host", "hbm", 10**9), hardware, {}) == pytest.approx(
        hardware.launch_s + 1e9 / hardware.host_link.h2d_bytes_per_s
    )
    halves = 2 * seconds(Move("hbm", "host", 5 * 10**8), hardware, {})
    assert halves == pytest.approx(seconds(Move("hbm", "host", 10**9), hardware, {}) + hardware.launch_s)


def random_body(rng: random.Random, depth: int = 0) -> tuple:
    def one():
        match rng.randrange(4 if depth < 2 else 3):
            case 0:
                return Compute(
                    "mm", 10 ** rng.uniform(6, 12), 10 ** rng.uniform(3, 9), kind=rng.choice(["matmul", "host"])
                )
            case 1:
                return Comm(rng.choice(list(COLLECTIVES)), rng.choice("xy"), 4, rng.randrange(10**8))
            case 2:
                return Move(*rng.sample(["hbm", "host"], 2), rng.randrange(10**8))
            case _:
                return Loop(rng.randrange(1, 4), random_body(rng, depth + 1), rng.random() < 0.5)

    return tuple(one() for _ in range(rng.randrange(1, 6)))


@every_machine
def test_overlap_never_costs_more_than_taking_turns(hardware):
    rng = random.Random(7)
    links = links_of(hardware, ["x", "y"], [4, 4])
    for _ in range(100):
        rounds, body = rng.randrange(1, 20), random_body(rng)
        apart = seconds(Loop(rounds, body), hardware, links)
        together = seconds(Loop(rounds, body, overlap=True), hardware, links)
        alone = [seconds(step, hardware, links) for step in body]
        assert apart == pytest.approx(rounds * sum(alone))
        assert together <= apart * (1 + 1e-12)
        assert together >= max(rounds * max(alone), sum(alone)) * (1 - 1e-12)


def test_an_overlapped_loop_is_the_busiest_stream_and_one_ramp():
    h100 = Hardware.load("h100-sxm")
    links = links_of(h100, ["x"], [8])
    comm, work = Comm("all_gather", "x", 8, 2**26), Compute("mm", 1e9, 1e6, "bfloat16")
    comm_s, work_s = seconds(comm, h100, links), seconds(work, h100, links)
    assert comm_s > work_s
    assert seconds(Loop(1, (comm, work), True), h100, links) == pytest.approx(comm_s + work_s)
    assert seconds(Loop(8, (comm, work), True), h100, links) == pytest.approx(8 * comm_s + work_s)
    assert seconds(Loop(8, (), True), h100, links) == 0


def test_streams_have_names():
    assert stream_of(Compute("mm", 1, 1)) == "compute"
    assert stream_of(Compute("adamw", 1, 1, kind="host")) == "host"
    assert stream_of(Comm("broadcast", "data", 2, 8)) == "comm:data"
    assert (stream_of(Move("host", "hbm", 1)), stream_of(Move("hbm", "host", 1))) == ("h2d", "d2h")


def test_what_is_passed_on_crosses_a_border_through_one_nic():
    """A ring through two nodes of eight uses the NICs of eight ranks; of those that pass something on, one crosses."""
    hardware, nbytes = Hardware.load("h100-sxm"), 2**28
    links = links_of(hardware, ["x", "y"], [2, 8])
    inside, across = hardware.links["intra"], hardware.links["inter"]
    for axis, ranks, link in (("y", 8, inside), ("x", 2, across), ("x+y", 16, across)):
        took = seconds(Comm("shift", axis, ranks, nbytes), hardware, links)
        assert took == pytest.approx(link.latency_s + nbytes / link.bytes_per_s)
