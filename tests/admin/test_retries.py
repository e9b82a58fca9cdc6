"""The dashboard's operations on waiting retries: now, at another time, by error."""

from __future__ import annotations

import datetime
import re
from html import unescape

import pytest
from django.utils import timezone

from django_mysqlqueue.models import DeliveryState, JobResult, Operation
from django_mysqlqueue.options.backoff import Backoff
from tests.app import jobs
from tests.support import job_worlds
from tests.support.dashboard import ROOT, confirm, page
from tests.support.harness import USING, Sub, handler
from tests.support.internals import Session, registry
from tests.support.scenarios import log

pytestmark = pytest.mark.any_engine

LATER = "2090-01-01T12:00:00"
TOLD = "2090-01-01 12:00:00"
GROUP = {"group": "g", "topic": "t"}


def fail(delivery):
    raise ValueError(f"no {delivery.payload}")


def due_at(offset):
    return DeliveryState.objects.get(message_offset=offset).invisible_until


def at(text):
    return int(timezone.make_aware(datetime.datetime.fromisoformat(text)).timestamp() * 1000)


@pytest.fixture
def offsets(db):
    offsets = log(3)
    Sub(handler(function=fail, max_attempts=9, backoff=Backoff(initial=600, jitter=0))).settle()
    return offsets


def test_all_waiting_retries_are_moved(client, offsets):
    text = client.get(f"{ROOT}do/retry/", {**GROUP, "asked": "yes", "time": LATER}).content.decode()
    assert f"Messages of the group g/t that will be retried at {TOLD}" in text
    assert "on_failure=" in unescape(text)
    (told,) = confirm(client, "retry", **GROUP, time=LATER)
    assert re.fullmatch(rf"Messages of the group g/t that will be retried at {TOLD}-0600: 3\.", told)
    assert {due_at(offset) for offset in offsets} == {at(LATER)}


@pytest.mark.parametrize("more", [{}, {"time": LATER}])
def test_only_those_with_the_error_are_changed(client, offsets, more):
    before = [due_at(offset) for offset in offsets]
    (told,) = confirm(client, "retry", **GROUP, error="no 1", **more)
    assert told.endswith(": 1.")
    assert [due_at(offset) != old for offset, old in zip(offsets, before, strict=True)] == [False, True, False]


def test_who_may_not_see_errors_may_not_search_them(make_client, offsets, settings):
    settings.MYSQLQUEUE = {"REDACT": "tests.support.dead_letter_pages.star"}
    client = make_client("view_dashboard", "operate_dashboard")
    values = {**GROUP, "asked": "yes", "time": LATER}
    assert client.post(f"{ROOT}do/retry/", {**values, "error": "no"}).status_code == 403
    assert client.post(f"{ROOT}do/retry/", values).status_code == 200


def test_one_is_moved_from_its_page(client, offsets):
    text = client.get(f"{ROOT}message/", {"offset": offsets[1]}).content.decode()
    (address,) = re.findall(r'href="([^"]*do/retry-selected/[^"]*)"', text)
    assert f"row={offsets[1]}" in address
    asked = client.get(unescape(address)).content.decode()
    assert 'name="time"' in asked
    confirm(client, "retry-selected", **GROUP, row=[offsets[1]], time=LATER)
    assert [due_at(offset) == at(LATER) for offset in offsets] == [False, True, False]
    text = page(client, "message", offset=offsets[1])
    assert "2090-01-01 12:00:00" in text


def test_one_whose_time_was_moved_is_started_now(client, offsets):
    confirm(client, "retry-selected", **GROUP, row=[offsets[1]], time=LATER)
    (told,) = confirm(client, "retry-selected", **GROUP, row=[offsets[1]])
    assert told == "Messages of the group g/t that are due now: 1."
    assert due_at(offsets[1]) == 0


def test_a_time_in_the_past_is_now(client, offsets):
    text = client.post(
        f"{ROOT}do/retry-selected/", {**GROUP, "row": offsets[:1], "asked": "yes", "time": "2020-01-01T00:00:00"}
    ).content.decode()
    assert "This time is in the past: the messages will be retried now." in text
    confirm(client, "retry-selected", **GROUP, row=offsets[:1], time="2020-01-01T00:00:00")
    assert due_at(offsets[0]) == 0
    assert due_at(offsets[1]) > Session(USING).now()


def test_a_selected_one_that_does_not_wait_any_more_is_passed_over(client, offsets):
    DeliveryState.objects.filter(message_offset=offsets[0]).update(acked=True)
    (told,) = confirm(client, "retry-selected", **GROUP, row=offsets[:2], time=LATER)
    assert told.endswith(": 1.")
    assert due_at(offsets[1]) == at(LATER)


@pytest.mark.parametrize("more", [{}, {"time": LATER}])
def test_the_jobs_of_a_task_alone(client, no_handlers, settings, clock, more):
    clock.stop()
    settings.TASKS = job_worlds.TASKS
    jobs.waits[:] = [50, 7200]
    made = [jobs.go_on.enqueue(1).id, jobs.ask_later.enqueue(2).id]
    Sub(registry.handlers()[job_worlds.JOBS]).settle()
    before = dict(JobResult.objects.values_list("id", "retry_at"))
    values = {**job_worlds.JOBS._asdict(), **more}
    text = page(client, "do/retry", **values)
    assert 'name="task"' in text
    assert 'name="key"' not in text, "it is their task"
    (told,) = confirm(client, "retry", **values, task="tests.app.jobs.go_on")
    assert told.endswith(": 1.")
    changed = [JobResult.objects.get(id=one).retry_at != before[one] for one in made]
    assert changed == [True, False]


@pytest.mark.parametrize("more", [{}, {"time": LATER}])
def test_the_messages_of_a_key_alone(client, offsets, more):
    before = [due_at(offset) for offset in offsets]
    text = page(client, "do/retry", **GROUP, **more)
    assert 'name="key"' in text
    assert 'name="task"' not in text, "only jobs have tasks"
    (told,) = confirm(client, "retry", **GROUP, key="b", **more)
    assert told.endswith(": 1.")
    assert [due_at(offset) != old for offset, old in zip(offsets, before, strict=True)] == [False, True, False]
    assert "key 'b'" in Operation.objects.get().detail
