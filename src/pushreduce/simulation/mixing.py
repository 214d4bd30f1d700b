"""How fast a topology averages, without delays and gradients: two figures, from its mixing matrices in float64.

Owns the figures; the matrices are `communication/topology.py`'s. Cubic in the number of ranks: 0.1 s a round at 1024.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pushreduce.communication.topology import Topology


def consensus_errors(topology: Topology, num_rounds: int) -> list[float]:
    """The consensus error before round 0 (which is 1) and after each of `num_rounds` rounds.

    It is the consensus distance sqrt(mean_i ||z_i - mean||^2) relative to that of the start, as the root mean square
    over random starts whose entries are independent and normal: in closed form, nothing is drawn. z is PushSum's
    de-biased x / w.
    """
    size = topology.size
    product = np.eye(size)
    errors = [1.0]
    for round_number in range(num_rounds):
        product = topology.mixing_matrix(round_number) @ product
        to_debiased = product / product.sum(axis=1, keepdims=True)  # w begins at 1 everywhere
        # The start's mean stands for itself: E ||A x||^2 = ||A||_F^2, and ||I - 1 1^T / n||_F^2 = n - 1.
        errors.append(float(np.linalg.norm(to_debiased - 1 / size)) / max(size - 1, 1) ** 0.5)
    return errors


def second_singular_value(topology: Topology, first_round: int, num_rounds: int) -> float:
    """The second-largest singular value of P(first + num - 1) ... P(first + 1) P(first); 0 for one rank.

    Where the matrices are doubly stochastic no start's consensus distance is larger after these rounds than this times
    what it was, and one start's is as large.
    """
    product: NDArray[np.float64] = np.eye(topology.size)
    for round_number in range(first_round, first_round + num_rounds):
        product = topology.mixing_matrix(round_number) @ product
    if topology.size == 1:
        return 0.0
    return float(np.linalg.svd(product, compute_uv=False)[1])
