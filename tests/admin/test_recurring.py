"""The dashboard's page of recurring schedules, and its operations."""

from __future__ import annotations

import html
import re

import pytest
from django.contrib.admin.models import LogEntry

from django_mysqlqueue.models import JobResult, Operation, OutboxMessage, Schedule
from django_mysqlqueue.operations import run_recurring
from django_mysqlqueue.testing import deliver_all
from tests.support import job_worlds, schedule_worlds
from tests.support.commands import run
from tests.support.dashboard import HOSTILE, ROOT, confirm, page
from tests.support.harness import USING
from tests.support.job_pages import errors
from tests.support.schedule_worlds import NAME, at_night, of_task, of_topic, registered, row, tick

pytestmark = pytest.mark.any_engine


@pytest.fixture(autouse=True)
def _backend(no_handlers, settings):
    settings.TASKS = job_worlds.TASKS


def shown(client, **query):
    return client.get(f"{ROOT}recurring/", query).context["rows"]


def test_schedules_with_their_next_and_last_runs(client):
    assert "There are no recurring schedules." in page(client, "recurring")
    registered(of_task(overlap="skip"), age=130)
    registered(at_night(of_topic()), name="nightly")
    tick(USING)
    deliver_all()
    run_recurring(NAME, actor="ada")
    JobResult.objects.filter(status="READY").update(
        status="FAILED",
        started_at=1000,
        finished_at=3500,
        errors=errors("no file", exception="shop.Late"),
    )
    nightly, job = shown(client)
    assert (nightly.name, nightly.runs, nightly.last_run) == ("nightly", (), 0)
    assert [(one.status, one.by_hand) for one in job.runs] == [("FAILED", True), ("SUCCESSFUL", False)]
    text = page(client, "recurring")
    links = re.findall(r'href="([^"]+/job/[^"]+)"', text)
    assert [client.get(html.unescape(link)).context["job"].id for link in links] == [one.id for one in job.runs]
    assert len(re.findall(r"<bdi class=\"mq-time\"[^>]*>in \d", text)) == 2
    for part in (
        "0 3 * * *",
        "UTC",
        "every 1 min",
        "tests.app.jobs.add",
        "ValueError: no file",
        "by hand",
        "2.5 s",
    ):
        assert part in text
    assert "Traceback" not in text
    time = r'<bdi class="mq-time">[^<]+<span dir="ltr">[^<]+</span></bdi>'
    assert re.search(rf'<a href="[^"]+/job/[^"]+">{time} <span class="mq-tag mq-bad">failed</span></a>', text)
    assert re.search(r'<span class="mq-tag mq-bad">failed</span></a> <bdi>2\.5 s</bdi>', text)
    assert re.search(r'<span class="mq-tag mq-ok">successful</span></a> <bdi>[\d.]+ \w+</bdi>', text)
    assert (text.count(">active</span>"), text.count(">failing</span>")) == (1, 1)
    assert [one.name for one in shown(client, topic="t")] == ["nightly"]


def test_states(client):
    registered(of_topic(), age=200, name="late")
    registered(of_topic(), name="paused")
    registered(of_topic(), name="gone")
    registered(of_topic(), name="later-release")
    Schedule.objects.filter(name="paused").update(paused_at=5)
    Schedule.objects.filter(name="gone").update(seen_at=5, skipped=3)
    Schedule.objects.filter(name="later-release").update(definition=f'{{"{HOSTILE[:8]}": 1}}')
    text = page(client, "recurring")
    for part in ("overdue for 2 min 20 s", ">paused</span>", "not in the code of any running process", "cannot run"):
        assert part in text
    assert "3 ticks skipped" in text
    assert text.count("/do/run-recurring/") == 4
    assert text.count("/do/delete-recurring/") == 1
    assert "The recurring schedule late has never run." in page(client)
    assert f'href="{ROOT}recurring/"' in page(client)


