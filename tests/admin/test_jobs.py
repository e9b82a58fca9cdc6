"""The dashboard's pages of jobs."""

from __future__ import annotations

import json
import re
import threading
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_mysqlqueue.admin.formatting import moment
from django_mysqlqueue.admin.operations.rows import CancelTask
from django_mysqlqueue.admin.pages import job as job_page
from django_mysqlqueue.models import JobResult, JobStage, Operation, OutboxMessage, QueueMessage, SubscriberHeartbeat
from django_mysqlqueue.operations import redriving
from django_mysqlqueue.options.topics import dlq_topic
from tests.support import job_worlds
from tests.support.dashboard import HOSTILE, ROOT, confirm, hidden, page
from tests.support.dead_letter_pages import bound
from tests.support.harness import USING, sequence
from tests.support.internals import DeadLetterFilter, Session, job_progress, wakeups
from tests.support.job_pages import NOW, ended, errors, job
from tests.support.topic_permissions import OnTopics

pytestmark = pytest.mark.any_engine

SECRETS = {
    "arguments": '{"args": ["secret arguments"], "kwargs": {}}',
    "return_value": '"secret value"',
    "errors": errors("secret error", "secret end"),
}


def star(text, *, topic, kind):
    assert topic == "jobs.default"
    assert kind in ("payload", "error")
    return text.replace("4711", "****")


@pytest.fixture(autouse=True)
def _backend(settings):
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["default", "mail"]}}


@pytest.fixture
def ends(db, settings):
    """A job of each kind of end, with its message, and the dead letter of one."""
    held = job_worlds.claimed(*job_worlds.ENDS)
    job_worlds.flush(USING, held)
    sequence()
    return {name: one.offset for name, one in held.items()}


def ids(client, **query):
    return [row.job.id for row in client.get(f"{ROOT}jobs/", query).context["rows"]]


def notes(client, name):
    """The facts on the page of a job, and where their links lead."""
    answer = client.get(f"{ROOT}job/", {"id": name})
    assert answer.status_code == 200, answer.content.decode()
    for one in answer.context["notes"]:
        assert not one.link or client.get(one.link).status_code == 200
    return [(one.text, one.link) for one in answer.context["notes"]]


# -- the list -----------------------------------------------------------------


def test_the_list_and_its_filters(client):
    for number in range(4):
        ended(f"s{number}", queue_name="mail", task_path="shop.tasks.mail")
        ended(f"f{number}", "FAILED", task_path="shop.tasks.charge")
    job("w0", task_path="shop.tasks.charge")
    assert ids(client)[:2] == ["s3", "f3"]
    assert len(ids(client)) == 9
    assert ids(client, status="FAILED") == ["f3", "f2", "f1", "f0"]
    assert ids(client, status="READY") == ids(client, status="ready") == ["w0"]
    assert ids(client, task="shop.tasks.charge", status="READY") == ["w0"]
    assert ids(client, task="shop.tasks.charge") == ["f3", "f2", "f1", "w0", "f0"]
    assert ids(client, topic="jobs.mail") == ["s3", "s2", "s1", "s0"]
    assert ids(client, topic="jobs.mail_dlq") == ["s3", "s2", "s1", "s0"]
    assert ids(client, topic="jobs.mail", status="FAILED") == []
    assert ids(client, id="w0") == ["w0"]
    assert ids(client, id="w") == []
    context = client.get(f"{ROOT}jobs/").context
    assert [(status, str(count)) for status, _label, count in context["counts"]] == [
        ("READY", "1"),
        ("RUNNING", "0"),
        ("FAILED", "4"),
        ("SUCCESSFUL", "4"),
    ]
    assert context["tasks"] == ["shop.tasks.charge", "shop.tasks.mail"]
    assert context["topics"] == [("jobs.default", "default"), ("jobs.mail", "mail")]


def test_times_in_the_projects_zone(client, settings):
    settings.TIME_ZONE = "Asia/Tokyo"
    ended("j1", seconds=100, enqueued_at=NOW + 500)
    ended("j2", seconds=100, enqueued_at=NOW + 5000)
    with timezone.override("Asia/Tokyo"):
        at = timezone.localtime(timezone.datetime.fromtimestamp(NOW / 1000, timezone.get_current_timezone()))
    said = f"{at:%Y-%m-%dT%H:%M:%S}"
    assert ids(client, until=said) == ["j1"]
    assert ids(client, since=said) == ["j2", "j1"]
    assert ids(client, since=said, status="SUCCESSFUL") == ["j2", "j1"]
    assert ids(client, until=said, status="SUCCESSFUL") == []
    text = client.get(f"{ROOT}jobs/", {"status": "SUCCESSFUL"}).content.decode()
    assert "Finished since" in text
    assert "last finished first" in text
    assert "Enqueued since" in client.get(f"{ROOT}jobs/", {"status": "READY"}).content.decode()
    assert "since='soon' is not a valid date and time." in page(client, "jobs", 400, since="soon")


