"""The command line that the pieces of the benchmark share."""

from __future__ import annotations

import argparse
from pathlib import Path


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Counts and the variant to measure; `scripts/benchmark` gives them all."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory", type=Path, required=True, help="where the data is, for temporary files"
    )
    parser.add_argument("--algorithm", default="lasgd")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--layers", type=int, default=5, help="memory: layers of 20 MB")
    parser.add_argument("--batch-size", type=int, default=32, help="samples a rank")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks, even")
    parser.add_argument("--steps", type=int, default=20, help="steps a block")
    parser.add_argument("--warm-up", type=int, default=20, help="steps before the first block, not measured")
    return parser.parse_args()
