"""`plan()`, the first step: decide which operator replaces which module, without changing the model or reading a weight."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from moegraft.injection.checkpoint.sources import StoredWeights
from moegraft.injection.meta_model import MetaModel
from moegraft.injection.rules import Diagnostic, Rule, RuleFile, read_rules
from moegraft.injection.rules.document import Findings, MappingNode
from moegraft.injection.rules.matching import ModelModules, apply_rules
from moegraft.injection.rules.rule import grouped
from moegraft.operators.base import Footprint, InPlaceOperator, Operator, Traits
from moegraft.operators.cache_form import QuantisedForm
from moegraft.operators.errors import UnsupportedModelError, human_bytes
from moegraft.operators.expert_group import Shares
from moegraft.operators.layout import read_layout
from moegraft.operators.registry import OperatorRegistry, load_registry
from moegraft.operators.weights import WeightTypes, resolve_weight_types

LAYER = re.compile(r"\.[0-9]+\.")


@dataclass(frozen=True, slots=True)
class Swap:
    """One module and the operator that will replace it.

    Attributes:
        module: its path, empty for the model itself.
        options: the rule's options, with the weight type that they mean for this checkpoint.
        footprint: the bytes that the operator will hold.
    """

    module: str
    rule: Rule
    operator_type: type[Operator]
    options: object
    footprint: Footprint

    @property
    def operator(self) -> str:
        """The operator's name in rule files."""
        return self.operator_type.name

    @property
    def in_place(self) -> bool:
        """Whether the module, and its weights, stay where they are."""
        return issubclass(self.operator_type, InPlaceOperator)

    @property
    def weight_type(self) -> str | None:
        """The value of the operator's option `weights`; None for an operator without it."""
        options: Any = self.options
        return None if self.operator_type.packing is None else str(options.weights)

    @property
    def traits(self) -> Traits:
        return self.operator_type.traits(self.options)


@dataclass(frozen=True, slots=True)
class Plan:
    """All swaps of a model.

    Attributes:
        swaps: in the model's order.
        notices: warnings and notices, which stop nothing.
        rules: the rule file, with what it extends.
        replaced_bytes: bytes of the replaced modules' parameters in the stock model.
        rest_bytes: bytes of the parameters and buffers that stay.
        shares: the processes that hold the experts, of which this one holds its share; None where it holds all.
    """

    swaps: tuple[Swap, ...]
    notices: tuple[Diagnostic, ...]
    rules: RuleFile
    replaced_bytes: int
    rest_bytes: int
    shares: Shares | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The rule file and the files that it extends."""
        return self.rules.files

    @property
    def mtp(self) -> bool:
        """Whether the model has the layers of its checkpoint for multi-token prediction."""
        return any(swap.traits.mtp for swap in self.swaps)

    @property
    def bytes_by_device(self) -> dict[str, int]:
        """The bytes of the loaded model on each device, with everything that stays on the CPU."""
        return total_bytes([*(swap.footprint.by_device for swap in self.swaps), {"cpu": self.rest_bytes}])

    @property
    def devices(self) -> set[str]:
        """The GPUs that operators ask for, as the rules name them."""
        return {device for swap in self.swaps for device in swap.traits.devices}

    @property
    def untrained(self) -> str | None:
        """Why the model cannot be trained, not even adapters beside its packed weights; None where it can."""
        found = ((swap.module, swap.traits.untrained) for swap in self.swaps)
        reason = next((f"{path or 'the model'}: {reason}" for path, reason in found if reason is not None), None)
        return reason if self.shares is None else "experts in several processes have no gradients; start one process"

    def cache_form(self, config: PreTrainedConfig) -> QuantisedForm | None:
        """Return the form of a quantised key-value cache of a model with this config; None if it is in the model's dtype."""
        forms = (swap.traits.cache_form for swap in self.swaps)
        return next((form(config) for form in forms if form is not None), None)

    def describe(self) -> str:
        """Return a table for people: swaps by runs of layers, bytes, then the notices."""
        packed = sum(swap.footprint.total_bytes for swap in self.swaps)
        return "\n".join(
            [
                *(_table(self.swaps) or ["nothing is replaced"]),
                f"replaced: {human_bytes(self.replaced_bytes)} become {human_bytes(packed)}; not replaced: {human_bytes(self.rest_bytes)}",
                f"total: {bytes_text(self.bytes_by_device)}",
                *map(str, self.notices),
            ]
        )


