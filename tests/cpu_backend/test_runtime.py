"""The runtime: threads, tickets, host functions, instruction sets, refusals, forks and shutdown."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from support.kernel_cases import as_array, make_batch, make_layer

from moegraft.cpu_backend import Runtime, default_threads
from moegraft.cpu_backend._kernel import cores_of_cpu_max, select_isa
from moegraft.operators.weight_formats import FORMATS


def read_text(path: str) -> str:
    return Path(path).read_text() if Path(path).is_file() else ""


def numpy_batch(tokens: int, layer) -> list[np.ndarray]:  # type: ignore[no-untyped-def]
    return [as_array(part) for part in make_batch(tokens, 2, layer)]


def test_instruction_sets_are_listed() -> None:
    assert Runtime.available_isas()[0] == Runtime.compiled_isas()[0] == "scalar"
    assert set(Runtime.available_isas()) <= set(Runtime.compiled_isas())
    assert Runtime(1).isa == Runtime.default_isa() or "MOEGRAFT_ISA" in os.environ
    assert Runtime.default_isa() in Runtime.available_isas()


FLOAT8 = {"fp8", "fp8_rows"}
GRIDS = {name for name, form in FORMATS.items() if form.gpu.group_words is not None}  # expanded to 8 bits in front of all products
ZEN_4 = {"avx2", "avx512", "vnni", "bf16"}
EMERALD_RAPIDS = {*ZEN_4, "amx", "tile_permission"}


INTEGERS = {name for name, found in FORMATS.items() if found.scaled and not found.floats}
on_x86 = pytest.mark.skipif("amx" not in Runtime.compiled_isas(), reason="this is not x86-64")
on_arm64 = pytest.mark.skipif("neon" not in Runtime.compiled_isas(), reason="this is not ARM64")


@on_x86
@pytest.mark.parametrize(
    ("features", "wanted", "isa", "matrix"),
    [
        (set(), "", "scalar", set()),
        ({"avx2"}, "", "avx2", {"bfloat16", *FLOAT8}),
        ({"avx2", "avx512"}, "", "avx512", FLOAT8),
        ({"avx512", "vnni"}, "", "scalar", set()),  # a hypervisor may hide a feature that the others need
        ({"avx2", "avx512", "vnni"}, "", "avx512_vnni", FLOAT8),
        (ZEN_4, "", "avx512_bf16", FLOAT8),
        (EMERALD_RAPIDS, "", "amx", {"bfloat16", *(name for name, found in FORMATS.items() if found.scaled and name not in GRIDS)}),
        (EMERALD_RAPIDS - {"tile_permission"}, "", "avx512_bf16", FLOAT8),
        (EMERALD_RAPIDS - {"bf16"}, "", "avx512_vnni", FLOAT8),
        (EMERALD_RAPIDS, "avx512_bf16", "avx512_bf16", FLOAT8),
        (EMERALD_RAPIDS, "scalar", "scalar", set()),
    ],
)
def test_each_cpu_has_its_kernels(features: set[str], wanted: str, isa: str, matrix: set[str]) -> None:
    if isa.startswith(("avx512", "amx")) and "avx512" not in Runtime.available_isas():
        pytest.skip("the table of these kernels is made by AVX-512 instructions")
    name, tokens = select_isa(features, wanted)
    assert name == isa and set(tokens) == matrix
    assert all(least > 1 for least in tokens.values())  # single tokens are decoded by vector tiles


@on_arm64
@pytest.mark.parametrize(
    ("features", "wanted", "isa", "matrix"),
    [
        ({"neon"}, "", "neon", {"bfloat16", *FLOAT8}),
        ({"neon", "dotprod"}, "", "neon_dotprod", {"bfloat16", *FLOAT8}),
        ({"neon", "dotprod", "bf16"}, "", "neon_dotprod", {"bfloat16", *FLOAT8}),
        ({"neon", "dotprod", "i8mm"}, "", "neon_i8mm", INTEGERS - GRIDS),
        ({"neon", "dotprod", "i8mm", "bf16"}, "", "neon_bf16", {"bfloat16", *INTEGERS} - GRIDS),
        ({"neon", "dotprod", "i8mm", "bf16"}, "neon", "neon", {"bfloat16", *FLOAT8}),
    ],
)
def test_each_arm64_cpu_has_its_kernels(features: set[str], wanted: str, isa: str, matrix: set[str]) -> None:
    name, tokens = select_isa(features, wanted)
    assert name == isa and set(tokens) == matrix
    with pytest.raises(ValueError, match=r"instruction set 'neon_dotprod' is not on this CPU; it has scalar, neon$"):
        select_isa({"neon"}, "neon_dotprod")


@on_x86
def test_an_unavailable_instruction_set_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"instruction set 'amx' is not on this CPU; it has scalar, avx2, avx512, avx512_vnni, avx512_bf16$"
    ):
        select_isa(EMERALD_RAPIDS - {"tile_permission"}, "amx")
    with pytest.raises(ValueError, match=r"unknown instruction set 'mmx'; this CPU has scalar$"):
        select_isa(set(), "mmx")
    with pytest.raises(ValueError, match="unknown CPU feature 'sse9'"):
        select_isa({"sse9"})


def test_a_requested_instruction_set_computes_everything() -> None:
    for isa in Runtime.available_isas():
        runtime = Runtime(1, isa=isa)
        assert runtime.isa == isa


OLDER_CPUS = {"Haswell": "scalar avx2", "Nehalem": "scalar"}  # of the emulator, without AVX-512 and without AVX
USE_KERNELS = """
import numpy as np
from moegraft.cpu_backend import PackedLinear, Runtime
weights, x, out = (np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((33, 64), (3, 64), (3, 33)))
for weight_type in ("float32", "int8"):
    linear = PackedLinear(33, 64, weight_type)
    linear.pack(weights)
    Runtime(threads=2).linear(linear, x, out)
    assert np.allclose(out, x @ weights.T, atol=0.5), weight_type