@pytest.mark.parametrize("after", ["x", "1", "1-j", ":j", "-:j", "1.5:j", "²:j", f"{'9' * 30}:j"])
def test_a_place_in_the_list_that_is_none(client, after):
    assert f"after='{after}' is not a position" in page(client, "jobs", 400, after=after)


def test_a_status_that_is_none(client):
    answer = client.get(f"{ROOT}jobs/", {"status": "DONE"})
    assert answer.status_code == 400
    assert "is not one of READY, RUNNING, FAILED, SUCCESSFUL." in answer.content.decode()


@pytest.mark.parametrize(
    "query", [{}, {"status": "SUCCESSFUL"}, {"task": "shop.tasks.mail"}, {"topic": "jobs.default"}]
)
def test_the_list_comes_in_pages(client, monkeypatch, query):
    monkeypatch.setattr("django_mysqlqueue.admin.pages.jobs.PAGE_ROWS", 2)
    for name in ("a:b1", "-2", "ö3", "&4", "e5"):
        ended(name)
    address, seen = f"{ROOT}jobs/", []
    parameters = query
    while True:
        answer = client.get(address, parameters)
        seen += [row.job.id for row in answer.context["rows"]]
        links = re.findall(r'<a href="([^"]*)">Next page</a>', answer.content.decode())
        if not links:
            break
        address, parameters = links[0].replace("&amp;", "&"), None
    assert seen == ["e5", "&4", "ö3", "-2", "a:b1"]


def test_the_page_says_what_was_not_searched(client, monkeypatch):
    bound(monkeypatch, jobs=3, job_tasks=1)
    monkeypatch.setattr("django_mysqlqueue.admin.pages.jobs.PAGE_ROWS", 1)
    for number in range(6):
        job(f"j{number}", task_path=f"t{number % 2}")
    text = page(client, "jobs")
    assert "There are jobs of more than 1 tasks." in text
    text = client.get(f"{ROOT}jobs/", {"status": "READY", "topic": "jobs.mail"}).content.decode()
    assert "None of the jobs that were searched match." in text
    assert "Only the next 3 jobs were searched for this page." in text
    assert "Next page" in text


def test_lists_without_jobs(client):
    assert "There are no jobs." in page(client, "jobs")
    assert "No jobs match." in page(client, "jobs", task="none")
    assert "There is no job with this id" in page(client, "jobs", id="none")
    assert "There is no job with this id" in page(client, "job", id="none")
    assert "The parameter id is required." in page(client, "job", 400)


def test_what_a_row_says(client):
    now = int(timezone.now().timestamp() * 1000)
    job("r1", status="RUNNING", worker_ids="w\n", started_at=now - 75_000)
    job("again2", status="RUNNING", worker_ids="v\nw\n", started_at=now - 75_000)
    ended("f3", "FAILED", seconds=90, worker_ids="v\nw\nw\n")
    rows = {row.job.id: row for row in client.get(f"{ROOT}jobs/").context["rows"]}
    assert rows["r1"].took in ("1 min 15 s so far", "1 min 16 s so far")
    assert (rows["again2"].took, rows["again2"].job.finished_at) == ("", 0)
    assert (rows["f3"].took, rows["f3"].status, rows["f3"].job.attempts) == ("1 min 30 s", "failed", 3)


def test_a_job_that_waits_for_its_next_attempt_says_until_when_and_why(client, make_waiting):
    """In the list, and on its page: with the reason, if it has one. One that runs, or is due, does not wait."""
    at = make_waiting("why1", retry_reason="429 from <the API>")
    make_waiting("when2")
    make_waiting("due3", seconds=-5)
    make_waiting("runs4", status="RUNNING", worker_ids="w\n")
    rows = {row.job.id: row for row in client.get(f"{ROOT}jobs/").context["rows"]}
    text = f"waits until {moment(at)}: 429 from <the API>"
    assert (rows["why1"].waits, rows["when2"].waits) == (text, f"waits until {moment(at)}")
    assert (rows["due3"].waits, rows["runs4"].waits) == ("", "")
    assert text in unescape(page(client, "jobs"))
    assert text in [said for said, _ in notes(client, "why1")]
    assert not [said for said, _ in notes(client, "due3") if said.startswith("waits")]


