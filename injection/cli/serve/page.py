"""The chat page: one answer to `/`, with its style and scripts in it, and a policy under which nothing else may run or be fetched."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

SCRIPTS = ("page_text.js", "page.js")


@dataclass(frozen=True, slots=True)
class Page:
    """HTML and the headers that go with it."""

    html: str
    headers: dict[str, str]


def chat_page() -> Page:
    """The page's files as one document. The policy names each script and the style by its hash, so what a model writes cannot run."""
    folder = files("moegraft.injection.cli.serve")
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    scripts = [folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS]
    html = folder.joinpath("page.html").read_text(encoding="utf-8")
    html = html.replace("<!-- style -->", f"<style>{style}</style>")
    html = html.replace("<!-- scripts -->", "\n".join(f"<script>{script}</script>" for script in scripts))
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(map(_hash, scripts)),
        "style-src": _hash(style),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return Page(
        html,
        {
            "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