print(*Runtime.available_isas())
"""


@on_x86
@pytest.mark.parametrize("cpu", [pytest.param("Haswell", marks=pytest.mark.long), "Nehalem"])
def test_older_cpus_run_no_instruction_that_they_lack(cpu: str) -> None:
    emulator = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if emulator is None:
        pytest.skip("no emulator (Debian's package qemu-user brings it)")
    # Emulated on some hosts, the BLAS of numpy takes the CPU for one with more instructions.
    command, environment = [emulator, "-cpu", cpu, sys.executable, "-c", USE_KERNELS], {**os.environ, "OPENBLAS_CORETYPE": cpu}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0 and done.stdout.strip() == OLDER_CPUS[cpu], done.stderr[-2000:]


def test_the_least_tokens_of_the_matrix_kernel_can_be_chosen() -> None:
    default = Runtime(1)
    assert Runtime(1, matrix_tokens=7).matrix_tokens.keys() >= default.matrix_tokens.keys()
    assert set(Runtime(1, matrix_tokens=7).matrix_tokens.values()) <= {7}
    assert Runtime(1, matrix_tokens=0).matrix_tokens == {}
    with pytest.raises(ValueError, match="matrix_tokens is -1; it must be at least 0"):
        Runtime(1, matrix_tokens=-1)


def test_the_matrix_kernels_pass_their_self_test() -> None:
    chosen = Runtime(1)  # without those that fail; an instruction set by name has all
    assert chosen.matrix_tokens == Runtime(1, isa=chosen.isa).matrix_tokens


def test_the_environment_forces_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGRAFT_ISA", "scalar")
    assert Runtime(1).isa == "scalar"
    assert Runtime(1, isa=Runtime.available_isas()[-1]).isa == Runtime.available_isas()[-1]
    monkeypatch.setenv("MOEGRAFT_ISA", "mmx")
    with pytest.raises(ValueError, match=r"unknown instruction set 'mmx' \(from MOEGRAFT_ISA\); this CPU has scalar"):
        Runtime(1)


def test_the_number_of_threads() -> None:
    assert Runtime().threads == default_threads() >= 1
    assert Runtime(3).threads == 3
    with pytest.raises(ValueError, match="threads is -1"):
        Runtime(-1)


def test_work_runs_on_pytorchs_threads() -> None:
    """This holds if PyTorch has as many threads; the thread ids of the process show which threads worked."""
    before = torch.get_num_threads()
    layer = make_layer("float32", 4, 64, 64)
    batch = numpy_batch(4, layer)
    outs = [np.empty_like(batch[0]) for _ in range(3)]
    try:
        torch.set_num_threads(3)
        shared, own, other = Runtime(3), Runtime(3, share_threads=False), Runtime(2)
        assert (shared.shares_threads, own.shares_threads, other.shares_threads) == (True, False, False)
        torch.ones(1 << 20).sum()  # starts PyTorch's threads
        for runtime, out in zip((shared, own, other), outs, strict=True):
            runtime.forward(layer.packed, *batch, out)
        threads = set(Path("/proc/self/task").iterdir())
        shared.forward(layer.packed, *batch, outs[0])
        assert set(Path("/proc/self/task").iterdir()) == threads
        torch.set_num_threads(2)
        assert not shared.shares_threads and other.shares_threads
        shared.forward(layer.packed, *batch, outs[0])
    finally:
        torch.set_num_threads(before)
    assert all(np.array_equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", 0), ("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("", 0), ("-1 100000", 0), ("nonsense", 0)],
)
def test_container_quota(text: str, cores: int) -> None:
    assert cores_of_cpu_max(text) == cores


def refused(change: Callable[[dict], None], error: type[Exception], message: str) -> None:  # type: ignore[type-arg]
    layer = make_layer()
    hidden, index, weights = numpy_batch(3, layer)
    call = {"hidden_states": hidden, "top_k_index": index, "top_k_weights": weights, "out": np.empty_like(hidden)}
    change(call)
    runtime = Runtime(1)
    with pytest.raises(error, match=message):
        runtime.forward(layer.packed, **call)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("hidden_states", np.zeros((3, 63), np.float32), ValueError, r"hidden_states: expected shape \(tokens, 64\), found \(3, 63\)"),
        ("hidden_states", np.zeros((64, 3), np.float32).T, ValueError, "hidden_states is not C-contiguous"),
        (
            "hidden_states",
            np.zeros((3, 64)),
            TypeError,
            "hidden_states: expected dtype float32, float16 or bfloat16 .as uint16., found float64",
        ),
        ("hidden_states", np.zeros(64, np.float32), ValueError, r"hidden_states: expected 2 dimensions, found shape \(64,\)"),
        ("top_k_index", np.zeros((3, 2), np.int32), TypeError, "top_k_index: expected dtype int64, found int32"),
        (
            "top_k_index",
            np.zeros((2, 2), np.int64),
            ValueError,
            r"top_k_index: expected shape \(3, K\), one row for each token, found \(2, 2\)",
        ),
        ("top_k_index", np.zeros((3, 4), np.int64)[:, ::2], ValueError, "top_k_index is not C-contiguous"),
        ("top_k_index", np.array([[0, 1], [2, 5], [0, 1]]), ValueError, r"top_k_index\[1, 1\] is 5: expert ids are 0 to 3, and -1 or 4"),
        ("top_k_index", np.array([[0, 1], [2, 3], [-2, 1]]), ValueError, r"top_k_index\[2, 0\] is -2"),
        ("top_k_weights", np.zeros((3, 2)), TypeError, "top_k_weights: expected dtype float32, found float64"),
        (
            "top_k_weights",
            np.zeros((3, 3), np.float32),
            ValueError,
            r"top_k_weights: expected shape \(3, 2\), that of top_k_index, found \(3, 3\)",
        ),
        ("out", np.zeros((3, 32), np.float32), ValueError, r"out: expected shape \(3, 64\), found \(3, 32\)"),
        ("out", np.zeros((3, 64), np.float16), TypeError, "out: expected dtype float32 as hidden_states, found float16"),
        ("out", np.broadcast_to(np.float32(0), (3, 64)), ValueError, "out is"),
        ("threshold", -0.5, ValueError, "threshold is -0.5"),
        ("threshold", float("nan"), ValueError, "threshold is"),
    ],
)
def test_wrong_arguments_are_refused(name: str, value: object, error: type[Exception], message: str) -> None:
    refused(lambda call: call.__setitem__(name, value), error, message)


def test_several_layers_in_flight() -> None:
    runtime = Runtime(2)
    layers = [make_layer("int8", seed=seed) for seed in range(4)]
    batches = [numpy_batch(5, layer) for layer in layers]
    outs = [np.zeros_like(batch[0]) for batch in batches]
    start = time.perf_counter()
    tickets = [runtime.submit(layer.packed, *batch, out) for layer, batch, out in zip(layers, batches, outs, strict=True)]
    took_ms = [runtime.wait(ticket) for ticket in reversed(tickets)]  # waited for in another order than submitted
    assert min(took_ms) > 0
    assert sum(took_ms) <= 1e3 * (time.perf_counter() - start), "each without those before it"
    for layer, batch, out in zip(layers, batches, outs, strict=True):
        expected = np.empty_like(out)
        runtime.forward(layer.packed, *batch, expected)
        np.testing.assert_array_equal(out, expected)


def test_submitted_work_keeps_its_arrays_alive() -> None:
    runtime = Runtime(2)
    layer = make_layer("float32", 4, 128, 128)
    expected = torch.from_numpy(numpy_batch(40, layer)[0] * 0)
    runtime.forward(layer.packed, *numpy_batch(40, layer), expected.numpy())
    out = np.zeros((40, 128), np.float32)
    tickets = [runtime.submit(layer.packed, *numpy_batch(40, layer), out) for _ in range(5)]
    layer.packed = None
    gc.collect()
    for ticket in tickets:
        runtime.wait(ticket)
    assert torch.equal(torch.from_numpy(out), expected)


def test_wait_raises_the_error_of_submitted_work() -> None:
    runtime = Runtime(2)
    layer = make_layer()
    hidden, index, weights = numpy_batch(2, layer)
    index[1, 0] = 99
    bad = runtime.submit(layer.packed, hidden, index, weights, np.empty_like(hidden))
    good = runtime.submit(layer.packed, *numpy_batch(2, layer), np.empty_like(hidden))
    with pytest.raises(ValueError, match=r"top_k_index\[1, 0\] is 99"):
        runtime.wait(bad)
    runtime.wait(good)
    with pytest.raises(ValueError, match="is unknown or was waited for already"):
        runtime.wait(good)


def test_a_c_function_pointer_runs_a_call_and_keeps_its_error() -> None:
    runtime = Runtime(2)
    layer = make_layer()
    batch = numpy_batch(3, layer)
    out, expected = np.zeros((3, 64), np.float32), np.zeros((3, 64), np.float32)
    address, make_call = runtime.host_function()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    call = make_call(layer.packed, *batch, out)
    function(call.address)
    call.check()
    runtime.forward(layer.packed, *batch, expected)
    np.testing.assert_array_equal(out, expected)
    batch[1][0, 0] = -7  # the arrays are read at each run, as a replayed graph needs
    function(call.address)
    with pytest.raises(ValueError, match=r"top_k_index\[0, 0\] is -7"):
        call.check()
    call.check()


def test_calls_from_several_python_threads_are_serialised() -> None:
    runtime = Runtime(2)
    layer = make_layer("int4", 4, 256, 128)
    batch = numpy_batch(16, layer)
    expected = np.empty_like(batch[0])
    runtime.forward(layer.packed, *batch, expected)
    failures: list[str] = []

    def work() -> None:
        out = np.empty_like(expected)
        for _ in range(50):
            runtime.forward(layer.packed, *batch, out)
            if not np.array_equal(out, expected):
                failures.append("differs")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_an_idle_runtime_uses_no_cpu() -> None:
    runtime = Runtime(4)
    layer = make_layer()
    batch = numpy_batch(1, layer)
    runtime.forward(layer.packed, *batch, np.empty_like(batch[0]))
    time.sleep(0.01)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.01


class Workers:
    """The threads that a new runtime starts, as the system sees them."""

    def __init__(self, threads: int) -> None:
        before = set(Path("/proc/self/task").iterdir())
        self.runtime = Runtime(threads, share_threads=False)
        self._files = set(Path("/proc/self/task").iterdir()) - before
        assert len(self._files) == threads - 1

    def sleeps(self) -> int:
        """How often they have waited without a core. A core that is given to another thread does not count."""
        found = (re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (file / "status").read_text(), re.MULTILINE) for file in self._files)
        return sum(int(each[1]) for each in found if each is not None)

    def asleep(self) -> bool:
        return all((file / "stat").read_text().rpartition(")")[2].split()[0] == "S" for file in self._files)

    def fall_asleep(self) -> None:
        end_s = time.monotonic() + 60
        while not self.asleep():
            assert time.monotonic() < end_s, "the workers never sleep"
            time.sleep(0.001)


on_linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not list threads as files")


@on_linux
def test_workers_that_are_kept_awake_do_not_sleep_between_calls() -> None:
    workers, layer = Workers(2), make_layer()
    batch = numpy_batch(3, layer)
    out, expected = np.zeros((3, 64), np.float32), np.zeros((3, 64), np.float32)
    workers.runtime.forward(layer.packed, *batch, expected)

    def sleeps(waiting: AbstractContextManager[None]) -> int:
        """How often the worker sleeps between calls that come later than it waits for otherwise."""
        with waiting:
            workers.runtime.forward(layer.packed, *batch, out)
            before = workers.sleeps()
            for _ in range(5):
                out[:] = 0
                time.sleep(0.0003)
                workers.runtime.forward(layer.packed, *batch, out)
                np.testing.assert_array_equal(out, expected)
            return workers.sleeps() - before

    awake = otherwise = 0
    for _ in range(400):  # on a busy machine it may lose its core before it sleeps, or the next call may come much later
        awake += sleeps(workers.runtime.keep_awake())
        otherwise += sleeps(nullcontext())
        if otherwise >= max(40, 4 * awake):
            return
    pytest.fail(f"{awake} sleeps while kept awake, {otherwise} otherwise")


@on_linux
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_workers_sleep_after_they_were_kept_awake_and_when_no_work_comes(threads: int) -> None:
    workers, layer = Workers(threads), make_layer()
    batch = numpy_batch(3, layer)
    out, expected = np.zeros((3, 64), np.float32), np.zeros((3, 64), np.float32)
    workers.runtime.forward(layer.packed, *batch, expected)
    with workers.runtime.keep_awake(), workers.runtime.keep_awake():
        workers.fall_asleep()  # as in a step that hangs
        workers.runtime.forward(layer.packed, *batch, out)
        np.testing.assert_array_equal(out, expected)
    workers.fall_asleep()
    with pytest.raises(ZeroDivisionError), workers.runtime.keep_awake():
        workers.runtime.wait(workers.runtime.submit(layer.packed, *batch, out))
        np.testing.assert_array_equal(out, expected)
        _ = 1 / 0
    workers.fall_asleep()


def test_shutdown_with_work_pending_does_not_hang() -> None:
    layer = make_layer("float32", 4, 512, 512)
    batch = numpy_batch(64, layer)
    outs = [np.empty_like(batch[0]) for _ in range(50)]
    runtime = Runtime(2)
    for out in outs:
        runtime.submit(layer.packed, *batch, out)
    begin = time.perf_counter()
    del runtime
    gc.collect()
    assert time.perf_counter() - begin < 5.0


FORK = """
import os, sys
import numpy as np
from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts, Runtime
packed = PackedExperts(ExpertsShape(1, 32, 32), GateSpec(), "float32")
for part in ("gate", "up", "down"):
    packed.pack(0, part, np.ones((32, 32), np.float32))
