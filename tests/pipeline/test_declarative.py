"""The example's declarative pipeline: the queue's commits become the statistics that its subscribers compute."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from django_mysqlqueue import Message, publish_many
from example_project.commits.events import TOPIC, read_events
from example_project.declarative import run
from example_project.paths import EVENTS_FILE
from tests.support.harness import sequence

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("grpc") is None, reason="needs pip install 'django-mysqlqueue[pipelines]'"
    ),
]
ROOT = Path(__file__).parent.parent.parent


def rows(out: Path, table: str) -> list[dict[str, Any]]:
    return pq.read_table(out / "warehouse" / table).to_pylist()


def test_from_the_log_to_statistics(place, tmp_path):
    events = list(read_events(EVENTS_FILE, 300))

    def publish_and_run(part: list[Any]) -> None:
        publish_many(TOPIC, (Message(event.payload, key=event.repository) for event in part))
        sequence()
        env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"}
        done = subprocess.run(run.command(tmp_path, []), cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]

    publish_and_run(events[:200])
    assert len(rows(tmp_path, "commits_bronze")) == 200
    # The second run makes every table anew, each of what the one before it has now.
    publish_and_run(events[200:])
    assert sorted(row["offset"] for row in rows(tmp_path, "commits_silver")) == sorted(
        row["offset"] for row in rows(tmp_path, "commits_bronze")
    )
    expected: dict[tuple[str, Any], list[int]] = {}
    for event in events:
        sums = expected.setdefault((event.repository, event.day), [0, 0, 0, 0, 0])
        for place_, value in enumerate((1, int(event.is_merge), event.files, event.insertions, event.deletions)):
            sums[place_] += value
    names = ("commits", "merges", "files", "insertions", "deletions")
    found = {(row["repository"], row["day"]): [row[name] for name in names] for row in rows(tmp_path, "commits_by_day")}
    assert found == expected
    by_repository = {row["repository"]: row["commits"] for row in rows(tmp_path, "commits_by_repository")}
    assert sum(by_repository.values()) == 300
