#!/usr/bin/env python3
"""The simulated cluster's iteration times beside those that experiments/speed measured on the emulated one.

    python experiments/simulated_cluster/against_emulated.py     in the activated environment; some seconds

Reads experiments/speed/blocks.jsonl and, for every number of hosts, its calibration HOSTS_hosts.yaml beside this
program; writes results.csv and results.md. The simulation is given the computation times that every rank had in every
step of a block, so that what differs is communication alone; all its times are the stretched cluster's, as measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
SPEED = ROOT / "experiments" / "speed"
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "benchmarks"), str(SPEED)]
import numpy as np  # noqa: E402
import pieces  # noqa: E402
from blocks import read  # noqa: E402
from pairs import STATISTICS, describe  # noqa: E402
from readme_tables import insert_table  # noqa: E402
from tables import summarise, write_csv  # noqa: E402

from pushreduce.settings_file import SettingsError  # noqa: E402
from pushreduce.simulation.cluster_model import ClusterModel, load_cluster_model  # noqa: E402
from pushreduce.simulation.planning import VARIANTS  # noqa: E402
from pushreduce.simulation.time_line import Seconds, TimeLine  # noqa: E402

BOUND = 0.05
PARAMETER_BYTES = [4 * pieces.WIDTH**2] * pieces.NUM_LAYERS
COLUMNS = ("num_hosts", "system", "measured_ms", "simulated_ms", *STATISTICS)


def program_of(name: str) -> Callable[[ClusterModel, Seconds], TimeLine]:
    """That of `scripts/plan`, for the measured model."""
    (program,) = (variant.program for variant in VARIANTS if variant.name == name)
    return lambda model, compute: program(model, PARAMETER_BYTES, compute)


SYSTEMS: dict[str, Callable[[ClusterModel, Seconds], TimeLine]] = {
    **{name: program_of(name) for name in pieces.OURS},
    pieces.NO_JITTER: program_of("SGP"),
    pieces.INTENSIVE: program_of("LASGD(5)"),
}
"""What of experiments/speed is simulated: the systems whose communication is this program's."""


def main() -> None:
    """Writes the tables."""
    try:
        rows = list(compare(read(SPEED / "blocks.jsonl"), load_models(FOLDER)))
        if not rows:
            raise ValueError(
                "experiments/speed/blocks.jsonl has no block of a cluster that is calibrated here"
            )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    write_csv(FOLDER / "results.csv", COLUMNS, rows)
    (FOLDER / "results.md").write_text(table(rows))
    insert_table(FOLDER / "README.md", FOLDER / "results.md")
    print(table(rows), end="")


def load_models(folder: Path) -> dict[int, ClusterModel]:
    """The calibrations, by number of hosts. SettingsError, in one line, where one cannot be used."""
    models = {}
    for path in sorted(folder.glob("*_hosts.yaml")):
        model = load_cluster_model(path)
        if path.name != f"{model.num_hosts}_hosts.yaml":
            raise SettingsError(f"{path} is of {model.num_hosts} hosts: name it {model.num_hosts}_hosts.yaml")
        models[model.num_hosts] = model
    return models


def compare(
    blocks: Iterable[Mapping[str, Any]], models: Mapping[int, ClusterModel]
) -> Iterable[dict[str, Any]]:
    """A row for every system and size of cluster: simulated over measured, from one ratio a block.

    Raises:
        ValueError: a calibration is of other links than the blocks.
    """
    pairs: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for block in blocks:
        if block.get("num_hosts") in models and block["system"] in SYSTEMS:
            model = models[block["num_hosts"]]
            if not 0.8 < model.link_bits_per_second / (1e6 * block["rate_mbit"] / block["stretch"]) < 1.2:
                raise ValueError(
                    f"{model.num_hosts}_hosts.yaml has links of {model.link_bits_per_second / 1e6:.3g} Mbit/s, the "
                    f"blocks have {block['rate_mbit']:g} stretched by {block['stretch']:g}: calibrate again"
                )
            measured = summarise(block, num_cores=1)["iteration_ms"]
            simulated = simulate(block, model)
            pairs.setdefault((block["num_hosts"], block["system"]), []).append((measured, simulated))
    for num_hosts, system in sorted(pairs, key=lambda key: (key[0], list(SYSTEMS).index(key[1]))):
        own = pairs[num_hosts, system]
        yield {
            "num_hosts": num_hosts,
            "system": system,
            "measured_ms": float(np.median([measured for measured, _ in own])),
            "simulated_ms": float(np.median([simulated for _, simulated in own])),
            **describe([simulated / measured for measured, simulated in own]),
        }


def simulate(block: Mapping[str, Any], model: ClusterModel) -> float:
    """A block's iteration time, ms, taken from the simulated time line as from the measured one."""
    compute = np.array(block["compute_ms"]).T / 1e3  # [steps, ranks]
    line = SYSTEMS[block["system"]](model, compute)
    ended = [[1e3 * seconds for seconds in rank] for rank in line.end_seconds.T.tolist()]
    return float(summarise({**block, "ended_ms": ended}, num_cores=1)["iteration_ms"])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """In the README."""
    lines = [
        "| hosts | system | measured, ms | simulated, ms | simulated / measured: median [95 % interval] "
        "| min … max | n | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdict = "within 5 %" if abs(row["median"] - 1) <= BOUND else "**outside**"
        lines.append(
            f"| {row['num_hosts']} | {row['system']} | {row['measured_ms']:.1f} | {row['simulated_ms']:.1f} "
            f"| {row['median']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}] "
            f"| {row['min']:.3f} … {row['max']:.3f} | {row['n']} | {verdict} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
