"""Every mistake of a rule file that shows without a model: one row each, with the place and the message of its error."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.rule_support import findings_of, read, write

HERE = "»"  # stands in a text where the error must be, and is taken out before the text is read


def rule(more: str = "") -> str:
    return f"- match: {{kind: experts}}\n  replace: {{class: hybrid_experts}}\n{more}\n"


def match(text: str) -> str:
    return f"- match: {text}\n  replace: {{class: default}}\n"


def replace(text: str) -> str:
    return f"- match: {{kind: experts}}\n  replace: {text}\n"


def options(text: str) -> str:
    return f"- match: {{kind: experts}}\n  replace:\n    class: hybrid_experts\n    kwargs:\n      {text}\n"


def file(header: str, rules: str = rule()) -> str:
    return f"{header}\nrules:\n{rules}"


@dataclass(frozen=True, slots=True)
class Mistake:
    """A file, and the one error that it must give where its text has the mark."""

    label: str
    text: str | bytes
    message: str  # a regular expression

    def written(self) -> tuple[bytes, int, int]:
        """The file without the mark, and the mark's line and column."""
        data = self.text if isinstance(self.text, bytes) else self.text.encode()
        before, after = data.split(HERE.encode(), maxsplit=1)
        lines = before.decode().split("\n")
        return before + after, len(lines), len(lines[-1]) + 1


