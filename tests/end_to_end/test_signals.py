"""What ends a job from outside: signals to the launcher, to all ranks or to one, and the sudden death of a rank."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from launch import Job, run, run_command, start
from run_files import checkpoints, steps

EPOCHS = 8
ARGUMENTS = (
    f"--epochs {EPOCHS} --evaluate-every-epochs {EPOCHS} --checkpoint-every-epochs 1 --run-dir run".split()
)


def signal_ranks(job: Job, number: int, ranks: list[int]) -> None:
    processes = job.rank_processes()
    for rank in ranks:
        processes[rank].send_signal(number)


def resume_command(output: str) -> str:
    """The line after the one that offers it."""
    lines = output.splitlines()
    (index,) = (i for i, line in enumerate(lines) if "To go on:" in line)
    return lines[index + 1].strip()


def assert_whole(run_dir: Path, num_ranks: int) -> None:
    """The run is at its end, and no step is missing or twice."""
    for rank in range(num_ranks):
        numbers = [record["step"] for record in steps(run_dir, rank)]
        assert numbers == list(range(1, len(numbers) + 1))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["epochs"] == pytest.approx(EPOCHS, abs=0.2)
    assert summary["steps_per_rank"] == [len(steps(run_dir, rank)) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("num_ranks", "algorithm", "number", "ranks"),
    [
        (1, "allreduce", signal.SIGINT, [0]),
        (2, "lasgd", signal.SIGTERM, [0, 1]),
        (2, "lasgd", signal.SIGINT, [0, 1]),
        (2, "allreduce", signal.SIGTERM, [1]),
        (2, "sgp --tau 1", signal.SIGTERM, [1]),
    ],
    ids=["interrupted-alone", "terminated", "interrupted", "one-terminated", "sgp-one-terminated"],
)
def test_a_signal_saves_a_checkpoint_and_says_how_to_go_on(num_ranks, algorithm, number, ranks, tmp_path):
    run_dir = tmp_path / "run"
    arguments = [*ARGUMENTS, "--algorithm", *algorithm.split()]
    with start(num_ranks, arguments, log=tmp_path / "log", cwd=tmp_path) as job:
        job.wait_until(lambda: len(checkpoints(run_dir)) > 0)
        signal_ranks(job, number, ranks)
        stopped = job.finish()
    assert stopped.exit_code == 128 + number, stopped.output
    assert "Traceback" not in stopped.output
    assert not (run_dir / "model.pt").exists()
    newest = checkpoints(run_dir)[-1]
    assert newest.name.endswith(f"-step-{len(steps(run_dir))}"), "saved where it stopped, not before"
    finished = run_command(["sh", "-c", resume_command(stopped.output)], cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    assert "resumed at" in finished.output
    assert_whole(run_dir, num_ranks)


def test_a_killed_rank_ends_all_and_the_run_goes_on_from_its_last_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    with start(2, ARGUMENTS, log=tmp_path / "log", cwd=tmp_path) as job:
        job.wait_until(lambda: len(checkpoints(run_dir)) > 0)
        ranks = job.rank_processes()
        ranks[1].kill()
        killed = job.finish(timeout_seconds=60)
        ranks[0].wait(timeout=60)  # none is left behind
    assert killed.exit_code != 0
    assert not (run_dir / "model.pt").exists()
    finished = run(2, ["--run-dir", "run", "--resume"], cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    assert_whole(run_dir, 2)


def test_a_signal_to_the_launcher_is_one_to_all_ranks(tmp_path):
    """What a batch system does at the end of the time allotted. A traced run's command works as well."""
    run_dir = tmp_path / "run"
    with start(2, [*ARGUMENTS, "--trace"], log=tmp_path / "log", cwd=tmp_path) as job:
        job.wait_until(lambda: len(checkpoints(run_dir)) > 0)
        job.terminate_launcher()
        stopped = job.finish()
    assert stopped.exit_code != 0
    finished = run_command(["sh", "-c", resume_command(stopped.output)], cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    assert_whole(run_dir, 2)
