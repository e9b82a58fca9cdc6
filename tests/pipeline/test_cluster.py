"""The archive's command without Django, on two workers that are processes of their own, into a shared folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from django_mysqlqueue import Message, publish_many
from pyspark_mysqlqueue.archive import run
from pyspark_mysqlqueue.archive.root import Root
from pyspark_mysqlqueue.archive.run import Job
from tests.support.archives import held, named
from tests.support.harness import sequence
from tests.support.spark_log import expected

ROOT = Path(__file__).parents[2]
TWO_WORKERS = "local-cluster[2,1,1024]"
"""Each with one core and so many MiB."""


@pytest.mark.promise("Archive")
@pytest.mark.any_engine
@pytest.mark.servers_only
def test_two_workers_share_an_archive(spark: Any, place: Any, tmp_path: Path) -> None:
    details = json.loads(os.environ[place.url_variable])
    option_file = tmp_path / "queue.cnf"
    option_file.write_text(
        f"[client]\nsocket={details['unix_socket']}\nuser={details['user']}\ndatabase={details['database']}\n"
    )

    publish_many("t", (Message({"n": n}, key=f"k{n % 5}") for n in range(500)))
    sequence()
    job = Job(spark, place, Root(str(tmp_path / "archive")))
    command = [sys.executable, "-m", "pyspark_mysqlqueue", "archive", "--task-offsets", "100"]
    where = ["--master", TWO_WORKERS, "--path", job.root.uri, "--defaults-file", str(option_file)]
    environment = {key: value for key, value in os.environ.items() if "URL" not in key and "DJANGO" not in key}
    done = subprocess.run(
        [*command, *where], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Archived 500 messages in 1 commit, " in done.stdout
    assert len(named(job)) == 5, "one of each task"
    # Read by another program.
    assert run.verify(job) == []
    assert held(job) == expected()
