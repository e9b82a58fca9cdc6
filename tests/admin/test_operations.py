"""Operations of the dashboard: they preview, ask, act and leave a record."""

from __future__ import annotations

import json
import re
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User

from django_mysqlqueue import subscriber
from django_mysqlqueue.admin.operations import OPERATIONS
from django_mysqlqueue.models import (
    ConsumerGroup,
    DeliveryState,
    Operation,
    PartitionLease,
    QueueMessage,
    SubscriberHeartbeat,
)
from tests.support.dashboard import ROOT, WAITS, confirm, hidden, page
from tests.support.handlers import fail
from tests.support.harness import Sub, handler, sequence
from tests.support.scenarios import log


def test_pause_and_resume(client):
    Sub(handler("t", "g"))
    assert confirm(client, "pause", group="g", topic="t", reason="at night") == ["The group g/t is paused."]
    assert ConsumerGroup.objects.get(topic="t").paused
    assert confirm(client, "resume", group="g", topic="t") == ["The group g/t is resumed."]
    entries = [(entry.object_repr, entry.change_message, entry.user.username) for entry in LogEntry.objects.all()]
    assert entries == [("g/t", "The group g/t is resumed.", "ada0"), ("g/t", "The group g/t is paused.", "ada0")]
    assert list(Operation.objects.order_by("id").values_list("action", "actor", "reason")) == [
        ("pause", "ada0", "at night"),
        ("resume", "ada0", ""),
    ]
    assert "at night" in unescape(client.get(f"{ROOT}operations/").content.decode())


def test_a_user_whose_name_is_longer_than_the_audit_logs_column_can_operate(client, monkeypatch):
    """Custom user models may have names of any length."""
    Sub(handler("t", "g"))
    monkeypatch.setattr(User, "get_username", lambda user: "é" * 254)
    assert confirm(client, "pause", group="g", topic="t") == ["The group g/t is paused."]
    assert Operation.objects.get().actor == "é" * 189 + "…"


def test_an_option_is_overridden_shown_and_restored(client, no_handlers):
    subscriber("t", group="g", max_attempts=4)(fail)
    Sub(handler("t", "g"))
    assert "@subscriber" in page(client, "group", group="g", topic="t")
    told = confirm(client, "override", group="g", topic="t", option="max_attempts", value="9", reason="at night")
    assert told == [
        "max_attempts is 9 now, instead of 4 (@subscriber). The subscribers of the group g/t notice within 10 seconds."
    ]
    assert Operation.objects.get().reason == "at night"
    text = page(client, "group", group="g", topic="t")
    assert re.search(r"overridden</span> <bdi[^>]*>.*?</bdi> by ada0, otherwise 4 \(@subscriber\)", text)
    told = confirm(client, "restore", group="g", topic="t", option="max_attempts")
    assert told[0].startswith("max_attempts is no longer overridden: 4 (@subscriber).")
    assert "overridden</span>" not in page(client, "group", group="g", topic="t")


def test_the_form_of_an_override_waits_for_a_value(client):
    Sub(handler("t", "g"))
    text = client.get(f"{ROOT}do/override/", {"group": "g", "topic": "t", "option": "prefetch"}).content.decode()
    assert '<option value="prefetch" selected>' in text
    assert "errornote" not in text
    assert 'name="confirmed"' not in text


def test_an_override_that_the_code_no_longer_knows_is_removed(client):
    Sub(handler("t", "g"))
    ConsumerGroup.objects.update(overrides={"colour": {"value": "red", "at": 1000, "by": "bob"}})
    (told,) = confirm(client, "restore", group="g", topic="t", option="colour")
    assert told.startswith("colour is no longer overridden")


