"""The dashboard: every page shows what is there, as text; operations ask, do and leave a record."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import path

from django_mysqlqueue import publish
from django_mysqlqueue.admin.dashboard import DashboardAdmin
from django_mysqlqueue.admin.operations import OPERATIONS
from django_mysqlqueue.admin.pages import PAGES
from django_mysqlqueue.conf import Backoff
from django_mysqlqueue.models import (
    ConsumerGroup,
    Dashboard,
    DeliveryState,
    Operation,
    PartitionLease,
    QueueMessage,
    SubscriberHeartbeat,
)
from tests.support.harness import Sub, handler, sequence
from tests.test_conformance import fail
from tests.test_operations import dead_letters, log

other_site = admin.AdminSite(name="ops")
other_site.register(Dashboard, DashboardAdmin)
urlpatterns = [path("admin/", admin.site.urls), path("deep/er/ops/", other_site.urls)]
ROOT = "/admin/django_mysqlqueue/dashboard/"
HOSTILE = "<script>alert(1)</script>\"'&{{ 7|add:1 }}"
WAITS = Backoff(initial=3600, jitter=0)


@pytest.fixture
def make_client(db, settings):
    settings.ROOT_URLCONF = __name__
    User.objects.all().delete()

    def make(*permissions, superuser=False, staff=True):
        number = User.objects.count()
        user = User.objects.create_user(f"ada{number}", is_staff=staff, is_superuser=superuser)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        assert user.user_permissions.count() == len(permissions)
        client = Client()
        client.force_login(user)
        return client

    return make


@pytest.fixture
def client(make_client):
    return make_client(superuser=True)


def page(client, name="", status=200, **query):
    answer = client.get(ROOT + (f"{name}/" if name else ""), query)
    assert answer.status_code == status, answer.content.decode()
    return unescape(answer.content.decode())


def hidden(text):
    """The values of a confirmation page's form, as a browser would send them."""
    found = {}
    for tag in re.findall(r"<(?:input|textarea)[^>]*>", text):
        attributes = dict(re.findall(r'([\w-]+)="([^"]*)"', tag))
        if attributes.get("type") == "hidden":
            found.setdefault(attributes["name"], []).append(unescape(attributes.get("value", "")))
    return found


def confirm(client, name, **values):
    """Asks for an operation, presses its button, and returns what the next page says."""
    asked = client.post(f"{ROOT}do/{name}/", {**values, "asked": "yes"})
    assert asked.status_code == 200
    sent = {**hidden(asked.content.decode()), **values, "confirmed": "yes"}
    done = client.post(f"{ROOT}do/{name}/", sent, follow=True)
    assert done.status_code == 200
    return [str(message) for message in done.context["messages"]]


PLACES = [one.name for one in PAGES]


def query_of(name):
    if name == "deadletter":
        first = QueueMessage.objects.filter(failed_group__gt="").values_list("offset", flat=True).first()
        return {"offset": first or 1}
    return {"group": {"group": "g", "topic": "t"}}.get(name, {})


# -- pages --------------------------------------------------------------------


@pytest.mark.parametrize("name", PLACES)
def test_every_page_opens_on_an_empty_queue(client, name):
    if name == "group":
        ConsumerGroup.objects.create(consumer_group="g", topic="t", mode="ordered")
    page(client, "" if name == "changelist" else name, **query_of(name))


def test_the_admin_index_leads_there(client):
    text = client.get("/admin/").content.decode()
    assert f'href="{ROOT}"' in text


def test_a_topic_without_a_group_leads_to_its_messages(client):
    publish("orders.plced", {"order": 7})
    sequence()
    text = page(client)
    assert "Topic 'orders.plced' has 1 message but no consumer group." in text
    (link,) = re.findall(r'href="([^"]*topic=orders\.plced[^"]*)"', text)
    assert client.get(link).context["rows"]


@pytest.mark.parametrize("name", PLACES)
def test_on_an_admin_site_of_another_name_and_place(client, name):
    if name == "group":
        ConsumerGroup.objects.create(consumer_group="g", topic="t", mode="ordered")
    root = "/deep/er/ops/django_mysqlqueue/dashboard/"
    answer = client.get(root + ("" if name == "changelist" else f"{name}/"), query_of(name))
    assert answer.status_code == 200
    links = re.findall(r'href="(/[^"]*)"', answer.content.decode())
    assert not [link for link in links if link.startswith("/admin/")]


