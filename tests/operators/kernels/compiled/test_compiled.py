"""What the kernels compile to for real GPUs: every shipped configuration by recorded figures, a sample of them compiled here."""

from __future__ import annotations

import importlib
from dataclasses import asdict, fields, replace
from types import ModuleType

import pytest
from support import combinations

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
import triton
import triton.language as tl
from support.compile_check import REGISTER_FILE, SHARED_LIMIT_BYTES, Compiled, launch_key, recording

from moegraft.operators.kernels import slots, units
from moegraft.operators.kernels.packed_layout import packed_matrix

AGAIN = "run: python tests/compiled_kernels.py"
# Bytes that the assembler parks in memory to keep to 128 registers, by Triton, capability, case and kernel: nothing else may.
PARKED: dict[tuple[str, str, str, str], int] = {
    ("3.9.0", "80", "slots qwen3-30b int4_g64 bfloat16 T=2048", "packed_product_kernel"): 16,
    ("3.9.0", "80", "slots qwen3-30b int4_g128 bfloat16 T=2048", "packed_product_kernel"): 16,
    ("3.9.0", "80", "slots qwen3-30b nvfp4 bfloat16 T=2048", "packed_product_kernel"): 8,
    ("3.9.0", "80", "slots gpt-oss mxfp4 bfloat16 T=2048", "packed_product_kernel"): 24,
    ("3.9.0", "86", "slots qwen3-30b bfloat16 bfloat16 T=2048", "packed_product_kernel"): 24,
    ("3.9.0", "86", "slots qwen3-30b nvfp4 bfloat16 T=2048", "packed_product_kernel"): 8,
}
MAX_COMPILED = 12  # binaries without a record that one run compiles; of more, as many evenly spaced ones


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("compiled_kernels")  # which needs Triton


def recorded(row: dict[str, str]) -> Compiled:
    types = {field.name: str if field.name in ("key", "kernel", "tensor_cores") else int for field in fields(Compiled)}
    return Compiled(**{name: make(row[name]) for name, make in types.items()})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def rows(tool: ModuleType) -> list[dict[str, str]]:
    found: list[dict[str, str]] = tool.read_rows()
    return found


def problems_of(tool: ModuleType, found: Compiled) -> list[str]:
    problems: list[str] = tool.problems_of(found)
    return problems


def test_every_shipped_configuration_fits_a_gpu(tool: ModuleType, rows: list[dict[str, str]]) -> None:
    wrong = [
        f"Triton {row['triton']}, sm_{row['capability']}, {row['case']}, {row['kernel']}: {problem}"
        for row in rows
        if int(row["stack_bytes"]) != PARKED.get((row["triton"], row["capability"], row["case"], row["kernel"]))
        for problem in problems_of(tool, recorded(row))
    ]
    assert not wrong, "\n".join(wrong)


def test_old_and_new_versions_are_recorded(tool: ModuleType, rows: list[dict[str, str]]) -> None:
    keys = {version: {row["key"] for row in rows if row["triton"] == version} for version in {row["triton"] for row in rows}}
    oldest = keys.pop(tool.OLDEST)
    assert oldest and keys
    assert all(oldest <= found for found in keys.values()), f"a version lacks rows of the oldest; {AGAIN}, with each"
    assert {row["capability"] for row in rows} == {str(capability) for capability in tool.CAPABILITIES}


