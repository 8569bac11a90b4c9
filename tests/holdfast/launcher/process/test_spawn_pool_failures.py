"""A pool survives lost processes, and failed imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from pool_bench import Bench, children, eventually, gone, run

from holdfast.launcher.process import spawn_pool
from holdfast.launcher.process.child import Origin
from holdfast.launcher.process.spawn_pool import Pool

BAD = {
    "raises": ("raise RuntimeError('not today')", "RuntimeError: not today"),
    "exits": ("import sys; sys.exit(4)", "SystemExit: 4"),
    "reads the rank": (
        "import os\nRANK = int(os.environ.get('RANK', 0))",
        "_ReadsRankVariablesError: it reads RANK during its import",
    ),
    "half a package": ("import bad_inner; raise ImportError", "ImportError"),
}


# Failures


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_zygote_harms_nobody_and_is_replaced(
    bench: Bench, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = bench.script("import heavy, os, time; time.sleep(600 if os.environ['RANK'] == '9' else 0)")

    async def scenario() -> None:
        async with bench.over(argv):
            await bench.warm_up()
            running, _ = bench.start(RANK="9")
            bench.pool.refill()
            await eventually(lambda: bench.pool.ready == 1, "another stands by")
            (zygote,) = children("holdfast-zygote")
            os.kill(zygote, how)
            if how is signal.SIGKILL:
                await eventually(lambda: not bench.pool.can_fork, "the loss is seen")
            await bench.run(Origin.WARM)
            with monkeypatch.context() as impatient:
                impatient.setattr(spawn_pool, "_FORK_SECONDS", 1.0)
                await bench.run(Origin.FRESH)
            assert running.alive
            await bench.warm_up()
            assert children("holdfast-zygote") != [zygote]
            await bench.run(Origin.WARM)
            await bench.run(Origin.ZYGOTE)

    run(scenario())


def test_a_process_that_dies_while_it_stands_by_is_replaced(bench: Bench) -> None:
    argv = bench.script("import heavy")

    async def scenario() -> None:
        async with bench.over(argv):
            await bench.warm_up()
            (pid,) = children("holdfast-warm")
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: bench.pool.ready == 0, "the loss is seen")
            await bench.run(Origin.ZYGOTE)
            await bench.warm_up()
            await bench.run(Origin.WARM)

    run(scenario())


def test_nothing_is_left_of_a_launcher_that_was_killed(bench: Bench) -> None:
    """This includes the zygote, the processes on standby and the ranks, however they were created."""
    bench.script(
        """
        import heavy, os, pathlib, time
        if os.environ["RANK"] != "0":
            pathlib.Path(f"rank-{os.getpid()}").touch()
            time.sleep(600)
        """
    )
    launcher = bench.folder / "launcher.py"
    launcher.write_text(
        textwrap.dedent(
            """
            import asyncio, os, pathlib, sys
            from holdfast.launcher.process import spawn_pool as pool

            async def main():
                own = pool.Pool(argv=[sys.executable, "train.py"], warm=1)
                def start(rank):
                    return own.spawn(environ={**os.environ, "RANK": rank}, prefix="", on_exit=lambda end: None)
                await start("0").reaped.wait()
                own.refill()
                while not own.ready: await asyncio.sleep(0.01)
                ranks = [start("1"), start("2")]
                print(*(rank.origin for rank in ranks), file=sys.stderr)
                own.refill()
                while not own.ready: await asyncio.sleep(0.01)
                pathlib.Path("ready").touch()
                await asyncio.sleep(600)

            pool._FORK_SECONDS = 240.0
            asyncio.run(main())
            """
        )
    )
    process = subprocess.Popen([sys.executable, str(launcher)], env=bench.environ, stderr=subprocess.PIPE)

    async def scenario() -> None:
        ready = bench.folder / "ready"
        await eventually(lambda: ready.exists() and len(list(bench.folder.glob("rank-*"))) == 2, "all run")
        numbers = children("", parent=process.pid)
        assert len(numbers) == 4
        process.kill()
        await eventually(lambda: all(map(gone, numbers)), "all are gone")

    try:
        run(scenario())
    finally:
        process.kill()
        _, said = process.communicate()
    assert b"warm zygote" in said


def test_interpreters_are_on_standby_if_an_import_starts_threads(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """New interpreters are started instead of forks."""
    bench.module("busy", "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()")
    argv = bench.script("import busy, heavy, threading; assert threading.active_count() == 2")

    async def scenario() -> None:
        async with bench.over(argv):
            await bench.warm_up()
            assert not bench.pool.can_fork
            assert (await bench.run(Origin.WARM)).returncode == 0
            await bench.run(Origin.FRESH)
            await bench.warm_up()
            assert (await bench.run(Origin.WARM)).returncode == 0

    run(scenario())
    assert [r.getMessage() for r in caplog.records if "busy" in r.getMessage()] == [
        "busy started 1 threads Thread-1 (wait): forking is not safe, so warm standby processes are new interpreters"
    ]


@pytest.mark.usefixtures("hears_out")
@pytest.mark.parametrize("case", BAD)
def test_an_import_that_fails_is_left_to_the_script(
    bench: Bench, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """The failure is logged once, also if more processes are on standby later."""
    source, why = BAD[case]
    caplog.set_level("INFO", "holdfast.launcher.pool")
    bench.module("bad_inner", "")
    bench.module("bad", source)
    argv = bench.script(
        """
        import heavy, os, sys
        try:
            import bad
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        else:
            print(bad.RANK, file=sys.stderr)
        """
    )
    seen = []

    async def scenario() -> None:
        async with bench.over(argv, warm=2):
            await bench.warm_up(2)
            await bench.run(Origin.WARM)
            seen.extend([await bench.run(Origin.WARM, RANK="3"), await bench.run(Origin.ZYGOTE, RANK="3")])
        bench.pool = Pool(argv=argv, warm=0)
        seen.append(await bench.run(Origin.FRESH, RANK="3"))

    run(scenario())
    warm, zygote, fresh = [(ended.returncode, ended.stderr_tail) for ended in seen]
    assert warm == zygote == fresh
    assert [r.getMessage() for r in caplog.records if r.getMessage().startswith("bad ")] == [
        f"bad is not loaded ahead of time: {why}"
    ]


def test_an_import_that_ends_the_process_is_given_up_at_last(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.module("deadly", "import os, sys; sys.stderr.write('no licence\\n'); os._exit(9)")
    argv = bench.script("if 0: import deadly")
    failed = "a warm standby process ended with 9 before it was ready: no licence"

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    async def scenario() -> None:
        async with bench.over(argv):
            for times in (1, 2, 3):
                bench.pool.refill()
                await eventually(lambda: said().count(failed) == times, "its end is seen")  # noqa: B023
            before = set(children())
            bench.pool.refill()
            assert set(children()) <= before
            await bench.run(Origin.FRESH)

    run(scenario())
    assert said()[-1] == "warm standby is off from now on: ranks start as new interpreters"


def test_a_refill_returns_at_once_and_a_spawn_waits_for_none(bench: Bench) -> None:
    """While imports are running, a rank is a new interpreter."""
    bench.module("slow", "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)")
    argv = bench.script("if 0: import slow")

    async def scenario() -> None:
        async with bench.over(argv):
            bench.pool.refill()
            bench.pool.refill()
            await eventually(lambda: len(children("holdfast-zygote")) == 1, "the zygote imports")
            await bench.run(Origin.FRESH)
            (bench.folder / "go").touch()
            await eventually(lambda: bench.pool.ready == 1, "one stands by")
            await bench.run(Origin.WARM)

    run(scenario())


def test_what_was_loaded_under_another_environment_is_not_used(bench: Bench) -> None:
    argv = bench.script("import heavy")

    async def scenario() -> None:
        async with bench.over(argv):
            await bench.warm_up()
            before = children("holdfast-")
            await bench.run(Origin.FRESH, OMP_NUM_THREADS="3")
            await eventually(lambda: all(map(gone, before)), "they are ended")
            bench.environ["OMP_NUM_THREADS"] = "3"
            await bench.warm_up()
            await bench.run(Origin.WARM)

    run(scenario())


@pytest.mark.parametrize(
    "argv",
    [["bash", "-c", "true"], [sys.executable, "-c", "pass"], [sys.executable, "plain.py"]],
    ids=["no python", "no script", "nothing to load"],
)
def test_what_gains_nothing_from_a_pool_gets_none(bench: Bench, argv: list[str]) -> None:
    (bench.folder / "plain.py").write_text("import json, own")
    (bench.folder / "own.py").write_text("import decimal")

    async def scenario() -> None:
        async with bench.over(argv):
            before = set(children())
            bench.pool.refill()
            await eventually(lambda: set(children()) <= before, "nobody loads anything")
            bench.pool.refill()
            await bench.run(Origin.FRESH)
            assert set(children()) <= before

    run(scenario())
