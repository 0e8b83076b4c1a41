"""Generate the tables of the documentation from the committed results. Run it after a benchmark; a test compares the pages with it."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md", ROOT / "rules" / "README.md")
RESULTS = Path(__file__).parent / "results"
Row = dict[str, str]


def read(name: str) -> list[Row]:
    """The rows of one results file; none where it was never measured."""
    path = RESULTS / f"{name}.csv"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def provenance(rows: list[Row]) -> str:
    return f"{rows[0]['hardware']}, commit {rows[0]['commit']}, {rows[0]['versions'].replace(' ', ', ')}."


def cpu_experts() -> str:
    """Milliseconds a layer by batch: ours with the widest instruction set of the machine, and transformers."""
    rows = [row for row in read("cpu_experts") if "avx512_bf16" in row["provider"] or not row["provider"].startswith("ours")]
    tokens = sorted({row["tokens"] for row in rows}, key=int)
    found = {(row["provider"], row["weights"], row["tokens"]): row for row in rows}
    body = []
    for provider, weights in dict.fromkeys((row["provider"], row["weights"]) for row in rows):
        cells = [found.get((provider, weights, count)) for count in tokens]
        body.append(
            [
                provider.replace("ours-avx512_bf16", "**moegraft**"),
                weights,
                *(f"{float(cell['p50_ms']):.2f}" if cell else "-" for cell in cells),
            ]
        )
    read_share = [float(found["ours-avx512_bf16", weights, "1"]["read_share"]) for weights in ("int4", "int8", "bfloat16")]
    return (
        "One layer of Qwen3-30B-A3B's shapes (H 2048, I 768, 128 experts, 8 a token), milliseconds, medians, "
        f"{rows[0]['threads']} threads:\n\n{table(['', 'weights', *(f'T={count}' for count in tokens)], body)}\n\n"
        f"Decode (T=1) reads its weights at {min(read_share):.0%} to {max(read_share):.0%} of a read-bandwidth probe taken beside it. "
        f"{provenance(rows)}"
    )


def load_memory() -> str:
    rows = read("load_memory")
    body = [
        [
            row["provider"].replace("cpu", "moegraft cpu"),
            row["checkpoint_dtype"],
            row["checkpoint_mib"],
            row["held_mib"],
            row["peak_mib"],
            row["peak_over_held"],
        ]
        for row in rows
    ]
    head = ["", "checkpoint", "its MiB", "held after, MiB", "peak of loading, MiB", "peak / held"]
    return f"Peak anonymous memory of loading, with mapped file pages not counted:\n\n{table(head, body)}\n\n{provenance(rows)}"


def families() -> str:
    rows = read("families")
    served = [row for row in rows if row["outcome"] == "served"]
    worst = max(float(row["max_relative_error"]) for row in served)
    equal = sum(row["equal_greedy_tokens"] == "64/64" for row in served)
    refused = [row["model_type"] for row in rows if row["outcome"] == "refused"]
    return (
        f"{len(served)} model types of transformers are served by `cpu-exact` with logits within {worst:.0e} of stock in float32 "
        f"(relative to the largest), {equal} of them with 64 of 64 greedy tokens equal; {len(refused)} are refused with the reason "
        f"({', '.join(refused)}). {provenance(rows)}"
    )


def rates(name: str, caption: str) -> str:
    rows = read(name)
    if not rows:
        return ""
    columns = {key: next(column for column in rows[0] if column.startswith(key)) for key in ("p20", "p50", "p80")}
    figures = [[row["failure"], "-", "-"] if row.get("failure") else [row[columns[key]] for key in ("p50", "p20", "p80")] for row in rows]
    body = [[row["provider"], row["phase"], *cells] for row, cells in zip(rows, figures, strict=True)]
    return f"{caption}\n\n{table(['', 'phase', 'tokens/s, median', 'p20', 'p80'], body)}\n\n{provenance(rows)}"


def cpu_model() -> str:
    return rates(
        "cpu_model", "Six layers of Qwen3-30B-A3B's shapes, random weights: decode after 8 and after 512 tokens, and a prompt of 512:"
    )


def kt_kernel() -> str:
    """A layer beside KTransformers' kernel, by tokens a call; of its thread counts the better one."""
    rows = read("kt_kernel")
    tokens = list(dict.fromkeys(row["tokens"] for row in rows if row["tokens"]))

    def fastest(provider: str, weights: str, count: str) -> str:
        its = [row for row in rows if (row["provider"], row["weights"]) == (provider, weights)]
        found = [float(row["p50_ms"]) for row in its if row["tokens"] == count]
        return f"{min(found):.2f}" if found else next(row["failure"] for row in its)

    body = [
        [weights, *(f"{fastest('moegraft', weights, count)} / {fastest('kt-kernel', weights, count)}" for count in tokens)]
        for weights in dict.fromkeys(row["weights"] for row in rows)
    ]
    caption = "One layer of Qwen3-30B-A3B's shapes, ms (median) by tokens a call, ours / KTransformers' `kt-kernel`, which take turns:"
    return f"{caption}\n\n{table(['', *(f'T={count}' for count in tokens)], body)}\n\n{provenance(rows)}"


