"""The state of the archive, for GC and the status. ``pipeline`` writes the archive."""

from __future__ import annotations

from django_mysqlqueue.models import ArchiveSegment
from django_mysqlqueue.sql.session import Session

SEGMENTS = ArchiveSegment._meta.db_table


def archived_offset(session: Session) -> int:
    """Return the highest offset up to which everything is, or was, in the archive; 0 if nothing is.

    Segments follow each other without a gap. If one is missing (somebody has deleted its row), the segments after the
    gap do not count.
    """
    (highest,) = session.one(
        f"SELECT MIN(s.hi) FROM {SEGMENTS} s {session.dialect.join_to(SEGMENTS, 'n', left=True)} ON n.lo = s.hi + 1 "
        "WHERE n.lo IS NULL"
    )
    return int(highest or 0)