@pytest.fixture
def make_waiting(db):
    """Makes a job that waits for ten minutes, and returns until when."""
    now = Session(USING).now()

    def make(name, seconds=600, **columns):
        at = now // 1000 * 1000 + seconds * 1000
        job(name, **{"retry_at": at, "status": "READY"} | columns)
        return at

    return make


def test_the_navigation_has_the_page_if_the_project_has_queues_of_jobs(client, settings):
    link = f'href="{ROOT}tasks/"'
    assert link in client.get(ROOT).content.decode()
    settings.TASKS = {"default": {"BACKEND": "tests.support.no_backend"}}
    assert link not in client.get(ROOT).content.decode()
    assert client.get(f"{ROOT}jobs/").status_code == 200


def test_tasks_that_are_configured_wrongly(client, settings):
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "OPTIONS": {"MAX": 1}}}
    link = f'href="{ROOT}tasks/"'
    assert link in client.get(ROOT).content.decode()
    assert "'MAX' is not an option." in page(client, "jobs", 500)


def test_the_number_of_statements_does_not_grow_with_jobs(client):
    def number(*addresses):
        with CaptureQueriesContext(connection) as captured:
            for address in addresses:
                assert client.get(ROOT + address).status_code == 200
        return len([one for one in captured if "queue_" in one["sql"]])

    for one in range(2):
        ended(f"j{one}", "FAILED", task_path=f"t{one}", errors=errors("no"))
    addresses = ("jobs/", "jobs/?status=FAILED", "jobs/?topic=jobs.mail", "job/?id=j1")
    before = [number(address) for address in addresses]
    # The tasks, one at a time: two and the end. The counts, the places, the jobs.
    assert before[0] == 3 + 3
    for one in range(2, 150):
        ended(f"j{one}", "FAILED", task_path=f"t{one % 2}", errors=errors("no"))
    JobResult.objects.filter(id="j1").update(errors=errors(*"abcdefgh"), worker_ids="w\n" * 50)
    assert [number(address) for address in addresses] == before


# -- a job --------------------------------------------------------------------


def test_a_job_with_three_errors(client):
    ended("j1", "FAILED", errors=errors("one", "two", "three"), worker_ids="v\nw\nw\n", run_after=NOW + 500)
    JobResult.objects.update(last_attempted_at=NOW + 62_000, finished_at=NOW + 72_000)
    answer = client.get(f"{ROOT}job/", {"id": "j1"})
    context, text = answer.context, page(client, "job", id="j1")
    assert [(one.number, one.line) for one in context["errors"]] == [
        (3, "ValueError: three"),
        (2, "ValueError: two"),
        (1, "ValueError: one"),
    ]
    assert text.count("Traceback (most recent call last)") == 3
    assert text.count("builtins.ValueError") == 3
    assert [(one.css, one.milliseconds) for one in context["spans"]] == [
        ("mq-waited", 1000),
        ("mq-failed", 60_000),
        ("mq-dead", 10_000),
    ]
    assert context["took"] == "10 s"
    assert context["subscribers"] == ("v", "w", "w")
    JobResult.objects.update(retry_at=NOW + 63_000)  # It was cancelled while it waited.
    spans = client.get(f"{ROOT}job/", {"id": "j1"}).context["spans"]
    assert [(one.css, one.milliseconds) for one in spans] == [("mq-waited", 1000), ("mq-failed", 70_000)]
    JobResult.objects.update(retry_at=0)
    assert "data-live" not in text, "it has ended"
    assert "data-live" in page(client, "job", id=job("j2").id)
    assert '"args": [\n    1\n  ]' in text
    assert "Its message is no longer in the log." in text


def test_of_many_errors_the_last_are_shown(client):
    ended("j1", "FAILED", errors=errors(*map(str, range(30))), worker_ids="".join(f"w{n}\n" for n in range(30)))
    context = client.get(f"{ROOT}job/", {"id": "j1"}).context
    assert [one.number for one in context["errors"]] == list(range(30, 10, -1))
    assert context["subscribers"] == tuple(f"w{n}" for n in range(10, 30))
    text = page(client, "job", id="j1")
    assert "Only the last 20 of 30 errors are shown." in text
    assert "10 earlier ones are not shown." in text


def test_a_job_that_has_returned(client):
    ended("j1", return_value='{"sent": 7}')
    ended("j2", return_value="null")
    job("j3")
    assert '"sent": 7' in page(client, "job", id="j1")
    assert ">null<" in page(client, "job", id="j2")
    assert "None yet." in page(client, "job", id="j3")
    assert "No errors." in page(client, "job", id="j3")


