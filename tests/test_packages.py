"""What users install: the source distribution, the wheel, and what pip makes of the dependencies."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support import ROOT

from moegraft.cpu_backend import _kernel

pytest.importorskip("pybind11")
pytest.importorskip("setuptools")

FOLDERS = ("injection/", "operators/", "cpu_backend/", "rules/")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MOST_BYTES = 15_000_000  # of a wheel
NO_PIP_SETTINGS = {"PIP_CONFIG_FILE": os.devnull}


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The names of the files of the repository."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs the repository: git lists its files")
    return run("git", "ls-files", cwd=ROOT).splitlines()


@pytest.fixture(scope="module")
def tree(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's files as they are now, without what is built or left beside them."""
    folder = tmp_path_factory.mktemp("tree")
    for name in tracked:
        if (ROOT / name).exists():  # else it is being removed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-c", f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})", cwd=tree)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def wheel_of(source: Path) -> Path:
    """Build a wheel of these sources around the extension that the tests run on, which saves compiling it."""
    run(sys.executable, "setup.py", "-q", "build_py", cwd=source)
    (built,) = (source / "build").glob("lib*")
    shutil.copy(_kernel.__file__, built / "moegraft" / "cpu_backend")
    run(sys.executable, "setup.py", "-q", "bdist_wheel", "--skip-build", cwd=source)
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return wheel_of(tree)


def record(wheel: Path) -> dict[str, str]:
    """The files of a wheel, with their hashes."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/RECORD"))
        return {row[0]: row[1] for row in csv.reader(io.TextIOWrapper(opened.open(name), encoding="utf-8"))}


def test_the_sdist_has_every_file_of_every_architecture(tracked: list[str], sdist: Path) -> None:
    packed = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    made = {name for name in packed if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert packed - made == {name for name in tracked if not name.startswith(".")}


def test_the_sdist_and_the_tree_give_the_same_wheel(sdist: Path, wheel: Path) -> None:
    assert record(wheel_of(sdist)) == record(wheel)


def test_the_wheel_has_the_packages_and_nothing_else(tracked: list[str], wheel: Path) -> None:
    """No C++ source, picture or test; every other file, among them the rule files and the bundled model."""
    shipped = {f"moegraft/{name}" for name in tracked if name.startswith(FOLDERS) and "/csrc/" not in name and not name.endswith(".png")}
    extension = f"moegraft/cpu_backend/{Path(_kernel.__file__).name}"
    packed = {name for name in record(wheel) if ".dist-info/" not in name}
    assert packed == {*shipped, extension}
    assert wheel.stat().st_size < MOST_BYTES


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (folder,) = {PurePosixPath(name).parts[0] for name in opened.namelist() if ".dist-info/" in name}
        metadata, tags, programs = (opened.read(f"{folder}/{name}").decode() for name in ("METADATA", "WHEEL", "entry_points.txt"))
    headers = metadata.split("\n\n", 1)[0]
    assert f"Version: {PROJECT['project']['version']}\n" in headers and "License-Expression: Apache-2.0\n" in headers
    assert "Requires-Python: >=3.11\n" in headers
    assert f"{folder}/licenses/LICENSE" in record(wheel)
    assert "Root-Is-Purelib: false\n" in tags
    assert {"local_chat", "moegraft"} <= {line.split(" = ")[0] for line in programs.splitlines()}


def fake_wheel(folder: Path, name: str, version: str, needs: list[str]) -> None:
    """Make a wheel of metadata alone."""
    stem = f"{name.replace('-', '_')}-{version}"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs), ""]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as made:
        made.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines))
        made.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """moegraft and everything that it needs, by name and version alone, with a torch newer than any that is installed."""
    folder = tmp_path_factory.mktemp("index")
    needs = PROJECT["project"]["dependencies"]
    for need in map(Requirement, needs):
        lowest = next(part.version for part in need.specifier if part.operator == ">=")
        if need.name != "torch":
            fake_wheel(folder, need.name, lowest, ["torch>=2.0.0"] if need.name == "accelerate" else [])
    fake_wheel(folder, "torch", "2.99.0", [])
    fake_wheel(folder, "moegraft", PROJECT["project"]["version"], needs)
    return folder


@pytest.mark.parametrize(
    ("installed", "kept"),
    [
        ("2.11.0+cu130", True),  # PyTorch's own builds
        ("2.13.0+cpu", True),
        ("2.13.0+rocm7.1", True),
        ("2.14.0", True),  # PyPI, and conda
        ("2.14.0.dev20260901+cu130", True),  # a nightly
        ("2.11.0a0+eb65b36.nv26.02", True),  # a vendor's container
        ("2.12.0a0+git64ad9ef", True),  # built from source
        ("2.10.0", False),  # too old for moegraft
        (None, False),
    ],
)  # fmt: skip
def test_pip_leaves_the_installed_torch_alone(installed: str | None, kept: bool, index: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    if installed is not None:
        (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
        (info := packages / f"torch-{installed}.dist-info").mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {installed}\n")
        (info / "RECORD").write_text("")
    pip = [sys.executable, "-m", "pip", "--python", tmp_path / "venv" / "bin" / "python"]
    report = run(*pip, "install", "-q", "--dry-run", "--no-index", "--find-links", index, "--report", "-", "moegraft", **NO_PIP_SETTINGS)
    names = {canonicalize_name(each["metadata"]["name"]) for each in json.loads(report)["install"]}
    assert "transformers" in names
    assert ("torch" not in names) == kept
