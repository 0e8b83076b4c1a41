"""Build the documentation site: the Markdown files of this checkout, a page for each command from its help, and the docstrings.

    python .ci/site.py --out build/site

Nothing is compiled: commands are imported from this checkout without their kernels, and docstrings are read and not imported. Warnings are
errors. The pages are written to `build/site-pages` first, with the links between the files changed to links between pages, and Sphinx
makes the site of them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
import tomllib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import griffe
import typer
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
PAGES_FOLDER = ROOT / "build" / "site-pages"
# What a newcomer sees on the left: titles, and under each one its pages. A page has a place on the site and a file of this checkout;
# what is made of the commands and docstrings is added to its section.
SECTIONS: dict[str, dict[str, str]] = {
    "Start": {"index": "README.md"},
    "Rules": {"rules/index": "rules/README.md"},
    "Guide": {
        "guide/index": "rules/guide/README.md",
        "guide/installing": "rules/guide/installing.md",
        "guide/recipes": "rules/guide/recipes.md",
        "guide/options": "rules/guide/options.md",
        "guide/transformers": "rules/guide/transformers.md",
        "guide/training": "rules/guide/training.md",
        "guide/formats": "rules/guide/formats.md",
        "guide/server": "rules/guide/server.md",
        "guide/agents": "rules/guide/agents.md",
        "guide/several-machines": "rules/guide/several-machines.md",
        "guide/replicas": "rules/guide/replicas.md",
        "guide/families": "rules/guide/families.md",
        "guide/how-it-works": "rules/guide/how-it-works.md",
        "guide/operators": "rules/guide/operators.md",
        "guide/ktransformers": "rules/guide/ktransformers.md",
        "guide/bundled-model": "injection/demo/README.md",
    },
    "Commands": {"commands/index": "rules/guide/commands.md"},
    "API": {"api/index": ""},
    "Benchmarks": {"benchmarks/index": "benchmarks/README.md"},
    "Contributing": {
        "contributing/index": "CONTRIBUTING.md",
        "contributing/changelog": "CHANGELOG.md",
        "contributing/security": "SECURITY.md",
    },
}
STYLE = PAGES_FOLDER / "_static" / "site.css"
# Commands have comments behind them, and results are tables of many columns: both need a wider page than prose.
STYLES = """
@media (min-width: 82em) { .content { width: clamp(46em, calc(100vw - 36em), 60em); } }
.content pre { font-size: 0.78em; }
.content table.docutils { font-size: 0.85em; }
.content table.docutils td code { white-space: nowrap; }
"""
# The public objects, by the page and the module to import them from: the file that defines each, and its name.
API = {
    "api/models": (
        "Models",
        "From a model and a rule file to a `PreTrainedModel`: in one call, or step by step.",
        "moegraft.injection",
        [
            ("injection/api.py", "optimize_and_load"),
            ("injection/in_transformers.py", "MoegraftConfig"),
            ("injection/meta_model.py", "build_meta_model"),
            ("injection/rules/reading.py", "read_rules"),
            ("injection/planning.py", "plan"),
            ("injection/grafting.py", "graft"),
            ("injection/loading.py", "load"),
            ("injection/injected.py", "new_cache"),
        ],
    ),
    "api/training": (
        "Training",
        "LoRA adapters beside packed weights, by PEFT.",
        "moegraft.injection.lora",
        [("injection/lora.py", name) for name in ("lora_config", "load_adapter", "check_adapter", "Adapters")],
    ),
    "api/plans": (
        "Plans and loaded models",
        "What `plan()` returns, and what a loaded model has as `model.moegraft`.",
        "",
        [("injection/planning.py", "Plan"), ("injection/planning.py", "Swap"), ("injection/injected.py", "Injection")],
    ),
    "api/operators": (
        "Operators",
        "What an operator of your own implements and is given: [Writing an operator](../guide/operators.md) has a complete one.",
        "",
        [
            ("operators/base.py", "Operator"),
            ("operators/base.py", "Footprint"),
            ("operators/base.py", "Traits"),
            ("operators/base.py", "Packing"),
            ("operators/context.py", "InjectionContext"),
            ("operators/weights.py", "WeightSource"),
            ("operators/registry.py", "OperatorRegistry"),
            ("operators/registry.py", "load_registry"),
        ],
    ),
    "api/errors": (
        "Errors",
        "Every error that a user can fix is one of these; its message has the place, the reason and the remedy.",
        "moegraft.operators.errors",
        [
            ("operators/errors.py", name)
            for name in (
                "MoegraftError",
                "RuleFileError",
                "CheckpointError",
                "UnsupportedModelError",
                "NotEnoughMemoryError",
                "ThresholdsError",
            )
        ],
    ),
}


# Pages of this checkout


def places() -> dict[Path, str]:
    """Return the place on the site of each Markdown file that is a page."""
    return {(ROOT / file): place for pages in SECTIONS.values() for place, file in pages.items() if file}


def with_site_links(file: Path, place: str) -> str:
    """Return the text of a Markdown file with links that lead to pages and files from its place on the site.

    Raises:
        SystemExit: a link leads to no file of this checkout.
    """
    known = places()

    def moved(match: re.Match[str]) -> str:
        target, mark, anchor = match[1].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        there = (file.parent / target).resolve()
        if not there.is_file():
            sys.exit(f"{file.relative_to(ROOT)}: the link to {target} leads to no file")
        on_site = PAGES_FOLDER / f"{known[there]}.md" if there in known else there
        return f"]({Path(os.path.relpath(on_site, (PAGES_FOLDER / place).parent)).as_posix()}{mark}{anchor})"

    parts = re.split(r"(^ *```.*?^ *```$)", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.lstrip().startswith("```") else re.sub(r"\]\(([^)\s]+)\)", moved, part) for part in parts)


def contents(pages: Sequence[str]) -> str:
    """Return the directive that puts `pages` below a page in the navigation."""
    return "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


# Pages of the commands


def commands() -> Iterator[tuple[str, Any]]:
    """Yield the name of each command, as in `moegraft plan`, and what runs it."""
    package = types.ModuleType("moegraft")  # the folders of this checkout are its packages; the project need not be installed
    package.__path__ = [str(ROOT)]
    sys.modules["moegraft"] = package
    from moegraft.injection.cli import local_chat, moegraft

    yield "local_chat", typer.main.get_command(local_chat.app)
    group: Any = typer.main.get_command(moegraft.app)
    for name, command in group.commands.items():
        yield f"moegraft {name}", command


def plain(text: str) -> str:
    """Return the text of a help message as Markdown that shows the same characters; backticks keep their meaning."""
    parts = re.split(r"(`[^`]*`)", re.sub(r"(?<![\w`-])--[a-z][\w-]*(?!`)", r"`\g<0>`", text))
    return "".join(part if part.startswith("`") else re.sub(r"([<>*_$|\\])", r"\\\1", part) for part in parts)


def command_page(name: str, command: Any) -> str:
    """Return the page of one command: its description, usage, arguments, options by panel, and examples."""
    context = command.context_class(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"# {name}", plain(textwrap.dedent(command.help or "").strip()), f"```text\n{usage}\n```", f"```{{program}} {name}\n```"]
    panels: dict[str, list[str]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None:
            continue
        is_argument = parameter.param_type_name == "argument"
        panel = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
        shown = parameter.name.upper() if is_argument else record[0]
        panels.setdefault(panel, []).append(f"````{{option}} {shown}\n{plain(record[1])}\n````")
    for panel in sorted(panels, key=lambda panel: (panel != "Arguments", panel == "Options")):
        parts += [f"## {panel}", *panels[panel]]
    example, note = re.fullmatch(r"(?:Example: (.*))?(.*)", command.epilog or "", re.DOTALL).groups()  # type: ignore[union-attr]
    parts += [f"## Example\n\n```sh\n{example}\n```"] if example else []
    return "\n\n".join([*parts, plain(note or "")]) + "\n"


# Pages of the docstrings


def fields(docstring: griffe.Docstring | None) -> str:
    """Return a docstring in Google's style as Markdown: its sections become fields."""
    if docstring is None:
        return ""
    lines = []
    for section in docstring.parse("google", warnings=False, returns_multiple_items=False, returns_named_value=False):
        if section.kind is griffe.DocstringSectionKind.text:
            lines.append(section.value)
        elif section.kind is griffe.DocstringSectionKind.parameters:
            shown = [(name, item.description) for item in section.value for name in item.name.split(", ")]
            lines.append("\n".join(f":param {name}: {folded(description)}" for name, description in shown))
        elif section.kind in (griffe.DocstringSectionKind.returns, griffe.DocstringSectionKind.yields):
            lines.append("\n".join(f":{section.kind.value}: {folded(item.description)}" for item in section.value))
        elif section.kind is griffe.DocstringSectionKind.raises:
            lines.append("\n".join(f":raises {str(item.annotation).strip('()')}: {folded(item.description)}" for item in section.value))
        elif section.kind is not griffe.DocstringSectionKind.attributes:  # those are shown as members of their class
            sys.exit(f"{docstring.parent}: no page shows a section '{section.kind.value}'")
    return "\n\n".join(lines)


