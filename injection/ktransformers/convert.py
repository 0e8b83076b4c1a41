"""From KTransformers' rules to ours: what each becomes, in which words, and why one is left out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from moegraft.injection.ktransformers.options import devices_of, expert_weights, gpu_of, is_sixteen_bit, linear_gpu, unknown_arguments
from moegraft.injection.ktransformers.reading import TheirRule
from moegraft.injection.rulefile.diagnostics import shown
from moegraft.injection.rulefile.layers import layer_of, runs
from moegraft.injection.rulefile.migration import TheirClass, their_class
from moegraft.injection.rulefile.rules import LEAVE_ALONE

OLD_BLOCK = "block_sparse_moe"  # what Mixtral's mlp was called before transformers 5
MOST_LAYERS = 200
TYPICAL_LINEARS = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o", "q_a", "q_b", "kv_b")),
    "self_attn.kv_a_proj_with_mqa",
    *(f"{mlp}.{part}_proj" for mlp in ("mlp", "mlp.shared_expert", "mlp.shared_experts") for part in ("gate", "up", "down")),
    "mlp.shared_expert_gate",
    "mlp.gate",
)


@dataclass(frozen=True, slots=True)
class Paths:
    """The modules that rules are tried on: a model's own, or such as most families have where no model is `known`."""

    experts: tuple[str, ...]
    linears: tuple[str, ...]
    known: bool = True

    @classmethod
    def typical(cls) -> Paths:
        layers = [f"model.layers.{number}" for number in range(MOST_LAYERS)]
        linears = [f"{layer}.{linear}" for layer in layers for linear in TYPICAL_LINEARS]
        return cls(tuple(f"{layer}.mlp.experts" for layer in layers), (*linears, "lm_head"), known=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one of their rules.

    Attributes:
        operator: an operator of ours, `default`, or None where the rule is left out.
        lines: the rule as YAML.
        notes: what was mapped to what, or why it is left out.
        doubtful: whether something in it could not be mapped; False where leaving it out is what is right.
    """

    rule: TheirRule
    operator: str | None
    lines: tuple[str, ...]
    notes: tuple[str, ...]
    doubtful: bool = False


def convert(rules: Sequence[TheirRule], paths: Paths) -> tuple[Outcome, ...]:
    """What each of their rules becomes, in order; pure."""
    return tuple(_Converter(rules, paths).outcomes())


def is_block(rule: TheirRule) -> bool:
    """Whether a rule replaces the whole block around the experts: its experts are what an operator of ours computes."""
    known = _class_of(rule)
    return known is not None and known.becomes == "experts" and "expert" not in rule.operator_name.lower()


def _class_of(rule: TheirRule) -> TheirClass | None:
    return None if rule.doubts else their_class(rule.operator)


class _Converter:
    def __init__(self, rules: Sequence[TheirRule], paths: Paths) -> None:
        self._rules = rules
        self._paths = paths
        self._taken: set[str] = set()
        experts = [rule for rule in rules if (known := _class_of(rule)) is not None and known.becomes == "experts"]
        self._gpu = gpu_of(experts)

    def outcomes(self) -> Iterator[Outcome]:
        for index, rule in enumerate(self._rules):
            later = self._rules[index + 1 :]
            if rule.doubts:
                yield Outcome(rule, None, (), rule.doubts, doubtful=True)
                continue
            known = their_class(rule.operator)
            if rule.operator == LEAVE_ALONE:
                yield self._left(rule, "modules that stay are placed by device_map, not by rules", later, keeps=True)
            elif known is None:
                yield Outcome(
                    rule, None, (), (f"unknown class {shown(rule.operator)}: nothing here is known to stand for it",), doubtful=True
                )
            elif known.becomes == "experts":
                yield self._experts(rule)
            elif known.becomes == "linear":
                yield self._linear(rule, later)
            else:
                yield self._left(rule, f"{known.what} stay transformers' own", later, keeps=known.becomes == "router" or not rule.recursive)

    def _experts(self, rule: TheirRule) -> Outcome:
        fitting = [path for path in self._paths.experts if _takes_experts(rule, path)]
        if is_block(rule):
            others = [other for other in self._rules if other is not rule and not is_block(other) and self._is_experts(other)]
            fitting, all_fitting = [path for path in fitting if not any(_takes_experts(other, path) for other in others)], fitting
            if all_fitting and not fitting:
                lines = ", ".join(str(other.position.line) for other in others)
                return Outcome(rule, None, (), (f"a block's experts are all that is replaced: the rule in line {lines} does it",))
        taken = [path for path in fitting if path not in self._taken]
        if not taken:
            return Outcome(rule, None, (), (self._why_no_experts(rule, fitting),), doubtful=True)
        self._taken.update(taken)
        layers = None if len(taken) == len(self._paths.experts) else runs(layer for path in taken if (layer := layer_of(path)) is not None)
        weights, about_weights = expert_weights(rule)
        gpu = "none" if self._gpu == "none" else "${gpu}"
        kwargs = f'weights: "{weights}"' if "$" in weights else f"weights: {weights}"
        match = "{kind: experts}" if layers is None else f'{{kind: experts, layers: "{layers}"}}'
        options = kwargs if gpu == "none" else f'{kwargs}, gpu: "{gpu}"'
        notes = (*devices_of(rule), *about_weights, *_remarks(rule))
        return Outcome(rule, "hybrid_experts", self._lines(rule, "experts", match, "hybrid_experts", options, taken), notes)

    def _is_experts(self, rule: TheirRule) -> bool:
        known = _class_of(rule)
        return known is not None and known.becomes == "experts"

    def _why_no_experts(self, rule: TheirRule, fitting: Sequence[str]) -> str:
        if fitting:
            return "earlier rules take all that it matches; KTransformers says nothing of that"
        where = "of this model" if self._paths.known else "under the name that transformers 5 gives them, model.layers.N.mlp.experts"
        return f"name {shown(rule.name or '')} fits no experts {where}"

    def _linear(self, rule: TheirRule, later: Sequence[TheirRule]) -> Outcome:
        if rule.match_class is not None and rule.match_class.rpartition(".")[2] != "Linear":
            return Outcome(rule, None, (), (f"class {shown(rule.match_class)} is no plain torch.nn.Linear",), doubtful=True)
        if is_sixteen_bit(rule):
            return self._left(rule, "KLinearTorch computes in 16 bits, as the stock layers do", later, keeps=True)
        fitting = [path for path in self._paths.linears if _takes_linear(rule, path)]
        taken = [path for path in fitting if path not in self._taken]
        if not taken and (fitting or self._paths.known):
            why = (
                "earlier rules take all that it matches" if fitting else f"name {shown(rule.name or '')} fits no linear layer of this model"
            )
            return Outcome(rule, None, (), (why,), doubtful=True)
        self._taken.update(taken)
        gpu = linear_gpu(rule)
        options = 'weights: "${linear}"' + ("" if gpu == "none" else f', gpu: "{gpu}"')
        apart = "device_map says where its layer is: on another GPU, every token would go back and forth"
        notes = (*devices_of(rule), *((apart,) if gpu.startswith("cuda:") else ()), *_remarks(rule))
        lines = self._lines(rule, "linear", _match("linear", rule), "quantized_linear", options, taken)
        return Outcome(rule, "quantized_linear", lines, notes)

    def _left(self, rule: TheirRule, why: str, later: Sequence[TheirRule], *, keeps: bool) -> Outcome:
        """A rule that changes nothing; where a later one would take its modules otherwise, it stays as `default`."""
        kept = list(self._kept_from(rule, later)) if keeps and rule.name is not None else []
        if not kept:
            return Outcome(rule, None, (), (why, *_remarks(rule)))
        self._taken.update(kept)
        lines = self._lines(rule, "stay", _match(None, rule), LEAVE_ALONE, "", kept)
        lines = lines if rule.recursive else (*lines, "  recursive: false")
        return Outcome(rule, LEAVE_ALONE, lines, (f"{why}; the rule keeps later ones from them", *_remarks(rule)))

    def _kept_from(self, rule: TheirRule, later: Sequence[TheirRule]) -> Iterator[str]:
        for paths, takes in ((self._paths.experts, _takes_experts), (self._paths.linears, _takes_linear)):
            others = [other for other in later if _is_mapped(other, "experts" if takes is _takes_experts else "linear")]
            for path in paths:
                own = any(rule.matches(_renamed_back(outer)) or rule.matches(outer) for outer in _outer(path, whole=rule.recursive))
                if own and path not in self._taken and any(takes(other, path) for other in others):
                    yield path

    def _lines(self, rule: TheirRule, name: str, match: str, operator: str, options: str, taken: Sequence[str]) -> tuple[str, ...]:
        lines = [f"- id: {name}-{rule.position.line}", f"  match: {match}"]
        lines += (
            ["  replace:", f"    class: {operator}", f"    kwargs: {{{options}}}"] if options else [f"  replace: {{class: {operator}}}"]
        )
        # A rule that keeps modules matches others, too: only what an operator takes can be counted.
        return (*lines, f"  expect: {len(taken)}") if self._paths.known and options else tuple(lines)


def _remarks(rule: TheirRule) -> tuple[str, ...]:
    return (*((rule.remark,) if rule.remark else ()), *unknown_arguments(rule))


def _is_mapped(rule: TheirRule, becomes: str) -> bool:
    known = _class_of(rule)
    return known is not None and known.becomes == becomes and not (becomes == "linear" and is_sixteen_bit(rule))


def _renamed_back(path: str) -> str:
    return path.replace(".mlp.", f".{OLD_BLOCK}.") if ".mlp." in path else f"{path.removesuffix('.mlp')}.{OLD_BLOCK}"


def _takes_experts(rule: TheirRule, path: str) -> bool:
    """Whether the rule fits an experts module, or the block around it, by its name of today or of old."""
    own = path.rpartition(".")[0] if is_block(rule) else path
    return rule.matches(own) or rule.matches(_renamed_back(own))


def _takes_linear(rule: TheirRule, path: str) -> bool:
    return rule.matches(path) or (OLD_BLOCK in (rule.name or "") and rule.matches(_renamed_back(path)))


def _outer(path: str, *, whole: bool) -> Iterable[str]:
    """The path, and without `whole` what it lies in as well."""
    parts = path.split(".")
    return [path] if whole else [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _match(kind: str | None, rule: TheirRule) -> str:
    """Ours for a match by name: in single quotes, in which a backslash is itself, where it is one line of plain characters."""
    name = (rule.name or "").replace(OLD_BLOCK, "mlp")
    plain = name.isascii() and name.isprintable()
    quoted = "'" + name.replace("'", "''") + "'" if plain else json.dumps(name)
    parts = ([f"kind: {kind}"] if kind else []) + ([f"name: {quoted}"] if name else [])
    return f"{{{', '.join(parts)}}}"
