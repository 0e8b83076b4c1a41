"""Which experts should a cache keep? Hit rates of every policy over recorded routing, beside the optimum and HybriMoE's Figure 9.

    python benchmarks/cache_policies.py policies sweep candidates     # --text FILE adds a trace to policies

- policies: at 25, 50 and 75 % of the experts, with 0, 1 or 2 experts per layer prefetched by the previous layer's prediction; by admission,
  and with slots that layers share. Caches start empty, and a quarter of the tokens warms them up; `static` knows the uses of that quarter.
- sweep: the weights `alpha` and `frequency_alpha` and `top_p`, on other tokens than `policies`.
- candidates: policies, sources of predictions (`harness/foresight.py`) and inexact routing of later papers, in decoding, at 10, 25 and 50 %
  of each layer's experts and of all experts (slots that layers share, as experts in files have), with predictions 0 to 3 layers ahead and
  at most two experts fetched a layer; all arrive in time. With `bypass`, a miss stays out of the slots unless it ranks above a resident
  expert. `against_default` is in points of hits; `loads_a_token` are the experts that take a slot. The third trace is of drawn routing
  whose popular experts change every 512 tokens. In the bundled model's five layers, naming the first one's experts is worth more.

The bundled model's texts are `plays`, held out of its training, and `mixed`, in which plays and this project's guides alternate, so that
the popular experts change. At 25 % the bundled model has as many slots as a token has experts, so that without bypass and prefetch all
policies are equal. Synthetic routing for the shapes of the paper's models (`harness/routing.py`) is tuned to the paper's hit rates of
LRU; it shows how policies use such a memory, but nothing about real models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from harness.cache_replay import Belady, LeastStale, ReplayCounts, ReplaySettings, replay, used_by_step
from harness.foresight import SOURCES, Foresight
from harness.plots import curve, grouped, panels, save
from harness.record import ROOT, Recorder, parser
from harness.routing import MIXTURES, record, synthetic_trace
from harness.texts import TEXT, held_out, split_text, token_ids
from matplotlib.axes import Axes

from moegraft.cpu_backend import CachePolicy
from moegraft.injection.demo import demo_path
from moegraft.operators.offload.cache import CacheOptions, make_policy
from moegraft.operators.routing_trace import DEPTHS, Trace, joined

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
STRENGTHS = (0.0, 0.2, 0.5)  # of cache-aware routing; the paper tunes it by model
# Policy, source of predictions and layers ahead, the default first.
CANDIDATES = (
    *(("score_frequency", "router", ahead) for ahead in (3, 2, 1, 0)),
    *(("mrs", "router", ahead) for ahead in (3, 2, 1, 0)),
    *(("score_frequency, bypass", "router", ahead) for ahead in (3, 1, 0)),
    *((name, "router", ahead) for name in ("lru", "least_stale", "min", "min, bypass") for ahead in (3, 0)),
    *(("score_frequency", source, ahead) for source in (*SOURCES, "perfect") for ahead in (3, 1)),
)
# Hit rates in percent: model, ratio of experts, LRU and MRS (HybriMoE, Figure 9 and section VI-D).
PAPER = (("Mixtral", 0.25, 30.2, 36.2), ("DeepSeek", 0.25, 47.7, 52.7), ("Qwen2", 0.25, 45.0, 52.8), ("Mixtral", 0.75, 80.6, 83.3))
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
        case "least_stale":
            return LeastStale(trace.num_layers, trace.num_experts)
        case "min":
            return Belady(used_by_step(trace, 1))
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
    for ratio, shared in product(FEW_RATIOS, (False, True)):
        default = None
        for name, source, ahead in CANDIDATES:
            trace = traces.get(source)
            if trace is None:
                continue
            kept, _, bypass = name.partition(", ")
            way = {"shared": shared, "bypass": bool(bypass), "prefetch": FETCHED if ahead else 0, "lookahead": max(ahead, 1)}
            counts = played(trace, policy(kept, trace), ratio, **way)
            default = counts.hit_rate if default is None else default
            row: Row = {"trace": trace.source, "tokens": trace.num_tokens, "ratio": ratio, "scope": "global" if shared else "layer"}
            count = slots(trace.num_layers, trace.num_experts, ratio, shared)
            row |= {"slots": count, "policy": name, "source": source, "lookahead": ahead, "routing": "exact"}
            row |= {"hit_percent": round(100 * counts.hit_rate, 2), "against_default": round(100 * (counts.hit_rate - default), 2)}
            tokens = trace.num_tokens - trace.num_tokens // WARM
            yield row | {"loads_a_token": round((counts.admitted + counts.prefetched) / tokens, 2), "perplexity": ""}


def candidate_traces(foresight: Foresight, tokens: int) -> Iterator[dict[str, Trace]]:
    """Return the traces of plays, of mixed text and of drawn routing, each by the source of its predictions."""
    plays = foresight.traces(token_ids(held_out())[tokens : 2 * tokens], "plays")
    yield plays
    guides = foresight.traces(token_ids(guides_text())[: tokens // 2], "guides")
    yield {source: mixed(trace.part(0, tokens // 2), guides[source]) for source, trace in plays.items()}
    drawn = joined([synthetic_trace(DRAWN, DRIFT, seed) for seed in range(tokens // 2 // DRIFT)])
    yield {"router": first_layers(drawn, SYNTHETIC_LAYERS, f"{DRAWN}, drawn, drifting")}


def inexact(foresight: Foresight, tokens: int) -> Iterator[Row]:
    """Return the perplexity of plays where predicted experts are computed, and the perplexity and hits of cache-aware routing."""
    ids = token_ids(held_out())[tokens : tokens + tokens // 2]
    for source in ("router", "residual", "fitted", "before attention"):
        row: Row = {"trace": "plays", "tokens": len(ids), "source": source, "lookahead": 1, "routing": "predicted"}
        yield row | {"perplexity": round(foresight.executed(source, ids), 3)}
    ways = list(product(FEW_RATIOS, (False, True)))
    shape = len(foresight.layers), foresight.model.config.num_experts
    settings = [ReplaySettings(slots(*shape, ratio, shared), shared, prefetch=FETCHED, lookahead=DEPTHS) for ratio, shared in ways]
    default: list[float] = []
    for strength in STRENGTHS:
        caches, perplexities = foresight.cache_aware(ids, settings, strength)
        default = default or [cache.counts.hit_rate for cache in caches]
        for (ratio, shared), cache, perplexity, before in zip(ways, caches, perplexities, default, strict=True):
            counts = cache.counts
            row = {"trace": "plays", "tokens": len(ids), "ratio": ratio, "scope": "global" if shared else "layer"}
            row |= {"slots": slots(*shape, ratio, shared), "policy": "score_frequency", "source": "router", "lookahead": DEPTHS}
            row |= {"routing": f"cache-aware, {strength}" if strength else "exact", "hit_percent": round(100 * counts.hit_rate, 2)}
            row |= {"against_default": round(100 * (counts.hit_rate - before), 2)}
            row |= {"loads_a_token": round((counts.admitted + counts.prefetched) / len(ids), 2), "perplexity": round(perplexity, 3)}
            yield row


def papers() -> Iterator[Row]:
    """Return the paper's own figures as rows with the same columns."""
    for model, ratio, lru, mrs in PAPER:
        for name, percent in (("lru", lru), ("mrs", mrs)):
            row: Row = {"trace": f"{model} (HybriMoE's paper)", "tokens": "", "experts": "", "top_k": "", "ratio": ratio}
            row |= {"admission": "", "scope": "", "prefetch": 0, "policy": name, "hit_percent": percent}
            yield row | {"loads_a_layer": "", "prefetch_in_use": ""}


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


