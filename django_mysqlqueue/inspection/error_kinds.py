"""Errors grouped by kind: their last line, in which numbers, ids and addresses are masked.

The errors are those of messages that wait for another attempt, of dead letters, and of recorded deliveries. Each is
read up to a bound, which the groups share: a group leaves the rest of its share to the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Literal, NamedTuple, TypeVar

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.db import log_queries
from django_mysqlqueue.db.tables import EVENTS
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.dead_letters import LINE, DeadLetterMatches, dlq_topics, is_cut, look
from django_mysqlqueue.inspection.tasks import ErrorLine, FailedJob, failed_ones, last_errors
from django_mysqlqueue.models import DeliveryEvent
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.topics import dlq_topic, first_topic
from django_mysqlqueue.service import job_results, losses
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.dead_letters import DeadLetterFilter
from django_mysqlqueue.service.groups import registered_refs
from django_mysqlqueue.service.log import at_offsets, publisher_keys
from django_mysqlqueue.service.messages import last_line
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, grouped
from django_mysqlqueue.text.error_texts import BY_OPERATOR, STARTS, error_class, is_attempt, masked

HOURS = 24
"""Number of hours up to now for which failed attempts are counted."""
HOUR_MS = 3_600_000
KEYS = 10
"""Number of keys in a breakdown of a kind of error."""
FAILED = (DeliveryEvent.Outcome.FAILED.value, DeliveryEvent.Outcome.DEAD_LETTERED.value)
"""The outcomes of failed attempts, and of messages that an operator has dead-lettered or that have expired."""
NO_TEXT = "<no text>"
"""The masked text of an error without a text: of ``nack()`` and ``reject()`` without a reason."""
LOST_TEXT = "<subscriber lost>"
"""The text of a message that waits because its subscriber was lost, if no attempt at it has had an error."""

State = Literal["retrying", "dead_letters", "settled"]

Shown = Callable[[str, str, bool], str]
"""Returns what users may see of the last line of an error, its topic, and whether only its end was read."""


def whole_line(line: str, topic: str, cut: bool) -> str:  # noqa: FBT001
    """Return the last line of an error as it is stored, or as much of it as was read."""
    return line


@dataclass(frozen=True, slots=True)
class KeyShare:
    """How many of the failures of a kind, as far as they were read, are of messages with one key."""

    key: str | None
    """The key with which they were published, which of jobs is the dotted path of their task; None: without a key. A
    hashed key is known as long as the message or its dead letter is in the log."""
    retrying: int
    """Messages that wait for another attempt, out of ``ErrorKind.retrying``."""
    dead_letters: int
    """Dead letters, out of ``ErrorKind.dead_letters``."""
    attempts: int
    """Failed attempts of the last 24 hours, out of ``ErrorKind.attempts``."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Failures of one group whose errors end in the same line, apart from numbers, ids and addresses.

    Times are in epoch milliseconds.
    """

    ref: GroupRef
    """The group and its topic."""
    text: str
    """The last line of the error, masked; ``<no text>`` if it has none; ``<subscriber lost>`` if no attempt has had an
    error, but a process has died."""
    retrying: Count
    """Messages with this error that wait for another attempt."""
    dead_letters: Count
    """Dead letters with this error."""
    attempts: Count
    """Failed attempts of the last 24 hours."""
    by_hour: tuple[int, ...]
    """These attempts by hour, oldest first."""
    first_at: int
    """When the first of the known attempts failed."""
    last_at: int
    """When the last one failed."""
    offset: int
    """The newest message that waits for another attempt; if none does, the newest that has failed. Of a job that waits
    for more than a minute, it is the message with which it was enqueued."""
    dead_letter: int | None
    """The offset of the newest dead letter in the DLQ topic."""
    tasks: tuple[str, ...] = ()
    """The dotted paths of the tasks of whose jobs the messages are, those with most messages first."""
    keys: tuple[KeyShare, ...] = ()
    """With ``by_key``, the ten keys with most failures: those of most messages first, then those of most attempts."""
    more_keys: int = 0
    """With ``by_key``, the number of further keys."""

    @property
    def error_class(self) -> str:
        """The class of the error: the text before the colon; empty if the line does not begin with a name."""
        return error_class(self.text)

    @property
    def is_exact(self) -> bool:
        """True if all three counts are exact."""
        return self.retrying.exact and self.dead_letters.exact and self.attempts.exact

    @property
    def states(self) -> tuple[State, ...]:
        """The states of the messages: ``"retrying"``, ``"dead_letters"``, or both.

        ``"settled"``: neither. All messages with this error that were read have been settled, or are in flight again.
        """
        found: list[State] = []
        if self.retrying:
            found.append("retrying")
        if self.dead_letters:
            found.append("dead_letters")
        return tuple(found) or ("settled",)


@dataclass(frozen=True, slots=True)
class ErrorListing:
    """The kinds of errors of some groups."""

    kinds: tuple[ErrorKind, ...]
    """Those with the most retrying messages and dead letters first."""
    whole: bool
    """True if no bound was reached."""
    unrecorded: tuple[GroupRef, ...]
    """Groups whose failed attempts are not recorded. Only the last attempt of each message is known."""
    more_groups: int
    """Number of further groups, which were not read because there are more than ``Bounds.groups``."""
    now: int
    """The database's time in epoch milliseconds."""


