"""The folder of a report: the page, and its tables as Parquet and CSV."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from pyspark_mysqlqueue.errors import PipelineError

MARKER = "queuereport.json"
"""The file that marks a folder as a report's. It lists the files that the next report may overwrite."""
PAGE = "report.html"
TABLES = "tables"


class Folder:
    """A folder that is new, empty or has an earlier report.

    Raises:
        PipelineError: The folder has other files, which a report could overwrite.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise PipelineError(f"--out {str(path)!r}: is a file; use a folder")
        self._earlier = self._known()
        if self._earlier is None and self.path.exists() and any(self.path.iterdir()):
            raise PipelineError(
                f"--out {str(path)!r}: the folder is not empty and has no report (no {MARKER}); use a new or empty "
                "folder"
            )

    def _known(self) -> list[str] | None:
        marker = self.path / MARKER
        if not marker.is_file():
            return None
        try:
            files = json.loads(marker.read_text())["files"]
        except (ValueError, KeyError, TypeError) as error:
            raise PipelineError(f"{marker}: was not written by a report; use another folder") from error
        return [str(name) for name in files]

    def write(self, page: str, tables: Mapping[str, pa.Table]) -> list[Path]:
        """Write the report, and delete files of an earlier report that this one does not have. Return the files."""
        names = [PAGE] + [f"{TABLES}/{name}.{kind}" for name in tables for kind in ("parquet", "csv")]
        (self.path / TABLES).mkdir(parents=True, exist_ok=True)
        # Write the marker first, so that the next report may reuse the folder if this one is interrupted.
        listed = sorted({*names, *(self._earlier or [])})
        self._mark(listed)
        for name, table in tables.items():
            pq.write_table(table, self.path / TABLES / f"{name}.parquet", compression="zstd")
            pc.write_csv(table, self.path / TABLES / f"{name}.csv")
        (self.path / PAGE).write_text(page, encoding="utf-8")
        for name in set(listed) - set(names):
            self._delete(name)
        self._mark(names)
        return [self.path / name for name in names]

    def _delete(self, name: str) -> None:
        file = (self.path / name).resolve()
        if file.is_relative_to(self.path.resolve()):  # the marker may have been edited
            file.unlink(missing_ok=True)

    def _mark(self, names: list[str]) -> None:
        text = json.dumps({"made_by": "queuereport", "files": names}, indent=1)
        (self.path / MARKER).write_text(text + "\n", encoding="utf-8")
