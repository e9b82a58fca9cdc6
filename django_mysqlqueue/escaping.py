"""Escape characters that change what people see. This module does not import Django, because Spark's side has none."""

from __future__ import annotations

import unicodedata

HIDDEN = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
"""Unicode categories of characters that are invisible or change the appearance of others: control characters, which a
terminal obeys, and those that change the direction of a text among them."""


def visible(text: str) -> str:
    r"""Return a text on one line, with invisible characters as escape sequences: ``\u202e`` for U+202E.

    Those above U+FFFF have eight digits, as in Python: ``\U000e0001``.
    """
    if text.isprintable():
        return text
    return "".join(_escape(ord(one)) if unicodedata.category(one) in HIDDEN else one for one in text)


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def visible_lines(text: str) -> str:
    """Return a text of several lines, which may be indented by tabs, with other invisible characters escaped."""
    return "\n".join("\t".join(map(visible, line.split("\t"))) for line in text.split("\n"))
