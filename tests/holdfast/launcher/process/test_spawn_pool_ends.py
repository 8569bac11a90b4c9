"""Pooled processes end like interpreters."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from pool_bench import Bench, eventually, gone, run

from holdfast.launcher.process.child import Origin, ProcessExit
from holdfast.launcher.process.spawn_pool import Pool

# Ends

ENDS = {
    "returns": "",
    "code": "sys.exit(3)",
    "text": "sys.exit('no data')",
    "raises": "def f():\n    1 / 0\nf()",
    "raises a chain": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise OSError('x') from e",
    "hook": "sys.excepthook = lambda *a: print('hook', a[0].__name__, file=sys.stderr)\n1 / 0",
    "interrupted": "raise KeyboardInterrupt",
    "signal": "os.kill(os.getpid(), signal.SIGTERM)",
    "abort": "os.abort()",
    "at once": "os._exit(7)",
    "thread": "threading.Thread(target=lambda: (time.sleep(0.1), print('last', file=sys.stderr))).start()",
    "at exit": "atexit.register(lambda: print('bye', file=sys.stderr))",
}


@pytest.mark.usefixtures("hears_out")
def test_every_end_is_reported_as_that_of_an_interpreter(bench: Bench) -> None:
    """This includes the last output. Only the traceback of an interrupt shows the origin of the process."""
    cases = "import heavy, atexit, os, signal, sys, threading, time\n"
    argv = bench.script(f"{cases}exec(os.environ['HOLDFAST_CODE'])")

    async def scenario() -> None:
        async with bench.over(argv, warm=len(ENDS)):
            await bench.warm_up(len(ENDS))
            for origin in (Origin.WARM, Origin.ZYGOTE):
                for name, code in ENDS.items():
                    seen = await bench.run(origin, HOLDFAST_CODE=code)
                    assert ending(seen, name) == ending(fresh[name], name), (name, origin)

    def ending(ended: ProcessExit, name: str) -> tuple[int, tuple[str, ...]]:
        return ended.returncode, ended.stderr_tail[-1:] if name == "interrupted" else ended.stderr_tail

    async def interpreters() -> dict[str, ProcessExit]:
        bench.pool = Pool(argv=argv, warm=0)
        return {name: await bench.run(Origin.FRESH, HOLDFAST_CODE=code) for name, code in ENDS.items()}

    bench.environ["HOLDFAST_CODE"] = ""
    fresh = asyncio.run(interpreters())
    assert fresh["raises"].returncode == 1
    assert fresh["raises"].stderr_tail[0] == "Traceback (most recent call last):"
    run(scenario())


@pytest.mark.usefixtures("hears_out")
@pytest.mark.parametrize("source", ["def broken(:", None], ids=["syntax", "no file"])
def test_a_script_that_went_bad_fails_as_in_an_interpreter(bench: Bench, source: str | None) -> None:
    argv = bench.script("import heavy")
    seen = []

    async def scenario() -> None:
        async with bench.over(argv):
            await bench.warm_up()
            Path(argv[1]).unlink() if source is None else Path(argv[1]).write_text(source)
            seen.extend([await bench.run(Origin.WARM), await bench.run(Origin.ZYGOTE)])
        bench.pool = Pool(argv=argv, warm=0)
        seen.append(await bench.run(Origin.FRESH))

    run(scenario())
    warm, zygote, fresh = [(ended.returncode, ended.stderr_tail) for ended in seen]
    assert fresh[0] == (2 if source is None else 1)
    assert warm == zygote == fresh


def test_no_child_of_a_killed_rank_is_left_at_its_end(bench: Bench) -> None:
    """In its group, in its own session, and a grandchild of a parent that has ended. Forked, or another program."""
    argv = bench.script(
        """
        import heavy, os, pathlib, subprocess, sys, time
        if os.environ["RANK"] == "0": sys.exit()
        sleep = ["sleep", "600"]
        pids = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
        pids.append(int(subprocess.check_output(["sh", "-c", "setsid sleep 600 > /dev/null & echo $!"])))
        if (forked := os.fork()) == 0:
            os.setsid()
            time.sleep(600)
        out = pathlib.Path(os.environ["HOLDFAST_OUT"])
        out.with_suffix(".new").write_text(" ".join(map(str, [*pids, forked])))
        out.with_suffix(".new").rename(out)
        time.sleep(600)
        """
    )

    async def kill_one(origin: Origin) -> None:
        child, ended = bench.start(RANK="1")
        assert child.origin == origin
        await eventually(bench.out.exists, "the script runs")
        started = [int(pid) for pid in bench.out.read_text().split()]
        bench.out.unlink()
        assert len(started) == 4
        assert not any(map(gone, started))
        os.kill(child.pid, signal.SIGKILL)  # not by its launcher
        await child.reaped.wait()
        assert [pid for pid in started if not gone(pid)] == []
        assert (await ended).returncode == -signal.SIGKILL

    async def scenario() -> None:
        async with bench.over(argv):
            await kill_one(Origin.FRESH)
            await bench.warm_up()
            await kill_one(Origin.WARM)
            await kill_one(Origin.ZYGOTE)

    run(scenario())


def test_what_a_script_detached_outlives_its_normal_end(bench: Bench) -> None:
    """For example, a tracker that still sends its last records."""
    argv = bench.script(
        """
        import os, pathlib, subprocess
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        pathlib.Path(os.environ["HOLDFAST_OUT"]).write_text(str(child.pid))
        """
    )

    async def scenario() -> None:
        bench.pool = Pool(argv=argv, warm=None)
        await bench.run(Origin.FRESH)
        detached = int(bench.out.read_text())
        assert not gone(detached)
        os.kill(detached, signal.SIGKILL)

    run(scenario())


@pytest.mark.usefixtures("hears_out")
def test_what_a_rank_writes_passes_through_with_its_prefix(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    argv = bench.script("import heavy, os, sys; print(len(os.environ['LONG'])); print('tail', file=sys.stderr)")

    async def scenario() -> None:
        async with bench.over(argv):
            await bench.warm_up()
            ended: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
            child = bench.pool.spawn(environ={**bench.environ, "RANK": "4"}, prefix="[4] ", on_exit=ended.set_result)
            assert child.origin is Origin.WARM
            assert (await ended).stderr_tail == ("tail",)

    bench.environ["LONG"] = "x" * 120_000
    bench.environ |= {f"LONG{n}": "y" * 120_000 for n in range(5)}
    run(scenario())
    out, err = capfd.readouterr()
    assert "[4] 120000\n" in out
    assert "[4] tail\n" in err
