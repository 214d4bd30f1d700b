"""The README's own commands, example and tables: what it promises is run, in a copy of the tree by links."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TIMEOUT_SECONDS = 240


def blocks(kind: str) -> list[str]:
    """The fenced blocks that follow `<!-- tested: KIND -->`."""
    return re.findall(rf"<!-- tested: {kind} -->\n```\w+\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like the checkout, with runs/ of its own."""
    for name in ("src", "scripts", "hostfiles", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)  # whichever environment this test runs in
    return tmp_path


def run(commands: str, cwd: Path) -> str:
    """Runs shell commands, the first that fails ending them; their output. Killed with all they started on timeout."""
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=cwd,
        env={**os.environ, "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"no end after {TIMEOUT_SECONDS} s:\n{output}")
    assert process.returncode == 0, output
    return output


def test_the_readme_has_commands_and_an_example():
    assert len(blocks("commands")) == 4
    assert len(blocks("script")) == 1
    assert len(blocks("plan")) == 1


@pytest.mark.parametrize("commands", blocks("commands"), ids=["start", "resume", "sgp", "simulate"])
@pytest.mark.timeout(TIMEOUT_SECONDS + 30)
def test_commands_work_as_they_stand(commands: str, checkout: Path):
    output = run(commands, checkout)
    for run_directory in (checkout / "runs").iterdir():
        for name in (
            "settings.yaml",
            "environment.json",
            "log.txt",
            "model.pt",
            "summary.json",
            "curves.png",
        ):
            assert (run_directory / name).stat().st_size > 0, f"{run_directory.name}/{name}\n{output}"


def test_the_plan_says_what_is_shown_of_it(checkout: Path):
    (command,) = blocks("plan")
    (shown,) = re.findall(r"```text\n(- .*?)```", README, flags=re.DOTALL)
    output = run(command, checkout)
    assert " ".join(shown.split()) in " ".join(output.split())
    for name in ("plan.md", "plan.csv", "plan.png"):
        assert (checkout / name).stat().st_size > 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_example_trains(num_ranks: int, checkout: Path):
    (example,) = blocks("script")
    assert len([line for line in example.splitlines() if line.strip()]) < 30
    (checkout / "mine.py").write_text(example)
    output = run(f"mpirun -np {num_ranks} python mine.py", checkout)
    (percent,) = re.findall(rf"consensus of {num_ranks} workers: ([\d.]+) % right", output)
    assert float(percent) > 95


def test_files_and_options_that_the_readme_names_exist():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    for script in re.findall(r"\b(?:scripts|hostfiles)/[\w./]+\w", README):
        assert (ROOT / script).exists(), script
    known = subprocess.run(
        [sys.executable, str(ROOT / "src" / "train.py"), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    commands = "\n".join(re.findall(r"python src/train\.py(?: \\\n|[^\n|`#])*", README))
    for option in re.findall(r"--[a-z-]+", commands):
        assert option in known, option


@pytest.mark.parametrize(
    "readme", [ROOT / "README.md", *ROOT.glob("experiments/**/README.md")], ids=lambda p: p.parent.name
)
def test_tables_are_those_of_the_experiments(readme: Path):
    for source, table in re.findall(
        r"<!-- table: (\S+) -->\n(.*?)<!-- end of table -->", readme.read_text(), flags=re.DOTALL
    ):
        assert table == (readme.parent / source).read_text(), f"copy {source} into {readme}"
