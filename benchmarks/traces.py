"""How are experts used? Records a model's routing, and plots the figures of HybriMoE's Figure 3.

    python benchmarks/traces.py record --out trace.npz     # the bundled model on held-out text; --model, --text for others,
                                                           # --prompt-sets FOLDER for single prompts
    python benchmarks/traces.py plot [--trace trace.npz]   # results/routing.csv and .png

- coverage: the share of all uses that belongs to the n most used experts of a layer (Figure 3a).
- reuse: the chance that the expert of the n-th largest score is used by the next token (3b).
- prefill_load: tokens of each expert in one pass over a prompt of `PROMPT_TOKENS` (3c).
- recall: the share of a layer's experts that its router chooses on the hidden states of 1, 2 and 3 layers before.

The time of an expert by its tokens (3e, 3f) is measured by `expert_times.py` and plotted beside these.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from _prompts import read_sets, sequences
from demo_recipe import TEXT, split_text
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from record import RESULTS, write_rows
from transformers import AutoTokenizer

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path
from moegraft.operators.routing_trace import NO_EXPERT, Trace, mark_experts, record_trace

PROMPT_TOKENS = 512
NAMED_LAYERS = 8
WINDOW = 1024  # tokens that see each other: the demo model's context
Row = dict[str, object]


def held_out() -> str:
    """Return the tenth of the plays that the demo model was not trained on."""
    return split_text(TEXT.read_text(encoding="utf-8"))[1]


def record(model: Path, text: str, tokens: int, skip: int = 0, rules: str = "cpu-exact", source: str = "") -> Trace:
    """Record the routing of `tokens` tokens of `text` after the first `skip`, in windows of `WINDOW`.

    Raises:
        ValueError: the text is too short.
    """
    ids = torch.tensor(AutoTokenizer.from_pretrained(model, model_max_length=len(text) + 1)(text)["input_ids"])
    if len(ids) < skip + tokens:
        raise ValueError(f"the text has {len(ids)} tokens; {skip + tokens} are needed")
    return recorded(model, ids[skip : skip + tokens].split(WINDOW), rules, source or model.name)


def recorded(model: Path, texts: Sequence[torch.Tensor], rules: str, source: str) -> Trace:
    """Record the routing of texts, each (T,) int64 and read from its beginning."""
    tokens = sum(map(len, texts))
    loaded = optimize_and_load(model, rules, progress=False)
    trace = record_trace(loaded, texts, source)
    experts = f"{trace.top_k} of {trace.num_experts} experts"
    print(f"{trace.source}: {tokens} tokens, {trace.num_layers} layers, {experts}, reuse {reuse_share(trace):.3f}", flush=True)
    return trace


def reuse_share(trace: Trace) -> float:
    """Return the share of a token's experts that the token before used as well; K / E where routing has no memory."""
    used = trace.used()
    follows = ~trace.starts[1:]
    repeated = used[1:][follows] & used[:-1][follows]
    return float(repeated.sum() / max(used[1:][follows].sum(), 1))


def recall_share(trace: Trace, depth: int) -> float:
    """Return the share of the used experts that were predicted `depth` layers before (1: the layer before), where one could be."""
    predicted = trace.predicted[depth - 1]
    known = (predicted != NO_EXPERT).any(axis=-1)
    used = trace.used()[known]
    hits = used & mark_experts(predicted, trace.num_experts)[known]
    return float(hits.sum() / max(used.sum(), 1))


def coverage(trace: Trace) -> Iterator[Row]:
    loads = -np.sort(-trace.loads(), axis=1)
    for layer, shares in enumerate(loads.cumsum(axis=1) / loads.sum(axis=1, keepdims=True)):
        for rank, share in enumerate(shares, start=1):
            yield {"measure": "coverage", "layer": layer, "x": rank, "value": round(float(share), 4)}


def reuse(trace: Trace) -> Iterator[Row]:
    follows = ~trace.starts[1:]
    ranked = np.argsort(-trace.scores[:-1][follows], axis=-1, kind="stable")
    again = np.take_along_axis(trace.used()[1:][follows], ranked, axis=-1).mean(axis=0)
    for layer, chances in enumerate(again):
        for rank, chance in enumerate(chances, start=1):
            yield {"measure": "reuse", "layer": layer, "x": rank, "value": round(float(chance), 4)}


def prefill_load(trace: Trace) -> Iterator[Row]:
    for layer, loads in enumerate(trace.part(0, PROMPT_TOKENS).loads()):
        for expert, load in enumerate(loads):
            yield {"measure": "prefill_load", "layer": layer, "x": expert, "value": int(load)}


def recall(trace: Trace) -> Iterator[Row]:
    for depth in range(1, trace.depths + 1):
        yield {"measure": "recall", "layer": "all", "x": depth, "value": round(recall_share(trace, depth), 4)}


def measured(trace: Trace) -> list[Row]:
    rows = [row for measure in (coverage, reuse, prefill_load, recall) for row in measure(trace)]
    return [{"trace": trace.source, "tokens": trace.num_tokens, **row} for row in rows]


