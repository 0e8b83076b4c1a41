"""Typed lines: commands, continued lines and fenced blocks."""

from __future__ import annotations

import pytest

from moegraft.injection.cli.chat.session import Typed, read_typed


@pytest.mark.parametrize(
    ("lines", "typed"),
    [
        (["hello"], Typed("hello")),
        (["/stats"], Typed("/stats", command=True)),
        (["//usr is a folder"], Typed("/usr is a folder")),
        (["one\\", "two\\", "three"], Typed("one\ntwo\nthree")),
        (['"""', "one", "", "two", '"""'], Typed("one\n\ntwo")),
        (['"""one', 'two"""'], Typed("one\ntwo")),
        (['"""one line"""'], Typed("one line")),
        (['"""', "/exit", '"""'], Typed("/exit")),  # a block is text, whatever it looks like
        (["/pasted\ntext"], Typed("/pasted\ntext")),  # terminals can paste several lines at once
        ([""], Typed("")),
    ],
)
def test_lines_become_one_text(lines: list[str], typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter(lines)
    monkeypatch.setattr("builtins.input", lambda mark="": next(left))
    assert read_typed() == typed
    assert next(left, None) is None, "every line was read"


def test_what_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda mark="": "a\udcffb")
    with pytest.raises(UnicodeError):
        read_typed()
