"""Conversion of KTransformers' rule files into ours: what each rule becomes, and why one is left out."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moegraft.injection.rules.diagnostics import Diagnostic, Findings, Position, RuleErrors, nearest, shown
from moegraft.injection.rules.document import ListNode, MappingNode, Node, ScalarNode, plain_text, read_document
from moegraft.injection.rules.ktransformers import KWARGS, TheirClass, kwarg_advice, their_class
from moegraft.injection.rules.patterns import Patterns, SlowPatternError, why_unusable
from moegraft.injection.rules.rule import LEAVE_ALONE, layer_of, runs

RULE_KEYS = ("match", "replace", "recursive")
MATCH_KEYS = ("name", "class")
REPLACE_KEYS = ("class", "kwargs")
Plain = str | Mapping[str, "Plain"]  # a value as text, or values by name


@dataclass(frozen=True, slots=True)
class TheirRule:
    """One rule as KTransformers has it.

    Attributes:
        name: a regular expression on module paths, or None.
        match_class: a dotted class, or None.
        operator: `replace.class`; empty where there is none.
        doubts: what is wrong with it, so that nobody knows what it means; KTransformers says nothing of these.
        remark: something that means less than it looks.
        name_position: where `name` is written, or the rule where it has none.
        patterns: of all rules of a file, whose searches share a limit of time.
    """

    position: Position
    name: str | None
    match_class: str | None
    operator: str
    kwargs: Mapping[str, Plain]
    recursive: bool
    doubts: tuple[str, ...]
    remark: str
    name_position: Position
    patterns: Patterns = field(repr=False, compare=False)

    @property
    def operator_name(self) -> str:
        """The class without its package."""
        return self.operator.rpartition(".")[2]

    def text(self, key: str) -> str | None:
        """A keyword argument that is one value."""
        value = self.kwargs.get(key)
        return value if isinstance(value, str) else None

    def matches(self, path: str) -> bool:
        """Whether the name fits, as `re.search` sees it; a rule without a name fits any path.

        Raises:
            RuleErrors: matching the name takes too long.
        """
        if self.name is None:
            return True
        try:
            return self.patterns.found_in(self.name, path)
        except SlowPatternError as error:
            raise RuleErrors([Diagnostic(self.name_position, "error", f"name {shown(self.name)} {error}")]) from None


def read_their_rules(path: Path) -> tuple[TheirRule, ...]:
    """
    Raises:
        RuleErrors: the file cannot be read, is no YAML, too large or too deep, has tags or anchors, or is no list of rules.
    """
    findings = Findings()
    document = read_document(path, findings, plain_keys=True)
    if isinstance(document, MappingNode) and document.get("rules") is not None:
        findings.stop(document.position, "this is a rule file of moegraft already, a mapping with 'rules'; see moegraft check")
    if not isinstance(document, ListNode) or not document.items:
        findings.stop(document.position, f"a rule file of KTransformers is a list of rules with 'match' and 'replace', not {document}")
    patterns = Patterns()
    rules = tuple(_read_rule(item, patterns, findings) for item in document.items)
    findings.raise_errors()
    return tuple(rule for rule in rules if rule is not None)


def _read_rule(node: Node, patterns: Patterns, findings: Findings) -> TheirRule | None:
    if not isinstance(node, MappingNode):
        findings.error(node.position, f"a rule must be a mapping with 'match' and 'replace', not {node}")
        return None
    doubts: list[str] = [*_unknown(node, RULE_KEYS, "a rule")]
    match, replace = (_mapping(node, key, keys, doubts) for key, keys in (("match", MATCH_KEYS), ("replace", REPLACE_KEYS)))
    kwargs = _mapping(replace, "kwargs", None, doubts) if replace.get("kwargs") is not None else MappingNode((), node.position)
    operator = _text(replace.get("class")) or ""
    if not operator and not doubts:
        doubts.append("replace has no 'class'")
    recursive = node.get("recursive")
    closed = isinstance(recursive, ScalarNode) and recursive.value is False
    is_text = isinstance(recursive, ScalarNode) and isinstance(recursive.value, str)
    name = match.get("name")
    return TheirRule(
        position=node.position,
        name=_regex(name, doubts),
        match_class=_text(match.get("class")),
        operator=operator,
        kwargs={entry.key: _plain(entry.value) for entry in kwargs},
        recursive=not closed,
        doubts=tuple(doubts),
        remark=f"recursive is {recursive}, in quotes, which KTransformers takes for true" if is_text else "",
        name_position=node.position if name is None else name.position,
        patterns=patterns,
    )


def _unknown(node: MappingNode, known: tuple[str, ...], where: str) -> list[str]:
    found = []
    for entry in node:
        if entry.key not in known:
            near = nearest(entry.key, known)
            meant = f"; did you mean '{near}'?" if near else ""
            found.append(f"line {entry.position.line}: KTransformers has no key {shown(entry.key)} in {where}{meant}")
    return found


def _mapping(node: MappingNode, key: str, known: tuple[str, ...] | None, doubts: list[str]) -> MappingNode:
    """A part of a rule, with doubts for keys that it should not have; an empty one where it is missing."""
    found = node.get(key)
    if isinstance(found, MappingNode):
        doubts += _unknown(found, known, key) if known is not None else []
        return found
    empty = isinstance(found, ScalarNode) and found.value is None
    if not (key == "kwargs" and empty) and not any("did you mean" in doubt for doubt in doubts):
        doubts.append(f"{key} is missing" if found is None else f"{key} must be a mapping, not {found}")
    return MappingNode((), node.position)


def _text(node: Node | None) -> str | None:
    return node.value if isinstance(node, ScalarNode) and isinstance(node.value, str) and node.value else None


def _regex(node: Node | None, doubts: list[str]) -> str | None:
    pattern = _text(node)
    if pattern is None:
        if node is not None:
            doubts.append(f"name must be text, not {node}")
        return None
    reason = why_unusable(pattern)
    if reason is not None:
        doubts.append(f"name {shown(pattern)} {reason}")
        return None
    return pattern


def _plain(node: Node) -> Plain:
    if isinstance(node, MappingNode):
        return {entry.key: _plain(entry.value) for entry in node}
    if isinstance(node, ListNode):
        return ", ".join(str(item) for item in node.items)
    return plain_text(node.value)


DEVICES = ("generate_device", "prefill_device", "out_device", "device")
OPERATIONS = ("generate_op", "prefill_op", "backend")
# Experts as their CPU backends hold them; the others take the type that the GGUF file has.
BACKENDS = {"AMXInt4": "int4", "AMXInt8": "int8", "AMXBF16": "bfloat16"}
CUDA = re.compile(r"cuda(:\d+)?")


def devices_of(rule: TheirRule) -> tuple[str, ...]:
    """A note on where and by what the rule computed; empty where it does not say."""
    said = [f"{key} {value}" for key in (*OPERATIONS, *DEVICES) if (value := rule.text(key)) is not None]
    return (", ".join(said),) if said else ()


def gpu_of(rules: Iterable[TheirRule]) -> str:
    """Our `gpu` for experts that these rules compute: the GPUs that any of them names, `auto` for one without a number, else `none`.

    One value for all of them: layers of one value share a GPU's slots, and which experts have one is the cache's choice.
    """
    named = {value for rule in rules for key in DEVICES if (value := rule.text(key)) is not None and CUDA.fullmatch(value)}
    numbered = sorted(named - {"cuda"})
    return "none" if not named else ",".join(numbered) if numbered else "auto"


def linear_gpu(rule: TheirRule) -> str:
    """Our `gpu` for a linear layer: where it decodes."""
    device = rule.text("generate_device") or rule.text("device") or rule.text("prefill_device") or "cuda"
    if not CUDA.fullmatch(device) or rule.text("generate_op") == "KLinearCPUInfer":
        return "none"
    return "auto" if device == "cuda" else device


def is_sixteen_bit(rule: TheirRule) -> bool:
    """Whether a linear layer decodes with the weights as they are."""
    return rule.text("generate_op") == "KLinearTorch"


def expert_weights(rule: TheirRule) -> tuple[str, Sequence[str]]:
    """Our `weights`, the file's variable where the rule does not say it; and a note where experts decode on the GPU."""
    on_gpu = CUDA.fullmatch(rule.text("generate_device") or "")
    note = "which experts decode on the GPU is decided by its slots here: all of them where there is room"
    return BACKENDS.get(rule.text("backend") or "", "${weights}"), (note,) if on_gpu else ()


