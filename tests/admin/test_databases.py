"""The dashboard of a queue in several databases: each page and operation on one of them, and the overview of all."""

from __future__ import annotations

import re
from html import unescape
from types import SimpleNamespace

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connections
from django.test.utils import CaptureQueriesContext
from django.urls import set_script_prefix

from django_mysqlqueue import publish
from django_mysqlqueue.admin.error_texts import ErrorTexts
from django_mysqlqueue.admin.operations import OPERATIONS
from django_mysqlqueue.admin.pages import PAGES, TABS
from django_mysqlqueue.admin.pages.group import GroupPage
from django_mysqlqueue.models import ConsumerGroup, Operation, OutboxMessage, QuarantinedMessage, Rollup
from tests.support import job_worlds
from tests.support.dashboard import ROOT, confirm, hidden, page
from tests.support.internals import NewResult, Session, job_rows, several
from tests.support.topic_permissions import OnTopics
from tests.support.two_databases import ALIASES, DEFAULT, LATER, QUEUE, SETTINGS, fill, offset, prepare, rows

AUDIT = f"{ROOT}operations/"
NAMES = [one.name for one in PAGES]
pytestmark = [pytest.mark.any_engine, pytest.mark.any_version]
UNKNOWN = "must be a database of the queue ('default', 'queue')"


@pytest.fixture
def empty_databases(queue_db, settings):
    settings.MYSQLQUEUE = SETTINGS


@pytest.fixture
def both(empty_databases):
    """The same in both databases, though orders are to be in one of them."""
    for alias in ALIASES:
        fill(alias)


def other(alias):
    return DEFAULT if alias == QUEUE else QUEUE


def query_of(name, alias):
    query = {"group": {"group": "g", "topic": "orders"}, "job": {"id": f"{alias}.job"}}.get(name, {})
    if name in ("message", "deadletter"):
        query = {"offset": offset(alias, "orders_dlq" if name == "deadletter" else "orders")}
    return query


def title(text):
    return unescape(re.search(r"<title>(?:\w+ · )?([^|<]*)", text)[1]).strip()


def same(text):
    """A page without what differs each time."""
    return re.sub(r'name="csrfmiddlewaretoken" value="\w+"', "", text)


def without_other_databases(text):
    """A page without what names other databases."""
    return re.sub(
        r'<nav class="mq-databases".*?</nav>|<p class="mq-note">The settings.*?</p>', "", text, flags=re.DOTALL
    )


def selector(text):
    """The texts of the selector's links, the current one in brackets, and their addresses."""
    (nav,) = re.findall(r'<nav class="mq-databases".*?</nav>', text, re.DOTALL)
    links = re.findall(r'<a href="([^"]*)"( aria-current="true")?>([^<]*)</a>', nav)
    return [f"[{name}]" if current else name for _, current, name in links], [unescape(link) for link, _, _ in links]


# -- pages --------------------------------------------------------------------


@pytest.fixture(scope="module")
def followed():
    """Links that have led to a page: those of the menu are on every page."""
    return set()


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_one_database_and_its_links_and_forms_keep_it(client, both, followed, name, alias):
    for one in ALIASES:
        Operation.objects.using(one).create(action="seek", consumer_group="g", topic="orders", actor=f"{one}.ada")
        QuarantinedMessage.objects.using(one).create(
            topic="orders", message_id=f"{one}.refused", payload=b"1", deliver_at=0, created_at=1, reason="an error"
        )
    answer = client.get(
        ROOT + ("" if name == "changelist" else f"{name}/"), query_of(name, alias) | {"database": alias}
    )
    assert answer.status_code == 200
    text = answer.content.decode()
    assert f"{alias}." in text
    assert f"{other(alias)}." not in without_other_databases(text)
    assert title(text).endswith(f"({alias})")
    own = "".join(re.findall(r'class="breadcrumbs">.*?</nav>|<div class="mq-page".*', text, re.DOTALL))
    own = without_other_databases(own)
    links = [unescape(link) for link in re.findall(rf'href="({ROOT}[^"]*)"', own)]
    assert len(links) > len(TABS)
    assert [link for link in links if f"database={alias}" not in link] == []
    forms = re.findall(r'<form (?:class="mq-filter"|method="post">).*?</form>', own, re.DOTALL)
    assert [form for form in forms if f'name="database" value="{alias}"' not in form] == []
    for link in dict.fromkeys(links):
        if link not in followed:
            assert client.get(link).status_code == 200, link
            followed.add(link)