MISTAKES = (
    # the text itself
    Mistake("empty file", "»", "this rule file is empty; it needs a list of rules"),
    Mistake("comments only", "»# nothing\n\n", "this rule file is empty"),
    Mistake("null", "»~\n", "this rule file is empty"),
    Mistake("top-level scalar", "»just words\n", "is a mapping with 'rules', or a list of rules, not text 'just words'"),
    Mistake("two documents", rule() + "»---\n" + rule(), "a second YAML document starts here"),
    Mistake("syntax error", "rules: [1, 2\n»", "not valid YAML: .*expected ',' or '\\]'"),
    Mistake("syntax error in a key", "rules:\n- a: b»: c\n", "not valid YAML: mapping values are not allowed here"),
    Mistake("unclosed quote", "rules: 'x\n»", "not valid YAML: while scanning a quoted scalar"),
    Mistake("tab", "rules:\n- match:\n»\tkind: experts\n", "a tab indents this line; YAML indents with spaces"),
    Mistake("tab after spaces", "rules:\n  »\t- match:\n", "a tab indents this line"),
    Mistake("tab between", "rules:»\t# all\n", "this is a tab; YAML needs a space here"),
    Mistake("not UTF-8", b"rules:\n- id: caf\xc2\xbb\xe9\n", "byte 0xe9 is not UTF-8; save the file with the encoding UTF-8"),
    Mistake("UTF-16", b"\xc2\xbb" + "rules: []".encode("utf-16"), "byte 0xff is not UTF-8"),
    Mistake("control character", "rules:\n- id: a»\x07b\n", "character U\\+0007 is not allowed in a rule file"),
    Mistake("escaped NUL in a path", options('note: »"a\\0b"'), "character U\\+0000 is not allowed in a rule file"),
    Mistake("escaped half of a surrogate", options('note: »"a\\uD800"'), "character U\\+D800 is not allowed in a rule file"),
    Mistake("escaped control character", rule('  id: »"\\e[31m"'), "character U\\+001B is not allowed in a rule file"),
    Mistake("escaped NUL in a key", file('vars: {»"a\\0b": 1}'), "character U\\+0000 is not allowed in a rule file"),
    Mistake("escape beyond 32 bits", '- id: "a»\\UFFFFFFFF"\n', "not valid YAML: this escape is not a Unicode character"),
    Mistake("escape beyond Unicode", '- id: "a»\\U00110000"\n', "not valid YAML: this escape is not a Unicode character"),
    Mistake("endless version of YAML", "%YAML 1.»" + "9" * 5000 + "\n--- a\n", "not valid YAML: this number has too many digits"),
    Mistake("5 MB of nested lists", "»" + "[" * 5_000_000, "a rule file may have at most 64 KiB, and this one has more"),
    Mistake("nested lists", "[" * 16 + "»" + "[" * 60_000, "more than 16 nested lists and mappings"),
    Mistake("nested mappings", "{a: " * 16 + "»" + "{a: " * 9_000, "more than 16 nested lists and mappings"),
    Mistake("long value", rule("  id: »" + "x" * 5000), "a value may have at most 4096 characters, and this one has 5000"),
    Mistake("alias", "vars: {a: 1}\nrules: »*rules\n", "alias '\\*rules': aliases are not allowed in rule files; name the value in vars"),
    Mistake("anchor", file("version: »&v 1"), "anchor '&v': anchors are not allowed in rule files"),
    Mistake(
        "tag that would call", "- »!!python/object/apply:os.system ['true']\n", "tag 'tag:yaml.org,2002:python/object/apply:os.system'"
    ),
    Mistake("tag of a value", file("version: »!!int 1"), "tags are not allowed in rule files"),
    Mistake("duplicate key", file("version: 1\n»version: 1"), "key 'version' is given twice; the first is in line 1"),
    Mistake("duplicate option", options("alpha: 1\n      »alpha: 2"), "key 'alpha' is given twice; the first is in line 5"),
    Mistake("key that is a number", file("version: 1\n»7: x"), "a key must be text, and this is 7"),
    Mistake("key that is a list", file("? »[a]\n: b"), "a key must be text, and this is a list"),
    # the file's own keys
    Mistake("unknown key of the file", "»rulez: []\n" + file("version: 1"), "unknown key 'rulez' in a rule file; did you mean 'rules'\\?"),
    Mistake("nothing asked", "»version: 1\n", "a rule file needs 'rules', a list of rules, or 'extends'"),
    Mistake("no rules", "rules: »[]\n", "a rule file needs at least one rule"),
    Mistake("empty bare list", "»[]\n", "a rule file needs at least one rule"),
    Mistake("rules is no list", "rules: »{a: 1}\n", "rules must be a list, not a mapping; write '- '"),
    Mistake("rule outside a list", "»match: {kind: experts}\nreplace: {class: default}\n", "rules must be in a list: write '- '"),
    Mistake("future version", file("version: »2"), "version must be 1, not 2"),
    Mistake("version as text", file("version: »'1'"), "version must be 1, not text '1'"),
    Mistake("version true", file("version: »true"), "version must be 1, not true"),
    Mistake("extends missing file", "extends: »nowhere.yaml\n", "extends 'nowhere.yaml': there is no such rule file"),
    Mistake("extends near a shipped name", "extends: »hybird\n", "no such rule file; did you mean 'hybrid'\\?"),
    Mistake("extends a shipped name as a file", "extends: »cpu.yaml\n", "did you mean the shipped 'cpu'\\?"),
    Mistake("extends itself", "extends: »rules.yaml\n", "extends 'rules.yaml' is circular: .*rules.yaml -> .*rules.yaml"),
    Mistake("extends a list", "extends: »[cpu]\n", "extends must be the name of a shipped rule file or a path, not a list"),
    Mistake("extends no user's folder", "extends: »~nobody-of-this-name/x.yaml\n", "there is no such rule file"),
    Mistake("extends a name that is too long", "extends: »" + "x" * 4000, "there is no such rule file"),
    Mistake("vars is no mapping", file("vars: »[a]"), "vars must be a mapping of names to values, not a list"),
    Mistake("variable that is a list", file("vars: {a: »[1]}"), "variable 'a' must be text, a number, .*, not a list"),
    Mistake("variable of a bad name", file("vars: {»a-b: 1}"), "'a-b' is no valid variable name"),
    Mistake("variable of a variable", file("vars: {a: 1, b: »'${a}'}"), "variable 'b' refers to another variable"),
    Mistake(
        "undefined variable", file("vars: {cache: 1}", options("alpha: »${cash}")), "'\\$\\{cash\\}' is not defined; did you mean 'cache'"
    ),
    Mistake("variable without vars", options("alpha: »${cash}"), "'\\$\\{cash\\}' is not defined; the file has no vars"),
    Mistake("open variable", options("note: »${cash"), "'\\$\\{' without '\\}' in '\\$\\{cash'"),
    Mistake("variables that blow up", file(f"vars: {{a: {'x' * 3000}}}", options("note: »${a}${a}")), "may have at most 4096 characters"),
    Mistake("unknown requirement", file("requires: {»model: x}"), "unknown key 'model' in requires; did you mean 'model_type'"),
    Mistake("requirement of a type", file("requires: {model_type: »[x, 1]}"), "model_type must be text or a list of text"),
    Mistake("requires is no mapping", file("requires: »mixtral"), "requires must be a mapping, such as {model_type: mixtral}"),
    # a rule
    Mistake("rule that is text", "- »hybrid_experts\n", "a rule must be a mapping with 'match' and 'replace', not text"),
    Mistake(
        "unknown key of a rule",
        "- »macth: {kind: experts}\n  replace: {class: default}\n",
        "unknown key 'macth' in a rule; did you mean 'match'",
    ),
    Mistake("no match", "- »replace: {class: default}\n", "a rule needs 'match', a mapping with name, class, kind or layers"),
    Mistake("empty match", match("»{}"), "match must be a mapping with .*, not an empty one"),
    Mistake("match is text", match("»experts"), "match must be a mapping with .*, not text 'experts'"),
    Mistake("unknown key of match", match("{kind: experts, »clas: X}"), "unknown key 'clas' in match; did you mean 'class'"),
    Mistake("bad regex", match("{name: »'mlp.(experts'}"), "not a valid regular expression: missing \\), unterminated"),
    Mistake("huge repeat", match("{name: »'a{99999999999}'}"), "is not a valid regular expression: .*too large"),
    Mistake("deep regex", match("{name: »'" + "(" * 400 + ")" * 400 + "'}"), "is not a valid regular expression: it has 800"),
    Mistake("name is a number", match("{name: »12}"), "name must be text, not 12; put it in quotes"),
    Mistake("class is no name", match("{class: »'torch nn'}"), "class must be a class name such as"),
    Mistake("unknown kind", match("{kind: »expert}"), "unknown kind 'expert'; did you mean 'experts'"),
    Mistake("layers backwards", match("{layers: »9-5}"), "range 9-5 runs backwards; write 5-9"),
    Mistake("layers in words", match("{layers: »all}"), "layers 'all': write layer numbers and ranges"),
    Mistake("layers a list", match("{layers: »[1, 2]}"), "layers must be a number or text such as"),
    Mistake("layers below 0", match("{layers: »-1}"), "layers must be a number or text"),
    Mistake("no replace", "- »match: {kind: experts}\n", "a rule needs 'replace', a mapping with the 'class' of an operator"),
    Mistake("replace is text", replace("»default"), "replace must be a mapping with .*, not text 'default'"),
    Mistake(
        "no class",
        replace("»{kwargs: {}}"),
        "replace needs 'class', .*known are: cpu_attention, cpu_norm, cpu_recurrent, cpu_router, hybrid_experts",
    ),
    Mistake(
        "unknown key of replace", replace("{class: hybrid_experts, »kwarg: {}}"), "unknown key 'kwarg' in replace; did you mean 'kwargs'"
    ),
    Mistake("recursive as text", rule("  recursive: »'False'"), "recursive must be true or false \\(without quotes\\), not text 'False'"),
    Mistake("recursive: no", rule("  recursive: »no"), "recursive must be true or false .*, not text 'no'"),
    Mistake("expect 0", rule("  expect: »0"), "expect must be the number of modules, 1 or more, or any, not 0"),
    Mistake("expect a range", rule("  expect: »1-3"), "expect must be the number of modules, 1 or more, or any, not text '1-3'"),
    Mistake("id is a number", rule("  id: »5"), "id must be text, not 5; put it in quotes"),
    Mistake("duplicate id", rule("  id: a") + rule("  id: »a"), "id 'a' is taken by the rule in line 3"),
    # the operator and its options
    Mistake("unknown operator", replace("{class: »hybrid_expert}"), "unknown operator 'hybrid_expert'; did you mean 'hybrid_experts'"),
    Mistake("operator as a path", replace("{class: »os.system}"), "class must be the name of an operator, not a path: 'os.system'"),
    Mistake(
        "operator of another kind", "- match: {kind: »experts}\n  replace: {class: packed_linear}\n", "replaces modules of kind linear"
    ),
    Mistake("options of default", replace("{class: default, kwargs: {»a: 1}}"), "unknown option 'a'; 'default' leaves modules unchanged"),
    Mistake(
        "kwargs is a list", replace("{class: hybrid_experts, kwargs: »[1]}"), "kwargs must be a mapping of options to values, not a list"
    ),
    Mistake("unknown option", options("»wieghts: int8"), "unknown option 'wieghts' of hybrid_experts; did you mean 'weights'\\?"),
    Mistake(
        "unknown option of an option", options("cache: {»ration: 1}"), "unknown option 'ration' of option 'cache' of hybrid_experts; did"
    ),
    Mistake(
        "option of an operator without",
        "- match: {kind: linear}\n  replace: {class: packed_linear, kwargs: {»a: 1}}\n",
        "'a' of packed_linear; it has none",
    ),
    Mistake(
        "required option",
        "- match: {kind: model}\n  replace: {class: »speculative_draft}\n",
        "option 'max_draft' of speculative_draft is missing; it has no default",
    ),
    Mistake("bad value", options("weights: »int7"), "must be one of stored, int8, int4, not text 'int7'; did you mean 'int8'"),
    Mistake(
        "unknown policy",
        options("cache: {policy: »lfru}"),
        "option 'cache.policy' of hybrid_experts must be one of mrs, lru, lfu, .* did you mean",
    ),
    Mistake("wrong type", options("lookahead: »many"), "option 'lookahead' of hybrid_experts must be a whole number, not text 'many'"),
    Mistake("true for a number", options("lookahead: »true"), "must be a whole number, not true"),
    Mistake("fraction for a whole number", options("lookahead: »1.5"), "must be a whole number, not 1.5"),
    Mistake("number in quotes", options("alpha: »'0.5'"), "must be a number, not text '0.5'; write it without quotes"),
    Mistake("infinity", options("alpha: »1e999"), "must be a number, not text '1e999'"),
    Mistake("leading zero", options("lookahead: »010"), "must be a whole number, not text '010'"),
    Mistake("yes for true", options("pinned: »yes"), "must be true or false, not text 'yes'; write true"),
    Mistake("off for false", options("pinned: »Off"), "must be true or false, not text 'Off'; write false"),
    Mistake("number for text", options("note: »5"), "must be text, not 5"),
    Mistake(
        "text for a mapping", options("cache: »lru"), "'cache' of hybrid_experts must be a mapping \\(policy, ratio\\), not text 'lru'"
    ),
    Mistake("neither of two", options("slots: »aut"), "must be a whole number or auto, not text 'aut'; did you mean 'auto'"),
    Mistake("item of a list", options("devices: [cpu, »0]"), "option 'devices\\[1\\]' of hybrid_experts must be text, not 0"),
    Mistake("text for a list", options("devices: »cpu"), "must be a list, each item text, not text 'cpu'"),
    Mistake("short list", options("window: »[1]"), "must have 2 items, not 1"),
    Mistake("value of a mapping", options("costs: {cpu: »fast}"), "option 'costs.cpu' of hybrid_experts must be a number, not text 'fast'"),
    Mistake(
        "option under both names",
        options("cache: {»share: 0.5, ratio: 0.5}"),
        "option 'cache.share' is the old name of 'cache.ratio', in line 5; delete it",
    ),
    Mistake("out of range", options("lookahead: »-1"), "options of hybrid_experts: lookahead must be 0 or more, not -1"),
    Mistake(
        "out of range inside", options("cache: {policy: lru, ratio: »2}"), "option 'cache' of hybrid_experts: ratio must be from 0 to 1"
    ),
    Mistake("options at odds", options("pinned: »true"), "options of hybrid_experts: pinned memory needs packed weights"),
    Mistake("from a variable", file("vars: {w: int3}", options("weights: »${w}")), "not text 'int3' \\(from \\$\\{w\\}\\); did you mean"),
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.label)
def test_a_mistake_is_one_error_at_its_place(mistake: Mistake, tmp_path: Path) -> None:
    data, line, column = mistake.written()
    path = write(tmp_path, data)
    begin = time.process_time()
    found = findings_of(lambda: read(path))
    assert time.process_time() - begin < 2  # seconds of the CPU; most take some milliseconds
    assert [finding.severity for finding in found] == ["error"], [str(finding) for finding in found]
    assert re.search(mistake.message, found[0].message), found[0].message
    position = found[0].position
    assert (position.file, position.line, position.column) == (str(path), line, column)


def test_a_wrong_value_under_an_old_name_is_an_error_at_the_value(tmp_path: Path) -> None:
    path = write(tmp_path, options("ahead: -1"))
    notice, error = findings_of(lambda: read(path))
    assert str(notice) == f"{path}:5:7: notice: option 'ahead' of hybrid_experts is now called 'lookahead'"
    assert str(error) == f"{path}:5:14: error: options of hybrid_experts: lookahead must be 0 or more, not -1"
