"""What `--trace` writes: the events of this rank's algorithm, and the parameters that it begins and ends with.

`scripts/replay` holds a run against the independent oracle with it.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from pushreduce.training.run_directory import RunDirectory


class Trace:
    """The trace of one rank; its events go to `trace.rankN.jsonl`, vectors are float64 in model.parameters() order."""

    def __init__(self, run_directory: RunDirectory, rank: int, size: int) -> None:
        self._run_directory, self._rank = run_directory, rank
        self._file = run_directory.trace(rank).open("w")
        self.record({"event": "start", "rank": rank, "size": size})

    def record(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")

    def save_initial(self, parameters: list[nn.Parameter]) -> None:
        if self._rank == 0:
            torch.save(_vector(parameters), self._run_directory.path / "trace.initial.pt")

    def close(self, parameters: list[nn.Parameter]) -> None:
        """Ends the trace with the parameters as they are now."""
        self._file.close()
        torch.save(_vector(parameters), self._run_directory.path / f"trace.final.rank{self._rank}.pt")


def _vector(parameters: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.detach().double().cpu().reshape(-1) for p in parameters])
