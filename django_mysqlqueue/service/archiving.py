"""What GC and the status need to know of the archive; ``pipeline`` makes it."""

from __future__ import annotations

from django_mysqlqueue.models import ArchiveSegment
from django_mysqlqueue.sql.session import Session

SEGMENTS = ArchiveSegment._meta.db_table


def archived_offset(session: Session) -> int:
    """All offsets up to this one are in the archive, or were when their time there ended; 0: none is.

    Segments follow each other without a gap. Should one be missing (somebody has
    deleted its row), what lies behind the gap does not count.
    """
    row = session.row(
        f"SELECT MIN(s.hi) FROM {SEGMENTS} s WHERE NOT EXISTS (SELECT 1 FROM {SEGMENTS} n WHERE n.lo = s.hi + 1)"
    )
    return 0 if row is None or row[0] is None else int(row[0])
