"""The page of all results contains every file with its figures, and loads nothing from elsewhere."""

from __future__ import annotations

import base64
import csv
import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support import ROOT
from support.browser import browsing, find_chromium

FOLDER = ROOT / "benchmarks"
sys.path.insert(0, str(FOLDER))  # programs there import each other by bare names
from _report import FIRST_ROWS, FOLD_FROM, PROVENANCE, find_benchmarks, gather, is_number, page, read_result  # noqa: E402

VOID = {"meta", "img", "link", "br", "hr", "input"}
PNG = b"\x89PNG\r\n\x1a\n not a picture, but bytes"


class Parsed(HTMLParser):
    """The contents of a page as a browser parses them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.tables: dict[str, list[list[str]]] = {}  # by result: the head, then all rows, whether folded or not
        self.once: dict[str, dict[str, str]] = {}  # by result: constant columns, which are shown once above its table
        self.folded: set[str] = set()
        self.text = ""
        self._table = ""
        self._row: list[str] = []
        self._once: tuple[str, str] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._table = found.get("data-csv", "")
            if self._table and "details" in self.open:
                self.folded.add(self._table)
        elif tag == "tr":
            self._row = []
        elif tag in ("td", "th"):
            self._row.append("")
        elif tag == "dd" and "data-of" in found:
            self._once = (found["data-of"], found["data-column"])
            self.once.setdefault(found["data-of"], {})[found["data-column"]] = ""

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"
        if tag == "tr" and self._table:
            rows = self.tables.setdefault(self._table, [])
            if not (rows and self._row == rows[0]):  # a folded part repeats the head
                rows.append(self._row)
        elif tag == "dd":
            self._once = None

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._row and self.open and self.open[-1] in ("td", "th"):
            self._row[-1] += data
        if self._once:
            result, column = self._once
            self.once[result][column] += data


@pytest.fixture(scope="module")
def built() -> str:
    return page(gather(FOLDER))


@pytest.fixture(scope="module")
def parsed(built: str) -> Parsed:
    return Parsed(built)


def rows_of(path: Path) -> tuple[list[str], list[list[str]]]:
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return head, rows


def results() -> Iterator[Path]:
    yield from sorted((FOLDER / "results").glob("*.csv"))


def test_every_result_is_complete_with_the_files_figures(parsed: Parsed) -> None:
    assert set(parsed.tables) == {path.stem for path in results()} and len(parsed.tables) > 10
    for path in results():
        head, rows = rows_of(path)
        shown_head, *shown = parsed.tables[path.stem]
        once = parsed.once.get(path.stem, {})
        assert set(once) <= set(PROVENANCE) and set(shown_head) | set(once) == set(head) and len(shown) == len(rows), path.name
        for row, found in zip(rows, shown, strict=True):
            assert {**dict(zip(shown_head, found, strict=True)), **once} == dict(zip(head, row, strict=True)), path.name
        assert (path.stem in parsed.folded) == (len(rows) > FOLD_FROM)


def test_every_plot_is_included_unchanged(parsed: Parsed) -> None:
    pictures = [attrs["src"].removeprefix("data:image/png;base64,") for tag, attrs in parsed.tags if tag == "img"]
    assert all(attrs["alt"] for tag, attrs in parsed.tags if tag == "img")
    wanted = [path.read_bytes() for path in (FOLDER / "results").glob("*.png")]
    assert sorted(base64.b64decode(picture, validate=True) for picture in pictures) == sorted(wanted) and wanted


def assert_needs_nothing(built: str) -> None:
    found = Parsed(built)
    assert not found.open, "every element is closed"
    assert not {tag for tag, _ in found.tags} & {"script", "link", "iframe", "object", "embed", "base", "form", "audio", "video"}
    for tag, attrs in found.tags:
        assert not any(name.startswith("on") for name in attrs), attrs
        assert not {"srcset", "style", "background", "action"} & attrs.keys()
        assert tag == "img" or "src" not in attrs
        assert attrs.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
        assert attrs.get("href", "#").startswith("#"), attrs
    style = re.search(r"<style>(.*?)</style>", built, re.DOTALL)
    assert style and not re.search(r"url\(|@import|//", style[1])
    policy = next(attrs["content"] for tag, attrs in found.tags if tag == "meta" and attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:;")


def test_nothing_is_loaded_and_links_have_targets(built: str, parsed: Parsed) -> None:
    assert_needs_nothing(built)
    ids = [attrs["id"] for _, attrs in parsed.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = {attrs["href"].removeprefix("#") for tag, attrs in parsed.tags if tag == "a"}
    assert targets <= set(ids)
    assert {f"{path.stem}.csv" for path in results()} <= targets, "every result is in the contents"


@pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium here (Debian's package chromium brings one)")
def test_a_browser_shows_the_page_offline(built: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(built, encoding="utf-8")
    with browsing(find_chromium() or "") as tab:
        tab.look(width=390, height=800, mobile=True)
        tab.open(path.as_uri())
        assert tab.errors == [] and [url for url in tab.requested if not url.startswith("data:")] == [path.as_uri()]
        assert tab.value("[...document.images].every(image => image.complete && image.naturalWidth > 100)")
        assert tab.value("document.documentElement.scrollWidth <= innerWidth"), "only tables are wider than a small screen"
        light = tab.value("getComputedStyle(document.body).backgroundColor")
        tab.look(dark=True)
        assert light != tab.value("getComputedStyle(document.body).backgroundColor")


def test_each_result_shows_its_provenance(parsed: Parsed) -> None:
    for path in results():
        head, rows = rows_of(path)
        known = [name for name in PROVENANCE if name in head]
        assert len(known) == len(PROVENANCE) or "not recorded" in parsed.text
        for name in known:
            for value in {row[head.index(name)] for row in rows}:
                assert value in parsed.text, (path.name, name)


def test_each_result_is_listed_under_its_benchmark() -> None:
    results = {result.name: (benchmark, result) for benchmark in gather(FOLDER) for result in benchmark.results}
    found = {name: benchmark.name for name, (benchmark, _) in results.items()}
    assert found["serve"] == "serve" and found["routing"] == "traces" and found["speculative_acceptance"] == "speculative"
    assert found["speculative_modelled"] == "speculative_modelled" and found["sparse_groups"] == "sparse_quality"
    assert "others" not in found.values(), "each committed result has its benchmark here"
    modelled = {name for name, (_, result) in results.items() if result.modelled}
    assert modelled >= {"hybrid_modelled", "speculative_modelled"} and "cpu_experts" not in modelled


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., Path]:
    """A benchmarks folder with one benchmark and the given results."""

    def make(**files: str | bytes) -> Path:
        (tmp_path / "results").mkdir()
        text = '"""Is it <fast>?\n\nTimes & "places".\n"""\nwrite_rows("made", rows)\nif __name__ == "__main__":\n    pass\n'
        (tmp_path / "asking.py").write_text(text)
        for name, content in files.items():
            path = tmp_path / "results" / name.replace("_dot_", ".")
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path

    return make


def test_text_is_escaped(checkout: Callable[..., Path]) -> None:
    nasty = '"<script>alert(1)</script>","</td></table><img src=http://x/ onerror=y>",a&amp;b\n'
    folder = checkout(made_dot_csv=f"one,<b>,commit\n{nasty}", made_dot_png=PNG, left_dot_csv="a\n1\n")
    built = page(gather(folder))
    assert_needs_nothing(built)
    parsed = Parsed(built)
    assert parsed.tables["made"] == [["one", "<b>"], ["<script>alert(1)</script>", "</td></table><img src=http://x/ onerror=y>"]]
    assert parsed.once["made"] == {"commit": "a&amp;b"}
    assert "Is it <fast>?" in parsed.text and 'Times & "places".' in parsed.text and "not recorded" in parsed.text
    assert parsed.tables["left"] == [["a"], ["1"]] and "no benchmark here names" in parsed.text


def test_long_tables_are_folded_and_all_commits_are_shown(checkout: Callable[..., Path]) -> None:
    lines = [f"{number},{'new' if number > 5 else 'old'}" for number in range(FOLD_FROM + 1)]
    parsed = Parsed(page(gather(checkout(made_dot_csv="\n".join(["x,commit", *lines])))))
    assert parsed.tables["made"] == [["x", "commit"], *(line.split(",") for line in lines)]
    assert "made" in parsed.folded and f"The other {FOLD_FROM + 1 - FIRST_ROWS} of {FOLD_FROM + 1} rows" in parsed.text
    assert f"old (6 rows); new ({FOLD_FROM - 5} rows)" in parsed.text


@pytest.mark.parametrize(
    ("content", "message"),
    [("a,b\n1\n", ":2: 1 cells under 2 columns"), ("a,a\n1,2\n", "'a' occurs twice"), ("", "not a table"), (b"\xff\xfe", "not a table")],
)
def test_a_file_that_is_not_a_table_is_named(checkout: Callable[..., Path], content: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_result(checkout(made_dot_csv=content) / "results" / "made.csv")


def test_cells_that_are_aligned_as_numbers() -> None:
    assert all(map(is_number, ["", "2.5", "1e-05", "64/64", "12%", "-3", "nan"]))
    assert not any(map(is_number, ["int4", "1 layer", "2.13.0+cpu", "a/b"]))


def test_every_benchmark_begins_with_its_question() -> None:
    found = find_benchmarks(FOLDER)
    assert len(found) > 15 and all(one.question for one in found.values())
    assert {"serve", "cpu_experts"} <= found.keys() and not {"record", "masked_experts"} & found.keys()