def test_a_job_is_read_where_its_queue_is(client, empty_databases, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"jobs.mail": {"DATABASE": QUEUE}}}
    for alias in ALIASES:
        made = [NewResult(f"{alias}.job", "default", "mail", f"{alias}.task", "{}", 0, 0, 1)]
        job_rows.insert(Session(alias), made)
    for query, alias in (({"topic": "jobs.mail"}, QUEUE), ({"topic": "jobs.mail", "database": DEFAULT}, DEFAULT)):
        text = page(client, "jobs", **query)
        assert f"{alias}.task" in text
        assert f"{other(alias)}.task" not in text
        (link,) = re.findall(r'href="([^"]*/job/[^"]*)"', text)
        assert f"database={alias}" in link
        assert f"{alias}.task" in client.get(link).content.decode()
    assert "There is no job with this id" in page(client, "job", id="queue.job", topic="jobs.mail", database=DEFAULT)


def test_the_choice_of_a_database(client, both):
    names, links = selector(client.get(ROOT).content.decode())
    assert names == ["[All]", "default", "queue"]
    assert links == [ROOT, f"{ROOT}?database=default", f"{ROOT}?database=queue"]
    names, links = selector(client.get(f"{ROOT}messages/", {"topic": "orders", "key": "x"}).content.decode())
    assert names == ["All", "default", "[queue]"]
    assert links == [ROOT, f"{ROOT}messages/?database=default", f"{ROOT}messages/?database=queue"]
    # Another database has other messages at the same offsets.
    at = {"offset": offset(QUEUE), "database": QUEUE}
    names, links = selector(client.get(f"{ROOT}message/", at).content.decode())
    assert names == ["All", "default", "[queue]"]
    assert links == [ROOT, f"{ROOT}?database=default", f"{ROOT}?database=queue"]


@pytest.mark.parametrize(
    ("name", "query", "alias"),
    [
        ("group", {"group": "g", "topic": "orders"}, QUEUE),
        ("messages", {"topic": "orders"}, QUEUE),
        ("messages", {"topic": "orders_dlq"}, QUEUE),
        ("deadletters", {"topic": "orders"}, QUEUE),
        ("scheduled", {"topic": "orders"}, QUEUE),
        ("inflight", {"group": "g", "topic": "orders"}, QUEUE),
        ("offsets", {"group": "g", "topic": "orders"}, QUEUE),
        ("group", {"group": "g", "topic": "orders", "database": DEFAULT}, DEFAULT),
        ("messages", {"topic": "t"}, DEFAULT),
        ("messages", {}, DEFAULT),
        ("deadletters", {}, DEFAULT),
        ("scheduled", {}, DEFAULT),
        ("inflight", {}, DEFAULT),
        ("offsets", {}, DEFAULT),
    ],
)
def test_the_database_of_a_page_that_names_none_is_that_of_its_topic(client, both, name, query, alias):
    text = client.get(f"{ROOT}{name}/", query).content.decode()
    assert title(text).endswith(f"({alias})")
    assert f"{other(alias)}." not in without_other_databases(text)


def test_a_page_says_that_its_topic_belongs_into_another_database(client, both):
    said = "The settings assign the topic orders to the database queue."
    for name in ("messages", "group", "deadletters"):
        query = {"group": "g", "topic": "orders"}
        assert "The settings assign" not in page(client, name, **query)
        assert "The settings assign" not in page(client, name, **query, database=QUEUE)
        text = page(client, name, **query, database=DEFAULT)
        assert said in text
        (link,) = re.findall(r'<a href="([^"]*)">Open in queue</a>', text)
        assert title(client.get(link).content.decode()).endswith("(queue)")
    # Filters stay in their database, so that one may look for a topic where it is not.
    text = page(client, "messages", topic="t", database=QUEUE)
    assert "No messages found." in text
    assert "to the database default." in text


