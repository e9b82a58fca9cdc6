"""Write a report about the whole history of the queue: an HTML page with charts, and its tables as Parquet and CSV."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark_mysqlqueue.errors import PipelineError

if TYPE_CHECKING:
    from pyspark_mysqlqueue.archive.root import Root
    from pyspark_mysqlqueue.databases import Place

PAGE = "report.html"


def run_report(
    place: Place,
    root: Root | None,
    since: datetime.datetime | None,
    until: datetime.datetime | None,
    topics: Sequence[str] | None,
    out: str | Path,
    *,
    retention: Callable[[str], float | None] | None = None,
) -> list[Path]:
    """Write a report to a folder.

    Args:
        place: The queue's database.
        root: The archive (None: report on the live log only).
        since: Only messages that entered the log at or after this time (None: from the beginning).
        until: Only messages that entered the log before this time (None: up to now).
        topics: Only these topics (None: all).
        out: The folder: new, empty, or with an earlier report, whose files are replaced.
        retention: Returns the seconds for which GC keeps the messages of a topic (None: forever). Without it, the
            report does not forecast the effect of GC.

    Returns:
        The files of the report, the page first.

    Raises:
        PipelineError: The period is empty, the folder has other files, or a package of the extra ``report`` is missing.
        DataLossError: GC has removed messages that the archive does not contain.
    """
    folder = Path(out)
    if since is not None and until is not None and until <= since:
        raise PipelineError(f"until {until.isoformat()}: must be after since, {since.isoformat()}")
    if folder.exists() and not folder.is_dir():
        raise PipelineError(f"--out {str(out)!r}: is a file; use a folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / PAGE).is_file():
        raise PipelineError(f"--out {str(out)!r}: the folder is not empty and has no {PAGE}; use a new or empty folder")
    try:
        from pyspark_mysqlqueue.report import page, queries
    except ImportError as error:
        raise PipelineError(f"{error}: run pip install 'pyspark-mysqlqueue[report]'") from error
    facts = queries.gather(place, root, since, until, topics, retention)
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    # First, so that the next report may reuse the folder if this one is interrupted.
    (folder / PAGE).write_text(page.render(facts), encoding="utf-8")
    return [folder / PAGE, *queries.write(facts.tables, folder / "tables")]
