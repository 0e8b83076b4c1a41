r"""llama.cpp on random models, through the packages `llama-cpp-python` and `gguf`: models of Qwen3-MoE, gpt-oss and DeepSeek-V2.

On CPUs with AMX, llama.cpp's AMX kernels (version 0.3.36 of the package) end the process with an illegal instruction on int4 experts.
There, build it without them:

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON \
        -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF" \
        pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36

ik_llama.cpp is in `ik-llama-cpp-python`, whose wheel (0.1.5) has no AVX-512, with which prompts are faster. Its source distribution lacks
`vendor/ik_llama.cpp/common/cmake/build-info-gen-cpp.cmake`, of which `configure_file("${CMAKE_CURRENT_LIST_DIR}/../build-info.cpp.in"
"${CMAKE_CURRENT_LIST_DIR}/../build-info.cpp")` after `set(BUILD_NUMBER 0)` is enough. In the unpacked folder, ten minutes on two cores:

    CMAKE_ARGS='-DGGML_NATIVE=ON -DCMAKE_INSTALL_RPATH=$ORIGIN' pip install .
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a start of llama.cpp is timed, and needs neither
    from transformers import PreTrainedConfig

BATCH = 2048  # tokens of one call
CONTEXT = 2**15 + 512  # tokens of the longest sequence
CODE, CODE_NOISE = 64, 0.1
# The type of experts, of all other matrices, and of both where rows are no multiple of 256 columns, as llama.cpp's converter chooses them.
TYPES = {
    **{name: (kind,) * 3 for name, kind in (("int4", "Q4_0"), ("int8", "Q8_0"), ("bfloat16", "BF16"))},
    **{"mxfp4": ("MXFP4", "Q8_0", "Q8_0"), "q4_k": ("Q4_K", "Q4_K", "Q5_0"), "iq3_s": ("IQ3_S", "IQ3_S", "IQ4_NL")},
}
_OTHERS = "q4_1 q5_0 q5_1 q2_k q3_k q5_k q6_k iq4_nl iq4_xs iq3_xxs iq2_s iq2_xs iq2_xxs iq1_s iq1_m tq2_0 tq1_0"
TYPES |= {name: (name.upper(), "Q8_0", "Q8_0") for name in _OTHERS.split()}


def is_installed(engine: str = "llama.cpp") -> bool:
    package = "ik_llama_cpp" if engine.startswith("ik_") else "llama_cpp"
    return find_spec(package) is not None and find_spec("gguf") is not None


def write_model(
    path: Path,
    config: PreTrainedConfig,
    weights: str,
    vocabulary: Sequence[str] | None = None,
    distinct: int = 8,
    skew: float | None = None,
) -> None:
    """Write a GGUF file of a model with random weights of one of `TYPES`, whose experts repeat `distinct` ones.

    Args:
        vocabulary: the texts of the tokens; by default the file has none.
        skew: choose experts by token, as trained models nearly do, where random ones choose alike for all tokens after some layers: by
            a code in `CODE` columns of the embeddings, to which layers add little. The rows of a router have lengths whose logarithms
            have this standard deviation, so that some experts are used more than others.
    """
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    from moegraft.injection.checkpoint.gguf.export import ExportPlan, describe
    from moegraft.injection.checkpoint.gguf.families import family_of
    from moegraft.injection.checkpoint.gguf.model import Names, experts_name
    from moegraft.injection.rules.rule import layer_of
    from moegraft.operators.layout import read_layout
    from moegraft.operators.weight_formats import FORMATS

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names, rng = Names(config), np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), family_of(config).architecture)
    describe(writer, ExportPlan(config, ()), "random weights")
    writer.add_tokenizer_model("no_vocab" if vocabulary is None else "llama")
    if vocabulary is not None:
        writer.add_token_list(vocabulary)
        writer.add_token_scores([0.0] * len(vocabulary))
        writer.add_token_types([1] * len(vocabulary))  # all are normal: none is a byte, and none ends a text

    drawn_tensors: list[tuple[Any, int]] = []  # each with how often it is repeated in the file, which may be larger than memory

    def add(name: str, *shape: int, experts: int = 0) -> None:
        """Add a tensor, of several experts where there are any."""
        drawn = (distinct, *shape) if experts else shape
        kind = None
        if name.endswith("_norm.weight"):
            values: Any = np.ones(drawn, np.float32)
        elif len(shape) == 1 or name.endswith("ffn_gate_inp.weight"):
            values = rng.standard_normal(drawn, np.float32) * 0.02
            if skew is not None and len(shape) == 2:
                values *= np.exp(skew * rng.standard_normal((drawn[0], 1), np.float32))
                values[:, CODE:] = 0
        else:
            of_experts, others, narrow = TYPES[weights]
            kind = gguf.GGMLQuantizationType[of_experts if experts else others]
            if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
                kind = gguf.GGMLQuantizationType[narrow]
            random = next((found for found in FORMATS.values() if found.gguf == kind.name and found.stored), None)
            if random is not None:
                values = random.random_blocks(drawn, rng)
            else:
                values = rng.standard_normal(drawn, np.float32) / np.float32(shape[-1] ** 0.5)
                if skew is not None and name == "token_embd.weight":
                    values[:, :CODE] *= shape[-1] ** 0.5
                elif skew is not None and name.endswith(("attn_output.weight", "ffn_down_exps.weight")):
                    values[..., :CODE, :] *= CODE_NOISE
                values = gguf.quants.quantize(values, kind)
        times = experts // distinct if experts else 1
        whole = (values.shape[0] * times, *values.shape[1:])
        writer.add_tensor_info(name, whole, values.dtype, values.nbytes * times, raw_dtype=kind)
        drawn_tensors.append((values, times))

    for module_name, module in model.named_modules():
        if hasattr(module, "down_proj") and not isinstance(module.down_proj, torch.nn.Module):
            layout = read_layout(module)
            for part in layout.parts():
                add(experts_name(layer_of(module_name), part), *layout.part_shape(part), experts=layout.num_experts)
            continue
        for parameter, tensor in module.named_parameters(recurse=False):
            name = names.stored(f"{module_name}.{parameter}")
            assert name is not None, f"GGUF files have no tensor for {module_name}.{parameter}"
            if name.endswith("attn_kv_b.weight"):
                heads, rank, value = config.num_attention_heads, config.kv_lora_rank, config.v_head_dim
                add(name.replace("kv_b", "k_b"), heads, rank, config.qk_nope_head_dim)
                add(name.replace("kv_b", "v_b"), heads, value, rank)
            else:
                add(name, *tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values, times in drawn_tensors:
        writer.write_tensor_data(np.tile(values, (times, *[1] * (values.ndim - 1))))
    writer.close()


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """The weights of a GGUF file that tokens read, without the rows of their embeddings.

    Attributes:
        expert_bytes: of one expert in each layer but the last, and in the last.
        other_bytes: of what every token reads.
        multiplied: weights that each token of a prompt is multiplied with; only its last has logits, and what they need of the last layer.
    """

    expert_bytes: tuple[float, float]
    other_bytes: int
    multiplied: float

    def read(self, experts: float, last: float) -> float:
        """Return the bytes that tokens read together which have so many different experts in a layer, and in the last one."""
        return self.other_bytes + experts * self.expert_bytes[0] + last * self.expert_bytes[1]


def token_weights(path: Path, config: PreTrainedConfig) -> TokenWeights:
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    expert_bytes, other_bytes, multiplied = [0.0, 0.0], 0, 0.0
    for name, tensor in tensors.items():
        is_last = name.startswith(f"blk.{config.num_hidden_layers - 1}.")
        if "_exps." in name:
            expert_bytes[is_last] += int(tensor.n_bytes) / int(tensor.shape[-1])
            multiplied += 0 if is_last else int(tensor.n_elements) / int(tensor.shape[-1]) * config.num_experts_per_tok
        elif name in (head, "token_embd.weight"):
            other_bytes += int(tensor.n_bytes) if name == head else 0
        else:
            other_bytes += int(tensor.n_bytes) // (2 if name.endswith("ffn_gate_inp.weight") else 1)  # in bfloat16
            multiplied += 0 if is_last and name.split(".")[2].startswith(("ffn_", "attn_output", "ssm_out")) else int(tensor.n_elements)
    return TokenWeights((expert_bytes[0], expert_bytes[1]), other_bytes, multiplied)


def cache_bytes(config: Any, context: int) -> int:
    """Return the bytes of bfloat16 keys and values that transformers' caches hold after `context` tokens; recurrent layers have none."""
    if config.model_type == "deepseek_v2":
        return int(2 * config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * context)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    held = {"sliding_attention": min(context, getattr(config, "sliding_window", None) or context)}
    held |= dict.fromkeys(("full_attention", "attention"), context)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(4 * config.num_key_value_heads * head * sum(held.get(kind, 0) for kind in kinds))