batch = [np.ones((1, 32), np.float32), np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32)]
runtime = Runtime(2)
runtime.wait(runtime.submit(packed, *batch, np.empty((1, 32), np.float32)))
child = os.fork()
if child == 0:
    try:
        runtime.forward(packed, *batch, np.empty((1, 32), np.float32))
    except RuntimeError as error:
        print(error, flush=True)
    try:
        runtime.keep_awake().__enter__()
        sys.exit(1)
    except RuntimeError as error:
        print(error, flush=True)
    del runtime
    out = np.empty((1, 32), np.float32)
    Runtime(2).forward(packed, *batch, out)  # the child's own runtime works
    sys.exit(7)
_, status = os.waitpid(child, 0)
runtime.forward(packed, *batch, np.empty((1, 32), np.float32))
sys.exit(os.waitstatus_to_exitcode(status))
"""


AFTER_TORCH = """
import multiprocessing, os, sys
import numpy as np
import torch
from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts, Runtime
packed = PackedExperts(ExpertsShape(1, 32, 32), GateSpec(), "float32")
for part in ("gate", "up", "down"):
    packed.pack(0, part, np.ones((32, 32), np.float32))
batch = [np.ones((1, 32), np.float32), np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32)]
numbers = torch.arange(1 << 20, dtype=torch.float32)

