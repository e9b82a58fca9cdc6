"""Texts of errors, compared without what differs from one message to the next."""

from __future__ import annotations

import re

LONGEST = 1000
"""Maximum number of characters that are compared."""

_MASKS = (
    (re.compile(r"\b\w+://[^\s'\"<>]+"), "<url>"),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "<email>"),
    (re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"), "<id>"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "<address>"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b"), "<ip>"),
    (re.compile(r"(?<![0-9a-fA-F:])(?:[0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{0,4}(?![0-9a-fA-F:])"), "<ip>"),
    (re.compile(r"\b(?=\w*\d)(?=\w*[a-fA-F])[0-9a-fA-F]{8,}\b"), "<id>"),
    (re.compile(r"\d+(?:[.,]\d+)*"), "<n>"),
)


def masked(text: str) -> str:
    """Return the text of an error with URLs, addresses, ids and numbers replaced.

    ``KeyError: 'order-4711'`` becomes ``KeyError: 'order-<n>'``.
    """
    text = text[:LONGEST]
    for pattern, name in _MASKS:
        text = pattern.sub(name, text)
    return text
