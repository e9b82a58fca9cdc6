"""Edit and redrive on the dashboard."""

from __future__ import annotations

import json
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection

from django_mysqlqueue.models import OutboxMessage, QueueMessage
from django_mysqlqueue.operations import redriving
from tests.support.dashboard import ROOT, confirm, hidden, page
from tests.support.dead_letter_pages import ask, fail_with, listed, offsets, redriven
from tests.support.handlers import fail
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import DeadLetterFilter
from tests.support.scenarios import offsets_of

pytestmark = pytest.mark.any_engine


def test_edit_and_redrive(client):
    offset = fail_with({"order": "ä"}, "broken", key="k", id="seven", metadata={"from": "web"})
    asked = client.get(f"{ROOT}do/edit/", {"offset": offset})
    assert asked.context["form"]["payload"].value() == '{\n  "order": "ä"\n}'
    assert b"The payload is unchanged" not in asked.content
    assert b'name="confirmed"' not in asked.content
    text = ask(client, "edit", offset=offset, payload='{"order": "ö"}')
    assert "A new message of 14 bytes will replace the dead letter. Only the group g/t receives it." in text
    (told,) = confirm(client, "edit", offset=offset, payload='{\r\n"order": "ö"}')
    sequence()
    sent = QueueMessage.objects.get(target_group="g")
    assert told == f"The message {sent.message_id} has replaced the dead letter."
    assert json.loads(bytes(sent.payload)) == {"order": "ö"}
    assert sent.metadata["from"] == "web"
    assert redriven() == [{"order": "ö"}]
    assert not offsets(listed(client))
    assert "edited and redriven" in page(client, "deadletter", offset=offset)
    assert LogEntry.objects.get().object_repr == f"dead letter {offset}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"order": ', "Invalid JSON: Expecting value (line 1, column 11)."),
        ('{"order": NaN}', "Invalid JSON: NaN."),
        ('{"order": 1e999}', "cannot be written as JSON"),
        ('"\\ud800"', "cannot be written as JSON"),
        ("[" * 100_000, "Invalid JSON"),
        ('"' + "x" * 200 + '"', "MAX_PAYLOAD_BYTES allows 100"),
        ('{"order":7}', "The payload is unchanged"),
        ("", "This field is required."),
    ],
)
def test_a_payload_that_cannot_be_sent_is_told_so_and_kept(client, settings, text, says):
    offset = fail_with({"order": 7}, "broken")
    settings.MYSQLQUEUE = {"MAX_PAYLOAD_BYTES": 100} if "MAX" in says else {}
    asked = client.post(f"{ROOT}do/edit/", {"offset": offset, "payload": text, "asked": "yes", "confirmed": "yes"})
    form = asked.context["form"]
    assert says in str(form.errors["payload"][0])
    assert form["payload"].value() == text
    assert says in unescape(asked.content.decode())
    assert b'name="confirmed"' not in asked.content
    assert offsets(listed(client)) == [offset]
    assert not OutboxMessage.objects.exists()


def test_what_is_sent_is_what_was_previewed(client):
    offset = fail_with({"order": 7}, "broken")
    address = f"{ROOT}do/edit/"
    asked = client.post(address, {"offset": offset, "payload": "8", "asked": "yes"})
    again = client.post(address, {**hidden(asked.content.decode()), "payload": "9", "confirmed": "yes"})
    assert again.status_code == 200
    assert not OutboxMessage.objects.exists()


def test_a_letter_that_somebody_else_took_meanwhile(client):
    offset = fail_with(7, "broken")
    address = f"{ROOT}do/edit/"
    asked = client.post(address, {"offset": offset, "payload": "8", "asked": "yes"})
    redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor="eve")
    late = client.post(address, {**hidden(asked.content.decode()), "payload": "8", "confirmed": "yes"})
    assert "There is no dead letter at this offset." in unescape(late.content.decode())
    assert OutboxMessage.objects.count() == 1


def plain(payload, metadata="{}"):
    """A dead letter whose message plain SQL enqueued."""
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO queue_outbox (topic, payload, metadata) VALUES ('t', %s, %s)", (payload, metadata))
    sub = Sub(handler("t", "g", fail, max_attempts=1))
    sub.settle()
    sub.leave()
    sequence()
    return offsets_of("t_dlq")[-1]


def test_broken_json_of_plain_sql_becomes_json(client):
    offset = plain(b'{"order": 7')
    text = '{"order": 7}'
    assert client.get(f"{ROOT}do/edit/", {"offset": offset}).context["form"]["payload"].value() == '{"order": 7'
    confirm(client, "edit", offset=offset, payload=text)
    assert redriven() == [{"order": 7}]


def test_what_says_that_it_is_json_and_is_not_must_become_json(client):
    offset = plain(b'{"order": 7', '{"content_type": "application/json"}')
    assert "Invalid JSON" in ask(client, "edit", offset=offset, payload='{"order": 8')
    confirm(client, "edit", offset=offset, payload='{"order": 8}')
    assert redriven() == [{"order": 8}]


def test_a_text_keeps_its_line_ends(client):
    offset = fail_with(b"one\ntwo", "broken", metadata={"content_type": "text/plain"})
    assert client.get(f"{ROOT}do/edit/", {"offset": offset}).context["form"]["payload"].value() == "one\ntwo"
    assert "The payload is unchanged" in ask(client, "edit", offset=offset, payload="one\r\ntwo")
    confirm(client, "edit", offset=offset, payload="one\r\nthree")
    sequence()
    sent = QueueMessage.objects.get(target_group="g")
    assert bytes(sent.payload) == b"one\nthree"
    assert sent.metadata["content_type"] == "text/plain"


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"\xff\x00", "The payload is not text"),
        (b"one\r\ntwo", "would change its line endings"),
        (b"x" * 300_000, "too long to edit here"),
    ],
)
def test_what_a_form_cannot_carry_is_not_edited(client, payload, says):
    offset = fail_with(payload, "broken")
    text = page(client, "deadletter", offset=offset)
    assert says in text
    assert "do/edit/" not in text
    assert f"{len(payload):,} bytes in total" in text or len(payload) < 100
    for answer in (page(client, "do/edit", offset=offset), ask(client, "edit", offset=offset, payload="x")):
        assert says in answer
        assert "<textarea" not in answer


@pytest.mark.parametrize("offset", ["", "x", "0", "99", "9" * 40])
def test_an_edit_of_nothing(client, offset):
    text = ask(client, "edit", offset=offset, payload="1")
    assert "<textarea" not in text
    assert 'name="confirmed"' not in text
