"""One worker: images per second of the training loop over those of a bare PyTorch loop on the same model.

    python scripts/benchmarks/loop.py --directory DIR --algorithm lasgd --batch-size 32 --pairs 40 --steps 20

A is `TrainingLoop` with its record, progress bar and TensorBoard; B takes the next batch from tensors in memory and
runs forward, backward and SGD. B has no logging, no `.item()` and no normalisation of its images.
"""

from __future__ import annotations

import numpy as np
import pairs
import workbench
from piece import parse_arguments

from pushreduce.communication import startup


def main() -> None:
    """Measures and prints."""
    arguments = parse_arguments(__doc__)
    communicator = workbench.start()
    clock = pairs.PausableClock()
    communicator.clock = clock
    bare = workbench.BareLoop("cnn", arguments.batch_size)
    alternation = pairs.Alternation(
        bare.run,
        num_pairs=arguments.pairs,
        steps_per_block=arguments.steps,
        warm_up_steps=arguments.warm_up,
        clock=clock,
    )
    loop = workbench.build_loop(
        arguments.algorithm, arguments.batch_size, arguments.directory, communicator, alternation.after_step
    )
    workbench.run_to_stop(loop)
    a, b = np.array(alternation.a), np.array(alternation.b)
    facts = {"algorithm": arguments.algorithm, "batch_size": arguments.batch_size, "num_ranks": 1}
    for index, figure in enumerate(("images/s, loop over bare", "images per processor s, loop over bare")):
        pairs.report(
            figure,
            values=(b[:, index] / a[:, index]).tolist(),
            a_step_ms=1e3 * float(np.median(a[:, index])) / arguments.steps,
            b_step_ms=1e3 * float(np.median(b[:, index])) / arguments.steps,
            **facts,
        )
    startup.shut_down()


if __name__ == "__main__":
    main()
