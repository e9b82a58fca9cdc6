"""Payloads and operations by topic: two users, two topics, every operation."""

from __future__ import annotations

import json
import re
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connection
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.admin.operations import OPERATIONS
from django_mysqlqueue.admin.pages import PAGES
from django_mysqlqueue.exceptions import OperationRefused, SubscriberError
from django_mysqlqueue.models import (
    ConsumerGroup,
    DeliveryState,
    OutboxMessage,
    QuarantinedMessage,
    QueueMessage,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations import group_settings
from tests.support import job_worlds, schedule_worlds
from tests.support.dashboard import ROOT, hidden
from tests.support.factories import QuarantinedMessageFactory
from tests.support.harness import Sub, handler, sequence
from tests.support.internals import heartbeats, registry
from tests.support.job_pages import job
from tests.support.topic_permissions import OnTopics

pytestmark = [pytest.mark.any_engine, pytest.mark.any_version]
TOPICS = ("t", "u")


@pytest.fixture
def make(make_client, settings):
    """Makes the client of a user who may view the dashboard, with further permissions on topics."""
    settings.AUTHENTICATION_BACKENDS = ["tests.support.topic_permissions.OnTopics"]
    OnTopics.granted.clear()

    def one(*permissions, on=()):
        client = make_client("view_dashboard", *permissions)
        name = User.objects.latest("pk").username
        OnTopics.granted.update((name, f"django_mysqlqueue.{permission}", topic) for permission, topic in on)
        return client

    return one


@pytest.fixture
def queue(db):
    """In both topics: a group with a lease, a dead letter, a failed, an unclaimed and a scheduled message."""
    for topic in TOPICS:
        publish_many(topic, (Message(f"secret {topic} {n}", key="k") for n in range(3)))
        publish(topic, f"secret {topic} later", id=f"later {topic}", delay=600)
        schedule_worlds.registered(schedule_worlds.of_topic(topic), name=f"{topic}.s")
    sequence()
    sub = Sub(*(handler(topic, function=_handle) for topic in TOPICS)).step()
    sub.work(4)
    sub.flush()
    sequence()
    return sub


def _handle(delivery):
    if delivery.payload.endswith("0"):
        delivery.reject("secret reason")
    else:
        delivery.nack(delay=600)


def parameters(name, topic):
    """The query string of an operation on a topic."""
    given = {"group": "g", "topic": topic}
    if name in ("cancel", "deliver-now", "move"):
        return {"row": str(OutboxMessage.objects.get(topic=topic).outbox_id), "time": "2100-01-01T00:00:00"}
    if name in ("requeue", "delete-quarantined"):
        refused = {"payload": b"1", "deliver_at": 0, "created_at": 1, "reason": "an error"}
        return {"row": str(QuarantinedMessage.objects.get_or_create(topic=topic, defaults=refused)[0].pk)}
    if name in ("requeue-topic", "delete-quarantined-topic"):
        return {"topic": topic, "upto": parameters("requeue", topic)["row"]}
    if name.endswith("-recurring"):
        return {"schedule": f"{topic}.s"}
    if name == "edit":
        return {"offset": str(QueueMessage.objects.get(topic=f"{topic}_dlq").offset)}
    if name in ("redrive", "redrive-selected", "discard", "discard-selected"):
        offset = QueueMessage.objects.get(topic=f"{topic}_dlq").offset
        return {"topic": f"{topic}_dlq", "row": str(offset), "reason": "test"}
    if name in ("retry-selected", "dead-letter"):
        given["row"] = str(DeliveryState.objects.filter(topic=topic).latest("message_offset").message_offset)
    if name == "replay":
        first = str(QueueMessage.objects.filter(topic=topic).earliest("offset").offset)
        given |= {"first": first, "last": first}
    given.setdefault("row", '"k"')
    return given | {"time": "2100-01-01T00:00:00", "option": "prefetch", "value": "5"}


ELSEWHERE = ("forget", "cancel-jobs", "create-recurring", "edit-recurring")
"""``test_jobs.py`` cancels jobs, ``test_edit_schedules.py`` creates and edits schedules."""
NAMES = [name for name in OPERATIONS if name not in ELSEWHERE]


@pytest.mark.promise("Permissions by topic")
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_needs_the_permission_on_its_topic(make, queue, name):
    needed = ("operate_dashboard", "see_payloads", "publish_messages")
    mine, nobody, everything = make(on=[(permission, "t") for permission in needed]), make(), make(*needed)
    for topic in TOPICS:
        given = parameters(name, topic)
        for send in ("get", "post"):
            answers = [getattr(client, send)(f"{ROOT}do/{name}/", given) for client in (mine, nobody, everything)]
            assert [answer.status_code for answer in answers] == [200 if topic == "t" else 403, 403, 200], (send, topic)


@pytest.mark.promise("Permissions by topic")
def test_operating_with_the_permission_on_a_topic(make, queue):
    client = make(on=[("operate_dashboard", "t")])
    asked = client.get(f"{ROOT}do/pause/", {"group": "g", "topic": "t"})
    values = {**hidden(asked.content.decode()), "confirmed": "yes"}
    assert client.post(f"{ROOT}do/pause/", values).status_code == 302
    assert client.post(f"{ROOT}do/pause/", {**values, "topic": "u"}).status_code == 403
    assert dict(ConsumerGroup.objects.values_list("topic", "paused")) == {"t": True, "u": False}


def test_a_selection_over_topics_needs_the_permission_on_all(make, queue):
    rows = [str(one) for one in OutboxMessage.objects.values_list("outbox_id", flat=True)]
    client = make(on=[("operate_dashboard", "t")])
    assert client.get(f"{ROOT}do/cancel/", {"row": rows}).status_code == 403
    client = make(on=[("operate_dashboard", "t"), ("operate_dashboard", "u")])
    assert client.get(f"{ROOT}do/cancel/", {"row": rows}).status_code == 200


def test_what_is_of_no_topic_needs_the_permission_on_all(make, queue):
    client = make(on=[("operate_dashboard", "t"), ("operate_dashboard", "u")])
    assert client.get(f"{ROOT}do/forget/", {"subscriber": queue.name}).status_code == 403
    assert client.get(f"{ROOT}do/cancel/", {"row": "999999"}).status_code == 403
    assert client.get(f"{ROOT}do/edit/", {"offset": "999999"}).status_code == 403
    assert client.get(f"{ROOT}do/run-recurring/", {"schedule": "nothing"}).status_code == 403
    assert client.get(f"{ROOT}do/pause/").status_code == 403


@pytest.mark.promise("Permissions by topic")
def test_payloads_are_shown_with_the_permission_on_their_topic(make, queue):
    client = make(on=[("see_payloads", "t")])

    def text(name, **query):
        return client.get(f"{ROOT}{name}/", query).content.decode()

    for topic in TOPICS:
        offset = QueueMessage.objects.filter(topic=topic).latest("offset").offset
        dead = QueueMessage.objects.get(topic=f"{topic}_dlq").offset
        shown = topic == "t"
        assert (f"secret {topic} 2" in text("message", offset=offset)) is shown
        assert (f"secret {topic} 0" in text("message", offset=dead)) is shown
        assert (f"secret {topic} 0" in text("deadletter", offset=dead)) is shown
        assert (f"secret {topic} later" in text("scheduled")) is shown
        assert (f"secret {topic} later" in text("scheduled", topic=topic)) is shown


def test_buttons_are_shown_with_the_permission_on_the_topic(make, queue):
    client = make(on=[("operate_dashboard", "t"), ("see_payloads", "t")])
    for topic in TOPICS:
        dead = QueueMessage.objects.get(topic=f"{topic}_dlq").offset
        for name, query in (
            ("group", {"group": "g", "topic": topic}),
            ("deadletter", {"offset": dead}),
            ("deadletters", {"topic": topic}),
            ("scheduled", {"topic": topic}),
            ("offsets", {"group": "g", "topic": topic}),
        ):
            page = client.get(f"{ROOT}{name}/", query).content.decode()

            assert ("mq-actions" in page or "do/retry-error/" in page) is (topic == "t"), (name, topic)


def test_the_search_of_errors_needs_payloads_of_the_topic_with_redact(make, queue, settings):
    settings.MYSQLQUEUE = {"REDACT": "tests.admin.test_topic_permissions.hide"}
    client = make(on=[("see_payloads", "t")])
    assert client.get(f"{ROOT}deadletters/", {"topic": "t", "error": "x"}).status_code == 200
    assert client.get(f"{ROOT}deadletters/", {"topic": "u", "error": "x"}).status_code == 403


def hide(text, *, topic, kind):
    return text


# -- viewing by topic ----------------------------------------------------------------


@pytest.fixture
def hidden_queue(db):
    """A topic that one may view, and another one. Nothing of the other one may be seen."""
    for topic, key, group in (("t", "k", "g"), ("hidden.topic", "hidden.key", "hidden.group")):
        publish_many(topic, (Message(f"{topic} {n}", key=key) for n in range(3)))
        publish(topic, "later", id=f"{topic}.later", key=key, delay=600)
        schedule_worlds.registered(schedule_worlds.of_topic(topic), age=200, name=f"{topic}.s")
        QuarantinedMessageFactory(topic=topic, partition_key=key, message_id=f"{topic}.q", reason=f"{topic} refused")
        sequence()
        sub = Sub(handler(topic, group, function=_handle), name=f"{group}.subscriber").step()
        sub.work(2)
        sub.flush()
        sub.poller.write_rollups()
        sequence()
    offset = QueueMessage.objects.filter(topic="hidden.topic").latest("offset").offset
    dead = QueueMessage.objects.get(topic="hidden.topic_dlq").offset
    mine = QueueMessage.objects.filter(topic="t").latest("offset").offset
    return offset, dead, mine, QueueMessage.objects.get(topic="t_dlq").offset


@pytest.fixture
def viewer(make_client, settings):
    """The client of a user who may view, see and operate one topic, and nothing in general."""
    settings.AUTHENTICATION_BACKENDS = ["tests.support.topic_permissions.OnTopics"]
    OnTopics.granted.clear()
    client = make_client()
    name = User.objects.latest("pk").username
    for permission in ("view_dashboard", "see_payloads", "operate_dashboard", "publish_messages"):
        OnTopics.granted.add((name, f"django_mysqlqueue.{permission}", "t"))
    return client


OF_THE_TOPIC = (
    ("", {}),
    ("", {"span": "day"}),
    ("group/", {"group": "g", "topic": "t"}),
    ("messages/", {"topic": "t"}),
    ("messages/", {"topic": "t", "key": "k"}),
    ("messages/", {"topic": "t_dlq"}),
    ("deadletters/", {"topic": "t"}),
    ("deadletters/", {"topic": "t_dlq", "group": "g"}),
    ("deadletters/", {}),
    ("deadletters/", {"group": "g", "topic": "t", "state": "retrying"}),
    ("scheduled/", {"topic": "t"}),
    ("quarantine/", {}),
    ("quarantine/", {"topic": "t"}),
    ("recurring/", {}),
    ("recurring/", {"topic": "t"}),
    ("inflight/", {}),
    ("inflight/", {"group": "g", "topic": "t"}),
    ("offsets/", {}),
    ("offsets/", {"group": "g", "topic": "t"}),
    ("offsets/", {"order": "behind"}),
)


@pytest.mark.promise("Permissions by topic")
@pytest.mark.parametrize(("page", "query"), OF_THE_TOPIC)
def test_a_page_shows_what_one_may_view_and_nothing_of_the_rest(viewer, hidden_queue, page, query):
    answer = viewer.get(f"{ROOT}{page}", query)
    assert answer.status_code == 200
    text = answer.content.decode()
    assert "hidden." not in text
    assert ">t<" in text or "t_dlq" in text or "g" in query.get("group", "")


def test_the_tab_of_jobs_opens_what_one_may_view(viewer, hidden_queue, make_client, settings):
    """The page of tasks is about all topics, and so are subscribers."""
    settings.TASKS = job_worlds.TASKS
    assert f'href="{ROOT}jobs/"' in viewer.get(ROOT).content.decode()
    assert f'href="{ROOT}tasks/"' not in viewer.get(f"{ROOT}jobs/").content.decode()
    assert viewer.get(f"{ROOT}tasks/").status_code == 403
    assert "workers" not in viewer.get(f"{ROOT}inflight/").context
    client = make_client("view_dashboard")
    assert f'href="{ROOT}tasks/"' in client.get(ROOT).content.decode()
    assert client.get(f"{ROOT}inflight/").context["workers"]


@pytest.mark.promise("Permissions by topic")
def test_counts_are_of_what_one_may_view(viewer, hidden_queue, make_client):
    text = viewer.get(ROOT).content.decode()
    cards = dict(re.findall(r"<dt>([^<]+)</dt><dd>(?:<a [^>]*>)?(?:<bdi>)?([^<]+)", text))
    kinds = [row.kind for row in viewer.get(f"{ROOT}deadletters/").context["kinds"].rows]
    assert sorted((kind.ref, str(kind.retrying), str(kind.dead_letters)) for kind in kinds) == [
        (("g", "t"), "0", "1"),
        (("g", "t"), "1", "0"),
    ]
    assert cards["backlog"] == "2"
    assert cards["dead letters"] == "1"
    assert set(cards) == {"backlog", "in flight", "retrying", "dead letters"}, "nothing of the whole queue"
    whole = make_client("view_dashboard").get(ROOT).content.decode()
    assert _charted(whole) == [2 * number for number in _charted(text)]
    assert sum(_charted(text)) > 1


@pytest.mark.promise("Permissions by topic")
def test_problems_are_of_what_one_may_view(viewer, hidden_queue, make_client):
    lost = SubscriberHeartbeat.objects.filter(consumer_group="hidden.group")
    assert lost.update(heartbeat_at=F("heartbeat_at") - 3_600_000)
    OutboxMessage.objects.filter(topic="hidden.topic").update(deliver_at=1, created_at=1)  # one of the whole queue
    whole = _problems(make_client("view_dashboard").get(ROOT).content.decode())
    assert "hidden." in whole
    assert 'data-kind="outbox' in whole
    found = _problems(viewer.get(ROOT).content.decode())
    assert "hidden." not in found
    assert 'data-kind="outbox' not in found


def _charted(text):
    """The totals of failed and of dead-lettered deliveries."""
    return [int(one) for one in re.findall(r"mq-(?:failed|dead)\"></span>(\d+)", text)]


def _problems(text):
    return text[text.index('id="mq-problems"') : text.index('class="mq-charts"')]


@pytest.mark.promise("Permissions by topic")
@pytest.mark.parametrize(
    ("page", "query"),
    [
        ("group/", {"group": "hidden.group", "topic": "hidden.topic"}),
        ("group/", {"group": "nobody", "topic": "nothing"}),
        ("messages/", {}),
        ("messages/", {"topic": "hidden.topic"}),
        ("messages/", {"topic": "hidden.topic_dlq"}),
        ("messages/", {"id": "hidden.topic.later"}),
        ("messages/", {"before": "100"}),
        ("deadletters/", {"topic": "hidden.topic"}),
        ("deadletters/", {"topic": "hidden.topic", "state": "retrying"}),
        ("scheduled/", {}),
        ("scheduled/", {"topic": "hidden.topic"}),
        ("scheduled/", {"topic": "hidden.topic", "id": "hidden.topic.later"}),
        ("quarantine/", {"topic": "hidden.topic"}),
        ("recurring/", {"topic": "hidden.topic"}),
        ("inflight/", {"group": "hidden.group", "topic": "hidden.topic"}),
        ("offsets/", {"group": "hidden.group", "topic": "hidden.topic"}),
        ("offsets/", {"topic": "hidden.topic"}),
    ],
)
def test_a_page_of_other_topics_is_refused(viewer, hidden_queue, page, query):
    answer = viewer.get(f"{ROOT}{page}", query)
    assert answer.status_code == 403
    text = answer.content.decode()
    assert "You may view these topics: t. Choose one of them." in text
    # The heading repeats the query string.
    assert "hidden." not in re.sub(
        r"<title>.*?</title>|<h1>.*?</h1>|aria-current=\"page\">.*?</li>|&rsaquo; <bdi>.*?</bdi>",
        "",
        text,
        flags=re.DOTALL,
    )


@pytest.mark.promise("Permissions by topic")
def test_the_reason_of_a_refused_start_may_name_any_topic(viewer, hidden_queue):
    heartbeats.refuse("default", "web-1:0:1", {"host": "hidden.host", "refused": "hidden.topic", "groups": []})
    assert "hidden." not in viewer.get(ROOT).content.decode()


@pytest.mark.promise("Permissions by topic")
def test_messages_are_refused_by_their_topic(viewer, hidden_queue):
    offset, dead, mine, my_dead = hidden_queue
    for page in ("message", "deadletter"):
        for one in (offset, dead, 10**9):
            answer = viewer.get(f"{ROOT}{page}/", {"offset": one})
            assert answer.status_code == 403, (page, one)
            assert "hidden." not in answer.content.decode()
    for page, one in (("message", mine), ("message", my_dead), ("deadletter", my_dead)):
        answer = viewer.get(f"{ROOT}{page}/", {"offset": one})
        assert answer.status_code == 200
        assert "hidden." not in answer.content.decode()


@pytest.mark.promise("Permissions by topic")
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_no_operation_reaches_other_topics(viewer, hidden_queue, name):
    if name == "forget":
        given = {"subscriber": "hidden.group.subscriber"}
    else:
        given = parameters(name, "hidden.topic") | ({"group": "hidden.group"} if "edit" not in name else {})
    for send in (viewer.get, viewer.post):
        answer = send(f"{ROOT}do/{name}/", given)
        assert answer.status_code == 403
        text = answer.content.decode()
        if name == "publish":  # The form, which the viewer may open for their own topic, repeats what they typed.
            text = text.replace('value="hidden.topic"', "", 1)
        assert "hidden." not in text


def test_operating_needs_viewing(make_client, settings, hidden_queue):
    settings.AUTHENTICATION_BACKENDS = ["tests.support.topic_permissions.OnTopics"]
    OnTopics.granted.clear()
    client = make_client()
    name = User.objects.latest("pk").username
    OnTopics.granted.update({(name, "django_mysqlqueue.operate_dashboard", "t")})
    assert client.get(ROOT).status_code == 403
    OnTopics.granted.add((name, "django_mysqlqueue.view_dashboard", "hidden.topic"))
    assert client.get(f"{ROOT}do/pause/", {"group": "g", "topic": "t"}).status_code == 403


def test_the_index_of_the_admin_links_the_dashboard_for_those_who_may_view_a_topic(viewer, hidden_queue):
    assert ROOT in viewer.get("/admin/").content.decode()
    OnTopics.granted.clear()
    assert ROOT not in viewer.get("/admin/").content.decode()


@pytest.mark.promise("Cost")
def test_djangos_own_backend_is_not_asked_for_topics(make_client, hidden_queue):
    client = make_client()
    with CaptureQueriesContext(connection) as captured:
        assert client.get(ROOT).status_code == 403
    assert not [query for query in captured if "queue_" in query["sql"]]


# -- names that exist, and names that do not -------------------------------------------

PAIRS = {
    "group": ("hidden.group", "hiddeo.group"),
    "topic": ("hidden.topic", "hiddeo.topic"),
    "dlq": ("hidden.topic_dlq", "hiddeo.topic_dlq"),
    "key": ("hidden.key", "hiddeo.key"),
    "id": ("hidden.topic.later", "hiddeo.topic.later"),
    "schedule": ("hidden.topic.s", "hiddeo.topic.s"),
    "subscriber": ("hidden.group.subscriber", "hiddeo.group.subscriber"),
    "job": ("hidden.job", "hiddeo.job"),
}
"""Names that exist and that the viewer may not view, each with one that does not exist."""


def places():
    """The same for numbers: offsets, dead letters and scheduled messages of the hidden topic."""
    found = QueueMessage.objects.filter(topic="hidden.topic").latest("offset").offset
    dead = QueueMessage.objects.get(topic="hidden.topic_dlq").offset
    later = OutboxMessage.objects.get(topic="hidden.topic").outbox_id
    return {"offset": (found, 10**9), "dead": (dead, 10**9), "outbox": (later, 10**9)}


def normalized(answer, *names):
    """The text of an answer without what was asked for, tokens, digests, and numbers, which may be times."""
    text = (answer.getvalue() if answer.streaming else answer.content).decode()
    text = re.sub(r'(name="(?:csrfmiddlewaretoken|run|id|previewed)"[^>]* value=")[^"]*', r"\1", text)
    text = re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, "NAME")
    return re.sub(r"\d+(?:[.,:]\d+)*( (ms|s|min|h|d)\b)?( \d+ (s|min|h)\b)?", "#", text)


