"""The import rules that keep the program testable without MPI, and `--help` quick."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pushreduce

PACKAGE = Path(pushreduce.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
MAY_IMPORT_MPI = {f"communication/{name}.py" for name in ("horovod_mpi", "push_sum_window", "startup")}
MAX_NUM_LINES = 350


def imported_by(path: Path) -> set[str]:
    """Full names of all that a module imports, `from a import b` as a.b; relative imports are refused."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(names: set[str], *packages: str) -> set[str]:
    return {name for name in names if any(f"{name}.".startswith(f"{each}.") for each in packages)}


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_there_is_something_to_check() -> None:
    assert {"settings.py", "algorithms/base.py"} <= {relative(path) for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_mpi_and_horovod_are_imported_in_three_modules_only(path: Path) -> None:
    if relative(path) not in MAY_IMPORT_MPI:
        assert not within(imported_by(path), "mpi4py", "horovod")


@pytest.mark.parametrize("path", sorted((PACKAGE / "communication").glob("*.py")), ids=relative)
def test_communication_knows_neither_who_uses_it_nor_its_models(path: Path) -> None:
    rooms = (f"pushreduce.{room}" for room in ("algorithms", "training", "simulation", "workloads"))
    assert not within(imported_by(path), *rooms)


@pytest.mark.parametrize(
    "name",
    [
        "network",
        "event_queue",
        "cluster_model",
        "collectives",
        "time_line",
        "timing",
        "push_timing",
        "planning",
        "plan_view",
    ],
)
def test_times_are_simulated_without_torch(name: str) -> None:
    names = imported_by(PACKAGE / "simulation" / f"{name}.py")
    assert not within(names, "torch", "greenlet", "pushreduce.algorithms")


@pytest.mark.parametrize("path", sorted((PACKAGE / "algorithms").glob("*.py")), ids=relative)
def test_algorithms_know_neither_cluster_nor_clock(path: Path) -> None:
    implementations = (
        f"pushreduce.communication.{name}"
        for name in ("horovod_mpi", "push_sum_window", "startup", "simulated")
    )
    forbidden = ("os", "time", "datetime", "threading", "socket", "pushreduce.training", *implementations)
    assert not within(imported_by(path), *forbidden, "mpi4py", "horovod")


@pytest.mark.parametrize("name", ["global_view", "push_sum_trace", "push_sum_view"])
def test_the_oracle_shares_only_topology_with_the_program(name) -> None:
    names = imported_by(PACKAGE / "simulation" / f"{name}.py")
    oracle = (f"pushreduce.simulation.{module}" for module in ("global_view", "push_sum_trace"))
    assert within(names, "pushreduce") <= within(names, "pushreduce.communication.topology", *oracle)


@pytest.mark.parametrize("name", ["mailbox", "mailbox_check", "topology", "push_sum_window"])
def test_the_mailbox_needs_neither_torch_nor_horovod(name: str) -> None:
    names = imported_by(PACKAGE / "communication" / f"{name}.py")
    assert not within(names, "torch", "horovod")
    # Nor through another module of ours.
    assert {each.split(".")[2] for each in within(names, "pushreduce")} <= {"mailbox", "topology"}


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_modules_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_NUM_LINES


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_modules_say_what_they_own(path: Path) -> None:
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text))


def test_the_command_line_needs_neither_torch_nor_mpi() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(PACKAGE.parent)!r})
from pushreduce.command_line import parse
parse([])
try:
    parse(["--help"])
except SystemExit as ending:
    assert ending.code == 0
heavy = {{"torch", "torchvision", "numpy", "mpi4py", "horovod"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--tau-max" in done.stdout


def test_a_run_is_read_and_compared_without_torch_or_mpi() -> None:
    """`scripts/compare` answers at once, also where a run's directory was copied to and torch is not."""
    program = f"""
import runpy, sys
sys.path.insert(0, {str(PACKAGE.parent)!r})
import pushreduce.training.curves
import pushreduce.training.summary
import pushreduce.training.metrics
sys.argv = ["compare", "--help"]
try:
    runpy.run_path({str(PACKAGE.parents[1] / "scripts" / "compare")!r}, run_name="__main__")
except SystemExit as ending:
    assert ending.code == 0
heavy = {{"torch", "torchvision", "mpi4py", "horovod"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--output" in done.stdout