@pytest.mark.parametrize("alias", ["nowhere", "other", "replica"])
@pytest.mark.parametrize("name", NAMES)
def test_a_database_that_is_none_of_the_queue_is_refused(client, both, name, alias):
    text = page(client, "" if name == "changelist" else name, 400, **query_of(name, QUEUE), database=alias)
    assert f"database='{alias}': {UNKNOWN}" in text
    assert "mq-card" not in text


def test_the_lists_are_paged_in_their_database(client, both, monkeypatch):
    monkeypatch.setattr("django_mysqlqueue.admin.pages.offsets.PAGE_ROWS", 1)
    text = client.get(f"{ROOT}offsets/", {"group": "g", "topic": "orders"}).content.decode()
    (link,) = re.findall(r'<a href="([^"]*)">Next page</a>', text)
    assert "database=queue" in link
    assert "queue." in without_other_databases(client.get(unescape(link)).content.decode())


# -- the overview of all ------------------------------------------------------


def listed(answer):
    return {row.alias: (row.state, [card.value for card in row.cards]) for row in answer.context["rows"]}


def without_ages(text):
    """Returns a text without ages, which differ between two requests."""
    return re.sub(r"the oldest for [\d.]+ [a-z]+( [\d.]+ [a-z]+)?", "the oldest for a time", text)


def test_the_overview_shows_the_state_of_each_database_and_the_problems_of_all(client, both):
    for alias in ALIASES:
        Rollup.objects.using(alias).update(acked=9)  # Else there is no button to redrive.
    publish("orders", 1)
    publish("t", 1)
    answer = client.get(ROOT)
    text = without_ages(unescape(answer.content.decode()))
    assert title(text) == "Dashboard"
    names = [card.name for card in answer.context["headings"]]
    for alias in ALIASES:
        alone = client.get(ROOT, {"database": alias})
        assert [card.name for card in alone.context["cards"]] == names
        state, values = listed(answer)[alias]
        numbers = dict(zip(names, values, strict=True))
        assert (numbers["dead letters"], numbers["scheduled"], numbers["due in the outbox"]) == ("1", "1", "1")
        assert state == alone.context["banner"].status.name == "Degraded"
        for one in alone.context["causes"]:
            what = f'<span class="mq-what"><bdi>{without_ages(one.cause.text)}</bdi></span>'
            assert f'<span class="mq-tag">{alias}</span> {what}' in text
            assert f"database={alias}" in one.link
            for problem in one.cause.problems:
                item = f'data-kind="{problem.kind}" data-group="{problem.ref or ""}" data-database="{alias}"'
                assert item in text
    buttons = [(one.alias, one.button.link) for one in answer.context["causes"] if one.button]
    assert {alias for alias, _ in buttons} == set(ALIASES)
    assert all(f"database={alias}&" in link for alias, link in buttons)
    ranks = [one.cause.rank for one in answer.context["causes"]]
    assert ranks == sorted(ranks)
    assert len(ranks) == sum(len(client.get(ROOT, {"database": one}).context["causes"]) for one in ALIASES)
    banner = answer.context["banner"]
    assert (banner.status.state, banner.status.text.split(":")[0] in ALIASES) == ("degraded", True)


def test_links_of_databases_that_were_read_in_threads(client, both, monkeypatch):
    monkeypatch.setattr(several, "may_be_bounded", lambda alias: True)
    set_script_prefix("/below/")
    try:
        text = client.get(ROOT).content.decode()
    finally:
        set_script_prefix("/")
    links = re.findall(r'href="([^"]*dashboard/[^"]*)"', text)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("/below/")] == []


def test_the_overview_of_empty_databases(client, empty_databases):
    answer = client.get(ROOT)
    assert [state for state, _ in listed(answer).values()] == ["OK", "OK"]
    assert answer.context["banner"].status.text == "2 databases. No problems found."
    assert "No problems found." in answer.content.decode()
    assert 'data-live="4"' in answer.content.decode()


@pytest.fixture
def broken(empty_databases, settings):
    """A database without the queue's tables, beside one that works."""
    settings.MYSQLQUEUE = {"TOPICS": {"orders": {"DATABASE": "other"}}}
    fill(DEFAULT, topic="t")


