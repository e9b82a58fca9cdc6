"""The dashboard survives what is stored and what is sent: payloads, numbers and selections made to break it."""

from __future__ import annotations

import json
import re
import unicodedata
from html import unescape

import pytest
from django.core.management import call_command
from django.db import models
from django.utils import timezone

from django_mysqlqueue import operations, publish
from django_mysqlqueue.admin.pages import PAGES
from django_mysqlqueue.models import OutboxMessage, PartitionLease, QueueMessage, SubscriberHeartbeat
from django_mysqlqueue.options.backoff import Backoff
from tests.conftest import QUEUE_MODELS
from tests.support import job_worlds, schedule_worlds
from tests.support.dashboard import ROOT, confirm, page
from tests.support.factories import QuarantinedMessageFactory
from tests.support.handlers import fail
from tests.support.harness import Sub, handler, sequence
from tests.support.internals import HIDDEN
from tests.support.job_pages import errors, job
from tests.support.scenarios import log

pytestmark = pytest.mark.any_engine

LIMIT = 400_000
"""Characters that a page has at most here."""


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        pytest.param(b'{"half": "\\ud800"}', '"half": "\\ud800"', id="half a surrogate pair"),
        pytest.param(b"[" * 19_000, "[[[[", id="not closed, nested deeper than Python goes"),
        pytest.param(b"[" * 9000 + b"]" * 9000, "[[[[", id="162 million characters in lines"),
        pytest.param(b"[" * 990 + b"1," * 9000 + b"1" + b"]" * 990, "1,1,1", id="20 million characters in lines"),
        pytest.param(b"1" * 6000, "1111", id="a number of 6,000 digits"),
        pytest.param(b"NaN", "NaN", id="no number"),
        pytest.param(b"a\x00\xff<b>", "a\\u0000\\xff<b>", id="bytes"),
    ],
)
def test_a_payload_that_is_hard_to_show(client, payload, shown):
    def everywhere():
        for name, query in places:
            text = page(client, name, **query)
            assert shown in text, name
            assert len(text) < LIMIT, name

    def publish_raw(**options):
        publish("t", 1, key="a", **options)
        OutboxMessage.objects.update(payload=payload, metadata={})

    publish_raw(delay=3600)
    places = [("scheduled", {})]
    everywhere()
    OutboxMessage.objects.all().delete()
    publish_raw()
    sequence()
    sub = Sub(handler(function=fail, max_attempts=1))
    sub.settle()
    sub.leave()
    sequence()
    original, letter = QueueMessage.objects.order_by("offset").values_list("offset", flat=True)
    places = [("message", {"offset": original}), ("message", {"offset": letter}), ("deadletter", {"offset": letter})]
    everywhere()
    assert len(client.get(f"{ROOT}do/edit/", {"offset": letter}).content) < LIMIT


@pytest.mark.parametrize(
    ("operation", "row"),
    [
        ("retry-selected", "Infinity"),
        ("retry-selected", "1e400"),
        ("retry-selected", "1.5"),
        ("retry-selected", "0"),
        ("retry-selected", str(2**63)),
        ("retry-selected", "true"),
        ("retry-selected", '["a", 1]'),
        ("retry-selected", "[" * 20_000),
        ("dead-letter", "true"),
        ("dead-letter", str(2**63)),
        ("dead-letter", '["a", 1]'),
        ("release", '"\\ud800"'),
        ("release", "7"),
        ("cancel", "true"),
        ("cancel", str(2**63)),
    ],
)
def test_a_selection_that_no_page_sends_is_refused(client, operation, row):
    log(1)
    asked = client.post(f"{ROOT}do/{operation}/", {"group": "g", "topic": "t", "row": [row], "asked": "yes"})
    assert asked.status_code == 200
    assert "The selection is invalid" in asked.content.decode()
    assert 'name="confirmed"' not in asked.content.decode()


@pytest.mark.parametrize("deliver_at", [253_402_300_799_000])
def test_a_time_in_no_year(client, settings, deliver_at):
    settings.TIME_ZONE = "America/Chicago"
    publish("t", 1, key="a", delay=3600)
    OutboxMessage.objects.update(deliver_at=deliver_at)
    with timezone.override("Pacific/Kiritimati"):  # where the last moment of the year 9999 in UTC is in the next one
        text = page(client, "scheduled")
    assert f"{deliver_at} ms after 1970" in text
    found = confirm(client, "move", row=OutboxMessage.objects.get().pk, time="9999-12-31T12:00:00")
    assert found[0].endswith(": 1.")
    late = {"row": OutboxMessage.objects.get().pk, "time": "9999-12-31T23:59:59", "asked": "yes"}
    assert "must be before the year 10000 in UTC" in client.post(f"{ROOT}do/move/", late).content.decode()


def test_numbers_in_forms_have_no_separators(client, settings):
    settings.USE_THOUSAND_SEPARATOR = True
    log(1)
    QueueMessage.objects.update(offset=1_234_567)
    text = page(client, "message", offset=1_234_567)
    assert 'name="offset" min="1" required value="1234567"' in text
    assert "offset=1234567" in text


EVIL = "\u202egpj.exe\u2066 |Q\nZ\U000e0001"
"""A name that changes the direction of what follows, and has invisible characters and two lines."""
NUL = f"{EVIL}\x00"
"""Django's forms refuse this one."""