@pytest.mark.parametrize("name", PLACES)
def test_pages_hold_no_script_and_no_style_of_their_own(client, name):
    dead_letters(2)
    Sub(handler("t", "g")).step()
    text = client.get(ROOT + ("" if name == "changelist" else f"{name}/"), query_of(name)).content.decode()
    own = text[text.index('<div class="mq-page') :]
    assert not re.findall(r"<script(?![^>]*\bsrc=)[^>]*>|<style|\sstyle=|\son\w+=|javascript:", own)


def test_the_overview_tells_what_is_there(client):
    sub = Sub(handler("t", "g", fail, max_attempts=3, backoff=WAITS), handler("t", "h"))
    log(3)
    publish("t", 1, delay=60)
    sub.step()
    sub.work(2)
    sub.flush()
    sub.poller.write_rollups()
    answer = client.get(ROOT)
    cards = {card.name: card.value for card in answer.context["cards"]}
    assert (cards["scheduled"], cards["live subscribers"]) == ("1", "1")
    assert int(cards["lag"]) == sum(row.group.lag.value for row in answer.context["rows"]) > 0
    assert [row.group.ref.group for row in answer.context["rows"]] == ["g", "h"]
    assert "<svg" in answer.content.decode()


@pytest.mark.parametrize("span", ["hour", "day", "nonsense"])
def test_charts_of_an_hour_and_of_a_day(client, span):
    sub = Sub(handler())
    log(7)
    sub.settle()
    sub.poller.write_rollups()
    answer = client.get(ROOT, {"span": span})
    assert answer.context["totals"] == ["7", "0", "0"]
    assert ": 7</title>" in answer.content.decode()
    assert answer.context["p50"] != "-"


def test_a_group_shows_its_partitions(client):
    sub = Sub(handler("t", "g", fail, max_attempts=3, backoff=WAITS))
    log(6, keys="abc")
    sub.step()
    sub.work(1)
    sub.flush()
    answer = client.get(ROOT + "group/", {"group": "g", "topic": "t"})
    rows = {row.partition.key: row for row in answer.context["rows"]}
    assert set(rows) == set("abc")
    assert rows["a"].partition.owner == sub.name
    assert rows["a"].live
    assert (rows["a"].partition.lag.value, rows["a"].partition.head.attempts) == (2, 1)
    assert "ValueError" in rows["a"].error
    assert rows["a"].next_at.endswith("min") or rows["a"].next_at.endswith("h")
    by_key = client.get(ROOT + "group/", {"group": "g", "topic": "t", "order": "key", "prefix": "b"})
    assert [row.partition.key for row in by_key.context["rows"]] == ["b"]


def test_partitions_come_in_pages(client):
    sub = Sub(handler("t", "g"))
    keys = [chr(ord("a") + number % 26) + str(number) for number in range(120)]
    for key in keys:
        publish("t", 1, key=key)
    sequence()
    sub.settle()
    seen, after = [], None
    while True:
        query = {"group": "g", "topic": "t", "order": "key", **({"after": after} if after is not None else {})}
        answer = client.get(ROOT + "group/", query)
        seen += [row.partition.key for row in answer.context["rows"]]
        after = answer.context["next_after"]
        if after is None:
            break
        assert urlencode({"after": after}) in answer.content.decode()
    assert seen == sorted(keys)


@pytest.mark.parametrize(
    ("name", "query", "says"),
    [
        ("group", {}, "No group is named"),
        ("group", {"group": "x", "topic": "y"}, "There is no group x/y."),
    ],
)
def test_a_query_that_names_nothing_is_told_so(client, name, query, says):
    assert says in page(client, name, 400, **query)


def test_a_bad_setting_is_named_and_nothing_is_shown_that_it_was_to_hide(client, settings):
    publish("t", "a secret")
    sequence()
    offset = QueueMessage.objects.values_list("offset", flat=True).last()
    assert "a secret" in page(client, "message", offset=offset)
    settings.MYSQLQUEUE = {"REDACT": 5}
    text = page(client, "message", 500, offset=offset)
    assert "MYSQLQUEUE['REDACT'] = 5 must be a function" in text
    assert "a secret" not in text
    assert page(client)
    settings.MYSQLQUEUE = {"HEALTH": {"WINDOW": 1}}
    assert "has WINDOW = 1, which must be at least 60" in page(client, "", 500)


def test_in_flight_and_who_holds_it(client):
    sub = Sub(handler("t", "g"), handler("t", "s", mode="shared"))
    log(2)
    sub.step()
    rows = client.get(ROOT + "inflight/").context["rows"]
    assert {(row.delivery.ref.group, row.delivery.subscriber, row.live) for row in rows} == {
        ("g", sub.name, True),
        ("s", sub.name, True),
    }
    only = client.get(ROOT + "inflight/", {"group": "s", "topic": "t"}).context["rows"]
    assert {row.delivery.ref.group for row in only} == {"s"}
    assert all(row.until for row in only)
    assert not client.get(ROOT + "inflight/", {"subscriber": "nobody"}).context["rows"]