def plan(
    model: nn.Module | MetaModel,
    rules: str | os.PathLike[str] | RuleFile,
    *,
    registry: OperatorRegistry | None = None,
    dtype: torch.dtype | None = None,
    model_type: str | None = None,
    shares: Shares | None = None,
) -> Plan:
    """Decide which operator replaces which module. Pure: it changes nothing, and reads no weights beyond file headers.

    Args:
        model: a model from `build_meta_model`, whose checkpoint decides what `weights: stored` means; or any model, on meta or in
            memory.
        rules: the path of a rule file, the name of a shipped one, or a `RuleFile` from `read_rules`.
        registry: the operators that rules may name; by default all that are installed.
        dtype: the dtype of the stored weights, which operators may keep; by default the model's.
        model_type: by default that of the model's config.
        shares: the processes that hold the experts, and which of them this is. Rank 0 holds what is not experts as well; the others
            hold nothing else.

    Raises:
        RuleErrors: every rule that cannot be applied to this model.
        UnsupportedModelError: the model has been injected already.
        CheckpointError: a GGUF file does not fit the config.
    """
    registry = registry or load_registry()
    rules = rules if isinstance(rules, RuleFile) else read_rules(rules, registry=registry)
    meta = planned_model(model, rules, registry) if isinstance(model, MetaModel) else None
    module: nn.Module = model if meta is None else meta.skeleton  # type: ignore[assignment] # mypy does not narrow both
    if hasattr(module, "moegraft"):
        raise UnsupportedModelError(f"this {type(module).__name__} has been injected already; load it again to apply other rules")
    dtype = dtype or (meta.stored if meta is not None else next(module.parameters()).dtype)
    model_type = model_type or getattr(getattr(module, "config", None), "model_type", None)

    findings = Findings(list(rules.notices))
    modules = ModelModules(module)
    assignment = apply_rules(rules, modules, registry, findings, model_type=model_type, divided=shares is not None)

    weights = meta.weights if meta is not None else None
    takers = [(path, rule) for rule, paths in zip(rules.rules, assignment.taken, strict=True) for path in paths]
    places = {path: place for place, path in enumerate(modules)}
    swaps = []
    for path, rule in sorted(takers, key=lambda taker: places[taker[0]]):
        if rule.operator is not None:
            operator = registry[rule.operator]
            options = _options_for(path, modules[path], operator, rule.options, weights)
            footprint = operator.footprint(modules[path], options, dtype)
            if shares is not None and operator.kind == "experts":
                num_experts = read_layout(modules[path]).num_experts
                footprint = footprint.part(len(shares.experts(num_experts)), num_experts)
            elif shares is not None and shares.rank:
                continue
            swaps.append(Swap(path, rule, operator, options, footprint))
    replaced_bytes, rest_bytes = _split_bytes(module, [swap.module for swap in swaps if not swap.in_place])
    if shares is not None and shares.rank:
        rest_bytes = 0
    return Plan(tuple(swaps), findings.in_order(), rules, replaced_bytes, rest_bytes, shares)


def planned_model(meta_model: MetaModel, rules: RuleFile, registry: OperatorRegistry) -> MetaModel:
    """Return the model to which rules apply: with its MTP layers where one of them asks for these."""
    asked = any(rule.operator is not None and registry[rule.operator].traits(rule.options).mtp for rule in rules.rules)
    return meta_model.with_mtp if asked else meta_model


def _options_for(path: str, module: nn.Module, operator: type[Operator], options: Any, weights: StoredWeights | None) -> Any:
    """Return `options` with the weight type that applies to a checkpoint whose weights are stored in blocks."""
    packing = operator.packing
    if packing is None:
        return options
    stored = weights.stored_types(path) if weights is not None else None
    if stored is None:
        return packing.options_for(path, module, options, None)
    supports = partial(packing.supports, options)

    def resolve(requested: str) -> str:
        return str(resolve_weight_types(WeightTypes.parse(requested), stored, packing.types, supports))

    return packing.options_for(path, module, options, resolve)


def _split_bytes(model: nn.Module, replaced: Sequence[str]) -> tuple[int, int]:
    """Return the bytes inside and outside the replaced modules. A shared or tied tensor counts once, and stays if any use of it stays."""
    inside = {id(tensor) for path in replaced for tensor in model.get_submodule(path).parameters()}
    prefixes = tuple(f"{path}." for path in replaced)
    stays = {id(tensor): tensor.nbytes for name, tensor in model.named_parameters(remove_duplicate=False) if not name.startswith(prefixes)}
    stays |= {id(tensor): tensor.nbytes for name, tensor in model.named_buffers(remove_duplicate=False) if not name.startswith(prefixes)}
    replaced_bytes = sum(tensor.nbytes for tensor in model.parameters() if id(tensor) in inside and id(tensor) not in stays)
    return replaced_bytes, sum(stays.values())


def _table(swaps: Sequence[Swap]) -> list[str]:
    """Return lines such as `model.layers.{0-47}.mlp.experts  experts (cpu.yaml:4)  hybrid_experts  weights=int8  17.3 GiB cpu`."""
    rows = [(paths, f"{rule.id} ({rule.place_text})", *rest) for paths, rule, *rest in swap_rows(swaps)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def swap_rows(swaps: Sequence[Swap], *, each: bool = False) -> list[tuple[str, Rule, str, str, str]]:
    """Return paths, rule, operator, given options and bytes: one row for the swaps of a rule whose paths differ only in the layer, and
    whose options are the same.

    Args:
        each: one row for every swap instead.
    """
    groups: dict[tuple[str, int, str], list[Swap]] = {}
    for swap in swaps:
        form = swap.module if each else LAYER.sub(".{}.", swap.module, count=1)
        options = " ".join(given_options(swap.rule.kwargs, swap.options))
        groups.setdefault((form, id(swap.rule), options), []).append(swap)
    return [
        (
            " ".join(grouped(swap.module or "(the model)" for swap in group)),
            group[0].rule,
            group[0].operator,
            options,
            bytes_text(total_bytes(swap.footprint.by_device for swap in group)),
        )
        for (_, _, options), group in groups.items()
    ]


def given_options(kwargs: MappingNode | None, options: object, path: str = "") -> list[str]:
    """Return the options that a rule sets, as `name=value` with the resolved value; those that it sets to nothing are left out."""
    texts = []
    for entry in kwargs or ():
        value: Any = getattr(options, entry.key)
        if isinstance(entry.value, MappingNode) and is_dataclass(value):
            texts += given_options(entry.value, value, f"{path}{entry.key}.")
        elif value is not None:
            texts.append(f"{path}{entry.key}={value}")
    return texts


def total_bytes(devices: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum for each device."""
    total: dict[str, int] = {}
    for by_device in devices:
        for device, size in by_device.items():
            total[device] = total.get(device, 0) + size
    return total


def bytes_text(by_device: Mapping[str, int]) -> str:
    """Return text such as `17.3 GiB cpu, 1.2 GiB cuda:0`."""
    return ", ".join(f"{human_bytes(size)} {device}" for device, size in sorted(by_device.items())) or "0 B"
