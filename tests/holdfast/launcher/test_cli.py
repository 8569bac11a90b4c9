"""The command line reports what is wrong and how to fix it."""

from __future__ import annotations

import importlib.metadata

import pytest

from holdfast import __version__
from holdfast.cli.main import main
from holdfast.cli.run_options import parse
from holdfast.core.environment import Environment
from holdfast.core.errors import UsageError
from holdfast.core.protocol import ExitCode
from holdfast.launcher.rendezvous.roster import RunRequest


def test_torchruns_words_are_read_in_both_spellings() -> None:
    words = "run --nproc_per_node 2 --nnodes=2:4 --rdzv-endpoint node-1:29400 --max_restarts 0 --rdzv_backend=c10d"
    options = parse([*words.split(), "--rdzv-id", "mine", "--", "python", "train.py", "--lr", "3e-4"])
    assert (options.processes, options.min_nodes, options.max_nodes) == (2, 2, 4)
    assert options.endpoint == ("node-1", 29400)
    assert (options.max_restarts, options.run_name) == (0, "mine")
    assert options.command == ("python", "train.py", "--lr", "3e-4")


@pytest.mark.parametrize(("word", "wanted"), [("0", 0), ("2", 2), ("none", None)])
def test_warm_processes_can_be_counted_or_done_without(word: str, wanted: int | None) -> None:
    assert parse(["run", "--warm-processes", word, "--", "x"]).warm_processes == wanted
    assert parse(["run", "--", "x"]).warm_processes == 1


def test_without_dashes_the_rest_belongs_to_the_script() -> None:
    options = parse(["run", "--nproc-per-node", "1", "train.py", "--nnodes", "7"])
    assert options.command == ("train.py", "--nnodes", "7")
    assert options.max_nodes == 1


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["run"], ["no command to run", "-- python train.py"]),
        (["run", "--nproc-per-node", "two", "--", "x"], ["--nproc-per-node", "'two'", "integer"]),
        (["run", "--nproc-per-node", "0", "--", "x"], ["--nproc-per-node", "at least 1"]),
        (["run", "--nnodes", "4:2", "--", "x"], ["--nnodes", "at most MAX"]),
        (["run", "--replica-step", "2", "--", "x"], ["--nnodes 1:1", "--replica-step 2"]),
        (["run", "--nnodes", "2", "--", "x"], ["--nnodes", "--rdzv-endpoint"]),
        (["run", "--rdzv-endpoint", "node-1", "--", "x"], ["--rdzv-endpoint", "HOST:PORT"]),
        (["run", "--rdzv-backend", "etcd", "--", "x"], ["--rdzv-backend", "c10d"]),
        (["run", "--node-rank", "1", "--", "x"], ["--node-rank", "assigns"]),
        (["run", "--master_addr=h", "--", "x"], ["--master-addr", "--rdzv-endpoint"]),
        (["run", "--checkpoint-interval", "soon", "--", "x"], ["--checkpoint-interval", "30s", "Auto"]),
        (
            ["run", "--checkpoint-delta-threshold", "low", "--", "x"],
            ["--checkpoint-delta-threshold", "'low'", "a number"],
        ),
        (
            ["run", "--checkpoint-delta-threshold", "1e-5", "--", "x"],
            ["--checkpoint-delta-threshold", "full_every 1"],
        ),
        (["run", "--checkpoint-retention", "monthly=2", "--", "x"], ["--checkpoint-retention", "monthly=2"]),
        (["run", "--hang-timeout", "soon", "--", "x"], ["--hang-timeout", "integer number of seconds", "Off"]),
        (["run", "--hang-timeout", "9", "--hang-min-timeout", "2", "--", "x"], ["--hang-min-timeout", "Auto"]),
        (["run", "--max-restarts", "-1", "--", "x"], ["--max-restarts"]),
        (["run", "--warm-processes", "some", "--", "x"], ["--warm-processes", "integer", "none"]),
        (["run", "--frobnicate", "--", "x"], ["--frobnicate"]),
        (["go"], ["go"]),
    ],
)
def test_a_bad_option_is_named_with_its_mend(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_what_deltas_may_leave_out_is_told_to_all() -> None:
    words = ["run", "--checkpoint-full-every", "8", "--checkpoint-delta-threshold", "1e-5", "--", "x"]
    options = parse(words)
    terms = RunRequest(run_id="run", options=options, environment=Environment().with_options(options.given))
    assert terms.settings()["checkpoint"]["deltaThreshold"] == 1e-5
    assert "deltaThreshold" not in RunRequest(run_id="run").settings()["checkpoint"]


def test_a_bad_option_ends_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nnodes", "x", "--", "true"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--nnodes" in error


def test_a_network_endpoint_needs_a_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("HOLDFAST_JOB_KEY_FILE", raising=False)
    assert main(["run", "--nnodes", "2", "--rdzv-endpoint", "192.0.2.1:29400", "--", "true"]) == 2
    assert "HOLDFAST_JOB_KEY_FILE" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_the_commands_and_exit_codes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: holdfast COMMAND")
    assert all(f"\n    {verb}" in text for verb in ("run", "demo", "chaos", "timeline", "checkpoints"))
    assert all(f"\n  {code} " in text for code in (*map(int, ExitCode), "128 + n"))


def test_the_version_names_protocol_and_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    torch = importlib.metadata.version("torch")
    assert capsys.readouterr().out.startswith(f"holdfast {__version__} (protocol 1, torch {torch}, Python ")