def test_subscribers_and_their_shares(client):
    one = Sub(handler("t", "g"))
    log(4, keys="abcd")
    one.step()
    dead = Sub(handler("t", "g"), name="dead")
    SubscriberHeartbeat.objects.filter(subscriber_name=dead.name).update(heartbeat_at=1)
    PartitionLease.objects.filter(partition_key="d").update(leased_by="left")
    answer = client.get(ROOT + "subscribers/")
    workers = {worker.name: worker for worker in answer.context["workers"]}
    assert (workers[one.name].live, workers[dead.name].live) == (True, False)
    assert [(number, share) for _, number, share in workers[one.name].groups] == [(3, "75%")]
    assert [(owner, number) for owner, _, number in answer.context["orphans"]] == [("left", 1)]


def test_leases_in_pages_and_by_owner(client, monkeypatch):
    monkeypatch.setattr("django_mysqlqueue.admin.pages.subscribers.PAGE_ROWS", 3)
    sub = Sub(handler("t", "g"), handler("u", "g"))
    for topic in "tu":
        log(4, keys="abcd", topic=topic)
    sub.step()
    seen, query = [], {}
    while True:
        answer = client.get(ROOT + "leases/", query)
        seen += [(row.lease.ref.topic, row.lease.key) for row in answer.context["rows"]]
        if not answer.context["next_link"]:
            break
        query = {name: values[0] for name, values in parse_qs(answer.context["next_link"].partition("?")[2]).items()}
    assert seen == [(topic, key) for topic in "tu" for key in "abcd"]
    assert not client.get(ROOT + "leases/", {"owner": "nobody"}).context["rows"]
    PartitionLease.objects.filter(partition_key="a").update(leased_by="")
    unowned = client.get(ROOT + "leases/", {"unowned": "1"}).context["rows"]
    assert [row.lease.key for row in unowned] == ["a", "a"]


@pytest.mark.parametrize("name", PLACES)
def test_what_is_stored_is_shown_as_text(client, name):
    sub = Sub(
        handler("t", "g", lambda delivery: (_ for _ in ()).throw(ValueError(HOSTILE)), backoff=WAITS), name=HOSTILE
    )
    publish("t", {"x": HOSTILE}, key=HOSTILE, id=HOSTILE, metadata={"m": HOSTILE})
    sequence()
    sub.step()
    sub.work()
    sub.flush()
    sub.step()
    text = client.get(ROOT + ("" if name == "changelist" else f"{name}/"), query_of(name)).content.decode()
    assert "<script>alert" not in text
    assert "\"'&" not in text
    if name in ("group", "subscribers", "leases"):
        assert "&lt;script&gt;" in text


# -- permissions --------------------------------------------------------------


@pytest.mark.parametrize("name", PLACES)
def test_who_may_not_view_sees_nothing(make_client, name):
    ConsumerGroup.objects.create(consumer_group="g", topic="t", mode="ordered")
    address = ROOT + ("" if name == "changelist" else f"{name}/")
    assert make_client().get(address, query_of(name)).status_code == 403
    assert make_client("operate_dashboard", "see_payloads").get(address, query_of(name)).status_code == 403
    assert make_client("view_dashboard").get(address, query_of(name)).status_code == 200
    assert make_client("view_dashboard", staff=False).get(address, query_of(name)).status_code == 302
    assert Client().get(address, query_of(name)).status_code == 302


def test_who_may_view_only_changes_nothing(make_client):
    client = make_client("view_dashboard", "see_payloads")
    ConsumerGroup.objects.create(consumer_group="g", topic="t", mode="ordered")
    for name in OPERATIONS:
        for send in (client.get, client.post):
            assert send(f"{ROOT}do/{name}/", {"group": "g", "topic": "t"}).status_code == 403
    assert "do/" not in page(client, "group", group="g", topic="t")
    assert not ConsumerGroup.objects.get().paused


