"""What do the shipped configurations of the GPU kernels compile to? Registers, spills, shared memory and instructions, without a GPU.

    python tests/compiled_kernels.py

compiles for sm_80, sm_86 and sm_90 all launches that `operators/kernels/compiled/compiled_kernels.csv` lacks for the installed Triton
(`--all` compiles all again), and drops rows of launches that no longer exist; all of them take about ten minutes, and an interrupted run
keeps what it has. The oldest Triton has rows of `SAMPLE` alone: `pip install --no-deps --target DIR triton==3.6.0`, then the same command
with PYTHONPATH=DIR. Tests compare the rows with a GPU's limits, compile changed launches, and compile the sample again.
"""

from __future__ import annotations

import argparse
import csv
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path

import torch
import triton
from support.compile_check import Compiled, recording

from moegraft.cpu_backend import ExpertsShape, GateSpec
from moegraft.operators.kernels.attention import HeadNorm, decode_attention
from moegraft.operators.kernels.launch import trial
from moegraft.operators.kernels.linear import PackedLinearOnGpu
from moegraft.operators.kernels.packed_layout import block_bytes, round_up
from moegraft.operators.kernels.packed_product import SMALL_STAGES
from moegraft.operators.kernels.slots import SlotExperts
from moegraft.operators.kernels.small import MAX_COLUMNS, choose_experts, norm
from moegraft.operators.kernels.sparse_slots import SparseSlotExperts
from moegraft.operators.weight_formats import FORMATS

