"""Several ranks: images per second of SGD-AR over those of Horovod's DistributedOptimizer and of PyTorch DDP.

    mpirun -np 2 python scripts/benchmarks/allreduce.py --directory DIR --model cnn --batch-size 32 --pairs 20

The three train the same model on the same batches in the same loop, in turn, in the same processes; only the averaging
of gradients differs. A block of steps lasts from a barrier to a barrier. DDP averages over gloo (TCP), the other two
over MPI.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import numpy as np
import pairs
import torch
import torch.distributed as dist
import workbench
from piece import parse_arguments
from torch.nn.parallel import DistributedDataParallel

from pushreduce.algorithms import AllReduceSGD
from pushreduce.communication import startup
from pushreduce.communication.base import Communicator

NUM_IMAGES = 4096


class OurLoop(workbench.BareLoop):
    """The bare loop around `AllReduceSGD`."""

    def __init__(self, model_name: str, batch_size: int, communicator: Communicator) -> None:
        super().__init__(model_name, batch_size, NUM_IMAGES)
        self.algorithm = AllReduceSGD(self.model, self.optimizer, communicator)

    def update(self) -> None:
        self.algorithm.step(self._batch_size)


class HorovodLoop(workbench.BareLoop):
    """The bare loop around Horovod's optimizer."""

    def __init__(self, model_name: str, batch_size: int) -> None:
        import horovod.torch as hvd

        super().__init__(model_name, batch_size, NUM_IMAGES)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer, named_parameters=self.model.named_parameters()
        )


class DDPLoop(workbench.BareLoop):
    """The bare loop around PyTorch's wrapper of the model."""

    def __init__(self, model_name: str, batch_size: int) -> None:
        super().__init__(model_name, batch_size, NUM_IMAGES)
        self.model = DistributedDataParallel(self.model, broadcast_buffers=False)


def main() -> None:
    """Measures and prints."""
    arguments = parse_arguments(__doc__)
    for message in ("`broadcast_buffers` is deprecated", "Grad strides do not match"):  # DDP's
        warnings.filterwarnings("ignore", message)
    communicator = workbench.start()
    rendezvous = arguments.directory / communicator.allgather(f"gloo-{os.getpid()}")[0]
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=communicator.rank, world_size=communicator.size
    )
    loops: list[workbench.BareLoop] = [
        OurLoop(arguments.model, arguments.batch_size, communicator),
        HorovodLoop(arguments.model, arguments.batch_size),
        DDPLoop(arguments.model, arguments.batch_size),
    ]
    for loop in loops:
        loop.run(arguments.warm_up)
    check_same_model(loops)  # now: rounding errors grow over hundreds of steps
    seconds: list[list[tuple[float, float]]] = [[] for _ in loops]
    for pair in range(arguments.pairs):
        order = range(len(loops)) if pair % 2 == 0 else reversed(range(len(loops)))
        for index in order:
            seconds[index].append(timed_block(communicator, loops[index].run, arguments.steps))
    if communicator.rank == 0:
        ours, *others = np.array(seconds)  # [blocks, 2]
        for index, unit in enumerate(("", ", per processor s")):
            for name, theirs in zip(("Horovod", "DDP"), others, strict=True):
                pairs.report(
                    f"SGD-AR over {name}{unit}",
                    values=(theirs[:, index] / ours[:, index]).tolist(),
                    a_step_ms=1e3 * float(np.median(ours[:, index])) / arguments.steps,
                    b_step_ms=1e3 * float(np.median(theirs[:, index])) / arguments.steps,
                    algorithm="allreduce",
                    model=arguments.model,
                    batch_size=arguments.batch_size,
                    num_ranks=communicator.size,
                )
    dist.destroy_process_group()
    communicator.barrier()
    startup.shut_down()


def timed_block(
    communicator: Communicator, run: Callable[[int], None], num_steps: int
) -> tuple[float, float]:
    """Wall-clock and this rank's processor seconds from the moment all ranks begin to the moment the last has ended."""
    communicator.barrier()
    watch = pairs.Stopwatch()
    run(num_steps)
    communicator.barrier()
    return watch.read()


def check_same_model(loops: list[workbench.BareLoop]) -> None:
    """All three have taken the same steps on the same samples: else the comparison is of different work."""
    vectors = [torch.cat([p.detach().reshape(-1) for p in loop.model.parameters()]) for loop in loops]
    for other in vectors[1:]:
        distance = float((vectors[0] - other).norm() / other.norm())
        assert distance < 1e-2, f"the models differ by {distance:.1e} of their size"


if __name__ == "__main__":
    main()