@pytest.fixture
def evil(db, settings):
    """A queue whose names, ids, errors and reasons are all like this: plain SQL can store any."""
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["default"]}}

    def fails(delivery):
        raise ValueError(NUL)

    slow = Backoff(initial=3600, jitter=0)
    sub = Sub(
        handler("t", "g", fails, backoff=slow, max_attempts=3), handler("t", "last", fails, max_attempts=1), name=EVIL
    )
    how = {"metadata": {"m": NUL}, "coalesce": NUL}
    publish("t", {"x": NUL}, key=NUL, id=f"{NUL}1", **how)
    publish("t", {"x": EVIL}, key=f"{NUL}2", id=f"{EVIL}2", **how)
    publish("t", {"x": NUL}, key=NUL, id=f"{NUL}3", delay=3600, **how)
    sequence()
    sub.step()
    sub.work()
    sub.flush()
    sequence()
    publish("t", {"x": EVIL}, key=f"{EVIL}3", id=f"{EVIL}4")
    sequence()
    sub.step()
    operations.pause("g", "t", actor=EVIL, reason=EVIL)
    operations.settings("g", "t", {"filter": {"region": [EVIL]}}, actor=EVIL, reason=EVIL)
    job(EVIL, task_path=EVIL, queue_name=EVIL, status="FAILED", errors=errors(EVIL), worker_ids=f"{EVIL[:-6]}\n")
    schedule_worlds.registered(schedule_worlds.of_topic("t"), name=EVIL)
    QuarantinedMessageFactory(message_id=EVIL, reason=EVIL)
    for model in QUEUE_MODELS:
        for field in model._meta.fields:
            if isinstance(field, models.CharField):
                for old in ("t", "g", "last", "t_dlq"):
                    new = f"{EVIL}_dlq" if old == "t_dlq" else EVIL + old
                    model.objects.filter(**{field.name: old}).update(**{field.name: new})
    SubscriberHeartbeat.objects.filter(consumer_group=f"{EVIL}last").update(heartbeat_at=1)
    PartitionLease.objects.create(
        consumer_group=f"{EVIL}g", topic=f"{EVIL}t", partition_key="x", leased_by=f"{EVIL}gone", leased_at=1
    )
    return {"group": f"{EVIL}g", "topic": f"{EVIL}t"}


def hidden_in(text):
    """The characters of a page that change what people see, except in values that forms and links send."""
    text = re.sub(r'\b(?:value|data-copy)="[^"]*"', "", text)
    text = re.sub(r"<textarea.*?</textarea>", "", text, flags=re.DOTALL)
    found = {one for one in text if unicodedata.category(one) in HIDDEN} - {"\n"}
    if "Q\nZ" in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL):
        found.add("Q\nZ")
    return {f"{place}: {text[max(0, place - 80) : place + 9]!r}" for one in found for place in [text.rindex(one)]}


def test_no_text_of_others_changes_the_appearance_of_a_page(client, evil):
    letter = QueueMessage.objects.filter(failed_group__gt="").values_list("offset", flat=True)[0]
    offset = QueueMessage.objects.filter(failed_group="").values_list("offset", flat=True)[0]
    named = {
        "group": [evil],
        "message": [{"offset": offset}, {"offset": letter}],
        "deadletter": [{"offset": letter}],
        "messages": [{}, {"topic": evil["topic"]}, {"topic": evil["topic"], "contains": "x"}, {"id": f"{NUL}1"}],
        "job": [{"id": EVIL}],
        "offsets": [{}, evil, {"owner": f"{EVIL}gone"}],
        "deadletters": [{}, {"topic": f"{EVIL}t", "group": EVIL}],
        "operations": [{}, {"by": EVIL}],
        "scheduled": [{}, {"topic": evil["topic"]}, {"topic": evil["topic"], "id": f"{NUL}3"}],
        "inflight": [{}, {"subscriber": EVIL}],
    }
    addresses = [
        (f"{page.name}/".replace("changelist/", ""), query) for page in PAGES for query in named.get(page.name, [{}])
    ]
    names = ("pause", "resume", "seek", "replay", "retry", "drop", "override")
    addresses += [(f"do/{name}/", evil) for name in names]
    addresses += [
        ("do/forget/", {"subscriber": SubscriberHeartbeat.objects.values_list("subscriber_name", flat=True)[0]}),
        ("do/forget/", {"subscriber": EVIL}),
        ("do/redrive-selected/", {"topic": f"{EVIL}_dlq", "row": letter}),
        ("do/edit/", {"offset": letter}),
        ("do/run-recurring/", {"schedule": EVIL}),
        ("do/cancel-jobs/", {"row": json.dumps(EVIL)}),
        ("do/cancel-task/", {"topic": f"jobs.{EVIL}", "task": EVIL}),
        ("do/publish/", {"topic": "t", "key": EVIL, "payload": "1", "metadata": ""}),
        ("do/release/", {**evil, "row": json.dumps("x")}),
    ]
    found, bare = {}, []
    for address, query in addresses:
        answer = client.get(ROOT + address, query)
        text = unescape(answer.content.decode())
        assert answer.status_code in (200, 400), address
        if "\\u202e" not in text:
            bare.append(address)
        if hidden := hidden_in(text):
            found[address, answer.status_code] = hidden
    assert found == {}, "\n".join(f"{name}: {sorted(places)}" for name, places in found.items())
    # Forms that wait for a value, and the text to edit.
    assert bare == [f"do/{name}/" for name in ("seek", "replay", "override", "edit")]


def test_commands_escape_names_too(db, evil, capsys):
    for command in ("queuestatus", "queuescheduled", "queueset", "queuequarantine"):
        call_command(command, verbosity=2)
        text = capsys.readouterr().out
        assert "\\u202e" in text, command
        assert "Q\nZ" not in text
        assert {one for one in text if unicodedata.category(one) in HIDDEN} == {"\n"}
    with pytest.raises(SystemExit):  # The quarantine is a problem.
        call_command("queuehealth")
    text = capsys.readouterr().out
    assert "\\u202e" in text
    assert {one for one in text if unicodedata.category(one) in HIDDEN} == {"\n"}