LACKS = "The database 'other' lacks a table or column of the queue; run manage.py migrate --database other"


@pytest.mark.promise("Health")
def test_a_database_that_cannot_be_read_leaves_the_others(client, broken):
    answer = client.get(ROOT)
    assert answer.status_code == 200
    text = unescape(answer.content.decode())
    assert listed(answer)["other"] == ("Stopped", [])
    assert listed(answer)[DEFAULT][0] == "Degraded"
    first, *rest = answer.context["causes"]
    assert (first.alias, first.cause.severity, first.link) == ("other", 0, f"{ROOT}?database=other")
    assert first.cause.text.startswith(LACKS)
    assert answer.context["banner"].status.text.startswith(f"other: {LACKS}")
    assert answer.context["banner"].status.state == "degraded", "the other database works"
    assert LACKS in text
    assert {one.alias for one in rest} == {DEFAULT}
    assert "default.t" in text
    # Its own pages say so, and no other page does.
    for name, query in (
        ("", {"database": "other"}),
        ("messages", {"database": "other"}),
        ("messages", {"topic": "orders"}),
    ):
        assert LACKS in page(client, name, 503, **query)
    for name, query in (("", {"database": DEFAULT}), ("messages", {}), ("messages", {"topic": "t"})):
        assert LACKS not in page(client, name, **query)


def test_an_operation_on_a_database_that_cannot_be_read(client, broken):
    answer = client.get(f"{ROOT}do/pause/", {"group": "g", "topic": "orders"})
    assert LACKS in unescape(answer.content.decode())
    assert 'name="confirmed"' not in answer.content.decode()
    assert confirm(client, "pause", group="g", topic="t") == ["The group g/t is paused."]


@pytest.mark.promise("Health")
@pytest.mark.parametrize(
    ("name", "values"), [("edit", {"offset": "1"}), ("cancel", {"row": "1"}), ("move", {"row": "1"})]
)
def test_an_operation_whose_form_cannot_be_read(client, broken, name, values):
    for send in (client.get, client.post):
        answer = send(f"{ROOT}do/{name}/", {**values, "database": "other"})
        assert answer.status_code == 503
        text = unescape(answer.content.decode())
        assert LACKS in text
        assert f'class="closelink" href="{ROOT}?database=other"' in text


def test_the_audit_log_of_a_database_that_cannot_be_read(client, broken):
    answer = client.get(AUDIT, {"database": "other"})
    assert answer.status_code == 503
    assert LACKS in unescape(answer.content.decode())
    assert client.get(AUDIT, {"database": DEFAULT}).status_code == 200


# -- operations ---------------------------------------------------------------


ELSEWHERE = ("publish", "create-recurring", "edit-recurring")
"""The topic or the task decides where it is: see below, and ``test_edit_schedules.py``."""


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ELSEWHERE])
def test_an_operation_changes_its_database_only(client, both, name, alias, settings):
    if name.endswith("-task"):
        settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["orders"]}}
    values = prepare(alias, name)
    before = {one: rows(one) for one in ALIASES}
    asked = client.get(f"{ROOT}do/{name}/", {**values, "database": alias})
    assert asked.status_code == 200
    assert title(asked.content.decode()) == f"{OPERATIONS[name].label} ({alias})"
    assert hidden(asked.content.decode())["database"] == [alias]
    (told,) = confirm(client, name, **values, database=alias)
    assert rows(other(alias)) == before[other(alias)], told
    assert rows(alias) != before[alias], told
    assert Operation.objects.using(alias).exists() or name in ("cancel", "deliver-now", "move")
    assert LogEntry.objects.latest("pk").object_repr.endswith(f"({alias})")


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_an_operation_without_a_database_is_on_that_of_its_topic_or_refused(client, both, name):
    # The settings name the database of orders, but of no queue of jobs.
    home = DEFAULT if name.endswith("-task") else QUEUE
    values = prepare(home, name)
    answer = client.get(f"{ROOT}do/{name}/", values)
    text = unescape(answer.content.decode())
    if "topic" in values:
        assert title(text) == f"{OPERATIONS[name].label} ({home})"
        assert hidden(text)["database"] == [home]
    else:
        assert answer.status_code == 400
        assert "The parameter database is required." in text
        assert "submit" not in re.sub(r'class="submit-row[^"]*"', "", text[text.index("mq-confirm") :])


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_an_operation_on_a_database_that_is_none_of_the_queue_is_refused(client, both, name):
    values = prepare(QUEUE, name)
    before = {one: rows(one) for one in ALIASES}
    for send in (client.get, client.post):
        answer = send(f"{ROOT}do/{name}/", {**values, "database": "other", "asked": "yes", "confirmed": "yes"})
        assert answer.status_code == 400
        assert f"database='other': {UNKNOWN}" in unescape(answer.content.decode())
    assert {one: rows(one) for one in ALIASES} == before