def computed(shared=True):
    torch.set_num_threads(2)
    assert numbers.sqrt().sum() > 0  # on two threads of OpenMP
    runtime, out = Runtime(2), np.empty((1, 32), np.float32)
    assert runtime.shares_threads == shared, runtime.shares_threads
    runtime.forward(packed, *batch, out)
    return float(out[0, 0])

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        out = np.empty((1, 32), np.float32)
        Runtime(2).forward(packed, *batch, out)  # with one thread of OpenMP, as the loader has set
        return float(out[0, 0])

if __name__ == "__main__":
    expected = computed()
    for _ in range(3):  # the parent goes on between forks, and children fork as well
        child = os.fork()
        if child == 0:
            assert computed() == expected
            grandchild = os.fork()
            if grandchild == 0:
                os._exit(0 if computed() == expected else 1)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert computed() == expected
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.apply(computed) == expected
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork")
    assert [float(found) for found in loader] == [expected] * 2
    print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_new_runtime_after_a_fork_once_torch_has_computed() -> None:
    """GCC's OpenMP library would wait for ever for the parent's threads."""
    done = subprocess.run([sys.executable, "-c", AFTER_TORCH], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_runtime_in_a_forked_child_raises() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7, done.stderr
    assert "made before a fork" in done.stdout


FAULTS = """
import ctypes, resource
from moegraft.cpu_backend import Runtime
libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype, libc.free.argtypes = (ctypes.c_size_t,), ctypes.c_void_p, (ctypes.c_void_p,)
runtime = Runtime(1) if {} else None
faults = []
for _ in range(20):
    activations = [libc.malloc(4 << 20) for _ in range(24)]  # of a prompt
    for each in activations:
        ctypes.memset(each, 1, 4 << 20)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    for each in activations:
        libc.free(each)
print(faults[-1] - faults[4])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
@pytest.mark.skipif("[always]" in read_text("/sys/kernel/mm/transparent_hugepage/enabled"), reason="huge pages have few faults")
def test_freed_activations_are_not_cleared_again() -> None:
    def faults(runtime: bool, **environment: str) -> int:
        kept = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES" and not name.startswith("MALLOC_")}
        command = [sys.executable, "-c", FAULTS.format(runtime)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env={**kept, **environment}).stdout)

    pages = 15 * 24 * (1 << 20) * 4 // os.sysconf("SC_PAGE_SIZE")
    assert faults(True) < pages / 20
    assert faults(False) > pages / 4
    assert faults(True, MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > pages / 2, "the user's own choice"
