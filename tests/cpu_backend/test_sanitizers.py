"""The C++ sources under address, undefined-behaviour and thread sanitizers, and those of ARM64 in an emulator, driven by sanitized.cpp."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import ROOT

from moegraft.cpu_backend import Runtime

pybind11 = pytest.importorskip("pybind11", reason="compiles bindings: pip install pybind11")

CSRC = ROOT / "cpu_backend" / "csrc"
MAIN = Path(__file__).with_name("sanitized.cpp")
OPTIMUM = ROOT / "tests" / "support" / "optimum.cpp"
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
NEON = "-march=armv8.2-a+dotprod"
# By architecture: the sources of its instruction sets.
ISA_FLAGS = {
    "x86_64": {
        "simd/avx2.cpp": AVX2,
        "simd/avx_vnni.cpp": [*AVX2, "-mavxvnni"],
        "simd/avx512.cpp": AVX512,
        "simd/avx512_vnni.cpp": [*AVX512, "-mavx512vnni"],
        "simd/avx512_vbmi.cpp": [*AVX512, "-mavx512vnni", "-mavx512vbmi"],
        "simd/avx512_bf16.cpp": [*AVX512, "-mavx512vnni", "-mavx512bf16"],
        "simd/avx512_bf16_vbmi.cpp": [*AVX512, "-mavx512vnni", "-mavx512bf16", "-mavx512vbmi"],
        "simd/amx.cpp": [*AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
        "recurrent/avx2.cpp": AVX2,
        "recurrent/avx512.cpp": AVX512,
    },
    "aarch64": {
        "simd/neon.cpp": [],
        "simd/neon_dotprod.cpp": [NEON],
        "simd/neon_i8mm.cpp": [f"{NEON}+i8mm"],
        "simd/neon_bf16.cpp": [f"{NEON}+i8mm+bf16"],
    },
}
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def sources_for(isa_flags: Mapping[str, list[str]]) -> list[str]:
    """Return the C++ sources, those of other instruction sets left out."""
    others = {name for flags in ISA_FLAGS.values() for name in flags} - set(isa_flags)
    return [name for source in CSRC.rglob("*.cpp") if (name := source.relative_to(CSRC).as_posix()) not in others]


def build(folder: Path, flags: list[str], vector: bool, compiler: str = "g++", machine: str = MACHINE) -> Path:
    """Compile the sources and the driver; without `vector` only the scalar kernels, for tests that do not depend on them."""
    isa_flags = ISA_FLAGS.get(machine, {}) if vector else {}
    if EMULATED_AMX in flags:  # the instructions of AVX-VNNI in the form that AVX-512 has
        isa_flags = isa_flags | {"simd/avx_vnni.cpp": [*AVX512, "-mavx512vnni"]}
    sources = [CSRC / name for name in sources_for(isa_flags) if not name.startswith(("bindings/", "program/"))]
    common = [compiler, "-std=c++17", "-O1", "-g1", "-pthread", f"-I{CSRC}", *flags]
    if not vector:
        common.append("-DMOEGRAFT_SCALAR_ONLY")

    def compile_one(source: Path) -> Path:
        name = source.relative_to(CSRC).as_posix() if source.is_relative_to(CSRC) else source.name
        target = folder / f"{name.replace('/', '-')}.o"
        subprocess.run([*common, *isa_flags.get(name, []), "-c", str(source), "-o", str(target)], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, [MAIN, OPTIMUM, *sources]))
    program = folder / "sanitized"
    subprocess.run([*common, *map(str, objects), "-o", str(program)], check=True)
    return program


@pytest.mark.skipif("avx512" not in Runtime.available_isas(), reason="what stands for the instruction copies 64 bytes with AVX-512")
@pytest.mark.parametrize("level", ["-O0", "-O3"])
def test_the_whole_tile_configuration_reaches_the_instruction(level: str, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    program = tmp_path / "tile_config"
    flags = ["-std=c++17", level, "-mamx-tile", "-mamx-int8", "-mamx-bf16", f"-I{CSRC}"]
    subprocess.run(["g++", *flags, str(MAIN.with_name("tile_config.cpp")), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=True)
    palette = [1, *[0] * 15]
    row_bytes = [*[64] * 8, *[0] * 8]
    rows = [*[16] * 8, *[0] * 8]
    expected = [*palette, *(byte for size in row_bytes for byte in (size, 0)), *rows]
    assert [int(word) for word in done.stdout.split()] == expected


def supported(flag: str, folder: Path) -> bool:
    if shutil.which("g++") is None:
        return False
    source = folder / "empty.cpp"
    source.write_text("int main() {}\n")
    return subprocess.run(["g++", flag, str(source), "-o", str(folder / "empty")], capture_output=True, check=False).returncode == 0


# AMX runs over emulated tiles where the CPU has the instructions that expand the weights.
EMULATED_AMX = "-DMOEGRAFT_EMULATED_AMX"


@pytest.mark.parametrize(
    ("flag", "own", "vector"),
    [
        # Scalar kernels take longer to optimise than to run.
        ("-fsanitize=address,undefined", ["-O0"], False),
        ("-fsanitize=address,undefined", [EMULATED_AMX], True),
        # Races can occur only in the scheduling.
        ("-fsanitize=thread", [], False),
    ],
    ids=["scalar address+undefined", "vector address+undefined", "scalar thread"],
)
def test_no_sanitizer_reports_an_error(flag: str, own: list[str], vector: bool, long: bool, tmp_path: Path) -> None:
    if not long:
        pytest.skip("takes minutes to compile: pytest --long")
    if not supported(flag, tmp_path):
        pytest.skip(f"this compiler has no {flag}")
    run(build(tmp_path, [flag, "-fno-sanitize-recover=all", *own], vector))


def test_vector_kernels_and_emulated_tiles_agree_with_the_scalar_ones(long: bool, tmp_path: Path) -> None:
    if not long:
        pytest.skip("takes two minutes to compile: pytest --long")
    if MACHINE not in ISA_FLAGS or shutil.which("g++") is None:
        pytest.skip("needs an x86-64 or ARM64 CPU and g++")
    run(build(tmp_path, [EMULATED_AMX, "-g0"], True))


NEON_SETS = ("scalar", "neon", "neon_dotprod", "neon_i8mm", "neon_bf16")


def test_the_kernels_of_arm64_agree_with_the_scalar_ones_in_an_emulator(long: bool, tmp_path: Path) -> None:
    if not long:
        pytest.skip("takes a minute to compile: pytest --long")
    compiler = shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        pytest.skip("no ARM64 compiler and emulator (Debian's packages g++-aarch64-linux-gnu and qemu-user bring them)")
    program = build(tmp_path, ["-static", "-g0"], True, compiler, "aarch64")
    for cpu, sets in (("max", NEON_SETS), ("neoverse-n1", NEON_SETS[:3]), ("cortex-a72", NEON_SETS[:2])):
        run(program, *sets, emulator=(emulator, "-cpu", cpu))


def run(program: Path, *arguments: str, emulator: Sequence[str] = ()) -> None:
    done = subprocess.run([*emulator, str(program), *arguments], capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def sanitized_package(folder: Path, flags: list[str]) -> Path:
    """Build the extension with `flags`, bindings included, into a copy of the package; return the folder to import it from."""
    package = folder / "source" / "moegraft"
    (package / "cpu_backend").mkdir(parents=True)
    for name in ("injection", "operators", "rules"):
        (package / name).symlink_to(ROOT / name)
    for file in (ROOT / "cpu_backend").glob("*.py*"):
        (package / "cpu_backend" / file.name).symlink_to(file)
    isa_flags = ISA_FLAGS.get(MACHINE, {})
    includes = [f"-I{CSRC}", f"-I{sysconfig.get_paths()['include']}", f"-I{pybind11.get_include()}"]
    common = ["g++", "-std=c++17", "-O1", "-g1", "-pthread", "-fPIC", "-fno-math-errno", "-fvisibility=hidden", *includes, *flags]

    def compile_one(name: str) -> Path:
        target = folder / f"{name.replace('/', '-')}.o"
        subprocess.run([*common, *isa_flags.get(name, []), "-c", str(CSRC / name), "-o", str(target)], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources_for(isa_flags)))
    library = package / "cpu_backend" / f"_kernel{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run([*common, "-shared", *map(str, objects), "-o", str(library), "-ldl"], check=True)
    return package.parent


# Everything that calls the extension with shapes of its own, on its threads and on PyTorch's.
THROUGH_PYTHON = (
    *("tests/cpu_backend", "tests/operators/decode", "tests/operators/cpu_ops", "tests/operators/test_linear.py"),
    *("tests/operators/experts", "tests/operators/offload/test_schedules.py", "tests/test_differential.py"),
)
EVERY_INSTRUCTION_SET = "from moegraft.cpu_backend import Runtime, _kernel; print(_kernel.__file__, *Runtime.available_isas())"


def test_no_sanitizer_reports_an_error_in_python(long: bool, tmp_path: Path) -> None:
    """Address and undefined behaviour, in the tests of whatever calls the extension."""
    if not long:
        pytest.skip("takes half an hour: pytest --long")
    flag = "-fsanitize=address,undefined"
    if not supported(flag, tmp_path):
        pytest.skip(f"this compiler has no {flag}")
    source = sanitized_package(tmp_path, [flag, "-fno-sanitize-recover=all", "-fno-sanitize=vptr"])
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(source),
    }

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600, check=False)

    loaded = python("-c", EVERY_INSTRUCTION_SET).stdout.split()
    assert loaded[0].startswith(str(source)) and loaded[1:] == list(Runtime.available_isas()), loaded

    def tested(place: str) -> str:
        """Return what a part of the tests reports, or nothing."""
        # A report ends the process: without -s it would end with what pytest has captured.
        own = ["-m", "pytest", "-q", "-s", "-n", "0", "-p", "no:cacheprovider", "--deselect", "tests/cpu_backend/test_sanitizers.py"]
        # Emulated CPUs lack instructions that the sanitizers' own libraries use.
        own += ["--deselect", "tests/cpu_backend/test_runtime.py::test_older_cpus_run_no_instruction_that_they_lack"]
        done = python(*own, place)
        if done.returncode == 0:
            return ""
        report = re.search(r".*(runtime error:|ERROR: AddressSanitizer).*\n(.*\n){,20}", done.stderr)
        return f"{place}: {report.group() if report else done.stdout[-6000:] + done.stderr[-4000:]}"

    with ThreadPoolExecutor(2) as pool:
        assert not list(filter(None, pool.map(tested, THROUGH_PYTHON)))
