"""Rule files: read with a position on every key and value, checked as far as they can be without a model, and typed."""

from moegraft.injection.rules.diagnostics import Diagnostic, Position, RuleErrors
from moegraft.injection.rules.reading import default_rules, read_rules
from moegraft.injection.rules.rule import Match, Requirement, Rule, RuleFile

__all__ = ["Diagnostic", "Match", "Position", "Requirement", "Rule", "RuleErrors", "RuleFile", "default_rules", "read_rules"]
