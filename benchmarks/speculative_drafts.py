"""What makes a draft token acceptable? The method's observations (SS-MoE, Figure 2) on a checkpoint; by default the bundled one.

    python benchmarks/speculative_drafts.py rounds quality tasks sparsity --text talk=questions.txt --text prose=essay.txt

- rounds (`results/speculative_drafts.csv`, `speculative_confidence.csv`): the model continues held-out text with many draft configurations.
  Columns are acceptance by position and by the draft's confidence, the mean share of the router's weight that the drafting experts have,
  and the share of a verification's experts that the draft's routers had chosen for the same token (`recall`, without the first layer).
- quality (`speculative_quality.csv`): perplexity of held-out text with r experts per token, and the share of the router's weight of the
  first r.
- tasks (`speculative_tasks.csv`): rounds on each given text and on the held-out text. The demo model knows one kind of text; its drafts on
  other texts say little about the tasks.
- sparsity (`speculative_sparsity.csv`): rounds of drafts that leave neurons out, with all experts of a token and with half of them.
  `bytes_share` is the share of the routed experts' bytes that a draft reads: whole gates, and the remaining rows of up and down.
- plot: `speculative_drafts.png` from these files.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from _draft_rounds import Rounds, Way, draft_rounds, load
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from record import RESULTS, write_rows
from speculative import HELD_OUT, PROMPT_TOKENS, TEXT
from transformers import AutoConfig, AutoTokenizer

from moegraft.injection.demo import demo_path
from moegraft.operators.draft import DraftSettings

MAX_DRAFT = 8
RATIOS = (0.125, 0.25, 0.5, 0.75)
TOLERANCE = 0.3
BINS = 10
QUALITY_TOKENS = 256  # tokens per piece
SPARSITIES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
EXPERTS = ("any", "resident")
Row = dict[str, object]


def pieces(model: str | Path, text: str, count: int, tokens: int) -> list[torch.Tensor]:
    """Return `count` evenly spaced pieces of a text, each (1, tokens); fewer if the text is short."""
    ids = AutoTokenizer.from_pretrained(model, model_max_length=len(text) + 1)(text)["input_ids"]
    step = max(tokens, (len(ids) - tokens) // count)
    return [torch.tensor([ids[start : start + tokens]]) for start in range(0, len(ids) - tokens + 1, step)][:count]


def held_out() -> str:
    text = TEXT.read_text(encoding="utf-8")
    return text[int(len(text) * HELD_OUT) :]


def ways(experts: int) -> Iterator[Way]:
    for top_k in range(1, experts):
        for sampled in (False, True):
            yield Way(top_k, sampled=sampled, max_draft=MAX_DRAFT)
        yield Way(top_k, tolerance=TOLERANCE, max_draft=MAX_DRAFT)
    for ratio in RATIOS:
        yield Way(experts, ratio, max_draft=MAX_DRAFT)
        yield Way(experts, ratio, TOLERANCE, max_draft=MAX_DRAFT)


def row_of(way: Way, found: Rounds) -> Row:
    positions = [round(accepted / judged, 3) for accepted, judged in found.acceptance()]
    later = [sum(each) / len(each) for layer, each in found.recall.items() if layer]
    return {
        **way.named(),
        "kept_share": round(found.kept_share, 3),
        "recall": round(sum(later) / len(later), 3),
        "tokens_per_round": round(found.tokens_per_round, 3),
        **{f"position_{at + 1}": positions[at] if at < len(positions) else "" for at in range(MAX_DRAFT)},
        "rounds": len(found.rounds),
    }


def rows_by_confidence(way: Way, found: Rounds) -> Iterator[Row]:
    judged = found.judged()
    for number in range(BINS):
        stood = [each for confidence, each in judged if min(int(confidence * BINS), BINS - 1) == number]
        bounds = {"confidence_from": number / BINS, "confidence_to": (number + 1) / BINS}
        yield {**way.named(), "kept_share": round(found.kept_share, 3), **bounds, "judged": len(stood), "accepted": sum(stood)}


def rounds(model: str | Path, prompts: Sequence[torch.Tensor], new_tokens: int, experts: Sequence[str]) -> tuple[list[Row], list[Row]]:
    by_way: list[Row] = []
    by_confidence: list[Row] = []
    for way in (each for each in ways(AutoConfig.from_pretrained(model).num_experts_per_tok) if each.experts in experts):
        found = draft_rounds(model, way, prompts, new_tokens)
        by_way.append(row_of(way, found))
        by_confidence += rows_by_confidence(way, found)
        print(by_way[-1], flush=True)
    return by_way, by_confidence


def sparsity(model: str | Path, prompts: Sequence[torch.Tensor], new_tokens: int) -> list[Row]:
    experts = AutoConfig.from_pretrained(model).num_experts_per_tok
    rows: list[Row] = []
    for top_k in dict.fromkeys((experts, max(1, experts // 2))):
        for share in SPARSITIES:
            for sampled in (False, True):
                way = Way(top_k, sampled=sampled, max_draft=MAX_DRAFT, sparsity=share)
                found = draft_rounds(model, way, prompts, new_tokens)
                left_out = sum(found.left_out) / len(found.left_out)
                bytes_share = round(top_k / experts * (1 + 2 * (1 - left_out)) / 3, 3)
                rows.append({"draft_sparsity": share, "left_out": round(left_out, 3), "bytes_share": bytes_share, **row_of(way, found)})
                print(rows[-1], flush=True)
    return rows


@torch.inference_mode()
def quality(model: str | Path, texts: Sequence[torch.Tensor]) -> list[Row]:
    """Return perplexity and kept weight by number of experts per token."""
    loaded = load(model, "version: 1\nextends: cpu-exact\n")
    switch = loaded.moegraft.context.draft_switch
    shares: list[torch.Tensor] = []
    operators = list(loaded.moegraft.operators.values())
    hooks = [each.register_forward_pre_hook(lambda module, args: shares.append(_cumulative(args[2]))) for each in operators]
    rows: list[Row] = []
    for top_k in range(1, AutoConfig.from_pretrained(model).num_experts_per_tok + 1):
        shares.clear()
        with switch.drafting(DraftSettings(top_k)):
            losses = [float(loaded(ids, labels=ids).loss) for ids in texts]
        mean = torch.stack(shares).mean(0)
        rows.append(
            {
                "experts": top_k,
                "perplexity": round(math.exp(sum(losses) / len(losses)), 3),
                "weight_share": round(float(mean[top_k - 1]), 4),
                "tokens": sum(ids.numel() for ids in texts),
            }
        )
        print(rows[-1], flush=True)
    for hook in hooks:
        hook.remove()
    return rows


def _cumulative(top_k_weights: torch.Tensor) -> torch.Tensor:
    """Return the mean share of the first r experts, (K,)."""
    ordered = top_k_weights.float().sort(-1, descending=True).values
    return (ordered.cumsum(-1) / ordered.sum(-1, keepdim=True)).mean(0)


def tasks(model: str | Path, texts: dict[str, str], count: int, new_tokens: int) -> list[Row]:
    top_k = max(1, AutoConfig.from_pretrained(model).num_experts_per_tok // 2)
    rows: list[Row] = []
    for name, text in texts.items():
        for way in (Way(top_k, max_draft=MAX_DRAFT), Way(top_k, tolerance=TOLERANCE, max_draft=MAX_DRAFT)):
            found = draft_rounds(model, way, pieces(model, text, count, PROMPT_TOKENS), new_tokens)
            rows.append({"text": name, **row_of(way, found)})
            print(rows[-1], flush=True)
    return rows


def read(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def label(row: dict[str, str]) -> str:
    who = f"{row['experts']}, {row['resident_ratio']}" if row["resident_ratio"] else f"{row['draft_top_k']} experts"
    return f"{who}{', adaptive' if float(row['tolerance']) else ''}"


def draw_positions(axes: Axes, rows: list[dict[str, str]]) -> None:
    for row in rows:
        if row["decoding"] == "greedy":
            shares = [float(row[f"position_{at + 1}"] or "nan") for at in range(MAX_DRAFT)]
            style = ("--" if float(row["tolerance"]) else "-") + ("s" if row["resident_ratio"] else "o")
            axes.plot(range(1, MAX_DRAFT + 1), shares, style, markersize=3, linewidth=1, label=label(row))
    axes.set(title="Drafted tokens that stand, by position (greedy)", xlabel="position in the draft", ylim=(0, 1.02))
    axes.legend(fontsize=5, ncol=2)


def draw_confidence(axes: Axes, rows: list[dict[str, str]]) -> None:
    for row in {label(row): row for row in rows}.values():
        mine = [each for each in rows if label(each) == label(row) and each["decoding"] == "greedy" and int(each["judged"]) >= 10]
        x = [(float(each["confidence_from"]) + float(each["confidence_to"])) / 2 for each in mine]
        if not float(row["tolerance"]):
            axes.plot(x, [int(each["accepted"]) / int(each["judged"]) for each in mine], "-o", markersize=3, label=label(row))
    axes.set(title="... by the draft's confidence", xlabel="q of the drafted token", ylim=(0, 1.02))
    axes.legend(fontsize=6)


def draw_quality(axes: Axes, rows: list[dict[str, str]]) -> None:
    experts = [int(row["experts"]) for row in rows]
    axes.plot(experts, [float(row["perplexity"]) for row in rows], "-o", color="tab:red")
    axes.set(title="Quality and router weight by experts per token", xlabel="experts per token, r", xticks=experts)
    axes.set_ylabel("perplexity of held-out text", color="tab:red")
    right = axes.twinx()
    right.plot(experts, [float(row["weight_share"]) for row in rows], "-s", color="tab:blue")
    right.set_ylabel("share of the router's weight", color="tab:blue")
    right.set_ylim(0, 1.02)


def draw_tasks(axes: Axes, rows: list[dict[str, str]]) -> None:
    names = list(dict.fromkeys(row["text"] for row in rows))
    for shift, tolerance in ((-0.2, 0.0), (0.2, TOLERANCE)):
        mine = [row for row in rows if float(row["tolerance"]) == tolerance]
        bars = [float(row["tokens_per_round"]) for row in mine]
        axes.bar([names.index(row["text"]) + shift for row in mine], bars, 0.38, label=f"tolerance {tolerance}")
    axes.set(title=f"Tokens a round of {MAX_DRAFT} drafted, by text", xticks=range(len(names)), xticklabels=names)
    axes.legend(fontsize=7)


def draw_sparsity(axes: Axes, rows: list[dict[str, str]], by_experts: list[dict[str, str]]) -> None:
    """Plot drafts that leave neurons out beside drafts of fewer experts, by the share of bytes read."""
    for top_k in dict.fromkeys(row["draft_top_k"] for row in rows):
        mine = [row for row in rows if row["draft_top_k"] == top_k and row["decoding"] == "greedy"]
        x = [float(row["bytes_share"]) for row in mine]
        axes.plot(x, [float(row["tokens_per_round"]) for row in mine], "-o", markersize=3, label=f"{top_k} experts, neurons left out")
        for row, at in zip(mine, x, strict=True):
            axes.annotate(row["draft_sparsity"], (at, float(row["tokens_per_round"])), fontsize=6)
    whole = max(int(row["draft_top_k"]) for row in rows)
    fewer = [row for row in by_experts if row["experts"] == "any" and row["decoding"] == "greedy" and not float(row["tolerance"])]
    x = [int(row["draft_top_k"]) / whole for row in fewer]
    axes.plot(x, [float(row["tokens_per_round"]) for row in fewer], "-s", markersize=4, label="fewer experts, whole")
    axes.set(title=f"Tokens a round of {MAX_DRAFT} drafted (greedy), by what a draft reads", xlabel="share of the experts' bytes")
    axes.legend(fontsize=7)


def draw_resident(axes: Axes, rows: list[dict[str, str]]) -> None:
    mine = [row for row in rows if row["resident_ratio"]]
    for tolerance in dict.fromkeys(row["tolerance"] for row in mine):
        line = [row for row in mine if row["tolerance"] == tolerance]
        x, y = ([float(row[column]) for row in line] for column in ("resident_ratio", "tokens_per_round"))
        axes.plot(x, y, "-o", markersize=4, label="adaptive" if float(tolerance) else "lossless")
    axes.set(title=f"Tokens a round of {MAX_DRAFT} drafted (greedy)", xlabel="share of experts with a slot, which alone draft")
    axes.legend(fontsize=7)


def plot(path: Path = RESULTS / "speculative_drafts.png") -> Path:
    figure = Figure(figsize=(17, 8.5), layout="constrained")
    (positions, confidence, sparse), (good, kinds, resident) = figure.subplots(2, 3)
    ways = read("speculative_drafts")
    draw_positions(positions, ways)
    draw_confidence(confidence, read("speculative_confidence"))
    draw_quality(good, read("speculative_quality"))
    draw_tasks(kinds, read("speculative_tasks"))
    draw_sparsity(sparse, read("speculative_sparsity"), ways)
    draw_resident(resident, ways)
    figure.savefig(path, dpi=110)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("rounds", "quality", "tasks", "sparsity", "plot"))
    parser.add_argument("--model", default=str(demo_path()))
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILE", help="a text for tasks; may be repeated")
    parser.add_argument("--experts", nargs="+", default=EXPERTS, choices=EXPERTS, help="values for rounds; rows of other values are kept")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if "rounds" in arguments.parts:
        prompts = pieces(arguments.model, held_out(), arguments.prompts, PROMPT_TOKENS)
        found = rounds(arguments.model, prompts, arguments.new_tokens, arguments.experts)
        for name, rows in zip(("speculative_drafts", "speculative_confidence"), found, strict=True):
            kept = [row for row in read(name) if row["experts"] not in arguments.experts] if len(arguments.experts) < len(EXPERTS) else []
            print(write_rows(name, [*kept, *rows]))
    if "quality" in arguments.parts:
        texts = pieces(arguments.model, held_out(), 2 * arguments.prompts, QUALITY_TOKENS)
        print(write_rows("speculative_quality", quality(arguments.model, texts)))
    if "sparsity" in arguments.parts:
        prompts = pieces(arguments.model, held_out(), arguments.prompts, PROMPT_TOKENS)
        print(write_rows("speculative_sparsity", sparsity(arguments.model, prompts, arguments.new_tokens)))
    if "tasks" in arguments.parts:
        named = {"held out": held_out()} | {
            name: Path(path).read_text(encoding="utf-8") for name, _, path in (each.partition("=") for each in arguments.text)
        }
        rows = tasks(arguments.model, named, arguments.prompts, arguments.new_tokens)
        print(write_rows("speculative_tasks", rows))
    if "plot" in arguments.parts:
        print(plot())


if __name__ == "__main__":
    main()