def test_long_and_strange_texts(client):
    long = '"' + "x" * 100_000 + '"'
    ended(
        HOSTILE,
        "FAILED",
        task_path=f"{HOSTILE}\u202e",
        queue_name="q\u2066",
        worker_ids=f"{HOSTILE}\u202e\n",
        arguments=long,
        return_value='"a\u202eb"',
        errors=errors(HOSTILE + "\u202e\x07\tend", "x" * 60_000, exception=f"a.{HOSTILE}\u202e"),
        backend="b\u200f",
    )
    for name, query in (("jobs", {}), ("job", {"id": HOSTILE})):
        raw = client.get(f"{ROOT}{name}/", query).content.decode()
        assert "<script>alert" not in raw
        assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f\x07]", raw), name
        assert "\\u202e" in raw
    text = page(client, "job", id=HOSTILE)
    assert "bytes in total" in text
    assert "\\u0007\tend" in text
    assert len(text) < 200_000


def test_redact(client, settings):
    ended("j1", "FAILED", arguments='{"args": [4711], "kwargs": {}}', return_value="4711", errors=errors("4711", "x"))
    assert page(client, "job", id="j1").count("4711") > 3
    settings.MYSQLQUEUE = {"REDACT": "tests.admin.test_jobs.star"}
    text = page(client, "job", id="j1")
    assert "4711" not in text
    assert "****" in text


# -- its message --------------------------------------------------------------


def test_links_between_a_job_and_its_message(client, ends):
    for name, offset in ends.items():
        found = dict(notes(client, name))
        (text,) = [text for text in found if text.startswith(f"Its message is at offset {offset} of jobs.default.")]
        assert f"offset={offset}" in found[text]
        assert ("when the next attempt is due" in text) == (name == "nacked")
        link = f"job/?id={name}&topic=jobs.default"
        assert link in page(client, "message", offset=offset)
    copy = QueueMessage.objects.get(topic="jobs.default_dlq").offset
    for text in (page(client, "deadletter", offset=copy), page(client, "message", offset=copy)):
        assert "job/?id=dead&topic=jobs.default" in text
    assert ("Its dead letter can be redriven: the job then runs again.", f"{ROOT}deadletter/?offset={copy}") in notes(
        client, "dead"
    )
    assert "jobs/?topic=jobs.default" in page(client, "group", group="jobs", topic="jobs.default")
    for name in set(ends) - {"dead"}:
        assert len(notes(client, name)) == 1


def test_a_redriven_job(client, ends):
    redriving.redrive_all(USING, DeadLetterFilter(dlq_topic("jobs.default")), actor="test")
    sequence()
    again = QueueMessage.objects.filter(topic="jobs.default").latest("offset")
    assert again.message_id != "dead"
    assert "job/?id=dead&topic=jobs.default" in page(client, "message", offset=again.offset)
    JobResult.objects.filter(id="dead").update(status="FAILED")
    assert len(notes(client, "dead")) == 1, "its dead letter is gone"
    QueueMessage.objects.filter(offset=ends["dead"]).delete()
    for status, says in (("READY", "or was redriven"), ("RUNNING", "it was redriven"), ("FAILED", "no longer")):
        JobResult.objects.filter(id="dead").update(status=status, worker_ids="")
        ((text, _),) = notes(client, "dead")
        assert says in text


def test_failed_jobs_whose_deliveries_are_not_recorded(client, settings):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "none"}
    held = job_worlds.claimed("dead")
    job_worlds.flush(USING, held)
    sequence()
    settings.TASKS = job_worlds.TASKS
    (_, (text, link)) = notes(client, "dead")
    assert "It may be in the DLQ." in text
    assert "deadletters/?topic=jobs.default" in link


def test_a_scheduled_job(client):
    job_worlds.scheduled("later")
    later = OutboxMessage.objects.get().deliver_at
    JobResult.objects.update(run_after=later)
    ((text, link),) = notes(client, "later")
    assert re.fullmatch(r"It is due in (59 s|1 min)\.", text)
    assert [row.message.message_id for row in client.get(link).context["rows"]] == ["later"]
    assert "job/?id=later&topic=jobs.default" in client.get(link).content.decode().replace("&amp;", "&")
    confirm(client, "deliver-now", row=[str(OutboxMessage.objects.get().outbox_id)])
    sequence()
    ((text, link),) = notes(client, "later")
    assert text.startswith("Its message is at offset")


def test_a_job_in_the_quarantine(client):
    job_worlds.scheduled("refused")
    OutboxMessage.objects.update(deliver_at=0)
    JobResult.objects.update(run_after=0)
    job_worlds.set_aside()
    [(text, _)] = notes(client, "refused")
    assert "is in the quarantine" in text


def test_a_scheduled_message_without_a_result_is_no_job(client):
    job_worlds.scheduled("later")
    address = f"{ROOT}scheduled/?topic=jobs.default&id=later"
    assert "Open job" in client.get(address).content.decode()
    JobResult.objects.all().delete()
    assert "Open job" not in client.get(address).content.decode()


