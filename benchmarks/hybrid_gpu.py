"""The hybrid systems on a real GPU: decode and time to the first token of models with random weights, layers cut to what fits.

For a machine with a CUDA GPU; `--gpu emulated --scale 16` runs the same code anywhere on a sixteenth of the sizes, which shows that it
works and nothing else. Each system is a rule file over the same weights; its logits are checked against those of `all_cpu` first.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from _random_model import move_all_but_experts, random_model
from record import write_rows
from transformers import AutoConfig, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.operators.experts.devices.cuda import why_no_cuda
from moegraft.operators.experts.engine.groups import GpuGroups

VOCABULARY = 8192
# Of the models' own configs; attention of DeepSeek-V2-Lite is its own latent one.
SHAPES: dict[str, dict[str, object]] = {
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen2-57b-a14b": {
        "model_type": "qwen2_moe",
        "hidden_size": 3584,
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}
SYSTEMS = {
    "all_cpu": "schedule: all_cpu",
    "fixed": "schedule: fixed",
    "layer_map": "schedule: layer_map",
    "on_demand": "schedule: on_demand, cache: {{policy: lru, ratio: {ratio}}}, prefetch: {{policy: next_layer}}",
    "greedy": "schedule: greedy, cache: {{policy: mrs, ratio: {ratio}}}",
    "all": "schedule: two_threshold, cache: {{ratio: {ratio}}}",
}
TOLERANCE = 0.05  # relative, of bfloat16 logits summed in another order
RULES = """
version: 1
rules:
- match: {{kind: experts}}
  replace: {{class: hybrid_experts, kwargs: {{weights: {weights}, gpu: "{gpu}", {more}}}}}
"""


def make_model(shape: str, layers: int, scale: int) -> PreTrainedModel:
    """A bfloat16 model with random weights in host memory."""
    sizes = dict(SHAPES[shape])
    model_type = str(sizes.pop("model_type"))
    for name in ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if name in sizes:
            sizes[name] = int(str(sizes[name])) // scale
    config = AutoConfig.for_model(model_type, **sizes, num_hidden_layers=layers, vocab_size=VOCABULARY, dtype=torch.bfloat16)
    return random_model(config)


@contextmanager
def system(name: str, shape: str, arguments: argparse.Namespace, ratio: float) -> Iterator[PreTrainedModel]:
    model = make_model(shape, arguments.layers, arguments.scale)
    more = SYSTEMS[name].format(ratio=ratio)
    more = more if "cache:" in more else f"{more}, cache: {{ratio: {ratio}}}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rules.yaml"
        path.write_text(RULES.format(weights=arguments.weights, gpu=arguments.gpu, more=more))
        if arguments.gpu.startswith("cuda"):
            move_all_but_experts(model, arguments.gpu)
        model = optimize_and_load(model, path, progress=False)
    try:
        yield model
    finally:
        model.moegraft.context.shared(GpuGroups, GpuGroups).close()
        del model
        gc.collect()


def seconds(run: Callable[[], object], rounds: int) -> list[float]:
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def measure(model: PreTrainedModel, name: str, shape: str, ratio: float, arguments: argparse.Namespace) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(1)
    rows = []
    cases = [("decode", 8, arguments.new_tokens), *(("prefill", prompt, 1) for prompt in arguments.prompts)]
    for phase, prompt, new_tokens in cases:
        ids = torch.randint(0, VOCABULARY, (1, prompt), generator=generator).to(model.device)

        def generate(count: int, ids: torch.Tensor = ids) -> object:
            return model.generate(ids, do_sample=False, min_new_tokens=count, max_new_tokens=count)

        first = statistics.median(seconds(lambda: generate(1), arguments.rounds))
        times = [1e3 * taken for taken in seconds(lambda: generate(new_tokens), arguments.rounds)]  # noqa: B023
        each = [(ms - 1e3 * first) / (new_tokens - 1) for ms in times] if phase == "decode" else times
        p20, p50, p80 = (statistics.quantiles(each, n=10)[place] for place in (1, 4, 7))
        rows.append(
            {
                "gpu": arguments.gpu,
                "model": f"{shape}, {arguments.layers} layers, 1/{arguments.scale} of the sizes",
                "weights": arguments.weights,
                "phase": phase,
                "tokens": prompt if phase == "prefill" else 1,
                "cache_ratio": ratio,
                "system": name,
                "p20_ms": round(p20, 3),
                "p50_ms": round(p50, 3),
                "p80_ms": round(p80, 3),
            }
        )
        print(rows[-1], flush=True)
    return rows


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="cuda:0")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.25, 0.5, 0.75])
    parser.add_argument("--prompts", nargs="+", type=int, default=[32, 128, 512, 1024])
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    reason = why_no_cuda() if arguments.gpu.startswith("cuda") else None
    if reason is not None:
        parser.exit(
            2, f"{reason}: with a GPU this would measure {', '.join(arguments.systems)}; --gpu emulated --scale 16 tries the code\n"
        )
    rows: list[dict[str, object]] = []
    probe = torch.randint(0, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(2))
    for shape in arguments.models:
        for ratio in arguments.ratios:
            expected: torch.Tensor | None = None
            for name in ["all_cpu", *(name for name in arguments.systems if name != "all_cpu")]:
                with system(name, shape, arguments, ratio) as model:
                    logits = model(probe.to(model.device)).logits.float().cpu()
                    expected = logits if expected is None else expected
                    error = float((logits - expected).norm() / expected.norm())
                    if error > TOLERANCE:
                        raise SystemExit(f"{shape}, {name}: logits differ from all_cpu by {error:.1%}; nothing is written")
                    rows += measure(model, name, shape, ratio, arguments)
    if not arguments.no_write:
        print(write_rows("hybrid_gpu", rows, ("torch", "transformers", "triton")))


if __name__ == "__main__":
    main()