VIA = {"TOPICS": {"orders": {"DATABASE": QUEUE, "VIA": DEFAULT}}}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize(
    ("given", "topic", "home", "stored", "says"),
    [
        (SETTINGS, "orders", QUEUE, QUEUE, "It is stored in the database queue."),
        (SETTINGS, "t", DEFAULT, DEFAULT, "It is stored in the database default."),
        (VIA, "orders", QUEUE, DEFAULT, "It is stored in the database default; subscribers relay it to queue,"),
    ],
)
def test_the_settings_decide_where_a_test_message_is_stored(
    client, both, settings, alias, given, topic, home, stored, says
):
    """Not the page that the user comes from, whose database is ``alias``."""
    settings.MYSQLQUEUE = given
    before = {one: rows(one) for one in ALIASES}
    values = {"topic": topic, "payload": "1", "kind": "json", "priority": "0", "id": "x", "database": alias}
    asked = client.get(f"{ROOT}do/publish/", values)
    assert title(asked.content.decode()) == f"Publish a test message ({home})"
    assert says in unescape(asked.content.decode())
    if topic == "orders":
        assert "g/orders will receive it" in unescape(asked.content.decode())
    told = confirm(client, "publish", **values)
    assert told == [f"The message x is published to the topic {topic}."]
    assert rows(other(stored)) == before[other(stored)]
    names = OutboxMessage.objects.using(stored).filter(message_id="x").values_list("topic", flat=True)
    assert list(names) == [topic if stored == home else f"{topic}@{home}"]
    assert Operation.objects.using(stored).get().action == "publish"
    assert confirm(client, "publish", **values, reason="again") == []
    assert "a second one would be dropped" in unescape(
        client.post(f"{ROOT}do/publish/", {**values, "asked": "yes"}).content.decode().lower()
    )


def test_what_was_previewed_on_one_database_is_not_done_on_another(client, both):
    asked = client.get(f"{ROOT}do/pause/", {"group": "g", "topic": "orders", "database": QUEUE})
    values = {**hidden(asked.content.decode()), "confirmed": "yes", "database": DEFAULT}
    answer = client.post(f"{ROOT}do/pause/", values)
    assert answer.status_code == 200
    assert "the form differs from what was previewed" in answer.content.decode()
    for alias in ALIASES:
        assert not ConsumerGroup.objects.using(alias).get().paused


def test_operations_lead_back_to_the_page_of_the_same_database(client, both):
    text = client.get(f"{ROOT}group/", {"group": "g", "topic": "orders", "database": DEFAULT}).content.decode()
    (link,) = [unescape(one) for one in re.findall(r'href="([^"]*/do/pause/[^"]*)"', text)]
    asked = client.get(link).content.decode()
    done = client.post(link, {**hidden(asked), "confirmed": "yes"}, follow=True)
    assert title(done.content.decode()) == "Group g/orders (default)"
    assert ConsumerGroup.objects.using(DEFAULT).get().paused
    asked = client.get(f"{ROOT}do/drop/", {"group": "g", "topic": "orders"}).content.decode()
    dropped = client.post(f"{ROOT}do/drop/", {**hidden(asked), "confirmed": "yes"})
    assert dropped.headers["Location"] == f"{ROOT}?database=queue"


