"""Connections that send nothing do not use up the capacity for others."""

from __future__ import annotations

from holdfast.core.connections import PendingHandshakes


def test_whoever_holds_most_places_loses_its_oldest() -> None:
    greetings: PendingHandshakes[str] = PendingHandshakes(4)
    for key, host in (("m1", "evil"), ("m2", "evil"), ("p1", "peer"), ("m3", "evil")):
        assert greetings.begin(key, host) is None
    assert greetings.begin("q1", "other") == "m1"
    greetings.end("p1")
    assert greetings.begin("m4", "evil") is None
    assert greetings.begin("m5", "evil") == "m2"


def test_a_member_makes_way_only_where_there_is_nobody_else() -> None:
    greetings: PendingHandshakes[str] = PendingHandshakes(3)
    for key, host in (("p1", "peer"), ("p2", "peer"), ("m1", "evil")):
        greetings.begin(key, host)
    assert greetings.begin("p3", "peer", members=("peer",)) == "m1"
    assert greetings.begin("p4", "peer", members=("peer",)) == "p1"
