"""Rank processes from the pool: real interpreters, real forks, real signals.

A small installed module stands for what takes long to import; only the last test loads torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.launcher.process import spawn_pool
from holdfast.launcher.process.child import Child, Origin, ProcessExit
from holdfast.launcher.process.spawn_pool import Pool

SCRIPTS = Path(__file__).parents[1] / "scripts"
DEADLINE = 240.0
PATIENCE = 240.0
"""For the zygote's forks: the pool's own is too short for a loaded machine, on which it prefers a new interpreter."""


class Bench:
    """A folder with a script and installed modules, and a pool over them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.installed = folder / "site-packages"
        self.installed.mkdir()
        self.module("heavy", "VALUE = 1")
        self.environ = {
            **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.environ["PYTHONPATH"] = os.pathsep.join(
            [str(self.installed), str(Path(__file__).parents[4] / "trainer_lib" / "src")]
        )
        self.out = folder / "out"
        self.pool: Pool

    def module(self, name: str, source: str) -> None:
        (self.installed / f"{name}.py").write_text(textwrap.dedent(source))

    def script(self, source: str) -> list[str]:
        file = self.folder / "train.py"
        file.write_text(textwrap.dedent(source))
        return [sys.executable, str(file)]

    def start(self, **environ: str) -> tuple[Child, asyncio.Future[ProcessExit]]:
        ended: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        given = {**self.environ, "RANK": "0", "HOLDFAST_OUT": str(self.out), **environ}
        return self.pool.spawn(environ=given, prefix="", on_exit=ended.set_result), ended

    async def run(self, origin: Origin, **environ: str) -> ProcessExit:
        child, ended = self.start(**environ)
        result = await ended
        assert child.origin == origin
        return result

    async def warm_up(self, ready: int = 1) -> None:
        self.pool.refill()
        await eventually(lambda: self.pool.ready == ready, "a process stands by")

    @contextlib.asynccontextmanager
    async def over(self, argv: list[str], *, warm: int = 1) -> AsyncIterator[None]:
        """A pool over a command, after its first run, which is always fresh."""
        self.pool = Pool(argv=argv, warm=warm)
        try:
            await self.run(Origin.FRESH)
            yield
        finally:
            self.pool.close()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Nobody is left of it when the next test looks for its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spawn_pool, "_FORK_SECONDS", PATIENCE)
    before = children()
    yield Bench(tmp_path)
    end = time.monotonic() + DEADLINE
    while ours := set(children()) - set(before):
        assert time.monotonic() < end, f"{ours} do not end"
        for pid in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