class Asked:
    """Sends each request with the hidden and with the absent name, and notes the answers that tell them apart."""

    def __init__(self, client):
        self._client = client
        self.told = []
        self.count = 0

    def both(self, method, address, given, field, pair, make=str):
        answers = []
        others = [value for value in given.values() if "hidden." in value]
        for name in pair:
            answer = getattr(self._client, method)(address, {**given, field: make(name)})
            names = [name] if isinstance(name, str) else []
            answers.append((answer.status_code, normalized(answer, *names, *others)))
            self.count += 1
        if answers[0] != answers[1] or "hidden." in answers[1][1]:
            lines = set(answers[0][1].splitlines()) ^ set(answers[1][1].splitlines())
            leaks = [line for line in answers[1][1].splitlines() if "hidden." in line]
            asked = {**given, field: pair[0]}
            self.told.append((method, address, asked, answers[0][0], answers[1][0], leaks or sorted(lines)[:5]))


@pytest.fixture
def hidden_job(hidden_queue, settings):
    settings.TASKS = job_worlds.TASKS
    job("hidden.job", queue_name="hidden", task_path="hidden.task")


OWN = {"group": "g", "topic": "t"}
QUERIES = (
    ("group", {}, "group"),
    ("group", {"topic": "t"}, "group"),
    ("group", {"topic": "hidden.topic"}, "group"),
    ("topic", {}, "topic"),
    ("topic", {"group": "g"}, "topic"),
    ("topic", {"group": "hidden.group"}, "topic"),
    ("topic", {}, "dlq"),
    ("key", {"topic": "t"}, "key"),
    ("key", OWN, "key"),
    ("id", {}, "id"),
    ("id", {}, "job"),
    ("id", {"topic": "t"}, "id"),
    ("id", {"topic": "t"}, "job"),
    ("offset", {}, "offset"),
    ("offset", {}, "dead"),
    ("offset", {"topic": "t"}, "offset"),
    ("before", {"topic": "t"}, "offset"),
    ("owner", OWN, "subscriber"),
    ("subscriber", OWN, "subscriber"),
    ("contains", {"topic": "t"}, "id"),
    ("error", {"topic": "t"}, "id"),
    ("by", {"topic": "t"}, "subscriber"),
)


