"""What a node does as it boots, as far as that needs no node."""

from __future__ import annotations

import pytest

from holdfast_testbed.errors import CommandFailedError
from holdfast_testbed.node import init


def refuse(_: list[str]) -> str:
    raise CommandFailedError("umount: no mount point specified")


def test_removing_a_cluster_ends_no_booting_node_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter((["/run/netns/hf102"], []))
    monkeypatch.setattr(init, "_named_namespaces", lambda: next(looks))
    monkeypatch.setattr(init, "run", refuse)
    init._forget_namespaces()


def test_a_namespace_that_stays_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "_named_namespaces", lambda: ["/run/netns/hf102"])
    monkeypatch.setattr(init, "run", refuse)
    with pytest.raises(CommandFailedError):
        init._forget_namespaces()
