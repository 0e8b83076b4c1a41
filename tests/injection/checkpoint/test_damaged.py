"""Every damaged checkpoint ends in one clear error that names the file and the key, and nothing half-built."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import tiny_model
from transformers import AutoModelForCausalLM, MixtralConfig

from moegraft.injection import optimize_and_load
from moegraft.injection.checkpoint.files import weight_files
from moegraft.operators.errors import CheckpointError, MoegraftError, UnsupportedModelError

INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded checkpoint with nothing wrong with it."""
    folder = tmp_path_factory.mktemp("whole")
    tiny_model(**SIZES, moe_intermediate_size=24, num_experts=4).save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def shard_of(folder: Path, key: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][key]


def edit(folder: Path, key: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrites the shard that holds `key`, and the index after it."""
    file = shard_of(folder, key)
    tensors = load_file(file)
    before = set(tensors)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    for gone in before - set(tensors):
        del index["weight_map"][gone]
    index["weight_map"] |= dict.fromkeys(set(tensors) - before, file.name)
    (folder / INDEX).write_text(json.dumps(index))


def truncate(folder: Path) -> None:
    file = shard_of(folder, EXPERT)
    file.write_bytes(file.read_bytes()[:-100])


def garble(folder: Path) -> None:
    shard_of(folder, EXPERT).write_bytes(b"not a safetensors file")


def empty(folder: Path) -> None:
    shard_of(folder, EXPERT).write_bytes(b"")


def lose_shard(folder: Path) -> None:
    shard_of(folder, EXPERT).unlink()


def lose_expert(folder: Path) -> None:
    edit(folder, EXPERT, lambda tensors: tensors.pop(EXPERT))


def lose_every_up(folder: Path) -> None:
    for expert in range(4):
        key = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        edit(folder, key, lambda tensors, key=key: tensors.pop(key))  # type: ignore[misc]


def lose_down(folder: Path) -> None:
    for expert in range(4):
        key = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
        edit(folder, key, lambda tensors, key=key: tensors.pop(key))  # type: ignore[misc]


def add_expert(folder: Path) -> None:
    edit(folder, EXPERT, lambda tensors: tensors.update({EXPERT.replace(".2.", ".4."): tensors[EXPERT].clone()}))


def add_part(folder: Path) -> None:
    edit(folder, EXPERT, lambda tensors: tensors.update({EXPERT.replace("up_proj", "sideways_proj"): tensors[EXPERT].clone()}))


def reshape_expert(folder: Path) -> None:
    edit(folder, EXPERT, lambda tensors: tensors.update({EXPERT: tensors[EXPERT][:, :-1].contiguous()}))


def retype_expert(folder: Path) -> None:
    edit(folder, EXPERT, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.int32)}))


NORM = "model.norm.weight"


def lose_norm(folder: Path) -> None:
    edit(folder, NORM, lambda tensors: tensors.pop(NORM))


def reshape_norm(folder: Path) -> None:
    edit(folder, NORM, lambda tensors: tensors.update({NORM: tensors[NORM][:-1].contiguous()}))


def retype_norm(folder: Path) -> None:
    edit(folder, NORM, lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.int64)}))


def point_nowhere(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][EXPERT] = "model-99999-of-99999.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def point_to_the_wrong_shard(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][EXPERT] = next(name for name in index["weight_map"].values() if name != index["weight_map"][EXPERT])
    (folder / INDEX).write_text(json.dumps(index))


def point(folder: Path, name: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][EXPERT] = name
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("form", ["../{}", "{}/../../{}", "/{}", "", ".", "a\0b.safetensors", "\ud800"])
def test_an_index_names_only_files_of_its_folder(form: str, whole: Path, tmp_path: Path) -> None:
    """The file is there and right, so that nothing but its place can be refused."""
    folder = shutil.copytree(whole, tmp_path / "model")
    file = shard_of(folder, EXPERT)
    outside = file.rename(tmp_path / "outside.safetensors")
    point(folder, str(outside) if form == "/{}" else form.format("outside.safetensors", "outside.safetensors"))
    for act in (lambda: optimize_and_load(folder, "cpu-exact", progress=False), lambda: weight_files(folder)):
        with pytest.raises(CheckpointError) as caught:
            act()
        assert str(caught.value).startswith(f"{folder / INDEX}: the index lists '{EXPERT}' in ")
        assert "which is outside of this folder and is not read" in str(caught.value)
        str(caught.value).encode()


def test_a_link_to_weights_that_were_moved_is_named(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "linked"
    folder.mkdir()
    shutil.copy(whole / "config.json", folder)
    (folder / "model.safetensors").symlink_to(tmp_path / "gone.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors: a link to .*gone.safetensors, where no file is; bring the file back"):
        optimize_and_load(folder, "cpu-exact", progress=False)


def test_links_and_folders_within_the_folder_are_followed(whole: Path, tmp_path: Path) -> None:
    """The cache of the hub holds links to files beside the folder."""
    folder = shutil.copytree(whole, tmp_path / "model")
    file = shard_of(folder, EXPERT)
    (folder / "parts").mkdir()
    (folder / "parts" / file.name).symlink_to(file.rename(tmp_path / "blob"))
    index = json.loads((folder / INDEX).read_text())
    moved = {key: f"parts/{name}" if name == file.name else name for key, name in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": moved}))
    assert optimize_and_load(folder, "cpu-exact", progress=False) is not None


def test_a_deeply_nested_index(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    (folder / INDEX).write_text('{"weight_map": ' + "[" * 100_000)
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        optimize_and_load(folder, "cpu-exact", progress=False)


def garble_mtp(folder: Path) -> None:
    (folder / "mtp.safetensors").write_bytes(b"not a safetensors file")


def repeat_norm_in_mtp(folder: Path) -> None:
    save_file({"mtp.norm.weight": torch.ones(32), NORM: torch.ones(32)}, folder / "mtp.safetensors")


def break_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def no_weights(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()


def pickled_weights(folder: Path) -> None:
    no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@dataclass(frozen=True)
class Damage:
    make: Callable[[Path], None]
    says: tuple[str, ...]  # each must stand in the message


DAMAGES = [
    Damage(truncate, (".safetensors", "truncated")),
    Damage(garble, (".safetensors", "damaged")),
    Damage(empty, (".safetensors", "damaged")),
    Damage(lose_shard, (".safetensors", "missing")),
    Damage(lose_expert, (".safetensors", EXPERT, "missing")),
    Damage(lose_every_up, ("model.layers.1.mlp.experts", "up_proj", "missing")),
    Damage(lose_down, ("model.layers.1.mlp.experts.down_proj", "missing")),
    Damage(add_expert, (".safetensors", EXPERT.replace(".2.", ".4."), "4 experts")),
    Damage(add_part, (EXPERT.replace("up_proj", "sideways_proj"),)),
    Damage(reshape_expert, (".safetensors", EXPERT, "(24, 31)", "(24, 32)")),
    Damage(retype_expert, (".safetensors", EXPERT, "I32")),
    Damage(lose_norm, (NORM, "missing")),
    Damage(reshape_norm, (".safetensors", NORM, "(31,)", "(32,)")),
    Damage(retype_norm, (".safetensors", NORM, "I64")),
    Damage(garble_mtp, ("mtp.safetensors", "damaged")),
    Damage(repeat_norm_in_mtp, ("mtp.safetensors", NORM, "model-0", "out of date")),
    Damage(point_nowhere, ("model-99999-of-99999.safetensors", "missing")),
    Damage(point_to_the_wrong_shard, (INDEX, EXPERT)),
    Damage(break_index, (INDEX, "weight_map")),
    Damage(no_weights, ("no model.safetensors",)),
    Damage(pickled_weights, ("no model.safetensors", "pytorch_model.bin")),
    Damage(break_config, ("config.json",)),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.make.__name__)
def test_damage_is_named(damage: Damage, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    damage.make(folder)
    with pytest.raises(MoegraftError) as caught:
        optimize_and_load(folder, "cpu-exact", progress=False)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    for part in damage.says:
        assert part in message, message


def test_nan_weights_are_no_error(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    edit(folder, EXPERT, lambda tensors: tensors.update({EXPERT: torch.full_like(tensors[EXPERT], float("nan"))}))
    model = optimize_and_load(folder, "cpu-exact", progress=False)
    with torch.no_grad():
        assert model(torch.arange(40)[None]).logits.isnan().any()


def test_wrong_shape_of_a_fused_parameter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=4))
    model.save_pretrained(tmp_path)
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    state["model.layers.0.mlp.experts.down_proj"] = state["model.layers.0.mlp.experts.down_proj"][:3].contiguous()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape("(3, 32, 24), and the model has (4, 32, 24)")):
        optimize_and_load(tmp_path, "cpu-exact", progress=False)


def test_the_refusal_of_a_quantised_checkpoint_lists_what_is_supported(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModelError, match=r"bitsandbytes; supported are float32, float16, bfloat16, FP8, MXFP4, compressed-tensors, AWQ, GPTQ"
    ):
        optimize_and_load(folder, "cpu-exact", progress=False)


def test_a_failed_load_can_be_tried_again(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    kept = shard_of(folder, EXPERT).read_bytes()
    truncate(folder)
    with pytest.raises(CheckpointError):
        optimize_and_load(folder, "cpu-exact", progress=False)
    shard_of(folder, EXPERT).write_bytes(kept)
    with torch.no_grad():
        assert optimize_and_load(folder, "cpu-exact", progress=False)(torch.arange(8)[None]).logits.isfinite().all()
