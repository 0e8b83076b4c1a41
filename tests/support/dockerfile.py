"""Carry out the steps of a Dockerfile without a container engine: root file systems by mmdebstrap, commands by chroot.

    python tests/support/dockerfile.py Dockerfile --build-arg MOEGRAFT=dist/moegraft-0.1.0-cp311-cp311-linux_x86_64.whl -- --port 8000

builds the image in a temporary folder and runs it with the arguments after `--`. It needs root, Debian's package mmdebstrap and a network
with Debian's packages and PyPI. What a machine needs to reach these comes from options: --mount for folders and files that each step
sees, --env for variables that each step has beside its own.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEBIAN = re.compile(r"debian:(\w+)-slim")  # the only base images that mmdebstrap makes


@dataclass(frozen=True)
class Step:
    """One instruction of a Dockerfile, with the line that it begins on."""

    line: int
    name: str
    text: str


def read_steps(dockerfile: Path) -> list[Step]:
    """Return the instructions, continued lines joined and comments left out."""
    steps, pending, start = [], "", 0
    for number, line in enumerate(dockerfile.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("#") or not (pending or line.strip()):
            continue
        start = start if pending else number
        pending += line.removesuffix("\\")
        if not line.endswith("\\"):
            name, text = pending.strip().split(None, 1)
            steps.append(Step(start, name.upper(), text))
            pending = ""
    return steps


def in_context(name: str, patterns: Sequence[str]) -> bool:
    """Whether .dockerignore's patterns let a file of the context through; the last that matches it or a folder above it decides."""
    parts = name.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    taken = True
    for pattern in patterns:
        wanted = pattern.removeprefix("!")
        anywhere = wanted.removeprefix("**/")
        if any(fnmatch.fnmatchcase(path if anywhere == wanted else path.rpartition("/")[2], anywhere) for path in above):
            taken = pattern.startswith("!")
    return taken


def context_files(context: Path) -> list[str]:
    """Return what a build sees of its context: everything that .dockerignore lets through."""
    lines = (context / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line.strip() and not line.startswith("#")]
    tops = [path for path in context.iterdir() if in_context(path.name, patterns)]
    files = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*")) if path.is_file()]
    return sorted(name for path in files if in_context(name := path.relative_to(context).as_posix(), patterns))


