"""Peers are measured where they are installed, and their absence is said, not raised."""

from __future__ import annotations

import importlib.util

import pytest
import scheduler
import scheduler_peers
from common import Row
from scheduler_cases import Sizes
from scheduler_peers import Peer

SIZES = Sizes("8k_16_1e5", 8192, 16, 10**5)
BOUNDS = {"hit_8k_16_1e5": 50.0, "life_8k_16_1e5": 60.0, "admit_8k_16_1e5": 70.0}


class FixedPeer:
    """A peer that always takes the same time."""

    def __init__(self, sizes: Sizes) -> None:
        self.order: list[str] = []

    def hit(self) -> list[float]:
        self.order.append("hit")
        return [200.0]

    def life(self) -> list[float]:
        assert "admit" not in self.order, "admit pushes out what life has to find"
        return [300.0]

    def admit(self) -> list[float]:
        self.order.append("admit")
        return [700.0]


def test_peer_rows_carry_the_floor_of_the_same_run() -> None:
    rows = scheduler_peers.measure(Peer("other", FixedPeer), SIZES, 0.0, BOUNDS)
    assert [(row.name, row.value, row.bound, row.ratio) for row in rows] == [
        ("peer_other_hit_8k_16_1e5", 200.0, 50.0, 0.25),
        ("peer_other_life_8k_16_1e5", 300.0, 60.0, 0.2),
        ("peer_other_admit_8k_16_1e5", 700.0, 70.0, 0.1),
    ]


def test_peer_is_left_out_of_pools_that_would_take_it_minutes() -> None:
    assert scheduler_peers.measure(Peer("other", FixedPeer), Sizes("x", 8192, 16, 10**6), 0.0, BOUNDS) == []


def test_judge_compares_with_peers_and_names_rows_below_the_target() -> None:
    rows = [
        Row.cost("hit_8k_16_1e5", 100.0, "ns/block", 40.0),
        Row.cost("life_8k_16_1e5", 100.0, "ns/block", 60.0),
        Row.cost("match_1k_16_1e5", 100.0, "ns/block", 1.0),
        Row.cost("peer_other_hit_8k_16_1e5", 250.0, "ns/block", 40.0),
        Row.cost("call_open", 900.0, "ns", 70.0),
    ]
    notes = scheduler.judge(rows)
    assert "1 of 2 rows at 8k and 128k reach 0.5 of the floor" in notes
    assert "  below: hit_8k_16_1e5 0.40" in notes
    assert "hit_8k_16_1e5: 2.5x faster than other" in notes
    assert "dearest call: call_open 900 ns (limit 3000 ns)" in notes


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in ("sglang", "vllm")), reason="a peer is installed in this environment"
)
def test_absent_peers_are_notes() -> None:
    peers, notes = scheduler_peers.installed()
    assert peers == []
    assert [note.split()[1] for note in notes] == ["sglang", "sglang-rust", "vllm"]
    assert all("is not measured: " in note and "not installed" in note for note in notes)
