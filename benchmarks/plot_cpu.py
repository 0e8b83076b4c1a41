"""Plots of the CPU results: a layer on its roofline, a whole model beside its peers, and the parts of a decode step."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from readme_tables import RESULTS, default_rows, read

MARKS = {"int4": "o", "int8": "s", "bfloat16": "^"}


def roofline(axes: plt.Axes) -> None:
    """Plot arithmetic by intensity (operations per byte of weights) under the limits of the read probe and the GEMM probe."""
    rows = [row for row in default_rows(read("cpu_experts")) if row["weights"] in MARKS]
    read_gb_s, gemm_gop_s = (max(float(row[column]) for row in rows) for column in ("read_probe_gb_s", "gemm_probe_gop_s"))
    span = [0.5, 2000.0]
    axes.plot(span, [min(read_gb_s * x, gemm_gop_s) for x in span], alpha=0)  # sets the limits
    knee = gemm_gop_s / read_gb_s
    axes.plot([span[0], knee, span[1]], [span[0] * read_gb_s, gemm_gop_s, gemm_gop_s], color="black", lw=1)
    for row in rows:
        gop_s, gb_s = float(row["gop_s"]), float(row["gb_s"])
        colour = "tab:blue" if row["provider"] == "moegraft" else "tab:orange"
        axes.plot(gop_s / gb_s, gop_s, MARKS[row["weights"]], color=colour)
        axes.annotate(f"T={row['tokens']}", (gop_s / gb_s, gop_s), fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of weights", ylabel="Gop/s", title="one MoE layer on the roofline")
    for weights, mark in MARKS.items():
        axes.plot([], [], mark, color="grey", label=weights)
    axes.plot([], [], "-", color="tab:blue", label="moegraft")
    axes.plot([], [], "-", color="tab:orange", label="transformers")
    axes.legend(fontsize=7)


def whole_model(axes: plt.Axes) -> None:
    rows = [row for row in read("cpu_model") if row["phase"] == "decode"]
    rates = [float(row["p50_tokens_s"]) for row in rows]
    errors = [[rate - float(row["p20_tokens_s"]) for rate, row in zip(rates, rows, strict=True)]]
    errors.append([float(row["p80_tokens_s"]) - rate for rate, row in zip(rates, rows, strict=True)])
    axes.barh([row["provider"] for row in rows], rates, xerr=errors)
    axes.invert_yaxis()
    axes.set(xlabel="tokens/s, median, p20 to p80", title="decode, 6 layers of Qwen3-30B-A3B")


def profile(axes: plt.Axes) -> None:
    rows = [row for row in read("decode_profile") if not row["part"].startswith("profiled") and row["part"] != "a token"]
    bars = list(dict.fromkeys((row["provider"], row["threads"]) for row in rows))
    left = [0.0] * len(bars)
    for part in dict.fromkeys(row["part"] for row in rows):
        values = [
            sum(float(row["ms_per_token"]) for row in rows if (row["provider"], row["threads"]) == bar and row["part"] == part)
            for bar in bars
        ]
        axes.barh([f"{provider}, {threads} threads" for provider, threads in bars], values, left=left, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="ms per token", title="time of a decode step")
    axes.legend(fontsize=7)


PLOTS: dict[str, tuple[str, Callable[[plt.Axes], None]]] = {
    "cpu_experts": ("cpu_roofline", roofline),
    "cpu_model": ("cpu_model", whole_model),
    "decode_profile": ("decode_profile", profile),
}


def main() -> None:
    for results, (name, draw) in PLOTS.items():
        rows = read(results)
        if not rows:
            continue
        figure, axes = plt.subplots(figsize=(8, 5))
        draw(axes)
        figure.text(0.01, 0.005, f"{rows[0]['hardware']}, commit {rows[0]['commit']}", fontsize=6)
        figure.tight_layout()
        figure.savefig(RESULTS / f"{name}.png", dpi=90)
        print(RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
