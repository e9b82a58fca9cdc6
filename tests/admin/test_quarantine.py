"""The page of messages that the log has refused."""

from __future__ import annotations

import pytest

from django_mysqlqueue.models import OutboxMessage, QuarantinedMessage
from tests.support.dashboard import ROOT, confirm, page

pytestmark = pytest.mark.usefixtures("db")


@pytest.fixture
def row(db):
    return QuarantinedMessage.objects.create(
        topic="t", partition_key="k", message_id="i<", payload=b"1", deliver_at=0, created_at=1, reason="no <bad> ones"
    ).pk


def test_the_page_lists_messages_with_the_reason(client, row):
    text = client.get(f"{ROOT}quarantine/").content.decode()
    assert "no &lt;bad&gt; ones" in text
    assert "i&lt;" in text


def test_an_empty_quarantine(client):
    assert "The quarantine is empty." in page(client, "quarantine")


def test_the_overview_links_to_it(client, row):
    text = page(client)
    assert "The log has refused 1 message" in text
    assert "Open quarantine" in text


def test_a_message_is_requeued(client, row):
    assert confirm(client, "requeue", row=row) == ["Messages moved back into the outbox: 1."]
    assert OutboxMessage.objects.get().message_id == "i<"


def test_a_message_is_deleted(client, row):
    assert confirm(client, "delete-quarantined", row=row) == ["Messages deleted from the quarantine: 1."]
    assert not QuarantinedMessage.objects.exists()
