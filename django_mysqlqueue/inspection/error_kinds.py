"""Dead letters grouped by their errors, in which numbers, ids and addresses are masked."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from django_mysqlqueue.error_texts import masked
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.dead_letters import LINE, LOG, DeadLetterMatches, is_cut
from django_mysqlqueue.service.messages import last_line
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session

Shown = Callable[[str, str, bool], str]
"""Returns what users may see of the last line of an error, its topic, and whether only its end was read."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Dead letters of one group whose errors end in the same line, apart from numbers, ids and addresses."""

    ref: GroupRef
    """The group and its topic."""
    text: str
    """The last line of the error, masked."""
    count: int
    newest: int
    """The offset of the newest one in the DLQ topic."""
    times: tuple[int, ...]
    """When they failed, in epoch milliseconds, in ascending order."""


class _End(NamedTuple):
    offset: int
    ref: GroupRef
    text: str
    failed_at: int


def kinds(session: Session, found: DeadLetterMatches, *, shown: Shown, bounds: Bounds = PAGES) -> list[ErrorKind]:
    """Group matches by their errors, the most frequent first.

    Args:
        session: session on the queue's database.
        found: the matches.
        shown: what users may see of an error. Texts are masked after it.
        bounds: only the newest ``bounds.errors`` matches are read.
    """
    of: defaultdict[tuple[GroupRef, str], list[_End]] = defaultdict(list)
    for one in _ends(session, found, shown, bounds):
        of[one.ref, one.text].append(one)
    found_kinds = []
    for (ref, text), ends in of.items():
        times = tuple(sorted(one.failed_at for one in ends))
        found_kinds.append(ErrorKind(ref, text, len(ends), max(one.offset for one in ends), times))
    return sorted(found_kinds, key=lambda kind: (-kind.count, -kind.newest))


def of_kind(
    session: Session, found: DeadLetterMatches, text: str, *, shown: Shown, bounds: Bounds = PAGES
) -> DeadLetterMatches:
    """Return the matches whose masked error is a text, among the newest ``bounds.errors``.

    Args:
        session: session on the queue's database.
        found: the matches.
        text: the masked text.
        shown: as for ``kinds``.
        bounds: limits of what is read.
    """
    chosen = [one for one in _ends(session, found, shown, bounds) if one.text == text]
    return dataclasses.replace(
        found,
        offsets=tuple(sorted((one.offset for one in chosen), reverse=True)),
        refs=dict(Counter(one.ref for one in chosen).most_common()),
        all_errors=found.all_errors and len(found.offsets) <= bounds.errors,
    )


def _ends(session: Session, found: DeadLetterMatches, shown: Shown, bounds: Bounds) -> Iterator[_End]:
    # Many errors have the same last line.
    texts: dict[tuple[str, str, bool], str] = {}
    for chunk in session.chunks(found.offsets[: bounds.errors]):
        for offset, group, topic, failed_at, end in session.rows(
            f"SELECT m.`offset`, m.failed_group, m.original_topic, m.failed_at, "
            f"{session.dialect.ending('m.last_error', LINE)} FROM {session.dialect.rows(('o',), len(chunk))} "
            f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
            sorted(chunk),
        ):
            key = (last_line(end), topic, is_cut(end))
            if key not in texts:
                texts[key] = masked(shown(*key))
            yield _End(int(offset), GroupRef(group, topic), texts[key], int(failed_at))
