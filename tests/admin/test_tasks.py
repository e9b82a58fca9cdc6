"""Tasks on the dashboard: their page, and their names on other pages."""

from __future__ import annotations

from html import unescape

import pytest
from django.test.utils import override_settings

from django_mysqlqueue import publish
from django_mysqlqueue.admin.operations import dead_letters
from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.inspection import list_dead_letters, list_errors
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.models import JobResult, QueueMessage
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.delivery_limits import parse_rate
from django_mysqlqueue.tasks.handlers import job_handlers
from tests.app import jobs
from tests.support import job_worlds
from tests.support.dashboard import HOSTILE, ROOT, confirm, life, page
from tests.support.dead_letter_pages import listed, offsets
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import Session
from tests.support.job_pages import ended, errors, job

ADD, FAIL, PLAIN = (f"tests.app.jobs.{name}" for name in ("add", "fail", "plain"))
DLQ = "jobs.default_dlq"


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    jobs.log.clear()


def now_ms():
    return Session(USING).now()


def failed(*tasks):
    """Jobs of tasks that fail, and their dead letters."""
    made = [task.enqueue(number) for number, task in enumerate(tasks)]
    sub = Sub(*job_handlers().values())
    sub.settle()
    sub.leave()
    sequence()
    return [one.id for one in made]


def rows(client, name, **query):
    answer = client.get(f"{ROOT}{name}/", query)
    assert answer.status_code == 200, answer.content.decode()
    return answer.context["rows"]


def kinds(client, **query):
    answer = client.get(f"{ROOT}deadletters/", query)
    assert answer.status_code == 200, answer.content.decode()
    return answer.context["kinds"].rows


# -- their names on other pages -----------------------------------------------


def test_what_is_in_flight_names_the_task(client):
    made = [jobs.add.enqueue(1), jobs.plain.enqueue(2)]
    sub = Sub(*job_handlers().values()).step(times=3)
    assert sub.inbox.waiting(job_worlds.JOBS)[0] == 2
    assert sorted(row.task for row in rows(client, "inflight")) == [ADD, PLAIN]
    assert [row.task for row in rows(client, "inflight", task=PLAIN)] == [PLAIN]
    assert rows(client, "inflight", task="add") == []
    text = page(client, "inflight")
    assert f'task={ADD}"><bdi dir="ltr">add</bdi>' in text
    assert f"jobs/?task={ADD}" in text
    JobResult.objects.filter(id=made[0].id).delete()
    assert sorted(row.task for row in rows(client, "inflight")) == [ADD, PLAIN], "its result is gone"


def test_without_jobs_nothing_in_flight_has_a_task(client):
    publish("t", 1)
    Sub(handler()).step()
    assert ">task</th>" not in page(client, "inflight")


def test_dead_letters_name_the_task_and_are_found_by_it(client):
    failed(jobs.fail, jobs.fail, jobs.echo)
    found = listed(client, topic=DLQ)
    assert sorted(row.task for row, _ in found["rows"]) == ["tests.app.jobs.echo", FAIL, FAIL]
    of_task = listed(client, topic=DLQ, task=FAIL)
    assert [row.task for row, _ in of_task["rows"]] == [FAIL, FAIL]
    assert str(of_task["found"].count) == "2"
    assert offsets(listed(client, topic=DLQ, task="fail")) == []
    summaries = list_dead_letters("jobs.default", key="tests.app.jobs.echo").dead_letters
    assert [one.task for one in summaries] == ["tests.app.jobs.echo"]
    text = page(client, "deadletters", topic=DLQ, task=FAIL)
    assert f'task={FAIL}"><bdi dir="ltr">fail</bdi>' in text
    assert f'<bdi dir="ltr">{FAIL}</bdi>' in page(client, "deadletter", offset=offsets(of_task)[0])


@pytest.mark.parametrize(("name", "more"), [("redrive", {}), ("discard", {"reason": "no use"})])
def test_all_dead_letters_of_a_task_and_no_others(client, name, more):
    failed(jobs.fail, jobs.echo, jobs.fail)
    upto = max(offsets(listed(client, topic=DLQ)))
    confirm(client, name, topic=DLQ, task=FAIL, upto=upto, **more)
    sequence()
    assert [row.task for row, _ in listed(client, topic=DLQ)["rows"]] == ["tests.app.jobs.echo"]


def test_the_command_for_the_rest_names_the_task(client, monkeypatch):
    failed(jobs.fail, jobs.echo, jobs.fail)
    monkeypatch.setattr(dead_letters.IdsField, "most", 1)
    upto = max(offsets(listed(client, topic=DLQ)))
    text = unescape(page(client, "do/redrive", topic=DLQ, task=FAIL, upto=upto))
    assert f"manage.py queueredrive {DLQ} --task {FAIL}" in text


