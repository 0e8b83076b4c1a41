"""The recipe of the bundled demo model: its text, tokenizer, chat template, architecture, validation and exported files.

Shapes: B windows, S tokens per window, T = B * S tokens, L layers, E experts, K experts per token, H hidden, V vocabulary.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

END, PAD = "<|endoftext|>", "<|pad|>"
CONTEXT = 1024  # tokens of the longest training window

# A user's line opens a scene, like every scene of the training stream; the answer is the speeches up to the next END. A message that starts
# with a heading of its own ("JULIET:" on a line) keeps it.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set content = message['content'] | trim -%}
{%- if message['role'] == 'assistant' -%}
{{- content + '\\n\\n' -}}
{%- else -%}
{{- '<|endoftext|>' -}}
{%- if ':\\n' not in content -%}
{{- 'Chorus:\\n' if message['role'] == 'system' else 'First Citizen:\\n' -}}
{%- endif -%}
{{- content + '\\n\\n' -}}
{%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Validation of a model: nats per token, bits per byte of text, and the share of routed tokens by layer and expert, `(L, E)`."""

    loss: float
    bits_per_byte: float
    load: Tensor


def train_tokenizer(text: str, vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE, in which a run of line breaks is a separate word: text may be cut after one without changing its tokens."""
    tokenizer = Tokenizer(models.BPE())
    lines = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END, PAD], initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def padded_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the experts' sum `(T, H)` for tokens `(T, H)`, choices `(T, K)` and weights `(T, K)`, as one product over all experts.

    The stock loop is slower in training: the gradient of `gate_up_proj[expert]` is a tensor of all experts' size for every expert, and the
    CPU library builds a kernel for every new number of tokens.
    """
    choice = top_k_index.flatten()
    order = choice.argsort()
    expert, token = choice[order], order // top_k_index.shape[1]
    counts = torch.bincount(choice, minlength=experts.num_experts)
    room = math.ceil(int(counts.max()) / 128) * 128  # rows per expert, rounded to few different sizes
    row = expert * room + torch.arange(len(order)) - (counts.cumsum(0) - counts)[expert]
    rows = hidden_states.new_zeros(experts.num_experts * room, hidden_states.shape[1])
    rows = rows.index_copy(0, row, hidden_states.index_select(0, token)).view(experts.num_experts, room, -1)
    gate, up = torch.bmm(rows, experts.gate_up_proj.mT).chunk(2, dim=-1)
    outputs = torch.bmm(experts.act_fn(gate) * up, experts.down_proj.mT).flatten(0, 1).index_select(0, row)
    outputs = outputs * top_k_weights.flatten()[order, None]
    return torch.zeros_like(hidden_states).index_add(0, token, outputs.to(hidden_states.dtype))


def build_model(tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return the untrained model in float32; `Any`, like every model here, because transformers' Auto classes are untyped."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,  # type: ignore[call-arg]  # taken without being declared
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        intermediate_size=256,  # of a dense layer; the model has none
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    ALL_EXPERTS_FUNCTIONS.register("padded", padded_experts)
    # At these sizes eager attention is faster on a CPU than fused attention, whose backward pass is slow.
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager", experts_implementation="padded")


def to_bfloat16(model: Any) -> Any:
    """Cast the parameters in place and return the model; the rotary frequencies, which `Module.to` would round, stay in float32."""
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    return model


@contextmanager
def router_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the router logits `(T, E)` of every layer in the body."""
    seen: list[Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(lambda _module, _args, output: seen.append(output[0])) for router in routers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def expert_share(logits: Tensor, top_k: int) -> Tensor:
    """Return the share of the routed tokens of each expert, `(E,)`, given router logits `(T, E)`."""
    chosen = logits.topk(top_k, dim=-1).indices
    return torch.bincount(chosen.flatten(), minlength=logits.shape[-1]) / chosen.numel()


@torch.no_grad()
def evaluate(model: Any, tokenizer: PreTrainedTokenizerFast, text: str) -> Evaluation:
    """Validate on plain text; every token is predicted once, from at most CONTEXT / 4 tokens before it."""
    tokens = torch.tensor(tokenizer.encode(text, verbose=False))
    size, top_k = CONTEXT // 4, model.config.num_experts_per_tok
    rows = (len(tokens) - 1) // size
    inputs, targets = tokens[: rows * size].view(rows, size), tokens[1 : rows * size + 1].view(rows, size)
    nats, loads = 0.0, []
    model.eval()
    for batch, target in zip(inputs.split(16), targets.split(16), strict=True):
        with router_logits(model) as layers:
            logits = model(input_ids=batch, use_cache=False).logits  # (B, S, V)
        nats += functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="sum").item()
        loads.append(torch.stack([expert_share(layer, top_k) for layer in layers]) * len(batch))
    text_bytes = len(str(tokenizer.decode(tokens[1 : rows * size + 1])).encode())
    return Evaluation(nats / targets.numel(), nats / math.log(2) / text_bytes, torch.stack(loads).sum(0) / rows)


def export(model: Any, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the files of `from_pretrained`: bfloat16 weights, configurations, tokenizer and chat template."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        max_new_tokens=200,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    to_bfloat16(model).save_pretrained(out)
    tokenizer.save_pretrained(out)