def test_the_groups_page_does_not_fail_because_of_a_handler(client, no_handlers):
    Sub(handler("t", "g"))
    for _ in range(2):
        subscriber("t", group="g")(type("Callable", (), {"__call__": lambda self, delivery: None})())
    assert "Two handlers are declared" in page(client, "group", group="g", topic="t")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"option": "max_attempts", "value": "x"}, "max_attempts='x': must be an integer"),
        ({"option": "max_attempts", "value": "0"}, "max_attempts=0: must be from 1"),
        ({"option": "max_attempts"}, "This field is required."),
        ({"option": "mode", "value": "shared"}, "mode is not one of the available choices"),
    ],
)
def test_an_override_that_is_not_possible_is_refused(client, values, says):
    Sub(handler("t", "g"))
    asked = client.post(f"{ROOT}do/override/", {"group": "g", "topic": "t", "asked": "yes", **values})
    text = unescape(asked.content.decode())
    assert says in text
    assert 'name="confirmed"' not in text
    assert not Operation.objects.exists()


def test_an_ignored_override_says_why(client, no_handlers):
    subscriber("t", group="g")(fail)
    Sub(handler("t", "g"))
    ConsumerGroup.objects.update(overrides={"colour": {"value": "<b>red", "at": 1000, "by": "<b>bob"}})
    text = client.get(f"{ROOT}group/", {"group": "g", "topic": "t"}).content.decode()
    assert "there is no option" in text
    assert "<b>" not in text


def test_what_was_not_previewed_is_not_done(client):
    """The form says another target than the one whose effect was shown: it is shown anew."""
    sub = Sub(handler("t", "g"))
    log(5)
    sub.settle()
    address = f"{ROOT}do/seek/"
    asked = client.post(address, {"group": "g", "topic": "t", "target": "latest", "asked": "yes"})
    values = {**hidden(asked.content.decode()), "target": "earliest", "confirmed": "yes"}
    again = client.post(address, values)
    assert again.status_code == 200
    assert "Settled messages that will be replayed: 5." in again.content.decode()
    assert "the form differs" in again.content.decode()
    assert "the form differs" not in asked.content.decode()
    assert not Operation.objects.exists()
    done = client.post(address, {**hidden(again.content.decode()), "target": "earliest", "confirmed": "yes"})
    assert done.status_code == 302
    assert Operation.objects.get().action == "seek"


def test_a_seek_opens_without_a_position(client):
    """A careless click must not skip everything."""
    Sub(handler("t", "g"))
    log(5)
    text = client.get(f"{ROOT}do/seek/", {"group": "g", "topic": "t"}).content.decode()
    assert 'name="confirmed"' not in text
    assert 'name="reason"' not in text
    assert "(choose a position)" in text
    text = client.post(
        f"{ROOT}do/seek/", {"group": "g", "topic": "t", "target": "latest", "asked": "yes"}
    ).content.decode()
    assert "Unsettled messages that will be skipped: 5." in text
    assert text.index("will be skipped") < text.index('name="reason"') < text.index('name="confirmed"')


def test_a_reason_may_be_filled_in_after_the_preview(client):
    """It changes nothing of what was shown: one press of the button does it."""
    Sub(handler("t", "g"))
    address = f"{ROOT}do/pause/"
    asked = client.get(address, {"group": "g", "topic": "t"})
    done = client.post(address, {**hidden(asked.content.decode()), "reason": "at night", "confirmed": "yes"})
    assert done.status_code == 302
    assert Operation.objects.get().reason == "at night"


def test_a_dropped_group_leads_to_the_overview(client):
    Sub(handler("t", "g"))
    back = f"{ROOT}group/?group=g&topic=t"
    address = f"{ROOT}do/drop/"
    asked = client.get(address, {"group": "g", "topic": "t", "next": back})
    done = client.post(address, {**hidden(asked.content.decode()), "confirmed": "yes"})
    assert done["Location"] == ROOT


def test_a_group_that_is_gone_is_told_in_the_live_part(client):
    """What refreshes itself must find it there; the page does not go on asking."""
    text = page(client, "group", status=404, group="g", topic="t")
    assert '<div id="mq-live"><p class="errornote">There is no group g/t.</p></div>' in text
    assert "data-live" not in text


