"""Every mistake of a rule file that shows when it meets a model: one row each, with the place and the message."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.rule_support import findings_of, plan_for, tiny_model, write
from torch import nn

HERE = "»"
EXPERTS = "replace: {class: hybrid_experts}"


@dataclass(frozen=True, slots=True)
class Mistake:
    """A file for a tiny model of `layers` layers, the first of them dense, and its one finding."""

    label: str
    text: str
    message: str
    layers: int = 4
    num_experts: int = 4


ERRORS = (
    Mistake(
        "name that matches nothing",
        f"- {{id: moe, match: {{name: »'\\.mlp\\.expert$'}}, {EXPERTS}}}\n",
        "rule 'moe' matches no module of TinyModel\n"
        "    name: '\\.mlp\\.expert$'\n"
        "          nearest: model.layers.1.mlp.experts (3 modules); did you mean '\\.mlp\\.experts$'?",
    ),
    Mistake(
        "two words misspelt",
        f"- {{id: moe, match: {{name: »'^model\\.layer\\.\\d+\\.mlp\\.expert$'}}, {EXPERTS}}}\n",
        "rule 'moe' matches no module of TinyModel\n"
        "    name: '^model\\.layer\\.\\d+\\.mlp\\.expert$'\n"
        "          nearest: model.layers.1.mlp.experts (3 modules); did you mean '^model\\.layers\\.\\d+\\.mlp\\.experts$'?",
    ),
    Mistake(
        "words in another order",
        f"- {{id: moe, match: {{name: »'layers.*.experts.mlp$'}}, {EXPERTS}}}\n",
        "rule 'moe' matches no module of TinyModel\n    name: 'layers.*.experts.mlp$'\n"
        "          nearest: model.layers.1.mlp.experts (3 modules)",
    ),
    Mistake(
        "class that is not there",
        f"- {{id: moe, match: {{class: »TinyExpert}}, {EXPERTS}}}\n",
        "rule 'moe' matches no module of TinyModel\n    class: TinyExpert\n          did you mean 'TinyExperts'?",
    ),
    Mistake(
        "class of another package",
        f"- {{id: moe, match: {{class: »ktransformers.models.modeling.TinyExperts}}, {EXPERTS}}}\n",
        "rule 'moe' matches no module of TinyModel\n    class: ktransformers.models.modeling.TinyExperts\n"
        "          the model's TinyExperts is support.rule_support.TinyExperts; did you mean 'TinyExperts'?"
        "; KTransformers' copies of models are not used here",
    ),
    Mistake(
        "layers past the last",
        f"- {{id: moe, match: {{kind: experts, layers: »7-9}}, {EXPERTS}}}\n",
        "rule 'moe' matches no module of TinyModel\n    kind: experts alone matches 3 modules\n    layers: '7-9'\n"
        "          the model has layers 0-3",
    ),
    Mistake(
        "layers without experts",
        f"- {{id: moe, match: »{{kind: experts, layers: 0}}, {EXPERTS}}}\n",
        "rule 'moe' matches no module of TinyModel\n    kind: experts alone matches 3 modules\n"
        "    layers: '0' alone matches 5 modules\n    the other conditions match modules in layers 1-3",
    ),
    Mistake(
        "parts at odds",
        "- {id: a, match: »{class: Linear, kind: experts}, replace: {class: default}}\n",
        "rule 'a' matches no module of TinyModel\n    class: Linear alone matches 16 modules\n"
        "    kind: experts alone matches 3 modules\n    no module meets all conditions at once",
    ),
    Mistake(
        "no experts at all",
        f"- {{id: moe, match: {{kind: »experts}}, {EXPERTS}}}\n",
        "rule 'moe' matches no module of TinyModel\n    kind: experts\n"
        "          the model has no module named 'experts': it is no mixture of experts, or transformers builds it in another way",
        layers=1,
    ),
    Mistake(
        "expect too many",
        f"- {{id: moe, match: {{kind: experts}}, {EXPERTS}, expect: »4}}\n",
        "rule 'moe' takes model.layers.{1-3}.mlp.experts (3 modules) and 4 are expected",
    ),
    Mistake(
        "expect what an earlier rule takes",
        f"- {{match: {{kind: experts, layers: 1}}, {EXPERTS}}}\n- {{id: b, match: {{kind: experts}}, {EXPERTS}, expect: »3}}\n",
        "rule 'b' takes model.layers.{2-3}.mlp.experts (2 modules) and 3 are expected",
    ),
    Mistake(
        "shadowed rule",
        f"- {{id: all, match: {{name: mlp}}, replace: {{class: default}}}}\n- {{id: moe, match: »{{kind: experts}}, {EXPERTS}}}\n",
        "rule 'moe' takes no module: all 3 that it matches are taken or closed by rule 'all' (line 1), which comes first; "
        "move it up, or narrow the earlier rule",
    ),
    Mistake(
        "shadowed by two",
        f"- {{id: a, match: {{kind: experts, layers: 1}}, {EXPERTS}}}\n- {{id: b, match: {{kind: experts, layers: 2-3}}, {EXPERTS}}}\n"
        f"- {{id: c, match: »{{kind: experts}}, {EXPERTS}}}\n",
        "rule 'c' takes no module: all 3 that it matches are taken or closed by rule 'a' (line 1), rule 'b' (line 2), which comes first; "
        "move it up, or narrow the earlier rule",
    ),
    Mistake(
        "closed by a rule that is not recursive",
        "- {id: all, match: {name: '^model$'}, replace: {class: default}, recursive: false}\n"
        f"- {{id: moe, match: »{{kind: experts}}, {EXPERTS}}}\n",
        "rule 'moe' takes no module: all 3 that it matches are taken or closed by rule 'all' (line 1), which comes first; "
        "move it up, or narrow the earlier rule",
    ),
    Mistake(
        "operator of another kind",
        "- {id: a, match: {name: experts$}, replace: {class: »packed_linear}}\n",
        "rule 'a': packed_linear cannot replace model.layers.{1-3}.mlp.experts (3 modules): "
        "TinyExperts is not of kind linear but of kind experts; add 'kind: linear' to the rule's match",
    ),
    Mistake(
        "operator for modules of no kind",
        "- {id: a, match: {name: 'mlp$', layers: 1-3}, replace: {class: »packed_linear}}\n",
        "rule 'a': packed_linear cannot replace model.layers.{1-3}.mlp (3 modules): "
        "TinyMoe is not of kind linear; add 'kind: linear' to the rule's match",
    ),
    Mistake(
        "operator that refuses",
        "- {id: a, match: {kind: experts}, replace: {class: »hybrid_experts}}\n",
        "rule 'a': hybrid_experts cannot replace model.layers.{1-47}.mlp.experts (47 modules): odd numbers of experts cannot be halved",
        layers=48,
        num_experts=3,
    ),
    Mistake(
        "requires another model",
        f"requires: {{model_type: »[mixtral, olmoe]}}\nrules:\n- {{match: {{kind: experts}}, {EXPERTS}}}\n",
        "this rule file is for models of type 'mixtral' or 'olmoe', and this model is of type 'tiny'",
    ),
)

WARNINGS = (
    Mistake(
        "dot after a number",
        f"- {{match: {{name: »'layers.1.', kind: experts}}, {EXPERTS}}}\n",
        r"name 'layers.1.' also takes layers 10-19: a dot matches any character, and a dot after a backslash only a dot; "
        r"for layer 1 alone write 'layers\.1\.'",
        layers=24,
    ),
    Mistake(
        "star after a number",
        f"- {{match: {{name: »'^model.layers.1.*experts$'}}, {EXPERTS}}}\n",
        r"name '^model.layers.1.*experts$' also takes layer 10: a dot matches any character, and a dot after a backslash only a dot; "
        r"for layer 1 alone write 'layers\.1\.'",
        layers=11,
    ),
    Mistake(
        "number at the end",
        "- {match: {name: »'layers\\.2', class: Linear}, replace: {class: default}}\n",
        r"name 'layers\.2' also takes layers 20-23: a dot matches any character, and a dot after a backslash only a dot; "
        r"for layer 2 alone write 'layers\.2\.'",
        layers=24,
    ),
    Mistake(
        "group of numbers",
        f"- {{match: {{name: »'layers\\.(2|3).', kind: experts}}, {EXPERTS}}}\n",
        r"name 'layers\.(2|3).' also takes layers 20-23: a dot matches any character, and a dot after a backslash only a dot; "
        r"for layer 2 alone write '\.' after 2",
        layers=24,
    ),
    Mistake(
        "layers of which some are not there",
        f"- {{match: {{kind: experts, layers: »0-3}}, {EXPERTS}}}\n",
        "layers '0-3': the modules that the rule matches are in layers 1-3",
    ),
)

CLOSED = (  # patterns that look alike and are right
    r"layers\.1\.",
    r"layers\.(1|2)\.",
    r"layers\.1[.]",
    r"layers\.1\d\.",
    r"layers\.\d+\.",
)


def placed(mistake: Mistake) -> tuple[str, int, int]:
    before, after = mistake.text.split(HERE)
    lines = before.split("\n")
    return before + after, len(lines), len(lines[-1]) + 1


@pytest.mark.parametrize("mistake", ERRORS, ids=lambda mistake: mistake.label)
def test_a_mistake_is_one_error_at_its_place(mistake: Mistake, tmp_path: Path) -> None:
    text, line, column = placed(mistake)
    path = write(tmp_path, text)
    found = findings_of(lambda: plan_for(path, tiny_model(mistake.layers, num_experts=mistake.num_experts)))
    assert [str(finding) for finding in found] == [f"{path}:{line}:{column}: error: {mistake.message}"]


@pytest.mark.parametrize("mistake", WARNINGS, ids=lambda mistake: mistake.label)
def test_a_doubt_is_one_warning_and_stops_nothing(mistake: Mistake, tmp_path: Path) -> None:
    text, line, column = placed(mistake)
    path = write(tmp_path, text)
    found = plan_for(path, tiny_model(mistake.layers))
    assert [str(finding) for finding in found.notices] == [f"{path}:{line}:{column}: warning: {mistake.message}"]
    assert found.describe().endswith(mistake.message)


@pytest.mark.parametrize("pattern", CLOSED)
def test_a_number_with_its_dot_is_no_doubt(pattern: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"- {{match: {{name: '{pattern}', kind: experts}}, {EXPERTS}}}\n")
    assert plan_for(path, tiny_model(24)).notices == ()


def test_swaps_inside_a_swap_are_one_error(tmp_path: Path) -> None:
    model = tiny_model()
    for layer in model.model["layers"][1:]:  # type: ignore[index]
        layer.mlp.experts.inner = nn.Linear(2, 2, device="meta")
    text = f"- {{id: moe, match: {{kind: experts}}, {EXPERTS}}}\n- {{id: l, match: {{kind: linear}}, replace: {{class: packed_linear}}}}\n"
    (found,) = findings_of(lambda: plan_for(write(tmp_path, text), model))
    assert found.message == (
        "rule 'l' takes model.layers.{1-3}.mlp.experts.inner (3 modules) inside what rule 'moe' (line 1) replaces as a whole; "
        "add 'recursive: false' to rule 'moe', or narrow one of the two"
    )
    closed = text.replace("hybrid_experts}", "hybrid_experts}, recursive: false", 1)
    assert len(plan_for(write(tmp_path, closed), model).swaps) == 3 + 16


def test_experts_of_another_form_are_named(tmp_path: Path) -> None:
    model = tiny_model(1)
    model.model["experts"] = nn.ModuleList([nn.Linear(2, 2)])
    (found,) = findings_of(lambda: plan_for(write(tmp_path, f"- {{match: {{kind: experts}}, {EXPERTS}}}\n"), model))
    assert found.message.endswith("model.experts (ModuleList) does not hold its experts in 3-D parameters")


def test_the_syntax_of_a_pattern_is_not_corrected(tmp_path: Path) -> None:
    model = tiny_model()
    model.Pe = nn.Identity()  # near the P of (?P<...>
    (found,) = findings_of(lambda: plan_for(write(tmp_path, f"- {{match: {{name: '(?P<layers>mlp).expertz'}}, {EXPERTS}}}\n"), model))
    assert found.message.endswith("did you mean '(?P<layers>mlp).experts'?")


def test_an_inherited_rule_that_is_overridden_is_a_notice(tmp_path: Path) -> None:
    found = plan_for(write(tmp_path, f"extends: cpu-exact\nrules:\n- {{id: mine, match: {{kind: experts}}, {EXPERTS}}}\n"))
    (overridden,) = found.notices
    assert (overridden.severity, Path(overridden.position.file).name) == ("notice", "cpu-exact.yaml")
    assert overridden.message.endswith("which comes first, and so overrides it")


def test_a_rule_that_may_take_nothing_is_a_notice_unless_it_only_names_a_kind(tmp_path: Path) -> None:
    rules = f"- {{match: {{kind: experts}}, {EXPERTS}}}\n"
    rules += "- {match: {kind: attention}, replace: {class: cpu_attention}, expect: any}\n"
    rules += "- {id: named, match: {kind: attention, name: attn}, replace: {class: cpu_attention}, expect: any}\n"
    (found,) = plan_for(write(tmp_path, rules)).notices
    assert found.message == "rule 'named' takes no module of TinyModel, as 'expect: any' allows"


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    text = (
        "requires: {model_type: x}\nrules:\n- {match: {name: expertz}, replace: {class: hybrid_experts}}\n"
        "- {match: {name: 'mlp$', kind: linear}, replace: {class: packed_linear}, expect: 2}\n"
        "- {match: {name: 'mlp$', layers: 0}, replace: {class: packed_linear}}\n"
    )
    found = findings_of(lambda: plan_for(write(tmp_path, text), tiny_model()))
    assert [finding.position.line for finding in found] == [1, 3, 4, 5]


def test_a_model_in_memory_is_planned_like_one_on_meta(tmp_path: Path) -> None:
    path = write(tmp_path, f"- {{match: {{kind: experts}}, {EXPERTS}}}\n")
    live = tiny_model().to_empty(device="cpu")
    weights = {name: torch.full_like(weight, index) for index, (name, weight) in enumerate(live.state_dict().items())}
    live.load_state_dict(weights)
    assert plan_for(path, live) == plan_for(path, tiny_model())
    assert all(torch.equal(weight, weights[name]) for name, weight in live.state_dict().items())
