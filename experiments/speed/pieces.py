"""What is measured: the model's size, the systems by name, and the clusters. Numbers and names only."""

from __future__ import annotations

from dataclasses import dataclass

NUM_LAYERS, WIDTH = 16, 128
NUM_PARAMETERS = NUM_LAYERS * WIDTH * WIDTH  # 262 144 in float32: 1 MiB
RATE_MBIT = 100.0
"""Of every link, each way."""
COMPUTE_SECONDS, JITTER = 0.29, 0.1
INTENSIVE_COMPUTE_SECONDS = 0.105
"""Two thirds of what a ring of 16 needs for 1 MiB at 100 Mbit/s: an all-reduce takes 1 to 2 gradient computations."""
DDP_BUCKET_MB = 0.25
"""Is to this model what DDP's default, 25, is to ResNet-50's 100 MB."""

OURS = ("SGD-AR, no overlap", "SGD-AR", "SGP", "OSGP(1)", "LASGD(1)", "LASGD(5)")
OTHERS = ("Horovod", "DDP")
ONE_BUCKET = "DDP, one bucket"
NO_JITTER = "SGP, no jitter"
INTENSIVE = "LASGD(5), intensive"
SAME_UPDATES = ("SGD-AR, no overlap", "SGD-AR", "Horovod", "DDP", ONE_BUCKET)
"""They differ in how gradients are averaged only: after as many steps they must be the same model."""
ALL_REDUCE = "all-reduce alone"
"""No system: LASGD's message, without training."""


@dataclass(frozen=True)
class Piece:
    """What is measured on a cluster of one size, in one job."""

    num_hosts: int
    systems: tuple[str, ...]
    rounds: int
    """In each, every system has its block of steps. Even: every order of the systems has its reverse."""
    lead_in: int
    """Steps of a block before those that count."""
    steps: int
    """Steps of a block that count."""
    stretch: float
    """Of the cluster: all takes so many times as long, so that what two cores can do is enough for more hosts."""
    speed_up: float = 1.0
    """Computation takes so many times less and links have so many times the rate."""


_EVERYTHING = (*OURS, *OTHERS, ONE_BUCKET, NO_JITTER, ALL_REDUCE)
TRIAL = Piece(2, (*_EVERYTHING, INTENSIVE), rounds=2, lead_in=1, steps=2, stretch=1.0, speed_up=10.0)
"""Tries the measurement out, quickly."""
PIECES = {
    piece.num_hosts: piece
    for piece in (
        Piece(8, _EVERYTHING, rounds=6, lead_in=3, steps=17, stretch=2.0),
        Piece(6, (ALL_REDUCE,), rounds=6, lead_in=0, steps=17, stretch=2.0),
        Piece(4, (*OURS, *OTHERS), rounds=6, lead_in=3, steps=17, stretch=4.0),
        Piece(16, (*OURS, *OTHERS, INTENSIVE), rounds=6, lead_in=3, steps=17, stretch=4.0),
        TRIAL,
    )
}
"""By the number of hosts, in the order in which they are measured."""
