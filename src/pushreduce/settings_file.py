"""Settings as YAML: `to_yaml` writes them, `from_yaml` reads them strictly; other frozen dataclasses likewise.

Owns the file's form and the types of its values. Does not own the settings' names (`settings.py`) or which
file is read when (`command_line.py`).

The scalars are those of YAML 1.2's core schema, which is what people expect: `1e-3` is a number, `no` and
`2024-01-01` are strings, and a quoted number is no number.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Hashable
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from pushreduce.settings import Settings, SettingsError

T = TypeVar("T")


def to_yaml(settings: Any) -> str:
    """All settings (any dataclass), in the order of their definition; `from_yaml` is the inverse."""
    return yaml.dump(asdict(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def load(path: Path) -> Settings:
    """The settings in the file at `path`.

    Raises:
        SettingsError: the file cannot be read, or as in `from_yaml`.
    """
    return load_dataclass(Settings, path, kind="settings file")


def load_dataclass(dataclass: type[T], path: Path, *, kind: str) -> T:
    """What the file at `path` holds; `kind` names the sort of file in error messages.

    Raises:
        SettingsError: the file cannot be read, or as in `dataclass_from_yaml`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{kind} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{kind} {path} is not UTF-8 text: write it as UTF-8") from error
    return dataclass_from_yaml(dataclass, text, source=str(path))


def from_yaml(text: str, *, source: str) -> Settings:
    """The settings that `text` gives, defaults for the rest. `source` names the file in error messages.

    Raises:
        SettingsError: as in `dataclass_from_yaml`.
    """
    return dataclass_from_yaml(Settings, text, source=source)


def dataclass_from_yaml(dataclass: type[T], text: str, *, source: str) -> T:
    """The values that `text` gives, defaults for the rest; dataclasses may be nested.

    Raises:
        SettingsError: no valid YAML, a key twice, an unknown key (the nearest is named), a missing one that has no
            default, a wrong type, or a value that the dataclass itself refuses by a ValueError.
    """
    try:
        # Safe: _Loader is yaml's SafeLoader with another table of scalars.
        content = yaml.load(text, Loader=_Loader)
        return _build(dataclass, {} if content is None else content, dataclass, place="")
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError(f"{source}{line}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{source}: {' '.join(str(error).split())}") from error
    except SettingsError as error:
        raise SettingsError(f"{source}: {error}") from error
    except (
        ValueError,
        KeyError,
        AttributeError,
        RecursionError,
    ) as error:  # yaml's own, on values like `!!int abc`
        raise SettingsError(
            f"{source}: a value cannot be read ({type(error).__name__}): correct it"
        ) from error


_Resolvers = dict[str, list[tuple[str, re.Pattern[str]]]]


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice; yaml's own keeps the last one silently."""

    yaml_implicit_resolvers: _Resolvers = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        for index, (key, _) in enumerate(node.value):
            if key.value in keys[:index]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is given twice: keep one", key.start_mark
                )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly those strings that `_Loader` would not read as strings, and writes sections as
    blocks."""

    yaml_implicit_resolvers: _Resolvers = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in (
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)
# In double quotes every line break that YAML knows (as U+0085) is escaped, in single quotes it is folded.
_Dumper.add_representer(
    str,
    lambda dumper, data: dumper.represent_scalar(
        "tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"'
    ),
)
_Dumper.add_representer(
    tuple, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)
)


def _build(section: type[T], content: Any, root: type, place: str) -> T:
    """`section`, which stands at `place` in the file of `root`."""
    if not isinstance(content, dict):
        where = f"section {place.rstrip('.')}" if place else "the file"
        raise SettingsError(f"{where} must be a mapping of names to values (name: value)")
    types_by_name: dict[str, Any] = get_type_hints(section)
    given = {}
    for name, value in content.items():
        if name not in types_by_name:
            raise SettingsError(f"unknown setting {place}{name}{_suggestion(str(name), root)}")
        annotation = types_by_name[name]
        if isinstance(annotation, type) and is_dataclass(annotation):
            given[name] = _build(annotation, value, root, place=f"{place}{name}.")
            continue
        try:
            given[name] = _convert(value, annotation)
        except (TypeError, OverflowError) as error:
            raise SettingsError(f"{place}{name} must be {_words(annotation)}, but is {value!r}") from error
    for item in fields(section):  # type: ignore[arg-type]
        if item.name not in given and item.default is MISSING and item.default_factory is MISSING:
            raise SettingsError(f"{place}{item.name} is missing: add it")
    try:
        return section(**given)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _suggestion(name: str, root: type) -> str:
    """The full name (section.name) of the setting most like `name`, which may be in another section."""
    types_by_name: dict[str, Any] = get_type_hints(root)
    full_names = {
        inner.name: f"{own_name}.{inner.name}"
        for own_name, annotation in types_by_name.items()
        if isinstance(annotation, type) and is_dataclass(annotation)
        for inner in fields(annotation)
    } | {own_name: own_name for own_name in types_by_name}
    matches = difflib.get_close_matches(name, full_names, n=1)
    if not matches and root is Settings:
        return ": see --help for the names"
    if not matches:
        return f": known are {', '.join(types_by_name)}"
    return f": did you mean {full_names[matches[0]]}?"


def _convert(value: Any, annotation: Any) -> Any:
    """`value` as `annotation` (a scalar type, Literal, tuple[T, ...], T | None); TypeError where it is not
    one."""
    origin = get_origin(annotation)
    if origin is types.UnionType:
        inner, none = get_args(annotation)
        assert none is types.NoneType
        return None if value is None else _convert(value, inner)
    if origin is tuple and type(value) is list:
        return tuple(_convert(element, get_args(annotation)[0]) for element in value)
    if origin is Literal and type(value) is str and value in get_args(annotation):
        return value
    if annotation is float and type(value) is int:
        return float(value)
    # Not isinstance: True would pass for an int.
    if type(value) is not annotation:
        raise TypeError
    return value


def _words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is types.UnionType:
        return f"{_words(arguments[0])} or null"
    if origin is tuple:
        return "a list of numbers"
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text (quoted)"}[annotation]
