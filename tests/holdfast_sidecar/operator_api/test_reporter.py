"""Reports against the real protocol over TLS, with time in the test's hand."""

import pytest


def test_reports_are_numbered_and_paced(reporter, operator, clock):
    assert reporter.step() == 0
    assert reporter.step() == 5.0
    clock.forward(5)
    assert reporter.step() == 0
    assert [report["sidecar"]["number"] for report in operator.reports] == [1, 2]


def test_failed_report_is_repeated_with_a_new_number(reporter, operator, clock):
    """The back-off comes first."""
    operator.status = 503
    reporter.step()
    assert reporter.step() == pytest.approx(0.2)
    operator.status = None
    clock.forward(0.2)
    reporter.step()
    assert [report["sidecar"]["number"] for report in operator.reports] == [2]


def test_a_standby_leads_to_the_leader(reporter, operator, leader, clock):
    for _ in range(4):
        clock.forward(5)
        reporter.step()
    assert len(operator.tries) == 1
    assert [report["sidecar"]["number"] for report in leader.reports] == [2, 3, 4]


def test_a_leader_that_died_leads_back_within_the_same_report(reporter, operator, leader, clock):
    for _ in range(2):
        clock.forward(5)
        reporter.step()
    leader.stop()
    operator.status = None
    clock.forward(5)
    reporter.step()
    assert [report["sidecar"]["number"] for report in operator.reports] == [3], "it leads now"


def test_standby_that_names_a_dead_leader_is_one_refusal(reporter, operator, leader, clock, caplog):
    leader.stop()
    for _ in range(6):
        clock.forward(5)
        reporter.step()
    assert len(operator.tries) == 6
    assert [record.message for record in caplog.records if "do not reach" in record.message] == [
        f"reports do not reach the operator: the operator is not serving now (503), its leader is {leader.url}"
    ]


@pytest.mark.parametrize(
    "said", [None, "", "http://127.0.0.1:{port}", "https://localhost:{port}", "nonsense", "https://[::1", 7]
)
def test_only_an_address_over_tls_is_followed(reporter, operator, leader, clock, said):
    operator.leader = said.format(port=leader.port) if isinstance(said, str) else said
    for _ in range(3):
        clock.forward(5)
        reporter.step()
    assert leader.tries == []
    assert len(operator.tries) == 3


def test_last_report_is_skipped_if_it_has_no_news(reporter, link, operator, run_dir):
    api = link[0]
    reporter.step()
    assert reporter.send_final(api, lambda _: None)
    assert len(operator.reports) == 1
    (run_dir / "status.json").write_text('{"version": 1, "exit": {"code": 0}}')
    assert reporter.send_final(api, lambda _: None)
    assert operator.latest()["launcher"]["exit"] == {"code": 0}


def test_the_last_report_gives_up_in_time(reporter, link, operator, clock):
    operator.status = 500
    started = clock.monotonic()
    assert not reporter.send_final(link[0], clock.forward)
    assert clock.monotonic() - started <= 5.0 + 1e-6
    assert len(operator.tries) > 2


@pytest.mark.parametrize("token", ["", "two\nlines", "\x00", None])
def test_a_token_that_cannot_be_sent_is_an_error_of_its_own(reporter, operator, tmp_path, caplog, token):
    (tmp_path / "token").unlink()
    if token is not None:
        (tmp_path / "token").write_text(token)
    reporter.step()
    assert operator.tries == []
    assert "the token" in caplog.text
    assert "lines" not in caplog.text


@pytest.mark.parametrize(("said", "pause"), [("7", 7.0), ("9999", 30.0), ("soon", 0.2), ("", 0.2), ("-3", 0.2)])
def test_who_asks_too_often_comes_again_when_the_operator_says(reporter, operator, clock, said, pause):
    operator.status, operator.retry_after = 429, said
    reporter.step()
    assert reporter.step() == pytest.approx(pause)
    operator.status = None
    clock.forward(pause)
    assert reporter.step() == 0
    assert len(operator.reports) == 1
