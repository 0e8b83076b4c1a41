"""How much faster is a whole model on a CUDA GPU without the neurons that a token does not need? The paper's Table 3.

    python benchmarks/sparse_model.py                 # requests, input and output lengths; as many layers as fit
    python benchmarks/sparse_model.py --tiny          # a test of the script in Triton's interpreter, without a GPU

Without a GPU it prints its measurements' settings and ends. Sizes are those of Qwen3.5-35B-A3B's experts; attention is plain and weights
are random, so only speed is measured; `sparse_quality.py` measures quality. One model serves all rows. Its dense rows are `sparse_experts`
with every neuron, by the fastest dense path. Shares are of all neurons, the shared expert's included; thresholds come from a calibration on
random tokens. The batch decides on the path, so no row should be slower than its dense one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

if "--tiny" in sys.argv:  # Triton reads it when a kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from _random_model import move_all_but_experts, random_model
from _sparse_floor import SHAPES
from record import write_rows
from transformers import PreTrainedModel, Qwen2MoeConfig

from moegraft.injection import optimize_and_load
from moegraft.injection.calibration import collect, sparse_layers
from moegraft.operators.activations import quantiles
from moegraft.operators.experts_layer import ExpertsLayer, experts_layer
from moegraft.operators.kernels.launch import why_unavailable
from moegraft.operators.sparsity import achieved, total_counts
from moegraft.operators.thresholds import SparsityOptions

SHARES = (0.0, 0.7, 0.8, 0.85)
REQUESTS = (1, 4, 16, 64)
LENGTHS = ((128, 128), (1024, 128), (128, 1024), (1024, 1024))  # tokens of input and output
LAYERS, VOCABULARY = 40, 8192
CALIBRATION_TOKENS = 512
LEFT_FREE = 0.25  # share of the GPU's memory for keys and values, activations, and neurons of large batches
RULES = "- match: {kind: experts}\n  replace: {class: sparse_experts, kwargs: {sparsity: {target: 0, scope: total}}}\n"
Row = dict[str, object]
Thresholds = Mapping[str, tuple[float, float]]  # by layer: the threshold and its target share of routed neurons


def layers_that_fit(name: str) -> int:
    shape = SHAPES[name]
    layer_bytes = 6 * shape.num_experts * shape.intermediate * shape.hidden
    return max(1, min(LAYERS, int(torch.cuda.mem_get_info()[0] * (1 - LEFT_FREE)) // layer_bytes))


def make_model(name: str, layers: int, device: torch.device) -> PreTrainedModel:
    """Return a model with random weights in bfloat16, or float32 for Triton's interpreter, with experts in host memory."""
    shape = SHAPES[name]
    config = Qwen2MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        shared_expert_intermediate_size=shape.shared_intermediate,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        num_hidden_layers=layers,
        num_attention_heads=max(1, shape.hidden // 128),
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )
    model = random_model(config)
    move_all_but_experts(model, device)
    return model


def injected(model: PreTrainedModel) -> PreTrainedModel:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as rules:
        rules.write(RULES)
        rules.flush()
        return optimize_and_load(model, rules.name, progress=False)


def thresholds_by_share(model: PreTrainedModel, layers: Sequence[ExpertsLayer]) -> dict[float, Thresholds]:
    """Return each layer's threshold for each share of all neurons."""
    count = CALIBRATION_TOKENS if model.device.type == "cuda" else 64  # interpreted
    ids = torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(3))
    bins = {path: found.bins for path, found in collect(model, layers, [ids]).layers.items()}
    found: dict[float, Thresholds] = {}
    for share in SHARES:
        routed = {layer.path: layer.routed_target(SparsityOptions(share, "total")) for layer in layers}
        found[share] = {path: (quantiles(bins[path], [part])[0] if part else 0.0, part) for path, part in routed.items()}
    return found


def generate_s(model: PreTrainedModel, requests: int, length: tuple[int, int]) -> float:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (requests, length[0]), generator=generator).to(model.device)
    mask = torch.ones_like(ids)
    start = time.perf_counter()
    model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=length[1], max_new_tokens=length[1])
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measured(name: str, layers: int, cases: Sequence[tuple[int, tuple[int, int]]], rounds: int, device: torch.device) -> Iterator[Row]:
    model = make_model(name, layers, device)
    found = [experts_layer(f"model.layers.{layer}.mlp.experts", model) for layer in range(layers)]
    model = injected(model)
    states = sparse_layers(model)
    shares = thresholds_by_share(model, found)
    for requests, length in cases:
        times: dict[float, list[float]] = {share: [] for share in shares}
        left_out: dict[float, float] = {}
        for number in range(rounds + 1):  # the first round compiles, and times the paths
            for share, thresholds in shares.items():  # interleaved, so that changes of the clock affect all alike
                for path, (threshold, target) in thresholds.items():
                    states[path].set_threshold(threshold, target)
                taken = generate_s(model, requests, length)
                left_out[share] = achieved(total_counts(states.values())) or 0.0
                if number:
                    times[share].append(taken)
        dense = statistics.median(times[0.0])
        for share, seconds in times.items():
            median = statistics.median(seconds)
            yield {
                "shape": name,
                "layers": layers,
                "requests": requests,
                "input": length[0],
                "output": length[1],
                "total_sparsity": share,
                "routed_left_out": round(left_out[share], 4),
                "min_s": round(min(seconds), 4),
                "p50_s": round(median, 4),
                "max_s": round(max(seconds), 4),
                "output_tokens_per_s": round(requests * length[1] / median, 1),
                "speedup": round(dense / median, 3),
            }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS))
    parser.add_argument("--layers", type=int, help="default: as many as fit, at most 40")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a tiny model in Triton's interpreter; writes nothing")
    arguments = parser.parse_args()
    name = "tiny" if arguments.tiny else "qwen3.5-35b-a3b"
    cases = [(requests, length) for length in LENGTHS for requests in arguments.requests]
    reason = None if arguments.tiny else why_unavailable()
    if reason is not None:
        lengths = ", ".join(f"{given} + {made}" for given, made in LENGTHS)
        shares = ", ".join(f"{share:.0%}" for share in SHARES[1:])
        print(f"Nothing was measured: {reason}.")
        print(f"With a GPU: {name}, up to {LAYERS} layers, {', '.join(map(str, arguments.requests))} requests of {lengths} tokens,")
        print(f"every neuron beside {shares} of all neurons left out; seconds, tokens per second and speed-up over every neuron.")
        return
    if arguments.tiny:
        rows = list(measured(name, 1, [(2, (2, 2))], 1, torch.device("cpu")))
    else:
        rows = list(measured(name, arguments.layers or layers_that_fit(name), cases, arguments.rounds, torch.device("cuda:0")))
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    if arguments.tiny:
        print("Interpreted on the CPU: the times have no meaning.")
        return
    print(write_rows("sparse_model", rows, packages=("torch", "triton", "transformers")))


if __name__ == "__main__":
    main()
