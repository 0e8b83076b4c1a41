"""Generate the tables of the documentation from the committed results. Run this after a benchmark; a test compares the pages with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from harness.record import ROOT
from harness.record import read_rows as read

PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
Row = dict[str, str]
Columns = Mapping[str, str | Callable[[Row], str]]
SECTIONS: dict[str, Callable[[], str]] = {}


def section(generate: Callable[[], str]) -> Callable[[], str]:
    """Register a function that returns the text of the section of its name."""
    SECTIONS[generate.__name__] = generate
    return generate


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def listed(rows: Iterable[Row], columns: Columns) -> str:
    """Return a table with a line for each row: columns by their titles, each a column of the results or what computes a cell."""
    return table(list(columns), ([(row[of] or "-") if isinstance(of, str) else of(row) for of in columns.values()] for row in rows))


def fixed(column: str, digits: int) -> Callable[[Row], str]:
    return lambda row: f"{float(row[column]):.{digits}f}" if row[column] else "-"


def percent(column: str, digits: int = 0) -> Callable[[Row], str]:
    return lambda row: f"{float(row[column]):.{digits}%}" if row[column] else "-"


def provenance(rows: Iterable[Row]) -> str:
    """Return each machine, commit and versions once."""
    return " ".join(dict.fromkeys(f"{row['hardware']}, commit {row['commit']}, {row['versions'].replace(' ', ', ')}." for row in rows))


STARTS = {
    "safetensors": "moegraft, from safetensors",
    "packing": "moegraft, from safetensors, keeping the packed experts",
    "packed": "moegraft, from the experts that were kept",
    "gguf": "moegraft, from GGUF",
    "llama.cpp": "llama.cpp, from GGUF",
}
SYSTEMS = {"frames": "**moegraft**, `memory: auto`", "mapped": "moegraft, the mapped file", "llama.cpp": "llama.cpp, the mapped file"}
# Tables with a line for each row of the results of their name.
TABLES: dict[str, Columns] = {
    "cpu_model": {
        **{"layers of": lambda row: f"{row['layers']} of {row['model']}", "weights": "weights", "phase": "phase", "beside": "beside"},
        **{"moegraft, tokens/s": lambda row: row.get("failure") or row["ours_tokens_s"], "peer, tokens/s": "peer_tokens_s"},
        **{"ratio, median": "ratio", "p20": "p20_ratio", "p80": "p80_ratio", "of the limit": "of_limit"},
    },
    "demo_speed": {
        **{"": "provider", "phase": "phase", "tokens/s, median": "p50_tokens_s", "p20": "p20_tokens_s", "p80": "p80_tokens_s"},
    },
    "loading": {
        **{"": lambda row: STARTS[row["provider"]], "page cache": "page_cache", "reads, GB": "read_gb"},
        **{"s to the first token": "p50_first_token_s", "importing": "import_s", "loading": "load_s", "prompt": "prompt_s"},
        **{"reading alone": "read_s", "CPU seconds": "cpu_s", "others": percent("others_share")},
    },
    "larger_than_memory": {
        **{"memory": lambda row: f"{row['limit_gib']} GiB", "": lambda row: SYSTEMS[row["system"]], "phase": "phase"},
        **{"tokens/s": "tokens_s", "times as fast": "frames_times", "experts in memory when used": percent("resident")},
        **{"GB read per token": "read_gb_per_token", "bound by that, tokens/s": "bound_tokens_s"},
        **{"GB/s while waiting": "wait_gbps", "GB/s of the disk": "disk_gbps"},
    },
    "training": {
        **{"": "provider", "weights": "weights", "ms, forward": "forward_ms", "backward": "backward_ms"},
        **{"tokens/s": "tokens_s", "ratio": "ratio", "weights, GB": "weight_gb"},
    },
    "training_model": {
        **{"": "provider", "beside": "base", "s, a step": "p50_s", "tokens/s": "tokens_s", "ratio": "ratio"},
        **{"GiB, loaded": "loaded_gib", "peak": "peak_gib", "loss": "loss"},
    },
    "kv_cache": {
        **{"backend": lambda row: row["backend"] if row["backend"] == "exact" else f"`{row['backend']}`", "bits": "bits"},
        **{"cache": percent("cache_share"), "KL, nats per token": fixed("kl_nats", 4)},
        **{"same next token": percent("same_token", 1), "perplexity": fixed("perplexity", 2)},
    },
    "speculative_mtp": {
        **{"text": "decoding", **{f"position {at}": percent(f"position_{at}", 1) for at in range(1, 5)}},
        **{"tokens per round": "tokens_per_round", "rounds": "rounds"},
    },
}


def generated(name: str) -> str:
    """Return the text of a section."""
    if name in SECTIONS:
        return SECTIONS[name]()
    rows = read(name)
    return f"{listed(rows, TABLES[name])}\n\n{provenance(rows)}"


def default_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of `cpu_experts.py` for transformers and for moegraft's default instruction set of each weight type.

    The default is the first instruction set that is measured for a weight type; its name depends on the machine.
    """
    defaults: dict[str, str] = {}
    found = []
    for row in rows:
        ours = row["provider"].startswith("ours")
        if not ours or defaults.setdefault(row["weights"], row["provider"]) == row["provider"]:
            found.append({**row, "provider": "moegraft", "isa": row["provider"].removeprefix("ours-")} if ours else row)
    return found


