"""How much faster does a whole model decode on the CPU when neurons are left out? Six layers of Qwen3-30B-A3B's shapes, as `cpu_model.py`.

By weight type: the dense layout, then the sparse one at shares of routed neurons left out, for decode and a prompt of 512. Weights are
random, so only speed is measured; `sparse_quality.py` measures quality. Thresholds come from a calibration on random tokens, and each row
has the share that was left out. Linear layers are int8 beside int8 experts, otherwise unchanged.

Shares alternate within each round, so that changes of the machine affect all alike. Memory does not hold both layouts, so a read-bandwidth
probe runs beside each to show changes of the machine between them. With one thread, times are CPU time, which other processes hardly
affect. `load_1min` is the machine's load before each.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from cpu_model import LINEAR_RULE, PROMPT, RULES, make_model, read_gbps
from record import percentiles, write_rows
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.calibration import collect, sparse_layers
from moegraft.operators.activations import quantiles
from moegraft.operators.experts_layer import experts_layer
from moegraft.operators.sparsity import LayerSparsity, achieved, total_counts

SHARES = (0.0, 0.5, 0.7, 0.85, 0.9)
CALIBRATION_TOKENS = 512
# Relative difference of logits between the layouts, which round activations between the projections differently.
LIMIT = {"int8": 0.1, "bfloat16": 0.05}
Row = dict[str, object]


@contextmanager
def injected(weights: str, layers: int, *, sparse: bool) -> Iterator[tuple[PreTrainedModel, dict[float, dict[str, float]]]]:
    """Yield the model with the thresholds of each share, by layer; the model is freed at the end."""
    model = make_model(layers)
    text = RULES.format(weights=f"{weights}, sparsity: {{target: 0, scope: routed}}" if sparse else weights)
    text += LINEAR_RULE.format(weights=weights) if weights == "int8" else ""
    found = [experts_layer(f"model.layers.{layer}.mlp.experts", model) for layer in range(layers)]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as rules:
        rules.write(text)
        rules.flush()
        model = optimize_and_load(model, rules.name, progress=False, threads=torch.get_num_threads())
    thresholds: dict[float, dict[str, float]] = {}
    if sparse:
        ids = torch.randint(0, 8192, (CALIBRATION_TOKENS,), generator=torch.Generator().manual_seed(3))
        made = collect(model, found, [ids]).layers
        by_share = {path: dict(zip(SHARES[1:], quantiles(layer.bins, SHARES[1:]), strict=True)) for path, layer in made.items()}
        thresholds = {share: {path: found.get(share, 0.0) for path, found in by_share.items()} for share in SHARES}
    try:
        yield model, thresholds
    finally:
        del model
        gc.collect()


def clock() -> float:
    """Return the time in seconds."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def rates(
    model: PreTrainedModel, shares: Mapping[str, Callable[[], None]], rounds: int, new_tokens: int
) -> dict[tuple[str, str], list[float]]:
    """Return tokens per second of each provider and phase, by round; a provider's function prepares the model."""
    prompt = torch.randint(0, 8192, (1, PROMPT), generator=torch.Generator().manual_seed(1))

    def seconds(run: Callable[[], object]) -> float:
        start = clock()
        run()
        return clock() - start

    def decode(tokens: int) -> object:
        return model.generate(prompt[:, :8], do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens)

    found: dict[tuple[str, str], list[float]] = {}
    for round_number in range(rounds + 1):
        for name, prepare in shares.items():
            prepare()
            decoding = seconds(lambda: decode(new_tokens + 1)) - seconds(lambda: decode(1))
            reading = seconds(lambda: model(prompt, logits_to_keep=1))
            if round_number:  # the first round warms up
                found.setdefault((name, "decode"), []).append(new_tokens / decoding)
                found.setdefault((name, f"prompt-{PROMPT}"), []).append(PROMPT / reading)
    return found


def check(model: PreTrainedModel, expected: torch.Tensor | None, limit: float) -> torch.Tensor:
    """Return logits with every neuron.

    Raises:
        SystemExit: they differ from those of the other layout.
    """
    logits: torch.Tensor = model(torch.arange(100, 116)[None]).logits.float()
    if expected is not None and float((logits - expected).norm() / expected.norm()) > limit:
        raise SystemExit("the two layouts do not compute the same model")
    return logits


def measured(weights: str, layers: int, rounds: int, new_tokens: int) -> Iterator[Row]:
    medians: dict[str, float] = {}
    expected = None
    for sparse in (False, True):
        with injected(weights, layers, sparse=sparse) as (model, thresholds), torch.inference_mode():
            expected = check(model, expected, LIMIT[weights])
            load = os.getloadavg()[0]
            states = sparse_layers(model)
            left_out: dict[str, float] = {}
            shares = {f"sparse-{share:.0%}": partial(_prepare, states, found) for share, found in thresholds.items()}
            taken = rates(model, shares or {"dense": lambda: None}, rounds, new_tokens)
            for name, prepare in shares.items():  # counted separately from the timed rounds
                prepare()
                model(torch.randint(0, 8192, (1, PROMPT), generator=torch.Generator().manual_seed(1)))
                left_out[name] = achieved(total_counts(states.values())) or 0.0
            probe = read_gbps()
        for (name, phase), found in taken.items():
            figures = percentiles(found, "tokens_s", 1)
            median = medians.setdefault(phase, figures["p50_tokens_s"])  # the dense layout comes first
            row = {"provider": f"{weights}-{name}", "phase": phase, "left_out": round(left_out.get(name, 0.0), 4)}
            row |= {**figures, "against_dense": round(figures["p50_tokens_s"] / median, 3), "threads": torch.get_num_threads()}
            row |= {"read_probe_gb_s": round(probe, 1), "load_1min": round(load, 2)}
            print(row, flush=True)
            yield row


def _prepare(states: Mapping[str, LayerSparsity], thresholds: Mapping[str, float]) -> None:
    for path, layer in states.items():
        layer.set_threshold(thresholds[path], 0.0)  # without a target, drift is not checked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", nargs="+", default=["int8", "bfloat16"], choices=["int8", "bfloat16"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for weights in arguments.weights:
        rows += measured(weights, arguments.layers, arguments.rounds, arguments.new)
    if not arguments.no_write:
        print(write_rows("sparse_cpu", rows))


if __name__ == "__main__":
    main()