@checked()
def list_errors(
    *,
    topic: str | None = None,
    group: str | None = None,
    key: str | None = None,
    by_key: bool = False,
    using: str | None = None,
    bounds: Bounds = PAGES,
) -> ErrorListing:
    """List the errors of handlers by group and kind: of messages in retry, of dead letters, and of past attempts.

    A kind is the last line of an error without numbers, ids and addresses. Past attempts are those of the last 24
    hours, if they are recorded (``RECORD_DELIVERIES``).

    Args:
        topic: only groups on this topic and on its DLQ topic.
        group: only this consumer group.
        key: only failures of messages that were published with this key, among those that are read.
        by_key: also return the keys with most failures of each kind.
        using: alias of the database (default: that of the topic, else of the queue).
        bounds: about ``errors`` retrying messages, recorded deliveries and dead letters each are read, of all groups
            together.
    """
    session = Session(queue_alias(using, topic=topic))
    return find_errors(session, topic=topic, group=group, key=key, by_key=by_key, bounds=bounds)


def find_errors(
    session: Session,
    *,
    topic: str | None = None,
    group: str | None = None,
    topics: frozenset[str] | None = None,
    key: str | None = None,
    by_key: bool = False,
    shown: Shown = whole_line,
    bounds: Bounds = PAGES,
) -> ErrorListing:
    """List errors as ``list_errors`` does, only those of some topics and their DLQ topics, as users may see them."""
    if topic is not None:
        only = frozenset({first_topic(topic)})
        topics = only if topics is None else only & topics
    refs = [
        ref
        for ref in registered_refs(session.using)
        if group in (None, ref.group) and (topics is None or first_topic(ref.topic) in topics)
    ]
    read = refs[: bounds.groups]
    now = session.now()
    found = _Reading(session, shown, bounds, now)
    found.add_past(read)
    found.add_retrying(read)
    found.add_moved(read)
    found.add_dead_letters(topics, group, key)
    settings = get_settings()
    unrecorded = tuple(ref for ref in read if settings.recorded_of(ref.group) == "none")
    are_kept = settings.history_retention >= HOURS * 3600
    recorded = {*read} - {*unrecorded} if are_kept else set()
    kinds = found.kinds(recorded, key=key, by_key=by_key)
    return ErrorListing(
        tuple(sorted((one for one in kinds if one.retrying or one.dead_letters or one.attempts), key=_order)),
        found.whole and len(read) == len(refs),
        unrecorded,
        len(refs) - len(read),
        now,
    )


def _order(kind: ErrorKind) -> tuple[int, int, int, GroupRef, str]:
    return -(kind.retrying.value + kind.dead_letters.value), -kind.attempts.value, -kind.last_at, kind.ref, kind.text


class _Failure(NamedTuple):
    """A failure of which the time is known."""

    at: int
    offset: int
    """That of the message, or of a dead letter in its DLQ topic."""
    message: int