@section
def cpu_experts() -> str:
    """Return milliseconds per layer by number of tokens, for moegraft and transformers."""
    rows = default_rows(read("cpu_experts"))
    tokens = sorted({row["tokens"] for row in rows}, key=int)
    found = {(row["provider"], row["weights"], row["tokens"]): row for row in rows}
    body = []
    for provider, weights in dict.fromkeys((row["provider"], row["weights"]) for row in rows):
        cells = [found.get((provider, weights, count)) for count in tokens]
        figures = [f"{float(cell['p50_ms']):.2f}" if cell else "-" for cell in cells]
        body.append([provider.replace("moegraft", "**moegraft**"), weights, *figures])
    read_share = [float(row["read_share"]) for row in rows if (row["provider"], row["tokens"]) == ("moegraft", "1")]
    widest = found["moegraft", "bfloat16", tokens[-1]]
    return (
        "One layer of Qwen3-30B-A3B's shapes (H 2048, I 768, 128 experts, 8 per token), milliseconds, medians, "
        f"{rows[0]['threads']} threads:\n\n{table(['', 'weights', *(f'T={count}' for count in tokens)], body)}\n\n"
        f"Decode (T=1) reads its weights at {min(read_share):.0%} to {max(read_share):.0%} of the bandwidth that a probe of reading has "
        f"between the rounds, and T={tokens[-1]} in bfloat16 at {float(widest['read_share']):.0%} of {widest['read_probe_gb_s']} GB/s. "
        f"Kernels of `{widest['isa']}`. {provenance(rows)}"
    )


@section
def cpu_formats() -> str:
    """Return how far each type of a file is from the machine's limit and from the best peer, by tokens at once."""
    rows = read("cpu_formats")
    phases = {"decode after 8": "1 token", "prompt of 8": "8 tokens", "prompt of 512": "512 tokens"}
    body = []
    for weights in dict.fromkeys(row["weights"] for row in rows):
        cells = [weights]
        for phase in phases:
            found = [row for row in rows if (row["weights"], row["phase"]) == (weights, phase) and row["ratio"]]
            best = min(found, key=lambda row: float(row["ratio"]), default=None)
            cells.append("-" if best is None else f"{best['of_limit']}; {best['ratio']} {best['beside']}")
        body.append(cells)
    return f"{table(['experts', *phases.values()], body)}\n\n{provenance(rows)}"


@section
def kt_kernel() -> str:
    """Return milliseconds per layer beside KTransformers' kernel at its better thread count, by tokens per call."""
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
    return f"{table(['', *(f'T={count}' for count in tokens)], body)}\n\n{provenance(rows)}"


