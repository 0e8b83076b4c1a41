"""GGUF files that are damaged, incomplete or of another model: one error each that names the file and the tensor."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.gguf_files import BlockType, gguf, tensors_of, write_gguf
from transformers import AutoModelForCausalLM, FlexOlmoConfig, OlmoeConfig, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.checkpoint.gguf.files import open_file
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


def number(value: int, form: str = "<Q") -> bytes:
    return struct.pack(form, value)


def text(value: bytes | str) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return number(len(data)) + data


def field(key: str, kind: gguf.GGUFValueType, value: bytes) -> bytes:
    return text(key) + number(kind, "<I") + value


def tensor(name: str = "x", dimensions: tuple[int, ...] = (32,), kind: int = BlockType.F32, offset: int = 0) -> bytes:
    sizes = b"".join(map(number, dimensions))
    return text(name) + number(len(dimensions), "<I") + sizes + number(kind, "<I") + number(offset)


def header(*fields: bytes, tensors: tuple[bytes, ...] = (), data: int = 128, counts: tuple[int, int] | None = None) -> bytes:
    """A file whose tensors have `data` bytes; `counts`, of tensors and keys, where they are not those that follow."""
    tensor_count, field_count = counts or (len(tensors), len(fields))
    head = b"GGUF" + number(3, "<I") + number(tensor_count) + number(field_count) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


KIND = gguf.GGUFValueType
ARCHITECTURE = field("general.architecture", KIND.STRING, text("olmoe"))


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return number(kind, "<I") + number(count) + items


DAMAGED_HEADERS = {
    "version": (b"GGUF" + number(9, "<I") + bytes(99), "version 9 is not supported, only 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(99), "this GGUF file is big-endian"),
    "keys without end": (header(counts=(0, 1 << 40)), "the header: a count of 1099511627776 keys, and the file has"),
    "tensors without end": (header(counts=(1 << 63, 0)), "the header: a count of 9223372036854775808 tensors"),
    "more keys than any file": (header(data=1 << 20, counts=(0, 70_000)), "a count of 70000 keys, more than the 65536 that are supported"),
    "long key": (header(number(1 << 50), counts=(0, 1)), "the header: a string needs 1125899906842624 bytes, and the file has"),
    "key that is no text": (header(text(b"\xff") + bytes(9)), "the header: a string is not UTF-8"),
    "unknown type": (header(field("a", 99, b"")), "key 'a': unknown value type 99"),  # type: ignore[arg-type] # as files may have
    "long text": (header(field("a", KIND.STRING, number(1 << 62))), "key 'a': a string needs 4611686018427387904 bytes, and the file has"),
    "key twice": (header(ARCHITECTURE, ARCHITECTURE), "key 'general.architecture': this key occurs twice"),
    "array of numbers without end": (
        header(field("a", KIND.ARRAY, array(KIND.UINT8, 1 << 40))),
        "key 'a': an array of 1099511627776 values needs 1099511627776 bytes",
    ),
    "array of texts without end": (
        header(field("a", KIND.ARRAY, array(KIND.STRING, 1 << 40))),
        "key 'a': a count of 1099511627776 values",
    ),
    "array of arrays without end": (
        header(field("a", KIND.ARRAY, array(KIND.ARRAY, 1 << 40))),
        "key 'a': a count of 1099511627776 values",
    ),
    "nested arrays": (
        header(field("a", KIND.ARRAY, array(KIND.ARRAY, 1) * 3000 + array(KIND.UINT8, 0))),
        "key 'a': more than 8 nested arrays",
    ),
    "text of block_count": (
        header(ARCHITECTURE, field("olmoe.block_count", KIND.STRING, text("two")), tensors=(tensor(),)),
        "'olmoe.block_count' must be an integer, not 'two'",
    ),
    "array of block_count": (
        header(ARCHITECTURE, field("olmoe.block_count", KIND.ARRAY, array(KIND.UINT32, 1, number(2, "<I"))), tensors=(tensor(),)),
        "'olmoe.block_count' must be an integer, not an array",
    ),
    "fraction of nextn_predict_layers": (
        header(ARCHITECTURE, field("olmoe.nextn_predict_layers", KIND.FLOAT32, struct.pack("<f", 0.5)), tensors=(tensor(),)),
        "'olmoe.nextn_predict_layers' must be an integer, not 0.5",
    ),
    "text of split.count": (
        header(ARCHITECTURE, field("split.count", KIND.STRING, text("many")), tensors=(tensor(),)),
        "'split.count' must be an integer, not 'many'",
    ),
    "architecture that is a number": (header(field("general.architecture", KIND.UINT32, number(5, "<I"))), "the architecture is '5'"),
    "alignment of 0": (
        header(field("general.alignment", KIND.UINT32, number(0, "<I"))),
        "key 'general.alignment': the alignment must be a power of two, not 0",
    ),
    "alignment in words": (header(field("general.alignment", KIND.STRING, text("wide"))), "must be a power of two, not 'wide'"),
    "long name of a tensor": (header(tensors=(number(1 << 40),), counts=(1, 0)), "the list of tensors: a string needs 1099511627776 bytes"),
    "dimensions": (header(tensors=(tensor(dimensions=(1,) * 5),)), "tensor 'x': 5 dimensions, more than the 4 that are supported"),
    "many dimensions": (header(tensors=(text("x") + number(1 << 31, "<I") + bytes(20),)), "tensor 'x': 2147483648 dimensions"),
    "dimension of 0": (header(tensors=(tensor(dimensions=(1 << 63, 0)),)), "tensor 'x': a dimension of 0"),
    "large tensor": (header(tensors=(tensor(dimensions=(1 << 63, 1 << 63, 4)),)), "tensor 'x': the tensor ends at byte"),
    "tensor past the end": (header(tensors=(tensor(offset=32),)), "tensor 'x': the tensor ends at byte 224, and the file has 192"),
    "offset past the end": (header(tensors=(tensor(offset=(1 << 64) - 64),)), "tensor 'x': the tensor ends at byte 18446744073709551"),
    "unknown type of weights": (header(tensors=(tensor(kind=999),)), "tensor 'x': unknown tensor type 999"),
    "part of a block": (
        header(tensors=(tensor(dimensions=(33,), kind=BlockType.Q8_0),)),
        "'x': rows of 33 values are no multiple of the block size",
    ),
    "no row of blocks": (
        header(tensors=(tensor(dimensions=(), kind=BlockType.Q8_0),)),
        "tensor 'x': rows of 1 values are no multiple",
    ),
    "tensor twice": (header(tensors=(tensor(), tensor())), "tensor 'x': this name occurs twice"),
}


@pytest.mark.parametrize("name", DAMAGED_HEADERS)
def test_damaged_headers(name: str, folder: Path) -> None:
    content, said = DAMAGED_HEADERS[name]
    (folder / "model.gguf").write_bytes(content)
    message = refusal(folder)
    assert message.startswith(f"{folder / 'model.gguf'}: ") and said in message, message


def test_a_header_is_read(tmp_path: Path) -> None:
    """The same pieces, with nothing wrong: nested arrays and texts that are passed over, and an alignment of its own."""
    nested = array(KIND.ARRAY, 2, array(KIND.UINT16, 3, bytes(6)) + array(KIND.STRING, 2, text("a") + text("")))
    fields = (
        ARCHITECTURE,
        field("a", KIND.ARRAY, nested),
        field("general.alignment", KIND.UINT32, number(64, "<I")),
        field("b", KIND.BOOL, b"\1"),
    )
    head = header(*fields, tensors=(tensor("x", (8, 2)), tensor("y", (32,), BlockType.Q8_0, offset=64)), data=0).rstrip(b"\0")
    # the offset of the last tensor, 64, is followed by seven zeros
    head += bytes(7)
    values = np.arange(16, dtype=np.float32)
    path = tmp_path / "model.gguf"
    path.write_bytes(head + bytes(-len(head) % 64) + values.tobytes() + bytes(34))
    found = open_file(path)
    assert found.fields == {"general.architecture": "olmoe", "a": None, "general.alignment": 64, "b": True}
    assert found.tensors["x"].data.tolist() == values.reshape(2, 8).tolist()
    assert found.tensors["y"].shape == (32,) and found.tensors["y"].data.tolist() == [0] * 34
    with pytest.raises(CheckpointError, match="'b' must be an integer, not True"):
        found.integer("b")


@pytest.mark.parametrize("cut", range(24, 400, 7))
def test_a_header_cut_anywhere(cut: int, tmp_path: Path) -> None:
    whole = header(ARCHITECTURE, field("a", KIND.ARRAY, array(KIND.STRING, 30, text("word") * 30)), tensors=(tensor(),))
    assert len(whole) > 400
    (tmp_path / "model.gguf").write_bytes(whole[:cut])
    with pytest.raises(CheckpointError, match=r"damaged or truncated GGUF file \("):
        open_file(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model-00001-of-00000.gguf", "the name means part 1 of 0"),
        ("model-00004-of-00003.gguf", "the name means part 4 of 3"),
        (
            "model-00001-of-99999.gguf",
            "model-00002-of-99999.gguf, model-00003-of-99999.gguf, model-00004-of-99999.gguf and 99995 more",
        ),
    ],
)
def test_names_of_impossible_parts(name: str, said: str, folder: Path) -> None:
    (folder / name).write_bytes(header(ARCHITECTURE))
    assert said in refusal(folder, name)


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


def rename_last_part(folder: Path) -> None:
    (folder / "model-00003-of-00003.gguf").rename(folder / "model.gguf")


def whole_as_part(folder: Path) -> None:
    writer = gguf.GGUFWriter(str(folder / "model-00002-of-00003.gguf"), "olmoe")
    writer.add_tensor("output.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
        (lose_part, PARTS, r"parts of this model, which has 3, are missing: model-00002-of-00003\.gguf; download them"),
        (rename_part, "model.gguf", r"model\.gguf: this is part 1 of 3 by its header; rename it to NAME-00001-of-00003\.gguf"),
        (rename_last_part, "model.gguf", r"model\.gguf: this is part 3 of 3 by its header; rename it to NAME-00003-of-00003\.gguf"),
        (whole_as_part, PARTS, r"model-00002-of-00003\.gguf: this is a whole model by its header and part 2 of 3 by its name"),
        (
            double_part,
            PARTS,
            r"model-00002-of-00003\.gguf: this is part 1 of 3 by its header and part 2 of 3 by its name",
        ),
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
    assert f"model.gguf: '{name}', the tensor of model." in message


def test_missing_expert(folder: Path, model: PreTrainedModel) -> None:
    tensors = tensors_of(model)
    for number, values in enumerate(tensors.pop("blk.0.ffn_down_exps.weight")[:3]):
        tensors[f"blk.0.ffn_down.{number}.weight"] = values
    write_gguf(folder / "model.gguf", model, tensors=tensors)
    assert "'blk.0.ffn_down.3.weight', the tensor of model.layers.0.mlp.experts.down_proj, is missing" in refusal(folder)


@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "blk.1.ffn_gate_exps.weight"])
def test_misshaped_tensor(name: str, folder: Path, model: PreTrainedModel) -> None:
    tensors = tensors_of(model)
    tensors[name] = np.ascontiguousarray(tensors[name][:-1])
    write_gguf(folder / "model.gguf", model, tensors=tensors)
    assert re.search(rf"model\.gguf: {re.escape(name)}: shape \(\d+, .*\), and the model has \(", refusal(folder))


def test_unknown_tensor(folder: Path, model: PreTrainedModel) -> None:
    write_gguf(folder / "model.gguf", model, tensors=tensors_of(model) | {"blk.0.attn_q.bias": np.ones(64, np.float32)})
    assert "model.gguf: blk.0.attn_q.bias: the model has no parameter for this tensor" in refusal(folder)


def test_another_architecture(folder: Path, model: PreTrainedModel) -> None:
    write_gguf(folder / "model.gguf", model, architecture="qwen3moe")
    assert "the architecture is 'qwen3moe', and that of the config's model type, 'olmoe', is 'olmoe'" in refusal(folder)


def test_another_number_of_layers(folder: Path, model: PreTrainedModel) -> None:
    write_gguf(folder / "model.gguf", model)
    model.config.__class__(**{**model.config.to_dict(), "num_hidden_layers": 3}).save_pretrained(folder)
    assert refusal(folder).endswith("model.gguf: 2 layers, and the config has 3")


def test_a_type_that_holds_no_weights(folder: Path, model: PreTrainedModel) -> None:
    write_as_it_is(folder / "model.gguf", {"output.weight": np.ones((4, 8), np.int32).view(np.float32)}, BlockType.I32)
    assert re.search(r"model\.gguf: output\.weight: type I32 cannot be read; supported are .*Q4_K", refusal(folder))


def test_a_vocabulary_alone(folder: Path) -> None:
    write_as_it_is(folder / "model.gguf", {}, BlockType.F32)
    assert "this file has no tensors" in refusal(folder)


def test_a_family_that_is_not_mapped(tmp_path: Path, model: PreTrainedModel) -> None:
    FlexOlmoConfig(**SIZES, vocab_size=101, num_experts=4, architectures=["FlexOlmoForCausalLM"]).save_pretrained(tmp_path)
    write_gguf(tmp_path / "model.gguf", model)
    assert "model type 'flex_olmo' cannot be loaded from GGUF files; supported are afmoe" in refusal(tmp_path, kind=UnsupportedModelError)


def test_a_model_in_memory(folder: Path, model: PreTrainedModel) -> None:
    write_gguf(folder / "model.gguf", model)
    with pytest.raises(UnsupportedModelError, match="gguf: this OlmoeForCausalLM is loaded already"):
        optimize_and_load(olmoe(), "cpu-exact", gguf=folder, progress=False)
