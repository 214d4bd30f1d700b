"""scripts/launch with programs in place of mpirun and ssh: its command lines, and what keeps a host out."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = {
    "mpich": "HYDRA build details:\n    Version:      5.0.2",
    "openmpi": "mpirun (Open MPI) 5.0.11",
}


def program(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.write_text("#!/bin/sh\n" + text + "\n")
    path.chmod(0o755)


@pytest.fixture
def launch(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Runs scripts/launch with an mpirun that prints its arguments and an ssh that does as told."""

    def run(*arguments: str, mpi: str = "mpich", ssh: str = "exit 0", hosts: str | None = None):  # type: ignore[no-untyped-def]
        program(
            tmp_path,
            "mpirun",
            f'[ "$1" != --version ] || {{ echo "{VERSIONS[mpi]}"; exit; }}; echo "$@"; exit 7',
        )
        program(tmp_path, "ssh", ssh)
        hostfile = []
        if hosts is not None:
            (tmp_path / "hosts").write_text(hosts)
            hostfile = ["--hostfile", str(tmp_path / "hosts")]
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "MY_SETTING": "1",
        }
        return subprocess.run(
            [sys.executable, str(ROOT / "scripts/launch"), *hostfile, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=60,
        )

    return run


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_unequal_slots_and_all_ranks(launch, mpi: str) -> None:  # type: ignore[no-untyped-def]
    result = launch(
        "--dry-run", "python", "train.py", "--tau-max", "5", mpi=mpi, hosts="a slots=4\n\nb:2 # small\n"
    )
    words = result.stdout.split()
    assert result.returncode == 0, result.stderr
    assert words[:3] == ["mpirun", "-np", "6"]
    assert "a:4,b:2" in words
    assert words[-4:] == ["python", "train.py", "--tau-max", "5"]
    assert ("MY_SETTING" in words) == (mpi == "openmpi"), "MPICH forwards by itself"
    assert "SSH_CONNECTION" not in words


def test_it_becomes_mpirun(launch) -> None:  # type: ignore[no-untyped-def]
    result = launch("-np", "3", "true")
    assert result.returncode == 7, "mpirun's exit code is the launcher's"
    assert result.stdout.split() == ["-np", "3", "-hosts", "localhost:3", "-bind-to", "none", "true"]


@pytest.mark.parametrize(
    ("arguments", "hosts", "wrong"),
    [
        (["-np", "7", "true"], "a:4\nb:2", "-np 7, but the hosts have 6 slots"),
        (["-np", "0", "true"], None, "-np 0"),
        (["true"], None, "give the number of ranks"),
        (["-np", "2"], None, "no program to start"),
        (["true"], "a:4\nb c d", ":2: 'b c d' is not a host"),
        (["--hostfile", "/nowhere/hosts", "true"], None, "cannot read the hostfile /nowhere/hosts"),
    ],
)
def test_mistakes_are_one_line(launch, arguments: list[str], hosts: str | None, wrong: str) -> None:  # type: ignore[no-untyped-def]
    result = launch(*arguments, hosts=hosts)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert wrong in result.stderr
    assert result.stderr.count("\n") == 1


def ssh_to(address: str, port: int, otherwise: str) -> str:
    return f'[ "$1" = -G ] && {{ echo "hostname {address}"; echo "port {port}"; exit; }}; {otherwise}'


def test_ssh_tells_name_port_key_and_checkout_apart(launch) -> None:  # type: ignore[no-untyped-def]
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        no_name = launch("true", hosts="far:2", ssh=ssh_to("name.invalid", 22, "exit 0"))
        no_port = launch("true", hosts="far:2", ssh=ssh_to("127.0.0.1", port, "exit 0"))
        bound.listen()
        no_key = launch("true", hosts="far:2", ssh=ssh_to("127.0.0.1", port, "echo Denied >&2; exit 255"))
        no_checkout = launch("true", hosts="far:2", ssh=ssh_to("127.0.0.1", port, "exit 1"))
        fine = launch("true", hosts="# one\nfar:2", ssh=ssh_to("127.0.0.1", port, "exit 0"))
    assert "host far (line 1): the name name.invalid does not resolve" in no_name.stderr
    assert f"port {port} does not answer" in no_port.stderr
    assert "(Denied); try: ssh-copy-id far" in no_key.stderr
    assert "put the checkout at the same path" in no_checkout.stderr
    assert {run.returncode for run in (no_name, no_port, no_key, no_checkout)} == {2}
    assert fine.stdout.split()[:4] == ["-np", "2", "-hosts", "far:2"], fine.stderr
