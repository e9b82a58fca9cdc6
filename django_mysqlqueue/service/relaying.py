"""The relay: passes messages on from the log of one database to the outbox of another, once and in order.

Two databases have no common transaction. So the target stores, in the transaction that inserts the messages, the last
offset that it has received of the source's log: a relay that was killed before or after that COMMIT continues in the
right place. The log of the source is final up to its end and keeps its order, thanks to its sequencer.

The source stores, after the target's COMMIT, up to where it has been read. That may be behind the target's position.
GC keeps later messages, and a relay begins its search there, or at the position.

Either database can go back to an earlier state at any moment: it was restored, or has failed over to a replica that
lacked transactions. Its offsets are assigned again then, so an offset identifies a message only together with its id.
What a pass has read of the source is checked after that, and what it stores there depends on the log's still having the
message that was read last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from django.db import Error
from django.db.models.functions import Least

from django_mysqlqueue.db.columns import COPIED_COLUMNS
from django_mysqlqueue.db.sizes import REFUSAL_LENGTH
from django_mysqlqueue.db.tables import LOG, OUTBOX, RELAY_POSITIONS, RELAY_WATERMARKS, SEQUENCER, SEQUENCER_ID
from django_mysqlqueue.models import (
    CollectedTopic,
    RelayPosition,
    RelayWatermark,
)
from django_mysqlqueue.names.rules import relay_target, relayed_from
from django_mysqlqueue.service import log_places
from django_mysqlqueue.service.log_places import LogPlace
from django_mysqlqueue.service.sequencing import identify
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.session import Retry, Session, flat, run

PAGE = 5000
"""Messages of the source's log, of all topics, that a pass reads."""
BATCH_ROWS = 1000
BATCH_BYTES = 4 * 1_048_576
"""Limits of the messages that a pass inserts. The first one is always taken."""
ENDED = ("no_answer", "interrupted")
"""Kinds of errors that may have another reason than the message for which they occur."""
READ = (*COPIED_COLUMNS, "created_at")
ID = READ.index("id")
FROM_SAME_LOG = f"FROM {LOG} m WHERE m.`offset` = %s AND m.id = %s"
"""The end of INSERT … SELECT: nothing is inserted if the log does not have a message at an offset."""
TARGET_WENT_BACK = "the target was restored to an earlier state"
SOURCE_WENT_BACK = "the source was restored to an earlier state"
BOTH_WENT_BACK = "the source and the target were restored to earlier states"


class NotInserted(Exception):
    """The target has not inserted messages: it refuses one of them, or the connection or the statement was ended.

    A server closes the connection if a statement is longer than its ``max_allowed_packet``, and ends one that takes
    longer than its limit, so these cannot always be told apart.

    Args:
        error: the target's error.
        target: alias of the target.
        place: the first message of the failed statement, in the source's log.
        before: number of messages of the pass before it.
        messages: number of messages in the failed statement.
    """

    def __init__(self, error: Error, target: str, place: LogPlace, *, before: int, messages: int) -> None:
        self.text = f"{type(error).__name__}: {error}"
        self.topic = relayed_from(place.topic)
        super().__init__(
            f"database {target!r} did not accept message {place.id!r} of topic {self.topic!r}, at offset "
            f"{place.offset}, or one of the {messages - 1} after it: {self.text}"
        )
        self.is_lost_connection = failures.kind_of(target, error) in ENDED
        self.place = place
        self.before = before
        self.messages = messages


class Refusal(NamedTuple):
    """A message that a target refuses."""

    offset: int = 0
    """Its offset in the source's log."""
    error: str = ""
    """The target's error."""


class Lost(NamedTuple):
    """Messages of a topic that a restored target may lack, and that GC has deleted at the source."""

    topic: str
    """The topic at the target."""
    first: int
    """The lowest offset in the source's log that they may have had."""
    last: int
    """The offset of the last one."""


class Relayed(NamedTuple):
    """The result of a pass."""

    messages: int = 0
    """Messages inserted at the target."""
    topics: frozenset[str] = frozenset()
    """The topics of these messages there."""
    more: bool = False
    """Whether a limit ended the pass, so that there may be more."""
    busy: bool = False
    """Whether another process is relaying between these databases."""
    repeats: str = ""
    """Why messages are relayed again that had arrived; empty if they are not. Those that the target's log still has
    are dropped there as duplicates."""
    lost: tuple[Lost, ...] = ()
    """What a target that was restored may lack and cannot receive again."""


