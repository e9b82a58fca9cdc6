"""The examples of the guides for migrating from other queues of tasks run."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import types
from typing import Any

import pytest

from django_mysqlqueue.models import JobResult, OutboxMessage
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.validators import backoff
from django_mysqlqueue.schedules import registry
from django_mysqlqueue.tasks import cancel_job, framework, progress_of
from django_mysqlqueue.testing import deliver_all, job_context, run_recurring
from tests.support import job_worlds
from tests.support.documents import DOCS, _block, blocks
from tests.support.harness import USING
from tests.support.internals import declared_schedules

pytestmark = pytest.mark.any_engine
WITH_SCHEDULES = [f"howto/migrate-{name}.md" for name in ("django-ox", "dj-queue", "steady-queue", "celery")]
GUIDES = ["howto/migrate-django-tasks-db.md", *WITH_SCHEDULES]


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings, monkeypatch):
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["default", "mail"]}}
    monkeypatch.setattr(registry, "_declared", {})
    # With Django 5.2, it is the package django-tasks.
    package = framework.BaseTaskBackend.__module__.partition(".backends")[0]
    monkeypatch.setitem(sys.modules, "django.tasks", importlib.import_module(package))


@pytest.fixture
def module(monkeypatch):
    """Makes a module of a block, so that subscribers find its tasks by their paths."""

    def make(page: str, containing: str) -> Any:
        made = types.ModuleType("migrated_tasks")
        monkeypatch.setitem(sys.modules, made.__name__, made)
        exec(_block(page, containing), made.__dict__)  # noqa: S102
        return made

    return make


@pytest.mark.parametrize("page", WITH_SCHEDULES)
def test_schedules(module, page):
    found = module(page, "@recurring")
    definitions = declared_schedules()[USING]
    path = f"{found.__name__}."
    (nightly,) = [name for name in definitions if name.startswith(path)]
    assert set(definitions) == {nightly, "rates-eur", "rates-usd"}
    assert definitions[nightly].timetable.cron == "0 3 * * *"
    for name, minutes, currency in (("rates-eur", 5, "eur"), ("rates-usd", 60, "usd")):
        one = definitions[name]
        assert (one.timetable.every_ms, one.payload["args"]) == (minutes * 60_000, [currency])
        assert one.task == f"{path}fetch_rates"
        run_recurring(name)
    run_recurring(nightly)
    if "celery" not in page:
        assert (definitions["rates-eur"].topic, definitions["rates-eur"].priority) == ("jobs.mail", 10)
    deliver_all()
    assert list(JobResult.objects.values_list("status", flat=True)) == ["SUCCESSFUL"] * 3


def test_a_chain(module):
    found = module("howto/migrate-celery.md", "(result,) = enqueue_chain(")
    deliver_all()
    found.result.refresh()
    assert found.result.return_value == 2
    assert found.result.task.func is found.total.func


def test_progress_and_cancelling(module):
    found = module("howto/migrate-celery.md", "progress_of")
    result = found.export.enqueue(3)
    assert progress_of(result) is None
    deliver_all()
    result.refresh()
    assert (result.return_value, progress_of(result).message) == (3, "row 2")
    waits = found.export.enqueue(3)
    found.stop_export(waits.id)
    waits.refresh()
    assert waits.status == "FAILED"
    cancel_job(waits)
    with pytest.raises(ValueError, match="failed"):
        _ = waits.return_value


def test_old_tasks_enqueue_jobs(module, monkeypatch):
    """Callers that still use Celery's tasks reach the same jobs and topics."""
    celery = types.SimpleNamespace(shared_task=lambda name: lambda function: function)
    monkeypatch.setitem(sys.modules, "celery", celery)
    jobs = module("howto/migrate-celery.md", "charge.enqueue(order.pk)")
    (old,) = [text for _, text in blocks(DOCS / "howto/migrate-celery.md", "python") if "charge_with_celery" in text]
    more = "from celery import shared_task\nfrom django_mysqlqueue import publish\n"
    exec(more + old, jobs.__dict__)  # noqa: S102
    jobs.charge_with_celery(7)
    jobs.send_confirmation_with_celery(7)
    assert set(OutboxMessage.objects.values_list("topic", flat=True)) == {"jobs.default", "orders"}
    deliver_all()
    assert JobResult.objects.get().status == "SUCCESSFUL"


@pytest.mark.parametrize("page", GUIDES)
def test_settings_of_the_backend(settings, page):
    from django_mysqlqueue.tasks.backend import MySQLQueueBackend
    from django_mysqlqueue.tasks.framework import task_backends

    found: dict[str, Any] = {}
    exec(_block(page, "MySQLQueueBackend"), found)  # noqa: S102
    settings.TASKS = found["TASKS"]
    backend = task_backends["default"]
    assert isinstance(backend, MySQLQueueBackend)
    assert not [one for one in backend.check() if one.level >= 40]


def test_a_unique_task_and_its_way_into_a_chain(module):
    found = module("howto/migrate-celery.md", "unique_by=")
    first = found.import_statements.enqueue("acme")
    assert found.import_statements.enqueue("acme", verbose=True).id == first.id
    assert found.import_statements.enqueue("other").id != first.id
    found = module("howto/migrate-celery.md", "import_statements_in_chain")
    results = [result for stage in found.import_and_report("acme") for result in stage]
    found.download.enqueue("acme")
    deliver_all()
    for result in results:
        result.refresh()
    assert [result.return_value for result in results] == ["imported acme", "reported acme"]
    assert JobResult.objects.filter(task_path__endswith=".import_statements", status="SUCCESSFUL").count() == 3


def test_only_what_asks_for_another_attempt_gets_one(module):
    """As with Celery's ``self.retry()``."""
    found = module("howto/migrate-celery.md", "retry_on=RetryLater")
    answers = [types.SimpleNamespace(status=429, retry_after=None), types.SimpleNamespace(status=200)]
    found.call_the_api, found.store = lambda account: answers.pop(0), lambda response: response.status
    result = found.fetch_wallet.enqueue("acme")
    deliver_all(raise_exceptions=False)
    result.refresh()
    assert (result.status, result.return_value, len(result.errors)) == ("SUCCESSFUL", 200, 1)
    found.call_the_api = lambda account: 1 / 0
    result = found.fetch_wallet.enqueue("acme")
    deliver_all(raise_exceptions=False)
    result.refresh()
    assert (result.status, len(result.errors)) == ("FAILED", 1)


def test_the_delays_of_celery(module):
    page = (DOCS / "howto/migrate-celery.md").read_text()
    (text,) = set(re.findall(r"\| `@job\(max_attempts=4, backoff=(\{.*?\})\)` \|", page))
    given = backoff(ast.literal_eval(text))
    assert [given.delay(attempt) for attempt in (1, 2, 3)] == [180, 180, 180]


def test_a_long_job_continues_in_another_process(module):
    found = module("howto/migrate-celery.md", "context.stopping")
    left = [1, 2]
    found.outdated_members = lambda corporation: list(left)
    found.update = left.remove
    stops = job_context(found.update_members, stopping=True)
    found.update_members.call(stops, "acme")
    assert left == [1, 2]
    assert [reason for _, reason in stops.retries] == ["the process stops"]
    found.update_members.call(job_context(found.update_members), "acme")
    assert left == []
    assert job_queues.time_limits[f"{found.__name__}.update_members"] == 1800
