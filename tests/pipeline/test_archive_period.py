"""Archiving a period."""

from __future__ import annotations

import datetime
import re

import pytest

from django_mysqlqueue import publish_many
from django_mysqlqueue.models import QueueMessage
from pyspark_mysqlqueue import frames
from pyspark_mysqlqueue.archive import run
from pyspark_mysqlqueue.errors import PipelineError
from tests.support import garbage
from tests.support.archives import some
from tests.support.factories import QueueMessageFactory
from tests.support.harness import USING, Sub, handler
from tests.support.spark_log import PYSPARK, collected


def test_of_the_log_only_the_period_is_read(job):
    """Its beginning is found by halving, which a clock that was a day ahead for a while must not mislead."""
    begin, minute = 1_780_000_000_000, 60_000
    # A message every ten minutes; the hours from 3 to 10 were written as those of the next day.
    moments = [begin + number * 10 * minute + (1440 * minute if 18 <= number < 60 else 0) for number in range(288)]
    QueueMessage.objects.bulk_create(QueueMessageFactory.build(published_at=moment) for moment in moments)
    for first, behind in ((26, 40), (2, 9), (31, 33), (0, 80)):
        edges = [begin + hour * 60 * minute for hour in (first, behind)]
        since, until = (datetime.datetime.fromtimestamp(edge / 1000, datetime.UTC) for edge in edges)
        wanted = [moment for moment in moments if edges[0] <= moment < edges[1]]
        rows = frames.everything(job.spark, job.place, None, since=since, until=until, columns=("published_at",))
        assert sorted(int(row[0].timestamp() * 1000) for row in rows.collect()) == sorted(wanted)
    plan = frames.everything(job.spark, job.place, None, since=since)._jdf.queryExecution()
    kept = [line for line in plan.executedPlan().toString().splitlines() if re.match(r"[-+ *():\d]*Filter ", line)]
    assert kept
    assert ("offset" in "".join(kept)) is (PYSPARK < (4, 1)), "the source takes that condition"


def test_a_moment_without_a_zone_is_named(job):
    naive = datetime.datetime(2026, 11, 22)  # noqa: DTZ001
    with pytest.raises(PipelineError, match="since 2026-11-22T00:00:00: must have a time zone"):
        frames.everything(job.spark, job.place, job.root, since=naive)
    with pytest.raises(PipelineError, match="until 2026-11-22T00:00:00: must have a time zone"):
        frames.archive(job.spark, job.place, job.root, until=naive)
    some(2)
    first = datetime.datetime.min.replace(tzinfo=datetime.UTC)
    last = datetime.datetime.max.replace(tzinfo=datetime.UTC)
    assert frames.everything(job.spark, job.place, job.root, since=first, until=last).count() == 2


def test_what_gc_took_of_a_period_is_an_error(job, settings):
    """Also if another topic's messages are left on both sides of it."""
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"RETENTION": 0}, "kept": {"RETENTION": 86_400}}}
    sub = Sub(handler())
    some(2, "kept")
    run.grow(job)
    some(2, "kept")
    since = datetime.datetime.now(datetime.UTC)
    publish_many("t", range(3))
    sub.settle()
    some(2, "kept")
    garbage.collect(USING)
    with pytest.raises(PipelineError, match="GC has removed messages"):
        frames.everything(job.spark, job.place, job.root, since=since)
    assert len(collected(frames.everything(job.spark, job.place, job.root, topics=["kept"], since=since))) == 2
    assert len(collected(frames.everything(job.spark, job.place, None, since=since))) == 2