def folded(text: str) -> str:
    return " ".join(text.split())


def directive(kind: str, signature: str, body: str, *options: str, fence: int = 5) -> str:
    marks = "`" * fence
    return "\n".join([f"{marks}{{py:{kind}}} {signature}", *options, "", body, marks])


def signature_of(function: griffe.Function, *, method: bool = False) -> str:
    """Return a function's parameters and result as they are written."""
    shown, star = [], False
    for parameter in list(function.parameters)[1 if method and "staticmethod" not in function.labels else 0 :]:
        name, kind = parameter.name.lstrip("*"), parameter.kind
        if kind is griffe.ParameterKind.keyword_only and not star:
            shown.append("*")
        star = star or kind in (griffe.ParameterKind.keyword_only, griffe.ParameterKind.var_positional)
        prefix = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(kind, "")
        annotation = f": {parameter.annotation}" if parameter.annotation is not None else ""
        is_plain = prefix or parameter.default is None
        shown.append(f"{prefix}{name}{annotation}" + ("" if is_plain else f" = {parameter.default}"))
    return f"{function.name}({', '.join(shown)})" + (f" -> {function.returns}" if function.returns is not None else "")


def class_page(found: griffe.Class, source: Sequence[str]) -> str:
    """Return a class with its public attributes, properties and methods that have a description."""
    body = [fields(found.docstring)]
    sections = found.docstring.parse("google", warnings=False) if found.docstring else []
    described = {item.name: item.description for section in sections if section.kind.value == "attributes" for item in section.value}
    for name, member in found.members.items():
        if name.startswith("_") or member.is_alias:
            continue
        if isinstance(member, griffe.Attribute):
            is_property = "property" in member.labels
            comment = re.search(r"  # (.*)$", source[(member.lineno or 1) - 1])
            told = described.get(name) or fields(member.docstring) or (comment[1] if comment else "")
            if told or member.annotation is not None:
                options = [f":type: {member.annotation}"] if member.annotation is not None else []
                body.append(directive("property" if is_property else "attribute", name, told, *options, fence=4))
        elif isinstance(member, griffe.Function) and member.docstring is not None:
            decorators = [decorator.callable_path.rpartition(".")[2] for decorator in member.decorators]
            options = [f":{name}:" for name in ("classmethod", "staticmethod", "abstractmethod") if name in decorators]
            body.append(directive("method", signature_of(member, method=True), fields(member.docstring), *options, fence=4))
    bases = ", ".join(str(base) for base in found.bases)
    return directive("class", found.name, "\n\n".join([f"Bases: `{bases}`" if bases else "", *body]))


