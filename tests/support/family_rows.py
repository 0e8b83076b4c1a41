"""The tiny configuration of each family, as differences from one set of small fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCAB_SIZE = 101  # odd, so that padded rows of a kernel are noticed

# Values for the fields of these names in a text configuration. Widths of 24 and 40 are multiples of no vector and of no quantisation
# group; 6 experts are no power of two.
SMALL_TEXT: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "unpadded_vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "dense_intermediate_size": 72,
    "prefix_dense_intermediate_size": 72,
    "shared_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "shared_experts_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "mlp_only_layers": [0],
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 16,
    "router_hidden_size": 32,
    "bos_token_id": 1,
    "pad_token_id": 0,
}

# Values for image and sound towers, as small as possible, since tests use only text.
SMALL_TOWER: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_heads": 2,
    "out_hidden_size": 64,
    "text_hidden_size": 64,
    "adapter_out_dim": 64,
    "adapter_in_dim": 32,
    "adapter_input_size": 32,
    "projection_intermediate_size": 32,
    "projection_hidden_dim": 32,
    "num_position_embeddings": 16,
    "posemb_grid_size": 4,
    "mel_vocab_size": 8,
    "deepstack_visual_indexes": [0],
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "output_dim": 64,
    "max_source_positions": 16,
    "downsample_hidden_size": 8,
    "mlp_dim": 32,
    "output_channels": 32,
    "image_size": 64,
    "max_position_embeddings": 64,
    "vocab_size": 8,
}

LINEAR_THEN_FULL: Mapping[str, Any] = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
HYBRID_SLIDING: Mapping[str, Any] = {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]}
SLIDING_THEN_FULL: Mapping[str, Any] = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
DENSE_THEN_SPARSE: Mapping[str, Any] = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
EVERY_HEAD_ITS_KEYS: Mapping[str, Any] = {"num_key_value_heads": 4}  # latent attention expands to one key per head
NO_ROTARY_PART: Mapping[str, Any] = {"qk_rope_head_dim": 0, "index_kpool": 4}
SMALL_DOTS3: Mapping[str, Any] = {
    "head_dim": 24,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 24,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 16,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
SMALL_QWEN4: Mapping[str, Any] = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 16,
    "ple_layer_ids": [1],
    "ple_embed_dim": 64,
    "ngram_vocab_size_base": 50,
    "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 8,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
SMALL_LLAMA4: Mapping[str, Any] = {"intermediate_size_mlp": 72, "attention_chunk_size": 16, "floor_scale": 4}
SMALL_GEMMA4: Mapping[str, Any] = {
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
UNKNOWN_GATE = "{} has a gate function of a form that the kernel does not support"
NO_INTERFACE = "{} does not follow transformers' shared experts interface"
NOT_IN_ONE_MODULE = "({}) does not hold its experts in 3-D parameters"
SMALL_SAM: Mapping[str, Mapping[str, Any]] = {"vision_config": {"sam_config": {"downsample_channels": [32, 32]}}}


@dataclass(frozen=True, slots=True)
class FamilyCase:
    """One model class of one family: the differences of its tiny configuration from `SMALL_TEXT`, or the reason of its refusal."""

    model_type: str
    model_class: str
    family: str  # the package in transformers.models
    text: Mapping[str, Any] = field(default_factory=dict)
    towers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # other sub-configurations by name
    whole: Mapping[str, Any] = field(default_factory=dict)  # fields outside the sub-configurations
    generates: bool = True  # False for models that label tokens: supported when loaded, refused as a checkpoint
    broken_in: tuple[str, ...] = ()  # releases of transformers whose own model ends in an error
    reason: str | None = None  # why it is refused, a part of the message if the model can be built; None if it is supported

    @property
    def buildable(self) -> bool:
        """Whether a tiny model can be built and run on text, which holds for some refused ones too."""
        return bool(self.model_class)


def _row(
    model_type: str,
    model_class: str,
    *text: Mapping[str, Any],
    family: str | None = None,
    towers: Mapping[str, Mapping[str, Any]] | None = None,
    whole: Mapping[str, Any] | None = None,
    generates: bool = True,
    broken_in: tuple[str, ...] = (),
    reason: str | None = None,
) -> FamilyCase:
    merged = {name: value for part in text for name, value in part.items()}
    return FamilyCase(model_type, model_class, family or model_type, merged, towers or {}, whole or {}, generates, broken_in, reason)


ROWS: tuple[FamilyCase, ...] = (
    _row("afmoe", "AfmoeForCausalLM", SLIDING_THEN_FULL),
    _row("aria", "AriaForConditionalGeneration", whole={"projector_patch_to_query_dict": {4: 4}}),
    _row("axk1", "AXK1ForCausalLM", EVERY_HEAD_ITS_KEYS),
    _row("axk2", "AXK2ForCausalLM", EVERY_HEAD_ITS_KEYS),
    _row("bailing_hybrid", "BailingHybridForCausalLM", EVERY_HEAD_ITS_KEYS, LINEAR_THEN_FULL),
    _row("beam", "BeamForCausalLM", DENSE_THEN_SPARSE),
    _row("cohere2_moe", "Cohere2MoeForCausalLM", SLIDING_THEN_FULL),
    _row("deepseek_ocr2", "DeepseekOcr2ForConditionalGeneration", DENSE_THEN_SPARSE, towers=SMALL_SAM),
    _row("deepseek_v2", "DeepseekV2ForCausalLM", EVERY_HEAD_ITS_KEYS),
    _row("deepseek_v3", "DeepseekV3ForCausalLM", EVERY_HEAD_ITS_KEYS, {"n_group": 2, "topk_group": 1}),
    _row("deepseek_v32", "DeepseekV32ForCausalLM", EVERY_HEAD_ITS_KEYS),
    _row(
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        {"num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 16, "mlp_layer_types": ["hash_moe", "moe", "moe"]},
        {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "heavily_compressed_attention"]},
    ),
    _row("diffusion_gemma", "", reason="not a causal language model: it denoises blocks of text"),
    _row("dots1", "Dots1ForCausalLM"),
    _row("dots3_note_text", "Dots3NoteForCausalLM", EVERY_HEAD_ITS_KEYS, SMALL_DOTS3, family="dots3_note"),
    _row(
        "dots3_note",
        "Dots3NoteForConditionalGeneration",
        EVERY_HEAD_ITS_KEYS,
        SMALL_DOTS3,
        towers={"vision_config": {"mlp_layer_types": ["sparse"], "num_local_experts": 4, "moe_intermediate_size": 32}},
    ),
    _row("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    _row(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeForConditionalGeneration",
        {"moe_intermediate_size": [24, 16]},  # of experts for text and for images
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}},
    ),
    _row("exaone_moe", "ExaoneMoeForCausalLM", SLIDING_THEN_FULL),
    _row("flex_olmo", "FlexOlmoForCausalLM"),
    _row("flint", "FlintForCausalLM"),
    _row("gemma4_text", "Gemma4ForCausalLM", SLIDING_THEN_FULL, SMALL_GEMMA4, family="gemma4"),
    _row("gemma4", "Gemma4ForConditionalGeneration", SLIDING_THEN_FULL, SMALL_GEMMA4),
    _row("glm4_moe", "Glm4MoeForCausalLM"),
    _row("glm4_moe_lite", "Glm4MoeLiteForCausalLM", EVERY_HEAD_ITS_KEYS),
    _row(
        "glm4v_moe",
        "Glm4vMoeForConditionalGeneration",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
    ),
    _row("glm5_next", "Glm5NextForConditionalGeneration", EVERY_HEAD_ITS_KEYS, LINEAR_THEN_FULL, DENSE_THEN_SPARSE, NO_ROTARY_PART),
    _row("glm_moe_dsa", "GlmMoeDsaForCausalLM", EVERY_HEAD_ITS_KEYS),
    _row("gpt_oss", "GptOssForCausalLM", SLIDING_THEN_FULL),
    _row("granitemoe", "GraniteMoeForCausalLM"),
    _row("granitemoe_swa", "GraniteMoeSWAForCausalLM", SLIDING_THEN_FULL),
    _row("granitemoehybrid", "GraniteMoeHybridForCausalLM", LINEAR_THEN_FULL),
    _row("granitemoeshared", "GraniteMoeSharedForCausalLM"),
    _row("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
    _row("hy_v3", "HYV3ForCausalLM"),
    _row("hy_v4", "HYV4ForCausalLM"),
    _row(
        "hy_v4_vl",
        "HYV4VLForConditionalGeneration",
        EVERY_HEAD_ITS_KEYS,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}},
    ),
    _row("inkling_text", "InklingForCausalLM", HYBRID_SLIDING, family="inkling"),
    _row("inkling2", "Inkling2ForConditionalGeneration", HYBRID_SLIDING, reason=UNKNOWN_GATE.format("Inkling2Experts")),
    _row("inkling2_text", "Inkling2ForCausalLM", HYBRID_SLIDING, family="inkling2", reason=UNKNOWN_GATE.format("Inkling2Experts")),
    _row("inkling2_loop", "Inkling2LoopForConditionalGeneration", HYBRID_SLIDING, reason=UNKNOWN_GATE.format("Inkling2LoopExperts")),
    _row(
        "inkling2_loop_text",
        "Inkling2LoopForCausalLM",
        HYBRID_SLIDING,
        family="inkling2_loop",
        reason=UNKNOWN_GATE.format("Inkling2LoopExperts"),
    ),
    _row("jamba", "JambaForCausalLM", {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "expert_layer_offset": 0}),
    _row("kimi_linear", "KimiLinearForCausalLM", EVERY_HEAD_ITS_KEYS, LINEAR_THEN_FULL),
    _row("kolibri1", "Kolibri1ForCausalLM", SLIDING_THEN_FULL),
    _row("laguna", "LagunaForCausalLM"),
    _row("lara_mini", "LaraMiniForCausalLM", {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}),
    _row("lfm2_moe", "Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention", "conv"]}),
    # One expert per token, as published, and layers without positions, whose temperature grows with the text.
    _row("llama4_text", "Llama4ForCausalLM", SMALL_LLAMA4, {"num_experts_per_tok": 1, "no_rope_layers": [1, 0, 1]}, family="llama4"),
    _row(
        "llama4",
        "Llama4ForConditionalGeneration",
        SMALL_LLAMA4,
        {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 0], "use_qk_norm": False},
        towers={
            "vision_config": {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32, "intermediate_size": 128}
        },
        broken_in=("5.24.0",),  # reads `image_outputs`, which the outputs of its text model do not have
    ),
    _row("mellum", "MellumForCausalLM", DENSE_THEN_SPARSE),
    _row("mimo_v2_flash", "MiMoV2FlashForCausalLM"),
    _row("minimax", "MiniMaxForCausalLM"),
    _row("minimax_m2", "MiniMaxM2ForCausalLM"),
    _row("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", DENSE_THEN_SPARSE, family="minimax_m3_vl"),
    _row("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", DENSE_THEN_SPARSE, whole={"projector_hidden_size": 32}),
    _row("mistral4", "Mistral4ForCausalLM", EVERY_HEAD_ITS_KEYS),
    _row("mistral_large4", "MistralLarge4ForConditionalGeneration", EVERY_HEAD_ITS_KEYS),
    _row("mixtral", "MixtralForCausalLM"),
    _row(
        "muse_spark",
        "MuseSparkForConditionalGeneration",
        {"moe_hidden_size": 48},
        towers={"audio_config": {"patch_sizes": [16], "hidden_sizes": [32], "depths": [1]}},
        whole={"out_hidden_size": 64, "projector_hidden_size": 32},
        reason="MuseSparkExperts normalises each expert's output",
    ),
    _row("nemotron_h", "NemotronHForCausalLM", {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "n_groups": 2}),
    _row("olmoe", "OlmoeForCausalLM"),
    _row("openai_privacy_filter", "OpenAIPrivacyFilterForTokenClassification", generates=False),
    _row("phimoe", "PhimoeForCausalLM"),
    _row("qwen2_moe", "Qwen2MoeForCausalLM"),
    _row("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", LINEAR_THEN_FULL, family="qwen3_5_moe"),
    _row("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", LINEAR_THEN_FULL),
    _row("qwen3_moe", "Qwen3MoeForCausalLM"),
    _row("qwen3_next", "Qwen3NextForCausalLM", LINEAR_THEN_FULL),
    _row(
        "qwen3_omni_moe_thinker",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        {"sliding_window": None},  # as published: its mask has no window, and transformers' cache would have one
        family="qwen3_omni_moe",
        whole={"vision_start_token_id": 151652},
    ),
    _row("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    _row("qwen4_exp_text", "Qwen4ExpForCausalLM", LINEAR_THEN_FULL, SMALL_QWEN4, family="qwen4_exp"),
    _row("qwen4_exp", "Qwen4ExpForConditionalGeneration", LINEAR_THEN_FULL, SMALL_QWEN4),
    _row("solar_open", "SolarOpenForCausalLM"),
    _row("step3p7", "Step3p7ForConditionalGeneration", DENSE_THEN_SPARSE),
    _row("unlimited_ocr", "UnlimitedOcrForConditionalGeneration", towers=SMALL_SAM),
    _row("zaya", "ZayaForCausalLM", {"num_experts_per_tok": 1}),
    # Mixtures of experts without the interface.
    _row(
        "dbrx",
        "DbrxForCausalLM",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        },
        {"ffn_config": {"hidden_size": 64, "ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2}},
        reason=NOT_IN_ONE_MODULE.format("DbrxExperts"),
    ),
    _row("jetmoe", "JetMoeForCausalLM", {"kv_channels": 16}, reason=NOT_IN_ONE_MODULE.format("JetMoeMoA")),
    _row(
        "longcat_flash",
        "LongcatFlashForCausalLM",
        EVERY_HEAD_ITS_KEYS,
        {"num_layers": 2, "ffn_hidden_size": 72, "expert_ffn_hidden_size": 24, "zero_expert_num": 2, "head_dim": 8},
        reason="LongcatFlashExperts) does not state how many experts it holds, as num_experts",
    ),
    _row("nllb-moe", "", family="nllb_moe", reason="not a causal language model: it has an encoder and a decoder"),
    _row("switch_transformers", "", reason="not a causal language model: it has an encoder and a decoder"),
)
