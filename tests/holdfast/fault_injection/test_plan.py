"""The arguments and the seed of `holdfast chaos` alone determine its faults."""

from __future__ import annotations

from itertools import islice

import pytest

from holdfast.cli.chaos.options import parse_chaos
from holdfast.cli.main import main
from holdfast.core.errors import UsageError
from holdfast.fault_injection.plan import Fault, Kind, Plan, make_plan, read_fault, read_rate
from holdfast.telemetry.activity import Activity

SCRIPT = ["--", "python", "train.py"]


def plan(*words: str) -> Plan:
    return parse_chaos([*words, *SCRIPT])[0]


def test_faults_at_steps_are_read_as_they_stand() -> None:
    found = plan("--kill", "rank=1,step=50,at=vote", "--slow", "rank=0,step=3,seconds=0.5,steps=4").faults
    assert found[0] == Fault(number=1, kind=Kind.KILL, rank=1, step=50, at=Activity.VOTE, pick=found[0].pick)
    assert (found[1].kind, found[1].rank, found[1].seconds, found[1].steps) == (Kind.SLOW, 0, 0.5, 4)


def test_bad_sample_strikes_while_the_rank_reads_its_data() -> None:
    (found,) = plan("--bad-sample", "rank=1,step=5").faults
    assert found == Fault(number=1, kind=Kind.BAD_SAMPLE, rank=1, step=5, at=Activity.DATA, pick=found.pick)


def test_what_is_not_ours_goes_to_holdfast_run() -> None:
    words = ["--kill", "rank=1,step=50", "--nproc-per-node", "2", "--seed", "7", "--prefix-output"]
    found, rest = parse_chaos([*words, *SCRIPT])
    assert rest == ["--nproc-per-node", "2", "--prefix-output", *SCRIPT]
    assert found.seed == 7


def test_the_same_seed_strikes_the_same_ranks_at_the_same_times() -> None:
    words = ["--rate", "2/min", "--faults", "kill,stop,sleep", "--kill", "step=9"]
    first, second, other = (plan(*words, "--seed", seed) for seed in ("7", "7", "8"))
    assert list(islice(first.random_faults(), 50)) == list(islice(second.random_faults(), 50))
    assert first.faults == second.faults
    assert list(islice(first.random_faults(), 50)) != list(islice(other.random_faults(), 50))
    assert first.faults != other.faults


def test_a_rate_is_kept_in_the_long_run() -> None:
    made = list(islice(plan("--rate", "2/min", "--seed", "1").random_faults(), 2000))
    assert sum(strike.after for strike in made) == pytest.approx(1000 * 60, rel=0.1)
    assert {strike.kind for strike in made} == {Kind.KILL}


def test_a_fault_without_a_rank_falls_on_one_of_the_world() -> None:
    for number in range(20):
        fault = make_plan(seed=number, specs=[(Kind.KILL, "step=5")], per_second=0.0, kinds=()).faults[0]
        struck = [rank for rank in range(3) if fault.is_due(rank=rank, size=3, activity=Activity.COMPUTE, step=4)]
        assert len(struck) == 1


def test_a_fault_waits_for_its_step_and_its_place() -> None:
    fault = read_fault(Kind.KILL, "rank=1,step=50,at=apply")
    turn = {"rank": 1, "size": 2, "activity": Activity.APPLY, "step": 49}
    assert fault.is_due(**turn)
    assert not fault.is_due(**turn | {"step": 48})
    assert not fault.is_due(**turn | {"rank": 0})
    assert not fault.is_due(**turn | {"activity": Activity.VOTE})


def test_a_plan_reaches_the_ranks_as_it_was_made() -> None:
    fault = read_fault(Kind.STOP, "rank=0,step=4,at=average,seconds=2", number=3)
    assert Fault.from_json(fault.to_json()) == fault


def test_rates_are_read_in_any_unit() -> None:
    assert [read_rate(text) for text in ("2/min", "120/h", "0.5/s")] == [
        pytest.approx(value) for value in (1 / 30, 1 / 30, 0.5)
    ]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--kill", "rank=1"], ["--kill", "expected step=N", "step=50", "--rate"]),
        (["--kill", "rank=one,step=5"], ["--kill", "rank=one", "integer"]),
        (["--kill", "step=0"], ["--kill", "step=0", "at least 1"]),
        (["--kill", "step=5,step=6"], ["--kill", "step=", "once"]),
        (["--kill", "step=5,seconds=3"], ["--kill", "seconds=3", "rank=…"]),
        (["--kill", "step=5,at=lunch"], ["--kill", "at=lunch", "vote"]),
        (["--kill", "5"], ["--kill", "'5'", "rank=1,step=50"]),
        (["--exception", "step=5,at=vote"], ["--exception", "at=", "leave it out"]),
        (["--bad-sample", "step=5,seconds=3"], ["--bad-sample", "seconds=3", "rank=…"]),
        (["--bad-sample", "step=5,at=data"], ["--bad-sample", "at=", "leave it out"]),
        (["--sleep", "step=5,seconds=0"], ["--sleep", "seconds=0", "above 0"]),
        (["--nan-loss", "step=5,seconds=3"], ["--nan-loss", "seconds=3", "steps=…"]),
        (["--nan-gradient", "step=5,at=vote"], ["--nan-gradient", "at=", "leave it out"]),
        (["--flip-weight", "step=5,at=vote"], ["--flip-weight", "at=", "leave it out"]),
        (["--nan-weight", "step=5,steps=3"], ["--nan-weight", "steps=3", "rank=…"]),
        (["--slow", "step=5"], ["--slow", "expected seconds=N", "seconds=0.5"]),
        (["--rate", "2"], ["--rate", "'2'", "2/min"]),
        (["--rate", "0/min"], ["--rate", "'0/min'"]),
        (["--rate", "1/min", "--faults", "kill,boo"], ["--faults", "kill, stop"]),
        (["--rate", "1/min", "--seed", "x"], ["--seed", "'x'"]),
        (["--nproc-per-node", "2"], ["no faults to inject", "--kill rank=1,step=50", "--rate 2/min"]),
        (["--rate", "1/min", "--nnodes", "x"], ["--nnodes", "MIN:MAX"]),
        (["--rate", "1/min", "--frobnicate"], ["--frobnicate"]),
    ],
)
def test_a_bad_option_is_named_with_its_mend(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_chaos([*words, *SCRIPT])
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_script_must_follow_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--rate", "1/min", "train.py"]) == 2
    assert "-- python train.py" in capsys.readouterr().err