def lines(axes: Axes, rows: list[Row], measure: str) -> None:
    """Plot one line per layer and their mean; few layers are named."""
    found = [row for row in rows if row["measure"] == measure]
    layers = list(dict.fromkeys(row["layer"] for row in found))
    values = {layer: [row["value"] for row in found if row["layer"] == layer] for layer in layers}
    places = [row["x"] for row in found if row["layer"] == layers[0]]
    for layer in layers:
        axes.plot(places, values[layer], linewidth=0.8, alpha=0.7, label=f"layer {layer}" if len(layers) <= NAMED_LAYERS else None)
    if measure != "prefill_load":  # experts of equal index in different layers are unrelated
        axes.plot(places, np.mean(list(values.values()), axis=0), color="black", marker="o", markersize=3, linewidth=1.5, label="mean")
    axes.grid(alpha=0.3)


def plot(trace: Trace, rows: list[Row]) -> Path:
    """Plot `results/routing.png`."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    used, repeated, loads, timed = figure.subplots(2, 2).flat
    even = trace.top_k / trace.num_experts
    lines(used, rows, "coverage")
    used.plot([1, trace.num_experts], [1 / trace.num_experts, 1], color="black", linestyle="--", linewidth=0.8, label="even")
    used.set(xlabel="experts, most used first", ylabel="share of uses", title="(a) uses that the most used experts take", ylim=(0, 1))
    lines(repeated, rows, "reuse")
    repeated.axhline(even, color="black", linestyle="--", linewidth=0.8, label="no memory")
    repeated.set(xlabel="rank of its score", ylabel="chance", title="(b) an expert computes for the next token", ylim=(0, None))
    lines(loads, rows, "prefill_load")
    loads.axhline(PROMPT_TOKENS * even, color="black", linestyle="--", linewidth=0.8, label="even")
    loads.set(xlabel="expert", ylabel="tokens", title=f"(c) load of each expert, prompt of {PROMPT_TOKENS}", ylim=(0, None))
    draw_times(timed)
    for axes in (used, repeated, loads):
        axes.legend(fontsize="x-small")
    figure.suptitle(f"Routing of {trace.source}, {trace.num_tokens} tokens, {trace.top_k} of {trace.num_experts} experts per token")
    path = RESULTS / "routing.png"
    figure.savefig(path, dpi=80, pil_kwargs={"optimize": True})
    return path


def draw_times(axes: Axes) -> None:
    """Plot the results of `expert_times.py`, if there are any."""
    path = RESULTS / "expert_times.csv"
    if not path.is_file():
        axes.set_axis_off()
        axes.text(0.5, 0.5, "(e, f) was not measured:\nbenchmarks/expert_times.py", ha="center", va="center")
        return
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for device, varied in dict.fromkeys((row["device"], row["varied"]) for row in rows):
        points = [(int(row[varied]), float(row["p50_ms"])) for row in rows if (row["device"], row["varied"]) == (device, varied)]
        label = "one expert, n tokens" if varied == "load" else "n experts, one token each"
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=f"{device}: {label}")
    title = f"(e, f) an expert of {rows[0]['hidden']} x {rows[0]['intermediate']}"
    axes.set(xlabel="n", ylabel="ms", xscale="log", yscale="log", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording, drawing = (commands.add_parser(name) for name in ("record", "plot"))
    for command in (recording, drawing):
        command.add_argument("--model", type=Path, default=demo_path(), help="a folder; default: the bundled model")
        command.add_argument("--text", type=Path, help="a text file; default: the demo model's held-out text")
        command.add_argument("--prompt-sets", type=Path, help="a folder with chatgpt_prompts.csv, mt_bench.jsonl, vicuna_bench.jsonl")
        command.add_argument("--tokens", type=int, default=8192)
        command.add_argument("--rules", default="cpu-exact", help="rules to load the model with")
    recording.add_argument("--out", type=Path, required=True)
    drawing.add_argument("--trace", type=Path, help="a recorded trace instead of a new one")
    arguments = parser.parse_args()
    if arguments.command == "plot" and arguments.trace is not None:
        trace = Trace.load(arguments.trace)
    elif arguments.prompt_sets is not None:
        sets = read_sets(arguments.prompt_sets)
        texts = sequences(sets, AutoTokenizer.from_pretrained(arguments.model, model_max_length=1 << 20), arguments.tokens)
        trace = recorded(arguments.model, texts, arguments.rules, f"{arguments.model.name}, {' and '.join(sets)}")
    else:
        text = held_out() if arguments.text is None else arguments.text.read_text(encoding="utf-8")
        name = f"{arguments.model.name}, {arguments.text.name if arguments.text else 'held-out plays'}"
        trace = record(arguments.model, text, arguments.tokens, rules=arguments.rules, source=name)
    if arguments.command == "record":
        trace.save(arguments.out)
        return
    rows = measured(trace)
    print(write_rows("routing", rows), plot(trace, rows))


if __name__ == "__main__":
    main()
