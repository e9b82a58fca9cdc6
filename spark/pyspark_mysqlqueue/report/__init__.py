"""Write a report about the queue's activity: an HTML page with charts, and its tables as Parquet and CSV."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark_mysqlqueue.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pyspark_mysqlqueue.archive.root import Root
    from pyspark_mysqlqueue.databases import Place


def run_report(
    spark: SparkSession,
    place: Place,
    root: Root | None,
    since: datetime.datetime | None,
    until: datetime.datetime | None,
    topics: Sequence[str] | None,
    out: str | Path,
    *,
    retention: Callable[[str], float | None] | None = None,
    redact: Callable[[str, str], str] | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> list[Path]:
    """Write a report to a folder.

    Args:
        spark: The session. Its time zone is set to UTC.
        place: The queue's database.
        root: The archive (None: report on the live log only).
        since: Only messages that entered the log at or after this time (None: from the beginning).
        until: Only messages that entered the log before this time (None: up to now).
        topics: Only these topics (None: all).
        out: The folder: new, empty, or with an earlier report, whose files are replaced.
        retention: Returns the seconds for which GC keeps the messages of a topic (None: forever). Without it, the
            report does not forecast the effect of GC.
        redact: Returns the text to show instead of an error's last line, given the line and its topic. Without it,
            errors are not redacted.
        progress: Called with the name of each step before it begins.

    Returns:
        The files of the report, the page first.

    Raises:
        PipelineError: The period is empty, or the folder has other files.
        DataLossError: GC has removed messages that the archive does not contain.
    """
    from pyspark_mysqlqueue.report import files, page
    from pyspark_mysqlqueue.report.queries import gather

    if since is not None and until is not None and until <= since:
        raise PipelineError(f"until {until.isoformat()}: must be after since, {since.isoformat()}")
    folder = files.Folder(out)
    facts = gather(spark, place, root, since, until, topics, retention=retention, redact=redact, progress=progress)
    progress("page")
    made = page.page(facts)
    return folder.write(page.render(made), {**facts.tables, **page.more_tables(made, facts)})
