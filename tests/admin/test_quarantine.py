"""The page of messages that the log has refused."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User

from django_mysqlqueue.admin.operations import quarantine
from django_mysqlqueue.admin.pages import quarantine as pages
from django_mysqlqueue.models import OutboxMessage, QuarantinedMessage
from tests.support.dashboard import ROOT, confirm, page
from tests.support.factories import QuarantinedMessageFactory
from tests.support.topic_permissions import OnTopics

pytestmark = pytest.mark.usefixtures("db")

CONFIDENTIAL = "Incorrect value: 'secret'"
JOBS = "jobs.default"


def hide(text, *, topic, kind):
    return text.replace("secret", f"[{kind} of {topic}]")


@pytest.fixture
def row(db):
    return QuarantinedMessage.objects.create(
        topic="t", partition_key="k", message_id="i<", payload=b"1", deliver_at=0, created_at=1, reason="no <bad> ones"
    ).pk


@pytest.fixture
def make(make_client, settings):
    """Makes the client of a user who may view and operate some topics only."""
    settings.AUTHENTICATION_BACKENDS = ["tests.support.topic_permissions.OnTopics"]
    OnTopics.granted.clear()

    def one(*topics, permissions=("view_dashboard", "operate_dashboard")):
        client = make_client()
        name = User.objects.latest("pk").username
        OnTopics.granted.update((name, f"django_mysqlqueue.{one}", topic) for one in permissions for topic in topics)
        return client

    return one


def ids(client, **query):
    return [row.message_id for row in client.get(f"{ROOT}quarantine/", query).context["rows"]]


def test_the_page_lists_messages_with_the_reason(client, row):
    text = client.get(f"{ROOT}quarantine/").content.decode()
    assert "no &lt;bad&gt; ones" in text
    assert "i&lt;" in text


def test_an_empty_quarantine(client):
    assert "The quarantine is empty." in page(client, "quarantine")
    assert "The quarantine has no messages of t." in page(client, "quarantine", topic="t")


def test_the_overview_links_to_it(client, row):
    text = page(client)
    assert "The log has refused 1 message of topic 't'" in text
    assert "Open quarantine" in text
    QuarantinedMessageFactory(topic="u")
    causes = [one for one in client.get(ROOT).context["causes"] if one.cause.kind == "quarantined"]
    assert [(one.link, [symptom.link for symptom in one.symptoms]) for one in causes] == [
        (f"{ROOT}quarantine/", [f"{ROOT}quarantine/?topic=t", f"{ROOT}quarantine/?topic=u"])
    ]


def test_a_message_is_requeued(client, row):
    assert confirm(client, "requeue", row=row) == ["Messages moved back into the outbox: 1."]
    assert OutboxMessage.objects.get().message_id == "i<"


def test_a_message_is_deleted(client, row):
    assert confirm(client, "delete-quarantined", row=row) == ["Messages deleted from the quarantine: 1."]
    assert not QuarantinedMessage.objects.exists()


@pytest.mark.promise("Permissions by topic")
@pytest.mark.parametrize("address", ["", "quarantine/"])
def test_the_reason_is_redacted(client, settings, address):
    settings.MYSQLQUEUE = {"REDACT": "tests.admin.test_quarantine.hide"}
    QuarantinedMessageFactory(reason=CONFIDENTIAL)
    text = client.get(f"{ROOT}{address}").content.decode()
    assert "secret" not in text
    assert "[error of t]" in text


@pytest.mark.promise("Permissions by topic")
@pytest.mark.parametrize("address", ["", "quarantine/"])
def test_the_reason_of_a_job_needs_the_permission_to_see_payloads(make_client, address):
    QuarantinedMessageFactory(topic=JOBS, reason=CONFIDENTIAL)
    for permissions, is_shown in ((["view_dashboard"], False), (["view_dashboard", "see_payloads"], True)):
        text = make_client(*permissions).get(f"{ROOT}{address}").content.decode()
        assert ("secret" in text) is is_shown
        assert ("(errors of jobs are hidden)" in text) is not is_shown


@pytest.mark.promise("Permissions by topic")
def test_so_does_the_error_of_the_outbox(make_client, settings):
    """A row that the outbox refuses cannot be requeued."""
    settings.MYSQLQUEUE = {"REDACT": "tests.admin.test_quarantine.hide_rule"}
    client = make_client("view_dashboard", "operate_dashboard")
    for topic, said in (("t", "[rule]"), (JOBS, "(errors of jobs are hidden)")):
        (said_now,) = confirm(client, "requeue", row=QuarantinedMessageFactory(topic=topic, deliver_at=-1).pk)
        assert said in said_now
        assert "year_9999" not in said_now


def hide_rule(text, *, topic, kind):
    return text.replace("deliver_at_from_0_to_year_9999", "[rule]")


@pytest.mark.promise("Permissions by topic")
def test_the_messages_of_a_topic_are_found_behind_those_of_others(make, monkeypatch):
    monkeypatch.setattr(pages, "PAGE_ROWS", 2)
    for topic in ("t", "t", "t", "u", "t", "u_dlq", "v", "u"):
        QuarantinedMessageFactory(topic=topic, message_id=f"{topic}.{QuarantinedMessage.objects.count()}")
    client = make("u", "v")
    assert ids(client) == ["u.3", "u_dlq.5"]
    assert ids(client, after=client.get(f"{ROOT}quarantine/").context["next_place"]) == ["v.6", "u.7"]
    assert ids(client, topic="u") == ["u.3", "u.7"]
    assert client.get(f"{ROOT}quarantine/").context["topics"] == ["u", "u_dlq", "v"]
    assert client.get(f"{ROOT}quarantine/", {"topic": "t"}).status_code == 403


def test_pages_of_the_whole_list(client, monkeypatch):
    monkeypatch.setattr(pages, "PAGE_ROWS", 2)
    for number in range(5):
        QuarantinedMessageFactory(topic=f"t{number % 2}", message_id=f"i{number}")
    found, after = [], ""
    while after is not None:
        answer = client.get(f"{ROOT}quarantine/", {"after": after})
        found.append([row.message_id for row in answer.context["rows"]])
        after = answer.context["next_place"]
    assert found == [["i0", "i1"], ["i2", "i3"], ["i4"]]


@pytest.mark.promise("Permissions by topic")
def test_who_may_view_one_topic_comes_to_the_page_from_the_overview(make):
    QuarantinedMessageFactory(topic="u")
    QuarantinedMessageFactory(topic="t", message_id="secret-one")
    client = make("u")
    answer = client.get(ROOT)
    assert "secret-one" not in answer.content.decode()
    (cause,) = [one for one in answer.context["causes"] if one.cause.kind == "quarantined"]
    assert (cause.link, cause.action) == (f"{ROOT}quarantine/?topic=u", "Open quarantine")


@pytest.mark.parametrize(
    ("name", "done", "moved"),
    [
        ("requeue-topic", "Messages moved back into the outbox: 2.", 2),
        ("delete-quarantined-topic", "Messages deleted from the quarantine: 2.", 0),
    ],
)
def test_all_messages_of_a_topic(client, monkeypatch, name, done, moved):
    monkeypatch.setattr(quarantine.IdsField, "most", 2)
    rows = [QuarantinedMessageFactory(topic=topic) for topic in ("t", "u", "t", "t", "t")]
    given = {"topic": "t", "upto": rows[3].pk}
    asked = client.get(f"{ROOT}do/{name}/", given).content.decode()
    assert "One request changes the oldest 2" in asked
    assert "manage.py queuequarantine --topic t" in asked
    assert confirm(client, name, **given)[0].startswith(done)
    assert OutboxMessage.objects.count() == moved
    assert confirm(client, name, **given)[0].startswith(done.replace("2", "1")), "not the one after the page"
    assert list(QuarantinedMessage.objects.order_by("pk").values_list("topic", flat=True)) == ["u", "t"]
    asked = client.get(f"{ROOT}do/{name}/", given).content.decode()
    assert "The quarantine has no such messages." in asked


def test_the_preview_says_what_will_not_be_delivered(client):
    OutboxMessage.objects.create(topic="t", partition_key="k", message_id="i", payload=b"1")
    row = QuarantinedMessageFactory(message_id="i")
    asked = client.get(f"{ROOT}do/requeue/", {"row": row.pk}).content.decode()
    assert "duplicates" in asked
