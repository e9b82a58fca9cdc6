"""One page that says what the queue did, with pictures, and its tables as Parquet and CSV."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from django_mysqlqueue.pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from django_mysqlqueue.pipeline.archive.files import Root
    from django_mysqlqueue.pipeline.databases import Place


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
    """Makes a report in a folder; returns its files, the page first.

    Args:
        root: of the archive; None: of what the live log still holds.
        since: only what was published then or later; None: from the beginning.
        until: only what was published before; None: up to now.
        topics: only these; None: all.
        out: a folder that is new, empty or an earlier report's, whose files are replaced.
        retention: how many seconds GC keeps a topic's messages (None: for ever); None: it is not said.
        redact: what is left of an error's last line, given it and its topic; None: all of it.
        progress: is told what is asked next.

    Raises:
        PipelineError: the period is empty, or the folder holds other files.
        DataLossError: GC has removed what the archive does not hold.
    """
    from django_mysqlqueue.pipeline.report import files, page
    from django_mysqlqueue.pipeline.report.queries import gather

    if since is not None and until is not None and until <= since:
        raise PipelineError(f"until {until.isoformat()}: must be after since, {since.isoformat()}")
    folder = files.Folder(out)
    facts = gather(spark, place, root, since, until, topics, retention=retention, redact=redact, progress=progress)
    progress("the page")
    made = page.page(facts)
    return folder.write(page.render(made), {**facts.tables, **page.more_tables(made, facts)})
