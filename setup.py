"""Builds moegraft: the top-level folders are the packages `moegraft.<folder>`, and `cpu_backend` carries one C++ extension."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
FOLDERS = ("injection", "operators", "cpu_backend", "rules")
CSRC = Path("cpu_backend/csrc")
# With room for garbage g++ takes 3 to 5 % less time for the largest units, an eighth for the bindings, and at most 0.6 GB.
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-pthread", "-g0", "-fvisibility=hidden", "--param", "ggc-min-heapsize=1000000"]

# These sources are compiled for one instruction set each and entered only on a CPU that has it.
# The flags build on each other: AVX-512 code may use everything that AVX2 code may.
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
# g++ 12 warns about its own header (GCC bug 105593)
AVX512 = [
    *AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mprefer-vector-width=512",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]
VNNI = [*AVX512, "-mavx512vnni"]
BF16 = [*VNNI, "-mavx512bf16"]
DOTPROD = "-march=armv8.2-a+dotprod"
# Units by machine: the longest come first, so that no core waits for one at the end.
ISA_UNITS = {
    "x86_64": {
        "avx512": (["simd/avx512.cpp", "recurrent/avx512.cpp"], AVX512),
        "avx2": (["simd/avx2.cpp", "recurrent/avx2.cpp"], AVX2),
        # No compiler makes instructions for tiles or for bfloat16 of code that has none, so that BF16's runs without AMX, and VBMI's
        # without BF16.
        "avx512_bf16_amx": (["simd/avx512_bf16.cpp", "simd/amx.cpp"], [*BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16"]),
        "avx512_vnni": (["simd/avx512_vnni.cpp"], VNNI),
        "avx512_vbmi": (["simd/avx512_vbmi.cpp", "simd/avx512_bf16_vbmi.cpp"], [*BF16, "-mavx512vbmi"]),
        "avx_vnni": (["simd/avx_vnni.cpp"], [*AVX2, "-mavxvnni"]),
    },
    "aarch64": {
        "neon": (["simd/neon.cpp"], []),
        "neon_dotprod": (["simd/neon_dotprod.cpp"], [DOTPROD]),
        "neon_i8mm": (["simd/neon_i8mm.cpp"], [f"{DOTPROD}+i8mm"]),
        "neon_bf16": (["simd/neon_bf16.cpp"], [f"{DOTPROD}+i8mm+bf16"]),
    },
}
MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())


# Sources that are compiled together, because most of what they cost is their headers.
UNITS = {
    **ISA_UNITS.get(MACHINE, {}),
    # Optimisation gains little in front of the bindings' calls. One function instead of two takes less time to compile.
    "bindings": (["bindings/*.cpp"], ["-Og", "-finline-functions-called-once"]),
    # What hands out the kernels' work has simple loops only: their vectors are all that it gains from -O3, which takes twice as long.
    # Weights are quantised to the same codes on every CPU: ARM64's compilers would fuse products and sums.
    "core": (
        [f"{folder}/*.cpp" for folder in ("core", "scheduler", "program", "sparse", "ops")]
        + ["experts/cache_policy.cpp", "experts/frames.cpp", "experts/job.cpp", "experts/packed_weights.cpp"]
        + ["recurrent/jobs.cpp", "simd/isa.cpp", "simd/matrix_check.cpp"],
        ["-O1", "-ftree-vectorize", "-ffp-contract=off"],
    ),
    # These sources and the instruction sets' include the descriptions of formats; the units above do not.
    "formats": (
        [
            *("formats/*.cpp", "attention/*.cpp", "simd/scalar.cpp"),
            *("experts/block_layout.cpp", "experts/gradient.cpp", "experts/routing.cpp"),
        ],
        ["-ffp-contract=off"],
    ),
}


class BuildKernel(build_ext):
    """Compile the units into build/objects, which keeps them from one installation to the next, and link them.

    A unit is compiled again where its command, its compiler or the content of a file that it includes has changed. The record beside an
    object has these, and the CPU seconds that compiling took.
    """

    def build_extension(self, ext: Extension) -> None:
        command = [*getattr(self.compiler, "compiler_so_cxx", self.compiler.compiler_so)]
        if shutil.which(command[0]) is None:
            sys.exit(f"moegraft: no C++ compiler ({command[0]} was not found); install one, e.g. 'apt install g++', and try again")
        self._check_header(command[0])
        command += [*FLAGS, f"-I{CSRC.as_posix()}"]
        version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout
        # Of Python and pybind11 the versions count, not the place: an isolated build has them in another folder each time.
        python = [sysconfig.get_config_var("SOABI"), pybind11.__version__]
        headers = [f"-isystem{path}" for path in (pybind11.get_include(), *self.compiler.include_dirs)]
        folder = ROOT / "build" / "objects"
        folder.mkdir(parents=True, exist_ok=True)

        def compile_unit(name: str) -> str:
            patterns, flags = UNITS[name]
            sources = [path.relative_to(ROOT / CSRC).as_posix() for pattern in patterns for path in sorted((ROOT / CSRC).glob(pattern))]
            uses_python = name == "bindings"
            key = hashlib.sha256(json.dumps([command, flags, version, sources, python if uses_python else []]).encode()).hexdigest()[:12]
            target = folder / f"{name}-{key}.o"
            if self.force or not is_current(target):
                compile_together(target, sources, [*command, *flags, *(headers if uses_python else [])])
            return str(target)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()) as pool:
            objects = list(pool.map(compile_unit, UNITS))
        libraries = ["dl"] if sys.platform == "linux" else []  # a part of libc only since glibc 2.34
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), libraries=libraries, extra_postargs=["-pthread"], target_lang="c++"
        )

    def _check_header(self, compiler: str) -> None:
        includes = [f"-I{path}" for path in self.compiler.include_dirs]
        probe = subprocess.run(
            [compiler, *includes, "-std=c++17", "-x", "c++", "-M", "-"],
            input="#include <Python.h>\n#include <thread>\n#if __cplusplus < 201703L\n#error C++17\n#endif\n",
            text=True,
            capture_output=True,
            check=False,
        )
        if probe.returncode == 0:
            return
        if "Python.h" in probe.stderr:
            sys.exit("moegraft: Python.h was not found; install the headers of this Python, e.g. 'apt install python3-dev', and try again")
        sys.exit(f"moegraft: {compiler} cannot compile C++17; install g++ 11 or newer (it reports: {probe.stderr.strip().splitlines()[0]})")


def is_current(target: Path) -> bool:
    """Return whether an object's record names the content of the files as they are."""
    try:
        record = json.loads(target.with_suffix(".json").read_text())
        return target.exists() and all(digest(ROOT / path) == value for path, value in record["inputs"].items())
    except (OSError, ValueError, KeyError):
        return False


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def compile_together(target: Path, sources: list[str], command: list[str]) -> None:
    """Compile sources as one, and write the object and then its record, which completes it."""
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        unit, made, depends = (Path(temporary) / f"unit{suffix}" for suffix in (".cpp", ".o", ".d"))
        unit.write_text("".join(f'#include "{source}"\n' for source in sources))
        process = subprocess.Popen([*command, "-MMD", "-MF", str(depends), "-c", str(unit), "-o", str(made)], cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"moegraft: {', '.join(sources)} in {CSRC.as_posix()} cannot be compiled; what the compiler reports is above")
        inputs = [path for path in depends.read_text().replace("\\\n", " ").split()[1:] if not path.startswith(temporary)]
        record = {"cpu_s": round(usage.ru_utime + usage.ru_stime, 2), "inputs": {path: digest(ROOT / path) for path in inputs}}
        target.with_suffix(".json").unlink(missing_ok=True)
        made.replace(target)
        target.with_suffix(".json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    packages = [f"moegraft.{folder}" for folder in FOLDERS]
    packages += [f"moegraft.{folder}.{name}" for folder in FOLDERS for name in find_packages(str(ROOT / folder))]

    # Left in the checkout, the metadata of a build would make `import torch` fail for every Python that runs there without moegraft: it
    # names what torch loads (`torch.backends`).
    metadata = ROOT / "build"
    metadata.mkdir(exist_ok=True)
    setup(
        options={"egg_info": {"egg_base": metadata.name}},
        packages=packages,
        package_dir={f"moegraft.{folder}": folder for folder in FOLDERS},
        package_data={
            "moegraft.injection": ["py.typed"],
            "moegraft.injection.texts": ["*.txt"],
            "moegraft.injection.demo": ["*.json", "*.safetensors", "*.jinja", "*.md", "*.txt"],
            "moegraft.injection.cli.serve": ["*.html", "*.css", "*.js"],
            "moegraft.rules": ["*.yaml", "*.md", "*.json", "guide/*.md"],
            "moegraft.cpu_backend": ["*.pyi", "py.typed"],
            "moegraft.operators": ["py.typed"],
            "moegraft.operators.kernels": ["*.json"],
        },
        ext_modules=[
            Extension("moegraft.cpu_backend._kernel", [path.as_posix() for path in CSRC.rglob("*") if path.suffix in (".cpp", ".h")])
        ],
        cmdclass={"build_ext": BuildKernel},
    )
