"""The chat page: nothing from elsewhere, text that stays text, and a person who asks, stops and begins again in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.request import urlopen

import pytest
from support import ROOT
from support.browser import Tab, browsing, find_chromium
from support.serving import CALL, PATIENCE_S, Server, scripted, serving, until

from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.serve.app import chat_page
from moegraft.injection.cli.serve.service import Limits

FOLDER = ROOT / "injection" / "cli" / "serve"
PHONE = {"width": 360, "height": 640, "mobile": True}
with_node = pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here to run the page's functions")
with_chromium = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium here (Debian's package chromium brings one)")


class Elements(HTMLParser):
    """Every start tag, and what scripts and styles hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.held: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag in self.held:
            self.held[tag].append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem in self.held:  # inside such an element nothing is a tag
            self.held[self.cdata_elem][-1] += data


def test_the_page_needs_nothing_from_elsewhere() -> None:
    found = Elements(chat_page()[0])
    for tag, attrs in found.tags:
        assert not {"src", "href", "style", "srcset", "action", "background"} & attrs.keys(), (tag, attrs)
        assert not any(name.startswith("on") for name in attrs), "the policy would not run it"
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in found.tags}
    for text in [*found.held["script"], *found.held["style"]]:
        assert not re.search(r"https?:|@import|url\(|\bimport\b", text)
    assert len(found.held["script"]) == 2 and len(found.held["style"]) == 1


def test_the_policy_lets_these_scripts_run_and_no_others(loaded: LoadedModel) -> None:
    with serving(loaded) as server, urlopen(server.address + "/", timeout=PATIENCE_S) as reply:
        html, headers = reply.read().decode(), dict(reply.headers)
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    found = Elements(html).held
    for kind in ("script", "style"):
        hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found[kind]}
        assert set(policy[f"{kind}-src"].split()) == hashes
    assert headers["x-content-type-options"] == "nosniff"