async def eventually(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"not within {DEADLINE:.0f} s: {what}"
        await asyncio.sleep(0.01)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def gone(pid: int) -> bool:
    """Whether a process is dead, be it reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def children(name: str = "", parent: int | None = None) -> list[int]:
    """Live children of a process, our own by default, whose name begins so; one that just started has no name yet."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "comm").read_text().startswith(name):
                state, its_parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z" and int(its_parent) == (parent or os.getpid()):
                    found.append(int(entry.name))
    return found


def own_memory(pid: int) -> int:
    """A process's own share of what it uses (PSS), in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) // 1024


# What user code sees


@pytest.mark.parametrize(
    "words",
    [
        ["{scripts}/facts.py", "--lr", "3", "-c"],
        ["-u", "./sub/../facts.py"],
        ["link.py"],
        ["-P", "-X", "faulthandler", "facts.py"],
        ["-u", "-m", "package.facts", "x"],
    ],
    ids=["absolute", "relative", "symlink", "options", "module"],
)
def test_a_script_cannot_tell_how_its_process_came_to_be(bench: Bench, words: list[str]) -> None:
    """In the C locale, in which the interpreter itself adds a variable to its environment."""
    for folder in (bench.folder / "sub", bench.folder / "package"):
        folder.mkdir()
        shutil.copy(SCRIPTS / "facts.py", folder)
    shutil.copy(SCRIPTS / "facts.py", bench.folder)
    (bench.folder / "link.py").symlink_to("sub/facts.py")
    argv = [sys.executable, *(word.format(scripts=SCRIPTS) for word in words)]
    seen = {}

    async def scenario() -> None:
        bench.pool = Pool(argv=argv, warm=1)
        for origin in (Origin.FRESH, Origin.WARM, Origin.ZYGOTE):
            if origin is Origin.WARM:
                await bench.warm_up()
            ended = await bench.run(origin, HOLDFAST_GIVEN="a b\n", LOCAL_RANK="3")
            assert ended.returncode == 0, ended.stderr_tail
            seen[origin] = json.loads(bench.out.read_text())
        bench.pool.close()

    run(scenario())
    assert seen[Origin.FRESH]["environ"]["LOCAL_RANK"] == "3"
    assert seen[Origin.WARM] == seen[Origin.FRESH]
    assert seen[Origin.ZYGOTE] == seen[Origin.FRESH]


def test_two_processes_of_one_zygote_draw_different_numbers(bench: Bench) -> None:
    argv = bench.script(
        """
        import heavy, json, multiprocessing, os, pathlib, random, tempfile, uuid
        key = multiprocessing.current_process().authkey.hex()
        drawn = [random.random(), tempfile.mktemp(), uuid.uuid4().hex, key]
        pathlib.Path(os.environ["HOLDFAST_OUT"]).write_text(json.dumps(drawn))
        """
    )
    drawn = []

    async def scenario() -> None:
        async with bench.over(argv, warm=2):
            await bench.warm_up(2)
            for origin in (Origin.WARM, Origin.WARM, Origin.ZYGOTE):
                await bench.run(origin)
                drawn.append(json.loads(bench.out.read_text()))

    bench.module("heavy", "import random, tempfile; random.seed(1); tempfile.mktemp()")
    run(scenario())
    for values in zip(*drawn, strict=True):
        assert len(set(values)) == 3


def test_the_users_own_modules_run_in_the_rank_alone(bench: Bench) -> None:
    """They may read the rank as they are imported; what they import in turn is loaded ahead."""
    (bench.folder / "own.py").write_text(
        "import heavy, os, pathlib\npathlib.Path(f'ran-{os.environ.get(\"RANK\")}').touch()"
    )
    argv = bench.script("import own, os; assert int(os.environ['RANK']) == 5")

    async def scenario() -> None:
        async with bench.over(argv):
            await bench.warm_up()
            (bench.folder / "ran-0").unlink()
            assert (await bench.run(Origin.WARM, RANK="5")).returncode == 0

    bench.environ["RANK"] = "5"
    run(scenario())


# How they end

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


def test_every_end_is_reported_as_that_of_an_interpreter(bench: Bench) -> None:
    """Also what it wrote last. Only the traceback of an interrupt shows where the process came from."""
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


def test_nothing_that_a_killed_rank_started_is_left_when_it_counts_as_ended(bench: Bench) -> None:
    """In its group, in a session of its own, and a grandchild whose parent has ended; forked, or another program."""
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
    """Such as a tracker that still sends its last records."""
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


# What goes wrong


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
    """Neither the zygote nor those that stand by nor ranks, however they came to be."""
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


def test_where_an_import_starts_a_thread_new_interpreters_stand_by(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
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
        "busy started 1 threads Thread-1 (wait): forking is not safe, so new interpreters stand by"
    ]


BAD = {
    "raises": ("raise RuntimeError('not today')", "RuntimeError: not today"),
    "exits": ("import sys; sys.exit(4)", "SystemExit: 4"),
    "reads the rank": (
        "import os\nRANK = int(os.environ.get('RANK', 0))",
        "_ReadsPlaceError: it reads RANK as it is imported",
    ),
    "half a package": ("import bad_inner; raise ImportError", "ImportError"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_import_that_fails_is_left_to_the_script(
    bench: Bench, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """And said once, however many processes stand by later."""
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
    failed = "a process that was to stand by ended with 9 no licence"

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
    assert said()[-1] == "no process stands by from now on: ranks start as new interpreters"


def test_a_refill_returns_at_once_and_a_spawn_waits_for_none(bench: Bench) -> None:
    """While imports still run, a rank is a new interpreter."""
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


# With torch


@pytest.mark.thorough
def test_torch_is_loaded_touched_and_as_new(bench: Bench) -> None:
    """Nothing has seeded it, no thread runs, no GPU was asked for; gradients, optimizers and groups work."""
    argv = bench.script(
        """
        import json, os, pathlib, sys
        assert "torch" in sys.modules or os.environ["RANK"] == "0"
        ahead = "torch._dynamo" in sys.modules and "holdfast.training.init" in sys.modules
        import torch, torch.distributed as dist
        facts = {
            "ahead": ahead,
            "threads": len(os.listdir("/proc/self/task")),
            "cuda": torch.cuda.is_initialized(),
            "poisoned": torch.cuda._is_in_bad_fork(),
            "intra": torch.get_num_threads(),
            "drawn": torch.rand(2).tolist(),
        }
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        layer = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.ones(2, 4)).sum().backward()
        dist.all_reduce(layer.weight.grad)
        optimizer.step()
        pathlib.Path(os.environ["HOLDFAST_OUT"]).write_text(json.dumps(facts))
        """
    )
    seen = []

    async def scenario() -> None:
        async with bench.over(argv):
            seen.append(json.loads(bench.out.read_text()))
            await bench.warm_up()
            assert own_memory(*children("holdfast-warm")) <= 300
            for origin in (Origin.WARM, Origin.ZYGOTE):
                assert (await bench.run(origin, RANK="1")).returncode == 0
                seen.append(json.loads(bench.out.read_text()))

    bench.environ["OMP_NUM_THREADS"] = "1"
    run(scenario())
    assert [facts.pop("ahead") for facts in seen] == [False, True, True]
    drawn = [tuple(facts.pop("drawn")) for facts in seen]
    assert len(set(drawn)) == 3
    assert seen[0] == seen[1] == seen[2]
