"""The notebook in the documents runs on any archive."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from django_mysqlqueue import Message, publish_many
from pyspark_mysqlqueue.archive import run
from pyspark_mysqlqueue.archive.root import Root
from tests.support.archives import some
from tests.support.harness import sequence
from tests.support.paths import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "archive.ipynb"


@pytest.mark.any_engine
def test_the_notebook(place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = run.Job(None, place, Root(str(tmp_path / "archive")))
    publish_many("commits", (Message({"repository": f"r{n % 2}"}, key=f"k{n}") for n in range(5)))
    sequence()
    run.grow(job)
    some(2, "other")
    run.grow(job)
    monkeypatch.setenv("ARCHIVE", job.root.uri)
    names: dict[str, Any] = {}
    said = []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"], "the notebook shows what each of its cells prints"
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec("".join(cell["source"]), names)  # noqa: S102
        said.append(output.getvalue())
    assert said[0] == "version 2, 2 files\n"
    assert all("commits" in text and "other" in text for text in said[1:3])
    assert "r0" in said[3]
    assert "0" in said[4].split("int64")[1]
    assert said[5] == "5 messages in version 1, 7 now\n"
