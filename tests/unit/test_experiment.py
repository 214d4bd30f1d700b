"""scripts/experiment's tables: they go into README files without loss."""

from __future__ import annotations

import sys
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