def test_text_is_never_set_as_html() -> None:
    scripts = list(FOLDER.glob("*.js"))
    assert scripts
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function|setTimeout\(['\"]", text
        )


def test_what_is_labelled_and_named_is_there() -> None:
    html = chat_page()[0]
    attributes = [attrs for _, attrs in Elements(html).tags]
    ids = [attrs["id"] for attrs in attributes if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {attrs["aria-describedby"] for attrs in attributes if "aria-describedby" in attrs} <= set(ids)
    assert set(re.findall(r'\bat\("([\w-]+)"\)', html)) <= set(ids), "the script finds what it looks for"
    assert any(attrs.get("lang") for attrs in attributes) and "width=device-width" in html and "prefers-color-scheme: dark" in html


def run_node(expression: str) -> Any:
    """What an expression over the page's functions comes to."""
    code = f"const page = require({str(FOLDER / 'page_text.js')!r}); console.log(JSON.stringify({expression}))"
    return json.loads(subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout)


USAGE = "{prompt_tokens: 1200, completion_tokens: 1, prompt_tokens_details: {cached_tokens: 7}}"
MADE = "{tokens_per_second: null, first_token_ms: 1234.5, together: false, work: {}}"


@with_node
def test_the_lines_that_the_page_shows() -> None:
    assert run_node(f"page.speedLine({USAGE}, {MADE})") == "1,200 tokens read (7 known), 1 token made, first after 1.23 s"
    assert run_node(f"page.workLine({MADE})") == ""
    work = (
        "experts_used: 200, experts_computed_on_cpu: 50, experts_found_on_gpu: 120, draft_rounds: 1, tokens_drafted: 8, tokens_accepted: 6"
    )
    line = run_node(f"page.workLine({{together: true, work: {{{work}, neurons: 10, neurons_left_out: 5}}}})")
    assert line == (
        "experts: 75.0 % on the GPU, 25.0 % on the CPU · cache hits: 60.0 % · drafts accepted: 6 of 8 in 1 round · "
        "neurons left out: 50.0 % (with the answers beside it)"
    )
    assert run_node("page.liveLine(0, 0, null, 1500)") == "waiting, 1.50 s"
    assert run_node("page.liveLine(11, 0, 20, 1020)") == "first token after 20 ms, 10.0 tokens/s"
    assert run_node("page.statusLine({tokens_per_second: 3, running: 1, waiting: 2, one_at_a_time_because: 'x'})") == (
        "3.0 tokens/s in all · 1 running · 2 waiting · one request at a time"
    )


@with_node
def test_messages_are_sent_with_their_images() -> None:
    assert run_node("page.asSent({role: 'user', content: 'hi', other: 1})") == {"role": "user", "content": "hi"}
    assert run_node("page.asSent({role: 'user', content: 'hi', images: []})") == {"role": "user", "content": "hi"}
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    found = run_node("[' hi', ' '].map(content => page.asSent({role: 'user', content, images: ['data:x']}))")
    assert [message["content"] for message in found] == [[image, {"type": "text", "text": " hi"}], [image]]


@with_node
def test_a_stream_in_any_pieces_is_the_same_events() -> None:
    """Cut anywhere, as a network may."""
    stream = 'data: {"a": "x\\ndata: y"}\n\n: a comment\n\ndata: {"b": "<&>"}\n\ndata: [DONE]\n\n'
    code = (
        "(text => { const found = []; for (let cut = 0; cut <= text.length; cut++) { let held = '', events = [];"
        " for (const piece of [text.slice(0, cut), text.slice(cut)]) { const one = page.splitEvents(held + piece); held = one.rest;"
        " events.push(...one.events); } found.push(JSON.stringify([events, held])); } return [...new Set(found)]; })"
    )
    assert run_node(f"{code}({json.dumps(stream)})") == ['[[{"a":"x\\ndata: y"},{"b":"<&>"}],""]']


@with_node
def test_markdown_becomes_a_tree_of_known_tags() -> None:
    text = "# A *b*\n\none `<i>` **two**\nthree\n- x\n- y\n3. z\n> q\n```py\n<img src=x>\n# no heading\n```\nafter\n~~~\nopen"
    blocks = run_node(f"page.markdown({json.dumps(text)})")
    assert [block["tag"] for block in blocks] == ["h1", "p", "ul", "ol", "blockquote", "pre", "p", "pre"]
    assert blocks[0]["parts"] == [{"tag": "text", "text": "A "}, {"tag": "em", "text": "b"}]
    assert [part["tag"] for part in blocks[1]["parts"]] == ["text", "code", "text", "strong", "text"]
    assert blocks[3]["start"] == 3 and [item[0]["text"] for item in blocks[2]["items"]] == ["x", "y"]
    assert blocks[5] == {"tag": "pre", "language": "py", "text": "<img src=x>\n# no heading"} and blocks[7]["text"] == "open"


@with_node
def test_no_text_is_lost_or_makes_another_tag() -> None:
    """Random mixtures of what means something in Markdown and in HTML."""
    drawn = random.Random(0)
    signs = ["*", "**", "`", "```", "\n", "\n\n", "- ", "1. ", "# ", "> ", "~~~", "<script>", "a", "b c", " ", "&lt;"]
    texts = ["".join(drawn.choice(signs) for _ in range(drawn.randrange(30))) for _ in range(300)]
    known = {"pre", "ul", "ol", "blockquote", "p", *(f"h{level}" for level in range(1, 7))}
    for text, blocks in zip(texts, run_node(f"{json.dumps(texts)}.map(page.markdown)"), strict=True):
        parts = [part for block in blocks for parts in block.get("items", [block.get("parts", [])]) for part in parts]
        assert {block["tag"] for block in blocks} <= known and {part["tag"] for part in parts} <= {"text", "code", "strong", "em"}
        shown = "".join(part["text"] for part in parts) + "".join(block.get("language", "") + block.get("text", "") for block in blocks)
        for word in ("<script>", "a", "&lt;"):
            assert shown.count(word) == text.count(word), text


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browsing(find_chromium() or "") as found:
        yield found


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(loaded, Limits(max_tokens=60)) as found:
        yield found


def say(tab: Tab, text: str) -> None:
    tab.value("document.getElementById('text').focus()")
    tab.type(text)
    tab.press("Enter")


SAID = "[...document.querySelectorAll('.said')].map(box => box.textContent)"
ABOUT = "[...document.querySelectorAll('.about')].map(box => box.textContent)"
IDLE = "document.getElementById('send').textContent === 'Send'"


@with_chromium
def test_the_page_shows_the_figures_of_an_answer(tab: Tab, server: Server) -> None:
    tab.look(**PHONE, dark=True)
    tab.requested.clear()
    tab.errors.clear()
    tab.open(f"{server.address}/")
    tab.until("document.getElementById('model').textContent === 'tiny'")
    nasty = "<img src=http://nowhere.example/x onerror=document.title='broken'> & <b>bold</b>"
    say(tab, nasty)
    tab.until(f"{IDLE} && {ABOUT}.some(line => line.includes('60 tokens made'))")
    question, answer = tab.value(SAID)
    assert question == nasty and answer.isalpha() and len(answer) == 60
    assert re.search(r"60 tokens made, \d+\.\d tokens/s, first after \d+", " ".join(tab.value(ABOUT)))
    tab.press("ArrowUp")  # brings the last message back, to be changed
    assert tab.value("document.getElementById('text').value") == nasty
    tab.value("document.getElementById('text').value = ''")
    say(tab, "and")
    tab.until(f"{IDLE} && {ABOUT}.some(line => / known\\), 60 tokens made/.test(line))")
    assert len(tab.value(SAID)) == 4
    assert tab.value("document.documentElement.scrollWidth <= innerWidth"), "a small screen shows all of the width"
    assert not tab.value("document.getElementById('where').open"), "and keeps its height for the talk"
    dark = tab.value("getComputedStyle(document.body).backgroundColor")
    tab.look(**PHONE, dark=False)
    assert dark != tab.value("getComputedStyle(document.body).backgroundColor")
    assert tab.value("document.getElementById('placement').textContent") == "2 x experts: hybrid_experts on the CPU"
    assert tab.value("document.title") == "moegraft" and tab.value("document.querySelectorAll('img').length") == 0
    assert {url.split("/")[2] for url in tab.requested if url.startswith("http")} == {server.address.removeprefix("http://")}
    assert tab.errors == []


@with_chromium
@pytest.mark.parametrize("way", ["Escape", "button"])
def test_stopping_ends_the_work_on_the_server(tab: Tab, loaded: LoadedModel, way: str) -> None:
    hook = loaded.model.register_forward_pre_hook(lambda *args: time.sleep(0.02))
    try:
        with serving(loaded) as server:
            engine = server.service.engine
            tab.open(f"{server.address}/")
            say(tab, "speak on")
            tab.until(f"{SAID}.length === 2 && {SAID}[1].length > 5")
            assert tab.value("document.getElementById('send').textContent") == "Stop"
            if way == "Escape":
                tab.press("Escape")
            else:
                tab.value("document.getElementById('send').click()")
            until(lambda: engine.endings["cancelled"] == 1)
            assert engine.running == 0
            tab.until(f"{IDLE} && document.querySelector('.error').textContent === 'stopped'")
            kept = tab.value(SAID)[1]
            assert kept and "first token after" in tab.value(ABOUT)[-1]
            tab.value("document.getElementById('new-chat').click()")
            assert tab.value(f"{SAID}.length") == 0
            assert tab.value("document.activeElement.id") == "text", "the keyboard can go on"
    finally:
        hook.remove()


@with_chromium
def test_a_new_chat_leaves_nothing_of_the_answer_that_was_coming(tab: Tab, loaded: LoadedModel) -> None:
    hook = loaded.model.register_forward_pre_hook(lambda *args: time.sleep(0.02))
    try:
        with serving(loaded, Limits(max_tokens=400)) as server:
            tab.open(f"{server.address}/")
            say(tab, "speak on")
            tab.until(f"{SAID}.length === 2 && {SAID}[1].length > 5")
            tab.value("document.getElementById('new-chat').click()")
            until(lambda: server.service.engine.endings["cancelled"] == 1)
            tab.type("in short")
            hook.remove()
            tab.press("Enter")
            tab.until(f"{IDLE} && {ABOUT}.some(line => line.includes('tokens made'))")
            assert tab.value(f"{SAID}[0]") == "in short" and tab.value(f"{SAID}.length") == 2
            assert tab.value("document.querySelectorAll('.error').length") == 0
            read = int(tab.value(ABOUT)[0].split()[0])
            assert read == len("in short") + 3, "the new chat has no old messages"
    finally:
        hook.remove()


@with_chromium
def test_the_page_asks_for_a_key_and_shows_errors(tab: Tab, loaded: LoadedModel) -> None:
    with serving(loaded, Limits(max_tokens=5, max_body=300), key="secret") as server:
        tab.open(f"{server.address}/")
        tab.until("document.getElementById('status').textContent === 'this server wants its key'")
        assert not tab.value("document.getElementById('key-row').hidden")
        say(tab, "hello")
        tab.until("document.querySelector('.error')?.textContent.includes('Authorization: Bearer')")
        assert tab.value("document.getElementById('text').value") == "hello", "the question is given back"
        tab.value("document.getElementById('key').focus()")
        tab.type("secret")
        tab.press("Tab")
        tab.until("document.getElementById('model').textContent === 'tiny'")
        tab.value("document.getElementById('text').focus()")
        tab.press("Enter")
        tab.until(f"{IDLE} && {ABOUT}.some(line => line.includes('5 tokens made'))")
        say(tab, "x" * 400)
        tab.until("[...document.querySelectorAll('.error')].some(box => box.textContent.includes('limit of 300 bytes'))")
        assert tab.value(f"{SAID}.length") == 2, "the conversation stands as it was"


ANSWER = "<think>\nRome? <b>hm</b></think>Look:\n\n```py\nprint('<img src=x onerror=document.title=1>')\n```\n- *one*\n" + CALL


def press(tab: Tab, label: str, place: int = 0) -> None:
    tab.value(f"[...document.querySelectorAll('.acts button')].filter(one => one.textContent === '{label}').at({place}).click()")


@with_chromium
def test_reasoning_calls_and_code_are_shown_safely_and_kept(tab: Tab, loaded: LoadedModel) -> None:
    tab.look(width=900, height=700)
    tab.errors.clear()
    with scripted(loaded, ANSWER) as server:
        tab.open(f"{server.address}/")
        tab.until("document.getElementById('model').textContent === 'scripted'")
        say(tab, "weather?")
        tab.until(f"{IDLE} && {ABOUT}.some(line => line.includes('tokens made'))")

        def check() -> None:
            folded = "[...document.querySelectorAll('.said details')].map(one => [one.open, one.innerText, one.lastChild.textContent])"
            (thought, call) = tab.value(folded)
            assert thought == [False, "Reasoning", "Rome? <b>hm</b>"]
            assert call[:2] == [False, "Call of weather"] and json.loads(call[2]) == {"city": "Rome"}
            assert tab.value("document.querySelector('.said pre code').textContent") == "print('<img src=x onerror=document.title=1>')"
            assert tab.value("document.querySelector('.said ul li em').textContent") == "one"
            assert tab.value("document.querySelectorAll('.said img, .said b, .said script').length") == 0
            assert tab.value("document.title") == "moegraft"

        check()
        tab.open(f"{server.address}/health")
        tab.open(f"{server.address}/")
        tab.until(f"{SAID}.length === 2")
        check()
        assert tab.errors == []


@with_chromium
def test_answers_are_copied_regenerated_and_questions_edited(tab: Tab, server: Server) -> None:
    tab.open(f"{server.address}/")
    tab.until("document.getElementById('model').textContent === 'tiny'")
    tab.value("document.getElementById('new-chat').click()")
    say(tab, "first question")
    tab.until(f"{IDLE} && {SAID}.length === 2 && {SAID}[1].length === 60")
    first = tab.value(SAID)
    tab.value("navigator.clipboard.writeText = async text => { window.copied = text; }")
    press(tab, "Copy")
    assert tab.until("window.copied") == first[1]
    say(tab, "second question")
    tab.until(f"{IDLE} && {SAID}.length === 4 && {SAID}[3].length === 60")
    second = tab.value(SAID)
    press(tab, "Regenerate", -1)
    tab.until(f"{IDLE} && {SAID}.length === 4 && {SAID}[3].length === 60 && {ABOUT}.length === 1")
    assert tab.value(SAID) == second, "the model is greedy"
    press(tab, "Edit", 0)
    assert tab.value("document.getElementById('text').value") == "first question"
    tab.value("document.getElementById('text').value = ''")
    say(tab, "another")
    tab.until(f"{IDLE} && {SAID}.length === 2 && {SAID}[1].length === 60")
    assert tab.value(SAID)[0] == "another" and tab.value(SAID)[1] != first[1]


@with_chromium
def test_chats_are_kept_in_the_browser_until_they_are_deleted(tab: Tab, loaded: LoadedModel) -> None:
    with serving(loaded, Limits(max_tokens=5)) as server:
        tab.open(f"{server.address}/")
        for question in ("one", "two"):
            tab.value("document.getElementById('new-chat').click()")
            say(tab, question)
            tab.until(f"{IDLE} && {SAID}.length === 2 && {SAID}[1].length === 5")
        listed = "[...document.getElementById('chats').options].map(one => one.textContent)"
        assert tab.value(listed) == ["two", "one"]
        pick = "const list = document.getElementById('chats'); list.selectedIndex = 1; list.dispatchEvent(new Event('change'))"
        tab.value(f"(() => {{ {pick} }})()")
        assert tab.value(SAID)[0] == "one"
        tab.value("document.getElementById('drop').click()")
        assert tab.value(SAID) == []
        tab.open(f"{server.address}/health")
        tab.open(f"{server.address}/")
        tab.until(f"{SAID}.length === 2")
        assert tab.value(SAID)[0] == "two" and tab.value("document.getElementById('chats').hidden"), "one chat needs no list"