@pytest.mark.promise("Permissions by topic")
@pytest.mark.timeout(600)
@pytest.mark.still_clock
def test_no_page_tells_hidden_names_from_absent_ones(viewer, hidden_job):
    asked, pairs = Asked(viewer), PAIRS | places()
    for page in PAGES:
        address = ROOT if page.name == "changelist" else f"{ROOT}{page.name}/"
        for form in ({}, {"format": "csv"})[: 1 + page.exports]:
            assert "hidden." not in normalized(viewer.get(address, form))
            for field, given, kind in QUERIES:
                asked.both("get", address, {**given, **form}, field, pairs[kind])
    assert not asked.told, "\n".join(map(str, asked.told[:9]))
    assert asked.count > 500


FIELDS = {
    "group": ("group",),
    "topic": ("topic", "dlq"),
    "key": ("key",),
    "schedule": ("schedule",),
    "subscriber": ("subscriber",),
    "offset": ("dead", "offset"),
    "first": ("offset",),
    "row": ("offset", "dead"),
    "error": ("id",),
}
"""The fields of forms that name something, and what they may name."""


@pytest.mark.promise("Permissions by topic")
@pytest.mark.timeout(600)
@pytest.mark.still_clock
@pytest.mark.parametrize("in_general", [False, True])
def test_no_operation_tells_hidden_names_from_absent_ones(viewer, hidden_job, make_client, in_general):
    """Whether the user may operate the topic that they may view, or all. Forms, previews and refusals."""
    if in_general:
        viewer = make_client("operate_dashboard", "see_payloads", "publish_messages")
        OnTopics.granted.add((User.objects.latest("pk").username, "django_mysqlqueue.view_dashboard", "t"))
    asked, pairs = Asked(viewer), PAIRS | places()
    for name, operation in OPERATIONS.items():
        own = {"subscriber": "x", "row": "x"} if name in ("forget", "cancel-jobs") else parameters(name, "t")
        own |= {"id": "i", "payload": '"x"', "kind": "json", "upto": str(10**9), "reason": "test", "target": "latest"}
        for field in FIELDS.keys() & operation.form.base_fields.keys():
            is_scheduled = field == "row" and name in ("cancel", "deliver-now", "move")
            for kind in ("outbox",) if is_scheduled else FIELDS[field]:
                asked.both("get", f"{ROOT}do/{name}/", own, field, pairs[kind])
                given = {**own, "group": "hidden.grou", "asked": "yes"}
                asked.both("post", f"{ROOT}do/{name}/", given, field, pairs[kind])
        if "row" in operation.form.base_fields:
            for kind in ("job", "key"):
                asked.both("post", f"{ROOT}do/{name}/", own, "row", pairs[kind], json.dumps)
    assert not asked.told, "\n".join(map(str, asked.told[:9]))
    assert asked.count > 200


