"""A resource that cannot be read is left alone and says so."""

from __future__ import annotations

from sim import Sim


def test_what_cannot_be_read_says_so_once_and_is_left_alone(trained: Sim) -> None:
    before = trained.names()
    trained.body["spec"]["workers"]["replicas"] = "three"
    trained.settle()
    trained.run(20)
    assert trained.names() == before
    assert trained.status.summary == "InvalidSpec"
    assert "spec.workers.replicas" in trained.status.condition("Degraded").message
    assert [reason for reason, _ in trained.events].count("InvalidSpec") == 1
    assert trained.status.membership.generation == 1


def test_a_mended_resource_goes_on(trained: Sim) -> None:
    trained.body["spec"]["workers"]["replicas"] = "three"
    trained.tick()
    trained.body["spec"]["workers"]["replicas"] = 3
    trained.run(10, until=lambda: trained.status.summary == "Training")
    assert not trained.status.holds("Degraded")