def api_page(title: str, intro: str, module: str, objects: Sequence[tuple[str, str]]) -> str:
    parts = [f"# {title}", intro]
    for file, name in objects:
        text = (ROOT / file).read_text(encoding="utf-8")
        home = "moegraft." + file.removesuffix(".py").replace("/", ".")
        members = griffe.visit(home, ROOT / file, text).members
        if name not in members:
            sys.exit(f"{file} has no {name}: change API in .ci/site.py")
        found = members[name]
        parts += [f"```{{py:currentmodule}} {module or home}\n```", f"## {name}", f"`from {module or home} import {name}`"]
        if isinstance(found, griffe.Class):
            parts.append(class_page(found, text.splitlines()))
        else:
            assert isinstance(found, griffe.Function), f"{name} is neither a class nor a function"
            parts.append(directive("function", signature_of(found), fields(found.docstring)))
    return "\n\n".join(parts) + "\n"


# The site


def pages() -> dict[str, str]:
    """Return the Markdown of every page by its place on the site."""
    found = {place: with_site_links(ROOT / file, place) for section in SECTIONS.values() for place, file in section.items() if file}
    below = {next(iter(section)): list(section)[1:] for section in SECTIONS.values()}
    rows = []
    for name, command in commands():
        place = f"commands/{name.replace(' ', '-')}"
        found[place] = command_page(name, command)
        below["commands/index"].append(place)
        summary = folded(plain(textwrap.dedent(command.help or "").strip()).partition("\n\n")[0])
        rows.append(f"| [`{name}`]({Path(place).name}.md) | {summary} |")
    found["commands/index"] += "\n## Every command\n\n| command | what it does |\n|---|---|\n" + "\n".join(rows) + "\n"
    found["api/index"] = (
        "# API\n\nThe functions of `moegraft.injection`, what they return and raise, and what an operator of your own builds on.\n\n"
        "| page | contents |\n|---|---|\n"
    )
    for place, (title, intro, module, objects) in API.items():
        found[place] = api_page(title, intro, module, objects)
        below["api/index"].append(place)
        found["api/index"] += f"| [{title}]({Path(place).name}.md) | {', '.join(f'`{name}`' for _, name in objects)} |\n"
    for place, others in below.items():
        if others:
            found[place] += contents([f"/{other}" for other in others])
    found["index"] += contents(["Start <self>", *(f"{title} </{next(iter(SECTIONS[title]))}>" for title in list(SECTIONS)[1:])])
    return found


