"""The pages of the documentation and their code blocks."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from support import ROOT

PAGES = (ROOT / "README.md", ROOT / "rules" / "README.md", *sorted((ROOT / "rules" / "guide").glob("*.md")))
# A mark above a block, the block's language, and its contents.
_BLOCK = re.compile(r"(?:^ *<!-- (?P<mark>[\w ]+) -->\n)?^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    language: str
    mark: str
    text: str

    @property
    def place(self) -> str:
        """Return the position of a block for a test's name."""
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def blocks(language: str, mark: str | None = None) -> list[Block]:
    """Return all blocks of a language, ready to be saved; with `mark`, only those below this mark."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        # All blocks are matched, because the end of a block in another language looks like the start of one without a language.
        for block in _BLOCK.finditer(text):
            line = text[: block.start("text")].count("\n") + 1
            if block["language"] == language and mark in (None, block["mark"]):
                found.append(Block(page, line, language, block["mark"] or "", textwrap.dedent(block["text"])))
    return found


def the_block(language: str, mark: str) -> Block:
    (found,) = blocks(language, mark)
    return found