def plot_policies(rows: list[Row]) -> None:
    """Plot, by trace, the hit rate by capacity and by prefetching at half of the experts, with the paper's figures."""
    traces = list(dict.fromkeys(row["trace"] for row in rows if row["tokens"]))
    figure, grid = panels(2, len(traces) + 1, (3.6, 3.5))
    for (above, below), trace in zip(grid.T, traces, strict=False):
        own = (row for row in rows if row["trace"] == trace and row["scope"] == "layer")
        for name, found in grouped(own, lambda row: row["policy"]).items():
            found = [row for row in found if row["admission"] == ("bypass" if name == "static" else "always")]
            style: dict[str, Any] = {"color": "black", "style": "--"} if name == "min" else {}
            curve(above, [row for row in found if not row["prefetch"]], "ratio", "hit_percent", label=name, **style)
            curve(below, [row for row in found if row["ratio"] == 0.5], "prefetch", "hit_percent", label=name, **style)
        above.set(title=f"{trace}", xlabel="share of experts in the cache", ylabel="hits, %")
        below.set(title="at half of the experts", xlabel="experts fetched ahead a layer", ylabel="hits, %", xticks=[0, 1, 2])
    grid[0, 0].legend(fontsize="x-small")
    draw_paper(grid[0, -1])
    draw_ways(grid[1, -1], rows, traces[0])
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    save(figure, "cache_policies", dpi=75)


