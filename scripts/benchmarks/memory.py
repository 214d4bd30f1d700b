"""Two or more ranks: peak resident memory of a worker on a model of 100 MB (--layers 10: 200), to compare variants.

    mpirun -np 2 python scripts/benchmarks/memory.py --directory DIR --algorithm bare|lasgd|allreduce|horovod --steps 6

Prints, in bytes, what each phase had at its highest above what the process had before its model: steps with finish()
and consensus(), and an evaluation. The peak is the kernel's (VmHWM), set back before each phase.
"""

from __future__ import annotations

import contextlib
import gc
import json
from pathlib import Path

import torch
import workbench
from piece import parse_arguments
from torch import nn

from pushreduce.algorithms import LASGD, Algorithm, AllReduceSGD
from pushreduce.communication import startup
from pushreduce.settings import DataSettings
from pushreduce.training.evaluate import evaluate
from pushreduce.training.schedule import build_optimizer
from pushreduce.workloads import Workload, build_workload

WIDTH = 2236  # a layer of 20 MB


def wide_model(num_layers: int) -> nn.Module:
    """A model of digits that is nearly all parameters."""
    layers: list[nn.Module] = [nn.Flatten(), nn.ZeroPad1d((0, WIDTH - 64))]
    for _ in range(num_layers):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(10))


def main() -> None:
    """Measures and prints a line of JSON."""
    arguments = parse_arguments(__doc__)
    communicator = workbench.start()
    workload = build_workload(
        DataSettings(batch_size_per_rank=8), seed=0, rank=communicator.rank, size=communicator.size
    )
    warm_up_libraries(workload)
    communicator.average(torch.zeros(8 << 20), "first")
    communicator.barrier()
    before = resident_bytes("VmRSS")
    model = wide_model(arguments.layers)
    optimizer = build_optimizer(workbench.OPTIMIZER, model)
    algorithm: Algorithm | None = None
    if arguments.algorithm == "lasgd":
        algorithm = LASGD(model, optimizer, communicator)
    elif arguments.algorithm == "allreduce":
        algorithm = AllReduceSGD(model, optimizer, communicator)
    elif arguments.algorithm == "horovod":
        import horovod.torch as hvd

        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    else:
        assert arguments.algorithm == "bare"
    gc.collect()

    reset_peak()
    batches = workload.train_batches()
    for _ in range(arguments.steps):
        batch = next(batches)
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        if algorithm is None:
            optimizer.step()
        else:
            algorithm.step(batch.num_samples)
    if algorithm is not None:
        algorithm.finish()
        with algorithm.consensus():
            pass
    peaks = {"training": resident_bytes("VmHWM") - before}
    communicator.barrier()
    if algorithm is not None:
        reset_peak()
        own = algorithm.parameters.new_payload()
        algorithm.parameters.copy_to(own)
        evaluate(algorithm, workload, own, batch_norm="mean")
        peaks["evaluation"] = resident_bytes("VmHWM") - before
    model_bytes = sum(p.nbytes for p in model.parameters())
    all_peaks = communicator.allgather(peaks)
    if communicator.rank == 0:
        print(json.dumps({"model_bytes": model_bytes, "peaks_by_rank": all_peaks}), flush=True)
    communicator.barrier()
    startup.shut_down()


def warm_up_libraries(workload: Workload) -> None:
    """A step of a tiny model: what torch allocates once is not the worker's."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 10))
    optimizer = build_optimizer(workbench.OPTIMIZER, model)
    workload.loss(model, next(workload.train_batches())).backward()
    optimizer.step()


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"/proc/self/status has no {field}")


def reset_peak() -> None:
    """VmHWM := VmRSS. Not allowed in some containers; the peak since the process began then includes the set-up."""
    with contextlib.suppress(PermissionError):
        Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