@pytest.mark.parametrize("capability", [80, 90])
def test_what_has_changed_since_compiles(tool: ModuleType, rows: list[dict[str, str]], capability: int) -> None:
    known = {row["key"] for row in rows}
    changed = {key: name for key, name in tool.launches(capability).items() if key not in known}
    every = tool.cases()
    for key, name in list(changed.items())[:: max(1, len(changed) // MAX_COMPILED)]:
        for found in tool.compiled(every[name], capability, [key]):
            if found.stack_bytes != PARKED.get((triton.__version__, str(capability), name, found.kernel)):
                assert not problems_of(tool, found), f"{name}: {found}"


@pytest.mark.parametrize("capability", [80, 90])
def test_a_sample_compiles_to_what_was_recorded(tool: ModuleType, rows: list[dict[str, str]], capability: int, long: bool) -> None:
    same_version = {row["key"]: recorded(row) for row in rows if row["triton"] == triton.__version__}
    every = tool.cases()
    for name in tool.SAMPLE if long else tool.SAMPLE[::2] if capability == 90 else tool.SAMPLE[1:2]:
        for found in tool.compiled(every[name], capability):
            if found.stack_bytes != PARKED.get((triton.__version__, str(capability), name, found.kernel)):
                assert not problems_of(tool, found), f"{name}: {found}"
            assert found == same_version.get(found.key, found), f"{name}: not what was recorded; if it is no worse, {AGAIN} --all"


@pytest.mark.parametrize(("kind", "capability"), combinations(["slots", "arriving"], [80, 90]))
def test_kernels_do_not_depend_on_the_number_of_slots(tool: ModuleType, kind: str, capability: int) -> None:
    """It follows free memory: a kernel that has it as a constant is compiled again at each start, and one that counts by it spills."""
    launched: list[set[str]] = []
    for count in (3072, 6144):
        with tool.quiet(), recording(capability, wanted=()) as found:
            tool.cases()[f"{kind} qwen3-30b int4 bfloat16 T=512 of {count}"]()
        launched.append(set(found.launched))
    assert launched[0] == launched[1]
    grouping = next(key for key, name in found.launched.items() if name == "group_pairs_kernel")
    (kernel,) = tool.compiled(tool.cases()[f"{kind} qwen3-30b int4 bfloat16 T=512 of 6144"], capability, [grouping])
    assert (kernel.spills, kernel.stack_bytes) == (0, 0)


@triton.jit
def halved(x):  # type: ignore[no-untyped-def]
    return 0.5 * x


@triton.jit
def scaled(x):  # type: ignore[no-untyped-def]
    return 2.0 * x


@triton.jit
def added(x, y):  # type: ignore[no-untyped-def]
    return scaled(x) + y


@triton.jit
def sum_kernel(x_ptr, index_ptr, weights_ptr, out_ptr, H: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A sum of K rows by their weights, for the keys alone."""
    columns = tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for slot in range(TOP_K):
        row = tl.load(x_ptr + tl.load(index_ptr + slot) * H + columns, mask=columns < H)
        total = added(row * tl.load(weights_ptr + slot), total)
    tl.store(out_ptr + columns, total, mask=columns < H)


def test_a_key_changes_with_what_is_compiled() -> None:
    x = torch.empty(2, 3, 64, dtype=torch.bfloat16, device="meta")
    weights = torch.empty(2, 3, device="meta")

    def key(rows: torch.Tensor, top_k: int = 3, capability: int = 90) -> str:
        arguments = {"H": 64, "TOP_K": top_k, "COLUMNS": 64, "num_warps": 4}
        return launch_key(sum_kernel, (rows, weights.int(), weights, rows), arguments, capability)

    assert key(x) == key(x.clone())
    assert len({key(x), key(x.float()), key(x, 2), key(x, capability=80)}) == 4


def test_a_key_changes_with_what_the_kernel_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return launch_key(sum_kernel, (), {}, 90)

    before = key()
    monkeypatch.setitem(globals(), "scaled", halved)  # which `added` calls, which the kernel calls
    assert key() != before


def test_a_key_changes_with_how_a_format_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = packed_matrix("q6_k", 32, 256, outputs=32)

    def key() -> str:
        return launch_key(slots._gate_up_kernel, (), {"M": matrix}, 90)

    before = key()
    monkeypatch.setattr(units, "_words", units._bytes)  # which the scales of this format are read by
    assert key() != before


def test_tritons_cache_keeps_a_binary_by_how_its_format_is_decoded() -> None:
    matrix = packed_matrix("q6_k", 32, 256, outputs=32)
    keys = {matrix._replace(decoder=replace(matrix.decoder, scales=scales)).cache_key for scales in (units._q6_k, units._q3_k)}
    assert len(keys) == 2 and all(units._code.cache_key in key for key in keys)


def test_problems_are_named() -> None:
    good = Compiled("0", "k", 90, 4, 168, 0, 64 * 1024, 0, 10, 8, 4, "HGMMA")
    assert good.problems(matrix_product=True) == []

    def problems(**changes: object) -> str:
        return " ".join(Compiled(**{**asdict(good), **changes}).problems(matrix_product=True))  # type: ignore[arg-type]

    assert "spills" in problems(stack_bytes=8, spills=1)
    assert "registers" in problems(registers=255, warps=16)
    assert REGISTER_FILE < 255 * 16 * 32
    assert "shared" in problems(shared_bytes=SHARED_LIMIT_BYTES[90] + 1)
    assert "shared" in problems(shared_bytes=SHARED_LIMIT_BYTES[80] + 1, capability=80)
    assert "16 bytes" in problems(wide_loads=0)
    assert "tensor-core" in problems(tensor_cores="")


def test_launches_outside_of_a_recording_are_as_before(tool: ModuleType) -> None:
    from triton.runtime.jit import JITFunction

    before = JITFunction.run
    with pytest.raises(ZeroDivisionError), recording(90):
        assert JITFunction.run is not before
        raise ZeroDivisionError
    assert JITFunction.run is before