def unknown_arguments(rule: TheirRule) -> tuple[str, ...]:
    """Arguments that KTransformers does not have, as far as is known; it says nothing of them and does not use them."""
    found = []
    for key in rule.kwargs:
        if kwarg_advice(key) is None:
            near = nearest(key, KWARGS)
            meant = f"; did you mean '{near}'?" if near else "; nothing here stands for it"
            found.append(f"argument {shown(key)} is not known{meant}")
    return tuple(found)


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


WIDTH = 120
VARIABLES = {
    "weights": "int4   # of the routed experts: stored | bfloat16 | int8 | int4; with --gguf, stored keeps Q8_0 and Q4_0 as they are",
    "linear": "int8    # of the linear layers below: bfloat16 | float16 | int8 | int4, which is what KLinearMarlin has",
}


def written(outcomes: Sequence[Outcome], source: Path, model: str | None) -> str:
    """The file; `model` is what it was matched to, where it was."""
    mapped = sum(outcome.operator is not None for outcome in outcomes)
    doubtful = sum(outcome.doubtful for outcome in outcomes)
    head = [
        f"Written by 'moegraft init --from-ktransformers {source.name}' from {len(outcomes)} rules: {mapped} below, "
        f"{len(outcomes) - mapped} left out, of which {doubtful} could not be mapped. The line of each rule there is before it here.",
        f"Matched to {model}." if model else "Not matched to a model yet: moegraft check FILE --model M does that.",
        "Devices of what stays are for device_map= of optimize_and_load; with a GPU in a rule, the rest of the model goes there.",
    ]
    lines = [line for sentence in head for line in comment(sentence)]
    lines += ["version: 1", *_variables(outcomes), "rules:"]
    for outcome in outcomes:
        lines += [*_about(outcome, source), *outcome.lines]
    return "\n".join(lines) + "\n"


