"""How fast are models with recurrent layers on the CPU? A Qwen3-Next- or Granite-4-H-shaped model, and the rules of its layers alone.

    python benchmarks/recurrent.py                         # four layers, three of them recurrent, and 64 experts; int8
    python benchmarks/recurrent.py --shape granite         # four layers, three of them of Mamba-2

Providers alternate: `ours` has the rules of the shipped file `cpu`, `functions` the same but that transformers' functions compute the
recurrent rules, and `stock` is the model in bfloat16. `decode` is a token after 8, `prompt` tokens in one pass, `rule` one call of the
delta rule over as many tokens of one layer, in float32. `ratio` is the median over rounds of a provider's time over that of `ours`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from harness.models import VOCABULARY, injected, random_model
from harness.record import Recorder, parser
from harness.rounds import alternate, median_ratio, percentiles, seconds
from transformers import GraniteMoeHybridConfig, PreTrainedConfig, PreTrainedModel, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

from moegraft.cpu_backend import Runtime

OURS, FUNCTIONS, STOCK = "ours", "functions", "stock"
CPU = "extends: cpu\nrules: []\n"
WITHOUT = "extends: cpu\nrules:\n- {id: recurrent, match: {kind: recurrent}, replace: {class: default}, expect: any}\n"
RECENT = 8  # tokens before those that are decoded
TOLERANCE = 0.2  # relative, of a prompt's last logits by kernels and functions: in bfloat16, routers choose other experts between near ties


def qwen3_next(layers: int) -> PreTrainedConfig:
    experts: dict[str, Any] = {"num_experts": 64, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True}
    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 32}
    common: dict[str, Any] = {"hidden_size": 2048, "num_hidden_layers": layers, "vocab_size": VOCABULARY, "dtype": torch.bfloat16}
    return Qwen3NextConfig(**experts, **heads, **common, shared_expert_intermediate_size=512)


def granite(layers: int) -> PreTrainedConfig:
    experts: dict[str, Any] = {
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
    }
    heads: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_head": 64}
    common: dict[str, Any] = {"hidden_size": 1536, "num_hidden_layers": layers, "vocab_size": VOCABULARY, "dtype": torch.bfloat16}
    kinds = ["attention" if layer % 4 == 3 else "mamba" for layer in range(layers)]
    return GraniteMoeHybridConfig(**experts, **heads, **common, layer_types=kinds, mamba_d_state=128, mamba_n_groups=1)


SHAPES: Mapping[str, Callable[[int], PreTrainedConfig]] = {"qwen3-next": qwen3_next, "granite": granite}


def opened(shape: str, layers: int, providers: list[str]) -> dict[str, PreTrainedModel]:
    rules = {OURS: CPU, FUNCTIONS: WITHOUT}
    models = {}
    for name in providers:
        model = random_model(SHAPES[shape](layers))
        models[name] = injected(model, rules[name]) if name in rules else model
    return models


@torch.inference_mode()
def last_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.float()
    return found


def decode_ms(model: Any, ids: torch.Tensor, tokens: int) -> float:
    def generate(count: int) -> object:
        return model.generate(ids[:, :RECENT], do_sample=False, min_new_tokens=count, max_new_tokens=count, pad_token_id=0)

    return 1e3 * (seconds(lambda: generate(tokens)) - seconds(lambda: generate(1))) / (tokens - 1)


def model_rows(shape: str, layers: int, providers: list[str], prompts: list[int], tokens: int, rounds: int) -> Iterator[dict[str, object]]:
    models = opened(shape, layers, providers)
    ids = torch.randint(20, VOCABULARY, (1, max(prompts)), generator=torch.Generator().manual_seed(1))
    if {OURS, FUNCTIONS} <= set(models):
        found, expected = (last_logits(models[name], ids[:, : prompts[0]]) for name in (OURS, FUNCTIONS))
        error = float((found - expected).norm() / expected.norm())
        assert error <= TOLERANCE, f"the logits differ by {error:.3f}"
    work: dict[str, Callable[[Any], float]] = {"decode": lambda model: decode_ms(model, ids, tokens)}
    for count in prompts:
        work[f"prompt of {count}"] = lambda model, count=count: 1e3 * seconds(lambda: last_logits(model, ids[:, :count]))  # type: ignore[misc]
    for what, measure in work.items():
        calls = {name: lambda model=model: measure(model) for name, model in models.items()}  # type: ignore[misc] # noqa: B023
        yield from _rows({"shape": shape, "layers": layers, "what": what}, alternate(calls, rounds))


def rule_rows(prompts: list[int], providers: list[str], rounds: int) -> Iterator[dict[str, object]]:
    """Yield the times of the delta rule of one of Qwen3-Next's layers."""
    runtime = Runtime()
    for tokens in (1, *prompts):
        query, key = (torch.randn(1, tokens, 16, 128) for _ in range(2))
        value, decay, beta = torch.randn(1, tokens, 32, 128), -torch.rand(1, tokens, 32), torch.rand(1, tokens, 32)
        before, state, out = torch.zeros(1, 32, 128, 128), torch.empty(1, 32, 128, 128), torch.empty_like(value)
        own: Any = torch_recurrent_gated_delta_rule if tokens == 1 else torch_chunk_gated_delta_rule
        given: dict[str, Any] = {"g": decay, "beta": beta, "initial_state": before, "output_final_state": True}
        kernel = [out, state, query, key, value, decay, beta, before]

        def ours(operands: list[Any] = kernel) -> object:
            return runtime.recurrent("delta_rule", operands, [128**-0.5, 1e-6])

        def functions(function: Any = own, tensors: Any = (query, key, value), options: Any = given) -> Any:
            return function(*tensors, **options, use_qk_l2norm_in_kernel=True)

        expected, _ = functions()
        ours()
        assert float((out - expected).norm()) <= 1e-4 * float(expected.norm()), "the kernel computes something else"
        calls = {OURS: ours, FUNCTIONS: functions}
        timed = {name: lambda call=call: 1e3 * seconds(call) for name, call in calls.items() if name in providers}  # type: ignore[misc]
        yield from _rows({"shape": "qwen3-next", "layers": 1, "what": f"rule over {tokens}"}, alternate(timed, rounds))


def _rows(about: Mapping[str, object], taken: Mapping[str, list[float]]) -> Iterator[dict[str, object]]:
    for name, figures in taken.items():
        ratio = {"ratio": round(median_ratio(figures, taken[OURS]), 2)} if OURS in taken else {}
        yield {**about, "provider": name, "rounds": len(figures), **percentiles(figures, "ms", 3), **ratio}


def main() -> None:
    options = parser(__doc__, layers=4, tokens=32, rounds=5)
    options.add_argument("--shape", choices=SHAPES, default="qwen3-next")
    options.add_argument("--prompts", type=int, nargs="+", default=[512])
    options.add_argument("--providers", nargs="+", choices=(OURS, FUNCTIONS, STOCK), default=[OURS, FUNCTIONS, STOCK])
    given = options.parse_args()
    recorder = Recorder("recurrent", write=given.write, replaces=("shape", "what", "provider"))
    with torch.no_grad():
        for row in model_rows(given.shape, given.layers, given.providers, given.prompts, given.tokens, given.rounds):
            recorder.add(row)
        for row in rule_rows(given.prompts, given.providers, given.rounds) if given.shape == "qwen3-next" else ():
            recorder.add(row)


if __name__ == "__main__":
    main()
