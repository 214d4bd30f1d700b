#!/usr/bin/env python3
"""Measures the speed of every algorithm and baseline on emulated clusters of 4 to 16 hosts. Needs root.

    sudo env PATH="$PATH" python experiments/speed/measure.py              all of it, 70 minutes
    sudo env PATH="$PATH" python experiments/speed/measure.py --hosts 8    one cluster

Run it in the activated environment, on a machine that does nothing else. Can be stopped and given again at any time:
finished rounds, in which every system has had its turn, stay in blocks.jsonl and are not repeated. With --hosts 2
--output DIR it tries itself in half a minute; with --report it only writes tables and figure from the blocks there
are. The cluster is taken down in the end, however that comes. Exit code 0: all measured, whether or not the bounds are
met.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "benchmarks")]
from blocks import keep_complete_rounds  # noqa: E402
from pieces import PIECES, RATE_MBIT, TRIAL, Piece  # noqa: E402

EMULATED_CLUSTER = ROOT / "scripts" / "emulated_cluster"
DIRECTORIES = Path("/run/pushreduce-cluster")
START_SECONDS = 180.0
"""Until the ranks of the largest job have started."""
MEAN_STEP_SECONDS = 0.6
END_SECONDS = 30.0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--hosts",
        type=int,
        nargs="+",
        choices=sorted(PIECES),
        default=[size for size, piece in PIECES.items() if piece is not TRIAL],
        help="sizes of clusters, in turn (default: all but 2)",
    )
    parser.add_argument("--name", default="speed", help="of the cluster (default: %(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        default=FOLDER,
        help="where the blocks and tables are (default: beside this program)",
    )
    parser.add_argument("--report", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        if not arguments.report:
            if os.geteuid() != 0:
                raise ValueError('network namespaces need root: run it with sudo env PATH="$PATH"')
            if TRIAL.num_hosts in arguments.hosts and arguments.output == FOLDER:
                raise ValueError(f"--hosts {TRIAL.num_hosts} is a trial and no result: add --output DIR")
            arguments.output.mkdir(parents=True, exist_ok=True)
            for num_hosts in arguments.hosts:
                measure(PIECES[num_hosts], arguments.name, arguments.output / "blocks.jsonl")
        import tables  # imports matplotlib

        tables.write(arguments.output)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def measure(piece: Piece, name: str, blocks: Path) -> None:
    """The rounds of a piece that `blocks` does not have yet."""
    from machine import describe_machine

    num_complete = keep_complete_rounds(piece, blocks)
    if num_complete == piece.rounds:
        print(f"{piece.num_hosts} hosts: measured already", file=sys.stderr)
        return
    facts = describe_machine()
    print(f"{piece.num_hosts} hosts, round {num_complete} of {piece.rounds} ...", file=sys.stderr, flush=True)
    with cluster(name, piece) as hostfile, tempfile.TemporaryDirectory() as directory:
        command = [str(EMULATED_CLUSTER), "run", "--name", name, "--", sys.executable]
        command += [str(ROOT / "scripts" / "launch"), "--hostfile", str(hostfile), sys.executable]
        command += [str(FOLDER / "ranks.py"), "--systems", *piece.systems, f"--directory={directory}"]
        command += [
            f"--first-round={num_complete}",
            f"--rounds={piece.rounds}",
            f"--speed-up={piece.speed_up}",
        ]
        command += [f"--lead-in={piece.lead_in}", f"--steps={piece.steps}"]
        shared = {"num_hosts": piece.num_hosts, "stretch": piece.stretch, "rate_mbit": rate_mbit(piece)}
        with blocks.open("a") as file:
            file.write(json.dumps({"machine": facts}) + "\n")
            for block in run(command, piece):
                load = {"load_average": os.getloadavg()[0]}
                file.write(json.dumps({**shared, **block, "commit": facts["commit"], **load}) + "\n")
                file.flush()
                print(f"  round {block['round']}: {block['system']}", file=sys.stderr, flush=True)
    if keep_complete_rounds(piece, blocks) != piece.rounds:
        raise ValueError("the job ended early without saying why: give the command again")


def rate_mbit(piece: Piece) -> float:
    """Of its links, each way, before time is stretched."""
    return RATE_MBIT * piece.speed_up


@contextmanager
def cluster(name: str, piece: Piece) -> Iterator[Path]:
    """A cluster that stands; its hostfile."""
    words = ["--name", name, "--hosts", str(piece.num_hosts), "--rate", f"{rate_mbit(piece):g}mbit"]
    words += ["--stretch", f"{piece.stretch:g}"]
    try:
        done = subprocess.run(
            [str(EMULATED_CLUSTER), "up", *words], capture_output=True, text=True, env=environment()
        )
        if done.returncode:
            raise ValueError(done.stderr.strip().removeprefix("error: "))
    except BaseException as error:
        # A cluster of that name that stood before is somebody else's.
        if not isinstance(error, ValueError):
            take_down(name)
        raise
    try:
        yield DIRECTORIES / name / "hostfile"
    finally:
        take_down(name)


def take_down(name: str) -> None:
    """Ends the cluster and all that runs in it."""
    subprocess.run([str(EMULATED_CLUSTER), "down", "--name", name], env=environment(), check=False)


def environment() -> dict[str, str]:
    """The activated environment's."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def run(command: list[str], piece: Piece) -> Iterator[dict[str, Any]]:
    """The blocks that a job prints, as they come. The job ends with this generator."""
    num_steps = piece.rounds * len(piece.systems) * (piece.lead_in + piece.steps)
    limit_seconds = START_SECONDS + 2 * num_steps * MEAN_STEP_SECONDS * piece.stretch
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        # What emulated_cluster has started ends with it.
        timer = threading.Timer(limit_seconds, process.terminate)
        timer.start()
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
                else:
                    sys.stderr.write(line)
            code = process.wait()
        finally:
            is_late = timer.finished.is_set()
            timer.cancel()
            end(process)
    if code:
        reason = f"took more than {limit_seconds:.0f} s" if is_late else f"ended with code {code}"
        raise ValueError(f"the job on {piece.num_hosts} hosts {reason}: what it said is above")


def end(process: subprocess.Popen[str]) -> None:
    """Ends what `run` has started, if it has not ended; the cluster's `down` ends what is left."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    main()
