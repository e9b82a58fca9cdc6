"""The dashboard's pages of scheduled messages."""

from __future__ import annotations

import datetime
import re

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone

from django_mysqlqueue import publish
from django_mysqlqueue.inspection import dead_letters as letters
from django_mysqlqueue.models import Operation, OutboxMessage
from tests.app import jobs
from tests.support import job_worlds
from tests.support.dashboard import HOSTILE, ROOT, confirm, page
from tests.support.dead_letter_pages import ask, bound, redriven, star
from tests.support.harness import USING
from tests.support.internals import DeadLetterFilter, Session
from tests.support.scenarios import dead_letters

pytestmark = pytest.mark.any_engine


def schedule(number, *, topic="t", delay=3600, **options):
    for place in range(number):
        publish(topic, {"place": place}, delay=delay + place, **options)
    return list(
        OutboxMessage.objects.filter(topic=topic).order_by("deliver_at", "outbox_id").values_list("pk", flat=True)
    )


def ids(context):
    return [row.message.outbox_id for row in context["rows"]]


def waiting(client, **query):
    return client.get(f"{ROOT}scheduled/", query).context


def test_scheduled_messages_by_time_in_pages(client, monkeypatch):
    monkeypatch.setattr("django_mysqlqueue.admin.pages.scheduled.PAGE_ROWS", 2)
    late = schedule(3, delay=9000)
    early = schedule(2, topic="u", delay=60)
    publish("t", "at once")
    seen, after = [], ""
    while after is not None:
        context = waiting(client, after=after)
        seen += ids(context)
        after = context["next_place"]
    assert seen == [*early, *late]
    assert [(name, str(number)) for name, number in context["topics"]] == [("t", "3"), ("u", "2")]
    context = waiting(client, topic="t")
    assert (ids(context), context["whole"]) == (late[:2], True)
    assert ids(waiting(client, topic="t", after=context["next_place"])) == late[2:]
    assert not ids(waiting(client, topic="none"))
    row = waiting(client, topic="t")["rows"][0]
    assert re.search(r">in 2 h [^<]*<span", page(client, "scheduled", topic="t"))
    assert row.message.size == OutboxMessage.objects.get(pk=late[0]).size


def test_of_one_topic_a_look_goes_so_far_and_the_next_goes_on(client, monkeypatch):
    bound(monkeypatch, scheduled=3)
    schedule(4, topic="u", delay=60)
    ours = schedule(1)
    context = waiting(client, topic="t")
    assert (ids(context), context["whole"]) == ([], False)
    assert context["next_place"]
    assert "were searched" in page(client, "scheduled", topic="t")
    context = waiting(client, topic="t", after=context["next_place"])
    assert (ids(context), context["whole"], context["next_place"]) == (ours, True, None)


@pytest.mark.parametrize("after", ["x", "1", "1_", "1_2", "1_2_", "-1_0_1", "1_0_²", "1_1000_1"])
def test_a_place_in_the_list_that_is_none(client, after):
    assert f"after='{after}'" in page(client, "scheduled", 400, after=after)


def test_payloads_of_scheduled_messages(make_client, settings):
    publish("t", {"card": 4711, "x": HOSTILE}, delay=60, metadata={"m": HOSTILE})
    publish("t", b"y" * 50_000, delay=61)
    client = make_client("view_dashboard", "see_payloads")
    raw = client.get(f"{ROOT}scheduled/").content.decode()
    assert "<script>alert" not in raw
    assert "4711" in raw
    assert "50,000 bytes in total" in raw
    assert raw.count("yyyyyyyyyy") == 2000
    settings.MYSQLQUEUE = {"REDACT": star}
    text = page(client, "scheduled")
    assert "4711" not in text
    assert "****" in text
    blind = make_client("view_dashboard", "operate_dashboard")
    settings.MYSQLQUEUE = {}
    assert "4711" not in page(blind, "scheduled")
    assert "<details" not in page(blind, "scheduled")


def test_cancel_the_selected(client):
    first, second, third = schedule(3)
    text = ask(client, "cancel", row=[str(first)])
    assert "Scheduled messages that will be deleted, so that no group receives them: 1." in text
    told = confirm(client, "cancel", row=[str(first), str(third)], reason="twice")
    assert told == ["Scheduled messages cancelled: 2."]
    assert ids(waiting(client)) == [second]
    operation = Operation.objects.get()
    assert (operation.action, operation.changed, operation.reason) == ("cancel", 2, "twice")
    assert LogEntry.objects.get().object_repr == "2 scheduled messages"


