"""Tiny random models of mixtures of experts with vision, each with a processor of images, and images for them."""

from __future__ import annotations

import base64
import io
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("PIL", reason="an extra: pip install 'moegraft[images]'")

from PIL import Image

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.images import read_image_reader
from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.meta_model import read_tokenizer
from support.byte_tokenizer import byte_tokenizer
from support.families import _randomise, build_config, case_of, model_class

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKS = ("<user>", "<assistant>", "<system>")


Make = Callable[[Any], Any]  # a processor of images, from the model's config


@dataclass(frozen=True)
class VisionCase:
    """A family with vision, and what its processor needs.

    Attributes:
        mark: of an image in the chat template.
        tokens: those of images, by the names that the config has for them.
        processor: makes the smallest processor of images.
        named: further tokens, and those that the processor asks the tokenizer for, by its names for them.
        change: of the config of `family_rows.py`.
        whole: makes the checkpoint's model of the stock model, which is the part of it that writes the text.
        torchvision: whether the processor needs it.
    """

    model_type: str
    mark: str
    tokens: Mapping[str, str]
    processor: Make
    named: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[Any], None] | None = None
    whole: Callable[[Any], Any] | None = None
    torchvision: bool = False

    @property
    def stock_class(self) -> Any:
        return transformers.Kimi_K25ForConditionalGeneration if self.model_type == "kimi_k25" else model_class(case_of(self.model_type))

    def config(self) -> Any:
        if self.model_type != "kimi_k25":  # whose experts are those of another family
            return build_config(case_of(self.model_type))
        tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        parts = {"text_config": build_config(case_of("deepseek_v3")), "vision_config": transformers.Kimi_K25VisionConfig(**tower)}
        return transformers.Kimi_K25Config(**parts, projection_hidden_size=32)


def _grid(name: str, side: int = 6, **changes: Any) -> Make:
    """A processor of patches in a grid, for images of at most `side` x `side` tokens."""

    def make(config: Any) -> Any:
        vision = config.vision_config
        merge = getattr(vision, "spatial_merge_size", 2)
        pixels = vision.patch_size * merge
        given = {"patch_size": vision.patch_size, "temporal_patch_size": getattr(vision, "temporal_patch_size", 1), "merge_size": merge}
        sizes = {"size": {"shortest_edge": pixels**2, "longest_edge": (side * pixels) ** 2}}
        return getattr(transformers, name)(**{**given, **sizes, **changes})

    return make


def _gemma_processor(config: Any) -> Any:
    vision = config.vision_config
    sizes = {"patch_size": vision.patch_size, "max_soft_tokens": 70, "pooling_kernel_size": vision.pooling_kernel_size}
    return transformers.Gemma4ImageProcessorPil(**sizes)


def _gemma_tower(config: Any) -> None:
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16, "position_embedding_size": 64}
    config.vision_config = transformers.Gemma4VisionConfig(**tower, num_attention_heads=2, num_key_value_heads=2)
    config.text_config.vocab_size_per_layer_input = config.text_config.vocab_size
    config.text_config.use_bidirectional_attention = "vision"  # as the model with experts has it