class Watermark(NamedTuple):
    """What the source knows of a target."""

    relayed_offset: int = 0
    """Offset of the last message that has arrived."""
    read_offset: int = 0
    """All messages up to this offset have arrived."""


class _Position(NamedTuple):
    """The locked position of the target."""

    offset: int = 0
    id: str = ""


class _Source(NamedTuple):
    """What one statement reads at the source, so that all of it is of the same log."""

    log_id: str
    """The id of the log; empty if it has none."""
    end: int
    """The end of the log."""
    known: Watermark
    message_id: str | None
    """The id of the message at the target's position; None if the log has none there."""


class _Start(NamedTuple):
    """Where a pass begins."""

    offset: int
    """The offset above which to read the log."""
    position: int
    """The position before it."""
    repeats: str = ""
    """As in ``Relayed``."""
    lowers: bool = False
    """Whether the source's watermark has to go back to this offset first."""
    is_behind: bool = False
    """Whether the source does not know of the position: its watermark was not stored, for example because of a kill."""


def relay(source: str, target: str, *, max_rows: int = BATCH_ROWS, max_bytes: int = BATCH_BYTES) -> Relayed:
    """Insert the next messages for a database from another one's log into its outbox.

    If another process is relaying between the two, this returns at once with ``busy``. While the target's position is
    locked, the source is only read. Nothing waits for that lock.

    Raises:
        NotInserted: the target refuses a message, or its connection was lost. Nothing was inserted.
        CommitOutcomeUnknown: the connection broke during COMMIT. The next pass continues in the right place.
        django.db.Error: any other error of either database.
    """
    origin = Session(source)
    then = _look(origin, target)
    log_id = then.log_id or identify(source)
    failing: Callable[[Error], NotInserted] | None = None

    def receive(session: Session) -> tuple[Relayed, Callable[[Session], tuple[Lost, ...]] | None]:
        """Return the result, and what is to be stored at the source."""
        nonlocal failing
        failing = None
        position = _lock(session, log_id, source, target)
        if position is None:
            return Relayed(busy=True), None
        start, places = _read(origin, target, position, then.known)
        if start.position < position.offset:
            _move(session, log_id, target, start.position, "")
        if start.lowers:
            return Relayed(more=True, repeats=start.repeats), partial(_go_back, target=target, offset=start.offset)
        wanted = [place for place in places if relay_target(place.topic) == target]
        taken = _within(wanted, max_rows, max_bytes)
        is_cut = len(taken) < len(wanted)
        if taken:
            rows = _contents(origin, taken)
            for before, number in _insert(session, rows):
                failing = partial(NotInserted, target=target, place=taken[before], before=before, messages=number)
            failing = None
            _move(session, log_id, target, taken[-1].offset, taken[-1].id)
        topics = frozenset(relayed_from(place.topic) for place in taken)
        more = is_cut or len(places) == PAGE
        done = Relayed(len(taken), topics, more, repeats=start.repeats)
        arrived = taken[-1] if taken else position if start.is_behind else None
        last = places[-1] if arrived is None and done.more else arrived
        return done, None if last is None else partial(_note, target=target, arrived=arrived, last=last)

    try:
        done, store = run(target, receive)
    except Error as error:
        # Other kinds, such as missing tables, affect all messages.
        if failing is None or failures.kind_of(target, error) not in (None, *ENDED):
            raise
        raise failing(error) from error
    return done if store is None else done._replace(lost=run(source, store))


def watermark(session: Session, target: str) -> Watermark:
    """Return what this log's database knows of a target: nothing if its watermark is of another log."""
    found = _look(session, target)
    return found.known if found.known.read_offset <= found.end else Watermark()


