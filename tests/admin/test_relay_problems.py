"""Where the overview leads from a relay that is stalled."""

from __future__ import annotations

import pytest

from django_mysqlqueue import publish
from django_mysqlqueue.models import QueueMessage
from tests.support.dashboard import ROOT, page
from tests.support.harness import first_place
from tests.support.internals import note_refusal, sequence

VIA, HOME = "default", "queue"


@pytest.fixture(autouse=True)
def _topics(queue_db, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"orders": {"DATABASE": HOME, "VIA": VIA}}}


def linked(client):
    causes = client.get(ROOT, {"database": VIA}).context["causes"]
    return next(one for one in causes if one.cause.kind == "relay")


def test_a_refused_message_is_opened(client):
    publish("orders", 1, id="i1")
    sequence(VIA)
    offset = QueueMessage.objects.get().offset
    note_refusal(VIA, HOME, first_place(VIA), "DataError: too long")
    one = linked(client)
    assert "message 'i1' of topic 'orders'" in one.cause.text
    assert (one.action, f"offset={offset}" in one.link) == ("Open message", True)
    assert "i1" in page(client, "message", offset=offset, database=VIA)


@pytest.mark.promise("Permissions by topic")
def test_the_error_is_redacted(client, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "REDACT": "tests.admin.test_relay_problems.hide"}
    publish("orders", 1, id="i1")
    sequence(VIA)
    note_refusal(VIA, HOME, first_place(VIA), "DataError: Incorrect value: 'secret'")
    one = linked(client)
    assert "secret" not in one.cause.text
    assert one.error == "DataError: Incorrect value: '[error of orders]'"
    assert "secret" not in page(client, "", database=VIA)


def hide(text, *, topic, kind):
    return text.replace("secret", f"[{kind} of {topic}]")


def test_a_database_that_does_not_answer_has_no_page(client, clock):
    publish("orders", 1)
    sequence(VIA)
    clock.advance(60)
    assert (linked(client).link, linked(client).action) == ("", "")
