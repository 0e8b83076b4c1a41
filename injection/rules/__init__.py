"""Rule files: read with the position of every key and value, checked as far as possible without a model, and typed."""

from moegraft.injection.rules.document import Diagnostic, Position, RuleErrors
from moegraft.injection.rules.reading import DEFAULT_RULES, read_rules
from moegraft.injection.rules.rule import Match, Requirement, Rule, RuleFile

__all__ = ["DEFAULT_RULES", "Diagnostic", "Match", "Position", "Requirement", "Rule", "RuleErrors", "RuleFile", "read_rules"]
