"""The command line: which source wins, and that every mistake is one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pushreduce.command_line import parse
from pushreduce.settings import LASGDSettings, Settings, SettingsError, leaves, option
from pushreduce.settings_file import to_yaml


def error_of(argv: list[str]) -> str:
    with pytest.raises(SettingsError) as caught:
        parse(argv)
    assert "\n" not in str(caught.value)
    assert "│" not in str(caught.value)
    return str(caught.value)


def test_nothing_given_is_the_default_run() -> None:
    assert parse([]) == Settings()


def test_every_setting_is_an_option_without_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        parse(["--help"])
    assert ending.value.code == 0
    words = capsys.readouterr().out.replace(",", " ").split()
    assert {option(name) for name, _ in leaves(Settings())} <= set(words)


def test_values_that_are_given_as_the_defaults_change_nothing() -> None:
    argv = []
    for name, value in leaves(Settings()):
        if isinstance(value, bool):
            argv += [option(name) if value else option("no_" + name)]
        else:
            argv += [option(name), *map(str, value if isinstance(value, tuple) else [value])]
    assert parse(argv) == Settings()


def test_option_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("seed: 5\nlasgd: {tau_max: 3, elastic_alpha: 0.5}\noptimizer: {nesterov: false}\n")
    settings = parse(["--settings", str(file), "--tau-max", "7"])
    assert (settings.seed, settings.lasgd) == (5, LASGDSettings(tau_max=7, elastic_alpha=0.5))
    assert not settings.optimizer.nesterov
    assert parse(["--settings", str(file), "--nesterov"]).optimizer.nesterov


def test_an_option_may_complete_what_the_file_begins(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("optimizer: {schedule: step}\n")
    assert parse(["--settings", str(file), "--decay-epochs", "1", "2"]).optimizer.decay_epochs == (1.0, 2.0)
    assert "--decay-epochs has an effect only with --schedule step" in error_of(["--decay-epochs", "1", "2"])


def test_resume_begins_with_the_settings_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(to_yaml(replace(Settings(), seed=3, algorithm="allreduce")))
    settings = parse(["--resume", "--run-dir", str(tmp_path), "--seed", "4"])
    assert settings == replace(Settings(), seed=4, algorithm="allreduce", resume=True, run_dir=str(tmp_path))


def test_a_traced_run_goes_on_without_its_trace(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(to_yaml(replace(Settings(), trace=True)))
    with pytest.raises(SettingsError, match="--no-trace"):
        parse(["--resume", "--run-dir", str(tmp_path)])
    assert not parse(["--resume", "--run-dir", str(tmp_path), "--no-trace"]).trace
    assert not parse(["--evaluate", str(tmp_path / "model.pt")]).trace


def test_what_cannot_be_a_file_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"model\.pt"):
        parse(["--evaluate", "."])
    with pytest.raises(SettingsError, match=r"--run-dir .* cannot be printed"):
        parse(["--run-dir", "runs/\udcff"])
    with pytest.raises(SettingsError, match="File name too long"):
        parse(["--resume", "--run-dir", str(tmp_path / ("x" * 300))])


def test_evaluate_takes_the_settings_beside_the_model_if_there_are_any(tmp_path: Path) -> None:
    model = str(tmp_path / "model.pt")
    assert parse(["--evaluate", model]) == replace(Settings(), evaluate=model)
    (tmp_path / "settings.yaml").write_text(to_yaml(replace(Settings(), seed=3)))
    assert parse(["--evaluate", model]) == replace(Settings(), seed=3, evaluate=model)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--tau-mx 5", "Unrecognized options: --tau-mx, 5: did you mean --tau-max?"),
        ("--lr 5", "--lr"),
        ("5", "Unrecognized options: 5"),
        ("--epochs many", "--epochs: could not convert string to float: 'many'"),
        ("--epochs", "Missing value for argument '--epochs'"),
        ("--seed 1.5", "--seed"),
        ("--seed -1", "--seed is -1: it must lie in [0, 4294967296)"),
        ("--algorithm sgd", "'allreduce', 'lasgd'"),
        ("--decay-epochs 1 x", "--decay-epochs"),
        ("--resume", "add --run-dir"),
        ("--resume --run-dir nowhere", "nowhere holds no run"),
        ("--resume --run-dir x --settings y", "remove --settings"),
        ("--settings nowhere.yaml", "nowhere.yaml cannot be read: No such file"),
        ("--worker host --algorithm allreduce", "leave it at process"),
        ("--algorithm allreduce --tau-max 2", "--tau-max has an effect only with --algorithm lasgd"),
    ],
)
def test_mistakes_are_one_line(argv: str, expected: str) -> None:
    assert expected in error_of(argv.split())


def test_mistakes_in_the_file_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("resume: true\n")
    assert error_of(["--settings", str(file)]).startswith(f"{file}: resume belongs on the command line")
    file.write_bytes(b"\xff\xfe")
    assert "UTF-8" in error_of(["--settings", str(file)])
    assert "Is a directory" in error_of(["--settings", str(tmp_path)])


def test_messages_keep_to_stderr_free_of_boxes(capsys: pytest.CaptureFixture[str]) -> None:
    error_of(["--tau-mx", "5"])
    assert capsys.readouterr() == ("", "")


def test_options_of_the_training_have_no_effect_on_an_evaluation(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(to_yaml(Settings()))
    with pytest.raises(SettingsError, match="--epochs has no effect on --evaluate"):
        parse(["--evaluate", str(tmp_path / "model.pt"), "--epochs", "99"])
    assert (
        parse(["--evaluate", str(tmp_path / "model.pt"), "--dataset", "synthetic"]).data.dataset
        == "synthetic"
    )