def test_the_command_that_changes_the_rest_names_the_database(client, empty_databases, settings):
    values = {"topic": "orders_dlq", **dict.fromkeys(("group", "key", "task", "error", "since", "until", "upto"))}
    form = SimpleNamespace(cleaned_data=values, using=QUEUE)
    command = OPERATIONS["redrive"](form, "ada", ErrorTexts(None)).command_line
    assert command() == "manage.py queueredrive orders_dlq --database queue"
    settings.MYSQLQUEUE = {"DATABASE": QUEUE}
    assert command() == "manage.py queueredrive orders_dlq"


# -- the audit log ------------------------------------------------------------


def test_the_audit_log_of_each_database(client, both):
    for alias in ALIASES:
        confirm(client, "pause", group="g", topic="orders", reason=f"{alias}. reason", database=alias)
    for query, alias in (({}, DEFAULT), ({"database": DEFAULT}, DEFAULT), ({"database": QUEUE}, QUEUE)):
        text = client.get(AUDIT, query).content.decode()
        assert f"{alias}. reason" in text
        assert f"{other(alias)}. reason" not in text
        assert title(text) == f"Operations ({alias})"
    assert "queue. reason" in client.get(AUDIT, {"topic": "orders"}).content.decode()
    answer = client.get(AUDIT, {"database": "other"})
    assert answer.status_code == 400
    assert f"database='other': {UNKNOWN}" in unescape(answer.content.decode())


# -- permissions by topic -----------------------------------------------------


@pytest.fixture
def grant(make_client, settings):
    """Makes the client of a user with permissions on topics only."""
    settings.AUTHENTICATION_BACKENDS = ["tests.support.topic_permissions.OnTopics"]
    OnTopics.granted.clear()

    def make(*topics):
        client = make_client()
        name = User.objects.latest("pk").username
        for permission in ("view_dashboard", "see_payloads", "operate_dashboard"):
            OnTopics.granted.update((name, f"django_mysqlqueue.{permission}", topic) for topic in topics)
        return client

    return make


@pytest.fixture
def secrets(empty_databases, settings):
    """In each database a topic that may be viewed, and one that may not."""
    settings.MYSQLQUEUE = {"TOPICS": {name: {"DATABASE": QUEUE} for name in ("orders", "hidden.orders")}}
    fill(QUEUE, topic="orders")
    fill(DEFAULT, topic="t")
    fill(QUEUE, topic="hidden.orders", group="hidden.group")
    fill(DEFAULT, topic="hidden.t", group="hidden.group")


@pytest.mark.promise("Permissions by topic")
def test_the_overview_shows_the_topics_that_one_may_view(grant, secrets):
    client = grant("orders", "t")
    answer = client.get(ROOT)
    text = answer.content.decode()
    assert "hidden." not in text
    assert {alias: values for alias, (_, values) in listed(answer).items()} == {
        alias: ["3", "2", "1", "1"] for alias in ALIASES
    }
    assert [card.name for card in answer.context["headings"]] == ["backlog", "in flight", "retrying", "dead letters"]
    assert {str(ref) for one in answer.context["causes"] for ref in one.cause.refs} == {"g/orders", "g/t"}
    assert selector(text)[0] == ["[All]", "default", "queue"]
    for alias, topic in ((DEFAULT, "t"), (QUEUE, "orders")):
        for name, query in (
            ("", {"database": alias}),
            ("messages", {"topic": topic}),
            ("inflight", {"database": alias}),
        ):
            text = page(client, name, **query)
            assert f">{topic}<" in text
            assert "hidden." not in text


