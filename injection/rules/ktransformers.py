"""KTransformers' rule files: their class names and arguments, and the conversion of each rule, or the reason why it is left out."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moegraft.injection.rules.document import (
    Diagnostic,
    Findings,
    ListNode,
    MappingNode,
    Node,
    Position,
    RuleErrors,
    ScalarNode,
    nearest,
    plain_text,
    read_document,
    shown,
)
from moegraft.injection.rules.patterns import Patterns, SlowPatternError, why_unusable
from moegraft.injection.rules.rule import LEAVE_ALONE, layer_of, runs

EXPERTS = "use hybrid_experts: write 'match: {kind: experts}' and 'replace: {class: hybrid_experts, kwargs: {weights: int8}}'"
LINEAR = (
    "use quantized_linear: write 'class: quantized_linear' with 'match: {kind: linear, name: ...}', or delete the rule to keep these layers"
)
STOCK = "no replacement is needed, {} stay transformers' own; delete the rule"
Becomes = Literal["experts", "linear", "router", "stock"]


@dataclass(frozen=True, slots=True)
class TheirClass:
    """A group of KTransformers' classes with one replacement.

    Attributes:
        words: lower-case parts of class names; a class whose name contains one belongs to the group.
        becomes: `experts` and `linear` are computed by an operator; `router` and `stock` stay transformers' own.
        advice: the replacement, as the end of an error message.
        what: the modules of the group, in the plural.
    """

    words: tuple[str, ...]
    becomes: Becomes
    advice: str
    what: str = ""


def _stock(words: tuple[str, ...], what: str, more: str = "", becomes: Becomes = "stock") -> TheirClass:
    return TheirClass(words, becomes, STOCK.format(what) + more, what)


# The first group that fits applies.
CLASSES = (
    TheirClass(("expert",), "experts", EXPERTS),
    _stock(("moegate", "gate"), "routers", becomes="router"),
    TheirClass(("linear",), "linear", LINEAR),
    _stock(("rotary", "rope"), "rotary embeddings"),
    _stock(("attention", "attn", "mla"), "attention layers", ", and choose an implementation with attn_implementation="),
    _stock(("norm",), "norms"),
    _stock(("mlp",), "dense MLPs"),
    _stock(("model",), "models"),
    # Last, because the names of attention classes such as KGlm4MoeAttention contain those of the blocks.
    TheirClass(("sparsemoe", "kdeepseekv2moe", "kdeepseekv3moe", "moeblock", "kglm4moe", "ksmallthinkermoe"), "experts", EXPERTS),
)
_BARE_PREFIXES = ("KTransformers", "KExperts", "KLinear", "KMoEGate", "KDeepseek", "KQwen", "KMistral", "KGlm", "KSmallThinker", "VLinear")

_DEVICES = "modules that stay are placed by device_map= of optimize_and_load, and experts by the options of hybrid_experts"
_ENGINES = "an operator is chosen by 'class' only"
KWARGS = {  # the replacement of each argument
    "generate_device": _DEVICES,
    "prefill_device": _DEVICES,
    "out_device": "results are returned on the device of the tokens",
    "device": _DEVICES,
    "transfer_map": _DEVICES,
    "generate_op": _ENGINES,
    "prefill_op": _ENGINES,
    "backend": _ENGINES + "; the kernel's weight type is its option 'weights'",
    "generate_linear_type": _ENGINES,
    "prefill_linear_type": _ENGINES,
    "absorb_for_prefill": "attention stays transformers' own",
    "per_layer_prefill_intput_threshold": "prompts of every length are computed the same way",  # spelt so in KTransformers
    "cpu_infer": "the number of threads is the argument threads= of optimize_and_load",
}


def is_theirs(name: str) -> bool:
    """Return whether a class belongs to KTransformers, by its dotted or bare name."""
    return name.startswith("ktransformers.") or name.rpartition(".")[2].startswith(_BARE_PREFIXES)


def their_class(name: str) -> TheirClass | None:
    """Return the group of KTransformers' class `name`; None for other classes and for unknown ones."""
    if not is_theirs(name):
        return None
    lower = name.rpartition(".")[2].lower()
    return next((known for known in CLASSES if any(word in lower for word in known.words)), None)


