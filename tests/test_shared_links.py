"""Links that transfers share, in the simulator and in the emulated network."""

from __future__ import annotations

import pytest

from builders import flat_cluster
from penstock.cluster import parse_cluster
from penstock.simulate.shared_links import SharedLinks, Transfer

MB = 1e6


class Ignored:
    def arrive(self, index: int, at_s: float) -> None:
        raise AssertionError("whoever runs the links tells the receivers")


def transfer(num_bytes: float, index: int = 0) -> Transfer:
    return num_bytes, Ignored(), index


def arrivals(links: SharedLinks, until_s: float = float("inf")) -> dict[int, float]:
    return {index: at_s for (_, _, index), at_s in links.run(until_s)}


def test_links_go_on_to_the_given_time_and_no_further() -> None:
    links = SharedLinks(flat_cluster(2, bytes_per_s=MB))
    route = links.route(0, 1)
    links.send(0.0, route, transfer(MB, 0))
    links.send(0.0, route, transfer(MB, 1))
    assert arrivals(links, 1.5) == {0: 1.0}
    assert arrivals(links) == {1: 2.0}


def test_a_copy_goes_on_without_changing_the_original() -> None:
    links = SharedLinks(parse_cluster("2@100MB/s,2@10MB/s"))
    first, second = links.route(0, 2), links.route(1, 3)
    links.send(0.0, first, transfer(10 * MB, 0))
    links.send(0.5, second, transfer(2 * MB, 1))
    assert arrivals(links, 0.6) == {}
    foreseen = arrivals(links.copy())
    links.send(0.7, second, transfer(2 * MB, 2))
    assert arrivals(links.copy()) == arrivals(links.copy()) == arrivals(links)
    assert foreseen == pytest.approx({1: 0.9, 0: 1.2})
    assert arrivals(links) == {}