def _with_talker(thinker: Any) -> Any:
    """Qwen3-Omni's thinker with the parts that speak its text, which have experts as well."""
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    text |= {"head_dim": 16, "vocab_size": 64, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    text |= {"shared_expert_intermediate_size": 24, "rope_parameters": thinker.config.text_config.rope_parameters}
    codes = {name: text[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")}
    talker = {"text_config": text, "code_predictor_config": {**codes, "num_hidden_layers": 1, "vocab_size": 64, "num_code_groups": 4}}
    talker |= {"thinker_hidden_size": thinker.config.text_config.hidden_size, "num_code_groups": 4, "spatial_merge_size": 2}
    sound = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    sound |= {"decoder_dim": 32, "codebook_size": 64, "upsample_rates": (2, 2), "num_quantizers": 4}
    parts = {"thinker_config": thinker.config, "talker_config": talker, "code2wav_config": sound}
    whole = transformers.Qwen3OmniMoeForConditionalGeneration(transformers.Qwen3OmniMoeConfig(**parts))
    whole.thinker, whole.generation_config = thinker, thinker.generation_config
    return whole


def _llama_processor(config: Any) -> Any:
    side = 4 * config.vision_config.patch_size  # of a tile, of which four patches are a token
    return transformers.Llama4ImageProcessor(size={"height": side, "width": side}, max_patches=4)


QWEN = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
GLM = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
}
GLM_MARK = "<|begin_of_image|><|image|><|end_of_image|>"
ERNIE = {"image_token": "<|IMAGE|>", "image_start_token": "<|IMAGE_START|>", "image_end_token": "<|IMAGE_END|>"}
ERNIE |= {"video_token": "<|VIDEO|>", "video_start_token": "<|VIDEO_START|>", "video_end_token": "<|VIDEO_END|>"}
OMNI = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "audio_token": "<|audio_pad|>"}
OMNI |= {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
OMNI |= {"audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
OMNI_IDS = {name: token for name, token in QWEN.items() if name != "vision_end_token_id"}
OMNI_IDS |= {"audio_token_id": "<|audio_pad|>", "audio_start_token_id": "<|audio_start|>"}
DOTS = {"start": "<|img|>", "end": "<|endofimg|>", "video": "<|video_pad|>", "audio": "<|audio_comp_pad|>"}
GEMMA = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>"}
GEMMA |= {"boa_token": "<|audio>", "eoa_token": "<audio|>"}
LLAMA = {"image": "<|image|>", "start": "<|image_start|>", "end": "<|image_end|>"}
LLAMA |= {"x": "<|tile_x_separator|>", "y": "<|tile_y_separator|>"}
GLM5_SIZES: dict[str, Any] = {"size": {"longest_edge": 1}, "min_image_tokens": 4, "max_image_tokens": 36}
KIMI_SIZES: dict[str, Any] = {"temporal_patch_size": None, "size": {"max_height": 512, "max_width": 512}}
CASES = {
    each.model_type: each
    for each in (
        VisionCase("qwen3_vl_moe", QWEN_MARK, QWEN, _grid("Qwen2VLImageProcessorPil")),
        VisionCase("qwen3_5_moe", QWEN_MARK, QWEN, _grid("Qwen2VLImageProcessorPil")),  # with recurrent states
        VisionCase("qwen4_exp", QWEN_MARK, QWEN, _grid("Qwen2VLImageProcessorPil")),
        VisionCase(  # whose checkpoint has the parts that speak as well
            "qwen3_omni_moe_thinker", QWEN_MARK, OMNI_IDS, _grid("Qwen2VLImageProcessorPil"), OMNI, whole=_with_talker
        ),
        VisionCase("glm4v_moe", GLM_MARK, GLM, _grid("Glm4vImageProcessorPil")),
        VisionCase("glm5_next", GLM_MARK, GLM, _grid("Glm5NextImageProcessorPil", **GLM5_SIZES)),
        VisionCase(
            "dots3_note", "<|img|><|imgpad|><|endofimg|>", {"image_token_id": "<|imgpad|>"}, _grid("Qwen2VLImageProcessorPil"), DOTS
        ),
        VisionCase(  # whose images have experts of their own
            "ernie4_5_vl_moe",
            "<|IMAGE_START|><|IMAGE|><|IMAGE_END|>",
            {f"{name}_id": token for name, token in ERNIE.items()},
            _grid("Ernie4_5_VLMoeImageProcessorPil"),
            ERNIE,
        ),
        VisionCase(  # whose images have attention in both directions
            "gemma4", "<|image|>", {"image_token_id": "<|image|>"}, _gemma_processor, GEMMA, _gemma_tower
        ),
        VisionCase(  # whose images are tiles, with marks between them, and whose attention has chunks
            "llama4", "<|image|>", {"image_token_id": "<|patch|>"}, _llama_processor, LLAMA, torchvision=True
        ),
        VisionCase("minimax_m3_vl", "]<]image[>[", {"image_token_id": "]<]image[>["}, _grid("MiniMaxM3VLImageProcessor"), torchvision=True),
        VisionCase(
            "kimi_k25",
            "<|media_begin|><|media_pad|><|media_end|>",
            {"image_token_id": "<|media_pad|>"},
            _grid("Kimi_K25ImageProcessor", **KIMI_SIZES),
            {"image_token": "<|media_pad|>", "video_token": "<|video|>"},
            torchvision=True,
        ),
    )
}


def save_vision_model(case: VisionCase, folder: Path, seed: int = 0) -> None:
    """Write a checkpoint of `case` that answers in lowercase letters, with its tokenizer, chat template and processor."""
    letters: Any = byte_tokenizer()
    named = dict(case.named)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters.backend_tokenizer, eos_token="<end>", pad_token="<end>", extra_special_tokens=named
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, *dict.fromkeys([*case.tokens.values(), *named.values()])]})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", case.mark)
    config = case.config()
    text = config.get_text_config()
    text.vocab_size, text.max_position_embeddings = len(tokenizer), 2048
    config.tie_word_embeddings = text.tie_word_embeddings = False
    for name, token in case.tokens.items():
        setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    if case.change is not None:
        case.change(config)
    torch.manual_seed(seed)
    model = case.stock_class(config).train(False)
    _randomise(model, seed)
    spoken = tokenizer.convert_tokens_to_ids(list(string.ascii_lowercase))  # every other token has logit 0
    head = model.get_output_embeddings()
    head.weight.data = torch.zeros_like(head.weight).index_copy(0, torch.tensor(spoken), head.weight.data[spoken])
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    (model if case.whole is None else case.whole(model)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    case.processor(config).save_pretrained(folder)


def load_vision_model(folder: Path, rules: str = "cpu-exact") -> LoadedModel:
    """The injected model as a server has it."""
    model = optimize_and_load(folder, rules, dtype=torch.float32, progress=False, threads=1)
    tokenizer = read_tokenizer(folder)
    return LoadedModel("seeing", model, tokenizer, lambda: [], images=read_image_reader(folder, model, tokenizer))


def picture(seed: int = 0, width: int = 130, height: int = 100) -> Image.Image:
    """An image of random squares."""
    squares = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize((width, height), Image.Resampling.NEAREST)


def as_file(image: Image.Image, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def as_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
