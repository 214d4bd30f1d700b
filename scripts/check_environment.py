"""Checks that MPI, mpi4py and Horovod work together.

    mpirun -np 2 python scripts/check_environment.py

`start` refuses two MPI libraries, a thread level below MPI_THREAD_MULTIPLE and disagreeing ranks; this adds
one average by Horovod and one message by a window. Prints one line; exit code 2 with the reason otherwise.
"""

from __future__ import annotations

import numpy as np

from pushreduce.communication import startup


def main() -> None:
    """Checks and prints."""
    startup.install_exception_hook()
    try:
        process = startup.start(quiet=True)
    except startup.StartupError as error:
        startup.exit_with_bad_input(str(error))
    import horovod.torch as hvd
    import torch
    from mpi4py import MPI

    mean = hvd.allreduce(torch.tensor([float(process.rank)]), name="check.mean")
    if mean.item() != (process.size - 1) / 2:
        startup.exit_with_bad_input(
            f"Horovod's average of the ranks is {mean.item()}, not {(process.size - 1) / 2}"
        )

    world = MPI.COMM_WORLD
    window = MPI.Win.Allocate(8, 8, comm=world)
    received = np.frombuffer(window.tomemory(), dtype=np.int64)
    received[0] = -1
    world.Barrier()
    window.Lock_all()
    window.Put(np.array([process.rank], dtype=np.int64), (process.rank + 1) % process.size)
    window.Flush_all()
    world.Barrier()
    window.Sync()
    arrived = int(received[0]) == (process.rank - 1) % process.size
    window.Unlock_all()
    window.Free()
    if not all(world.allgather(arrived)):
        startup.exit_with_bad_input(f"one-sided messages of {process.mpi_library} do not arrive")
    if process.rank == 0:
        print(
            f"Horovod and mpi4py agree on {process.size} ranks of {process.mpi_library}: one library, "
            "MPI_THREAD_MULTIPLE, averages and windows work",
            flush=True,
        )
    startup.shut_down()


if __name__ == "__main__":
    main()
