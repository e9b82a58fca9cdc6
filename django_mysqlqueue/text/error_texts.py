"""Texts of errors, compared without what differs from one message to the next."""

from __future__ import annotations

import re

_MASKED = (
    r"(?P<address>[\w.+-]+@[\w-]+(?:\.[\w-]+)+|\b[a-z][a-z0-9+.-]*://[^\s'\"<>)]+|\b0x[0-9a-f]+\b"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b)"
    r"|(?P<id>\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b|\b(?=[0-9a-f]*\d)[0-9a-f]{12,}\b)"
    r"|(?P<number>(?<![a-z_])\d+(?:[.,:_-]\d+)*|\d{3,})"
)
"""Compiled with the first error, and kept by ``re``: most processes meet none while they start."""


def masked(line: str) -> str:
    """Return a line with placeholders for addresses (of mail, networks, memory), ids and numbers.

    ``KeyError: 'order-4711'`` becomes ``KeyError: 'order-<number>'``.
    """
    return re.sub(_MASKED, lambda found: f"<{found.lastgroup}>", line, flags=re.IGNORECASE)


BY_OPERATOR = "Dead-lettered by "
"""The beginning of the error of a message that an operator has dead-lettered. The error of its last attempt follows."""
EXPIRED = "The message expired at "
"""The beginning of the error of a message that has expired before an attempt had started."""
STARTS = max(len(BY_OPERATOR), len(EXPIRED))
"""Number of characters that ``is_attempt`` needs."""


def is_attempt(start: str) -> bool:
    """Return whether an attempt has failed with an error, of which the first characters are given."""
    return not start.startswith((BY_OPERATOR, EXPIRED))


_CLASS = re.compile(r"[^\W\d][\w.]*(?=:|$)")


def error_class(line: str) -> str:
    """Return the class with which the last line of a traceback begins; empty if it begins with something else.

    ``shop.errors.Refused: no customer 7`` has the class ``shop.errors.Refused``.
    """
    found = _CLASS.match(line)
    return found[0] if found else ""


NAMED = 40
"""Maximum length of the name of an error in a headline, in characters."""
_STATUS = re.compile(r"\bHTTP(?: Error|\w*Error:(?: \w+ error ')?)? ?([45]\d\d)\b")


def error_name(line: str) -> str:
    """Return the name of an error for a headline: ``Refused`` of ``shop.errors.Refused: no customer 7``.

    Of the status of an HTTP response, it is ``HTTP 429``. It is empty if the line does not begin with a class.
    """
    if status := _STATUS.search(line):
        return f"HTTP {status[1]}"
    name = error_class(line).rpartition(".")[2]
    # A class, not the only word of a reason.
    return name[:NAMED] if name[:1].isupper() else ""