def draw_paper(axes: Axes) -> None:
    labels = [f"{model}\n{ratio:.0%}" for model, ratio, _, _ in PAPER]
    for offset, name, column in ((-0.2, "lru", 2), (0.2, "mrs", 3)):
        bars = axes.bar([place + offset for place in range(len(PAPER))], [row[column] for row in PAPER], width=0.38, label=name)
        axes.bar_label(bars, fontsize="x-small")
    axes.set(title="HybriMoE's paper, Figure 9", ylabel="hits, %", xticks=range(len(PAPER)), xticklabels=labels)
    axes.legend(fontsize="x-small")


def draw_ways(axes: Axes, rows: list[Row], trace: object) -> None:
    """Plot the hit rate by admission and sharing at half of the experts."""
    ways = {"always": ("always", "layer"), "bypass": ("bypass", "layer"), "shared slots": ("always", "global")}
    shown = [name for name in NAMES if name != "static"]
    for offset, (label, (admission, scope)) in zip((-0.27, 0, 0.27), ways.items(), strict=True):
        wanted = {"trace": trace, "ratio": 0.5, "admission": admission, "scope": scope, "prefetch": 0}
        percents = {row["policy"]: row["hit_percent"] for row in rows if wanted.items() <= row.items()}
        axes.bar([place + offset for place in range(len(shown))], [percents[name] for name in shown], width=0.25, label=label)
    axes.set(title=f"{trace}, half of the experts", ylabel="hits, %", xticks=range(len(shown)), ylim=(40, None))
    axes.set_xticklabels(shown, rotation=30, ha="right", fontsize="x-small")
    axes.legend(fontsize="x-small")


def main() -> None:
    options = parser(__doc__, tokens=8192)
    options.add_argument("parts", nargs="+", choices=("policies", "sweep", "candidates"))
    options.add_argument("--text", type=Path, nargs="*", default=[], help="further text files for the bundled model")
    given = options.parse_args()
    for part in given.parts:
        key = ("trace", "ratio", "scope", "policy", "source", "lookahead", "routing") if part == "candidates" else ()
        rows = Recorder(f"cache_{part}", replaces=key, write=given.write)  # rows of candidates that are no longer here stay
        if part == "candidates":
            tokens = given.tokens // 2
            foresight = Foresight(token_ids(split_text(TEXT.read_text(encoding="utf-8"))[0])[-CALIBRATION:])
            by_source = candidate_traces(foresight, tokens)
            for row in chain((row for traces in by_source for row in candidates(traces)), inexact(foresight, tokens)):
                rows.add(row)
        elif part == "sweep":
            for row in (row for trace in [*demo_traces(given.tokens, 0), *synthetic_traces(0)] for row in sweep(trace)):
                rows.add(row)
        else:
            added = [record(demo_path(), path.read_text(encoding="utf-8"), given.tokens, source=path.name) for path in given.text]
            traces = [*demo_traces(given.tokens, 1), *added, *synthetic_traces(1)]
            for row in (*(row for trace in traces for row in policies(trace)), *papers()):
                rows.add(row)
        if given.write and part == "policies":
            plot_policies(rows.rows)


if __name__ == "__main__":
    main()
