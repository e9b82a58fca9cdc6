"""Is a position one of this log? A reader stores the log's id, its epoch and its newest mark with an offset.

At most once a minute, the sequencer notes a random number at the end of the log, a mark. A log that was restored from a
backup, and has grown since, has other ones at the same offsets.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pyspark_mysqlqueue.databases import Database
from pyspark_mysqlqueue.errors import DataLossError
from pyspark_mysqlqueue.shared import log_queries
from pyspark_mysqlqueue.shared.tables import MARKS, SEQUENCER, SEQUENCER_ID

logger = logging.getLogger(__name__)

Relation = Literal["same", "unknown", "went back", "another"]
"""How a log relates to a position: it has it; it does not keep marks of that time any more, and may have it; it was
restored to an earlier state; or the position is one of another log."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a reader is: it has read all messages up to an offset of a log.

    Attributes:
        offset: The offset.
        log: The log's id; empty: nothing had entered the log.
        epoch: How often an operator had accepted the log after it was restored.
        marked_offset: The offset of the newest mark up to the offset; 0: there was none.
        mark: The mark.
    """

    offset: int
    log: str = ""
    epoch: int = 0
    marked_offset: int = 0
    mark: int = 0

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Position:
        """Return a position from JSON. Other keys are ignored."""
        return cls(**{name: stored[name] for name in cls.__slots__ if name in stored})

    @property
    def name(self) -> str:
        """The log's name for people."""
        return f"{self.log or 'without an id'}{f' (epoch {self.epoch})' if self.epoch else ''}"


def position(database: Database, offset: int) -> Position:
    """Return an offset of this log as a position."""
    found = database.rows(
        f"SELECT s.log_id, s.epoch, COALESCE(m.marked_offset, 0), COALESCE(m.mark, 0) FROM {SEQUENCER} s "
        f"LEFT JOIN {MARKS} m ON m.marked_offset = (SELECT MAX(n.marked_offset) FROM {MARKS} n "
        f"WHERE n.marked_offset <= %s) WHERE s.id = {SEQUENCER_ID}",
        (offset,),
    )
    return Position(offset, *(found[0] if found else ()))


def stored(database: Database, offset: Mapping[str, Any]) -> dict[str, Any]:
    """Return the offset of a stream with what makes it a position: log, epoch and mark."""
    found = position(database, offset["offset"])
    return {**offset, **asdict(found)} if found.log else dict(offset)


def relation(database: Database, of: Position) -> Relation:
    """Compare a position with this log.

    A log that went back by less than a minute, and has grown past the position without a mark, counts as the same one.
    """
    found = database.rows(
        f"SELECT s.log_id, s.epoch, (SELECT a.mark FROM {MARKS} a WHERE a.marked_offset = %s), "
        f"(SELECT MIN(b.marked_offset) FROM {MARKS} b), "
        f"(SELECT MAX(c.marked_offset) FROM {MARKS} c WHERE c.marked_offset < %s) "
        f"FROM {SEQUENCER} s WHERE s.id = {SEQUENCER_ID}",
        (of.marked_offset, of.offset),
    )
    log, epoch, mark, first, last = found[0] if found else ("", 0, None, None, None)
    if of.log not in ("", log):
        return "another"
    if log_queries.end_of_log(database) < of.offset or (of.log and of.epoch != epoch):
        return "went back"
    # A mark below the offset that was not there when the position was read. One at the offset may have followed.
    if last is not None and last > of.marked_offset:
        return "went back"
    if mark is not None:
        return "same" if mark == of.mark else "went back"
    return "unknown" if first is None or of.marked_offset < first else "went back"


def checked(database: Database, of: Position, *, fail_on_data_loss: bool) -> Position:
    """Return the position from which a reader continues: its own, if this log has it.

    Args:
        database: A connection.
        of: The reader's position.
        fail_on_data_loss: If False, a reader of another log continues at its offset in this one, or at the end.

    Raises:
        DataLossError: The position is one of another log, or of one that was restored to an earlier state.
    """
    found = relation(database, of)
    if found in ("same", "unknown"):
        return of
    end = log_queries.end_of_log(database)
    here = position(database, min(of.offset, end))
    what = (
        f"this database has the log {here.name}, up to offset {end}, but the reader is at offset {of.offset} "
        f"of the log {of.name}"
    )
    if found == "went back":
        what += ", and the log was restored to an earlier state since"
    if fail_on_data_loss:
        raise DataLossError(
            f"{what}; connect to the database that it has read, or begin with a new checkpoint, or set failOnDataLoss "
            f"to false to continue after offset {here.offset}"
        )
    logger.warning("%s; it continues after offset %s, and skips what this log has up to there", what, here.offset)
    return here
