"""Hostfiles: both forms, comments, and errors that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushreduce.communication import hostfile

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z0-9](\.[a-z]{2,5})?", fullmatch=True)
HOSTS = st.lists(st.tuples(NAMES, st.integers(1, 64)), min_size=1, max_size=6, unique_by=lambda host: host[0])
FORMS = st.sampled_from(["{} slots={}", "{}:{}", "  {}\tslots = {}  # a comment", "# before\n\n{}:{}#after"])


@given(HOSTS, st.data())
def test_every_form_gives_the_same_hosts(hosts: list[tuple[str, int]], data: st.DataObject) -> None:
    text = "\n".join(data.draw(FORMS).format(*host) for host in hosts)
    parsed = hostfile.parse(text, "hosts")
    assert [(host.name, host.slots) for host in parsed] == hosts
    for host in parsed:
        assert host.name in text.splitlines()[host.line - 1]


@given(HOSTS)
def test_the_list_for_mpirun_reads_back(hosts: list[tuple[str, int]]) -> None:
    parsed = hostfile.parse("\n".join(f"{name}:{slots}" for name, slots in hosts), "hosts")
    again = hostfile.parse(hostfile.host_list(parsed).replace(",", "\n"), "hosts")
    assert again == parsed


@pytest.mark.parametrize(
    ("text", "line", "wrong"),
    [
        ("a slots=4\n\nb slots=none\n", 3, "'none' slots"),
        ("a:0", 1, "'0' slots"),
        ("a:", 1, "'' slots"),
        ("# x\na slots=", 2, "'' slots"),
        ("a -3", 1, "'a -3' is not a host"),
        ("a slots=2 max_slots=4", 1, "is not a host"),
        ("a:1\nb:2\na:3", 3, "named on line 1"),
        ("# only comments\n", None, "names no host"),
    ],
)
def test_errors_name_the_line(text: str, line: int | None, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong) as raised:
        hostfile.parse(text, "hosts")
    assert str(raised.value).startswith("hosts: " if line is None else f"hosts:{line}: ")
    assert "\n" not in str(raised.value)


def test_the_examples_say_what_they_are_for() -> None:
    directory = Path(__file__).parents[2] / "hostfiles"
    examples = sorted(
        path for path in directory.iterdir() if path.suffix != ".yaml"
    )  # those are for scripts/plan
    slots = []
    for path in examples:
        text = path.read_text()
        slots.append({host.slots for host in hostfile.parse(text, str(path))})
        assert "# Machine:" in text, path
        assert "# Slots:" in text, path
    assert any(len(counts) > 1 for counts in slots), "one example has unequal slots"