def cpu_model_pairs() -> str:
    rows = read("cpu_model_pairs")
    head = ["weights", "phase", "moegraft, tokens/s", "llama.cpp, tokens/s", "ratio, median", "p20", "p80"]
    keys = ("weights", "phase", "ours_tokens_s", "llama_cpp_tokens_s", "ratio", "p20_ratio", "p80_ratio")
    return f"{table(head, ([row[key] for key in keys] for row in rows))}\n\n{provenance(rows)}"


def speeds() -> str:
    """The README's one table of speeds: figures measured alternately with each peer."""
    layer, pairs, prompts = read("kt_kernel"), read("cpu_model_pairs"), read("cpu_model")
    formats = ("int4", "int8", "bfloat16")

    def fastest_ms(provider: str, weights: str, tokens: str) -> str:
        wanted = (provider, weights, tokens)
        found = [float(row["p50_ms"]) for row in layer if (row["provider"], row["weights"], row["tokens"]) == wanted]
        return f"{min(found):.2f}" if found else "-"

    def decode(weights: str, phase: str) -> str:
        row = next((row for row in pairs if (row["weights"], row["phase"]) == (weights, phase)), None)
        return f"{float(row['ours_tokens_s']):.0f} / {float(row['llama_cpp_tokens_s']):.0f}" if row else "-"

    def prompt(weights: str) -> str:
        found = {row["provider"]: float(row["p50_tokens_s"]) for row in prompts if row["phase"] == "prompt-512" and row["p50_tokens_s"]}
        stock = f" / {found['stock']:.0f}" if weights == "bfloat16" and "stock" in found else ""
        return " / ".join(f"{found[name]:.0f}" for name in (f"ours-{weights}", f"llama.cpp-{weights}") if name in found) + stock

    body = [
        ["decode, tokens/s after 8 tokens, moegraft / llama.cpp", *(decode(weights, "decode") for weights in formats)],
        ["decode, tokens/s after 512 tokens, moegraft / llama.cpp", *(decode(weights, "decode-512") for weights in formats)],
        ["prompt of 512, tokens/s, moegraft / llama.cpp / transformers", *(prompt(weights) for weights in formats)],
        *(
            [
                f"one layer, {tokens} token{'s' if tokens != '1' else ''}, ms, moegraft / kt-kernel",
                *(f"{fastest_ms('moegraft', weights, tokens)} / {fastest_ms('kt-kernel', weights, tokens)}" for weights in formats),
            ]
            for tokens in ("1", "512")
        ),
    ]
    return (
        f"Speed on the CPU, 2 threads, Qwen3-30B-A3B's shapes (six layers; one layer of experts):\n\n{table(['', *formats], body)}\n\n"
        f"Decode: {provenance(pairs)} Prompts: {provenance(prompts)} Layers: {provenance(layer)}"
    )


HYBRID_SYSTEMS = {
    "all_cpu": "all experts on the CPU",
    "layer_map": "whole layers on one device",
    "fixed": "a fixed map of hot experts",
    "on_demand+next_layer": "loading on demand, next layer prefetched",
    "all": "**moegraft**",
    "bound": "knowing what later layers choose",
}


def hybrid_modelled() -> str:
    """Decode by share of the experts that have a slot; one prompt length beside it."""
    rows = [row for row in read("hybrid_modelled") if row["system"] in HYBRID_SYSTEMS]
    ratios = sorted({row["cache_ratio"] for row in rows}, key=float)
    models = list(dict.fromkeys(row["model"] for row in rows))
    decode = {(row["system"], row["model"], row["cache_ratio"]): row["tokens_s"] for row in rows if row["phase"] == "decode"}
    first = {(row["system"], row["model"]): row for row in rows if (row["tokens"], row["cache_ratio"]) == ("512", ratios[0])}
    body = []
    for system, name in HYBRID_SYSTEMS.items():
        rates = [" / ".join(f"{float(decode[system, model, ratio]):.0f}" for ratio in ratios) for model in models]
        waits = " / ".join(f"{float(first[system, model]['mean_ms']) / 1e3:.2f}" for model in models)
        body.append([name, *rates, waits])
    shares = " / ".join(f"{float(ratio):.0%}" for ratio in ratios)
    head = ["", *(f"{model}, tokens/s" for model in models), f"s to the first token, 512 tokens, {float(ratios[0]):.0%}"]
    return (
        f"Modelled, not measured: the engine as it is on a virtual clock that charges what an A6000 and 10 CPU cores are assumed to take, "
        f"with made-up routing, shared experts on the GPU beside the routed ones; {shares} of the experts have a slot:\n\n"
        f"{table(head, body)}\n\n{provenance(rows)}"
    )


