"""Serve the tests' tiny model, with tools, until the input ends; the first line of the output is its address."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.serve.service import Limits
from support.serving import IN_JSON, with_tools


def tiny_model() -> LoadedModel:
    """Return the model of the server's tests, which answers in letters."""
    folder = Path(__file__).parent.parent / "injection" / "cli"
    spec: Any = spec_from_file_location("serve_conftest", folder / "conftest.py")
    conftest = module_from_spec(spec)
    spec.loader.exec_module(conftest)
    tokenizer = conftest._byte_tokenizer()
    tokenizer.chat_template = conftest.TEMPLATE
    return LoadedModel("tiny", conftest._tiny_model(tokenizer), tokenizer, lambda: [])


if __name__ == "__main__":
    with with_tools(tiny_model(), IN_JSON, Limits(max_tokens=20)) as server:
        print(server.address, flush=True)
        sys.stdin.read()
