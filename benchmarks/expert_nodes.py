"""How fast would a model be whose experts are spread over 1 to 8 machines like this one? Modelled decode and prompts, with a plot.

What is measured here: the rates of the kernels (`moegraft doctor --measure`, run first) and, in the constants of
`injection/estimate/forecast.py`, what messages between processes of one machine cost. What is assumed: a cable adds 50 us to each layer;
all replies share rank 0's link at its full bandwidth; experts are chosen evenly; every machine has the memory for its share. Nothing else
of a network was measured.
"""

from __future__ import annotations

import tempfile

from harness.models import config_of, cpu_rules, rule_file
from harness.plots import panels, save
from harness.record import Recorder, parser

from moegraft.injection import plan, read_rules
from moegraft.injection.api import build_meta_model
from moegraft.injection.estimate import measure as store
from moegraft.injection.estimate.forecast import TargetMachine, divided_forecast
from moegraft.injection.estimate.memory import Workload
from moegraft.operators.registry import load_registry

NODES = (1, 2, 4, 8)
GBIT = (10.0, 100.0)
CONTEXT, PROMPT = 4096, 512
MEMORY = 1 << 40  # more than any share
MODELS = {
    "Qwen3-30B-A3B": {"layers": 48},
    "Qwen3-235B-A22B": {"layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 1536},
}


def main() -> None:
    given = parser(__doc__).parse_args()
    measured = store.load()
    if measured is None:
        raise SystemExit("this machine's rates are not measured; run: moegraft doctor --measure")
    target = TargetMachine(MEMORY, measured)
    registry = load_registry()
    rows = Recorder("expert_nodes", write=given.write)
    for name, sizes in MODELS.items():
        with tempfile.TemporaryDirectory() as folder, rule_file(cpu_rules("int4")) as file:
            config_of("qwen3-30b-a3b", vocab_size=151936, architectures=["Qwen3MoeForCausalLM"], **sizes).save_pretrained(folder)
            meta_model = build_meta_model(folder)
            rules = read_rules(file, registry=registry)
            whole = plan(meta_model, rules, registry=registry)
            load = Workload(CONTEXT, 1, PROMPT)
            for gbit in GBIT:
                for nodes in NODES:
                    found = divided_forecast(meta_model, rules, whole, load, [MEMORY] * nodes, target, registry, gbit)
                    speed = found.speed
                    assert speed is not None, "rates have just been measured"
                    needed = [node.needed_bytes / 2**30 for node in found.nodes]
                    row = {"model": name, "nodes": nodes, "network_gbit": gbit, "decode_tokens_s": round(speed.decode_tokens_s or 0.0, 3)}
                    row |= {"prompt_tokens_s": round(speed.prefill_tokens_s or 0.0, 2), "rank_0_gib": round(needed[0], 1)}
                    rows.add({**row, "other_gib": round(needed[-1], 1) if nodes > 1 else ""})
    if given.write:
        plot(rows.rows)


def plot(rows: list[dict[str, object]]) -> None:
    figure, (grid,) = panels(1, 2, (5, 4))
    for axes, column, title in zip(grid, ("decode_tokens_s", "prompt_tokens_s"), ("decode", f"prompts of {PROMPT}"), strict=True):
        for name, colour in zip(MODELS, ("tab:blue", "tab:orange"), strict=True):
            for gbit, style in zip(GBIT, ("--", "-"), strict=True):
                own = [row for row in rows if row["model"] == name and row["network_gbit"] == gbit]
                rates = [float(str(row[column])) for row in own]
                axes.plot(NODES, [rate / rates[0] for rate in rates], style, marker="o", color=colour, label=f"{name}, {gbit:g} Gbit/s")
        axes.set(xlabel="machines", ylabel="times as fast as one machine", title=title, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle("modelled, not measured: int4 experts over machines of two cores; a cable adds 50 us to each layer", fontsize=9)
    save(figure, "expert_nodes", dpi=120)


if __name__ == "__main__":
    main()