def test_a_dead_letters_last_attempt_is_one_failure(client, clock):
    sub = Sub(handler("t", "g", fail, max_attempts=1))
    log(3)
    sub.settle()
    sub.poller.write_rollups()
    clock.advance(60)
    sub.heart.beat()
    assert re.search(r"g/t: every attempt has failed since [^(]+ \(3 of 3\)[:.]", page(client))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"target": "offset"}, "This field is required."),
        ({"target": "time"}, "This field is required."),
        ({"target": "time", "time": "yesterday"}, "Enter a valid date/time."),
        ({"target": "offset", "offset": "0"}, "greater than or equal to 1"),
        ({"target": "offset", "offset": "999999999"}, "the log ends at"),
        ({"target": "nowhere"}, "nowhere"),
    ],
)
def test_a_seek_to_nowhere_is_refused(client, values, says):
    Sub(handler("t", "g"))
    log(3)
    asked = client.post(f"{ROOT}do/seek/", {"group": "g", "topic": "t", "asked": "yes", **values})
    text = unescape(asked.content.decode())
    assert says in text
    assert 'name="confirmed"' not in text
    assert not Operation.objects.exists()


def test_seek_to_a_time(client):
    sub = Sub(handler("t", "g"))
    log(3)
    sub.settle()
    assert confirm(client, "seek", group="g", topic="t", target="time", time="2020-01-01T00:00:00")
    assert sub.settle() == 3


def test_retry_what_waits_and_what_is_selected(client):
    sub = Sub(handler("t", "g", fail, max_attempts=9, backoff=WAITS))
    log(4)
    sub.settle()
    address = f"{ROOT}do/retry-selected/"
    for row in ("[1]", "no json", '"a"', '["a", 1]'):
        refused = client.post(address, {"group": "g", "topic": "t", "asked": "yes", "row": [row]})
        assert "The selection is invalid" in refused.content.decode()
    (first, *_) = DeliveryState.objects.order_by("message_offset").values_list("message_offset", flat=True)
    told = confirm(client, "retry-selected", group="g", topic="t", row=[first])
    assert told == ["Messages of the group g/t that are due now: 1."]
    sub.step(times=2)
    assert sub.work() == 1
    sub.flush()
    assert confirm(client, "retry", group="g", topic="t", reset_attempts="on") == [
        "Messages of the group g/t that are due now: 4."
    ]
    assert not DeliveryState.objects.exclude(retry_count=0).exists()


def test_dead_letter_what_waits(client):
    sub = Sub(handler("t", "g", fail, max_attempts=9, backoff=WAITS))
    offsets = log(8)
    sub.settle()
    asked = client.post(f"{ROOT}do/dead-letter/", {"group": "g", "topic": "t", "asked": "yes", "row": offsets[:7]})
    text = unescape(asked.content.decode())
    assert "Messages of the group g/t that will be dead-lettered to t_dlq: 7." in text
    assert f"Message {offsets[0]} has failed 1 time." in text
    assert f"Message {offsets[5]} has" not in text
    assert "Dead letters get no further attempts until they are redriven." in text
    told = confirm(client, "dead-letter", group="g", topic="t", row=offsets[0], reason="a test order")
    assert told == ["Messages dead-lettered to t_dlq: 1."]
    sequence()
    letter = QueueMessage.objects.get(topic="t_dlq")
    assert letter.original_offset == offsets[0]
    assert letter.last_error.startswith("Dead-lettered by ada0: a test order\n\nTraceback")
    operation = Operation.objects.get()
    assert (operation.detail, operation.reason) == (f"message {offsets[0]}", "a test order")
    entry = LogEntry.objects.get()
    assert (entry.object_repr, entry.change_message) == ("g/t", "Messages dead-lettered to t_dlq: 1.")
    again = client.post(f"{ROOT}do/dead-letter/", {"group": "g", "topic": "t", "asked": "yes", "row": offsets[:2]})
    text = unescape(again.content.decode())
    assert f"message {offsets[0]} is already settled" in text
    assert 'name="confirmed"' not in text


def test_what_is_claimed_between_preview_and_confirmation_stays(client):
    sub = Sub(handler("t", "g", fail, max_attempts=9))
    (offset,) = log(1)
    sub.step()
    sub.work(1)
    sub.flush()
    asked = client.post(f"{ROOT}do/dead-letter/", {"group": "g", "topic": "t", "asked": "yes", "row": offset})
    sent = {**hidden(asked.content.decode()), "confirmed": "yes"}
    sub.step(times=2)
    done = client.post(f"{ROOT}do/dead-letter/", sent, follow=True)
    (told,) = [str(message) for message in done.context["messages"]]
    assert f"message {offset} is in flight at the live subscriber '{sub.name}'" in told
    assert not QueueMessage.objects.filter(topic="t_dlq").exists()
    assert not Operation.objects.exists()