def test_an_operation_needs_a_post_with_the_csrf_token(make_client):
    client = make_client("view_dashboard", "operate_dashboard")
    ConsumerGroup.objects.create(consumer_group="g", topic="t", mode="ordered")
    asked = client.get(f"{ROOT}do/pause/", {"group": "g", "topic": "t", "confirmed": "yes"})
    values = {**hidden(asked.content.decode()), "confirmed": "yes"}
    assert asked.status_code == 200
    assert not ConsumerGroup.objects.get().paused
    client.get(f"{ROOT}do/pause/", values)
    assert not ConsumerGroup.objects.get().paused
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.get())
    assert strict.post(f"{ROOT}do/pause/", {**values, "csrfmiddlewaretoken": "x"}).status_code == 403
    assert not ConsumerGroup.objects.get().paused
    client.post(f"{ROOT}do/pause/", values)
    assert ConsumerGroup.objects.get().paused


def test_pages_answer_only_get(client):
    assert client.post(ROOT).status_code == 405


# -- operations ---------------------------------------------------------------


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
    assert "at night" in unescape(client.get("/admin/django_mysqlqueue/operation/").content.decode())


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
    assert "Settled messages that will be redelivered: 5." in again.content.decode()
    assert "Nothing was done" in again.content.decode()
    assert "Nothing was done" not in asked.content.decode()
    assert not Operation.objects.exists()
    done = client.post(address, {**hidden(again.content.decode()), "target": "earliest", "confirmed": "yes"})
    assert done.status_code == 302
    assert Operation.objects.get().action == "seek"


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
    text = page(client, "group", status=400, group="g", topic="t")
    assert '<div id="mq-live"><p class="errornote">There is no group g/t.</p></div>' in text
    assert "data-live" not in text


def test_a_dead_letters_last_attempt_is_one_failure(client):
    sub = Sub(handler("t", "g", fail, max_attempts=1))
    log(3)
    sub.settle()
    sub.poller.write_rollups()
    assert "Every attempt of g/t fails: 3 failures and no success in the last 10 min." in page(client)


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
        assert "The selection cannot be read" in refused.content.decode()
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
    assert "A dead letter gets no further attempt until it is redriven." in text
    told = confirm(client, "dead-letter", group="g", topic="t", row=offsets[0], reason="a test order")
    assert told == ["Messages dead-lettered to t_dlq: 1."]
    sequence()
    letter = QueueMessage.objects.get(topic="t_dlq")
    assert letter.original_offset == offsets[0]
    assert letter.last_error.endswith("Dead-lettered by ada0: a test order")
    operation = Operation.objects.get()
    assert (operation.detail, operation.reason) == (f"message {offsets[0]}", "a test order")
    entry = LogEntry.objects.get()
    assert (entry.object_repr, entry.change_message) == ("g/t", "Messages dead-lettered to t_dlq: 1.")
    again = client.post(f"{ROOT}do/dead-letter/", {"group": "g", "topic": "t", "asked": "yes", "row": offsets[:2]})
    text = unescape(again.content.decode())
    assert f"message {offsets[0]} is settled already" in text
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
    assert f"message {offset} is held by the live subscriber '{sub.name}'" in told
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
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    assert confirm(client, "forget", subscriber=sub.name) == [
        f"The subscriber {sub.name} is forgotten; its leases are free."
    ]
    assert not SubscriberHeartbeat.objects.exists()
    nothing = client.post(f"{ROOT}do/release/", {"group": "g", "topic": "t", "asked": "yes"})
    assert "Nothing is selected." in nothing.content.decode()


def test_drop(client):
    sub = Sub(handler("t", "g"))
    log(2)
    sub.leave()
    asked = client.post(f"{ROOT}do/drop/", {"group": "g", "topic": "t", "asked": "yes"})
    assert "Messages that it has not settled: 2." in asked.content.decode()
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


@pytest.mark.any_engine
def test_the_app_works_without_the_admin(tmp_path):
    """Nothing/the package imports contrib.admin by itself."""
    code = (
        "import django, sys; from django.conf import settings; "
        "settings.configure(INSTALLED_APPS=['django_mysqlqueue'], "
        "TEMPLATES=[{'BACKEND': 'django.template.backends.django.DjangoTemplates', 'APP_DIRS': True}], "
        "DATABASES={'default': "
        "{'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:', 'OPTIONS': {'transaction_mode': 'IMMEDIATE', "
        "'timeout': 30, 'init_command': 'PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;'}}}); "
        "django.setup(); from django.core.management import call_command; call_command('check'); "
        "call_command('migrate', verbosity=0); from django_mysqlqueue import publish; publish('t', 1); "
        "call_command('queuestatus'); assert 'django.contrib.admin' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "no issues" in done.stdout


@pytest.mark.any_engine
def test_importing_the_package_needs_no_settings():
    code = (
        "import sys, django_mysqlqueue; assert 'django' not in sys.modules; assert 'publish' in dir(django_mysqlqueue)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