class LlamaCpp:
    """A model loaded by llama.cpp, with one sequence.

    Args:
        repack: whether weights are copied in the order of its faster kernels; else they are computed from the mapped file.

    Raises:
        RuntimeError: llama.cpp cannot load or evaluate it.
    """

    def __init__(self, path: Path, threads: int, *, repack: bool = True) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        loading = llama_cpp.llama_model_default_params()
        loading.use_extra_bufts = repack
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), loading)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = CONTEXT, BATCH, 512
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings) if self._model else None
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def _evaluate(self, tokens: list[int]) -> None:
        ids = (self._api.llama_token * len(tokens))(*tokens)
        if self._api.llama_decode(self._context, self._api.llama_batch_get_one(ids, len(tokens))) != 0:
            raise RuntimeError("llama.cpp cannot evaluate")

    def prefill(self, tokens: list[int]) -> None:
        """Evaluate a prompt from an empty cache."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        for first in range(0, len(tokens), BATCH):
            self._evaluate(tokens[first : first + BATCH])

    def crop(self, tokens: int) -> None:
        """Let the cache keep the first `tokens` tokens."""
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(self._context), 0, tokens, -1)

    def logits(self) -> NDArray[np.float32]:
        """Return those of the token that was evaluated last."""
        return np.ctypeslib.as_array(self._api.llama_get_logits(self._context), shape=(self.vocab,))

    def decode(self, steps: int, **sampled: float) -> None:
        """Evaluate `steps` tokens one at a time after those in the cache; each follows from the last.

        Args:
            sampled: the top_k, top_p and temperature of llama.cpp's samplers; by default, each token is the most likely one.
        """
        api, token = self._api, 1
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        if sampled:
            samplers = (
                api.llama_sampler_init_top_k(int(sampled["top_k"])),
                api.llama_sampler_init_top_p(sampled["top_p"], 1),
                api.llama_sampler_init_temp(sampled["temperature"]),
                api.llama_sampler_init_dist(1),
            )
            for sampler in samplers:
                api.llama_sampler_chain_add(chain, sampler)
        for _ in range(steps):
            self._evaluate([token])
            token = int(api.llama_sampler_sample(chain, self._context, -1) if sampled else self.logits().argmax())
        api.llama_sampler_free(chain)


class IkLlamaCpp:
    """A model loaded by ik_llama.cpp, with one sequence, flash attention and fused products of experts.

    Args:
        repack: whether weights are repacked at load to its types with interleaved rows (its option `-rtr`).

    Raises:
        RuntimeError: ik_llama.cpp cannot load or evaluate it.
    """

    def __init__(self, path: Path, threads: int, *, repack: bool) -> None:
        from ik_llama_cpp import _ctypes_api as api

        self._api: Any = api
        self._log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        api._lib.llama_log_set(self._log, None)
        api.llama_backend_init()
        loading = api.llama_model_default_params()
        loading.repack_tensors, loading.use_mmap = repack, not repack
        self._model = api.llama_model_load_from_file(str(path).encode(), loading)
        settings = api.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = CONTEXT, BATCH, 512
        settings.n_threads = settings.n_threads_batch = threads
        settings.flash_attn = settings.fused_moe_up_gate = True
        self._context = api.llama_init_from_model(self._model, settings) if self._model else None
        if not self._context:
            raise RuntimeError(f"ik_llama.cpp cannot load {path}")
        self.vocab = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model)))
        self._length = 0

    def __enter__(self) -> IkLlamaCpp:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._api.llama_free(self._context)
        self._api.llama_free_model(self._model)

    def _evaluate(self, tokens: list[int]) -> None:
        ids = (self._api.llama_token * len(tokens))(*tokens)
        batch = self._api.llama_batch(n_tokens=len(tokens), token=ids, all_pos_0=self._length, all_pos_1=1, all_seq_id=0)
        if self._api.llama_decode(self._context, batch) != 0:
            raise RuntimeError("ik_llama.cpp cannot evaluate")
        self._length += len(tokens)

    def prefill(self, tokens: list[int]) -> None:
        """Evaluate a prompt from an empty cache."""
        self._api.llama_kv_cache_clear(self._context)
        self._length = 0
        for first in range(0, len(tokens), BATCH):
            self._evaluate(tokens[first : first + BATCH])

    def crop(self, tokens: int) -> None:
        """Let the cache keep the first `tokens` tokens."""
        self._api._lib.llama_kv_cache_seq_rm(ctypes.c_void_p(self._context), 0, tokens, -1)
        self._length = tokens

    def logits(self) -> NDArray[np.float32]:
        """Return those of the token that was evaluated last."""
        return np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._context, -1), shape=(self.vocab,))

    def decode(self, steps: int, **sampled: float) -> None:
        """Evaluate `steps` tokens one at a time after those in the cache; each follows from the last, as the most likely one.

        Raises:
            RuntimeError: tokens are to be sampled, for which its API needs an array of candidates made here.
        """
        if sampled:
            raise RuntimeError("ik_llama.cpp is measured with greedy tokens only")
        token = 1
        for _ in range(steps):
            self._evaluate([token])
            token = int(self.logits().argmax())