@section
def speeds() -> str:
    """Return the README's table of speeds, from runs that are interleaved with each peer."""
    layer, formats = read("kt_kernel"), ("int4", "int8", "bfloat16")
    models = [row for row in read("cpu_model") if (row["model"], row["layers"]) == ("qwen3-30b-a3b", "6")]
    machine = [row["hardware"] for row in models if row["phase"] == "decode after 8"][-1]  # of the latest run
    models = [row for row in models if row["hardware"] == machine]
    found = {(row["beside"], row["weights"], row["phase"]): row for row in models}

    def fastest_ms(provider: str, weights: str, tokens: str) -> str:
        wanted = (provider, weights, tokens)
        found = [float(row["p50_ms"]) for row in layer if (row["provider"], row["weights"], row["tokens"]) == wanted]
        return f"{min(found):.2f}" if found else "-"

    def rates(weights: str, phase: str, *peers: str) -> str:
        """Return moegraft's rate beside the first peer, and its ratios to the peers', of ik_llama.cpp in the faster order of weights."""
        ratios = []
        for peer in peers:
            rows = [found[name, weights, phase] for name in (peer, f"{peer}-rtr") if (name, weights, phase) in found]
            if rows:
                ratios.append(f"{min(float(row['ratio']) for row in rows):.2f}")
        return f"{float(found[peers[0], weights, phase]['ours_tokens_s']):.0f}; {' / '.join(ratios)}"

    body = [
        *(
            [
                f"decode after {tokens} tokens, tokens/s; times llama.cpp's / ik_llama.cpp's",
                *(rates(each, f"decode after {tokens}", "llama.cpp", "ik_llama.cpp") for each in formats),
            ]
            for tokens in (8, 2048)
        ),
        [
            "prompt of 512, tokens/s; times llama.cpp's / ik_llama.cpp's / transformers'",
            *(rates(each, "prompt of 512", "llama.cpp", "ik_llama.cpp", "stock") for each in formats),
        ],
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
        f"Models: {provenance(models)} Layers: {provenance(layer)}"
    )


HYBRID_SYSTEMS = {
    "all_cpu": "all experts on the CPU",
    "layer_map": "whole layers on one device",
    "fixed": "a fixed map of hot experts",
    "on_demand+next_layer": "loading on demand, next layer prefetched",
    "all": "**moegraft**",
    "bound": "bound: with the choices of later layers known",
}


@section
def hybrid_modelled() -> str:
    """Return decode rates by share of the experts that have a slot, and the time to the first token of one prompt length."""
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
    head = ["", *(f"{model}, tokens/s" for model in models), f"s to the first token, 512 tokens, {float(ratios[0]):.0%}"]
    return f"{table(head, body)}\n\n{provenance(rows)}"


@section
def build_time() -> str:
    """Return the CPU seconds of full builds beside an earlier commit's, and of each unit."""
    rows = read("build_time")
    builds, units = ([row for row in rows if bool(row["of_base"]) == whole] for whole in (True, False))
    share = f"{builds[1]['of_base']} of those of commit {builds[0]['commit']} ({builds[1]['cpu_s']} and {builds[0]['cpu_s']})"
    return (
        f"A full build takes {share}: medians of {rows[0]['rounds']} alternating builds with {rows[0]['compiler']}, compiler and linker "
        f"together. By unit:\n\n{listed(units, {'unit': 'unit', 'CPU seconds': 'cpu_s'})}\n\n{provenance(units)}"
    )


GPU_SYSTEMS = {
    "stock": "stock transformers, all experts in bfloat16 on the GPU",
    "fixed": "a fixed map, layer by layer",
    "fixed, captured": "a fixed map, captured steps",
    "all": "**moegraft**, layer by layer",
    "all, captured": "**moegraft**, captured steps",
}


@section
def cache_candidates() -> str:
    """Return the hit rates of policies and sources of predictions at 10, 25 and 50 % of the slots."""
    rows = read("cache_candidates")
    hits: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        asked = row["policy"], "-" if row["lookahead"] == "0" else row["source"]
        hits.setdefault((*asked, row["trace"], row["scope"]), []).append(fixed("hit_percent", 1)(row))
    places = list(dict.fromkeys((row["trace"], row["scope"]) for row in rows))
    shown = [asked for asked in dict.fromkeys(key[:2] for key in hits) if asked[1] != "-" or "score" in asked[0]]
    body = [[*asked, *(" / ".join(hits.get((*asked, *place), ["-"])) for place in places)] for asked in shown]
    names = {"layer": "of each layer", "global": "shared"}
    titles = (f"{trace.split(', ')[-1]}, slots {names[scope]}" for trace, scope in places)
    return table(["policy", "source of predictions", *titles], body) + f"\n\n{provenance(rows)}"