def test_a_running_job_says_if_its_subscriber_is_lost(client):
    job_worlds.claimed("acked")
    assert notes(client, "acked")[0][0] == "Its subscriber worker is lost. Another one will claim the job again."
    now = int(timezone.now().timestamp() * 1000)
    SubscriberHeartbeat.objects.create(
        subscriber_name="worker", consumer_group="jobs", topic="jobs.default", heartbeat_at=now
    )
    assert "is lost" not in str(notes(client, "acked"))


def test_messages_of_other_topics_are_no_jobs(client, settings):
    job_worlds.enqueued("a")
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["mail"]}}
    offset = QueueMessage.objects.get().offset
    assert "Open job" not in page(client, "message", offset=offset)


# -- permissions --------------------------------------------------------------


@pytest.fixture
def make(make_client, settings):
    """Makes the client of a user with some permissions in general and others on topics."""
    settings.AUTHENTICATION_BACKENDS = ["tests.support.topic_permissions.OnTopics"]
    OnTopics.granted.clear()

    def one(*permissions, on=()):
        client = make_client(*permissions)
        name = User.objects.latest("pk").username
        OnTopics.granted.update((name, f"django_mysqlqueue.{permission}", topic) for permission, topic in on)
        return client

    return one


@pytest.fixture
def two_queues(db):
    """A job of each queue, with secrets."""
    for queue in ("mail", "hidden"):
        ended(f"{queue}.1", "FAILED", queue_name=queue, task_path=f"{queue}.task", worker_ids=f"{queue}.w\n", **SECRETS)


@pytest.mark.promise("Permissions by topic")
def test_the_list_shows_the_jobs_of_the_queues_that_one_may_view(make, two_queues, settings):
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["mail", "hidden"]}}
    client = make(on=[("view_dashboard", "jobs.mail")])
    for query in ({}, {"status": "FAILED"}, {"topic": "jobs.mail"}, {"id": "mail.1"}, {"task": "mail.task"}):
        assert ids(client, **query) == ["mail.1"], query
        text = client.get(f"{ROOT}jobs/", query).content.decode()
        assert "hidden." not in text
        assert ">hidden<" not in text
    for query in ({"id": "hidden.1"}, {"task": "hidden.task"}):
        assert ids(client, **query) == []
    for topic in ("jobs.hidden", "jobs.nothing", "jobs.hidden_dlq", "t"):
        assert "You may view these topics: jobs.mail." in page(client, "jobs", 403, topic=topic)
    context = client.get(f"{ROOT}jobs/").context
    assert (context["counts"], context["tasks"], context["topics"]) == ([], [], [("jobs.mail", "mail")])
    everything = make("view_dashboard")
    assert set(ids(everything)) == {"mail.1", "hidden.1"}
    assert make().get(f"{ROOT}jobs/").status_code == 403


@pytest.mark.promise("Permissions by topic")
def test_a_job_is_shown_by_its_queue(make, two_queues):
    client = make(on=[("view_dashboard", "jobs.mail")])
    page(client, "job", id="mail.1")
    page(client, "job", id="mail.1", topic="jobs.mail")
    # Those that exist cannot be told from others.
    for query in ({"id": "hidden.1"}, {"id": "none"}, {"id": "hidden.1", "topic": "jobs.hidden"}, {}):
        text = page(client, "job", 403, **query)
        assert "You may view these topics: jobs.mail." in text
        assert "hidden.task" not in text
    for name in ("hidden.1", "none"):
        answer = client.get(f"{ROOT}job/", {"id": name, "topic": "jobs.mail"})
        assert "There is no job with this id" in answer.content.decode()
        assert answer.context["job"] is None


@pytest.mark.promise("Permissions by topic")
def test_arguments_values_and_errors_need_the_permission_to_see_payloads(make, two_queues):
    one = make("view_dashboard", on=[("see_payloads", "jobs.mail")])
    nobody, everybody = make("view_dashboard", "operate_dashboard"), make("view_dashboard", "see_payloads")
    for client, name, may in (
        (one, "mail.1", True),
        (one, "hidden.1", False),
        (nobody, "mail.1", False),
        (everybody, "hidden.1", True),
    ):
        text = page(client, "job", id=name)
        for secret in ("secret arguments", "secret value", "secret error", "secret end"):
            assert (secret in text) is may, (name, secret)
        assert text.count("builtins.ValueError") == 2
        assert ("You do not have permission" in text) is not may
        assert "secret" not in page(client, "jobs")


