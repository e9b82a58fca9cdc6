"""GC waits for the archive."""

from __future__ import annotations

import pytest
from django.core.management import call_command

from django_mysqlqueue import publish_many
from django_mysqlqueue.models import QueueMessage, Reader
from pyspark_mysqlqueue import frames
from pyspark_mysqlqueue.archive import files, run
from pyspark_mysqlqueue.archive.root import Folder
from pyspark_mysqlqueue.errors import PipelineError
from tests.support import garbage
from tests.support.archives import contents, held, some
from tests.support.harness import USING, Sub, handler
from tests.support.spark_log import collected, expected


@pytest.mark.promise("Archive")
def test_gc_deletes_nothing_that_is_not_archived(job, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ARCHIVE_REQUIRED": True}
    sub = Sub(handler())
    publish_many("t", range(5))
    sub.settle()
    assert garbage.collect(USING).messages == 0
    before = expected()
    run.grow(job)
    publish_many("t", range(3))
    sub.settle()
    assert garbage.collect(USING).messages == 5
    assert held(job) == before
    assert QueueMessage.objects.count() == 3
    assert len(collected(frames.everything(job.spark, job.place, job.root))) == 8


def test_what_gc_took_before_a_run_is_said(job, settings, capsys):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ARCHIVE_PATH": job.root.uri}
    sub = Sub(handler())
    publish_many("t", range(4))
    sub.settle()
    run.grow(job)
    assert garbage.collect(USING).messages == 4
    assert run.grow(job).missed == 0
    publish_many("t", range(3))
    sub.settle()
    last = QueueMessage.objects.order_by("-offset")[0].offset
    assert garbage.collect(USING).messages == 3
    call_command("queuearchive")
    assert f"GC has removed messages up to offset {last}" in capsys.readouterr().out
    assert run.grow(job).missed == 0


@pytest.mark.any_engine
def test_a_folder_that_is_not_shared_is_noticed(job, monkeypatch):
    some(3)
    monkeypatch.setattr(Folder, "sizes", lambda folder, relative: [-1] * len(relative))
    with pytest.raises(PipelineError, match="all workers share"):
        run.grow(job)
    assert contents(job) == []


@pytest.mark.any_engine
def test_what_is_wrong_in_a_task_is_said_as_it_is(job, monkeypatch):
    def wrong(*args):
        raise files.Mismatch("not as the log")

    some(3)
    monkeypatch.setattr(files, "write_span", wrong)
    with pytest.raises(files.Mismatch, match=r"^not as the log$"):
        run.grow(job)


def test_gc_stops_where_the_archive_does(job, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ARCHIVE_REQUIRED": True}
    sub = Sub(handler())
    publish_many("t", range(9))
    sub.settle()
    run.grow(job)
    Reader.objects.update(read_offset=QueueMessage.objects.order_by("offset")[2].offset)
    assert garbage.collect(USING).messages == 3


def test_what_gc_took_before_it_was_archived_is_an_error(job, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    sub = Sub(handler())
    publish_many("t", range(5))
    sub.settle()
    run.grow(job)
    publish_many("t", range(5))
    sub.settle()
    garbage.collect(USING)
    with pytest.raises(PipelineError, match="GC has removed messages"):
        frames.everything(job.spark, job.place, job.root)
