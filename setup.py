"""Builds moegraft: the top-level folders are the packages `moegraft.<folder>`, and `cpu_backend` carries one C++ extension."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_packages, setup

ROOT = Path(__file__).parent
FOLDERS = ("injection", "operators", "cpu_backend", "rules")
CSRC = Path("cpu_backend/csrc")

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
ISA_FLAGS = {
    "x86_64": {
        "simd/avx2.cpp": AVX2,
        "simd/avx512.cpp": AVX512,
        "simd/avx512_vnni.cpp": VNNI,
        "simd/avx512_vbmi.cpp": [*VNNI, "-mavx512vbmi"],
        "simd/avx512_bf16.cpp": BF16,
        "simd/avx512_bf16_vbmi.cpp": [*BF16, "-mavx512vbmi"],
        "simd/amx.cpp": [*BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
    },
    "aarch64": {
        "simd/neon.cpp": [],
        "simd/neon_dotprod.cpp": [DOTPROD],
        "simd/neon_i8mm.cpp": [f"{DOTPROD}+i8mm"],
        "simd/neon_bf16.cpp": [f"{DOTPROD}+i8mm+bf16"],
    },
}
MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())


def sources() -> list[str]:
    """Return the C++ sources of this architecture. Other architectures than x86-64 and ARM64 build the scalar kernels alone."""
    others = {name for machine, flags in ISA_FLAGS.items() if machine != MACHINE for name in flags}
    return [path.as_posix() for path in sorted(CSRC.rglob("*.cpp")) if path.relative_to(CSRC).as_posix() not in others]


class BuildKernel(build_ext):
    """Compile each instruction set's source with its own flags and report a missing compiler in one sentence."""

    def build_extensions(self) -> None:
        compiler = self.compiler.compiler_so[0] if hasattr(self.compiler, "compiler_so") else "cl"
        if shutil.which(compiler) is None:
            sys.exit(f"moegraft: no C++ compiler ({compiler} was not found); install one, e.g. 'apt install g++', and try again")
        self._check_header(compiler)
        compile_one = self.compiler._compile

        def compile_with_isa_flags(obj, src, ext, cc_args, extra_postargs, pp_opts):  # type: ignore[no-untyped-def]
            flags = ISA_FLAGS.get(MACHINE, {}).get(Path(src).relative_to(CSRC).as_posix(), [])
            compile_one(obj, src, ext, cc_args, [*extra_postargs, *flags], pp_opts)

        self.compiler._compile = compile_with_isa_flags
        super().build_extensions()

    def _check_header(self, compiler: str) -> None:
        includes = [f"-I{path}" for path in self.compiler.include_dirs]
        probe = subprocess.run(
            [compiler, *includes, "-std=c++17", "-x", "c++", "-fsyntax-only", "-"],
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


packages = [f"moegraft.{folder}" for folder in FOLDERS]
packages += [f"moegraft.{folder}.{name}" for folder in FOLDERS for name in find_packages(str(ROOT / folder))]

ParallelCompile(default=0).install()
setup(
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
        Pybind11Extension(
            "moegraft.cpu_backend._kernel",
            sources(),
            include_dirs=[CSRC.as_posix()],
            depends=[path.as_posix() for path in CSRC.rglob("*.h")],
            cxx_std=17,
            libraries=["dl"] if sys.platform == "linux" else [],  # a part of libc only since glibc 2.34
            extra_compile_args=["-O3", "-fno-math-errno", "-pthread", "-g0"],
        )
    ],
    cmdclass={"build_ext": BuildKernel},
)
