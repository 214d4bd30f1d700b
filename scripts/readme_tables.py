"""The tables of experiments/ in the README files: copied by whoever makes them, so that no second version exists."""

from __future__ import annotations

import os
from pathlib import Path


def insert_table(readme: Path, source: Path) -> None:
    """Puts the table `source` between the marks `<!-- table: SOURCE -->` and `<!-- end of table -->` of `readme`.

    A file that is not there, or has no such mark, asks for none.

    Raises:
        ValueError: the table has no end: all that follows it would be lost.
    """
    if not readme.exists():
        return
    mark = f"<!-- table: {os.path.relpath(source, readme.resolve().parent)} -->\n"
    before, found, after = readme.read_text().partition(mark)
    if found:
        _, end, rest = after.partition("<!-- end of table -->")
        if not end:
            raise ValueError(f"{readme}: no <!-- end of table --> after {mark.strip()}: add it")
        readme.write_text(before + mark + source.read_text() + end + rest)
