"""What does each weight format cost in quality? Perplexity, divergence and bytes per weight; by default the bundled model on held-out text.

    python benchmarks/format_quality.py                                   # the bundled model
    python benchmarks/format_quality.py --model FOLDER --text FILE

Each format is a GGUF file of the whole model, computed by the CPU's kernels with the weights as stored and float32 activations, so that
only the rounding of weights counts. Files are written by `moegraft quantize`, with and without an importance matrix from the bundled
calibration text, and by llama.cpp's quantiser where `llama-cpp-python` is installed: `llama_model_quantize` of the model in BF16, with
`pure` (all matrices in one type), as `llama-quantize --pure FILE OUT TYPE`, with the same importance matrix and without it. The bundled
model has rows of 64 weights in its experts' last projections, which super-blocks of 256 do not divide: those matrices are in the type that
takes their place (q4_k: q5_0), and the bytes are those of the file.
"""

from __future__ import annotations

import ctypes
import math
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from harness.models import injected
from harness.record import Recorder, parser
from harness.texts import held_out, token_ids

from moegraft.injection.checkpoint.gguf.export import plan_export, read_types, write_export
from moegraft.injection.demo import demo_path
from moegraft.injection.importance import measure_importance
from moegraft.injection.meta_model import MetaModel, build_meta_model
from moegraft.injection.texts import read_text
from moegraft.injection.verify import compare_logits, logits_of
from moegraft.operators.weight_formats import ENCODED, GGUF_TYPES

RULES = """
rules:
- match: {kind: experts}
  replace: {class: hybrid_experts, kwargs: {weights: stored}}
- match: {kind: linear}
  replace: {class: quantized_linear, kwargs: {weights: stored}}
"""
TYPES = ("BF16", *(name for name in ENCODED if GGUF_TYPES[name].scaled))
MIXTURES = (
    "Q4_K,down=Q8_0",
    "Q3_K,down=Q8_0,attention=Q8_0,output=Q8_0",
    "gate=Q2_K,up=Q2_K,down=Q4_K",
    "gate=IQ3_XXS,up=IQ3_XXS,down=Q4_K",
    "gate=IQ2_XXS,up=IQ2_XXS,down=Q4_K",
)
# llama.cpp's numbers of its types with one type for all matrices; IQ2_S's is that of IQ2_M, its own is IQ2_XS with larger layers.
THEIRS = {
    **{"Q8_0": 7, "Q6_K": 18, "Q5_K": 16, "Q5_1": 9, "Q5_0": 8, "Q4_K": 14, "Q4_1": 3, "Q4_0": 2, "IQ4_NL": 25, "IQ4_XS": 30, "Q3_K": 11},
    **{"Q2_K": 10, "IQ3_S": 26, "IQ3_XXS": 23, "IQ2_S": 29, "IQ2_XS": 20, "IQ2_XXS": 19, "IQ1_S": 24, "TQ2_0": 37, "TQ1_0": 36},
}
Row = dict[str, object]


