"""The record of the measurement, blocks.jsonl: a line a block, and one before the blocks of a job with its machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pieces import Piece


def read(path: Path) -> list[dict[str, Any]]:
    """All lines; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep_complete_rounds(piece: Piece, path: Path) -> int:
    """Removes the blocks of the piece that belong to no complete round; the number of complete rounds.

    Raises:
        ValueError: blocks of another plan are there, which belong to no round of this piece.
    """
    lines = read(path)
    own = [line for line in lines if line.get("num_hosts") == piece.num_hosts]
    if any((line["stretch"], line["lead_in"]) != (piece.stretch, piece.lead_in) for line in own):
        raise ValueError(f"{path} has blocks of another plan for {piece.num_hosts} hosts: move it away")
    num_complete = 0
    while {line["system"] for line in own if line["round"] == num_complete} >= set(piece.systems):
        num_complete += 1
    kept = [line for line in lines if line not in own or line["round"] < num_complete]
    if len(kept) < len(lines):
        unfinished = path.with_suffix(".new")
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(unfinished, path)
    return num_complete
