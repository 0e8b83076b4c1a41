"""The README says what is so: its tables are the committed results', its example rules are valid, what it names is there."""

import re
from pathlib import Path

from support import ROOT, import_benchmark

from moegraft.injection.rules import read_rules
from moegraft.operators.registry import load_registry

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_those_of_the_results() -> None:
    module = import_benchmark("readme_tables")
    for page in module.PAGES:
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"<!-- results: (\w+) -->", text), f"{page.name} has no tables"
        assert module.rendered(text) == text, "run benchmarks/readme_tables.py"


def test_example_rules_are_valid(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        path = tmp_path / "rules.yaml"
        path.write_text(block)
        assert read_rules(path, registry=load_registry()).rules


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_commands_exist() -> None:
    scripts = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for program in ("local_chat", "moegraft"):
        assert f"{program} = " in scripts
    registered = (ROOT / "injection" / "cli" / "moegraft.py").read_text(encoding="utf-8")
    commands = set(re.findall(r"^app\.command\(.*\)\((\w+)\)$", registered, re.MULTILINE))
    named = set(re.findall(r"^moegraft (\w+)", README, re.MULTILINE))
    assert named and named <= commands