@pytest.mark.promise("Permissions by topic")
def test_a_database_without_topics_that_one_may_view_is_not_named(grant, secrets):
    """As if there were only the other one: the answer does not differ from that for a database that does not exist."""
    for topic, alias in (("orders", QUEUE), ("t", DEFAULT)):
        client = grant(topic)
        for name, query in (
            ("", {}),
            ("", {"database": alias}),
            ("inflight", {}),
            ("messages", {"topic": topic}),
            ("group", {"group": "g", "topic": topic}),
        ):
            text = page(client, name, **query)
            assert "mq-databases" not in text
            assert f"{other(alias)}." not in text
            assert "hidden." not in text
            assert "database=" not in text
            assert title(text)[-1] != ")"
        texts = [page(client, "", 400, database=name) for name in (other(alias), "nowhere")]
        assert same(texts[0]) == same(texts[1]).replace("nowhere", other(alias))
        assert f"must be a database of the queue ('{alias}')" in texts[0]
        answers = [
            client.get(f"{ROOT}do/pause/", {"group": "g", "topic": topic, "database": name})
            for name in (other(alias), "nowhere")
        ]
        assert [answer.status_code for answer in answers] == [400, 400]


@pytest.mark.promise("Permissions by topic")
@pytest.mark.parametrize("topics", [("orders",), ("t",), ("orders", "t")])
def test_a_refusal_does_not_tell_where_a_topic_is(grant, secrets, topics):
    client = grant(*topics)
    for name, query in (("messages", {}), ("deadletters", {}), ("scheduled", {}), ("group", {"group": "g"})):
        texts = [page(client, name, 403, **query, topic=topic) for topic in ("hidden.orders", "hidden.t", "nothing.")]
        assert len({re.sub(r"hidden\.orders|hidden\.t|nothing\.", "", same(text)) for text in texts}) == 1
        assert f"You may view these topics: {', '.join(topics)}. Choose one of them." in texts[0]
    if len(topics) > 1:
        for alias in ALIASES:
            texts = [
                page(client, "messages", 403, topic=topic, database=alias) for topic in ("hidden.orders", "nothing.")
            ]
            assert same(texts[0]).replace("hidden.orders", "nothing.") == same(texts[1])
            assert "The settings assign" not in texts[0]


@pytest.mark.promise("Permissions by topic")
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_no_operation_reaches_other_topics_of_a_database(grant, secrets, name):
    client = grant("orders", "t")
    before = {one: rows(one) for one in ALIASES}
    values = {"group": "hidden.group", "topic": "hidden.orders", "database": QUEUE, "reason": "x", "option": "prefetch"}
    values |= {"value": "5", "time": LATER, "row": '"queue.a"', "subscriber": "queue.hidden.orders:1"}
    values["offset"] = str(offset(QUEUE, "hidden.orders_dlq"))
    values["schedule"] = f"{QUEUE}.hidden.orders.s"
    if name == "cancel-jobs":
        values["row"] = f'"{QUEUE}.job"'
    if name in ("cancel", "deliver-now", "move"):
        values["row"] = str(OutboxMessage.objects.using(QUEUE).get(topic="hidden.orders").outbox_id)
    for send in (client.get, client.post):
        assert send(f"{ROOT}do/{name}/", values).status_code == 403
    assert {one: rows(one) for one in ALIASES} == before


@pytest.mark.promise("Permissions by topic")
def test_topics_of_a_database_that_cannot_be_read_are_those_of_the_settings(grant, broken, monkeypatch):
    client = grant("orders", "t")
    answer = client.get(ROOT)
    assert listed(answer)["other"] == ("Stopped", [])
    assert LACKS in unescape(answer.content.decode())
    monkeypatch.setattr(GroupPage, "context", lambda page: pytest.fail("it is not asked twice"))
    assert LACKS in page(client, "group", 503, group="g", topic="orders")
    client = grant("t")
    assert "other" not in page(client)
    assert ROOT in client.get("/admin/").content.decode()


# -- one database -------------------------------------------------------------


@pytest.mark.promise("Cost")
@pytest.mark.parametrize("name", NAMES)
def test_one_database_is_not_named_and_the_other_not_read(client, queue_db, settings, name):
    settings.MYSQLQUEUE = {"DATABASE": QUEUE}
    fill(QUEUE)
    with CaptureQueriesContext(connections[DEFAULT]) as elsewhere:
        text = client.get(ROOT + ("" if name == "changelist" else f"{name}/"), query_of(name, QUEUE)).content.decode()
    assert "mq-databases" not in text
    assert "database=" not in text
    assert 'name="database"' not in text
    assert title(text)[-1] != ")"
    assert not [one["sql"] for one in elsewhere if "queue_" in one["sql"]]
