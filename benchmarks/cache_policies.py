"""Which experts should a cache keep? Hit rates of every policy over recorded routing, beside the optimum.

    python benchmarks/cache_policies.py policies sweep candidates

- policies: at 25, 50 and 75 % of the experts, with 0, 1 or 2 experts per layer prefetched by the previous layer's prediction; by admission,
  and with slots that layers share. Caches start empty, and a quarter of the tokens warms them up; `static` knows the uses of that quarter.
- sweep: the weights `alpha` and `frequency_alpha` and `top_p`, on other tokens than `policies`.
- candidates: policies and sources of predictions in decoding, at 10, 25 and 50 % of each layer's experts and of all experts (slots that
  layers share, as experts in files have), with predictions three layers ahead or none, and at most two experts fetched a layer; all arrive
  in time. With `bypass`, a miss stays out of the slots unless it ranks above a resident expert. `fitted` are router maps of 4,096 tokens of
  other plays, `perfect` knows the choices. `loads_a_token` are the experts that take a slot. The third trace is of drawn routing whose
  popular experts change every 512 tokens. In the bundled model's five layers, naming the first one's experts is worth more.

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
from harness.cache_replay import Belady, ReplayCounts, ReplaySettings, replay
from harness.plots import curve, grouped, panels, save
from harness.record import ROOT, Recorder, parser, read_rows
from harness.routing import MIXTURES, WINDOW, record, synthetic_trace
from harness.texts import TEXT, held_out, split_text, token_ids
from transformers import AutoModelForCausalLM

from moegraft.cpu_backend import CachePolicy
from moegraft.injection.demo import demo_path
from moegraft.operators.offload.cache import CacheOptions, make_policy
from moegraft.operators.router_maps import RouterMaps, fit_maps, save_maps
from moegraft.operators.routing_trace import DEPTHS, NO_EXPERT, RoutedCall, Trace, joined, record_trace, watch_routing

GUIDES = ("README.md", "rules/README.md", "rules/guide/options.md", "rules/guide/formats.md")
PASSAGE = 1024  # tokens of one text before the other follows
RATIOS = (0.25, 0.5, 0.75)
SWEEP_RATIOS = (0.375, 0.5, 0.75)  # at 0.25 all policies are equal
SYNTHETIC_TOKENS, SYNTHETIC_LAYERS = 1536, 8  # layers differ only in the random numbers
WARM = 4  # 1 / WARM of a trace is warm-up
PLAIN = CacheOptions(policy="mrs", alpha=0.5)  # a short average; the paper does not give its alpha
OPTIONS = {
    "lru": CacheOptions(policy="lru"),
    "lfu": CacheOptions(policy="lfu"),
    "mrs, alpha 0.5": PLAIN,
    "mrs": CacheOptions(policy="mrs"),
    "score_frequency": CacheOptions(policy="score_frequency"),
}
NAMES = (*OPTIONS, "static", "min")
CALIBRATION = 4096  # tokens
FEW_RATIOS, FETCHED = (0.1, 0.25, 0.5), 2
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


def guides_text() -> str:
    return "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in GUIDES)


def demo_traces(tokens: int, part: int) -> list[Trace]:
    """Return traces of `tokens` tokens of plays and of mixed text; `part` 0 serves to choose parameters, 1 to report results."""
    plays = record(demo_path(), held_out(), tokens, skip=part * tokens, source="plays")
    guides = record(demo_path(), guides_text(), tokens // 2, skip=part * (tokens // 2), source="guides")
    return [plays, mixed(plays.part(0, tokens // 2), guides)]


def synthetic_traces(part: int) -> list[Trace]:
    """Return synthetic traces of the first layers of the paper's models."""
    return [first_layers(synthetic_trace(name, SYNTHETIC_TOKENS, seed=part), SYNTHETIC_LAYERS, f"{name}, drawn") for name in MIXTURES]


