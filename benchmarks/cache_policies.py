"""Which experts should a cache keep? Hit rates of policies and sources of predictions over recorded routing, beside the optimum.

Decoding with slots for 10, 25 and 50 % of each layer's experts, or of all experts (slots that layers share, as experts in files have), with
predictions three layers ahead or none, and at most two experts fetched a layer; all arrive in time. Caches start empty, and a quarter of
the tokens warms them up. With `bypass`, a miss stays out of the slots unless it ranks above a resident expert. `fitted` are router maps of
4,096 tokens of other plays, `perfect` knows the choices. `loads_a_token` are the experts that take a slot. The third trace is of drawn
routing whose popular experts change every 512 tokens. In the bundled model's five layers, naming the first one's experts is worth more.

The bundled model's texts are `plays`, held out of its training, and `mixed`, in which plays and this project's guides alternate, so that
the popular experts change. At 25 % the bundled model has as many slots as a token has experts, so that without bypass and prefetch all
policies are equal. Synthetic routing for the shapes of the models of HybriMoE's paper (`harness/routing.py`) is tuned to the paper's hit
rates of LRU; it shows how policies use such a memory, but nothing about real models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from harness.cache_replay import Belady, ReplaySettings, replay
from harness.record import ROOT, Recorder, parser
from harness.routing import synthetic_trace
from harness.texts import TEXT, held_out, split_text, token_ids
from transformers import AutoModelForCausalLM

from moegraft.cpu_backend import CachePolicy
from moegraft.injection.demo import demo_path
from moegraft.operators.offload.options import CacheOptions, make_policy
from moegraft.operators.router_maps import RouterMaps, fit_maps, save_maps
from moegraft.operators.routing_trace import DEPTHS, NO_EXPERT, RoutedCall, Trace, joined, record_trace, watch_routing

GUIDES = ("README.md", "rules/README.md", "rules/guide/options.md", "rules/guide/formats.md")
PASSAGE = 1024  # tokens of one text before the other follows
SYNTHETIC_LAYERS = 8  # they differ only in the random numbers
WARM = 4  # 1 / WARM of a trace is warm-up
OPTIONS = {name: CacheOptions(policy=name) for name in ("lru", "mrs", "score_frequency")}
CALIBRATION = 4096  # tokens
WINDOW = 1024  # tokens that see each other: the bundled model's context
RATIOS, FETCHED = (0.1, 0.25, 0.5), 2
DRIFT, DRAWN = 512, "deepseek-v2-lite"  # tokens until other experts are popular
# Policy and source of predictions; the layers ahead of which experts are prefetched are three or, by the router alone, none.
CANDIDATES = (
    *((name, "router", ahead) for ahead in (DEPTHS, 0) for name in ("score_frequency", "mrs", "score_frequency, bypass")),
    *((name, "router", ahead) for ahead in (DEPTHS, 0) for name in ("lru", "min", "min, bypass")),
    *(("score_frequency", source, DEPTHS) for source in ("fitted", "perfect")),
)
Row = dict[str, object]


def mixed(plays: Trace, guides: Trace) -> Trace:
    """Alternate passages of both texts."""
    starts = range(0, min(plays.num_tokens, guides.num_tokens), PASSAGE)
    passages = [trace.part(start, start + PASSAGE) for start in starts for trace in (plays, guides)]
    return replace(joined(passages), source="mixed")


def first_layers(trace: Trace, layers: int, source: str) -> Trace:
    arrays = (trace.scores[:, :layers], trace.chosen[:, :layers], trace.weights[:, :layers], trace.predicted[:, :, :layers])
    return Trace(*arrays, trace.starts, trace.layers[:layers], source)


def policy(name: str, trace: Trace) -> CachePolicy:
    """Return a new policy by name."""
    if name == "min":
        return Belady(trace.used())
    return make_policy(OPTIONS[name], trace.layers, trace.num_experts, trace.top_k)


def candidates(traces: dict[str, Trace]) -> Iterator[Row]:
    """Return one row per candidate, capacity and scope; `traces` by the source of their predictions."""
    for ratio, shared, (name, source, ahead) in product(RATIOS, (False, True), CANDIDATES):
        trace = traces.get(source)
        if trace is None:
            continue
        kept, _, bypass = name.partition(", ")
        slots, warm = round(ratio * trace.num_experts * (trace.num_layers if shared else 1)), trace.num_tokens // WARM
        settings = ReplaySettings(slots, shared, bool(bypass), FETCHED if ahead else 0, max(ahead, 1), warm)
        counts = replay(trace, policy(kept, trace), settings)
        row: Row = {"trace": trace.source, "tokens": trace.num_tokens, "ratio": ratio, "scope": "global" if shared else "layer"}
        row |= {"slots": slots, "policy": name, "source": source}
        loads = round((counts.admitted + counts.prefetched) / (trace.num_tokens - warm), 2)
        yield row | {"lookahead": ahead, "hit_percent": round(100 * counts.hit_rate, 2), "loads_a_token": loads}


def candidate_traces(tokens: int) -> Iterator[dict[str, Trace]]:
    """Return the traces of plays, of mixed text and of drawn routing, each by the source of its predictions."""
    model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32).eval()
    calibration = token_ids(split_text(TEXT.read_text(encoding="utf-8"))[0])[-CALIBRATION:]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "maps.safetensors"
        save_maps(fit_maps(model, calibration.split(WINDOW)), path)
        plays = by_source(model, token_ids(held_out())[tokens : 2 * tokens], RouterMaps(path), "plays")
        text = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in GUIDES)
        guides = by_source(model, token_ids(text)[: tokens // 2], RouterMaps(path), "guides")
    yield plays
    yield {source: mixed(trace.part(0, tokens // 2), guides[source]) for source, trace in plays.items()}
    drawn = joined([synthetic_trace(DRAWN, DRIFT, seed) for seed in range(tokens // 2 // DRIFT)])
    yield {"router": first_layers(drawn, SYNTHETIC_LAYERS, f"{DRAWN}, drawn, drifting")}


@torch.no_grad()
def by_source(model: Any, ids: torch.Tensor, maps: RouterMaps, name: str) -> dict[str, Trace]:
    """Return the trace of tokens (T,) with the predictions of the routers, of fitted maps, and of one that knows the choices."""
    trace = record_trace(model, ids.split(WINDOW), name)
    fitted, first = np.full_like(trace.predicted, NO_EXPERT), 0
    for window in ids.split(WINDOW):
        calls: list[RoutedCall] = []
        with watch_routing(model, calls.append):
            model(window[None], use_cache=False)
        for depth, layer in np.ndindex(DEPTHS, len(calls)):
            earlier = calls[layer - 1 - depth]
            if depth < layer and (rows := maps.rows(earlier.router.path, calls[layer].router)) is not None:
                named = rows.choose(earlier.router_input, trace.top_k)
                fitted[depth, first : first + len(window), layer] = named
        first += len(window)
    perfect = np.broadcast_to(trace.chosen, trace.predicted.shape)
    return {"router": trace, "fitted": replace(trace, predicted=fitted), "perfect": replace(trace, predicted=perfect)}


def main() -> None:
    given = parser(__doc__, tokens=4096).parse_args()
    rows = Recorder("cache_candidates", write=given.write)
    for traces in candidate_traces(given.tokens):
        for row in candidates(traces):
            rows.add(row)


if __name__ == "__main__":
    main()
