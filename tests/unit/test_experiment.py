"""scripts/experiment: its tables go into README files without loss, and mistakes in its plan are one line."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from readme_tables import insert_table  # noqa: E402

BEFORE, AFTER = "# Title\n\n<!-- table: new.md -->\n", "<!-- end of table -->\n\nMore.\n"


def test_a_table_replaces_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    readme, table = tmp_path / "README.md", tmp_path / "new.md"
    table.write_text("| new |\n")
    insert_table(readme, table)
    assert not readme.exists()
    for old in ("", "| old |\n| 1 |\n"):
        readme.write_text(BEFORE + old + AFTER)
        insert_table(readme, table)
        assert readme.read_text() == BEFORE + "| new |\n" + AFTER
    readme.write_text(unmarked := "# Title\n<!-- table: other.md -->\n<!-- end of table -->\n")
    insert_table(readme, table)
    assert readme.read_text() == unmarked


def test_a_table_without_an_end_is_refused_before_anything_is_lost(tmp_path: Path) -> None:
    readme, table = tmp_path / "README.md", tmp_path / "new.md"
    table.write_text("| new |\n")
    readme.write_text(BEFORE + "More.\n")
    with pytest.raises(ValueError, match="no <!-- end of table -->"):
        insert_table(readme, table)
    assert readme.read_text() == BEFORE + "More.\n"


@pytest.fixture(scope="module")
def experiment():
    spec = spec_from_loader(
        "experiment", loader := SourceFileLoader("experiment", str(ROOT / "scripts" / "experiment"))
    )
    assert spec is not None
    sys.modules["experiment"] = module = module_from_spec(spec)  # where its dataclass looks
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seeds: [0", "runs.yaml: while parsing"),
        ("- 1", "needs `seeds` and `variants`"),
        ("{seeds: [0], num_ranks: 2}", "needs `seeds` and `variants`"),
        ("{seeds: [0], variants: {a: --tau 1}}", "runs.yaml: it needs num_ranks"),
        ("{seeds: [0], variants: {a: --tau 1}, cluster: c, num_ranks: 2}", "it needs num_hosts"),
        (
            "{seeds: [0], variants: {a: --tau 1}, groups: {large: {num_hosts: 2}}}",
            "group large needs num_ranks",
        ),
        ("{seeds: [0], variants: {a: --tau 1}, groups: {large: }}", "group large needs num_ranks"),
        ("{seeds: [0], variants: {a: --tau 1}, groups: [large]}", "groups must be a mapping"),
        ("{seeds: [0], variants: {a: --tau 1}, num_ranks: 2, baseline: b}", "baseline b is none"),
    ],
)
def test_mistakes_in_a_plan_are_one_line(text, words, experiment, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(experiment, "ROOT", tmp_path)
    (folder := tmp_path / "experiments" / "new").mkdir(parents=True)
    (folder / "settings.yaml").touch()
    (folder / "runs.yaml").write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        experiment.read_plan(folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="name a folder of experiments/"):
        experiment.read_plan(tmp_path)


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("experiments/**/runs.yaml")), ids=lambda path: path.parent.name
)
def test_plans_of_this_repository_are_complete(path: Path, experiment) -> None:
    assert experiment.read_plan(path.parent)["groups"]


def test_differences_to_the_baseline_are_paired_by_seed_within_a_group(experiment):
    def row(group: str, variant: str, seed: int, top1: float, loss: float) -> dict[str, str]:
        row = {
            "group": group,
            "variant": variant,
            "seed": str(seed),
            "num_ranks": "4",
            "iteration_ms_median": "1",
        }
        return {**row, "top1_percent": str(top1), "validation_loss": str(loss)}

    rows = [row("g", "base", 0, 90.0, 0.3), row("g", "base", 1, 80.0, 0.5), row("h", "base", 0, 0.0, 9.0)]
    rows += [row("g", "new", 1, 79.5, 0.51), row("g", "new", 0, 89.5, 0.31), row("g", "new", 2, 1.0, 1.0)]
    lines = experiment.table(rows, "base").splitlines()
    (new,) = (line for line in lines if line.startswith("| g: new"))
    assert "| -0.50 [-0.50, -0.50] | 10.0 [10.0, 10.0] |" in new  # seed 2 has no partner
    (base,) = (line for line in lines if line.startswith("| g: base"))
    assert "|  |  |" in base
    assert len({line.count("|") for line in lines}) == 1
