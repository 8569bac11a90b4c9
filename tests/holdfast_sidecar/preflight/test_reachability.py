"""Other workers are tried by turns."""

from __future__ import annotations

from typing import Any

from holdfast_sidecar.preflight.reachability import PeerDialer
from holdfast_sidecar.protocol.preflight import Peer


def test_many_that_do_not_answer_are_tried_by_turns(clock: Any) -> None:
    tried: list[str] = []

    def silent(one: Peer) -> str:
        tried.append(one.uid)
        return "no answer within 2 s"

    dials = PeerDialer(clock, silent)
    dials.set_peers(tuple(Peer(pod=str(n), uid=str(n), ip="10.0.0.1", port=1) for n in range(200)))
    for _ in range(4):
        dials.step()
    assert len(tried) == 4 * 64
    assert set(tried) == {str(n) for n in range(200)}