@pytest.mark.promise("Permissions by topic")
@pytest.mark.parametrize("group", ["nosuch", "hidden.grou", "hidden.group", "hidden.topic"])
def test_the_help_in_a_refusal_names_what_one_may_view(viewer, hidden_queue, make_client, group):
    given = {"group": group, "topic": "t", "asked": "yes"}
    said = f"There is no group &#x27;{group}&#x27; on topic &#x27;t&#x27;. Registered: g on t."
    text = viewer.post(f"{ROOT}do/pause/", given).content.decode()
    assert said in text
    assert "hidden.group on" not in text
    everything = make_client("view_dashboard", "operate_dashboard")
    assert (
        "Registered: hidden.group on hidden.topic, g on t."
        in everything.post(f"{ROOT}do/pause/", given).content.decode()
    )
    with pytest.raises(OperationRefused, match=r"Registered: hidden\.group on hidden\.topic, g on t\."):
        operations.pause(group, "t", actor="ada")


@pytest.mark.promise("Permissions by topic")
def test_the_message_after_a_refused_operation_names_what_one_may_view(viewer, hidden_queue):
    """The group is dropped between the preview and the confirmation. The admin's log has the same text."""
    asked = viewer.post(f"{ROOT}do/pause/", {**OWN, "asked": "yes"})
    sent = {**hidden(asked.content.decode()), "confirmed": "yes"}
    operations.drop_group("g", "t", actor="ada")
    done = viewer.post(f"{ROOT}do/pause/", sent, follow=True)
    said = "There is no group 'g' on topic 't'. Registered: none."
    assert [str(one) for one in done.context["messages"]] == [said]
    assert LogEntry.objects.get().change_message == f"Pause group: {said}"