@section
def gpu_models() -> str:
    """Return decode rates and the times to the first token on a GPU, by machine, system and share of the experts that have a slot."""
    rows = [row for row in read("gpu_models") if row["system"] in GPU_SYSTEMS and row["case"].startswith("qwen3-30b-a3b")]
    places = dict.fromkeys(
        (row["call"], row["commit"], row["launch_us"], row["weights"], row["cache_ratio"], row["system"]) for row in rows
    )
    found = {(row["call"], row["case"], row["measured"], row["prompt_tokens"]): f"{float(row['p50_ms']):.1f}" for row in rows}
    cases = {(row["call"], row["weights"], row["cache_ratio"], row["system"]): row["case"] for row in rows}
    prompts = sorted({row["prompt_tokens"] for row in rows}, key=int)
    body = []
    for call, commit, launch_us, weights, ratio, system in places:
        case = cases[call, weights, ratio, system]
        times = [found[call, case, "next token", prompts[0]], *(found.get((call, case, "first token", each), "-") for each in prompts)]
        body.append([commit, launch_us, GPU_SYSTEMS[system], "-" if system == "stock" else f"{float(ratio):.0%}", *times])
    head = ["commit", "a launch, us", "", "in slots", "next token, ms", *(f"first token after {each}, ms" for each in prompts)]
    return f"{table(head, body)}\n\n{provenance(rows)}"


@section
def gpu_kernels() -> str:
    """Return one layer's times on a GPU by weight type and batch, and what they are of the time that its bytes or operations take."""
    rows = [row for row in read("gpu_kernels") if row["layout"] == "dense"]
    tokens = sorted({int(row["tokens"]) for row in rows})
    best: dict[tuple[str, int], Row] = {}
    for row in rows:
        place = f"{row['weights']}{', grouped_mm' if row['path'] == 'grouped_mm' else ''}", int(row["tokens"])
        if place not in best or float(row["p50_ms"]) < float(best[place]["p50_ms"]):
            best[place] = row
    body = []
    for name in dict.fromkeys(name for name, _ in best):
        cells = (best.get((name, count)) for count in tokens)
        body.append(
            [name, *("-" if row is None else f"{1e3 * float(row['p50_ms']):.0f} ({float(row['floor_share']):.0%})" for row in cells)]
        )
    return f"{table(['', *map(str, tokens)], body)}\n\n{provenance(rows)}"


@section
def serve() -> str:
    """Return the load of both servers, and a short prompt beside a long one."""
    rows = read("serve")
    by_case = {(row["case"], row["server"], row["clients"], row["prompt"]): row for row in rows}
    loads = [row for row in rows if row["case"] == "load" and row["server"] == "moegraft"]
    order = {"32": 0, "2048": 1, "mixed": 2}
    body = []
    for ours in sorted(loads, key=lambda row: (int(row["clients"]), order[row["prompt"]])):
        theirs = by_case.get(("load", "llama.cpp", ours["clients"], ours["prompt"]), dict.fromkeys(ours, ""))

        def pair(column: str, ours: Row = ours, theirs: Row = theirs) -> str:
            return f"{ours[column] or '-'} / {theirs[column] or '-'}"

        def ratio(column: str, ours: Row = ours, theirs: Row = theirs) -> str:
            return f"{float(ours[column]) / float(theirs[column]):.2f}" if float(theirs[column] or 0) else "-"

        others = max(float(row["others_share"]) for row in (ours, theirs) if row["others_share"])
        latencies = map(pair, ("p50_first_ms", "p99_first_ms", "p50_between_ms", "p99_between_ms"))
        rates = [entry for column in ("tokens_s", "tokens_per_cpu_s") for entry in (pair(column), ratio(column))]
        body.append([ours["clients"], ours["prompt"], *rates, *latencies, f"{others:.0%}"])
    head = ["clients", "prompt", "tokens/s", "ratio", "tokens per CPU second", "ratio"]
    head += ["first token, ms, median", "p99", "between tokens, ms, median", "p99", "others"]
    counts = "1 thread" if loads[0]["threads"] == "1" else f"{loads[0]['threads']} threads"
    parts = [
        f"Six layers of Qwen3-30B-A3B's shapes in Q8_0 from one file, {counts}, answers of {loads[0]['new_tokens']} tokens, clients on "
        "the same cores, moegraft / llama.cpp. Rates include prompts, which count when their first token arrives. Prompts differ and "
        "nothing is kept, so that no prefix cache decides. `others` is the share of the cores that other processes used: where it is "
        "large, compare the tokens per second of the servers' own CPU time.",
        table(head, body),
    ]
    for row in (row for row in rows if row["server"] == "batch-invariant"):
        own = by_case["invariant", "moegraft", row["clients"], row["prompt"]]
        parts.append(
            f"With `--batch-invariant`, prompts of {row['prompt']} tokens, clients: {row['clients']}: {row['tokens_s']} tokens/s instead "
            f"of {own['tokens_s']} ({row['rounds']} round of {float(row['round_s']):.0f} s each)."
        )
    for theirs in (row for row in rows if row["server"] == "transformers"):
        own = by_case["transformers", "moegraft", theirs["clients"], theirs["prompt"]]
        between = [row["p99_between_ms"] for row in (own, theirs)]
        parts.append(
            f"Beside `transformers serve --continuous-batching`, both from one checkpoint in bfloat16, prompts of {own['prompt']} tokens, "
            f"clients: {own['clients']}: {own['tokens_s']} tokens/s and {theirs['tokens_s']}, and {between[0]} ms between two tokens and "
            f"{between[1]} (99th percentile; `others` {max(float(row['others_share']) for row in (own, theirs)):.0%})."
        )
    restarts = {row["prompt"].split()[-1]: row for row in rows if row["case"] == "restart"}
    disk, (computed, stored, known) = restarts["disk"], (restarts[way]["p50_first_ms"] for way in ("computed", "disk", "memory"))
    parts.append(
        f"The first token of a prompt of {disk['prompt'].split()[0]} tokens comes after {computed} ms where it is computed, after {stored} "
        f"ms where a server before has stored it in `--prefix-cache-dir` ({disk['stored_mib']} MiB; {float(disk['ratio']):.1%} of that "
        f"time), and after {known} ms where it is in memory (`--restart`)."
    )
    return "\n\n".join([*parts, provenance(rows)])


