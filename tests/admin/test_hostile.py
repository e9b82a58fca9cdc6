"""The dashboard survives what is stored and what is sent: payloads, numbers and selections made to break it."""

from __future__ import annotations

import pytest
from django.utils import timezone

from django_mysqlqueue import publish
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from tests.support.dashboard import ROOT, confirm, page
from tests.support.handlers import fail
from tests.support.harness import Sub, handler, sequence
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
        pytest.param(b"a\x00\xff<b>", "a\x00\\xff<b>", id="bytes"),
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


@pytest.mark.parametrize("deliver_at", [2**62, 253_402_300_799_999])
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