def test_errors_name_the_tasks(client):
    failed(jobs.fail, jobs.echo, jobs.fail)
    (no_number,) = [kind for kind in list_errors().kinds if kind.tasks == (FAIL,)]
    assert no_number.dead_letters.value == 2
    assert {row.kind.tasks for row in kinds(client)} == {(FAIL,), ("tests.app.jobs.echo",)}
    assert [row.kind.tasks for row in kinds(client, task=FAIL)] == [(FAIL,)]
    text = page(client, "deadletters")
    assert '<bdi dir="ltr">fail</bdi>' in text
    assert f'<option value="{FAIL}">fail</option>' in text


def test_errors_of_several_tasks_with_the_same_text(client):
    """They are one kind, with the task of most messages first."""
    failed(jobs.fail, jobs.fail, jobs.fail_too)
    (kind,) = list_errors().kinds
    assert kind.tasks == (FAIL, "tests.app.jobs.fail_too")


# -- the page -----------------------------------------------------------------


def test_the_page_of_tasks(client):
    now = now_ms()
    for number in range(4):
        ended(f"j{number}", seconds=number + 1, enqueued_at=now - 60_000, task_path="shop.tasks.mail")
    text = errors(HOSTILE, "end")
    ended("f", "FAILED", seconds=1, enqueued_at=now - 7_200_000, task_path="shop.tasks.mail", errors=text)
    job("w", task_path="shop.tasks.charge", enqueued_at=now)
    charge, mail = rows(client, "tasks")
    assert (charge.task.task, charge.task.backlog.waiting.value) == ("shop.tasks.charge", 1)
    assert (mail.task.hour.enqueued.value, mail.task.day.enqueued.value) == (4, 5)
    assert (mail.task.hour.failed.value, mail.task.day.failed.value) == (0, 1)
    assert mail.task.hour.ran == (2.0, 4.0)
    assert mail.task.hour.waited == (1.0, 1.0)
    assert mail.error == "ValueError: end"
    shown = page(client, "tasks")
    assert '<bdi dir="ltr">shop.tasks.mail</bdi>' in shown
    assert "2 s, 4 s" in shown
    assert f'{ROOT}tasks/">Jobs' in page(client)


def test_the_rate_of_a_task_is_shown(client, monkeypatch):
    monkeypatch.setitem(job_queues.rates, "shop.tasks.mail", parse_rate("10/m"))
    job("w")
    (row,) = rows(client, "tasks")
    assert row.rate == "10/m"


def test_a_task_is_paused_and_resumed(client, make_client):
    sub = Sub(*job_handlers().values())
    jobs.add.enqueue(1)
    queue = {"group": "jobs", "topic": "jobs.default", "task": ADD}
    shown = page(client, "tasks")
    assert f"{ROOT}do/pause-task/?group=jobs&topic=jobs.default&task={ADD}&next=" in shown
    assert 'value="Pause task"' in page(client, "do/pause-task", **queue, asked="yes")
    confirm(client, "pause-task", **queue)
    sequence()
    sub.settle()
    assert jobs.log == []
    (row,) = rows(client, "tasks")
    assert row.task.paused == ("jobs.default",)
    assert f"Resume {ADD}" in page(client, "tasks")
    assert "is paused in jobs.default; 1 message is waiting." in page(client)
    offset = QueueMessage.objects.get().offset
    assert life(client, offset, "jobs")[1][-1].startswith("Its task is paused")
    assert f"Resume {ADD}" not in page(make_client("view_dashboard"), "tasks")
    confirm(client, "resume-task", **queue)
    sub.step()
    sub.settle()
    assert jobs.log


def test_more_tasks_than_are_listed(client, monkeypatch):
    monkeypatch.setattr(Page, "bounds", Bounds(job_tasks=2))
    for number in range(3):
        job(f"w{number}", task_path=f"shop.tasks.t{number}")
    assert len(rows(client, "tasks")) == 2
    assert "There are jobs of more than 2 tasks." in page(client, "tasks")


def test_no_jobs(client):
    assert "There are no jobs." in page(client, "tasks")
    with override_settings(TASKS={}):
        assert f"{ROOT}tasks/" not in page(client)


def test_texts_of_errors_need_the_permission(make_client):
    ended("f", "FAILED", enqueued_at=now_ms(), errors=errors("secret"))
    assert "secret" in page(make_client("view_dashboard", "see_payloads"), "tasks")
    text = page(make_client("view_dashboard"), "tasks")
    assert "secret" not in text
    assert "(errors of jobs are hidden)" in text
