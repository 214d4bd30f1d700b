"""Settings and their YAML form: round trip, ranges, settings that would be ignored."""

from __future__ import annotations

import math
import re
import types
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushreduce.settings import (
    INTERVALS,
    USED_ONLY_WITH,
    DataSettings,
    EmulationSettings,
    LASGDSettings,
    OptimizerSettings,
    Settings,
    SettingsError,
    SGPSettings,
    TrainingSettings,
    check,
    leaves,
)
from pushreduce.settings_file import from_yaml, to_yaml

DEFAULTS = dict(leaves(Settings()))
SECTIONS = [
    Settings,
    LASGDSettings,
    SGPSettings,
    DataSettings,
    OptimizerSettings,
    TrainingSettings,
    EmulationSettings,
]
HINTS = {name: hint for each in SECTIONS for name, hint in get_type_hints(each).items() if name in DEFAULTS}


def any_value(annotation: Any) -> st.SearchStrategy[Any]:
    if is_dataclass(annotation):
        hints = get_type_hints(annotation)
        return st.builds(annotation, **{name: any_value(hint) for name, hint in hints.items()})
    if annotation is float:
        return st.floats(allow_nan=False)
    if get_origin(annotation) is tuple:
        return st.lists(any_value(get_args(annotation)[0])).map(tuple)
    if get_origin(annotation) is types.UnionType:
        return st.one_of(map(any_value, get_args(annotation)))
    return st.from_type(annotation)


def with_values(**values: Any) -> Settings:
    """Defaults, with some settings replaced, whatever section they are in."""
    settings = Settings()
    for section in fields(Settings):
        inner = getattr(settings, section.name)
        if is_dataclass(inner):
            own = {item.name: values.pop(item.name) for item in fields(inner) if item.name in values}
            settings = replace(settings, **{section.name: replace(inner, **own)})
    return replace(settings, **values)


def error_of_yaml(text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        from_yaml(text, source="FILE")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("FILE")
    return message


@given(any_value(Settings))
def test_yaml_gives_back_exactly_what_was_saved(settings: Settings) -> None:
    text = to_yaml(settings)
    assert from_yaml(text, source="FILE") == settings
    assert text.startswith("algorithm:")


LOOKALIKES = [
    "1e-3",
    "no",
    "null",
    "~",
    "0x10",
    "010",
    "1:30",
    "2024-01-01",
    "#",
    "- a",
    "a: b",
    "",
    "'",
    "é",
    "\\x85",
]


@pytest.mark.parametrize("text", [*LOOKALIKES, "\x85"])
def test_strings_that_look_like_something_else_stay_strings(text: str) -> None:
    settings = with_values(run_dir=text)
    assert from_yaml(to_yaml(settings), source="FILE") == settings


def test_yaml_is_meant_to_be_read() -> None:
    lines = to_yaml(Settings()).splitlines()
    assert "  decay_epochs: [30.0, 60.0, 80.0]" in lines
    sections = [line.rstrip(":") for line in lines if line.endswith(":")]
    assert sections == ["lasgd", "sgp", "data", "optimizer", "training", "emulation"]


def test_numbers_as_people_write_them() -> None:
    optimizer = from_yaml("optimizer: {base_lr: 1e-3, decay_epochs: [1, 2.5]}", source="FILE").optimizer
    assert (optimizer.base_lr, optimizer.decay_epochs) == (1e-3, (1.0, 2.5))
    assert all(type(value) is float for value in (optimizer.base_lr, *optimizer.decay_epochs))


@pytest.mark.parametrize("empty", ["", "# nothing\n"])
def test_an_empty_file_gives_the_defaults(empty: str) -> None:
    assert from_yaml(empty, source="FILE") == Settings()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lasgd: {tau_mx: 1}", "unknown setting lasgd.tau_mx: did you mean lasgd.tau_max?"),
        ("tau_max: 1", "unknown setting tau_max: did you mean lasgd.tau_max?"),
        ("zzzzzz: 1", "unknown setting zzzzzz: see --help"),
        ("1: 1", "unknown setting 1"),
        ("lasgd:", "section lasgd must be a mapping"),
        ("[1, 2]", "the file must be a mapping"),
        ("just text", "the file must be a mapping"),
        ("seed: true", "seed must be a whole number, but is True"),
        ("seed: 1.0", "seed must be a whole number, but is 1.0"),
        ("seed: '1'", "seed must be a whole number, but is '1'"),
        ("seed: null", "seed must be a whole number, but is None"),
        ("training: {epochs: true}", "training.epochs must be a number, but is True"),
        ("training: {epochs: a}", "training.epochs must be a number, but is 'a'"),
        ("trace: 1", "trace must be true or false, but is 1"),
        ("trace: yes", "trace must be true or false, but is 'yes'"),
        ("run_dir: 5", "run_dir must be text (quoted) or null, but is 5"),
        ("algorithm: sgp2", "algorithm must be one of allreduce, lasgd, sgp, but is 'sgp2'"),
        ("optimizer: {decay_epochs: 30}", "optimizer.decay_epochs must be a list of numbers, but is 30"),
        ("optimizer: {decay_epochs: [a]}", "optimizer.decay_epochs must be a list of numbers, but is ['a']"),
        ("optimizer: {decay_epochs: ''}", "optimizer.decay_epochs must be a list of numbers, but is ''"),
        ("seed: 1\nseed: 2", "line 2: 'seed' is given twice: keep one"),
        ("lasgd: {tau_max: 1, tau_max: 2}", "'tau_max' is given twice"),
        ("lasgd: {tau_max: 1", "line 1"),
        ("seed: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("seed: \x00", "FILE"),
    ],
)
def test_yaml_mistakes_are_one_line(text: str, expected: str) -> None:
    assert expected in error_of_yaml(text)