def test_the_reason_of_a_wait_needs_the_permission_to_see_payloads(make, two_queues, make_waiting):
    at = make_waiting("mail.9", queue_name="mail", retry_reason="secret reason")
    nobody, everybody = make("view_dashboard"), make("view_dashboard", "see_payloads")
    for client, may in ((nobody, False), (everybody, True)):
        for text in (page(client, "job", id="mail.9"), page(client, "jobs")):
            assert f"waits until {moment(at)}" in text
            assert ("secret reason" in text) is may


# -- progress, requests to stop, and chains -----------------------------------


def test_the_progress_of_a_job(client):
    job("p", status="RUNNING", progress=job_progress.encode(3, 12, "\u202erow <3>", 1_700_000_000_000))
    answer = client.get(f"{ROOT}job/", {"id": "p"})
    text = answer.content.decode()
    assert '<progress value="0.25" max="1"' in text
    assert "3 / 12" in text
    assert "row &lt;3&gt;" in text
    assert "\u202e" not in text


def test_the_list_shows_the_progress_of_running_jobs_with_the_same_statements(client):
    reported = job_progress.encode(3, 12, "a secret", 1_700_000_000_000)
    job("p", status="RUNNING")
    with CaptureQueriesContext(connection) as before:
        assert "<progress" not in page(client, "jobs")
    job("q", status="RUNNING", progress=reported)
    job("r", status="RUNNING", progress=job_progress.encode(7, None, "", 1_700_000_000_000))
    ended("s", progress=reported)
    with CaptureQueriesContext(connection) as after:
        text = page(client, "jobs")
    assert len(after) == len(before)
    assert re.findall(r'<progress class="mq-progress" max="(.+?)" value="(.+?)" aria-label="(.+?)"', text) == [
        ("1", "0.25", "Progress of q")
    ]
    assert (text.count("3 / 12"), text.count('<bdi dir="ltr">7</bdi>'), "secret" in text) == (1, 1, False)


def test_the_list_of_running_jobs_says_that_it_includes_prefetched_ones(client):
    assert (
        "including prefetched ones, in descending order of their ids"
        in client.get(f"{ROOT}jobs/?status=running").content.decode()
    )
    for status in ("READY", "FAILED", ""):
        assert "prefetched" not in client.get(f"{ROOT}jobs/?status={status}").content.decode()


@pytest.mark.parametrize("column", ["", "{}", "[]", "no JSON", '{"done": 1, "total": 0, "message": "", "at": 0}'])
def test_progress_that_is_none(client, column):
    job("p", progress=column)
    assert "<progress" not in client.get(f"{ROOT}job/", {"id": "p"}).content.decode()


def test_progress_without_a_total(client):
    job("p", progress=job_progress.encode(3, None, "", 1_700_000_000_000))
    text = client.get(f"{ROOT}job/", {"id": "p"}).content.decode()
    assert "<progress" not in text
    assert 'id="mq-progress"' in text


def test_a_job_that_was_asked_to_stop(client):
    job("p", status="RUNNING", cancel_requested_at=1_700_000_000_000)
    assert any("It was asked to stop at" in text for text, _ in notes(client, "p"))
    JobResult.objects.update(status="SUCCESSFUL", finished_at=5)
    assert not any("It was asked to stop" in text for text, _ in notes(client, "p"))


def test_a_job_of_a_later_stage(client, db):
    job_worlds.chained()
    assert notes(client, job_worlds.LATER) == [("It waits for 2 jobs of the stage before it in its chain.", "")]
    JobStage.objects.filter(id=job_worlds.STAGES[0]).update(remaining=1)
    assert notes(client, job_worlds.LATER) == [("It waits for 1 job of the stage before it in its chain.", "")]
    assert not any("waits for" in text for text, _ in notes(client, job_worlds.FIRST))


# -- cancelling ---------------------------------------------------------------


def row(*names):
    return [json.dumps(name) for name in names]


