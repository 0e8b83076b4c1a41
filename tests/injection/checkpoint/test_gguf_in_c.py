"""Our encoders and decoders of GGUF's types beside llama.cpp's in C, through the binding of its own test `gguf-py/tests/test_quants.py`.

    pytest --long tests/injection/checkpoint/test_gguf_in_c.py

The sources come from the distribution of llama-cpp-python, which pip downloads; without it, or without a C compiler, the tests are skipped.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moegraft.cpu_backend import PackedLinear
from moegraft.operators.weight_formats import GGUF_TYPES

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

SOURCES = "llama-cpp-python==0.3.36"
WANTED = re.compile(r"[^/]+/vendor/llama\.cpp/(gguf-py/tests/test_quants\.py|ggml/(include|src|src/ggml-cpu)/[^/]+)$")
# Functions of other files of the library, of which the quantisers call the locks of its tables alone; one thread calls them here.
OTHERS = (
    *("ggml_critical_section_start", "ggml_critical_section_end"),
    *("ggml_backend_buffer_get_usage", "ggml_backend_tensor_memset", "ggml_backend_tensor_set"),
)
# Of the error of C's encoder without importance: their searches are not ours, and neither is always better.
MOST_ERROR = 1.02
ENCODED = sorted(name for name, form in GGUF_TYPES.items() if form.scaled and form.encoding is not None)
STORED = sorted(name for name, form in GGUF_TYPES.items() if form.scaled and form.stored)


@pytest.fixture(scope="module")
def library(long: bool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The binding of llama.cpp's test to its library in C."""
    if not long:
        pytest.skip("takes a minute and downloads llama.cpp's sources: pytest --long")
    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("llama")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(folder), SOURCES]
    subprocess.run(command, capture_output=True, timeout=600, check=False)
    archive = next(folder.glob("llama_cpp_python-*.tar.gz"), None) or pytest.skip("pip cannot get llama.cpp's sources")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, [member for member in opened if WANTED.match(member.name)], filter="data")
    [tests] = folder.glob("*/vendor/llama.cpp/gguf-py/tests")
    ggml = tests.parent.parent / "ggml"
    (folder / "ggml-version.h").write_text('#define GGML_VERSION "0"\n#define GGML_COMMIT "0"\n')
    (folder / "others.c").write_text("\n".join(f"void {name}(void) {{}}" for name in OTHERS))
    sources = [ggml / "src" / "ggml.c", ggml / "src" / "ggml-quants.c", folder / "others.c"]
    built = folder / "libggml.so"
    options = ["-O2", "-w", "-fPIC", "-shared", "-D_GNU_SOURCE", f"-I{folder}", f"-I{ggml / 'include'}", f"-I{ggml / 'src'}"]
    subprocess.run([compiler, *options, *map(str, sources), "-o", str(built), "-lm"], check=True)
    spec: Any = importlib.util.spec_from_file_location("test_quants", tests / "test_quants.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_LOCAL_GGUF", "1")  # the installed package, not the one beside the test
        spec.loader.exec_module(module)
    return module.GGMLQuants(Path(built))


def matrix() -> Any:
    values = np.random.default_rng(0).standard_normal((256, 1024)).astype(np.float32)
    values[0] = 0
    return values


def error(values: Any, found: Any) -> float:
    return float(np.square(values.astype(np.float64) - found).sum())


@pytest.mark.parametrize("name", ENCODED)
def test_our_blocks_mean_the_same_in_c_and_are_as_close(library: Any, name: str) -> None:
    values, kind = matrix(), gguf.GGMLQuantizationType[name]
    ours = GGUF_TYPES[name].encode(torch.from_numpy(values))
    found = library.dequantize(ours, kind)
    np.testing.assert_array_equal(found, gguf.dequantize(ours, kind))
    theirs = library.dequantize(library.quantize(values, kind), kind)
    assert error(values, found) <= MOST_ERROR * error(values, theirs)


@pytest.mark.parametrize("name", STORED)
def test_blocks_of_cs_encoder_mean_the_same_to_our_kernels(library: Any, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    blocks = library.quantize(matrix(), kind)
    packed = PackedLinear(256, 1024, GGUF_TYPES[name].name)
    packed.pack_blocks(blocks)
    expected = library.dequantize(blocks, kind)
    np.testing.assert_array_equal(packed.unpack(), expected)
    np.testing.assert_array_equal(gguf.dequantize(blocks, kind), expected)