@dataclass
class Stage:
    """A root file system, and what the steps so far have set for those that follow and for the container."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    folder: str = "/"
    user: str = "root"
    entrypoint: list[str] = field(default_factory=list)
    ports: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Machine:
    """What steps need of the machine that they run on."""

    mounts: Sequence[Path] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, stage: Stage, arguments: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        """Return the command that runs `arguments` in the stage as the first process of its own namespace; mounts end with it."""
        root = shlex.quote(str(stage.root))
        script = ["set -e", f"mount -t proc proc {root}/proc", f"mkdir -p {root}/dev/shm", f"mount -t tmpfs shm {root}/dev/shm"]
        for path in (Path("/etc/resolv.conf"), *self.mounts):
            inside = shlex.quote(f"{stage.root}{path}")
            make = "mkdir -p" if path.is_dir() else "install -D /dev/null"
            script.append(f"[ -e {inside} ] || {make} {inside}")
            # Read-only: a step runs as root, and whatever it replaces would be replaced on this machine.
            script.append(f"mount --bind {shlex.quote(str(path))} {inside} && mount -o remount,bind,ro {inside}")
        users = [line.split(":") for line in (stage.root / "etc" / "passwd").read_text(encoding="utf-8").splitlines()]
        home = {"HOME": next(user[5] for user in users if user[0] == stage.user)}
        setting = [f"{name}={value}" for name, value in {**home, **stage.environment, **variables, **self.environment}.items()]
        inner = f'cd {shlex.quote(stage.folder)} && exec "$@"'
        chroot = ["chroot", f"--userspec={stage.user}", str(stage.root), "env", "-i", *setting, "sh", "-c", inner, "sh", *arguments]
        script.append(f"exec {shlex.join(chroot)}")
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", "\n".join(script)]


def build(dockerfile: Path, context: Path, folder: Path, build_args: Mapping[str, str], machine: Machine) -> Stage:
    """Carry out the steps and return the last stage.

    Raises:
        ValueError: the Dockerfile has an instruction or a form of one that is not known here.
        subprocess.CalledProcessError: a step failed.
    """
    stages: dict[str, Stage] = {}
    stage, arguments = Stage(folder), dict[str, str]()
    for step in read_steps(dockerfile):
        print(f"{dockerfile.name}:{step.line}: {step.name} {step.text}", flush=True)
        words = [Template(word).safe_substitute(arguments | stage.environment) for word in shlex.split(step.text)]
        match step.name, words:
            case "FROM", [image, *alias] if debian := DEBIAN.fullmatch(image):
                name = alias[1] if alias else str(len(stages))
                stage, arguments = Stage(folder / name), {}
                stages[name] = stage
                _copy_tree(_debian(debian[1], folder), stage.root)
            case "ARG", [given]:
                name, _, default = given.partition("=")
                arguments[name] = build_args.get(name, default)
            case "ENV", pairs if all("=" in pair for pair in pairs):
                stage.environment |= dict(pair.split("=", 1) for pair in pairs)
            case "WORKDIR", [path]:
                stage.folder = path
                (stage.root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER", [user]:
                stage.user = user
            case "EXPOSE", ports:
                stage.ports += ports
            case "ENTRYPOINT", _:
                stage.entrypoint = json.loads(step.text)
            case "RUN", _:
                subprocess.run(machine.command(stage, ["sh", "-c", step.text], arguments), check=True)
            case "COPY", [origin, source, target] if origin.startswith("--from="):
                _copy_tree(stages[origin.removeprefix("--from=")].root / source.lstrip("/"), _inside(stage, target))
            case "COPY", [source, target]:
                names = [name for name in context_files(context) if source == "." or name == source or name.startswith(f"{source}/")]
                if not names:
                    raise ValueError(f"{dockerfile}:{step.line}: nothing in the build context is called {source!r}")
                for name in names:
                    (copy := _inside(stage, target) / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(context / name, copy)
            case _:
                raise ValueError(f"{dockerfile}:{step.line}: cannot carry out '{step.name} {step.text}' without a container engine")
    unused = build_args.keys() - {step.text.partition("=")[0] for step in read_steps(dockerfile) if step.name == "ARG"}
    if unused:
        raise ValueError(f"{dockerfile} has no ARG {', '.join(sorted(unused))}")
    return stage


def _copy_tree(source: Path, target: Path) -> None:
    """With owners, links and devices."""
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "--archive", "--no-target-directory", source, target], check=True)


def _inside(stage: Stage, path: str) -> Path:
    return stage.root / os.path.normpath(Path(stage.folder) / path).lstrip("/")


def _debian(suite: str, folder: Path) -> Path:
    """The base image: Debian's essential packages and apt, without documentation."""
    root = folder / f"debian-{suite}"
    if not root.exists():
        slim = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
        subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", *slim, suite, str(root)], check=True)
    return root


def nbytes(stage: Stage) -> int:
    """Return the bytes that the stage's files occupy."""
    return 1024 * int(subprocess.run(["du", "-skx", stage.root], check=True, capture_output=True, text=True).stdout.split()[0])


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-arg", metavar="NAME=VALUE", action="append", default=[], help="as docker build has it")
    parser.add_argument("--mount", metavar="PATH", action="append", type=Path, default=[], help="a file or folder that each step can read")
    parser.add_argument("--env", metavar="NAME=VALUE", action="append", default=[], help="a variable that each step has")
    return parser


def build_with(given: argparse.Namespace, dockerfile: Path, folder: Path) -> tuple[Stage, Machine]:
    machine = Machine(given.mount, dict(each.split("=", 1) for each in given.env))
    arguments = dict(each.split("=", 1) for each in given.build_arg)
    return build(dockerfile, dockerfile.parent, folder, arguments, machine), machine


def main() -> int:
    parser = options()
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("arguments", nargs="*", help="of the container")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stage, machine = build_with(given, given.dockerfile.absolute(), Path(folder))
        print(f"the image holds {nbytes(stage) / 1e6:.0f} MB; it runs: {shlex.join([*stage.entrypoint, *given.arguments])}", flush=True)
        return subprocess.run(machine.command(stage, [*stage.entrypoint, *given.arguments], {}), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