@dataclass(slots=True)
class _Tally:
    """What was read of a kind."""

    retrying: list[int] = field(default_factory=list)
    dead: list[_Failure] = field(default_factory=list)
    failed: list[_Failure] = field(default_factory=list)
    moved: list[_Failure] = field(default_factory=list)
    """Attempts whose jobs wait in the outbox. Those that are recorded are in ``failed``, too."""

    @property
    def offsets(self) -> set[int]:
        """The messages that have failed, and the dead letters."""
        return {*self.retrying, *(one.offset for one in (*self.dead, *self.failed, *self.moved))}

    @property
    def newest(self) -> int:
        """The newest message that has failed."""
        return max((one.message for one in (*self.dead, *self.failed, *self.moved)), default=0)

    def of(self, offsets: Container[int]) -> _Tally:
        """Return what was read of some messages and dead letters."""
        failures = ([one for one in those if one.offset in offsets] for those in (self.dead, self.failed, self.moved))
        return _Tally([offset for offset in self.retrying if offset in offsets], *failures)

    def add_attempt(self, at: int, offset: int) -> None:
        self.failed.append(_Failure(at, offset, offset))


class _Texts:
    """Masks errors. Many have the same last line."""

    def __init__(self, shown: Shown) -> None:
        self._masked = cache(lambda *line: masked(shown(*line)) or NO_TEXT)

    def of(self, ref: GroupRef, end: str) -> str:
        """Return the masked last line of an error whose last characters were read."""
        line = last_line(end)
        if line.startswith(BY_OPERATOR):  # No attempt had an error before.
            line = ""
        return self.of_line(ref, line, is_cut=is_cut(end))

    def of_line(self, ref: GroupRef, line: str, *, is_cut: bool) -> str:
        """Return the masked last line of an error."""
        return self._masked(line, first_topic(ref.topic), is_cut)