def comment(text: str) -> list[str]:
    """Comment lines; what a file of others held must not end its comment."""
    plain = re.sub(r"[^ -~]", "?", text)
    return [f"# {line}" for line in textwrap.wrap(plain, WIDTH, subsequent_indent="  ", break_long_words=True)]


def _about(outcome: Outcome, source: Path) -> Iterator[str]:
    rule = outcome.rule
    became = f"-> {outcome.operator}" if outcome.operator else "could not be mapped" if outcome.doubtful else "left out"
    yield from comment(f"{source.name}:{rule.position.line} {rule.operator_name or '(no class)'} {became}")
    for note in outcome.notes:
        yield from comment(f"  {note}")


def _variables(outcomes: Sequence[Outcome]) -> Iterator[str]:
    text = "\n".join(line for outcome in outcomes for line in outcome.lines)
    used = {name: value for name, value in VARIABLES.items() if f"${{{name}}}" in text}
    if "${gpu}" in text:
        gpu = gpu_of(outcome.rule for outcome in outcomes if outcome.operator == "hybrid_experts")
        used["gpu"] = f'"{gpu}"     # none | auto | cuda:0 | "cuda:0,cuda:1": beside the CPU; slots take the memory that the rest leaves'
    if used:
        yield "vars:"
        yield from (f"  {name}: {value}" for name, value in used.items())


def diagnostics(outcomes: Sequence[Outcome]) -> tuple[Diagnostic, ...]:
    """What was left out, at its place: a warning where it could not be mapped, a notice where that is as it should be."""
    found = []
    for outcome in outcomes:
        if outcome.operator is None:
            name = f"{outcome.rule.operator_name}: " if outcome.rule.operator_name else ""
            message = f"{name}left out: {'; '.join(outcome.notes)}"
            found.append(Diagnostic(outcome.rule.position, "warning" if outcome.doubtful else "notice", message))
    return tuple(found)
