"""GGUF files that are damaged, incomplete or of another model: one error each that names the file and the tensor."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.gguf_files import BlockType, tensors_of, write_gguf
from transformers import AutoModelForCausalLM, OlmoeConfig, PhimoeConfig, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.operators.errors import CheckpointError, MoegraftError, UnsupportedModelError

SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
PARTS = "model-00001-of-00003.gguf"


def olmoe() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(OlmoeConfig(**SIZES, vocab_size=101, num_experts=4, num_experts_per_tok=2))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return olmoe()


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    """A folder with a config and nothing wrong with it."""
    model.config.save_pretrained(tmp_path)
    return tmp_path


def refusal(folder: Path, path: str = "model.gguf", kind: type[MoegraftError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        optimize_and_load(folder, "cpu-exact", gguf=folder / path, progress=False)
    return str(caught.value)


def write_as_it_is(path: Path, tensors: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]], kind: BlockType) -> None:
    writer = gguf.GGUFWriter(str(path), "olmoe")
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("cut", [3, 20, 200, 3000, -100], ids=["magic", "counts", "fields", "tensors", "data"])
def test_truncated(cut: int, folder: Path, model: PreTrainedModel) -> None:
    file = folder / "model.gguf"
    write_gguf(file, model)
    file.write_bytes(file.read_bytes()[:cut])
    assert re.search(r"model\.gguf: (damaged or truncated|not a) GGUF file .*download it again", refusal(folder))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"GGUF" + bytes(range(256)), b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_no_gguf_file(content: bytes, folder: Path) -> None:
    (folder / "model.gguf").write_bytes(content)
    assert "model.gguf: " in refusal(folder) and "GGUF file" in refusal(folder)


def test_nothing_there(folder: Path) -> None:
    assert refusal(folder) == f"{folder / 'model.gguf'}: no such GGUF file or folder"
    assert "no .gguf file in this folder" in refusal(folder, ".")


def test_two_models_in_a_folder_are_not_merged(folder: Path, model: PreTrainedModel) -> None:
    for name in ("model-Q4.gguf", "model-Q8.gguf"):
        write_gguf(folder / name, model)
    message = refusal(folder, ".")
    assert "2 models in this folder" in message and "model-Q4.gguf, model-Q8.gguf" in message


def lose_part(folder: Path) -> None:
    (folder / "model-00002-of-00003.gguf").unlink()


def rename_part(folder: Path) -> None:
    (folder / PARTS).rename(folder / "model.gguf")


def double_part(folder: Path) -> None:
    (folder / "model-00002-of-00003.gguf").write_bytes((folder / PARTS).read_bytes())


def foreign_part(folder: Path) -> None:
    """The same names and numbers, but with the tensors of another part."""
    file = folder / "model-00002-of-00003.gguf"
    reader = gguf.GGUFReader(folder / PARTS)
    writer = gguf.GGUFWriter(str(file), "olmoe")
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 3)
    writer.add_tensor(reader.tensors[0].name, np.array(reader.tensors[0].data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("damage", "path", "said"),
    [
        (lose_part, PARTS, r"model-00002-of-00003\.gguf of a model in 3 parts is missing; download it"),
        (rename_part, "model.gguf", r"model\.gguf: its header calls it part 1 of 3; give it back its name, NAME-00001-of-00003\.gguf"),
        (double_part, PARTS, r"model-00002-of-00003\.gguf: its header calls it part 1 of 3, its name part 2 of 3; download it again"),
        (foreign_part, PARTS, r"model-00002-of-00003\.gguf: \S+: also in model-00001-of-00003\.gguf"),
    ],
)
def test_parts(damage: Callable[[Path], None], path: str, said: str, folder: Path, model: PreTrainedModel) -> None:
    write_gguf(folder / "model.gguf", model, tensors_a_file=10)
    assert len(list(folder.glob("*.gguf"))) == 3, "the damages name three parts"
    damage(folder)
    assert re.search(said, refusal(folder, path))


@pytest.mark.parametrize("name", ["blk.1.ffn_norm.weight", "blk.1.ffn_up_exps.weight", "output_norm.weight"])
def test_missing_tensor(name: str, folder: Path, model: PreTrainedModel) -> None:
    tensors = tensors_of(model)
    del tensors[name]
    write_gguf(folder / "model.gguf", model, tensors=tensors)
    message = refusal(folder)
    assert f"model.gguf: '{name}' is missing, which feeds model." in message


def test_missing_expert(folder: Path, model: PreTrainedModel) -> None:
    tensors = tensors_of(model)
    for number, values in enumerate(tensors.pop("blk.0.ffn_down_exps.weight")[:3]):
        tensors[f"blk.0.ffn_down.{number}.weight"] = values
    write_gguf(folder / "model.gguf", model, tensors=tensors)
    assert "'blk.0.ffn_down.3.weight' is missing" in refusal(folder)


@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "blk.1.ffn_gate_exps.weight"])
def test_misshaped_tensor(name: str, folder: Path, model: PreTrainedModel) -> None:
    tensors = tensors_of(model)
    tensors[name] = np.ascontiguousarray(tensors[name][:-1])
    write_gguf(folder / "model.gguf", model, tensors=tensors)
    assert re.search(rf"model\.gguf: {re.escape(name)}: shape \(\d+, .*\) where the model has \(", refusal(folder))


def test_unknown_tensor(folder: Path, model: PreTrainedModel) -> None:
    write_gguf(folder / "model.gguf", model, tensors=tensors_of(model) | {"blk.0.attn_q.bias": np.ones(64, np.float32)})
    assert "model.gguf: blk.0.attn_q.bias: nothing in the model reads this tensor" in refusal(folder)


def test_another_architecture(folder: Path, model: PreTrainedModel) -> None:
    write_gguf(folder / "model.gguf", model, architecture="qwen3moe")
    assert "architecture 'qwen3moe' where the config's model type, 'olmoe', is 'olmoe'" in refusal(folder)


def test_another_number_of_layers(folder: Path, model: PreTrainedModel) -> None:
    write_gguf(folder / "model.gguf", model)
    model.config.__class__(**{**model.config.to_dict(), "num_hidden_layers": 3}).save_pretrained(folder)
    assert refusal(folder).endswith("model.gguf: 2 layers where the config has 3")


def test_a_type_that_holds_no_weights(folder: Path, model: PreTrainedModel) -> None:
    write_as_it_is(folder / "model.gguf", {"output.weight": np.ones((4, 8), np.int32).view(np.float32)}, BlockType.I32)
    assert re.search(r"model\.gguf: output\.weight: type I32 cannot be read; supported are .*Q4_K", refusal(folder))


def test_a_vocabulary_alone(folder: Path) -> None:
    write_as_it_is(folder / "model.gguf", {}, BlockType.F32)
    assert "no tensors in this file" in refusal(folder)


def test_a_family_that_is_not_mapped(tmp_path: Path, model: PreTrainedModel) -> None:
    PhimoeConfig(**SIZES, vocab_size=101, num_local_experts=4, architectures=["PhimoeForCausalLM"]).save_pretrained(tmp_path)
    write_gguf(tmp_path / "model.gguf", model)
    assert "model type 'phimoe' cannot be loaded from GGUF files; supported are deepseek_v2" in refusal(
        tmp_path, kind=UnsupportedModelError
    )


def test_a_model_in_memory(folder: Path, model: PreTrainedModel) -> None:
    write_gguf(folder / "model.gguf", model)
    with pytest.raises(UnsupportedModelError, match="gguf: this OlmoeForCausalLM is loaded already"):
        optimize_and_load(olmoe(), "cpu-exact", gguf=folder, progress=False)