class _Reading:
    """What was read, by group and masked text. An attempt counts once, even if it is read twice."""

    def __init__(self, session: Session, shown: Shown, bounds: Bounds, now: int) -> None:
        self._session = session
        self._bounds = bounds
        self._now = now
        self._texts = _Texts(shown)
        self._known: set[tuple[GroupRef, int, int, str]] = set()
        """The group, message, number and masked text of recorded attempts. After a seek, a number comes twice."""
        self._known_dead: set[str] = set()
        """The ids of dead letters whose last attempt is recorded. That of a redriven message has the original's offset,
        so that the offset does not lead to the record."""
        self._tallies: defaultdict[tuple[GroupRef, str], _Tally] = defaultdict(_Tally)
        self._past: dict[GroupRef, bool] = {}
        """Whether all attempts of the last ``HOURS`` hours were read; the next two: all retrying messages, and all dead
        letters of the DLQ topic."""
        self._retrying: dict[GroupRef, bool] = {}
        self._dead: dict[str, bool] = {}
        self._partitions: dict[int, str] = {}
        """The partition keys of messages and of dead letters, by offset."""

    @property
    def whole(self) -> bool:
        return all((*self._past.values(), *self._retrying.values(), *self._dead.values()))

    def kinds(self, recorded: Collection[GroupRef], *, key: str | None, by_key: bool) -> list[ErrorKind]:
        """Return the kinds; ``recorded``: the groups whose attempts of the last hours are all recorded and kept."""
        tallies = dict(self._tallies)
        keys = self._keys() if by_key or key is not None else {}
        if key is not None:
            chosen = {offset for offset, one in keys.items() if one == key}
            tallies = {kind: tally.of(chosen) for kind, tally in tallies.items()}
        return [
            self._kind(ref, text, tally, keys, attempts_whole=ref in recorded and self._past.get(ref, False))
            for (ref, text), tally in tallies.items()
        ]

    def _keys(self) -> dict[int, str | None]:
        """Return the keys of what was read, by offset. If a message is gone, its dead letter may have its key."""
        keys = publisher_keys(self._session, self._partitions)
        for one in (one for tally in self._tallies.values() for one in tally.dead):
            keys[one.message] = keys[one.message] or keys[one.offset]
        return keys

    def _kind(
        self, ref: GroupRef, text: str, tally: _Tally, keys: Mapping[int, str | None], *, attempts_whole: bool
    ) -> ErrorKind:
        hours = [0] * HOURS
        lately = [one for one in tally.failed if self._now - one.at < HOURS * HOUR_MS]
        for one in lately:
            hours[HOURS - 1 - max(0, self._now - one.at) // HOUR_MS] += 1
        times = [one.at for one in tally.failed or tally.moved or tally.dead]
        tasks = sorted(filter(None, (job_results.task_of(ref, self._partitions[offset]) for offset in tally.offsets)))
        dead = [one.offset for one in tally.dead]
        shares = _shares(keys, tally.retrying, dead, [one.offset for one in lately]) if keys else []
        return ErrorKind(
            ref,
            text,
            retrying=Count(len(tally.retrying), self._retrying.get(ref, True)),
            dead_letters=Count(len(tally.dead), self._dead.get(dlq_topic(ref.topic), True)),
            attempts=Count(sum(hours), attempts_whole),
            by_hour=tuple(hours),
            first_at=min(times, default=0),
            last_at=max(times, default=0),
            offset=max(tally.retrying, default=tally.newest),
            dead_letter=max(dead, default=None),
            tasks=tuple(task for task, _ in Counter(tasks).most_common()),
            keys=tuple(shares[:KEYS]),
            more_keys=len(shares[KEYS:]),
        )

    def add_past(self, refs: Sequence[GroupRef]) -> None:
        """Add recorded attempts."""
        found, self._past = read_shares(partial(recorded_deliveries, self._session), refs, self._bounds.errors)
        for ref, attempts in found.items():
            self._past[ref] |= attempts[-1].at < self._now - HOURS * HOUR_MS
            for one in attempts:
                if one.outcome in FAILED and is_attempt(one.start):
                    text = self._texts.of(ref, one.end)
                    self._known.add((ref, one.offset, one.attempt, text))
                    self._known_dead.add(one.dead_letter)
                    self._partitions[one.offset] = one.key
                    self._tallies[ref, text].add_attempt(one.at, one.offset)

    def add_retrying(self, refs: Sequence[GroupRef]) -> None:
        """Add messages that wait for another attempt."""
        found, self._retrying = read_shares(partial(unsettled, self._session), refs, self._bounds.errors)
        for ref, rows in found.items():
            for row in rows:
                if row.is_retrying:
                    text = row.text(ref, self._texts)
                    tally = self._tallies[ref, text]
                    tally.retrying.append(row.offset)
                    self._partitions[row.offset] = row.key
                    if (ref, row.offset, row.attempts, text) not in self._known:
                        tally.add_attempt(row.at, row.offset)

    def add_moved(self, refs: Sequence[GroupRef]) -> None:
        """Add jobs that wait for their next attempts in the outbox."""
        of_jobs = [ref for ref in refs if job_results.is_of_jobs(ref)]
        if not of_jobs:
            return
        found, whole = _moved(self._session, of_jobs, self._texts, self._bounds)
        for ref in of_jobs:
            self._retrying[ref] &= whole
        recorded = {ref for ref in of_jobs if get_settings().recorded_of(ref.group) != "none"}
        for ref, text, one in found:
            tally = self._tallies[ref, text]
            tally.retrying.append(one.offset)
            self._partitions[one.offset] = one.key
            tally.moved.append(_Failure(one.at, one.offset, one.offset))
            if ref not in recorded:
                tally.add_attempt(one.at, one.offset)

    def add_dead_letters(self, topics: frozenset[str] | None, group: str | None, key: str | None) -> None:
        """Add dead letters, as many of each DLQ topic as its share of the bounds allows."""
        session, bounds = self._session, self._bounds
        numbers = {topic: number.value for topic, number in dlq_topics(session, topics, bounds=bounds)}
        wanted = DeadLetterFilter("", group=group, key=key)
        matches = {
            topic: look(session, wanted._replace(topic=topic), bounds=replace(bounds, dead_letters=most))
            for topic, most in deal(numbers, bounds.dead_letters).items()
        }
        shares = deal({topic: len(found.offsets) for topic, found in matches.items()}, bounds.errors)
        for topic, found in matches.items():
            self._dead[topic] = found.whole and len(found.offsets) <= shares[topic]
            for end in _ends(session, found, self._texts, shares[topic]):
                tally = self._tallies[end.ref, end.text]
                tally.dead.append(_Failure(end.failed_at, end.offset, end.original_offset))
                self._partitions[end.offset] = self._partitions[end.original_offset] = end.key
                if end.is_attempt and end.message_id not in self._known_dead:
                    tally.add_attempt(end.failed_at, end.original_offset)


def _shares(keys: Mapping[int, str | None], *offsets: Sequence[int]) -> list[KeyShare]:
    """Return how many of retrying messages, of dead letters and of attempts have each key; most messages first."""
    numbers = [Counter(keys[offset] for offset in those) for those in offsets]
    found = [KeyShare(key, *(number[key] for number in numbers)) for key in {key for one in numbers for key in one}]
    return sorted(
        found, key=lambda one: (-one.retrying - one.dead_letters, -one.attempts, one.key or "", one.key is None)
    )


# -- messages that wait for another attempt ---------------------------------------


class Unsettled(NamedTuple):
    """A delivery that is claimed and not settled."""

    offset: int
    attempts: int
    at: int
    token: int
    by: str
    key: str
    """The partition key."""
    end: str
    """The end of the last error."""

    @property
    def is_retrying(self) -> bool:
        """As in an overview of the group."""
        return not self.token and self.attempts > 0

    def text(self, ref: GroupRef, texts: _Texts) -> str:
        """Return the masked text of the last error, or what the message waits for if it has none."""
        return LOST_TEXT if not self.end and losses.is_lost(self.token, self.by) else texts.of(ref, self.end)


def unsettled(session: Session, refs: Sequence[GroupRef], most: int) -> dict[GroupRef, list[Unsettled]]:
    """Return deliveries of groups that are not settled; those that wait longest first."""
    select = (
        "SELECT consumer_group, topic, message_offset, retry_count, delivered_at, delivery_token, delivered_by, "
        "partition_key, "
        f"{session.dialect.ending('last_error', LINE)} {log_queries.claimed(session)} "
        "ORDER BY invisible_until DESC LIMIT %s"
    )
    rows = session.each(select, [(*ref, False, most) for ref in refs])
    return grouped((GroupRef(group, topic), Unsettled(*row)) for group, topic, *row in rows)


def _moved(
    session: Session, refs: Collection[GroupRef], texts: _Texts, bounds: Bounds
) -> tuple[list[tuple[GroupRef, str, FailedJob]], bool]:
    """Return jobs that have failed and wait for long with queue and masked text, and whether these are all."""
    queues = {ref.topic: ref for ref in refs}
    rows, is_read = failed_ones(session, most=bounds.scheduled)
    waiting = [row for row in rows if row.topic in queues]
    read = waiting[: bounds.errors]
    lines = last_errors(session, {row.id for row in read})
    found = []
    for row in read:
        ref, (line, cut) = queues[row.topic], lines.get(row.id, ErrorLine())
        found.append((ref, texts.of_line(ref, line, is_cut=cut), row))
    return found, is_read and len(read) == len(waiting)


def retrying_of_kind(
    session: Session, ref: GroupRef, text: str, *, shown: Shown, moved: bool = True, bounds: Bounds = PAGES
) -> tuple[list[int], bool]:
    """Return the offsets of a group's messages in retry whose masked error is a text, and whether these are all."""
    texts = _Texts(shown)
    rows = unsettled(session, [ref], bounds.errors + 1).get(ref, [])
    chosen = [one.offset for one in rows[: bounds.errors] if one.is_retrying and one.text(ref, texts) == text]
    whole = len(rows) <= bounds.errors
    if moved and job_results.is_of_jobs(ref):
        found, all_moved = _moved(session, [ref], texts, bounds)
        chosen += [one.offset for _, its_text, one in found if its_text == text]
        whole = whole and all_moved
    return sorted(chosen), whole


# -- recorded attempts --------------------------------------------------------------


class Attempt(NamedTuple):
    """A recorded delivery."""

    key: str
    offset: int
    attempt: int
    outcome: str
    at: int
    dead_letter: str
    """The id of the dead letter, if the attempt was the last one."""
    start: str
    end: str


def recorded_deliveries(session: Session, refs: Sequence[GroupRef], most: int) -> dict[GroupRef, list[Attempt]]:
    """Return recorded deliveries of groups, newest first."""
    select = (
        "SELECT consumer_group, topic, id, partition_key, message_offset, attempt, outcome, settled_at, "
        f"related_id, SUBSTR(error, 1, {STARTS}), {session.dialect.ending('error', LINE)} FROM {EVENTS}"
        f"{session.dialect.force_index('queue_delivery_events_group')} "
        "WHERE consumer_group = %s AND topic = %s ORDER BY id DESC LIMIT %s"
    )
    rows = sorted(session.each(select, [(*ref, most) for ref in refs]), key=lambda row: -row[2])
    return grouped((GroupRef(group, topic), Attempt(*row)) for group, topic, _id, *row in rows)


# -- dead letters -------------------------------------------------------------------


class _End(NamedTuple):
    offset: int
    ref: GroupRef
    text: str
    is_attempt: bool
    """True if a failed attempt dead-lettered the message."""
    failed_at: int
    original_offset: int
    message_id: str
    key: str


def of_kind(
    session: Session, found: DeadLetterMatches, text: str, *, shown: Shown, bounds: Bounds = PAGES
) -> DeadLetterMatches:
    """Return the matches whose masked error is a text, among the newest ``bounds.errors``."""
    chosen = [one for one in _ends(session, found, _Texts(shown), bounds.errors) if one.text == text]
    return replace(
        found,
        offsets=tuple(sorted((one.offset for one in chosen), reverse=True)),
        refs=dict(Counter(one.ref for one in chosen).most_common()),
        all_errors=found.all_errors and len(found.offsets) <= bounds.errors,
    )


def _ends(session: Session, found: DeadLetterMatches, texts: _Texts, most: int) -> Iterator[_End]:
    """Yield the ends of the errors of the newest matches."""
    columns = (
        f"m.`offset`, m.failed_group, m.original_topic, SUBSTR(m.last_error, 1, {STARTS}), "
        f"{session.dialect.ending('m.last_error', LINE)}, m.failed_at, m.original_offset, m.id, m.partition_key"
    )
    for offset, group, topic, start, end, *rest in at_offsets(session, columns, found.offsets[:most]):
        ref = GroupRef(group, topic)
        yield _End(offset, ref, texts.of(ref, end), is_attempt(start), *rest)


K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


def read_shares(
    read: Callable[[Sequence[K], int], dict[K, list[R]]], keys: Sequence[K], most: int
) -> tuple[dict[K, list[R]], dict[K, bool]]:
    """Return about ``most`` rows by key, and which keys have no more; what some leave of a share is for others."""
    if not keys:
        return {}, {}
    share = max(1, most // len(keys))
    limits = dict.fromkeys(keys, share)
    found = read(keys, share + 1)
    cut = [key for key, rows in found.items() if len(rows) > share]
    left = most - sum(min(len(rows), share) for rows in found.values())
    if cut and left >= len(cut):
        more = share + left // len(cut)
        found |= read(cut, more + 1)
        limits |= dict.fromkeys(cut, more)
    whole = {key: len(found.get(key, ())) <= limits[key] for key in keys}
    return {key: rows[: limits[key]] for key, rows in found.items()}, whole


def deal(wanted: Mapping[K, int], most: int) -> dict[K, int]:
    """Return shares of a number: equal ones, except that nobody gets more than is wanted."""
    shares: dict[K, int] = {}
    for place, key in enumerate(sorted(wanted, key=lambda key: wanted[key])):
        shares[key] = min(wanted[key], max(0, most - sum(shares.values())) // (len(wanted) - place))
    return shares
