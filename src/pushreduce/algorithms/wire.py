"""What a pushed message holds: a share of the numerator, in the precision of the wire, and its canary.

Owns rounding, the memory's layout [num_elements + 1], and the checks on both ends. The canary is the last element: it
is treated as a parameter is, so that the values themselves say what weight they carry.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_CANARY_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Relative; rounding errors add up between two drains, a lost message takes a third or half."""


class Wire:
    """Encodes and decodes payloads.

    The mailbox's memory is the processor's. Where the numerator is on a GPU, payloads are staged through pinned memory
    of one message, which copies go to and from at the full rate of the bus.

    Args:
        name: "full" (the payload's own precision), "bfloat16" or "float16".
        numerator: like those to come: [num_elements + 1], float32 or float64.
    """

    def __init__(self, name: str, numerator: torch.Tensor) -> None:
        self.dtype = _DTYPES.get(name, numerator.dtype)
        self._device = numerator.device
        self._pinned: torch.Tensor | None = None
        if self._device.type == "cuda":
            self._pinned = torch.empty(len(numerator), dtype=self.dtype, pin_memory=True)
        self.num_bytes_per_element = self.dtype.itemsize
        self._at_least_float32 = torch.promote_types(self.dtype, torch.float32)

    def encode(self, x: torch.Tensor, share: float, memory: NDArray[np.uint8]) -> torch.Tensor:
        """Writes share x into `memory`; returns what a receiver will read, on x's device.

        Raises:
            FloatingPointError: it does not fit float16.
        """
        payload = torch.from_numpy(memory).view(self.dtype)
        if self._pinned is None:
            sent = torch.mul(x, share, out=payload)
        else:
            sent = (x * share).to(self.dtype)
            payload.copy_(self._pinned.copy_(sent))
        if self.dtype == torch.float16 and not bool(sent.isfinite().all()):
            raise FloatingPointError("weights do not fit float16 (--wire-dtype bfloat16 takes larger ones)")
        return sent

    def decode(self, memory: NDArray[np.uint8], weight: float, where: str) -> torch.Tensor:
        """The payload on x's device (on the CPU a view of `memory`), checked to be finite and to carry `weight`.

        Raises:
            FloatingPointError: NaN or infinity.
            RuntimeError: the canary contradicts the weight.
        """
        payload = torch.from_numpy(memory).view(self.dtype)
        if not math.isfinite(payload.sum(dtype=self._at_least_float32)):
            raise FloatingPointError(f"the weights {where} are not finite")
        self.check_canary(float(payload[-1]), weight, where)
        return payload if self._pinned is None else self._pinned.copy_(payload).to(self._device)

    def check_canary(self, canary: float, weight: float, where: str) -> None:
        """Raises RuntimeError where the values do not carry the weight that came with them."""
        if abs(canary - weight) > _CANARY_TOLERANCES[self.dtype] * weight:
            raise RuntimeError(
                f"{where} the values carry a weight of {canary}, not {weight}: a message was torn, lost or applied "
                "twice"
            )