def demo_speed() -> str:
    return rates("demo_speed", "The bundled model, small enough that Python weighs as much as the experts:")


def serve() -> str:
    """Tokens a second of all clients together, and how long one waits for its first."""
    rows = read("serve")
    head = ["", "clients", "tokens/s, median", "p20", "p80", "ms to the first token, median"]
    keys = ("provider", "clients", "p50_tokens_per_s", "p20_tokens_per_s", "p80_tokens_per_s", "p50_first_ms")
    others = max(float(row["others_share"]) for row in rows)
    return (
        f"The bundled model with `{rows[0]['rules']}`, {rows[0]['threads']} thread, clients on the same cores, of which other processes "
        f"took {others:.1%} at most. With 1 client both run the same code: what differs there is noise.\n\n"
        f"{table(head, ([row[key] for key in keys] for row in rows))}\n\n{provenance(rows)}"
    )


THRESHOLDS = (("none", ""), ("threshold", "routed"))  # criterion and scope of what operators do


def sparse_cpu() -> str:
    """Speed against the dense layout by share of neurons left out, beside what the share costs the bundled model."""
    rows = read("sparse_cpu")
    quality = {row["target"]: row for row in read("sparse_quality") if (row["criterion"], row["scope"]) in THRESHOLDS}
    found = {(row["provider"], row["phase"]): row for row in rows}
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    weights = ("int8", "bfloat16")
    shares = [row["provider"].removeprefix("int8-sparse-") for row in rows if row["provider"].startswith("int8-sparse-")]
    body = []
    for share in dict.fromkeys(shares):
        speed = [f"{float(found[f'{kind}-sparse-{share}', phase]['against_dense']):.2f}" for kind in weights for phase in phases]
        cost = quality[str(int(share.rstrip("%")) / 100)]
        body.append([share, *speed, f"{float(cost['perplexity']):.2f}", f"{float(cost['same_next_token']):.1%}"])
    head = ["neurons left out", *(f"{kind}, {phase}" for kind in weights for phase in phases), "perplexity", "same next token"]
    return (
        f"Speed against the dense layout, six layers of Qwen3-30B-A3B's shapes (`benchmarks/sparse_cpu.py`, {rows[0]['threads']} threads), "
        "beside what the share costs the bundled model on held-out text (`benchmarks/sparse_quality.py`):\n\n"
        f"{table(head, body)}\n\n{provenance(rows)}"
    )


def kv_cache() -> str:
    rows = read("kv_cache")
    exact = next(row for row in rows if row["backend"] == "exact")
    body = [
        [
            row["backend"] if row is exact else f"`{row['backend']}`",
            row["bits"],
            f"{int(row['cache_bytes']) / int(exact['cache_bytes']):.0%}",
            "" if row is exact else f"{float(row['kl_nats']):.4f}",
            "" if row is exact else f"{float(row['same_token']):.1%}",
            f"{float(row['perplexity']):.2f}",
        ]
        for row in rows
    ]
    return (
        f"The {exact['model']} model in {exact['dtype']} on held-out text, {int(exact['window']) // 2} tokens after a prompt of as many "
        "(`benchmarks/kv_cache.py`; the latest tokens wait unquantised, so that short texts save less):\n\n"
        f"{table(['backend', 'bits', 'cache', 'KL, nats a token', 'same next token', 'perplexity'], body)}\n\n{provenance(rows)}"
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "speeds": speeds,
    "cpu_model_pairs": cpu_model_pairs,
    "cpu_experts": cpu_experts,
    "cpu_model": cpu_model,
    "kt_kernel": kt_kernel,
    "hybrid_modelled": hybrid_modelled,
    "demo_speed": demo_speed,
    "serve": serve,
    "load_memory": load_memory,
    "sparse_cpu": sparse_cpu,
    "families": families,
    "kv_cache": kv_cache,
}


def rendered(text: str) -> str:
    """`text` with every `<!-- results: NAME -->` ... `<!-- end -->` filled from the results.

    Raises:
        ValueError: a section that no function makes.
    """

    def fill(match: re.Match[str]) -> str:
        if match[1] not in SECTIONS:
            raise ValueError(f"no table is named '{match[1]}'; there are {', '.join(SECTIONS)}")
        return f"<!-- results: {match[1]} -->\n{SECTIONS[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- results: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