def note_refusal(source: str, target: str, place: LogPlace, error: str) -> None:
    """Store at the source which message a target refuses. It is refused until the watermark has passed it.

    If the log has another message there now, because it went back to an earlier state, nothing is stored.
    """
    values = (place.offset, error[:REFUSAL_LENGTH])
    assign = {"refused_offset": "%s", "refusal": "%s"}

    def store(session: Session) -> None:
        session.execute(
            f"INSERT INTO {RELAY_WATERMARKS} (target, refused_offset, refusal) SELECT %s, %s, %s {FROM_SAME_LOG}"
            + session.dialect.on_conflict(("target",), assign),
            (target, *values, place.offset, place.id, *values),
        )

    run(source, store)


def refusal(session: Session, target: str) -> Refusal:
    """Return the last message of this log that a target has refused; it may have accepted it since."""
    row = session.row(f"SELECT refused_offset, refusal FROM {RELAY_WATERMARKS} WHERE target = %s", (target,))
    return Refusal() if row is None else Refusal(*row)


def has_arrived(session: Session, target: str, offset: int) -> bool:
    """Return whether all messages of this log up to an offset that are for a database have arrived there."""
    start = watermark(session, target).read_offset
    while start < offset:
        places = log_places.walk(session, start, PAGE, newer=True)
        if any(relay_target(place.topic) == target for place in places if place.offset <= offset):
            return False
        if len(places) < PAGE:
            break
        start = places[-1].offset
    return True


def _lock(session: Session, log_id: str, source: str, target: str) -> _Position | None:
    """Lock the position if it is free, and return it, else None. A missing one is inserted."""
    found = RelayPosition.objects.using(session.using).filter(source_log=log_id, target=target)
    for row in found.select_for_update(skip_locked=True).values_list("relayed_offset", "relayed_id"):
        return _Position(*row)
    # With SKIP LOCKED, a missing row and a locked one look the same. A plain read tells them apart.
    if found.exists():
        return None
    session.execute(
        f"INSERT INTO {RELAY_POSITIONS} (source_log, target, source) VALUES (%s, %s, %s)"
        f"{session.dialect.on_conflict_keep(RELAY_POSITIONS, ('source_log', 'target'))}",
        (log_id, target, source),
    )
    # Another process may have inserted it, and moved it, in the meantime.
    return _Position(*found.values_list("relayed_offset", "relayed_id").get())


def _read(origin: Session, target: str, position: _Position, known: Watermark) -> tuple[_Start, list[LogPlace]]:
    """Return where the pass begins, and the next messages of the log."""
    offset = max(position.offset, known.read_offset)
    while True:
        places = log_places.walk(origin, offset, PAGE, newer=True)
        # Read after the walk: if the log has gone back in the meantime, the walk may have begun too late.
        start = _start(_look(origin, target, position.offset), position)
        if offset <= start.offset:
            return start, places
        offset = start.offset


def _look(origin: Session, target: str, offset: int = 0) -> _Source:
    """Read what the source knows of a target, and its log's end and message at an offset, in one statement."""
    mutex = f"FROM {SEQUENCER} s WHERE s.id = %s"
    known = f"FROM {RELAY_WATERMARKS} w WHERE w.target = %s"
    ((log_id, sequenced, appended, relayed_offset, read_offset, message_id),) = origin.rows(
        f"SELECT (SELECT s.log_id {mutex}), (SELECT s.last_offset {mutex}), (SELECT MAX(m.`offset`) FROM {LOG} m), "
        f"(SELECT w.relayed_offset {known}), (SELECT w.read_offset {known}), "
        f"(SELECT m.id FROM {LOG} m WHERE m.`offset` = %s)",
        (SEQUENCER_ID, SEQUENCER_ID, target, target, offset),
    )
    return _Source(
        log_id or "", max(sequenced or 0, appended or 0), Watermark(relayed_offset or 0, read_offset or 0), message_id
    )


def _start(found: _Source, position: _Position) -> _Start:
    """Return where the log and the position say that a pass begins.

    What the source knows is stored after the position, so it may be behind it, but not ahead of it. While it is behind,
    GC keeps the message at the position.
    """
    known = found.known
    if known.read_offset > found.end:
        # It was stored in a log that had more messages. What has arrived of this one is not known.
        return _Start(0, 0, SOURCE_WENT_BACK, lowers=True)
    if position.offset > known.relayed_offset and found.message_id != position.id:
        return _Start(known.read_offset, known.relayed_offset, SOURCE_WENT_BACK)
    if found.message_id not in (None, position.id) and position.id:
        # The position is of another log, and the source's watermark of a later state of the target.
        return _Start(0, 0, BOTH_WENT_BACK, lowers=True)
    if position.offset < known.relayed_offset:
        return _Start(position.offset, position.offset, TARGET_WENT_BACK, lowers=True)
    return _Start(
        max(position.offset, known.read_offset), position.offset, is_behind=known.relayed_offset < position.offset
    )