def test_release_and_forget(client):
    sub = Sub(handler("t", "g"))
    log(2)
    sub.step()
    told = confirm(client, "release", group="g", topic="t", row=[json.dumps("a")])
    assert told == ["Partitions of the group g/t whose leases were released: 1."]
    assert dict(PartitionLease.objects.values_list("partition_key", "leased_by")) == {"a": "", "b": sub.name}
    refused = client.post(f"{ROOT}do/forget/", {"subscriber": sub.name, "asked": "yes"}).content.decode()
    assert "is alive: stop it first." in refused
    assert 'name="confirmed"' not in refused
    assert "do/forget" not in page(client, "inflight")
    invented = client.get(f"{ROOT}do/forget/", {"subscriber": "nobody"}).content.decode()
    assert "There is no subscriber" in invented
    assert 'name="confirmed"' not in invented
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    assert "do/forget" in page(client, "inflight")
    assert confirm(client, "forget", subscriber=sub.name) == [
        f"The subscriber {sub.name} is forgotten; its leases are released."
    ]
    assert not SubscriberHeartbeat.objects.exists()
    nothing = client.post(f"{ROOT}do/release/", {"group": "g", "topic": "t", "asked": "yes"})
    assert "Nothing is selected." in nothing.content.decode()


def test_drop(client):
    sub = Sub(handler("t", "g"))
    log(2)
    live = client.post(f"{ROOT}do/drop/", {"group": "g", "topic": "t", "asked": "yes"})
    assert f"Live subscribers: {sub.name}." in live.content.decode()
    sub.leave()
    asked = client.post(f"{ROOT}do/drop/", {"group": "g", "topic": "t", "asked": "yes"})
    assert "Live subscribers" not in asked.content.decode()
    assert "Messages that the group has not settled: 2." in asked.content.decode()
    assert "This cannot be undone." in asked.content.decode()
    assert confirm(client, "drop", group="g", topic="t") == ["The group g/t is dropped."]
    assert not ConsumerGroup.objects.filter(topic="t").exists()


@pytest.mark.parametrize("name", [name for name, one in OPERATIONS.items() if "group" in one.form.base_fields])
def test_operations_on_a_group_that_is_not_there(client, name):
    values = {"group": "x", "topic": "t", "reason": "x", "row": [json.dumps("a")], "asked": "yes"}
    asked = client.post(f"{ROOT}do/{name}/", values)
    assert asked.status_code == 200
    assert not Operation.objects.exists()


def test_an_operation_that_is_none(client):
    assert client.get(f"{ROOT}do/explode/").status_code == 404


@pytest.mark.parametrize("wanted", ["//evil.example/", "https://evil.example/", "javascript:alert(1)"])
def test_the_way_back_stays_on_the_site(client, wanted):
    Sub(handler("t", "g"))
    asked = client.get(f"{ROOT}do/pause/", {"group": "g", "topic": "t", "next": wanted})
    values = hidden(asked.content.decode())
    assert values["next"] == [ROOT]
    done = client.post(f"{ROOT}do/pause/", {**values, "confirmed": "yes", "next": wanted})
    assert done.status_code in (200, 302)
    assert "evil" not in done.headers.get("Location", "")


@pytest.mark.parametrize("asked", ["", "yes"])
@pytest.mark.parametrize("name", ["seek", "replay", "override", "retry", "publish"])
def test_what_describes_a_field_is_on_the_page(client, name, asked):
    log(1)
    Sub(handler())
    values = {"group": "g", "topic": "t", "priority": "x", "first": "x", **({"asked": asked} if asked else {})}
    text = client.get(f"{ROOT}do/{name}/", values).content.decode()
    described = [one for ids in re.findall(r'aria-describedby="([^"]*)"', text) for one in ids.split()]
    assert any(one.endswith("_helptext") for one in described)
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert set(described) <= set(ids)
    assert len(ids) == len(set(ids))