RECORD = Path(__file__).parent / "operators" / "kernels" / "compiled" / "compiled_kernels.csv"
CAPABILITIES = (80, 86, 90)
SMALL = 86  # with little shared memory: the largest tiles of these formats alone
SMALL_FORMATS = ("bfloat16", "int8", "int4", "mxfp4", "nvfp4", "q4_k", "q5_k", "q6_k", "q2_k", "iq3_xxs", "iq2_s")
OLDEST = "3.6.0"  # of the supported Tritons
META = torch.device("meta")
BF16 = torch.bfloat16
CLAMPED = GateSpec("silu", alpha=1.702, gate_limit=7.0, up_limit=7.0, up_offset=1.0)
# hidden, intermediate, experts, experts per token
SHAPES = {
    "qwen3-30b": (2048, 768, 128, 8),
    "deepseek-v2-lite": (2048, 1408, 64, 6),
    "gpt-oss": (2880, 2880, 32, 4),
    "qwen3.5-35b": (2048, 512, 256, 8),
}
# of attention: query heads, heads of keys and values, columns of a head
HEADS = {"qwen3-30b": (32, 4, 128), "gpt-oss": (64, 8, 64), "qwen3-next": (16, 2, 256)}
# Compiled by the tests: half of them in every run.
SAMPLE = (
    "slots qwen3-30b q4_k bfloat16 T=1",
    "slots gpt-oss mxfp4 bfloat16 T=2048",
    "linear int8 bfloat16 T=64",
    "slots qwen3-30b bfloat16 bfloat16 T=2048",
    "sparse qwen3.5-35b bfloat16 pair T=1",
    "sparse qwen3.5-35b bfloat16 dense T=2048",
    "sparse qwen3-30b int4 dense T=2048",
)
Case = Callable[[], None]
Row = dict[str, object]


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def slots_case(name: str, weights: str, dtype: torch.dtype, tokens: int, slots: int = 64, *, arriving: bool = False) -> Case:
    """A call over an arena of so many `slots`; `arriving`: its experts are computed in parts."""
    hidden, intermediate, num_experts, top_k = SHAPES[name]
    clamped = name == "gpt-oss"
    experts = SlotExperts(ExpertsShape(num_experts, hidden, intermediate, bias=clamped), CLAMPED if clamped else GateSpec(), weights)

    def launch() -> None:
        x, arena = empty(tokens, hidden, dtype=dtype), empty(slots, experts.matrices.expert_bytes, dtype=torch.uint8)
        chosen, shares = empty(tokens, top_k, dtype=torch.int64), empty(tokens, top_k, dtype=torch.float32)
        out = empty(tokens, hidden, dtype=torch.float32)
        if arriving:
            call = experts.begin(x, arena, chosen, shares)
            assert call is not None, "a prompt that is not cut"
            call.add(empty(num_experts, dtype=torch.int32), num_experts // 4, tokens * top_k // 4)
            call.finish(out)
            return
        experts.forward(x, arena, empty(tokens, top_k, dtype=torch.int32), shares, out, experts=chosen)

    return launch


def sparse_case(name: str, weights: str, path: str, tokens: int, dtype: torch.dtype = BF16) -> Case:
    hidden, intermediate, num_experts, top_k = SHAPES[name]
    clamped = name == "gpt-oss"
    shape = ExpertsShape(num_experts, hidden, intermediate, bias=clamped)
    experts = SparseSlotExperts(shape, CLAMPED if clamped else GateSpec(), weights, META)

    def launch() -> None:
        experts.forward(
            empty(tokens, hidden, dtype=dtype),
            empty(num_experts, experts.expert_bytes, dtype=torch.uint8),
            empty(tokens, top_k, dtype=torch.int32),
            empty(tokens, top_k, dtype=torch.float32),
            empty(tokens, hidden, dtype=dtype),
            path,
            experts=empty(tokens, top_k, dtype=torch.int64),
        )

    return launch


def linear_case(weights: str, dtype: torch.dtype, tokens: int) -> Case:
    rows, columns = 4096, 2048
    packed = empty(block_bytes(weights, columns) * round_up(rows, 32) // 32, dtype=torch.uint8)
    linear = PackedLinearOnGpu(rows, columns, weights, packed, empty(rows, dtype=torch.float32))
    return lambda: void(linear.forward(empty(tokens, columns, dtype=dtype)))


def norm_case(rows: int, columns: int) -> Case:
    return lambda: void(norm(empty(rows, columns, dtype=BF16), empty(columns, dtype=BF16), 1e-6, 0.0, rounds_first=True))


def router_case(name: str, tokens: int, *, biased: bool = False) -> Case:
    _, _, experts, top_k = SHAPES[name]
    rule = {"score": "sigmoid", "choice_bias": empty(experts, dtype=torch.float32)} if biased else {}
    return lambda: void(choose_experts(empty(tokens, experts, dtype=BF16), top_k, normalise=True, weights_type=BF16, **rule))


def attention_case(name: str, places: int) -> Case:
    queries, heads, columns = HEADS[name]
    gated, clamped = name == "qwen3-next", name == "gpt-oss"
    rotary = columns // 4 if gated else columns

    def launch() -> None:
        query, key, value = (empty(1, 1, width * columns, dtype=BF16) for width in (queries * (1 + gated), heads, heads))
        angles = empty(1, 1, rotary // 2 if clamped else rotary, dtype=BF16)
        norm = HeadNorm(empty(columns, dtype=BF16), 1e-6, float(gated), rounds_first=True)
        keys = empty(1, heads, places, columns, dtype=BF16)
        decode_attention(
            (query, key, value),
            (angles, angles),
            rotary,
            None if clamped else (norm, norm),
            (keys, keys, empty(dtype=torch.int64)),
            empty(1, 1, 1, places, dtype=BF16 if clamped else torch.bool),
            columns**-0.5,
            empty(queries, dtype=BF16) if clamped else None,
            gated=gated,
        )

    return launch


def void(result: object) -> None:
    """Call a launcher and ignore its result."""


def label(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def cases() -> Mapping[str, Case]:
    """Return the configurations that inform: each kernel with each format for a decode step and for a prompt, in the largest tile."""
    found: dict[str, Case] = {}
    for weights in FORMATS:
        dtype = {"float32": torch.float32, "float16": torch.float16}.get(weights, BF16)
        for tokens in (1, 2048):
            found[f"slots qwen3-30b {weights} {label(dtype)} T={tokens}"] = slots_case("qwen3-30b", weights, dtype, tokens)
    for name, weights, dtype, tokens in (
        ("qwen3-30b", "int4", BF16, 64),  # smaller tiles
        ("gpt-oss", "mxfp4", BF16, 1),  # biases, limits, and masks of columns
        ("gpt-oss", "mxfp4", BF16, 2048),
        ("deepseek-v2-lite", "int8", BF16, 512),
        ("deepseek-v2-lite", "int4", torch.float32, 512),
    ):
        found[f"slots {name} {weights} {label(dtype)} T={tokens}"] = slots_case(name, weights, dtype, tokens)
    for slots in (3072, 6144):  # of all layers, as memory allows: nothing may depend on it
        found[f"slots qwen3-30b int4 bfloat16 T=512 of {slots}"] = slots_case("qwen3-30b", "int4", BF16, 512, slots)
        found[f"arriving qwen3-30b int4 bfloat16 T=512 of {slots}"] = slots_case("qwen3-30b", "int4", BF16, 512, slots, arriving=True)
    for path, tokens in (("pair", 1), ("dense", 2048)):
        found[f"sparse qwen3.5-35b bfloat16 {path} T={tokens}"] = sparse_case("qwen3.5-35b", "bfloat16", path, tokens)
        found[f"sparse qwen3-30b int4 {path} T={tokens}"] = sparse_case("qwen3-30b", "int4", path, tokens)
        found[f"sparse qwen3-30b float32 float32 {path} T=64"] = sparse_case("qwen3-30b", "float32", path, 64, torch.float32)
    found["sparse gpt-oss bfloat16 dense T=64"] = sparse_case("gpt-oss", "bfloat16", "dense", 64)
    for weights, tokens in (("int8", 1), ("int8", 64), ("int4", 1), ("q4_k", 1)):
        found[f"linear {weights} bfloat16 T={tokens}"] = linear_case(weights, BF16, tokens)
    for rows, columns in ((32, 128), (1, 2048), (1, MAX_COLUMNS)):
        found[f"norm of {columns} bfloat16 R={rows}"] = norm_case(rows, columns)
    for name in SHAPES:
        found[f"router {name} bfloat16 T=1"] = router_case(name, 1)
    found["router qwen3.5-35b biased bfloat16 T=1"] = router_case("qwen3.5-35b", 1, biased=True)
    for name, places in (("qwen3-30b", 512), ("qwen3-30b", 8192), ("gpt-oss", 8192), ("qwen3-next", 8192)):
        found[f"attention {name} bfloat16 S={places}"] = attention_case(name, places)
    return found


def launches(capability: int, names: Collection[str] | None = None) -> dict[str, str]:
    """Return the first case of each distinct launch by the launch's key; `names`: of these cases alone."""
    found: dict[str, str] = {}
    with quiet():
        for name, case in cases().items():
            if (names is not None and name not in names) or (capability == SMALL and not is_largest(name)):
                continue
            with stages_of(capability), recording(capability, wanted=()) as recorded:
                case()
            for key in recorded.launched:
                found.setdefault(key, name)
    return found


def compiled(case: Case, capability: int, wanted: Collection[str] | None = None) -> list[Compiled]:
    """Compile the launches of a case, or only those with a key in `wanted`."""
    with quiet(), stages_of(capability), recording(capability, wanted) as found:
        case()
    return found.compiled


def is_largest(name: str) -> bool:
    return name in {f"slots qwen3-30b {weights} bfloat16 T=2048" for weights in SMALL_FORMATS}


def stages_of(capability: int) -> AbstractContextManager[object]:
    """Set the stages that launches have on a GPU of this capability, which tensors on meta do not name."""
    small = {f"grouped_stages:{pairs}": SMALL_STAGES for pairs in (16, 32, 64)}
    return trial(small) if capability == SMALL else nullcontext()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Triton's warnings about a missing GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def is_product(kernel: str) -> bool:
    """Return whether a kernel should use tensor cores."""
    return "product" in kernel or kernel.endswith(("_dense_kernel", "_part_kernel"))


def problems_of(found: Compiled) -> list[str]:
    return found.problems(matrix_product=is_product(found.kernel), narrow=found.kernel == "place_kernel")


def made(capability: int, wanted: Mapping[str, str]) -> Iterator[Row]:
    """Return a row for each key in `wanted`, which maps keys to cases."""
    every = cases()
    by_case: dict[str, list[str]] = {}
    for key, name in wanted.items():
        by_case.setdefault(name, []).append(key)
    for name, keys in by_case.items():
        for found in compiled(every[name], capability, keys):
            yield {"triton": triton.__version__, "case": name, **asdict(found)}
            for problem in problems_of(found):
                print(f"sm_{capability} {name}, {found.kernel}: {problem}", file=sys.stderr, flush=True)


def updated(rows: list[Row], *, everything: bool) -> Iterator[list[Row]]:
    """Yield the rows that the file should have, again after each that is compiled."""
    kept: list[Row] = []
    wanted: dict[int, dict[str, str]] = {}
    for capability in CAPABILITIES:
        every = launches(capability)
        current = launches(capability, SAMPLE) if triton.__version__ == OLDEST else every
        mine = [row for row in rows if int(str(row["capability"])) == capability and row["key"] in every]
        own = [row for row in mine if row["triton"] == triton.__version__ and not everything]
        kept += [row for row in mine if row["triton"] != triton.__version__] + own
        known = {row["key"] for row in own}
        wanted[capability] = {key: name for key, name in current.items() if key not in known}
    place = {name: number for number, name in enumerate(cases())}

    def order(row: Row) -> tuple[str, int, int, str]:
        return str(row["triton"]), int(str(row["capability"])), place.get(str(row["case"]), 0), str(row["kernel"])

    yield sorted(kept, key=order)
    for capability, names in wanted.items():
        for row in made(capability, names):
            kept.append(row)
            yield sorted(kept, key=order)


def read_rows() -> list[dict[str, str]]:
    with RECORD.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="compile everything again")
    arguments = parser.parse_args()
    rows = list[Row]()
    for rows in updated(list(map(dict, read_rows())), everything=arguments.all):
        with RECORD.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ["triton", "case", *(each.name for each in fields(Compiled))], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    print(f"{sum(row['triton'] == triton.__version__ for row in rows)} binaries of Triton {triton.__version__} in {RECORD}")


if __name__ == "__main__":
    main()
