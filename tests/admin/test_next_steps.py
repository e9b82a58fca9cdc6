"""The headline of a cause, with its error, and the button for the operation that is the next step."""

from __future__ import annotations

import re
from html import unescape

import pytest
from django.contrib.auth.models import User

from django_mysqlqueue import Message, publish_many, subscriber
from django_mysqlqueue.models import ConsumerGroup, QueueMessage, Rollup
from django_mysqlqueue.operations import pausing
from django_mysqlqueue.options.backoff import Backoff
from tests.app import jobs
from tests.support import job_worlds
from tests.support.dashboard import ROOT, WAITS, hidden
from tests.support.factories import QuarantinedMessageFactory
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, groups, registry
from tests.support.job_worlds import JOBS
from tests.support.scenarios import log
from tests.support.topic_permissions import OnTopics

pytestmark = [pytest.mark.usefixtures("db"), pytest.mark.still_clock]


def refuse(delivery):
    raise ConnectionError(f"secret {delivery.payload}")


def hide(text, *, topic, kind):
    return text.replace("ConnectionError", "Hidden")


def outage(clock, **options):
    options = {"backoff": WAITS, "max_attempts": None, **options}
    subscriber("t", group="g", **options)(refuse)
    sub = Sub(handler("t", "g", refuse, **options))
    clock.advance(29)
    sub.heart.beat()
    publish_many("t", [Message(n, key=f"k{n}") for n in range(20)])
    sub.settle()
    sub.poller.write_rollups()
    sequence()
    clock.advance(50)
    sub.heart.beat()
    return sub


def seen(client, kind, **query):
    """The banner, and the cause of a kind as a page lists it."""
    context = client.get(ROOT, query).context
    (found,) = (one for one in context["causes"] if one.cause.kind == kind)
    return context["banner"], found


def opened(client, button):
    """The text of the form of an operation, which returns to where the button was."""
    answer = client.get(button.link)
    text = unescape(answer.content.decode())
    assert answer.status_code == 200
    assert hidden(answer.content.decode())["next"] == [ROOT]
    assert 'name="confirmed"' in text, text
    return text


def test_the_headline_of_an_outage_has_the_error_and_the_button(client, clock, no_handlers):
    outage(clock)
    banner, found = seen(client, "failing")
    text = r"g/t: every attempt has failed since [^(]+ \(20 of 20\): ConnectionError\."
    assert re.fullmatch(text, found.cause.text)
    assert banner.status.text == found.cause.text
    assert found.error.startswith("ConnectionError: secret "), "the whole line is below it"
    assert banner.button == found.button
    assert found.button.text == "Pause group"
    assert "g/t" in opened(client, found.button)
    html = client.get(ROOT).content.decode()
    assert html.count(">Pause group</a>") == 2
    assert (found.number, found.symptoms) == (0, []), "there is nothing else to say"
    assert "symptom" not in html


def test_a_paused_group_is_resumed(client, clock, no_handlers):
    outage(clock)
    pausing.set_paused(USING, GroupRef("g", "t"), actor="ada", paused=True)
    for kind in ("failing", "paused"):
        button = seen(client, kind)[1].button
        assert button.text == "Resume group"
        opened(client, button)
    assert ConsumerGroup.objects.get().paused


def test_messages_that_have_failed_are_retried(client, clock, no_handlers):
    sub = outage(clock)
    for _ in range(2):
        clock.advance(400)
        sub.heart.beat()
    button = seen(client, "stuck")[1].button
    assert button.text == "Retry now"
    opened(client, button)