def test_cancel_the_selected_jobs(client):
    job("w1")
    job("w2", queue_name="mail")
    job("r1", status="RUNNING")
    ended("s1")
    boxes = re.findall(r'name="row" value="([^"]*)"', client.get(f"{ROOT}jobs/").content.decode())
    assert sorted(map(unescape, boxes)) == sorted(row("w2", "w1", "r1"))
    asked = client.post(f"{ROOT}do/cancel-jobs/", {"row": row("w1", "w2", "r1", "s1")}).content.decode()
    for said in (
        "Waiting jobs that will be cancelled: 2.",
        "Running jobs that will be asked to stop: 1.",
        "Running jobs stop only if their tasks read context.cancelled.",
        "Jobs that will not be changed, because they have ended or were asked to stop before: 1.",
        "This cannot be undone.",
        "4 jobs",
    ):
        assert said in asked
    assert not Operation.objects.exists()
    assert set(JobResult.objects.values_list("status", flat=True)) == {"READY", "RUNNING", "SUCCESSFUL"}
    (told,) = confirm(client, "cancel-jobs", row=row("w1", "w2", "r1", "s1"), reason="wrong prices")
    assert told.startswith("Jobs cancelled: 2. Running jobs that were asked to stop: 1. Running jobs stop only if")
    found = dict(JobResult.objects.values_list("id", "status"))
    assert found == {"w1": "FAILED", "w2": "FAILED", "r1": "RUNNING", "s1": "SUCCESSFUL"}
    assert "JobCancelled" in JobResult.objects.get(id="w1").errors
    assert list(JobResult.objects.exclude(cancel_requested_at=0).values_list("id", flat=True)) == ["r1"]
    one = Operation.objects.get()
    assert (one.action, one.topic, one.changed, one.detail, one.reason) == (
        "cancel jobs",
        "",
        3,
        "asked to stop: 1",
        "wrong prices",
    )
    assert one.ended_at
    assert LogEntry.objects.get().object_repr == "4 jobs"


def test_a_job_is_cancelled_on_its_page(client):
    """The message of a scheduled one is deleted."""
    job_worlds.scheduled("later")
    text = page(client, "job", id="later")
    (address,) = re.findall(r'href="([^"]*do/cancel-jobs/[^"]*)"', client.get(f"{ROOT}job/?id=later").content.decode())
    asked = client.get(unescape(address))
    assert "Waiting jobs that will be cancelled: 1." in asked.content.decode()
    assert "later" in asked.context["subject"]
    assert "will be asked to stop" not in asked.content.decode()
    sent = {**hidden(asked.content.decode()), "confirmed": "yes"}
    done = client.post(unescape(address).partition("?")[0], sent, follow=True)
    assert [str(one) for one in done.context["messages"]] == ["Jobs cancelled: 1."]
    assert done.redirect_chain == [(f"{ROOT}job/?id=later", 302)]
    assert not OutboxMessage.objects.exists()
    assert (Operation.objects.get().topic, Operation.objects.get().changed) == ("jobs.default", 1)
    assert "Cancel" in text
    assert "do/cancel-jobs" not in page(client, "job", id="later")


def test_a_running_job_is_asked_to_stop_once(client):
    job("r", status="RUNNING")
    assert "Ask to stop" in page(client, "job", id="r")
    confirm(client, "cancel-jobs", row=row("r"))
    assert any("It will stop only if its task reads context.cancelled." in text for text, _ in notes(client, "r"))
    assert "do/cancel-jobs" not in page(client, "job", id="r")
    asked = client.post(f"{ROOT}do/cancel-jobs/", {"row": row("r")})
    assert "were asked to stop before: 1." in asked.context["refusal"]
    assert Operation.objects.count() == 1


def test_the_later_jobs_of_a_chain_are_mentioned(client, db):
    job_worlds.chained()
    text = "Jobs of later stages of their chains will fail"
    for name, follows in ((job_worlds.FIRST, True), (job_worlds.LATER, False)):
        asked = client.post(f"{ROOT}do/cancel-jobs/", {"row": row(name)}).content.decode()
        assert (text in asked) is follows
        assert "The operation" not in asked


def test_what_cannot_be_cancelled_has_no_box(client, make_client):
    ended("s1")
    assert "do/cancel-jobs" not in page(client, "jobs")
    job("w1")
    assert "do/cancel-jobs" in page(client, "jobs")
    viewer = make_client("view_dashboard", "see_payloads")
    assert "do/cancel-jobs" not in page(viewer, "jobs")
    assert "do/cancel-jobs" not in page(viewer, "job", id="w1")
    for given in (["x"], ["5"], ['["w1"]'], [json.dumps("\ud800")], []):
        asked = client.post(f"{ROOT}do/cancel-jobs/", {"row": given})
        assert asked.status_code == 200
        assert asked.context["hidden_errors"], given
    assert "because they have ended" in client.post(f"{ROOT}do/cancel-jobs/", {"row": row("no")}).context["refusal"]


@pytest.mark.promise("Permissions by topic")
def test_cancelling_needs_the_permission_on_the_queues(make, two_queues):
    JobResult.objects.update(status="READY")
    one = make("view_dashboard", on=[("operate_dashboard", "jobs.mail")])
    both = make("view_dashboard", on=[("operate_dashboard", f"jobs.{name}") for name in ("mail", "hidden")])
    seen = page(one, "jobs")
    assert f'value="{row("mail.1")[0]}"' in seen
    assert f'value="{row("hidden.1")[0]}"' not in seen
    for client, names, may in (
        (one, ["mail.1"], True),
        (one, ["hidden.1"], False),
        (one, ["mail.1", "hidden.1"], False),
        (one, ["unknown"], False),
        (both, ["mail.1", "hidden.1"], True),
    ):
        for send in (client.get, client.post):
            assert send(f"{ROOT}do/cancel-jobs/", {"row": row(*names)}).status_code == (200 if may else 403), names


