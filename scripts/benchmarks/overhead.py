"""One or more ranks: what a step of the training loop costs outside compute, communication, waiting and the update.

    mpirun -np 2 python scripts/benchmarks/overhead.py --directory DIR --algorithm lasgd --batch-size 32 --pairs 20

Each figure is a share of the compute time of the same block of steps (`--pairs` is the number of blocks):
step():   the time of `algorithm.step()` outside the optimizer's update, communication and waiting;
hooks:    SGD-AR's only, its work inside `backward()` outside communication (the hook's call is not in it);
loop:     everything else from one step to the next: schedule, record, progress bar, TensorBoard;
messages: communication that is not waiting (copies, posting, applying), for comparison.
"""

from __future__ import annotations

import time

import pairs
import workbench
from piece import parse_arguments

from pushreduce.communication import startup
from pushreduce.training.metrics import read_records


def main() -> None:
    """Measures and prints."""
    arguments = parse_arguments(__doc__)
    communicator = workbench.start()
    num_steps = arguments.warm_up + arguments.pairs * arguments.steps
    ends: list[float] = []

    def after_step() -> int | None:
        ends.append(time.perf_counter())
        return 1 if len(ends) >= num_steps else None

    loop = workbench.build_loop(
        arguments.algorithm, arguments.batch_size, arguments.directory, communicator, after_step
    )
    step, in_step = loop.algorithm.step, []  # seconds of each call, and its parts that are accounted for

    def timed_step(num_samples: int) -> None:
        stats = loop.algorithm.stats
        accounted = stats.local_update_seconds + stats.communication_seconds + stats.blocked_seconds
        start = time.perf_counter()
        step(num_samples)
        seconds = time.perf_counter() - start
        accounted = (
            stats.local_update_seconds + stats.communication_seconds + stats.blocked_seconds - accounted
        )
        in_step.append((seconds, accounted))

    loop.algorithm.step = timed_step  # type: ignore[method-assign]
    workbench.run_to_stop(loop)
    if communicator.rank == 0:
        report_shares(
            arguments, communicator.size, list(read_records(loop.run_directory.metrics(0))), in_step, ends
        )
    startup.shut_down()


def report_shares(arguments, num_ranks, records, in_step, ends) -> None:  # type: ignore[no-untyped-def]
    """Prints the figures, from the steps after the warm-up in blocks."""
    shares: dict[str, list[float]] = {"step()": [], "loop": [], "messages": []}
    compute_ms = []
    for first in range(arguments.warm_up, len(ends) - arguments.steps + 1, arguments.steps):
        block = range(first, first + arguments.steps)
        compute = sum(records[i]["compute_seconds"] for i in block)
        communication = sum(records[i]["communication_seconds"] for i in block)
        in_hooks = communication - sum(
            in_step[i][1] - records[i]["local_update_seconds"] - records[i]["blocked_seconds"] for i in block
        )
        step_seconds = sum(in_step[i][0] for i in block)
        total = ends[block[-1]] - ends[block[0] - 1]
        shares["step()"].append((step_seconds - sum(in_step[i][1] for i in block)) / compute)
        shares["loop"].append((total - step_seconds - compute - in_hooks) / compute)
        shares["messages"].append(communication / compute)
        compute_ms.append(1e3 * compute / arguments.steps)
    facts = {
        "algorithm": arguments.algorithm,
        "batch_size": arguments.batch_size,
        "num_ranks": num_ranks,
        "b_step_ms": pairs.describe(compute_ms)["median"],
    }
    for name, values in shares.items():
        pairs.report(f"{name} over compute", values=values, **facts)


if __name__ == "__main__":
    main()
