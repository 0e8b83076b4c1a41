"""How much quality does a quantised key-value cache lose? Next-token probabilities beside those of the exact cache, on held-out text.

    python benchmarks/kv_cache.py                                  # the bundled model, bfloat16
    python benchmarks/kv_cache.py --model FOLDER --text FILE --dtype float32
    python benchmarks/kv_cache.py --attention                      # the time of attention over pages of codes, beside bfloat16

Each window's first half is read at once as a prompt; its second half is fed token by token, so that later tokens are quantised as in
`generate`. `kl_nats` is the mean divergence per token from the exact cache's probabilities, `same_token` the share of equal likeliest
tokens, `perplexity` that of the second halves, and `cache_bytes` the size of the cache's tensors at the end of a window. All rows are of
one model with the rules `cpu-exact`, whose attention reads the codes of the native cache.

With `--attention`, one token attends to `tokens` earlier ones in each of several layers, so that no cache holds their pages. `ratio` is the
median over rounds of the time over codes to that over bfloat16, which alternate; `bytes_ratio` is that of the bytes that both read, and
`gbps` what the median time means for these.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.record import Recorder, parser
from harness.rounds import alternate, median_ratio, percentiles, seconds
from harness.texts import held_out, token_ids
from transformers import DynamicCache, PreTrainedModel

from moegraft.cpu_backend import Runtime
from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path
from moegraft.operators.decode.pages import PAGE_TOKENS, pages_of, token_bytes
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


def rows(
    model: PreTrainedModel, windows: list[torch.Tensor], name: str, backends: Sequence[str] = tuple(STORAGES)
) -> Iterator[dict[str, object]]:
    config = model.config.get_text_config(decoder=True)
    exact = [followed(model, DynamicCache(config=config), window) for window in windows]
    named = [(backend, bits) for backend in STORAGES if backend in backends for bits in reversed(STORAGES[backend].bits)]
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
        }


SHAPES = ("Qwen3-30B-A3B", 32, 4, 128), ("32 heads of 128, 8 for keys", 32, 8, 128), ("16 heads of 128", 16, 16, 128)


def _attend(
    runtime: Runtime,
    pools: list[torch.Tensor],
    table: torch.Tensor,
    numbers: dict[str, Any],
    states: tuple[torch.Tensor, ...],
    held: int,
    window: int = 0,
) -> None:
    arrays = [each.view(torch.uint16).numpy() for each in states]
    for pool in pools:
        runtime.paged_attention(*arrays, pool, table, torch.tensor([held]), **numbers, window=window)


def attention_rows(tokens: int, layers: int, rounds: int, threads: int) -> Iterator[dict[str, object]]:
    """Yield the times of one token's attention by shape and form of the pages, after a comparison of both answers."""
    runtime, generator = Runtime(threads=threads), torch.Generator().manual_seed(0)
    for name, heads, kv_heads, columns in SHAPES:
        states = [torch.randn(1, kv_heads, tokens, columns, generator=generator).bfloat16() for _ in range(2)]
        query = torch.randn(1, heads, 1, columns, generator=generator).bfloat16()
        new = torch.randn(1, kv_heads, 1, columns, generator=generator).bfloat16()
        pages = pages_of(tokens + 1)
        calls, answers, sizes = {}, {}, {}
        for form in ("bfloat16", "int8"):
            row_bytes = token_bytes(states[0], coded=form == "int8")
            start = PAGE_TOKENS * row_bytes // (1 if form == "int8" else 2)
            pools = [torch.zeros(pages, 2 * start, dtype=getattr(torch, form)) for _ in range(layers)]
            out = torch.empty(1, 1, heads, columns, dtype=torch.bfloat16)
            starts = {"page_tokens": PAGE_TOKENS, "key_start": 0, "value_start": start, "scale": columns**-0.5}
            call = partial(_attend, runtime, pools, torch.arange(pages)[None], starts)
            sizes[form] = 2 * row_bytes * (tokens + 1)
            filled = states[0].new_empty(1, tokens, heads, columns)
            call((states[0].repeat_interleave(heads // kv_heads, 1), *states, filled), 0, window=1)  # only to append the tokens
            calls[form] = partial(seconds, partial(call, (query, new, new, out), tokens))
            calls[form]()
            answers[form] = out.float()
        off = float((answers["int8"] - answers["bfloat16"]).norm() / answers["bfloat16"].norm())
        assert off < 0.05, f"answers over codes differ by {off:.3f}"
        taken = alternate(calls, rounds)
        for form, times in taken.items():
            found = [each / layers for each in times]
            yield {
                "shape": name,
                "pages": form,
                "tokens": tokens,
                "threads": threads,
                **percentiles([1e6 * each for each in found], "us", 0),
                "gbps": round(sizes[form] / statistics.median(found) / 1e9, 1),
                "ratio": round(median_ratio(times, taken["bfloat16"]), 3),
                "bytes_ratio": round(sizes[form] / sizes["bfloat16"], 3),
                "off": round(off, 4) if form == "int8" else "",
            }


def main() -> None:
    options = parser(__doc__, rounds=31, layers=8, tokens=16384)
    options.add_argument("--attention", action="store_true", help="measure attention, and no model")
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of attention (default: 1 2)")
    options.add_argument("--backends", nargs="+", choices=STORAGES, default=list(STORAGES), help="beside the exact cache (default: all)")
    options.add_argument("--model", default=str(demo_path()))
    options.add_argument("--text", type=Path, help="default: the bundled model's held-out text")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--windows", type=int, default=4)
    given = options.parse_args()
    if given.attention:
        recorder = Recorder("kv_cache_attention", write=given.write)
        for threads in given.threads:
            for row in attention_rows(given.tokens, given.layers, given.rounds, threads):
                recorder.add(row)
        return
    ids = token_ids(given.text.read_text(encoding="utf-8") if given.text else held_out(), given.model)[None]
    model = optimize_and_load(given.model, "cpu-exact", dtype=getattr(torch, given.dtype), progress=False)
    windows = list(ids[:, : given.windows * WINDOW].split(WINDOW, dim=1))
    replaces = () if set(given.backends) == set(STORAGES) else ("model", "backend", "bits")
    recorder = Recorder("kv_cache", ("torch", "transformers", "hqq"), replaces=replaces, write=given.write)
    for row in rows(model, windows, "bundled" if given.model == str(demo_path()) else Path(given.model).name, given.backends):
        recorder.add(row)


if __name__ == "__main__":
    main()
