"""What a node does as it boots, as far as that needs no node."""

from __future__ import annotations

import pytest

from holdfast_testbed import nodeinit
from holdfast_testbed.errors import CommandFailedError


def refuse(_: list[str]) -> str:
    raise CommandFailedError("umount: no mount point specified")


def test_a_cluster_that_is_removed_meanwhile_ends_no_node_that_boots(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter((["/run/netns/hf102"], []))
    monkeypatch.setattr(nodeinit, "_named_namespaces", lambda: next(looks))
    monkeypatch.setattr(nodeinit, "run", refuse)
    nodeinit._forget_namespaces()


def test_a_namespace_that_stays_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodeinit, "_named_namespaces", lambda: ["/run/netns/hf102"])
    monkeypatch.setattr(nodeinit, "run", refuse)
    with pytest.raises(CommandFailedError):
        nodeinit._forget_namespaces()