@pytest.mark.promise("Permissions by topic")
def test_other_topics_are_not_suggested(viewer, hidden_queue, settings):
    """One may have permissions on topics that do not exist yet."""
    name = User.objects.latest("pk").username
    for permission in ("view_dashboard", "operate_dashboard", "publish_messages"):
        OnTopics.granted.add((name, f"django_mysqlqueue.{permission}", "hidden.topi"))
    text = viewer.post(f"{ROOT}do/redrive/", {"topic": "hidden.topi_dlq", "upto": "1", "asked": "yes"}).content.decode()
    assert "hidden.topic" not in text
    settings.MYSQLQUEUE = {"STRICT_TOPICS": True, "TOPICS": {"hidden.topic": {}, "t": {}}}
    given = {"topic": "hidden.topi", "payload": "1", "kind": "json", "id": "i", "priority": "0", "asked": "yes"}
    text = unescape(viewer.post(f"{ROOT}do/publish/", given).content.decode())
    assert (
        "STRICT_TOPICS is on, and neither MYSQLQUEUE['TOPICS'] nor a handler of this project names it. Known: t."
        in text
    )
    assert "hidden.topic" not in text
    settings.MYSQLQUEUE = {}
    text = viewer.post(f"{ROOT}do/publish/", given).content.decode()
    assert "is new" in text
    assert "hidden.topic" not in text


@pytest.mark.promise("Permissions by topic")
def test_a_broken_handler_of_another_topic_is_not_named(viewer, hidden_queue, make_client, monkeypatch):
    def broken():
        raise SubscriberError("hidden.group on hidden.topic is declared twice")

    for module in (registry, group_settings):
        monkeypatch.setattr(module, "subscriptions", broken)
    override = {**OWN, "option": "prefetch", "value": "5", "asked": "yes"}
    everything = make_client("view_dashboard", "operate_dashboard")
    for client, named in ((viewer, False), (everything, True)):
        texts = [
            client.get(f"{ROOT}group/", OWN).content.decode(),
            client.post(f"{ROOT}do/override/", override).content.decode(),
        ]
        assert ["hidden.group on" in text for text in texts] == [named, named]