def files(meta: MetaModel, importance: Mapping[str, torch.Tensor], folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Write one file after the other, and yield its provider and types."""
    assert meta.weights is not None, "loaded with its weights"
    for provider, weights in (("moegraft", importance), ("moegraft, no imatrix", {})):
        for types in (*TYPES, *MIXTURES):
            if types == "BF16" and not weights:
                continue
            path = folder / "ours.gguf"
            plan = plan_export(meta.weights, meta.skeleton, read_types(types))
            write_export(plan, path, meta.source.folder, "model", weights, lambda size: None, replace=True)
            yield provider, types, path
    if find_spec("llama_cpp"):
        yield from files_of_llama_cpp(meta, importance, folder)
    else:
        print("llama-cpp-python is not installed: no rows of llama.cpp; harness/llama_cpp.py explains how to build it")


def files_of_llama_cpp(meta: MetaModel, importance: Mapping[str, torch.Tensor], folder: Path) -> Iterator[tuple[str, str, Path]]:
    import llama_cpp

    assert meta.weights is not None, "loaded with its weights"
    whole, path = folder / "whole.gguf", folder / "theirs.gguf"
    plan = plan_export(meta.weights, meta.skeleton, read_types("BF16"))
    write_export(plan, whole, meta.source.folder, "model", {}, lambda size: None)
    values = {tensor.name: importance[tensor.importance] for tensor in plan.tensors if tensor.importance in importance}
    kept = {name.encode(): np.ascontiguousarray(found.float().numpy()).ravel() for name, found in values.items()}
    matrix = (llama_cpp.llama_model_imatrix_data * (len(kept) + 1))()
    for entry, (tensor, numbers) in zip(matrix, kept.items(), strict=False):  # the last one stays empty, which ends the list
        entry.name, entry.data, entry.size = tensor, numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), numbers.size
    for provider, used in (("llama.cpp", matrix), ("llama.cpp, no imatrix", None)):
        for types, number in THEIRS.items():
            settings = llama_cpp.llama_model_quantize_default_params()
            settings.ftype, settings.pure = number, True
            if used is not None:
                settings.imatrix = used
            # Without an importance matrix it writes no IQ2_XXS, IQ2_XS and IQ1_S.
            if llama_cpp.llama_model_quantize(str(whole).encode(), str(path).encode(), settings) == 0:
                yield provider, types, path


def stored_bytes(path: Path) -> tuple[int, int]:
    """Return the bytes and the number of weights of a file's tensors."""
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    return sum(int(tensor.n_bytes) for tensor in tensors), sum(int(tensor.n_elements) for tensor in tensors)


def measure(model: str | Path, text: str, tokens: int, window: int, rows: Recorder) -> None:
    meta = build_meta_model(model, weights=True)
    windows = [each for each in token_ids(text, meta.source.folder)[:tokens].split(window) if len(each) == window]
    calibration = token_ids(read_text("calibration"), meta.source.folder)
    with tempfile.TemporaryDirectory() as name:
        stock = injected(model, RULES, dtype="float32")
        assert meta.weights is not None, "loaded with its weights"
        importance = measure_importance(stock, meta.weights, meta.skeleton, calibration, window, lambda count: None)
        whole = [logits_of(stock, each) for each in windows]
        for provider, types, path in files(meta, importance, Path(name)):
            quantised = injected(model, RULES, gguf=path, dtype="float32")
            found = [compare_logits(logits, logits_of(quantised, each), each) for logits, each in zip(whole, windows, strict=True)]
            size, weights = stored_bytes(path)
            mean = {name: sum(getattr(each, name) for each in found) / len(found) for name in ("kl_nats", "top1_agreement")}
            ours, full = (
                math.exp(sum(math.log(getattr(each, side)) for each in found) / len(found))
                for side in ("injected_perplexity", "stock_perplexity")
            )
            row: Row = {"provider": provider, "types": types, "tokens": sum(map(len, windows)), "bytes": size}
            row |= {"bytes_per_weight": round(size / weights, 4), "perplexity": round(ours, 4), "full_perplexity": round(full, 4)}
            rows.add({**row, "kl_nats": round(mean["kl_nats"], 6), "same_next_token": round(mean["top1_agreement"], 4)})


def main() -> None:
    options = parser(__doc__, tokens=8192)
    options.add_argument("--model", default=str(demo_path()))
    options.add_argument("--text", type=Path)
    options.add_argument("--window", type=int, default=512)
    given = options.parse_args()
    text = held_out() if given.text is None else given.text.read_text(encoding="utf-8")
    rows = Recorder("format_quality", ("torch", "transformers", "gguf", "llama_cpp_python"), write=given.write)
    measure(given.model, text, given.tokens, given.window, rows)


if __name__ == "__main__":
    main()