def write(found: dict[str, str]) -> None:
    """Write the pages to an empty folder."""
    shutil.rmtree(PAGES_FOLDER, ignore_errors=True)
    for path, text in ({PAGES_FOLDER / f"{place}.md": text for place, text in found.items()} | {STYLE: STYLES}).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def settings() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        "project": project["name"],
        "release": project["version"],
        "extensions": ["myst_parser"],
        "html_theme": "furo",
        "html_title": project["name"],
        "html_copy_source": False,
        "html_show_sphinx": False,
        "html_show_copyright": False,
        "highlight_language": "none",
        "smartquotes_action": "D",  # dashes, and not quotes
        "html_static_path": ["_static"],
        "html_css_files": [STYLE.name],
        "add_module_names": False,
        "python_maximum_signature_line_length": 100,
        "toc_object_entries": False,
        "myst_enable_extensions": ["fieldlist"],
        "myst_heading_anchors": 4,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", metavar="FOLDER", help="where the site is written")
    arguments = parser.parse_args()
    write(pages())
    site = Sphinx(
        srcdir=PAGES_FOLDER,
        confdir=None,
        outdir=arguments.out,
        doctreedir=ROOT / "build" / "site-doctrees",
        buildername="html",
        confoverrides=settings(),
        status=None,
        freshenv=True,  # a page that is kept from the last time would keep its warnings to itself
        warningiserror=True,
    )
    site.build()
    if site.statuscode == 0:
        print(f"{arguments.out / 'index.html'}: {len(site.project.docnames)} pages")
    return site.statuscode


if __name__ == "__main__":
    sys.exit(main())
