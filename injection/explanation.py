"""What a rule file does to a model, module by module, also where it is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from moegraft.injection.checks import Trial, trials
from moegraft.injection.meta_model import MetaModel
from moegraft.injection.plan import Plan
from moegraft.injection.rules import Diagnostic, RuleErrors, RuleFile
from moegraft.injection.rules.matching import Assignment, ModelModules, assign
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.registry import OperatorRegistry


@dataclass(frozen=True, slots=True)
class Explanation:
    """A rule file on a model.

    Attributes:
        plan: None where `findings` has an error.
        left_alone: the modules that rules of class `default` take, by the rule's index.
    """

    rules: RuleFile
    modules: ModelModules
    assignment: Assignment
    plan: Plan | None
    findings: tuple[Diagnostic, ...]
    left_alone: Mapping[int, tuple[str, ...]]

    def trials(self, module: str) -> list[Trial]:
        """What each rule made of one module.

        Raises:
            UnsupportedModelError: the model has no such module.
        """
        if module not in set(self.modules):
            near = get_close_matches(module, list(self.modules), n=1, cutoff=0.4)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise UnsupportedModelError(f"{self.modules.model_class} has no module {module!r}{hint}")
        return trials(module, self.rules.rules, self.assignment, self.modules)


def explain(meta_model: MetaModel, rules: RuleFile, registry: OperatorRegistry) -> Explanation:
    """Explains rules that could be read; what is wrong with them for this model is among the findings."""
    modules = ModelModules(meta_model.skeleton)
    assignment = assign(rules.rules, modules, registry.in_place)
    plan: Plan | None = None
    try:
        plan = meta_model.plan(rules, registry)
        findings = plan.notices
    except RuleErrors as error:
        findings = error.diagnostics
    left = {
        index: tuple(taken)
        for index, (rule, taken) in enumerate(zip(rules.rules, assignment.taken, strict=True))
        if rule.operator is None and taken
    }
    return Explanation(rules, modules, assignment, plan, findings, left)
