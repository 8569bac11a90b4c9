"""The whole sidecar as a process: how SIGTERM ends it."""

import os
import signal
import threading
from pathlib import Path

import pytest

DEADLINE = 240.0


@pytest.mark.usefixtures("patient")
def test_sigterm_sends_the_last_report(sidecar, operator, wait):
    """The process ends promptly."""
    sidecar.write_status()
    sidecar.start()
    wait(lambda: operator.reports, "a report")
    leaving = {"code": 0, "cause": None, "reason": "Complete", "message": "all done", "final": True}
    sidecar.write_status(phase="Complete", exit=leaving)
    assert sidecar.terminate(deadline=60) == 0
    assert operator.latest()["launcher"]["exit"] == leaving


def test_sigterm_ends_it_while_the_operator_is_away(sidecar, operator, wait):
    sidecar.start()
    operator.stop()
    sidecar.write_status(exit={"code": 75})
    assert sidecar.terminate() == 0
    assert sidecar.says("the last report did not reach the operator") == 1


@pytest.mark.usefixtures("patient")
def test_last_report_is_sent_when_the_operator_returns(sidecar, operator, wait):
    """SIGTERM came while the operator was unreachable."""
    operator.stop()
    sidecar.write_status(exit={"code": 75})
    sidecar.start()
    wait(lambda: sidecar.says("reports do not reach the operator"), "the absence")
    returning = threading.Timer(1.0, operator.start)
    returning.start()
    assert sidecar.terminate() == 0
    returning.join()
    assert operator.latest()["launcher"]["exit"] == {"code": 75}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a PID namespace without more")
@pytest.mark.usefixtures("patient")
def test_as_pid_1_it_heeds_sigterm(sidecar, operator, wait):
    sidecar.wrapper = ["unshare", "--pid", "--fork", "--kill-child"]
    sidecar.start()
    wait(lambda: operator.reports, "a report")
    sidecar.write_status(exit={"code": 0})
    wrapper = sidecar.process.pid
    inner = int(Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text())
    assert Path(f"/proc/{inner}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1] == "1"
    os.kill(inner, signal.SIGTERM)
    assert sidecar.process.wait(DEADLINE) == 0
    assert operator.latest()["launcher"]["exit"] == {"code": 0}


SLOW_IMPORT = """
import pathlib, sys, time
here = pathlib.Path(__file__).parent.parent
(here / "importing").touch()
while not (here / "go").exists():
    time.sleep(0.01)
sys.path.remove(str(here))
del sys.modules[__name__]
import prometheus_client
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a PID namespace without more")
def test_as_pid_1_it_heeds_a_sigterm_that_comes_while_it_starts(sidecar, operator, tmp_path, wait):
    """The kubelet sends it once, right after a trainer that cannot be started; dropped, it costs the grace period."""
    shadow = tmp_path / "shadow"
    (shadow / "prometheus_client").mkdir(parents=True)
    (shadow / "prometheus_client" / "__init__.py").write_text(SLOW_IMPORT)
    paths = [str(shadow), sidecar.environment.get("PYTHONPATH", "")]
    sidecar.environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    sidecar.wrapper = ["unshare", "--pid", "--fork", "--kill-child"]
    sidecar.launch()
    wait((shadow / "importing").exists, "the imports")
    wrapper = sidecar.process.pid
    os.kill(int(Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text()), signal.SIGTERM)
    (shadow / "go").touch()
    assert sidecar.process.wait(DEADLINE) == 0
