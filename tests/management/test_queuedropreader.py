"""``queuedropreader``: GC no longer waits for a reader."""

from __future__ import annotations

import pytest
from django.core.management import CommandError

from django_mysqlqueue.models import Reader
from tests.support.queue_alias import command


@pytest.fixture
def reader(db):
    Reader.objects.create(name="lake", read_offset=0)


def test_it_previews_and_drops(reader):
    printed = command("queuedropreader", "lake", "--dry-run")
    assert "The position of the reader lake will be deleted." in printed
    assert "Nothing was changed (--dry-run)." in printed
    assert Reader.objects.exists()
    assert "The reader lake is dropped." in command("queuedropreader", "lake", "--noinput")
    assert not Reader.objects.exists()


def test_an_unknown_reader_is_an_error(db):
    with pytest.raises(CommandError, match="There is no registered reader 'lake'"):
        command("queuedropreader", "lake", "--noinput")