def class_advice(name: str) -> str | None:
    """Return the advice for a rule with KTransformers' class `name`; None for other classes."""
    if not is_theirs(name):
        return None
    known = their_class(name)
    return STOCK.format("such modules") if known is None else known.advice


RULE_KEYS = ("match", "replace", "recursive")
MATCH_KEYS = ("name", "class")
REPLACE_KEYS = ("class", "kwargs")
Plain = str | Mapping[str, "Plain"]  # a value as text, or a mapping of values


@dataclass(frozen=True, slots=True)
class TheirRule:
    """One rule of a KTransformers file.

    Attributes:
        name: a regular expression on module paths; None without one.
        match_class: a dotted class; None without one.
        operator: `replace.class`; empty without one.
        doubts: mistakes that make the rule's meaning unclear, which KTransformers ignores.
        remark: a note on a value that has another effect than it seems to.
        name_position: the position of `name`; that of the rule without one.
        patterns: shared by all rules of a file, as their searches have a common time limit.
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
        """Return a keyword argument that is a single value, else None."""
        value = self.kwargs.get(key)
        return value if isinstance(value, str) else None

    def matches(self, path: str) -> bool:
        """Whether `re.search` finds the rule's name in `path`; a rule without a name matches every path.

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
        RuleErrors: the file cannot be read, is not valid YAML, is too large or too deep, has tags or anchors, or is no list of rules.
    """
    findings = Findings()
    document = read_document(path, findings, plain_keys=True)
    if isinstance(document, MappingNode) and document.get("rules") is not None:
        findings.stop(document.position, "this is a rule file of moegraft, a mapping with 'rules'; check it with moegraft check")
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
        remark=f"recursive is {recursive}, in quotes, which KTransformers reads as true" if is_text else "",
        name_position=node.position if name is None else name.position,
        patterns=patterns,
    )


def _unknown(node: MappingNode, known: tuple[str, ...], where: str) -> list[str]:
    unknown = []
    for entry in node:
        if entry.key not in known:
            near = nearest(entry.key, known)
            meant = f"; did you mean '{near}'?" if near else ""
            unknown.append(f"line {entry.position.line}: KTransformers has no key {shown(entry.key)} in {where}{meant}")
    return unknown


def _mapping(node: MappingNode, key: str, known: tuple[str, ...] | None, doubts: list[str]) -> MappingNode:
    """Return a part of a rule, or an empty mapping; a missing part and unknown keys are added to `doubts`."""
    value = node.get(key)
    if isinstance(value, MappingNode):
        doubts += _unknown(value, known, key) if known is not None else []
        return value
    empty = isinstance(value, ScalarNode) and value.value is None
    if not (key == "kwargs" and empty) and not any("did you mean" in doubt for doubt in doubts):
        doubts.append(f"{key} is missing" if value is None else f"{key} must be a mapping, not {value}")
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
# Weight types of the CPU backends; all others use the type of the GGUF file.
BACKENDS = {"AMXInt4": "int4", "AMXInt8": "int8", "AMXBF16": "bfloat16"}
CUDA = re.compile(r"cuda(:\d+)?")


def devices_of(rule: TheirRule) -> tuple[str, ...]:
    """Return a note with the devices and operations of a rule; empty if it has none."""
    given = [f"{key} {value}" for key in (*OPERATIONS, *DEVICES) if (value := rule.text(key)) is not None]
    return (", ".join(given),) if given else ()


def gpu_of(rules: Iterable[TheirRule]) -> str:
    """Return the option `gpu` for the experts of these rules: all GPUs that they name, `auto` for `cuda` without a number, else `none`.

    All rules get the same value, because layers with one value share a GPU's slots, and the cache chooses the resident experts.
    """
    named = {value for rule in rules for key in DEVICES if (value := rule.text(key)) is not None and CUDA.fullmatch(value)}
    numbered = sorted(named - {"cuda"})
    return "none" if not named else ",".join(numbered) if numbered else "auto"


def linear_gpu(rule: TheirRule) -> str:
    """Return the option `gpu` for a linear layer: the device on which it decodes."""
    device = rule.text("generate_device") or rule.text("device") or rule.text("prefill_device") or "cuda"
    if not CUDA.fullmatch(device) or rule.text("generate_op") == "KLinearCPUInfer":
        return "none"
    return "auto" if device == "cuda" else device


def is_sixteen_bit(rule: TheirRule) -> bool:
    """Whether a linear layer decodes with 16-bit weights."""
    return rule.text("generate_op") == "KLinearTorch"


def unknown_arguments(rule: TheirRule) -> tuple[str, ...]:
    """Return notes on arguments that no known version of KTransformers uses; KTransformers ignores them."""
    unknown = []
    for key in rule.kwargs:
        if key not in KWARGS:
            near = nearest(key, KWARGS)
            meant = f"; did you mean '{near}'?" if near else "; it has no equivalent"
            unknown.append(f"argument {shown(key)} is not known{meant}")
    return tuple(unknown)


OLD_BLOCK = "block_sparse_moe"  # the name of Mixtral's `mlp` before transformers 5
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
    """The modules to match rules against: of a model or, if `known` is False, the usual ones of most families."""

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
    """The outcome for one rule.

    Attributes:
        operator: an operator of moegraft, or `default`; None if the rule is left out.
        lines: the converted rule as YAML.
        notes: remarks on the conversion, or the reason why the rule is left out.
        doubtful: whether the rule has no known equivalent; False if it needs none.
    """

    rule: TheirRule
    operator: str | None
    lines: tuple[str, ...]
    notes: tuple[str, ...]
    doubtful: bool = False


def convert(rules: Sequence[TheirRule], paths: Paths) -> tuple[Outcome, ...]:
    """Convert each rule, in order. Pure."""
    return tuple(_Converter(rules, paths).outcomes())


def is_block(rule: TheirRule) -> bool:
    """Whether a rule replaces the whole block around the experts; moegraft replaces only its experts."""
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
                yield self._left(rule, "device_map places modules that stay, not rules", later, keeps=True)
            elif known is None:
                yield Outcome(rule, None, (), (f"unknown class {shown(rule.operator)}: no equivalent is known",), doubtful=True)
            elif known.becomes == "experts":
                yield self._experts(rule)
            elif known.becomes == "linear":
                yield self._linear(rule, later)
            else:
                yield self._left(rule, f"{known.what} stay transformers' own", later, keeps=known.becomes == "router" or not rule.recursive)

    def _experts(self, rule: TheirRule) -> Outcome:
        fitting = [path for path in self._paths.experts if _takes_experts(rule, path)]
        if is_block(rule):
            others = [other for other in self._rules if other is not rule and not is_block(other) and _is_mapped(other, "experts")]
            fitting, all_fitting = [path for path in fitting if not any(_takes_experts(other, path) for other in others)], fitting
            if all_fitting and not fitting:
                lines = ", ".join(str(other.position.line) for other in others)
                return Outcome(rule, None, (), (f"moegraft replaces only the experts of a block, and the rule in line {lines} does it",))
        taken = [path for path in fitting if path not in self._taken]
        if not taken:
            where = "of this model" if self._paths.known else "by their name in transformers 5, model.layers.N.mlp.experts"
            why = f"name {shown(rule.name or '')} matches no experts {where}"
            if fitting:
                why = "earlier rules take all modules that it matches, which KTransformers does not report"
            return Outcome(rule, None, (), (why,), doubtful=True)
        self._taken.update(taken)
        layers = None if len(taken) == len(self._paths.experts) else runs(layer for path in taken if (layer := layer_of(path)) is not None)
        weights = BACKENDS.get(rule.text("backend") or "", '"${weights}"')  # by default the file's variable
        match = "{kind: experts}" if layers is None else f'{{kind: experts, layers: "{layers}"}}'
        options = f"weights: {weights}" + ("" if self._gpu == "none" else ', gpu: "${gpu}"')
        on_gpu = CUDA.fullmatch(rule.text("generate_device") or "")
        decodes = ("moegraft decodes experts with a slot on the GPU: all of them if they fit",) if on_gpu else ()
        notes = (*devices_of(rule), *decodes, *_remarks(rule))
        return Outcome(rule, "hybrid_experts", self._lines(rule, "experts", match, "hybrid_experts", options, taken), notes)

    def _linear(self, rule: TheirRule, later: Sequence[TheirRule]) -> Outcome:
        if rule.match_class is not None and rule.match_class.rpartition(".")[2] != "Linear":
            return Outcome(rule, None, (), (f"class {shown(rule.match_class)} is not torch.nn.Linear",), doubtful=True)
        if is_sixteen_bit(rule):
            return self._left(rule, "KLinearTorch computes in 16 bits, as the stock layers do", later, keeps=True)
        fitting = [path for path in self._paths.linears if _takes_linear(rule, path)]
        taken = [path for path in fitting if path not in self._taken]
        if not taken and (fitting or self._paths.known):
            no_match = f"name {shown(rule.name or '')} matches no linear layer of this model"
            why = "earlier rules take all modules that it matches" if fitting else no_match
            return Outcome(rule, None, (), (why,), doubtful=True)
        self._taken.update(taken)
        gpu = linear_gpu(rule)
        options = 'weights: "${linear}"' + ("" if gpu == "none" else f', gpu: "{gpu}"')
        apart = "device_map places the layer around it: on another GPU, every token would be copied there and back"
        notes = (*devices_of(rule), *((apart,) if gpu.startswith("cuda:") else ()), *_remarks(rule))
        lines = self._lines(rule, "linear", _match("linear", rule), "quantized_linear", options, taken)
        return Outcome(rule, "quantized_linear", lines, notes)

    def _left(self, rule: TheirRule, why: str, later: Sequence[TheirRule], *, keeps: bool) -> Outcome:
        """Leave out a rule that changes nothing, or convert it to `default` if a later rule would take its modules."""
        kept = list(self._kept_from(rule, later)) if keeps and rule.name is not None else []
        if not kept:
            return Outcome(rule, None, (), (why, *_remarks(rule)))
        self._taken.update(kept)
        lines = self._lines(rule, "stay", _match(None, rule), LEAVE_ALONE, "", kept)
        lines = lines if rule.recursive else (*lines, "  recursive: false")
        return Outcome(rule, LEAVE_ALONE, lines, (f"{why}; the rule prevents later ones from taking them", *_remarks(rule)))

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
        # A `default` rule matches further modules as well, so its number is not known.
        return (*lines, f"  expect: {len(taken)}") if self._paths.known and options else tuple(lines)


def _remarks(rule: TheirRule) -> tuple[str, ...]:
    return (*((rule.remark,) if rule.remark else ()), *unknown_arguments(rule))


def _is_mapped(rule: TheirRule, becomes: str) -> bool:
    known = _class_of(rule)
    return known is not None and known.becomes == becomes and not (becomes == "linear" and is_sixteen_bit(rule))


def _renamed_back(path: str) -> str:
    return path.replace(".mlp.", f".{OLD_BLOCK}.") if ".mlp." in path else f"{path.removesuffix('.mlp')}.{OLD_BLOCK}"


def _takes_experts(rule: TheirRule, path: str) -> bool:
    """Whether a rule matches an experts module, or the block around it, by its current or former name."""
    own = path.rpartition(".")[0] if is_block(rule) else path
    return rule.matches(own) or rule.matches(_renamed_back(own))


def _takes_linear(rule: TheirRule, path: str) -> bool:
    return rule.matches(path) or (OLD_BLOCK in (rule.name or "") and rule.matches(_renamed_back(path)))


def _outer(path: str, *, whole: bool) -> Iterable[str]:
    """Return the path and, without `whole`, those of all modules around it."""
    parts = path.split(".")
    return [path] if whole else [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _match(kind: str | None, rule: TheirRule) -> str:
    """Return a `match` by name, in single quotes (which keep backslashes) if the name is one line of ASCII."""
    name = (rule.name or "").replace(OLD_BLOCK, "mlp")
    plain = name.isascii() and name.isprintable()
    quoted = "'" + name.replace("'", "''") + "'" if plain else json.dumps(name)
    parts = ([f"kind: {kind}"] if kind else []) + ([f"name: {quoted}"] if name else [])
    return f"{{{', '.join(parts)}}}"


WIDTH = 120
VARIABLES = {
    "weights": "int4   # of the routed experts: stored | bfloat16 | int8 | int4; with --gguf, stored keeps Q8_0 and Q4_0 unchanged",
    "linear": "int8    # of the linear layers below: bfloat16 | float16 | int8 | int4 (as in KLinearMarlin)",
}


def file_text(outcomes: Sequence[Outcome], source: Path, model: str | None) -> str:
    """Return the text of the converted file; `model` is the one that it was matched to, if any."""
    mapped = sum(outcome.operator is not None for outcome in outcomes)
    doubtful = sum(outcome.doubtful for outcome in outcomes)
    head = [
        f"Written by 'moegraft init --from-ktransformers {source.name}' from {len(outcomes)} rules: {mapped} are below, "
        f"{len(outcomes) - mapped} left out, {doubtful} of them without a known equivalent. Comments have the line of each rule.",
        f"Matched to {model}." if model else "Not matched to a model yet: run moegraft check FILE --model M.",
        "device_map= of optimize_and_load places the modules that stay; with a GPU in a rule, they are on that GPU.",
    ]
    lines = [line for sentence in head for line in comment(sentence)]
    lines += ["version: 1", *_variables(outcomes), "rules:"]
    for outcome in outcomes:
        rule = outcome.rule
        became = f"-> {outcome.operator}" if outcome.operator else "no known equivalent" if outcome.doubtful else "left out"
        lines += comment(f"{source.name}:{rule.position.line} {rule.operator_name or '(no class)'} {became}")
        lines += [line for note in outcome.notes for line in comment(f"  {note}")]
        lines += outcome.lines
    return "\n".join(lines) + "\n"


def comment(text: str) -> list[str]:
    """Return text as comment lines; line breaks from another file must not end the comment."""
    plain = re.sub(r"[^ -~]", "?", text)
    return [f"# {line}" for line in textwrap.wrap(plain, WIDTH, subsequent_indent="  ", break_long_words=True)]


def _variables(outcomes: Sequence[Outcome]) -> Iterator[str]:
    text = "\n".join(line for outcome in outcomes for line in outcome.lines)
    used = {name: value for name, value in VARIABLES.items() if f"${{{name}}}" in text}
    if "${gpu}" in text:
        gpu = gpu_of(outcome.rule for outcome in outcomes if outcome.operator == "hybrid_experts")
        used["gpu"] = f'"{gpu}"     # none | auto | cuda:0 | "cuda:0,cuda:1": beside the CPU; slots take the free memory'
    if used:
        yield "vars:"
        yield from (f"  {name}: {value}" for name, value in used.items())


def diagnostics(outcomes: Sequence[Outcome]) -> tuple[Diagnostic, ...]:
    """Return a finding for each rule that is left out: a warning if it has no known equivalent, a notice if it needs none."""
    found = []
    for outcome in outcomes:
        if outcome.operator is None:
            name = f"{outcome.rule.operator_name}: " if outcome.rule.operator_name else ""
            message = f"{name}left out: {'; '.join(outcome.notes)}"
            found.append(Diagnostic(outcome.rule.position, "warning" if outcome.doubtful else "notice", message))
    return tuple(found)