def _within(places: Sequence[LogPlace], max_rows: int, max_bytes: int) -> Sequence[LogPlace]:
    """Return the first places within both limits, at least one."""
    size = 0
    for number, place in enumerate(places):
        size += place.size
        if number and (number >= max_rows or size > max_bytes):
            return places[:number]
    return places


def _contents(origin: Session, places: Sequence[LogPlace]) -> list[tuple[Any, ...]]:
    """Return the columns ``READ`` of messages, in the order of the log; Retry if it no longer has one of them."""
    columns = ", ".join(f"m.{name}" for name in READ)
    join = f"{origin.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o"
    found = origin.joined(f"SELECT m.`offset`, {columns}", "o", (place.offset for place in places), join)
    rows = [row[1:] for row in sorted(found, key=lambda row: row[0])]
    if [row[ID] for row in rows] != [place.id for place in places]:
        raise Retry(f"The log of {origin.using!r} has changed: {len(places)} messages were read, {len(rows)} are there")
    return rows


def _insert(session: Session, rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, int]]:
    """Insert messages, and yield before each statement how many have been inserted, and how many it inserts."""
    topic = READ.index("topic")
    given = [tuple(relayed_from(value) if place == topic else value for place, value in enumerate(row)) for row in rows]
    done = 0
    for chunk in session.chunks(given, weight=_weight):
        yield done, len(chunk)
        done += len(chunk)
        values = session.dialect.placeholders(len(chunk), f"({', '.join(['%s'] * len(READ))})")
        session.execute(f"INSERT INTO {OUTBOX} ({', '.join(READ)}) VALUES {values}", flat(chunk))


def _weight(row: Sequence[Any]) -> int:
    return sum(len(value) for value in row if isinstance(value, (str, bytes)))


def _move(session: Session, log_id: str, target: str, offset: int, message_id: str) -> None:
    session.execute(
        f"UPDATE {RELAY_POSITIONS} SET relayed_offset = %s, relayed_id = %s, relayed_at = {session.dialect.now_ms} "
        "WHERE source_log = %s AND target = %s",
        (offset, message_id, log_id, target),
    )


def _note(
    session: Session, target: str, arrived: LogPlace | _Position | None, last: LogPlace | _Position
) -> tuple[Lost, ...]:
    """Store what has arrived at a target. A process that was slower than another one changes nothing.

    Nor does one that has read another log: without the message that was read last, the log went back to an earlier
    state, and its messages will have other offsets. (Or GC has deleted it, after another process stored as much.)

    ``arrived``: the last message that has arrived, if it is not known to the source.
    """
    now, greatest = session.dialect.now_ms, session.dialect.greatest
    reached = Watermark(0 if arrived is None else arrived.offset, last.offset)
    assign = {name: f"{greatest}({RELAY_WATERMARKS}.{name}, %s)" for name in Watermark._fields} | {"read_at": now}
    session.execute(
        f"INSERT INTO {RELAY_WATERMARKS} (target, relayed_offset, read_offset, read_at) SELECT %s, %s, %s, {now} "
        + FROM_SAME_LOG
        + session.dialect.on_conflict(("target",), assign),
        (target, *reached, last.offset, last.id, *reached),
    )
    return ()


def _go_back(session: Session, target: str, offset: int) -> tuple[Lost, ...]:
    """Lower a target's watermark, which is never wrong, and return which messages GC has deleted above it."""
    RelayWatermark.objects.using(session.using).filter(target=target).update(
        relayed_offset=Least("relayed_offset", offset), read_offset=Least("read_offset", offset)
    )
    collected = CollectedTopic.objects.using(session.using).filter(collected_offset__gt=offset)
    return tuple(
        Lost(relayed_from(topic), offset + 1, last)
        for topic, last in sorted(collected.values_list("topic", "collected_offset"))
        if relay_target(topic) == target
    )
