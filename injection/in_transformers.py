"""moegraft as a quantisation method of plain transformers, and the folders that name it.

    model = AutoModelForCausalLM.from_pretrained("path/or/hub-id", quantization_config=MoegraftConfig(rules="cpu"))

transformers builds the model on meta and loads what rules leave to it; planning, checks and the streamed loading of operators are those of
`optimize_and_load`, and so are the errors. Importing this module registers the method; `moegraft.operators.autoload` imports it in time,
while transformers is being imported: what is heavy is imported on use.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME
from transformers.utils.quantization_config import QuantizationConfigMixin

from moegraft.operators.autoload import METHOD
from moegraft.operators.errors import CheckpointError, UnsupportedModelError, error_sentence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moegraft.injection.grafting import GraftedModel
    from moegraft.injection.injected import Injection
    from moegraft.injection.rules import RuleFile

ELSEWHERE = "use moegraft.injection.optimize_and_load"
LINKED = "stock-"  # before the names of linked files: no `save_pretrained` writes to such a name, and so through a link into stock weights
OF_FILES = {"is_main_process", "max_shard_size", "safe_serialization", "save_original_format"}  # how weights are written, which are not
OF_HUB = {"token", "repo_id", "private", "revision", "commit_message", "commit_description", "create_pr", "tags"}


@register_quantization_config(METHOD)
class MoegraftConfig(QuantizationConfigMixin):
    """The rules of an injected model, as `quantization_config` of `from_pretrained` or of a folder's config.json.

    Args:
        rules: the path of a rule file, the name of a shipped one, or the content of one as a mapping.
        vars: values for the rule file's `${...}`; they override its own.
        threads: CPU threads of the operators; 0: one for each physical core this process may use, less up to two that GPUs need.

    Raises:
        UnsupportedModelError: an unknown argument, or rules that are none.
    """

    def __init__(
        self,
        rules: str | os.PathLike[str] | Mapping[str, Any] = "cpu",
        vars: Mapping[str, object] | None = None,
        threads: int = 0,
        quant_method: str = METHOD,
        **unknown: object,
    ) -> None:
        if unknown:
            raise UnsupportedModelError(f"MoegraftConfig has no argument {', '.join(sorted(unknown))}: it has rules, vars and threads")
        if not isinstance(rules, str | os.PathLike | Mapping):
            named = type(rules).__name__
            raise UnsupportedModelError(f"MoegraftConfig: rules are a path, the name of shipped ones or a mapping, not of type {named}")
        self.quant_method = METHOD  # type: ignore[assignment] # a registered name, which is none of transformers' own
        self.rules = dict(rules) if isinstance(rules, Mapping) else os.fspath(rules)
        self.vars = None if vars is None else dict(vars)
        self.threads = threads

    def read_rules(self) -> RuleFile:
        """
        Raises:
            RuleErrors: every mistake of the rules.
        """
        from moegraft.injection.api import read_rules
        from moegraft.operators.registry import load_registry

        return read_rules(self.rules, vars=self.vars, registry=load_registry())


@register_quantizer(METHOD)
class MoegraftQuantizer(HfQuantizer):
    """transformers' hooks around the loading of what is not replaced."""

    quantization_config: MoegraftConfig

    def __init__(self, quantization_config: MoegraftConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._rules: RuleFile | None = None
        self._grafted: GraftedModel | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Read the rules, before files are looked for.

        Raises:
            RuleErrors: every mistake of the rules.
            UnsupportedModelError: the rules need what `from_pretrained` does not do.
        """
        from moegraft.injection.parallel import process_count
        from moegraft.operators.registry import load_registry

        self._rules = self.quantization_config.read_rules()
        registry = load_registry()
        for rule in self._rules.rules:
            if rule.operator is not None and registry[rule.operator].traits(rule.options).mtp:
                raise UnsupportedModelError(
                    f"{rule.place_text}: from_pretrained does not build layers for multi-token prediction: {ELSEWHERE} for this draft"
                )
        if process_count() > 1 and self._rules.shares != "none":
            raise UnsupportedModelError(
                f"several processes share experts, and from_pretrained loads a whole model in each: {ELSEWHERE}, or set "
                "'parallel: {shares: none}' in the rule file"
            )
        self._keep_experts_in_memory(kwargs.get("device_map"))

    def _keep_experts_in_memory(self, device_map: Any) -> None:
        """
        Raises:
            UnsupportedModelError: `device_map`, if transformers has made it of names, places packed experts on the disk.
        """
        if self._grafted is None or not isinstance(device_map, Mapping):
            return
        for path, operator in self._grafted.injection.replacing.items():
            around = [name for name in device_map if not name or path == name or path.startswith(f"{name}.")]
            if operator.kind == "experts" and around and device_map[max(around, key=len)] == "disk":
                raise UnsupportedModelError(
                    f"device_map: {path} would be on the disk, and packed experts are in memory: place its layer elsewhere, or let the "
                    "rules keep experts in files by the option 'memory' of hybrid_experts"
                )

    def update_device_map(self, device_map: dict[str, Any] | None) -> dict[str, Any] | None:
        """Place what is not replaced on the GPUs that operators use, unless the caller places it."""
        from moegraft.injection.grafting import infer_device_map
        from moegraft.operators.machine import probe_machine
        from moegraft.operators.registry import load_registry

        if device_map is not None or self._rules is None:
            return device_map
        registry = load_registry()
        wanted = [registry[rule.operator].traits(rule.options).devices for rule in self._rules.rules if rule.operator is not None]
        found: dict[str, Any] | None = infer_device_map(frozenset().union(*wanted), probe_machine())
        return found

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, device_map: Any = None, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        from transformers.modeling_utils import local_torch_dtype

        from moegraft.injection.api import log_notices
        from moegraft.injection.checkpoint.files import weight_files
        from moegraft.injection.checkpoint.packed import MARK
        from moegraft.injection.grafting import graft
        from moegraft.injection.injected import place
        from moegraft.injection.meta_model import MetaModel, ModelSource, as_floats, stored_dtype
        from moegraft.injection.planning import plan
        from moegraft.operators.machine import probe_machine

        assert self._rules is not None, "transformers validates first"
        if not checkpoint_files:
            raise UnsupportedModelError(f"the weights are not in files: pass a folder or hub id, or {ELSEWHERE} on the model in memory")
        folder = Path(checkpoint_files[0]).parent
        other = [name for name in map(os.path.basename, checkpoint_files) if name not in weight_files(folder)]
        if other:
            raise UnsupportedModelError(f"{folder}: transformers loads {other[0]}, and only safetensors without a variant are read")
        if getattr(model.config, "distributed_config", None) is not None:
            raise UnsupportedModelError(f"tp_plan and distributed_config divide stock modules, and operators are none: {ELSEWHERE}")
        source = ModelSource(folder, as_floats(model.config), type(model))
        stock = deepcopy(model)  # on meta; transformers' converters look the shapes of parameters up in it, after operators are in place
        meta = MetaModel(source, stock, stored_dtype(source), model.dtype, has_weights=True)
        if isinstance(device_map, str):  # "auto" and its like: transformers places what is left, after this
            on_cpu = not probe_machine().gpus
        else:
            on_cpu = device_map is None or {str(device) for device in device_map.values()} <= {"cpu"}
        with torch.device("cpu"), local_torch_dtype(torch.float32):  # transformers calls this where new tensors are on meta
            the_plan = plan(meta, self._rules)
            log_notices(the_plan)
            grafted = graft(meta, the_plan, threads=self.quantization_config.threads, device_map="cpu" if on_cpu else device_map)
        model.__class__ = grafted.model_class
        for path, operator in grafted.injection.replacing.items():
            place(model, path, operator)
        prefix = rf"^({re.escape(model.base_model_prefix)}\.)?"  # which the checkpoint of a larger model has before a base model's keys
        read = {rf"{prefix}{re.escape(path)}\." for path in grafted.injection.replacing}
        if meta.weights is not None and meta.weights.packed:
            read.add(re.escape(MARK))  # transformers may give these other names, as those of stock weights
        model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | read
        self._grafted = grafted
        self._keep_experts_in_memory(device_map)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        from moegraft.injection.loading import load

        grafted, self._grafted = self._grafted, None
        assert grafted is not None, "grafted before the weights are loaded"
        return load(grafted, progress=transformers_logging.is_progress_bar_enabled(), rest=model)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters are: what is packed has no parameters


def save_injected(model: PreTrainedModel, injection: Injection, folder: Path, options: Mapping[str, Any], *, packed: bool = False) -> None:
    """Write a folder from which `from_pretrained` and `optimize_and_load` load the model: its config with the rules, and its weights.

    Args:
        options: those of `save_pretrained`.
        packed: write the bytes that operators hold, and the stock weights of what they leave; else link to all stock weights.

    Raises:
        UnsupportedModelError: the model has no stock checkpoint, or `options` ask for something else to be saved.
        CheckpointError: the folder holds other weights, or cannot be written.
    """
    from moegraft.injection.injected import parameter_states
    from moegraft.injection.meta_model import read_config
    from moegraft.operators.sparsity import FILE_NAME

    unknown = sorted(name for name, value in options.items() if value is not None and name not in OF_FILES | OF_HUB)
    if unknown:
        raise UnsupportedModelError(f"{', '.join(unknown)}: an injected model is saved with its rules and its checkpoint's weights")
    if options.get("is_main_process") is False:
        return
    stock = injection.stock_folder
    if stock is None:
        raise UnsupportedModelError(
            "this injected model cannot be saved: it was not loaded from a checkpoint in float32, float16 or bfloat16, whose weights could "
            "be saved with its rules; save the stock model before it is injected, or keep its file and the rule file"
        )
    if injection.new_head:
        raise UnsupportedModelError(
            f"this injected model cannot be saved: {', '.join(injection.new_head)} are not in its checkpoint, whose weights are "
            "saved; train adapters by PEFT, with the head among its modules_to_save, and save these"
        )
    if not stock.is_dir():
        raise CheckpointError(f"{stock}: it was moved after the model was loaded, and has the weights to save: load the model from there")
    # Saving runs the code that a folder brings only where loading did.
    trusted = TRANSFORMERS_DYNAMIC_MODULE_NAME in {cls.__module__.partition(".")[0] for cls in (type(model), type(model.config))}
    configs = (read_config(stock, trust_remote_code=trusted), model.config)
    sizes = [getattr(config.get_text_config(), "vocab_size", None) for config in configs]
    if sizes[0] != sizes[1]:
        raise UnsupportedModelError(
            f"this injected model cannot be saved: its embeddings were resized from {sizes[0]} to {sizes[1]} tokens; what is saved is its "
            "checkpoint's weights, so resize and save the stock model, and inject that"
        )
    changed = [name for name, state in parameter_states(model).items() if state.differs(injection.loaded.get(name, state))]
    if changed:
        raise UnsupportedModelError(
            f"this injected model cannot be saved: {len(changed)} of its parameters ({changed[0]}, ...) were written to after loading, as "
            "by training, and what is saved is its checkpoint's weights; train adapters by PEFT, with these layers among its "
            "modules_to_save, and save these, or load the model again"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if packed:
            _write_packed(injection, stock, folder, trusted=trusted)
        else:
            _link_weights(stock, folder)
        if (stock / FILE_NAME).is_file() and stock.resolve() != folder.resolve():
            shutil.copyfile(stock / FILE_NAME, folder / FILE_NAME)
        config = deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = model.dtype
        config.quantization_config = MoegraftConfig(injection.plan.rules.to_mapping(), threads=injection.context.threads)
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        card = folder / "README.md"
        if not card.exists():
            card.write_text(_card(model, injection, packed=packed), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{folder}: the model cannot be saved: {error_sentence(error)}") from error


def _link_weights(stock: Path, folder: Path) -> None:
    """Link a folder to the weights of another one, under names to which no `save_pretrained` writes, and write an index of them."""
    from moegraft.injection.checkpoint.files import INDEX, MTP_FILE, open_checkpoint

    checkpoint = open_checkpoint(stock)
    names = {file: file.name if file.name == MTP_FILE else LINKED + file.name.removeprefix(LINKED) for file in checkpoint.files}
    # A folder that is saved over itself may have the only copy of its weights; links to others may be replaced, files may not.
    missing = {folder / name: file for file, name in names.items() if not ((folder / name).exists() and (folder / name).samefile(file))}
    present = {folder / name for name in names.values()} - missing.keys()
    others = set(folder.glob("*.safetensors")) - present
    _refuse_others(folder, [path for path in others if path not in missing or not path.is_symlink()])
    for path, file in missing.items():
        path.unlink(missing_ok=True)
        path.symlink_to(file.resolve())
    listed = {key: names[tensor.file] for key, tensor in checkpoint.tensors.items() if tensor.file.name != MTP_FILE}
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in checkpoint.tensors.values())}, "weight_map": listed}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_packed(injection: Injection, stock: Path, folder: Path, *, trusted: bool) -> None:
    from moegraft.injection.checkpoint.packed import PackedModule, write_packed
    from moegraft.injection.loading import keys_taken
    from moegraft.injection.meta_model import build_meta_model
    from moegraft.operators.sparsity import weights_hash

    _refuse_others(folder, [*folder.glob("*.safetensors")])
    meta = build_meta_model(stock, weights=True, trust_remote_code=trusted)
    meta = meta.with_mtp if injection.plan.mtp else meta
    weights = meta.weights
    assert weights is not None, "asked for"
    if injection.replacing.keys() - dict(meta.skeleton.named_modules()).keys():
        raise UnsupportedModelError(
            f"packed=True saves the model of the checkpoint, {meta.model_class}, of which this is a part: load it by that class, or save "
            "without packed"
        )
    modules = []
    for path, operator in injection.replacing.items():
        held = operator.packed_weights()
        if held is not None:
            source = weights.source(path, operator.kind)
            hashed = weights_hash(source, int(held.form["experts"])) if held.form.get("sparse") else ""
            modules.append(PackedModule(path, held, source.dtype, hashed))
    taken = keys_taken(weights.keymap, [module.path for module in modules])
    write_packed(folder, [tensor for key, tensor in weights.tensors.items() if key not in taken], modules)


def _refuse_others(folder: Path, weights: Sequence[Path]) -> None:
    if weights:
        raise CheckpointError(f"{folder}: {min(path.name for path in weights)} is in this folder already; name an empty folder")


def push_injected(model: PreTrainedModel, injection: Injection, repo_id: str, options: Mapping[str, Any]) -> str:
    """Upload what `save_injected` writes to the hub, with the weights that links lead to; return the address of the commit.

    Args:
        options: those of `push_to_hub`.

    Raises:
        UnsupportedModelError, CheckpointError: as `save_injected`.
    """
    from huggingface_hub import HfApi

    about_commit = {name: options[name] for name in ("revision", "commit_message", "commit_description", "create_pr") if name in options}
    with tempfile.TemporaryDirectory() as name:
        save_injected(model, injection, Path(name), {}, packed=bool(options.get("packed")))
        api = HfApi(token=options.get("token"), library_name="moegraft")
        repo_id = api.create_repo(repo_id, private=options.get("private"), exist_ok=True).repo_id
        kept = ["README.md"] if api.file_exists(repo_id, "README.md") else []
        return str(api.upload_folder(repo_id=repo_id, folder_path=name, ignore_patterns=kept, **about_commit))


def _card(model: PreTrainedModel, injection: Injection, *, packed: bool) -> str:
    """Return a model card for the hub."""
    weights = "Weights packed by moegraft, and the rules in config.json that they were packed by:"
    if not packed:
        weights = "The stock weights, and rules in config.json by which moegraft replaces modules when they are loaded:"
    base = str(model.config.name_or_path)
    known = re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None and not Path(base).exists()
    about = f"base_model: {base}\n" if known else ""
    beside = ""
    if injection.verifications:
        found = injection.verifications[-1]
        beside = (
            f"\nBeside the stock model, over {found.positions} positions of a text: KL divergence {found.kl_nats:.4f} nats, the same "
            f"most likely token in {found.top1_agreement:.1%}, perplexity {found.injected_perplexity:.3f} "
            f"(stock {found.stock_perplexity:.3f}).\n"
        )
    return f"""---
library_name: transformers
tags: [moegraft]
{about}---

# {Path(base).name} with moegraft

{weights}

```
{injection.plan.describe()}
```
{beside}
```python
from moegraft.injection import MoegraftConfig  # registers the method
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/or/hub-id")
```
"""
