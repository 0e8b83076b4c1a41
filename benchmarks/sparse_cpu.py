"""How much faster does a whole model decode on the CPU when neurons are left out? Six layers of Qwen3-30B-A3B's shapes.

By weight type: the dense layout, then the sparse one at shares of routed neurons left out, for decode and a prompt of 512. Weights are
random, so only speed is measured; `moegraft calibrate` reports quality. Thresholds come from a calibration on random tokens, and each row
has the share that was left out. Linear layers are in the experts' type.

Shares alternate within each round, so that changes of the machine affect all alike. Memory does not hold both layouts, so a read-bandwidth
probe runs beside each to show changes of the machine between them. With one thread, times are CPU time, which other processes hardly
affect. `load_1min` is the machine's load before each.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from harness.models import VOCABULARY, config_of, cpu_rules, injected, random_model
from harness.probe import ReadProbe
from harness.record import Recorder, parser
from harness.rounds import alternate, clock, percentiles, seconds
from transformers import PreTrainedModel

from moegraft.injection.calibration import collect, quantiles
from moegraft.injection.injected import sparse_layers
from moegraft.operators.sparsity import LayerSparsity, achieved, experts_layer, total_counts

PROMPT = 512
SHARES = (0.0, 0.5, 0.7, 0.85, 0.9)
CALIBRATION_TOKENS = 512
# Relative difference of logits between the layouts, which round activations between the projections differently.
LIMIT = {"int8": 0.1, "bfloat16": 0.05}
Row = dict[str, object]


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


@contextmanager
def opened(weights: str, layers: int, *, sparse: bool) -> Iterator[tuple[PreTrainedModel, dict[float, dict[str, float]]]]:
    """Yield the model with the thresholds of each share, by layer; the model is freed at the end."""
    model = random_model(config_of("qwen3-30b-a3b", layers))
    types = f"weights: {weights}, linear: {weights}"
    rules = f"extends: sparse\nvars: {{{types}, target: 0}}\n" if sparse else cpu_rules(weights)
    found = [experts_layer(f"model.layers.{layer}.mlp.experts", model) for layer in range(layers)]
    model = injected(model, rules, threads=torch.get_num_threads())
    thresholds: dict[float, dict[str, float]] = {}
    if sparse:
        made = collect(model, found, [tokens(CALIBRATION_TOKENS, 3)[0]])
        by_share = {path: dict(zip(SHARES[1:], quantiles(layer.bins, SHARES[1:]), strict=True)) for path, layer in made.items()}
        thresholds = {share: {path: found.get(share, 0.0) for path, found in by_share.items()} for share in SHARES}
    try:
        yield model, thresholds
    finally:
        del model
        gc.collect()


def rates(
    model: PreTrainedModel, shares: Mapping[str, Callable[[], None]], rounds: int, new_tokens: int
) -> dict[tuple[str, str], list[float]]:
    """Return tokens per second of each provider and phase, by round; a provider's function prepares the model."""
    prompt = tokens(PROMPT, 1)

    def generate(count: int) -> object:
        return model.generate(prompt[:, :8], do_sample=False, min_new_tokens=count, max_new_tokens=count)

    def measured(prepare: Callable[[], None]) -> tuple[float, float]:
        prepare()
        decoding = seconds(lambda: generate(new_tokens + 1), clock) - seconds(lambda: generate(1), clock)
        return new_tokens / decoding, PROMPT / seconds(lambda: model(prompt, logits_to_keep=1), clock)

    taken = alternate({name: partial(measured, prepare) for name, prepare in shares.items()}, rounds)
    phases = ("decode", f"prompt-{PROMPT}")
    return {(name, phase): [each[at] for each in pairs] for name, pairs in taken.items() for at, phase in enumerate(phases)}


def check(model: PreTrainedModel, expected: torch.Tensor | None, limit: float) -> torch.Tensor:
    """Return logits with every neuron.

    Raises:
        SystemExit: they differ from those of the other layout.
    """
    logits: torch.Tensor = model(torch.arange(100, 116)[None]).logits.float()
    if expected is not None and float((logits - expected).norm() / expected.norm()) > limit:
        raise SystemExit("the two layouts do not compute the same model")
    return logits


def measure(weights: str, layers: int, rounds: int, new_tokens: int, read: ReadProbe) -> Iterator[Row]:
    medians: dict[str, float] = {}
    expected = None
    for sparse in (False, True):
        with opened(weights, layers, sparse=sparse) as (model, thresholds), torch.inference_mode():
            expected = check(model, expected, LIMIT[weights])
            load = os.getloadavg()[0]
            states = sparse_layers(model)
            left_out: dict[str, float] = {}
            shares = {f"sparse-{share:.0%}": partial(_prepare, states, found) for share, found in thresholds.items()}
            taken = rates(model, shares or {"dense": lambda: None}, rounds, new_tokens)
            for name, prepare in shares.items():  # counted separately from the timed rounds
                prepare()
                model(tokens(PROMPT, 1))
                left_out[name] = achieved(total_counts(states.values())) or 0.0
            probe = read.median() / 1e9
        for (name, phase), found in taken.items():
            figures = percentiles(found, "tokens_s", 1)
            median = medians.setdefault(phase, figures["p50_tokens_s"])  # the dense layout comes first
            row = {"provider": f"{weights}-{name}", "phase": phase, "left_out": round(left_out.get(name, 0.0), 4)}
            row |= {**figures, "against_dense": round(figures["p50_tokens_s"] / median, 3), "threads": torch.get_num_threads()}
            row |= {"read_probe_gb_s": round(probe, 1), "load_1min": round(load, 2)}
            yield row


def _prepare(states: Mapping[str, LayerSparsity], thresholds: Mapping[str, float]) -> None:
    for path, layer in states.items():
        layer.set_threshold(thresholds[path], 0.0)  # without a target, drift is not checked


def main() -> None:
    options = parser(__doc__, layers=6, rounds=5, new=48)
    options.add_argument("--weights", nargs="+", default=["int8", "bfloat16"], choices=["int8", "bfloat16"])
    given = options.parse_args()
    rows, read = Recorder("sparse_cpu", write=given.write), ReadProbe(torch.get_num_threads())
    for weights in given.weights:
        for row in measure(weights, given.layers, given.rounds, given.new, read):
            rows.add(row)


if __name__ == "__main__":
    main()
