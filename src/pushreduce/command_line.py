"""From the command line to the settings of a run: `parse`.

Owns which source wins (option > settings file > default) and that every mistake is one line. Does not own
names, types, defaults or ranges (`settings.py`) or the file's form (`settings_file.py`); imports neither
torch nor MPI.

    python src/train.py --algorithm lasgd --tau-max 5 --settings experiments/NAME/settings.yaml
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import tyro

from pushreduce import settings_file
from pushreduce.settings import Settings, SettingsError, check, leaves, option

DESCRIPTION = (
    "Trains an image classifier with decentralised SGD, under horovodrun or mpirun, or alone. "
    "Without options: LASGD and a small CNN on scikit-learn's digits."
)


@dataclass(frozen=True)
class _Options(Settings):
    settings: str | None = None
    """YAML file with settings; options override it. A run saves all of its own as RUN_DIR/settings.yaml."""


def parse(argv: list[str]) -> Settings:
    """The settings that `argv` (without the program's name) asks for, checked.

    Options override the settings file: the one named by `--settings`, with `--resume` RUN_DIR/settings.yaml,
    with `--evaluate` the one beside the model file if there is one. `--help` prints to stdout and raises
    SystemExit(0).

    Raises:
        SettingsError: any mistake in the options or the file, in one line.
    """
    options = _parse_options(argv, Settings())
    try:
        file = _settings_file(options)
    except OSError as error:
        raise SettingsError(f"{error.filename}: {error.strerror}: correct the path") from error
    if file is not None:
        base = settings_file.load(file)
        if base.resume:
            raise SettingsError(f"{file}: resume belongs on the command line: remove it and add --resume")
        if options.evaluate is not None:
            base = replace(base, trace=False)  # that was about the training
        options = _parse_options(argv, base)
        if options.evaluate is not None:
            _refuse_ignored(options, base)
    settings = Settings(**{item.name: getattr(options, item.name) for item in fields(Settings)})
    for name, value in leaves(settings):
        if isinstance(value, str) and not value.isprintable():
            raise SettingsError(
                f"{option(name)} {value!a} has characters that cannot be printed: choose another"
            )
    check(settings)
    return settings


def _refuse_ignored(options: _Options, base: Settings) -> None:
    """An evaluation takes its data and model from the options, and nothing of the training."""
    matters = {"evaluate", "settings", *(item.name for item in fields(base.data)), "device", "dtype"}
    for (name, given), (_, saved) in zip(leaves(options), leaves(base), strict=False):
        if name not in matters and given != saved:
            raise SettingsError(f"{option(name)} has no effect on --evaluate: remove it")


def _settings_file(options: _Options) -> Path | None:
    if options.resume:
        if options.settings is not None:
            raise SettingsError("--resume takes the settings saved with the run: remove --settings")
        if options.run_dir is None:
            raise SettingsError("--resume needs the directory of the run to go on with: add --run-dir")
        file = Path(options.run_dir) / "settings.yaml"
        if not file.is_file():
            raise SettingsError(f"{options.run_dir} holds no run: correct --run-dir, or leave --resume out")
        return file
    if options.settings is not None:
        return Path(options.settings)
    if options.evaluate is not None:
        if not Path(options.evaluate).name:
            raise SettingsError(f"--evaluate {options.evaluate} is no file: give a run's model.pt")
        file = Path(options.evaluate).with_name("settings.yaml")
        return file if file.is_file() else None
    return None


def _parse_options(argv: list[str], base: Settings) -> _Options:
    default = _Options(**{item.name: getattr(base, item.name) for item in fields(Settings)})
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return tyro.cli(
                _Options,
                args=argv,
                default=default,
                prog="python src/train.py",
                description=DESCRIPTION,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as ending:
        if not ending.code:
            raise
        raise SettingsError(_one_line(messages.getvalue())) from None


def _one_line(box: str) -> str:
    """tyro's message out of its box: the text above the first rule, and the options it holds to be
    similar."""
    lines = [line.strip("│╭╮╰╯").rstrip() for line in box.splitlines()[1:-1]]
    rules = [index for index, line in enumerate(lines) if set(line.strip()) == {"─"}]
    message_end = rules[0] if rules else len(lines)
    message = " ".join(line.strip() for line in lines[:message_end]).rstrip(". ")
    rest = "\n".join(lines[message_end:])
    similar = re.findall(r"^ +(--[\w-]+)", rest, flags=re.MULTILINE) if "Perhaps you meant" in rest else []
    hint = f"did you mean {' or '.join(dict.fromkeys(similar))}?" if similar else "see --help"
    return f"{message}: {hint}"