@section
def sparse_cpu() -> str:
    """Return the speed over the dense layout by share of neurons left out."""
    rows = read("sparse_cpu")
    found = {(row["provider"], row["phase"]): row for row in rows}
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    weights = ("int8", "bfloat16")
    shares = [row["provider"].removeprefix("int8-sparse-") for row in rows if row["provider"].startswith("int8-sparse-")]
    body = []
    for share in dict.fromkeys(shares):
        speed = [f"{float(found[f'{kind}-sparse-{share}', phase]['against_dense']):.2f}" for kind in weights for phase in phases]
        body.append([share, *speed])
    head = ["neurons left out", *(f"{kind}, {phase}" for kind in weights for phase in phases)]
    return f"{table(head, body)}\n\n{provenance(rows)}"


@section
def format_quality() -> str:
    """Return the cost of each format of files, with an importance matrix, without one, and by llama.cpp's quantiser."""
    rows = read("format_quality")
    found = {(row["provider"], row["types"]): row for row in rows}
    theirs = ", llama.cpp's quantiser"
    names = {"moegraft": "", "llama.cpp": theirs, "moegraft, no imatrix": ", no imatrix", "llama.cpp, no imatrix": f"{theirs}, no imatrix"}
    names = {provider: name for provider, name in names.items() if any(row["provider"] == provider for row in rows)}
    body = []
    for types in dict.fromkeys(row["types"] for row in rows):
        own = found["moegraft", types]
        costs = [f"{float(row['kl_nats']):.4f}" if (row := found.get((provider, types))) else "-" for provider in names]
        body.append([types, own["bytes_per_weight"], f"{float(own['perplexity']):.2f}", f"{float(own['same_next_token']):.1%}", *costs])
    head = ["types", "bytes per weight", "perplexity", "same next token", *(f"KL, nats{name}" for name in names.values())]
    return f"{table(head, body)}\n\n{provenance(rows)}"


def rendered(text: str) -> str:
    """Return `text` with every `<!-- results: NAME -->` ... `<!-- end -->` filled from the results.

    Raises:
        ValueError: no function generates a section.
    """

    def fill(match: re.Match[str]) -> str:
        if match[1] not in {**SECTIONS, **TABLES}:
            raise ValueError(f"no table is named '{match[1]}'; expected one of {', '.join([*SECTIONS, *TABLES])}")
        return f"<!-- results: {match[1]} -->\n{generated(match[1])}\n<!-- end -->"

    return re.sub(r"<!-- results: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
