"""The trainable parameters of a model as one flat buffer that they alias.

Owns the memory layout; knows nothing of communication. A payload is a one-dimensional tensor that holds a copy of all
parameters, in a type wide enough to average in: float64 if any parameter is float64, else float32 (bfloat16 and
float16 models are averaged in float32).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

_PIECE_ELEMENTS = 1 << 20


class FlatParameters:
    """Moves parameters into flat buffers, one a dtype, and makes the parameters views of them.

    Tied parameters are held once, frozen ones (`requires_grad` False) not at all. Parameter objects keep their
    identity, so optimizers made before stay valid; the model must not be moved to another device afterwards.

    Args:
        parameters: as from `model.parameters()`.

    Raises:
        ValueError: nothing to train, parameters on several devices, or of a type that is not floating point.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(dict.fromkeys(p for p in parameters if p.requires_grad))
        if not self.parameters:
            raise ValueError("the model has no trainable parameters: set requires_grad on some")
        devices = {p.device for p in self.parameters}
        if len(devices) > 1:
            raise ValueError(
                f"the parameters are on several devices {sorted(map(str, devices))}: move them to one"
            )
        self.device = devices.pop()
        dtypes = list(dict.fromkeys(p.dtype for p in self.parameters))
        if not all(dtype.is_floating_point for dtype in dtypes):
            raise ValueError(f"parameters must be floating point, got {dtypes}: convert the model")
        self.payload_dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self._buffers = [_alias([p for p in self.parameters if p.dtype == dtype]) for dtype in dtypes]
        self.num_elements = sum(buffer.numel() for buffer in self._buffers)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The memory that the parameters alias, one buffer [elements] a dtype."""
        return list(self._buffers)

    def move_to(self, buffers: Sequence[torch.Tensor]) -> None:
        """Moves the parameters into other memory, which they alias from then on; `buffers` are like the own ones."""
        for ours, theirs in zip(self._buffers, buffers, strict=True):
            theirs.copy_(ours)
            for parameter in self.parameters:
                if parameter.dtype == ours.dtype:
                    offset = theirs.storage_offset() + parameter.storage_offset() - ours.storage_offset()
                    parameter.data = theirs.as_strided(parameter.size(), parameter.stride(), offset)
        self._buffers = list(buffers)

    def new_payload(self, num_extra: int = 0) -> torch.Tensor:
        """An uninitialised payload [num_elements + num_extra]."""
        return torch.empty(self.num_elements + num_extra, dtype=self.payload_dtype, device=self.device)

    def copy_to(self, payload: torch.Tensor) -> None:
        """Writes all parameters into the first `num_elements` of `payload`."""
        for buffer, part in self._parts(payload):
            part.copy_(buffer)

    def copy_from(self, payload: torch.Tensor, *, divisor: float = 1.0) -> None:
        """Overwrites all parameters with the first `num_elements` of `payload`, divided by `divisor`."""
        for buffer, part in self._parts(payload):
            if divisor == 1.0:
                buffer.copy_(part)
            else:
                torch.div(part, divisor, out=buffer)

    def add_to(self, payload: torch.Tensor, *, alpha: float = 1.0) -> None:
        """Adds alpha x all parameters to the first `num_elements` of `payload`."""
        for buffer, part in self._parts(payload):
            part.add_(buffer, alpha=alpha)

    def add_(self, payload: torch.Tensor, *, alpha: float = 1.0) -> None:
        """Adds alpha x the first `num_elements` of `payload` to the parameters, computed in the wider type."""
        for buffer, part in self._parts(payload):
            buffer.add_(part, alpha=alpha)

    def swap(self, payload: torch.Tensor) -> None:
        """Exchanges the parameters with the first `num_elements` of `payload`, in pieces that take no memory."""
        for buffer, part in self._parts(payload):
            for ours, theirs in zip(buffer.split(_PIECE_ELEMENTS), part.split(_PIECE_ELEMENTS), strict=True):
                kept = ours.clone()
                ours.copy_(theirs)
                theirs.copy_(kept)

    def are_finite(self) -> bool:
        """Whether no parameter is NaN or infinite."""
        return all(
            bool(piece.isfinite().all())
            for buffer in self._buffers
            for piece in buffer.split(_PIECE_ELEMENTS)
        )

    def squared_distance(self, payload: torch.Tensor) -> float:
        """||payload - parameters||^2, accumulated in float64. Overwrites `payload` with the difference."""
        square = 0.0
        for buffer, part in self._parts(payload):
            part.sub_(buffer)
            for piece in part.split(_PIECE_ELEMENTS):  # torch makes a float64 copy of what it sums
                square += float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2
        return square

    def _parts(self, payload: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        offset = 0
        for buffer in self._buffers:
            yield buffer, payload[offset : offset + buffer.numel()]
            offset += buffer.numel()


def _alias(parameters: list[nn.Parameter]) -> torch.Tensor:
    """One buffer for parameters of one dtype, each moved into it with its strides (channels_last included)."""
    first = parameters[0]
    buffer = torch.empty(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    offset = 0
    for parameter in parameters:
        # preserve_format is the layout of a copy: dense, and the parameter's own strides wherever those are dense.
        layout = torch.empty_like(parameter, memory_format=torch.preserve_format, device="meta")
        view = buffer.as_strided(layout.size(), layout.stride(), offset)
        view.copy_(parameter.data)
        parameter.data = view
        offset += parameter.numel()
    return buffer
