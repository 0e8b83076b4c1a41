"""The description of the server's routes, for programs and for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.request import urlopen

import pytest
from support.serving import PATIENCE_S, Server, serving

from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.serve.app import POSTS

jsonschema = pytest.importorskip("jsonschema", reason="an extra for tests: pip install 'moegraft[test]'")


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(loaded, key="secret") as found:
        yield found


def test_openapi_describes_every_route_and_parameter(server: Server) -> None:
    document = json.loads(server.get("/openapi.json"))
    assert document["openapi"].startswith("3.1")
    posts = {path for path, methods in document["paths"].items() if "post" in methods}
    assert posts == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
    }
    assert {*POSTS} - {"/v1/embeddings"} == posts, "what has to be JSON"
    schemas = document["components"]["schemas"]
    assert schemas["TokenizeBody"]["anyOf"] == [{"required": [name]} for name in ("prompt", "content", "messages")]
    chat = schemas["ChatBody"]
    assert chat["required"] == ["messages"] and chat["additionalProperties"] is False
    assert {"type": "number", "minimum": 0, "maximum": 2} in [{**option} for option in chat["properties"]["temperature"]["anyOf"]]
    assert chat["properties"]["functions"]["description"] == "not supported"
    for path in posts:
        assert {"400", "401", "413", "429"} <= document["paths"][path]["post"]["responses"].keys()
    refusals = [reply for methods in document["paths"].values() for reply in methods.values() for reply in reply["responses"].items()]
    assert all(json.dumps(reply).count("Refusal") == (status != "200") for status, reply in refusals)
    of_messages = {path for path in posts if "MessageRefusal" in json.dumps(document["paths"][path]["post"]["responses"]["400"])}
    assert of_messages == {"/v1/messages", "/v1/messages/count_tokens"}, "as Anthropic's clients read them"
    message = {name: schemas["Message"][name] for name in ("required", "anyOf")}
    for given, valid in ({"role": "user"}, False), ({"role": "user", "content": None}, False), ({"role": "assistant"}, True):
        assert jsonschema.Draft202012Validator(message).is_valid(given) is valid
    assert jsonschema.Draft202012Validator(message).is_valid({"role": "user", "content": "hi"})
    assert "422" not in dict(refusals) and not any("Validation" in name for name in schemas)


def test_the_docs_page_lists_them_and_needs_nothing_from_elsewhere(server: Server) -> None:
    with urlopen(server.address + "/docs", timeout=PATIENCE_S) as reply:
        page, policy = reply.read().decode(), reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "<script" not in page
    assert not re.search(r"(src|href)='?\"?(https?:|//)", page)
    document = json.loads(server.get("/openapi.json"))
    for path in document["paths"]:
        assert path in page
    for schema in ("ChatBody", "TextBody", "ResponseBody", "TokenizeBody"):
        assert all(f"<code>{name}</code>" in page for name in document["components"]["schemas"][schema]["properties"])
    assert "number ≥ 0 ≤ 2 or null" in page and "list of {role: " in page
