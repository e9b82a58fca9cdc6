"""``queueerase``: afterwards neither the database nor a file of the archive has a key or its payloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from django.core.management import CommandError

from django_mysqlqueue.models import QueueMessage
from pyspark_mysqlqueue.archive import run, table
from pyspark_mysqlqueue.archive.root import Root
from pyspark_mysqlqueue.archive.run import Job
from pyspark_mysqlqueue.archive.table import Table
from pyspark_mysqlqueue.databases import Place
from tests.support.archives import contents, parquet
from tests.support.commands import run as command
from tests.support.erased import KEY, SECRET, everywhere, files_with, others, tables_with

pytestmark = pytest.mark.promise("Erasure")


@pytest.fixture
def job(place: Place, tmp_path: Path, settings: Any) -> Job:
    settings.MYSQLQUEUE = {"ARCHIVE_PATH": str(tmp_path / "archive")}
    return Job(None, place, Root(str(tmp_path / "archive")))


@pytest.fixture
def root(job: Job) -> Path:
    """An archive of several days with several versions, a checkpoint and a file of a run that was killed."""
    for number in range(table.MANY):
        everywhere()
        if number == 1:
            latest = QueueMessage.objects.order_by("-offset").values_list("offset", flat=True)
            QueueMessage.objects.filter(offset__in=list(latest[:5])).update(published_at=1)
        run.grow(job)
    run.compact(job)
    Table.open(job.root).delta.create_checkpoint()
    everywhere("other")
    everywhere()
    run.grow(job)
    newest = parquet(job)[-1]
    newest.with_name("orphan.parquet").write_bytes(newest.read_bytes())
    return Path(job.root.uri)


def of_others(job: Job) -> list[Any]:
    """The archived rows of other keys, and of other topics."""
    return [row for row in contents(job) if KEY not in str(row) or "other" in row]


def erase(topic: str = "t") -> str:
    return command("queueerase", topic, "--key", KEY, "--noinput")


def erased_from(root: Path, job: Job) -> bool:
    return not files_with(root, KEY, SECRET) and run.verify(job) == []


def test_no_file_and_no_table_has_it(job: Job, root: Path) -> None:
    assert len(files_with(root, KEY, SECRET)) > table.MANY
    kept, archived = others(), of_others(job)
    printed = command("queueerase", "t", "--key", KEY, "--dry-run")
    assert "that will be erased in the archive" in printed
    assert of_others(job) == archived
    erase()
    assert others() == kept
    assert of_others(job) == archived
    assert run.verify(job) == []
    assert files_with(root, SECRET) == files_with(root, KEY) != []
    assert "Messages erased in the archive" in erase("other")
    assert erased_from(root, job)
    assert tables_with(KEY, SECRET) == set()
    with pytest.raises(CommandError, match="Nothing was changed"):
        erase()


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", ["replace", "_check_exist", "create_write_transaction", "_synced", "vacuum"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_it_can_be_killed_at_each_step(job: Job, root: Path, monkeypatch: Any, step: str, when: str) -> None:
    erase("other")
    archived = of_others(job)
    of = DeltaTable if step == "create_write_transaction" else Table
    real = getattr(of, step)

    def kill(*arguments: Any, **options: Any) -> Any:
        if when == "after" and not options.get("dry_run"):
            real(*arguments, **options)
        if options.get("dry_run"):
            return real(*arguments, **options)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(of, step, kill)
        with pytest.raises(Killed):
            erase()
    assert of_others(job) == archived
    assert run.verify(job) == []
    if (step, when) != ("vacuum", "after"):
        erase()
    assert of_others(job) == archived
    assert erased_from(root, job)


def test_the_archive_is_locked(job: Job, root: Path) -> None:
    with job.locked(), pytest.raises(CommandError, match="lock"):
        erase()
    assert "QueueMessage" in tables_with(KEY), "nothing has begun"


def test_a_file_with_a_fault_is_not_written_again(job: Job, root: Path) -> None:
    (one, *_) = [path for path in files_with(root, KEY) if path.name != "orphan.parquet"][::-1]
    content = bytearray(one.read_bytes())
    content[len(content) // 2] ^= 1
    one.write_bytes(content)
    with pytest.raises(CommandError, match=f"file day=.*{one.stem}"):
        erase()
    one.unlink()
    with pytest.raises(CommandError, match="no such file"):
        erase()
    assert "QueueMessage" in tables_with(KEY), "the preview has found it"


def test_without_an_archive(job: Job) -> None:
    everywhere()
    assert "There is no archive yet." in erase()
    assert tables_with(KEY, SECRET) == set()
