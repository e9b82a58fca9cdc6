"""The database users that may use a consumer group: patterns that are compared with what the server knows as USER().

It is a guard against mistakes, such as a staging process on the database of production. It does not stop a user who may
write the queue's tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MOST = 50
"""Maximum number of patterns."""
LONGEST = 350
"""Maximum length of a pattern: longer than any account."""


def parse_allowed_users(value: object) -> tuple[str, ...]:
    """Return patterns, sorted and without duplicates.

    ``value``: a list of patterns, such as ``billing@%``. ``%`` stands for any text.

    Raises:
        ValueError: the value breaks a rule; the text names the rule.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError("must be a list of accounts such as 'billing@%'")
    given = list(value)
    for one in given:
        if not isinstance(one, str) or not re.fullmatch(r"[^@\s,]+@[^@\s,]+", one) or len(one) > LONGEST:
            raise ValueError(f"has {one!r}, which must be USER@HOST without spaces and commas; % stands for any text")
    if not 1 <= len(given) <= MOST:
        raise ValueError(f"must have 1 to {MOST} accounts; None: all users")
    return tuple(sorted(set(given)))


def is_allowed(patterns: Iterable[str], user: str) -> bool:
    """Return whether a user matches one of the patterns, byte by byte.

    ``user``: ``user@host``, as the server returns it.
    """
    return any(re.fullmatch(".*".join(map(re.escape, one.split("%"))), user, re.DOTALL) for one in patterns)
