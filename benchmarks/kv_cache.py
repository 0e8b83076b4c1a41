"""How much quality does a quantised key-value cache lose? Next-token probabilities beside those of the exact cache, on held-out text.

    python benchmarks/kv_cache.py                                  # the bundled model, bfloat16
    python benchmarks/kv_cache.py --model FOLDER --text FILE --dtype float32

Each window's first half is read at once as a prompt; its second half is fed token by token, so that later tokens are quantised as in
`generate`. `kl_nats` is the mean divergence per token from the exact cache's probabilities, `same_token` the share of equal likeliest
tokens, `perplexity` that of the second halves, `cache_bytes` the size of the cache's tensors at the end of a window, and `cache_share` that
of the exact cache's. All rows are of
one model with the rules `cpu-exact`, whose attention reads the codes of the native cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness.record import Recorder, parser
from harness.texts import held_out, token_ids
from transformers import DynamicCache, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path
from moegraft.operators.kv_cache import STORAGES, QuantizedKvCacheOptions

WINDOW = 768  # tokens, of which the first half is the prompt
STORED = ("keys", "values", "_quantized_keys", "_quantized_values", "data")


def held_bytes(value: Any) -> int:
    """Return the bytes of all tensors inside an object."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(held_bytes, value.values()))
    return sum(map(held_bytes, value)) if isinstance(value, list | tuple) else 0


def cache_bytes(cache: Any) -> int:
    return sum(held_bytes(getattr(layer, name, None)) for layer in cache.layers for name in STORED)


@torch.no_grad()
def followed(model: PreTrainedModel, cache: Any, window: torch.Tensor) -> torch.Tensor:
    """Return the log probabilities (tokens, V) float32 after the prompt."""
    call: Any = model
    half = window.shape[1] // 2
    call(input_ids=window[:, :half], past_key_values=cache)
    logits = [call(input_ids=window[:, at : at + 1], past_key_values=cache).logits[0, -1] for at in range(half, window.shape[1] - 1)]
    return torch.stack(logits).float().log_softmax(-1)


def rows(model: PreTrainedModel, windows: list[torch.Tensor], name: str) -> Iterator[dict[str, object]]:
    config = model.config.get_text_config(decoder=True)
    exact = [followed(model, DynamicCache(config=config), window) for window in windows]
    named = [(backend, bits) for backend in STORAGES for bits in reversed(STORAGES[backend].bits)]
    whole = 0
    kinds = [None, *(QuantizedKvCacheOptions(backend=backend, bits=bits) for backend, bits in named)]
    for options in kinds:
        storage = None if options is None else options.storage(config)
        reason = None if storage is None else storage.unsupported_reason(model)
        if reason is not None:
            print(f"not measured: {reason}")
            continue
        found, held = [], 0
        for window in windows:
            cache: Any = DynamicCache(config=config) if storage is None else storage.new_cache()
            found.append(followed(model, cache, window))
            held = cache_bytes(cache)
        whole = held if options is None else whole
        logs, right = torch.cat(found), torch.cat(exact)
        following = torch.cat([window[0, window.shape[1] // 2 + 1 :] for window in windows])
        yield {
            "model": name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "backend": "exact" if options is None else options.backend,
            "bits": 8 * model.dtype.itemsize if options is None else options.bits,
            "group": "" if storage is None else storage.form().group or "",
            "tokens": len(logs),
            "kl_nats": round(float((right.exp() * (right - logs)).sum(-1).mean()), 6),
            "same_token": round(float((logs.argmax(-1) == right.argmax(-1)).float().mean()), 4),
            "perplexity": round(float((-logs.gather(1, following[:, None])).mean().exp()), 3),
            "window": WINDOW,
            "cache_bytes": held,
            "cache_share": round(held / whole, 4),
        }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default=str(demo_path()))
    options.add_argument("--text", type=Path, help="default: the bundled model's held-out text")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--windows", type=int, default=4)
    given = options.parse_args()
    ids = token_ids(given.text.read_text(encoding="utf-8") if given.text else held_out(), given.model)[None]
    model = optimize_and_load(given.model, "cpu-exact", dtype=getattr(torch, given.dtype), progress=False)
    windows = list(ids[:, : given.windows * WINDOW].split(WINDOW, dim=1))
    recorder = Recorder("kv_cache", ("torch", "transformers", "hqq"), replaces=("model", "backend", "bits"), write=given.write)
    for row in rows(model, windows, "bundled" if given.model == str(demo_path()) else Path(given.model).name):
        recorder.add(row)


if __name__ == "__main__":
    main()