def test_one_whose_runs_fail_is_not_active(client):
    registered(of_task(), age=70)
    done = tick(USING).published
    JobResult.objects.filter(id__in=done).update(status="FAILED", finished_at=5)
    schedule_worlds.unfinished(row().last_tick + schedule_worlds.MINUTE)
    text = page(client, "recurring")
    assert '<span class="mq-tag mq-bad">failing</span>' in text
    assert ">active</span>" not in text
    JobResult.objects.filter(id__in=done).update(status="SUCCESSFUL")
    text = page(client, "recurring")
    assert (">failing</span>" in text, ">active</span>" in text) == (False, True)


def test_one_that_is_not_registered_yet(client, settings):
    settings.MYSQLQUEUE = {"RECURRING": {"declared": {"EVERY": 60, "TOPIC": "t", "PAYLOAD": 1}}}
    registered(of_topic(), name="there")
    text = page(client, "recurring")
    assert [one.name for one in shown(client)] == ["declared", "there"]
    assert text.count("not registered yet") == 1
    assert "not in the code of any running process" not in text
    assert text.count("/do/run-recurring/") == 1
    assert [one.name for one in shown(client, topic="t")] == ["declared", "there"]


def test_a_schedule_is_run_paused_resumed_and_deleted(client):
    last = registered(of_topic(), age=200)
    (told,) = confirm(client, "run-recurring", schedule=NAME, reason="now, please")
    assert told == f"A message is published: {OutboxMessage.objects.get().message_id}."
    assert row().last_tick == last
    assert confirm(client, "pause-recurring", schedule=NAME) == [f"The schedule {NAME} is paused."]
    text = page(client, "do/pause-recurring", schedule=NAME)
    assert f"The schedule {NAME} is already paused." in text
    (told,) = confirm(client, "resume-recurring", schedule=NAME)
    assert told.startswith(f"The schedule {NAME} is resumed. Its next run is at 20")
    assert "declares the schedule 's': remove it from the code first" in page(
        client, "do/delete-recurring", schedule=NAME
    )
    Schedule.objects.update(seen_at=5)
    assert confirm(client, "delete-recurring", schedule=NAME) == [f"The schedule {NAME} is deleted."]
    assert not Schedule.objects.exists()
    recorded = Operation.objects.values_list("action", "reason", "detail")
    assert list(recorded) == [
        ("run recurring", "now, please", NAME),
        ("pause recurring", "", NAME),
        ("resume recurring", "", NAME),
        ("delete recurring", "", NAME),
    ]
    assert set(LogEntry.objects.values_list("object_repr", flat=True)) == {NAME}
    assert "There is no schedule 's'." in page(client, "do/run-recurring", schedule=NAME)


def star(text, *, topic, kind):
    return text.replace("secret", "***") if (topic, kind) == ("jobs.default", "error") else text


def test_the_text_of_an_error_is_redacted_and_needs_the_permission_to_see_payloads(make_client, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "REDACT": f"{__name__}.star"}
    registered(of_task(), age=130)
    run_recurring(NAME, actor="ada")
    JobResult.objects.update(status="FAILED", errors=errors("a secret", exception="shop.Late"))
    text = page(make_client("view_dashboard", "see_payloads"), "recurring")
    assert ("ValueError: a ***" in text, "secret" in text, "shop.Late" in text) == (True, False, False)
    text = page(make_client("view_dashboard"), "recurring")
    assert ("ValueError" in text, "secret" in text, "shop.Late" in text) == (False, False, True)
    listed = run("queuerecurring") + run("queuerecurring", "--format", "json")
    assert ("failed (ValueError: a ***)" in listed, "secret" in listed) == (True, False)


def test_those_who_may_only_look_get_no_buttons(make_client):
    registered(of_topic())
    client = make_client("view_dashboard")
    assert "/do/" not in page(client, "recurring")
    assert client.get(f"{ROOT}do/run-recurring/", {"schedule": NAME}).status_code == 403
    assert schedule_worlds.ids() == []
