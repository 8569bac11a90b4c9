"""What the job's time went into: added up over all launchers, once a minute, and nothing twice."""

from __future__ import annotations

from typing import Any

import pytest
from sim import Sim

from holdfast_operator.api import names as c
from holdfast_operator.api.status import ConditionType, Goodput
from holdfast_operator.api.status.goodput import since
from holdfast_operator.views import parse_report

WORKERS = ("gpt-w0", "gpt-w1", "gpt-w2")


def told(sim: Sim) -> dict[str, Any]:
    """As a user reads it."""
    return {key: value for key, value in sim.body["status"]["goodput"].items() if key != "time"}


def book(sim: Sim, productive: float, startup: float = 10.0, *, names: tuple[str, ...] = WORKERS) -> None:
    """These launchers' books."""
    sim.books |= {name: {"productive": productive, "startup": startup} for name in names}


def test_it_is_the_sum_over_all_launchers(trained: Sim) -> None:
    book(trained, 300.4)
    trained.run(c.GOODPUT_EVERY.seconds)
    assert told(trained) == {"ratio": 0.968, "productiveSeconds": 900, "lostSeconds": {"startup": 30}}


def test_a_job_whose_launchers_book_nothing_has_none(trained: Sim) -> None:
    trained.run(90)
    assert "goodput" not in trained.body["status"]


def test_goodput_is_written_once_a_minute(trained: Sim) -> None:
    written = set()
    for second in range(300):
        book(trained, float(second))
        trained.tick()
        written.add(trained.body["status"]["goodput"]["time"])
    assert len(written) == 5


def test_it_is_shown_as_soon_as_there_is_something_to_show(trained: Sim) -> None:
    book(trained, 5.0)
    trained.run(10)
    assert told(trained)["productiveSeconds"] == 15


def test_restarted_operator_counts_goodput_exactly_once(trained: Sim) -> None:
    book(trained, 100.0)
    trained.run(60)
    trained.restart_operator()
    book(trained, 250.0)
    trained.run(120)
    assert told(trained) == {"ratio": 0.962, "productiveSeconds": 750, "lostSeconds": {"startup": 30}}


def test_accounts_of_a_lost_worker_stay(trained: Sim) -> None:
    """Its replacement adds its own."""
    book(trained, 100.0)
    trained.run(60)
    book(trained, 130.0)
    trained.tick()
    trained.end("gpt-w1", 137)
    trained.tick()
    trained.run(60, until=lambda: "gpt-w3" in trained.world_names())
    book(trained, 20.0, 7.0, names=("gpt-w3",))
    trained.run(120)
    assert told(trained)["productiveSeconds"] == 3 * 130 + 20
    assert told(trained)["lostSeconds"] == {"startup": 37}


def test_end_of_a_worker_writes_only_its_accounts(trained: Sim) -> None:
    book(trained, 90.0)
    trained.run(10)
    at = trained.status.goodput.time
    book(trained, 100.0)
    trained.tick()
    trained.end("gpt-w1", 137)
    trained.tick(2)
    assert trained.status.goodput.time == at
    assert told(trained)["productiveSeconds"] == 90 + 90 + 100


def test_the_end_of_the_job_counts_all_that_is_told(trained: Sim) -> None:
    book(trained, 100.0)
    trained.run(60)
    book(trained, 130.0)
    trained.complete_at = trained.step + 2
    trained.run(20, until=lambda: trained.status.holds(ConditionType.COMPLETE))
    assert told(trained)["productiveSeconds"] == 390


def test_accounts_of_a_restarted_launcher_are_added() -> None:
    assert since((5, 1), (3, 1)) == (2,)
    assert since((2, 1), (30, 1)) == (2, 1)


def test_unknown_cause_of_a_newer_launcher_is_kept() -> None:
    accounting = {
        "seconds": {"productive": 9.6, "gardening": 4.0, "idle": "x", "data": -3.0},
        "unattributedSeconds": 1,
    }
    body = {"version": 1, "pod": {"uid": "u"}, "launcher": {"version": 1, "accounting": accounting}}
    report = parse_report(body, None)  # type: ignore[arg-type]
    assert report is not None
    goodput = Goodput(spent=report.books)
    assert goodput.to_json()["lostSeconds"] == {"unattributed": 5}
    assert (goodput.productive, goodput.ratio) == (10, 0.667)


@pytest.mark.parametrize("spent", [(), (0, 0), (2**53, 2**53)])
def test_any_sum_can_be_written(spent: tuple[int, ...]) -> None:
    goodput = Goodput(spent=Goodput(spent=spent).plus((2**53, 1)))
    assert max(goodput.spent) <= c.MAX_NUMBER
    assert Goodput.from_json(goodput.to_json()).spent == goodput.spent
    assert Goodput().ratio is None
