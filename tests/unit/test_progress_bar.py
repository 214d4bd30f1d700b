"""The progress bar: a bar where there is a terminal, few whole lines where there is none."""

import io

from pushreduce.training.metrics import Record
from pushreduce.training.progress_bar import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show_run(stream: io.StringIO, *, num_steps: int, seconds_per_step: float, initial_steps: int = 0) -> str:
    now = 0.0
    bar = ProgressBar(128 * num_steps, initial_samples=128 * initial_steps, stream=stream, now=lambda: now)
    for step in range(initial_steps + 1, num_steps + 1):
        now += seconds_per_step
        bar.step(step_record(step))
        if step == num_steps // 2:
            bar.evaluation({"kind": "evaluation", "top1_percent": 91.5})
    bar.close()
    return stream.getvalue()


def step_record(step: int) -> Record:
    phases = {"compute_seconds": 0.06, "local_update_seconds": 0.01, "communication_seconds": 0.01}
    return {"kind": "step", "samples": 128 * step, "loss": 0.25, **phases, "blocked_seconds": 0.02}


def test_a_log_file_gets_few_whole_lines() -> None:
    for num_steps, seconds_per_step in ((2000, 0.02), (2000, 1.0), (5, 0.001), (10, 5000)):
        text = show_run(io.StringIO(), num_steps=num_steps, seconds_per_step=seconds_per_step)
        assert "\r" not in text
        assert text.endswith("\n")
        assert 1 <= len(text.splitlines()) <= 101
        assert text.splitlines()[-1].startswith("100%")


def test_a_line_has_the_time_left_the_loss_top1_and_the_blocked_share() -> None:
    lines = show_run(io.StringIO(), num_steps=2000, seconds_per_step=0.1).splitlines()
    three_quarters = next(line for line in lines if line.startswith(" 75%"))
    assert "<00:50" in three_quarters or "<00:49" in three_quarters  # of 200 s, cut to whole seconds
    assert "loss 0.25" in three_quarters
    assert "top-1 91.5 %" in three_quarters
    assert "blocked 20 %" in three_quarters
    assert "top-1" not in lines[0]


def test_the_time_left_of_a_resumed_run_does_not_count_what_was_done_before() -> None:
    lines = show_run(io.StringIO(), num_steps=2000, initial_steps=1000, seconds_per_step=0.1).splitlines()
    three_quarters = next(line for line in lines if line.startswith(" 75%"))
    assert "[00:50<00:50" in three_quarters or "[00:49<00:5" in three_quarters


def test_a_terminal_gets_a_bar_that_ends_on_a_new_line() -> None:
    text = show_run(Terminal(), num_steps=200, seconds_per_step=0.1)
    assert "\r" in text
    assert "100%" in text
    assert text.endswith("\n")
