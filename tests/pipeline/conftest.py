"""One Spark session for the run, told where the test database is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from django_mysqlqueue.management.spark import project_place
from django_mysqlqueue.models import Sequencer
from pyspark_mysqlqueue.archive.root import Root
from pyspark_mysqlqueue.archive.run import Job
from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.session import QUIET, session
from tests.support.harness import USING
from tests.support.spark_log import PYSPARK


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)
            if PYSPARK < (4, 2):  # It leaves the sockets open by which it gets rows.
                item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
            # The first one starts Spark, and a call of Java that is broken off breaks all that follow.
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def _place(_database: None) -> Place:
    return project_place(USING)


@pytest.fixture(scope="session")
def _spark(_place: Place) -> Iterator[Any]:
    settings = {
        "spark.sql.shuffle.partitions": "2",
        "spark.default.parallelism": "2",
        # In a few minutes the optimizing compiler and the parallel collector cost more CPU time than they save: half.
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={QUIET} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    # Tasks are tried twice, also on one machine: what a retried task does is half of the matter.
    found = session("local[2, 2]", settings=settings)
    found.sparkContext.setLogLevel("OFF")
    yield found
    found.stop()


@pytest.fixture
def place(db: None, _place: Place) -> Place:
    Sequencer.objects.get_or_create(pk=1)
    return _place


@pytest.fixture
def spark(db: None, _spark: Any) -> Any:
    assert os.environ["MYSQLQUEUE_URL"]
    return _spark


@pytest.fixture
def job(spark: Any, place: Any, tmp_path: Any) -> Job:
    return Job(spark, place, Root(str(tmp_path / "the [archive] * é")))
