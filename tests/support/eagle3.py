"""Tiny EAGLE-3 heads, in the form of SpecForge's checkpoints, and what they predict, computed from the stored tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

LAYERS = 5  # of the model
READS = (1, 3, 4)  # after layers 0, 2 and 3
HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 16, 96
DRAFTED = tuple(range(3, 99, 4))  # tokens


def write_head(
    folder: Path,
    model: PreTrainedModel,
    *,
    vocabulary: Sequence[int] | None = DRAFTED,
    own_embedding: bool = False,
    hidden: int | None = None,
) -> None:
    """Write a head with random weights for `model` to `folder`.

    Args:
        vocabulary: the tokens that it drafts; None for all of the model's, by the model's own matrix.
        hidden: its hidden size, if another one than the model's.
    """
    text = model.config.get_text_config()
    read, size = text.hidden_size, hidden or text.hidden_size
    generator = torch.Generator().manual_seed(3)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": matrix(size, 3 * read),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * size),
        "midlayer.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * size),
        "midlayer.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * size),
        "midlayer.self_attn.o_proj.weight": matrix(size, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": matrix(INNER, size),
        "midlayer.mlp.up_proj.weight": matrix(INNER, size),
        "midlayer.mlp.down_proj.weight": matrix(size, INNER),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "norm.weight": norm(),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [each - 1 for each in READS], "use_aux_hidden_state": True},
        "hidden_size": size,
        "intermediate_size": INNER,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": text.vocab_size,
    }
    if vocabulary is not None:
        config["draft_vocab_size"] = len(vocabulary)
        targets = torch.tensor(vocabulary)
        tensors["d2t"] = targets - torch.arange(len(vocabulary))
        tensors["t2d"] = torch.zeros(text.vocab_size, dtype=torch.bool).scatter(0, targets, True)
        tensors["lm_head.weight"] = matrix(len(vocabulary), size)
    if hidden:
        config["target_hidden_size"] = read
    if own_embedding or hidden:
        tensors["embed_tokens.weight"] = torch.randn(text.vocab_size, size, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


class StoredHead:
    """A head in float32, computed from its stored tensors by a pass over the whole text for each token.

    As in section 3.1 of the paper: g, the states of three layers, through one matrix, of the text; a, the head's own states, of drafted
    tokens. The layer reads [norm(embedding); norm(g or a)] and adds to g or a.
    """

    def __init__(self, folder: Path, stock: PreTrainedModel) -> None:
        self.tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
        self._config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._model: Any = stock
        self._embedding = self.tensors.get("embed_tokens.weight", stock.get_input_embeddings().weight)
        self._head = self.tensors.get("lm_head.weight", stock.get_output_embeddings().weight)

    def drafts(self, text: torch.Tensor, depth: int) -> list[int]:
        """Return the tokens that follow `text` (1, T)."""
        drafted: list[int] = []
        states = self.states(text)
        for _ in range(depth):
            made = self.layer(states, [*text[0].tolist(), *drafted])
            token = int(self.logits(made[-1]).argmax())
            drafted.append(token + int(self.tensors["d2t"][token]) if "d2t" in self.tensors else token)
            states = torch.cat([states, made[-1:]])
        return drafted

    def states(self, text: torch.Tensor) -> torch.Tensor:
        """Return g (T - 1, H), of all tokens of `text` (1, T) but the last."""
        with torch.no_grad():
            states = self._model(text[:, :-1], output_hidden_states=True).hidden_states
        return torch.cat([states[each] for each in READS], dim=-1)[0] @ self.tensors["fc.weight"].T

    def logits(self, made: torch.Tensor) -> torch.Tensor:
        return self._norm(made, "norm") @ self._head.T

    def layer(self, states: torch.Tensor, text: list[int]) -> torch.Tensor:
        """Return the layer's states (T - 1, H) over those of g and a (T - 1, H), each with the next one of T tokens."""
        embedded = self._embedding[torch.tensor(text[1:])].detach()
        inputs = torch.cat([self._norm(embedded, "midlayer.input_layernorm"), self._norm(states, "midlayer.hidden_norm")], dim=-1)
        size = len(inputs)
        queries = self._rotated(self._linear(inputs, "self_attn.q_proj").view(size, HEADS, HEAD_DIM))
        keys = self._rotated(self._linear(inputs, "self_attn.k_proj").view(size, KV_HEADS, HEAD_DIM))
        values = self._linear(inputs, "self_attn.v_proj").view(size, KV_HEADS, HEAD_DIM)
        keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * HEAD_DIM**-0.5 + torch.full((size, size), float("-inf")).triu(1)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).reshape(size, -1)
        made = states + self._linear(attended, "self_attn.o_proj")
        normed = self._norm(made, "midlayer.post_attention_layernorm")
        inner = torch.nn.functional.silu(self._linear(normed, "mlp.gate_proj")) * self._linear(normed, "mlp.up_proj")
        return made + self._linear(inner, "mlp.down_proj")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._config["rms_norm_eps"]) * self.tensors[f"{name}.weight"]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[f"midlayer.{name}.weight"].T

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Return queries or keys (T, heads, D) of positions from 0."""
        frequencies = self._config["rope_theta"] ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.arange(len(x))[:, None, None] * frequencies
        one, other = x.chunk(2, dim=-1)
        return torch.cat([one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()], dim=-1)


def train_head(folder: Path, model: PreTrainedModel, text: torch.Tensor, prompt: int, depth: int) -> None:
    """Train a head on one text (1, T) of a model after its prompt, by drafts of `depth` tokens from each place, until all are right."""
    tokens = text[0].tolist()
    vocabulary = sorted(set(tokens[prompt:]))
    write_head(folder, model, vocabulary=vocabulary)
    head = StoredHead(folder, model)
    trained = [tensor.requires_grad_() for tensor in head.tensors.values() if tensor.is_floating_point()]
    optimiser = torch.optim.Adam(trained, lr=3e-3)
    for _ in range(200):
        loss, wrong = torch.zeros(()), 0
        for length in range(prompt + 1, len(tokens) - depth):
            states, wanted = (
                head.states(text[:, :length]),
                torch.tensor([vocabulary.index(each) for each in tokens[length : length + depth]]),
            )
            found = []
            for number in range(depth):
                made = head.layer(states, tokens[: length + number])
                found.append(head.logits(made[-1]))
                states = torch.cat([states, made[-1:]])
            logits = torch.stack(found)
            wrong += int((logits.argmax(-1) != wanted).sum())
            loss = loss + torch.nn.functional.cross_entropy(logits, wanted)
        if not wrong:
            save_file({name: tensor.detach() for name, tensor in head.tensors.items()}, folder / "model.safetensors")
            return
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # of torch
        optimiser.step()
    raise AssertionError(f"{wrong} tokens are still wrong")
