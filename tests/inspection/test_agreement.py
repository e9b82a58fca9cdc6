"""``queuestatus``, ``queuehealth``, the metrics and the dashboard say the same of the same state: what plain SQL says.

Each state is staged once and read in all these ways. None of them is compared with a function of the package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.urls import path
from django.utils import timezone
from prometheus_client.parser import text_string_to_metric_families

from django_mysqlqueue import metrics
from django_mysqlqueue.options import job_queues
from tests.app import jobs
from tests.conftest import Clock
from tests.support.dashboard import ROOT
from tests.support.dashboard_figures import Estimate, Page, Shown, opened
from tests.support.figures import KINDS, Figures, rows, true_figures
from tests.support.incidents import INCIDENTS, charge, clock_text
from tests.support.queue_states import SLACK, STATES, Problem, Stage, State, command

pytestmark = pytest.mark.still_clock

urlpatterns = [path("admin/", admin.site.urls), path("metrics/", metrics.view)]
ALARMING_NOTES = {"groupless"}
"""Kinds that make the queue unhealthy though messages are not stalled."""
COUNTS = ("lag", "in_flight", "retrying", "dead_letters")
KEPT = 86_400.0
"""The default of ``RETENTION``."""

Read = Callable[[Client], Figures]


def named(ref: str, **values: Any) -> Figures:
    return {f"{ref} {name.replace('_', ' ')}": value for name, value in values.items()}


def subject(found: Any) -> str:
    return f"{found['group']}/{found['topic']}" if found["group"] else ""


def counted(found: dict[str, Any]) -> Shown:
    return Shown(f"{found['value']:,}{'' if found['exact'] else '+'}")


def queuestatus(client: Client) -> Figures:
    found = command("queuestatus")
    shown: Figures = named(
        "queue",
        last_offset=found["last_offset"],
        outbox=sum(topic["waiting"] for topic in found["topics"]),
        scheduled=sum(topic["scheduled"] for topic in found["topics"]),
    )
    for topic in found["topics"]:
        shown |= named(f"topic {topic['topic']}", messages=topic["in_log"])
    for group in found["groups"]:
        ref = subject(group)
        shown |= named(ref, age=group["oldest_unacked_age"], subscribers=len(group["subscribers"]))
        shown |= named(ref, paused=group["paused"], **{name: group[name] for name in COUNTS})
        shown |= {f"{ref} owned by {owner}": number for owner, number in group["partitions_owned"].items()}
    for error in found["errors"]:
        numbers = (error["retrying"], error["dead_letters"], error["failed_attempts"])
        shown |= of_error(f"error {subject(error)} {error['error']}", numbers)
    for task in found["tasks"]:
        shown |= named(f"task {task['task']}", **{name: task[name] for name in ("waiting", "scheduled", "running")})
        shown |= named(f"task {task['task']}", enqueued=task["hour"]["enqueued"], failed=task["hour"]["failed"])
    return shown


def of_error(name: str, numbers: Any) -> Figures:
    found = zip(KINDS, numbers, strict=True)
    return {f"{name} {kind}": number for kind, number in found if str(number) != "0"}


def queuehealth(client: Client) -> Figures:
    found = command("queuehealth")
    assert found["healthy"] == (not found["problems"])
    shown = named("queue", outbox=counted(found["outbox"]), outbox_age=found["outbox_oldest_age"])
    for group in found["groups"]:
        counts = {name: counted(group[name]) for name in (*COUNTS, "recent_dead_letters")}
        shown |= named(subject(group), **counts, age=group["oldest_unacked_age"], paused=group["paused"])
        shown |= named(subject(group), subscribers=group["subscribers"])
    return shown


def scraped(client: Client) -> Figures:
    """What Prometheus reads. An age of 0 may stand for none."""
    answer = client.get("/metrics/", headers={"accept": "text/plain"})
    assert answer.status_code == 200, answer.content
    families = text_string_to_metric_families(answer.content.decode())
    samples = [(one.name.removeprefix("mysqlqueue_"), one) for family in families for one in family.samples]
    shown: Figures = {}
    took = {}
    for name, sample in samples:
        labels, value = sample.labels, sample.value
        if name in ("more_groups", "database_up", "debounced_total", "bell_age_seconds", "log_bytes"):
            continue
        if name == "round_trip_seconds":
            took[labels["percentile"]] = value
        elif name == "jobs":
            shown[f"task {labels['task']} {labels['state']}"] = value
        elif "count" in labels:
            figure = f"{labels['group']}/{labels['topic']} {labels['count'].replace('_', ' ')}"
            shown[figure] = counted({"value": int(shown[figure]), "exact": value})
        else:
            ref = f"{labels['group']}/{labels['topic']}" if "group" in labels else "queue"
            figure = name.replace("oldest_unacked_age_seconds", "age").replace("_waiting", "")
            figure = figure.replace("_oldest_age_seconds", "_age").removeprefix(
                "outbox_" if "scheduled" in name else ""
            )
            shown |= named(ref, **{figure: value})
    return shown | {"queue round trip": tuple(took[one] for one in ("50", "95")) if took else None}


def overview_page(client: Client) -> Figures:
    page = opened(client)
    cards = {name: Shown(text) for name, text in page.cards.items()}
    in_banner = re.search(r" backlog (\S+)\. ", client.get(ROOT).context["banner"].status.text)
    assert in_banner is None or in_banner[1] == cards["backlog"]
    shown = named(
        "queue",
        lag=cards["backlog"],
        age=cards["oldest unsettled message"],
        in_flight=cards["in flight"],
        retrying=cards["retrying"],
        dead_letters=cards["dead letters"],
        outbox=cards["due in the outbox"],
        scheduled=cards["scheduled"],
        live=cards["live subscribers"],
        round_trip=cards["slowest round trip (p50, p95)"],
    )
    for row in page.tables["mq-groups"]:
        group, topic, _mode = row["th"].replace(",", "").split()
        held = {kind: number for number, kind in re.findall(r"([\d,]+\+?) (in flight|retrying)", row["backlog"])}
        backlog = re.match(r"\s*((?:≈ )?[\d,]+\+?)", row["backlog"])
        assert backlog is not None
        shown |= named(
            f"{group}/{topic}",
            lag=Shown(backlog[1]),
            age=Shown(row["oldest"]),
            in_flight=Shown(held.get("in flight", "0")),
            retrying=Shown(held.get("retrying", "0")),
            dead_letters=Shown(row["dead letters"]),
            paused="paused" in row["state"],
            subscribers=Shown(row["subscribers"]),
            failed_lately=Shown(row["failed"]),
        )
    return shown


def group_pages(client: Client) -> Figures:
    shown: Figures = {}
    for ref in refs():
        group, topic = ref.split("/")
        page = opened(client, "group", group=group, topic=topic)
        names = {"lag": "backlog", "age": "oldest unsettled message", "subscribers": "live subscribers"}
        for name in ("lag", "age", "in flight", "retrying", "dead letters", "subscribers"):
            shown[f"{ref} {name}"] = Shown(page.cards[names.get(name, name)])
        shown |= {f"{ref} paused": re.match(r"\s*(ordered|shared) · paused", page.facts) is not None} | partitions(
            ref, page, "mq-partitions"
        )
    return shown


def partitions(ref: str, page: Page, section: str) -> Figures:
    columns = ("watermark", "position", "end of the log", "backlog", "oldest unsettled message", "owner, since")
    found = {}
    for row in page.tables[section]:
        values = [row[name].strip() for name in columns]
        owner = re.sub(r"lost|\s+[\d.]+ (?:ms|s|min|h|d)\b.* ago\b.*", "", values.pop()).strip()
        owner = {"-": Shown("-"), "no owner": ""}.get(owner, owner)
        found[f"{ref} partition {row['th'].strip()}"] = (*map(Shown, values), owner)
    return found


def offsets_pages(client: Client) -> Figures:
    shown: Figures = {}
    for ref in refs():
        group, topic = ref.split("/")
        shown |= partitions(ref, opened(client, "offsets", group=group, topic=topic), "mq-offsets")
    for row in opened(client, "offsets").tables["mq-topics"]:
        holder, _, time = row["GC waits for"].partition(" for ")
        shown |= named(
            f"topic {row['th'].strip()}",
            messages=Shown(row["messages"]),
            bytes=(Estimate if row["messages"].startswith("≈") else Shown)(row["disk"]),
            age=Shown(row["oldest message"]),
            held_by=Shown(holder),
            held_for=Shown(time),
        )
    return shown


def in_flight_page(client: Client) -> Figures:
    page = opened(client, "inflight")
    shown = named("queue", refusals=len(page.tables["mq-refusals"]))
    for row in page.tables["mq-subscribers"]:
        shown |= named(
            f"subscriber {row['th'].strip()}",
            live=row["state"].strip() == "live",
            heartbeat=Shown(row["time since heartbeat"]),
            holds=Shown(row["in flight"]),
            round_trip=Shown(row["round trip (p50, p95)"]),
        )
        owned = re.findall(r"([\w-]+/[\w.-]+): (\d+)", row["groups"])
        shown |= {f"{ref} owned by {row['th'].strip()}": Shown(number) for ref, number in owned}
    held = [f"{row['group'].strip()}/{row['topic'].strip()}" for row in page.tables["mq-inflight"]]
    return shown | {f"{ref} in flight": held.count(ref) for ref in refs() if len(held) < 200}


def dead_letters_pages(client: Client) -> Figures:
    shown: Figures = {}
    columns = ("retrying", "dead letters", "failed attempts in 24 hours")
    for row in opened(client, "deadletters").tables["mq-errors"]:
        error, ref = row["summary"], row["group"].split()[0]
        numbers = [Shown(row[name].strip()) for name in columns]
        shown |= of_error(f"error {ref} {error}", numbers)
        keys = opened(client, "deadletters", group=ref.split("/")[0], topic=ref.split("/")[1], kind=error)
        for each in keys.tables["mq-keys"]:
            shown |= of_error(f"error {ref} {error}, {each['th'].strip()}", [Shown(each[place]) for place in "123"])
    for topic in topics():
        if topic.endswith("_dlq"):
            page = opened(client, "deadletters", topic=topic)
            heading = re.match(r"\s*Dead letters in \S+: (\S+)", page.headings["mq-dead-letters"])
            assert heading is not None
            shown[f"topic {topic} messages"] = Shown(heading[1])
            shown[f"topic {topic} newest"] = [int(row["th"]) for row in page.tables["mq-dead-letters"]]
    return shown


def messages_pages(client: Client) -> Figures:
    pages = {topic: opened(client, "messages", topic=topic) for topic in topics()}
    return {f"topic {topic} newest": [int(row["th"]) for row in page.tables["mq-log"]] for topic, page in pages.items()}


def tasks_page(client: Client) -> Figures:
    shown: Figures = {}
    for row in opened(client, "tasks").tables["mq-tasks"]:
        task = row["th"].split()[0].removesuffix("Pause")
        shown |= named(f"task {task}", **{name: Shown(row[name]) for name in ("waiting", "running", "scheduled")})
        shown |= named(f"task {task}", **{name: Shown(row[name].split()[0]) for name in ("enqueued", "failed")})
    return shown


OF_GROUPS = r"[\w-]+/[\w.-]+ (lag|age|in flight|retrying|dead letters|paused|subscribers)"
READERS: dict[Read, str] = {
    queuestatus: rf"queue (last offset|outbox|scheduled)|topic .* messages|{OF_GROUPS}|.* owned by .*|error [^,]*|"
    r"task .*",
    queuehealth: rf"queue outbox.*|{OF_GROUPS}|.* recent dead letters",
    scraped: rf"queue (last offset|outbox.*|scheduled|round trip)|{OF_GROUPS}",
    overview_page: r"queue (lag|age|in flight|retrying|dead letters|outbox|scheduled|live|round trip)|"
    rf"{OF_GROUPS}|.* failed lately",
    group_pages: OF_GROUPS,
    offsets_pages: r"topic .* (messages|bytes|age|held .*)|.* partition .*",
    in_flight_page: r"queue refusals|subscriber .*|.* owned by .+",
    dead_letters_pages: r"error .*|topic .*_dlq (messages|newest)",
    messages_pages: r"topic .* newest",
    tasks_page: r"task .*",
}
"""What reads figures, and which of the true ones it has to have."""


def refs() -> list[str]:
    return [f"{group}/{topic}" for group, topic in rows("SELECT consumer_group, topic FROM queue_consumer_groups")]


def topics() -> list[str]:
    return [topic for (topic,) in rows("SELECT DISTINCT topic FROM queue_messages")]


def agrees(shown: Any, true: Any) -> bool:
    if isinstance(shown, Shown):
        return shown.agrees(true)
    if isinstance(shown, tuple) and isinstance(true, tuple):
        return len(shown) == len(true) and all(map(agrees, shown, true))
    if true is None:
        return not shown
    return bool(shown == true or (isinstance(true, float) and shown == pytest.approx(true, abs=0.002)))


@pytest.fixture
def client(db: None, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    # As in a process of its own: other tests declare many tasks, and import these with other backends.
    monkeypatch.setattr(job_queues, "declared", {one.module_path: None for one in (charge, jobs.add)})
    settings.ROOT_URLCONF = __name__
    User.objects.all().delete()
    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    yield client
    User.objects.all().delete()


@pytest.fixture
def stage(clock: Clock, settings: Any, no_handlers: None) -> Iterator[Stage]:
    stage = Stage(clock, settings)
    with stage.ends:
        yield stage


@pytest.mark.parametrize("stage_state", [*STATES, *INCIDENTS], ids=lambda state: state.__name__)
def test_all_readers_say_what_the_state_is(client: Client, stage: Stage, stage_state: Callable[[Stage], State]) -> None:
    said = stage_state(stage)
    true = true_figures(command("queuestatus")["now"], stage.settings.MYSQLQUEUE.get("RETENTION", KEPT))
    check_figures(client, said, true)
    check_problems(client, said)
    check_causes(client, said)


def check_figures(client: Client, said: State, true: Figures) -> None:
    assert (set(refs()), true["queue outbox"]) == ({*said.groups}, said.outbox)
    for ref, group in said.groups.items():
        for name, value in dataclasses.asdict(group).items():
            found = true[f"{ref} {name.replace('_', ' ')}"]
            assert found == (pytest.approx(value, abs=SLACK) if name == "age" and value is not None else value)
    for read, wanted in READERS.items():
        shown = read(client)
        wrong = {name: (value, true.get(name)) for name, value in shown.items() if not agrees(value, true.get(name))}
        missing = {name for name, value in true.items() if value != 0 and re.fullmatch(wanted, name)} - {*shown}
        assert (wrong, missing) == ({}, set()), read.__name__


def check_problems(client: Client, said: State) -> None:
    status, health, page = command("queuestatus"), command("queuehealth"), opened(client)
    found = {Problem(one["severity"], one["kind"], subject(one)) for one in status["problems"]}
    assert sorted(found) == sorted(set(page.problems)) == sorted(said.problems)
    for ref in said.groups:
        group, topic = ref.split("/")
        of_group = {one for one in said.problems if one.group == ref}
        assert set(opened(client, "group", group=group, topic=topic).problems) == of_group
    alarming = {one for one in said.problems if one.severity == 0 or one.kind in ALARMING_NOTES}
    for name, those in (("problems", alarming), ("notes", said.problems - alarming)):
        assert {(one["kind"], subject(one)) for one in health[name]} == {(one.kind, one.group) for one in those}
    facts = [
        sorted(str((one["kind"], subject(one), one["text"], one["since"], one["error"])) for one in those)
        for those in (status["problems"], [*health["problems"], *health["notes"]])
    ]
    assert facts[0] == facts[1]


def check_causes(client: Client, said: State) -> None:
    """Their headlines, errors and, to the minute, since when."""
    status, page, output = command("queuestatus"), opened(client), io.StringIO()
    with contextlib.suppress(SystemExit):
        call_command("queuehealth", stdout=output, no_color=True)
    causes = set()
    for one in status["causes"]:
        causes.add((one["text"], one["error"] or "", clock_text(one["since"], status["now"])))
        since = one["since"] and timezone.localtime(datetime.datetime.fromtimestamp(one["since"] // 1000, datetime.UTC))
        for part in (f"{one['text']} {one['next_step']}", one["error"], since and f"since {since:%Y-%m-%d %H:%M:%S} ("):
            assert (part or "") in output.getvalue()
    shown = set()
    for cause in page.causes:
        since = re.search(r"(?<!message )since (.+?) \(([^()]+)\)\.", cause["mq-cause-facts"])
        shown.add((cause["mq-what"], cause.get("mq-cause-error", ""), since[1] if since else ""))
        began = {one["since"] for one in status["causes"] if one["text"] == cause["mq-what"]}
        assert since is None or any(Shown(since[2]).agrees((status["now"] - at) / 1000) for at in began)
    assert shown == causes
    for true in said.headlines:
        (one,) = [one for one in status["causes"] if true.text in one["text"]]
        assert (one["since"], one["error"], one["messages"]) == (true.since, true.error or None, true.messages)
        (facts,) = [cause["mq-cause-facts"] for cause in page.causes if true.text in cause["mq-what"]]
        assert facts.startswith(true.costs)
