"""A script cannot detect how its process was created."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from pool_bench import SCRIPTS, Bench, children, own_memory, run

from holdfast.launcher.process.child import Origin
from holdfast.launcher.process.spawn_pool import Pool

# What the code of the user sees


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
    """The test uses the C locale, in which the interpreter itself adds a variable to its environment."""
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
    """They may read the rank at import. What they import in turn is loaded in advance."""
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


# With torch


@pytest.mark.thorough
def test_torch_is_loaded_touched_and_as_new(bench: Bench) -> None:
    """torch has no seed, thread or GPU context yet. Gradients, optimizers and groups work."""
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