def test_names_are_unique_since_options_have_no_section() -> None:
    names = [name for name, _ in leaves(Settings())]
    assert len(names) == len(set(names))


def test_every_number_has_an_interval() -> None:
    assert {name for name, hint in HINTS.items() if re.search(r"\b(int|float)\b", str(hint))} == set(
        INTERVALS
    )


def test_defaults_pass() -> None:
    check(Settings())


@pytest.mark.parametrize("name", INTERVALS)
def test_numbers_out_of_range_are_refused(name: str) -> None:
    default = DEFAULTS[name]
    low, high = (float(end) for end in INTERVALS[name][1:-1].split(","))
    for number, inside in [
        (low, INTERVALS[name][0] == "["),
        (high, INTERVALS[name][-1] == "]"),
        (low - 1, False),
        (math.nan, False),
        (math.inf, False),
    ]:
        value = (number,) if isinstance(default, tuple) or name == "shard_proportions" else number
        messages = []
        try:
            check(with_values(**{name: value}))
        except SettingsError as error:
            messages = [str(error)]
        # A value in range may still be refused, for what it is combined with.
        refused = any(
            re.fullmatch(f"--{name.replace('_', '-')} is .*: it must lie in .*", m) for m in messages
        )
        assert refused != inside


USES = [(name, condition, allowed) for names, condition, allowed in USED_ONLY_WITH for name in names]
OTHER_VALUES = {
    "worker": "host",
    "data_dir": "somewhere",
    "download": True,
    "skip_corrupt": True,
    "nesterov": False,
    "momentum": 0.5,
    "decay_epochs": (1.0,),
    "decay_factor": 0.5,
    "elastic_alpha": 0.5,
    "elastic_beta": 0.5,
    "graph": "ring",
    "num_peers": 2,
    "biased": True,
    "wire_dtype": "bfloat16",
    "slot_patience_seconds": 0.5,
}
NEEDED = {"biased": {"tau": 1}}
"""What a setting has no effect without, beside USED_ONLY_WITH."""


@pytest.mark.parametrize(("name", "condition", "allowed"), USES)
def test_a_setting_that_would_be_ignored_is_refused(
    name: str, condition: str, allowed: tuple[str, ...]
) -> None:
    default = DEFAULTS[name]
    other = OTHER_VALUES[name] if name in OTHER_VALUES else default + 7
    conditions = {each: values[0] for setting, each, values in USES if setting == name and each != condition}
    for value in get_args(HINTS[condition]):
        check(with_values(**{**conditions, condition: value}))
        if value in allowed:
            check(with_values(**{**conditions, **NEEDED.get(name, {}), condition: value, name: other}))
        else:
            with pytest.raises(SettingsError, match=f"^--{name.replace('_', '-')} has an effect only with"):
                check(with_values(**{**conditions, condition: value, name: other}))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"resume": True}, "add --run-dir"),
        ({"evaluate": "model.pt", "run_dir": "x"}, "--evaluate does not train"),
        ({"evaluate": "model.pt", "trace": True}, "--evaluate does not train"),
        ({"momentum": 0.0}, "add --no-nesterov"),
        ({"schedule": "step", "decay_epochs": (2.0, 1.0)}, "must increase"),
        ({"schedule": "step", "decay_epochs": ()}, "--decay-epochs is empty"),
        ({"warmup_epochs": 21.0}, "longer than the run"),
        ({"model": ""}, "--model is empty"),
        ({"algorithm": "sgp", "num_peers": 2, "two_peer_rounds": 5}, "--two-peer-rounds has no effect"),
        ({"algorithm": "sgp", "biased": True}, "add --tau 1"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingsError, match=expected) as caught:
        check(with_values(**values))
    assert "\n" not in str(caught.value)