# -- the jobs of a task -----------------------------------------------------------


def test_all_jobs_of_a_task_are_cancelled(client, two_queues, monkeypatch):
    for number in range(3):
        job(f"w{number}", queue_name="mail", task_path="mail.task")
    job("other", queue_name="mail", task_path="another.task")
    assert "do/cancel-task" not in page(client, "jobs", topic="jobs.mail")
    assert "do/cancel-task" not in page(client, "jobs", task="mail.task"), "which queue?"
    text = page(client, "jobs", topic="jobs.mail", task="mail.task")
    (link,) = [unescape(one) for one in re.findall(r'href="([^"]*)"', text) if "do/cancel-task" in one]
    assert "Waiting jobs that will be cancelled: 3." in client.get(link).content.decode()
    monkeypatch.setattr(CancelTask, "most", 2)
    values = {"topic": "jobs.mail", "task": "mail.task"}
    (told,) = confirm(client, "cancel-task", **values)
    assert "Jobs cancelled: 2." in told
    assert "manage.py queuecancel jobs.mail --task mail.task" in told
    (told,) = confirm(client, "cancel-task", **values)
    assert told == "Jobs cancelled: 1."
    assert "no jobs of the task mail.task wait" in page(client, "do/cancel-task", **values)
    assert set(JobResult.objects.filter(status="READY").values_list("id", flat=True)) == {"other"}


@pytest.mark.promise("Permissions by topic")
def test_cancelling_a_task_needs_the_permission_on_the_queue(make, two_queues):
    JobResult.objects.update(status="READY", finished_at=0, task_path="both.task")
    client = make("view_dashboard", on=[("operate_dashboard", "jobs.mail")])
    for topic, may in (("jobs.mail", True), ("jobs.hidden", False), ("hidden", False), ("mail", False)):
        for send in (client.get, client.post):
            answer = send(f"{ROOT}do/cancel-task/", {"topic": topic, "task": "both.task"})
            assert answer.status_code == (200 if may else 403), topic
    assert "do/cancel-task" in page(client, "jobs", topic="jobs.mail", task="both.task")
    assert "do/cancel-task" not in page(client, "jobs", topic="jobs.hidden", task="both.task")
    confirm(client, "cancel-task", topic="jobs.mail", task="both.task")
    assert JobResult.objects.get(status="READY").queue_name == "hidden"


# -- a refresh that waits for the end -------------------------------------------

REFRESH = {"headers": {"X-Requested-With": "fetch"}, "wsgi.multithread": True}


@pytest.fixture
def running(db, monkeypatch):
    """A running job that ends between the first and the second time that a page reads it, and how often one does."""
    job("r", status="RUNNING")
    reads = []
    details = job_page.JobPage._details

    def read(page, job_id):
        found = details(page, job_id)
        reads.append(found.summary.status)
        JobResult.objects.filter(id=job_id).update(status="SUCCESSFUL", finished_at=NOW)
        wakeups.notify(USING, [wakeups.RESULTS])
        return found

    monkeypatch.setattr(job_page.JobPage, "_details", read)
    monkeypatch.setattr(job_page, "WAIT", 60)
    return reads


def test_a_refresh_waits_for_the_end_of_the_job(client, running):
    answer = client.get(f"{ROOT}job/", {"id": "r"}, **REFRESH)
    assert running == ["RUNNING", "SUCCESSFUL"]
    assert answer.context["job"].has_ended
    client.get(f"{ROOT}job/", {"id": "r"}, **REFRESH)
    assert len(running) == 3, "of a job that has ended nothing is awaited"


@pytest.mark.parametrize("lacks", ["headers", "wsgi.multithread", "bell", "room"])
def test_who_does_not_wait(client, running, settings, monkeypatch, lacks):
    """A person who opens the page, a server with one thread, a bell that is off; others wait already."""
    if lacks == "bell":
        settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "BELL": None}
    if lacks == "room":
        monkeypatch.setattr(job_page, "_waiting", threading.BoundedSemaphore(1))
        job_page._waiting.acquire()
    answer = client.get(f"{ROOT}job/", {"id": "r"}, **{k: v for k, v in REFRESH.items() if k != lacks})
    assert running == ["RUNNING"]
    assert f'data-live="{1 if lacks in ("headers", "room") else 4}"' in answer.content.decode()