def test_the_messages_of_a_key_that_fails_are_not_retried_before_it_is_fixed(client, clock, no_handlers):
    def handle(delivery):
        if delivery.payload == "tenant-13":
            refuse(delivery)

    options = {"mode": "shared", "backoff": Backoff(initial=10, factor=1, jitter=0), "max_attempts": None}
    subscriber("t", group="g", **options)(handle)
    sub = Sub(handler("t", "g", handle, **options))
    keys = [f"tenant-{10 + n % 5}" for n in range(100)]
    publish_many("t", [Message(key, key=key) for key in keys])
    for _ in range(3):
        clock.advance(65)
        sub.heart.beat()
        sub.settle()
        sub.poller.write_rollups()
    found = seen(client, "retrying")[1]
    assert "the key 'tenant-13', of which all attempts fail" in found.cause.text
    assert found.button is None, "another attempt would be used up"
    assert "deadletters/?state=retrying&key=tenant-13" in found.link


def test_dead_letters_are_redriven_up_to_the_newest_that_was_counted(client, clock, no_handlers):
    sub = outage(clock, max_attempts=1)
    assert seen(client, "failing")[1].button is None, "redriven messages would fail again"
    Rollup.objects.update(acked=20)
    sub.heart.beat()
    _, found = seen(client, "recent_dead_letters")
    assert found.button.text == "Redrive"
    given = hidden(opened(client, found.button))
    assert (given["topic"], given["group"]) == (["t_dlq"], ["g"])
    assert given["upto"] == [str(QueueMessage.objects.latest("offset").offset)]


def test_a_forgotten_group_is_dropped(client, clock):
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    other = Sub(handler("u", "other"))
    log(1)
    clock.advance(100)
    other.heart.beat()
    assert seen(client, "no_subscriber")[1].button is None, "it may be back soon"
    clock.advance(3700)
    other.heart.beat()
    button = seen(client, "no_subscriber")[1].button
    assert button.text == "Drop group"
    opened(client, button)


def test_quarantined_messages_are_requeued(client):
    for _ in range(2):
        QuarantinedMessageFactory(topic="t")
    button = seen(client, "quarantined")[1].button
    assert button.text == "Requeue"
    opened(client, button)
    QuarantinedMessageFactory(topic="u")
    assert seen(client, "quarantined")[1].button is None, "each topic has a form of its own"


def test_who_may_not_operate_has_no_button(make_client, clock, no_handlers, settings):
    outage(clock)
    banner, found = seen(make_client("view_dashboard"), "failing")
    assert (banner.button, found.button) == (None, None)
    assert found.action == "Open group"
    settings.AUTHENTICATION_BACKENDS = ["tests.support.topic_permissions.OnTopics"]
    for topics, has_button in ((("t",), True), (("u",), False)):
        client = make_client()
        name = User.objects.latest("pk").username
        OnTopics.granted = {(name, "django_mysqlqueue.operate_dashboard", one) for one in topics}
        OnTopics.granted.add((name, "django_mysqlqueue.view_dashboard", "t"))
        assert (seen(client, "failing")[1].button is not None) == has_button


def test_an_error_that_is_redacted_has_the_name_that_is_left(client, clock, no_handlers, settings):
    settings.MYSQLQUEUE = {"REDACT": hide}
    outage(clock)
    banner, found = seen(client, "failing")
    assert banner.status.text.endswith(": Hidden.")
    assert found.cause.text.endswith(": Hidden.")
    assert "ConnectionError" not in client.get(ROOT).content.decode()


def test_an_error_of_jobs_is_named_to_those_who_may_view_it(client, make_client, clock, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    sub = Sub(registry.handlers()[JOBS])
    clock.advance(1)
    for _ in range(3):
        for number in range(5):
            jobs.fail.enqueue(number)
        sub.settle()
        sub.poller.write_rollups()
        clock.advance(65)
        sub.heart.beat()
    sequence()
    banner, found = seen(client, "failing")
    assert banner.status.text.endswith(": ValueError.")
    assert found.button is None, "its jobs would fail again"
    banner, found = seen(make_client("view_dashboard"), "failing")
    assert banner.status.text == found.cause.text
    assert "ValueError" not in found.cause.text
    assert found.error == "(errors of jobs are hidden)"