def first_layers(trace: Trace, layers: int, source: str) -> Trace:
    arrays = (trace.scores[:, :layers], trace.chosen[:, :layers], trace.weights[:, :layers], trace.predicted[:, :, :layers])
    return Trace(*arrays, trace.starts, trace.layers[:layers], source)


def policy(name: str, trace: Trace) -> CachePolicy:
    """Return a new policy by name."""
    match name:
        case "min":
            return Belady(trace.used())
        case "static":
            return CachePolicy("static", trace.num_layers, trace.num_experts, profile=trace.part(0, trace.num_tokens // WARM).loads())
    return make_policy(OPTIONS[name], trace.layers, trace.num_experts, trace.top_k)


def played(trace: Trace, policy: CachePolicy, ratio: float, **chosen: object) -> ReplayCounts:
    count = slots(trace.num_layers, trace.num_experts, ratio, chosen.get("shared"))
    settings = ReplaySettings(count, warm_tokens=trace.num_tokens // WARM, **chosen)  # type: ignore[arg-type]
    return replay(trace, policy, settings)


def slots(layers: int, num_experts: int, ratio: float, shared: object) -> int:
    return round(ratio * num_experts * (layers if shared else 1))


def policies(trace: Trace) -> Iterator[Row]:
    """Return one row per policy and setting."""
    ways = [{"prefetch": prefetch} for prefetch in (0, 1, 2) if trace.depths or not prefetch]
    ways += [{"bypass": True}, {"shared": True}]
    for ratio, way, name in product(RATIOS, ways, NAMES):
        if name == "static" and "bypass" in way:
            continue  # a static profile always bypasses
        bypass = bool(way.get("bypass", name == "static"))
        counts = played(trace, policy(name, trace), ratio, **{**way, "bypass": bypass})
        layer_tokens = trace.num_layers * (trace.num_tokens - trace.num_tokens // WARM)
        row: Row = {"trace": trace.source, "tokens": trace.num_tokens, "experts": trace.num_experts, "top_k": trace.top_k}
        row |= {"ratio": ratio, "admission": "bypass" if bypass else "always", "scope": "global" if way.get("shared") else "layer"}
        row |= {"prefetch": way.get("prefetch", 0), "policy": name, "hit_percent": round(100 * counts.hit_rate, 2)}
        row |= {"loads_a_layer": round((counts.admitted + counts.prefetched) / layer_tokens, 3)}
        row |= {"prefetch_in_use": round(counts.prefetched_in_use / counts.prefetched, 3) if counts.prefetched else ""}
        yield row


def candidates(traces: dict[str, Trace]) -> Iterator[Row]:
    """Return one row per candidate, capacity and scope; `traces` by the source of their predictions."""
    for ratio, shared, (name, source, ahead) in product(FEW_RATIOS, (False, True), CANDIDATES):
        trace = traces.get(source)
        if trace is None:
            continue
        kept, _, bypass = name.partition(", ")
        way = {"shared": shared, "bypass": bool(bypass), "prefetch": FETCHED if ahead else 0, "lookahead": max(ahead, 1)}
        counts = played(trace, policy(kept, trace), ratio, **way)
        row: Row = {"trace": trace.source, "tokens": trace.num_tokens, "ratio": ratio, "scope": "global" if shared else "layer"}
        row |= {"slots": slots(trace.num_layers, trace.num_experts, ratio, shared), "policy": name, "source": source}
        tokens = trace.num_tokens - trace.num_tokens // WARM
        loads = round((counts.admitted + counts.prefetched) / tokens, 2)
        yield row | {"lookahead": ahead, "hit_percent": round(100 * counts.hit_rate, 2), "loads_a_token": loads}


def candidate_traces(tokens: int) -> Iterator[dict[str, Trace]]:
    """Return the traces of plays, of mixed text and of drawn routing, each by the source of its predictions."""
    model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32).eval()
    calibration = token_ids(split_text(TEXT.read_text(encoding="utf-8"))[0])[-CALIBRATION:]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "maps.safetensors"
        save_maps(fit_maps(model, calibration.split(WINDOW)), path)
        plays = by_source(model, token_ids(held_out())[tokens : 2 * tokens], RouterMaps(path), "plays")
        guides = by_source(model, token_ids(guides_text())[: tokens // 2], RouterMaps(path), "guides")
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


def sweep(trace: Trace) -> Iterator[Row]:
    """Return the hit rates of MRS by alpha and top_p, and of score_frequency by both weights."""
    tried = [
        CacheOptions(policy="mrs", alpha=alpha, top_p=top_p)
        for alpha, top_p in product((0.5, 0.2, 0.1, 0.05, 0.02, 0.01), (trace.top_k, 2 * trace.top_k, trace.num_experts))
    ]
    tried += [
        CacheOptions(policy="score_frequency", alpha=alpha, frequency_alpha=frequency_alpha)
        for alpha, frequency_alpha in product((0.5, 0.2, 0.1, 0.05, 0.02), (0.02, 0.01, 0.005))
    ]
    tried += [CacheOptions(policy="lru"), CacheOptions(policy="lfu")]
    shape = (trace.layers, trace.num_experts, trace.top_k)
    for options in tried:
        row: Row = {"trace": trace.source, "tokens": trace.num_tokens, "policy": options.policy, "alpha": options.alpha}
        row |= {"top_p": options.top_p or 2 * trace.top_k, "frequency_alpha": options.frequency_alpha}
        hits = [100 * played(trace, make_policy(options, *shape), ratio).hit_rate for ratio in SWEEP_RATIOS]
        row |= {f"hit_percent_{ratio}": round(percent, 2) for ratio, percent in zip(SWEEP_RATIOS, hits, strict=True)}
        row |= {"hit_percent": round(sum(hits) / len(hits), 2)}
        yield row


def plot_policies() -> None:
    """Plot, by trace, the hit rate by capacity and by prefetching at half of the experts."""
    rows = read_rows("cache_policies")
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    figure, grid = panels(2, len(traces), (3.6, 3.5))
    for (above, below), trace in zip(grid.T, traces, strict=True):
        own = (row for row in rows if row["trace"] == trace and row["scope"] == "layer")
        for name, found in grouped(own, lambda row: row["policy"]).items():
            found = [row for row in found if row["admission"] == ("bypass" if name == "static" else "always")]
            style: dict[str, Any] = {"color": "black", "style": "--"} if name == "min" else {}
            curve(above, [row for row in found if row["prefetch"] == "0"], "ratio", "hit_percent", label=name, **style)
            curve(below, [row for row in found if row["ratio"] == "0.5"], "prefetch", "hit_percent", label=name, **style)
        above.set(title=f"{trace}", xlabel="share of experts in the cache", ylabel="hits, %")
        below.set(title="at half of the experts", xlabel="experts fetched ahead a layer", ylabel="hits, %", xticks=[0, 1, 2])
    grid[0, 0].legend(fontsize="x-small")
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    save(figure, "cache_policies", dpi=75)


def main() -> None:
    options = parser(__doc__, tokens=8192)
    options.add_argument("parts", nargs="+", choices=("policies", "sweep", "candidates"))
    given = options.parse_args()
    for part in given.parts:
        rows = Recorder(f"cache_{part}", write=given.write)
        match part:
            case "policies":
                found = (row for trace in [*demo_traces(given.tokens, 1), *synthetic_traces(1)] for row in policies(trace))
            case "sweep":
                found = (row for trace in [*demo_traces(given.tokens, 0), *synthetic_traces(0)] for row in sweep(trace))
            case _:
                found = (row for traces in candidate_traces(given.tokens // 2) for row in candidates(traces))
        for row in found:
            rows.add(row)
        if given.write and part == "policies":
            plot_policies()


if __name__ == "__main__":
    main()