def test_deliver_the_selected_now(client):
    first, _second = schedule(2)
    assert confirm(client, "deliver-now", row=[str(first)]) == ["Scheduled messages that are due now: 1."]
    assert redriven() == [{"place": 0}]


def test_move_the_selected(client, settings):
    settings.TIME_ZONE = "Asia/Tokyo"
    first, second = schedule(2)
    told = confirm(client, "move", row=[str(first)], time="2040-01-02T09:00")
    assert told == ["Messages rescheduled to 2040-01-02 09:00:00+0900: 1."]
    assert ids(waiting(client)) == [second, first]
    at = datetime.datetime(2040, 1, 2, tzinfo=datetime.UTC).timestamp() * 1000
    assert OutboxMessage.objects.get(pk=first).deliver_at == at
    assert "This time is in the past: the messages will be delivered now." in ask(
        client, "move", row=[str(second)], time="2020-01-02T09:00"
    )
    for time, says in (("", "This field is required."), ("soon", "Enter a valid date/time.")):
        text = ask(client, "move", row=[str(second)], time=time)
        assert says in text
        assert 'name="confirmed"' not in text


def test_what_came_due_meanwhile_is_said(client):
    first, second = schedule(2)
    OutboxMessage.objects.filter(pk=first).update(deliver_at=1000)
    (told,) = confirm(client, "cancel", row=[str(first), str(second)])
    left = "Messages not changed, because they came due or another transaction is changing them: 1."
    assert told == f"Scheduled messages cancelled: 1. {left}"
    for name in ("cancel", "deliver-now"):
        text = ask(client, name, row=[str(first)])
        assert "Messages that will not be changed, because they are no longer scheduled: 1." in text
        assert 'name="confirmed"' not in text
    row = waiting(client)["rows"][0]
    assert row.message.outbox_id == first
    assert re.search(r">[^<]* ago<span[^>]*> 19(69|70)-", page(client, "scheduled"))


def test_a_look_at_named_letters_sees_those_alone(db):
    dead = dead_letters(3)
    session = Session(USING)
    found = letters.look(session, DeadLetterFilter("t_dlq", offsets=(dead[0], dead[2], 10**9)))
    assert found.offsets == (dead[2], dead[0])
    assert letters.look(session, DeadLetterFilter("other_dlq", offsets=tuple(dead))).offsets == ()
    assert letters.look(session, DeadLetterFilter("t_dlq", upto=dead[1])).offsets == (dead[1], dead[0])


def test_a_message_is_found_by_its_id_and_delivered_now(client):
    schedule(2)
    schedule(1, topic="u", id="mine")
    (mine,) = schedule(1, id="mine", delay=9000)[-1:]
    context = waiting(client, topic="t", id="mine")
    assert ids(context) == [mine]
    text = page(client, "scheduled", topic="t", id="mine")
    assert f'name="row" checked value="{mine}"' in text
    assert " checked " not in page(client, "scheduled", topic="t")
    confirm(client, "deliver-now", row=[mine])
    assert OutboxMessage.objects.get(pk=mine).deliver_at == 1
    text = page(client, "scheduled", topic="t", id="mine")
    assert "No message of t with this id is scheduled" in text
    assert "Choose the topic of the message, too." in client.get(f"{ROOT}scheduled/", {"id": "mine"}).content.decode()


def test_the_search_for_an_id_in_the_log_leads_to_scheduled_messages(client):
    schedule(1, id="mine")
    text = page(client, "messages", topic="t", id="mine")
    assert "scheduled/?topic=t&id=mine" in text


def test_jobs_have_their_task_and_are_filtered_by_it(client, settings):
    settings.TASKS = job_worlds.TASKS
    later = timezone.now() + datetime.timedelta(days=1)
    made = [task.using(run_after=later).enqueue(1).id for task in (jobs.fail, jobs.fail_too)]
    publish("t", 1, delay=60)
    context = waiting(client)
    assert sorted(row.message.task for row in context["rows"]) == ["", "tests.app.jobs.fail", "tests.app.jobs.fail_too"]
    assert '<bdi dir="ltr">fail_too</bdi>' in page(client, "scheduled")
    rows = waiting(client, task="tests.app.jobs.fail")["rows"]
    assert [row.message.message_id for row in rows] == made[:1]
    assert "No jobs of tests.none are scheduled" in page(client, "scheduled", task="tests.none")
    publish("t", 1, delay=60)
    assert '<th scope="col">task</th>' not in page(client, "scheduled", topic="t")
