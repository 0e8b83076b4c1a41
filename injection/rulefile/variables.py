"""`${name}` in values: a value that is one `${name}` takes the variable's type, and within text its text is put in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from moegraft.injection.rulefile.diagnostics import Findings, did_you_mean, shown
from moegraft.injection.rulefile.document import MAX_TEXT
from moegraft.injection.rulefile.nodes import ListNode, MappingNode, Node, ScalarNode, Value, plain_text

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def substitute(node: Node, variables: Mapping[str, Value], findings: Findings) -> Node:
    """`node` with every `${name}` replaced; what is undefined is an error where it stands, and becomes null."""
    if isinstance(node, ScalarNode):
        return _substituted(node, variables, findings)
    if isinstance(node, ListNode):
        return replace(node, items=tuple(substitute(item, variables, findings) for item in node.items))
    return MappingNode(tuple(replace(entry, value=substitute(entry.value, variables, findings)) for entry in node), node.position)


def _substituted(node: ScalarNode, variables: Mapping[str, Value], findings: Findings) -> ScalarNode:
    text = node.value
    if not isinstance(text, str) or "${" not in text:
        return node
    names = _REFERENCE.findall(text)
    if "${" in _REFERENCE.sub("", text):
        findings.void(node.position, f"'${{' without its '}}' in {shown(text)}")
        return replace(node, value=None)
    for name in names:
        if name not in variables:
            known = did_you_mean(name, variables) or "; the file has no vars"
            findings.void(node.position, f"variable {shown(f'${{{name}}}')} is not defined{known}")
            return replace(node, value=None)
    if len(names) == 1 and text == f"${{{names[0]}}}":
        return ScalarNode(variables[names[0]], node.position, names[0])
    length = len(_REFERENCE.sub("", text)) + sum(len(plain_text(variables[name])) for name in names)
    if length > MAX_TEXT:
        findings.void(node.position, f"a value may have {MAX_TEXT} characters and this one has {length} once its variables are put in")
        return replace(node, value=None)
    filled = _REFERENCE.sub(lambda found: plain_text(variables[found[1]]), text)
    return ScalarNode(filled, node.position, names[0] if names else None)
