"""The tables of experiments/ in the README files: copied by whoever makes them, so that no second version exists."""

from __future__ import annotations

import os
from pathlib import Path


def insert_table(readme: Path, source: Path) -> None:
    """Puts the table `source` between the marks `<!-- table: SOURCE -->` and `<!-- end of table -->` of `readme`."""
    mark = f"<!-- table: {os.path.relpath(source, readme.resolve().parent)} -->\n"
    before, found, after = readme.read_text().partition(mark)
    if found:
        _, end, rest = after.partition("<!-- end of table -->")
        readme.write_text(before + mark + source.read_text() + end + rest)
