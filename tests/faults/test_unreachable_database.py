"""What commands and pages say, and how soon, when the database refuses, is frozen or lacks the tables.

The server is private to this file and real: what is tested is the driver's time limits and the server's own errors.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import signal
import subprocess
import sys
import time
from html import unescape
from urllib.parse import quote

import django
import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections, transaction
from django.test import Client
from django.urls import path
from health_check.exceptions import ServiceUnavailable

from django_mysqlqueue import metrics
from django_mysqlqueue.health import QueueHealth
from django_mysqlqueue.management.base import QueueCommand
from django_mysqlqueue.metrics.queue import QueueCollector
from django_mysqlqueue.models import ConsumerGroup, Operation
from tests.support.dashboard import ROOT as DASHBOARD
from tests.support.dashboard import confirm
from tests.support.dashboard import urlpatterns as admin_urls
from tests.support.internals import GroupRef, Session, apart, bounded, failures, groups, several
from tests.support.metrics import Samples, parsed
from tests.support.outages import PRIVATE
from tests.support.paths import ROOT
from tests.support.processes import freeze
from tests.support.pseudo_terminal import opened
from tools import servers

pytestmark = [pytest.mark.servers_only, pytest.mark.processes]

REF = GroupRef("g", "t")
urlpatterns = [*admin_urls, path("metrics/", metrics.view)]
CONNECT, START = 10, 30
"""Seconds: the commands' time limit on connecting, and what starting Python takes on a busy machine."""
PAGES_CONNECT = 2
"""Seconds: the limit that DATABASES gives where several pages wait for it."""


@contextlib.contextmanager
def frozen(server):
    """The server's process is stopped, as by a hypervisor or a hung disk: the kernel still takes connections."""
    connections[PRIVATE].close()
    freeze(server.pid)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def url(server, user="root", database=servers.DATABASE):
    return f"mysql://{user}@/{database}?unix_socket={quote(str(server.socket), safe='')}"


def start(server, *arguments, **where):
    env = {**os.environ, "DATABASE_URL": url(server, **where), "DJANGO_SETTINGS_MODULE": "tests.settings"}
    return subprocess.Popen(
        [sys.executable, "-m", "django", *arguments], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def said(process):
    """The one line that a command ends with."""
    out, error = process.communicate(timeout=60)
    assert process.returncode == 1, (out, error)
    assert "Traceback" not in error
    (line,) = error.strip().splitlines()
    assert line.startswith("CommandError: ")
    return line.removeprefix("CommandError: ")


# -- commands -----------------------------------------------------------------


@pytest.mark.promise("Health")
def test_no_command_waits_for_a_frozen_server(db, server):
    began = time.monotonic()
    with frozen(server):
        running = [
            start(server, *command)
            for command in (
                ("queuehealth",),
                ("queuestatus",),
                ("queuepause", "g", "t", "--noinput"),
                ("queuegc",),
                ("runsubscriber",),
            )
        ]
        texts = [said(one) for one in running]
        took = time.monotonic() - began
    assert all(text.startswith("The database 'default' does not answer: (2013") for text in texts), texts
    assert took < CONNECT + START


def test_a_watched_server_that_freezes_is_shown_again_when_it_is_back(db, server):
    """Until then, the screen says so, and keys work."""
    groups.register(PRIVATE, GroupRef("watched", "t"), mode="ordered", start="earliest")
    env = {"DATABASE_URL": url(server), "DJANGO_SETTINGS_MODULE": "tests.settings"}
    command = [sys.executable, "-m", "django", "queuestatus", "--watch", "0.5"]
    with opened(command, environment=env, columns=200) as terminal:
        terminal.wait_for("watched/t")
        with frozen(server):
            began = time.monotonic()
            lines = terminal.wait_for("The database 'default' does not answer")
            assert time.monotonic() - began < several.TOTAL_SECONDS + 2
            assert "STOPPED" in lines[2]
            assert "It is tried again every 500 ms." in lines
            assert not any("watched/t" in line for line in lines), "it may no longer be true"
        terminal.wait_for("watched/t")
        with frozen(server):
            began = time.monotonic()
            terminal.press("q")
            assert terminal.end() == 0
            assert time.monotonic() - began < several.ANSWER_SECONDS, "it does not wait for the server"


@pytest.mark.promise("Health")
@pytest.mark.parametrize("command", ["queuestatus", "queuehealth"])
def test_a_frozen_server_hides_no_other_database(db, server, settings, monkeypatch, command):
    """The databases are read at the same time, each in a thread with limits of its own."""
    settings.MYSQLQUEUE = {"TOPICS": {"first": {"DATABASE": PRIVATE}, "second": {"DATABASE": f"{PRIVATE}_queue"}}}
    for alias in (PRIVATE, f"{PRIVATE}_queue"):
        monkeypatch.setitem(connections.databases[alias]["OPTIONS"], "connect_timeout", PAGES_CONNECT)
    began, out = time.monotonic(), io.StringIO()
    with frozen(server), pytest.raises((CommandError, SystemExit)) as caught:
        call_command(command, stdout=out, no_color=True)
    assert time.monotonic() - began < 2 * PAGES_CONNECT, "not one after another"
    assert getattr(caught.value, "code", 1) == 1
    sections = out.getvalue().split("\n\nDatabase '")
    assert sections[0].startswith("Database 'default'\n")
    assert ("Healthy" if command == "queuehealth" else "Queue in database 'default'") in sections[0]
    for alias, section in zip((PRIVATE, f"{PRIVATE}_queue"), sections[-2:], strict=True):
        assert section.startswith(f"{alias}'\nThe database '{alias}' does not answer: (2013")


class Slow(QueueCommand):
    read_timeout = 1.0

    def run_on(self, using, options):
        Session(using).row("SELECT SLEEP(20)")


def test_a_command_gives_up_on_a_server_that_freezes_in_the_middle(server):
    connections[PRIVATE].close()
    began = time.monotonic()
    with pytest.raises(CommandError, match=f"The database '{PRIVATE}' does not answer: \\(2013"):
        call_command(Slow(), database=PRIVATE)
    assert time.monotonic() - began < 10
    assert connections[PRIVATE].connection is None
    assert "read_timeout" not in connections[PRIVATE].settings_dict["OPTIONS"], "the limits end with the command"


def test_limits_in_options_win(server, monkeypatch):
    own = connections[PRIVATE].settings_dict
    monkeypatch.setattr(
        connections[PRIVATE], "settings_dict", {**own, "OPTIONS": {**own["OPTIONS"], "read_timeout": 5}}
    )
    connections[PRIVATE].close()
    Slow.run_on, run_on = lambda self, using, options: Session(using).row("SELECT SLEEP(2)"), Slow.run_on
    try:
        call_command(Slow(), database=PRIVATE)
    finally:
        Slow.run_on = run_on


@pytest.mark.promise("Health")
@pytest.mark.parametrize(
    ("where", "command", "text"),
    [
        ({"user": "nobody"}, "queuehealth", "refuses access to the user of DATABASES: (1045"),
        ({"user": "app", "database": "mysql"}, "queuestatus", "refuses access to the user of DATABASES: (1044"),
        ({"database": "nowhere"}, "queuegc", "The database that DATABASES names for 'default' does not exist: (1049"),
    ],
)
def test_an_answer_that_refuses_is_no_silence(db, server, where, command, text):
    found = said(start(server, command, **where))
    assert text in found
    assert "does not answer" not in found


def test_a_server_that_is_down_does_not_answer(db, server, tmp_path):
    gone = copy.copy(server)
    gone.socket = tmp_path / "nobody"
    assert said(start(gone, "queuehealth")).startswith("The database 'default' does not answer: (2002")


def test_too_many_connections_are_told(db, server):
    server.execute(
        "CREATE USER few@localhost WITH MAX_USER_CONNECTIONS 1; GRANT ALL ON `mysqlqueue%`.* TO few@localhost"
    )
    holder = connections[PRIVATE].copy("holder")
    holder.settings_dict["USER"] = "few"
    try:
        holder.ensure_connection()
        assert "accepts no more connections: (1" in said(start(server, "queuehealth", user="few"))
    finally:
        holder.close()
        server.execute("DROP USER few@localhost")


def test_a_read_only_server_is_told(db, server):
    groups.register(PRIVATE, REF, mode="ordered", start="earliest")
    read_only = "super_read_only" if server.engine == "mysql" else "read_only"
    server.execute(f"SET GLOBAL {read_only} = 1")
    try:
        assert said(start(server, "queuepause", "g", "t", "--noinput", user="app")).startswith(
            "The database 'default' is read-only: (1290"
        )
    finally:
        server.execute(f"SET GLOBAL {read_only} = 0; SET GLOBAL read_only = 0")
    assert not ConsumerGroup.objects.using(PRIVATE).get(consumer_group="g").paused


def test_a_missing_table_is_told(db, server):
    server.execute(f"RENAME TABLE {servers.DATABASE}.queue_rollups TO {servers.DATABASE}.away")
    try:
        found = said(start(server, "queuehealth"))
        assert found.startswith(
            "The database 'default' lacks a table or column of the queue; run manage.py migrate: (1146"
        )
    finally:
        server.execute(f"RENAME TABLE {servers.DATABASE}.away TO {servers.DATABASE}.queue_rollups")


@pytest.fixture
def site(db, server, settings):
    settings.ROOT_URLCONF = __name__
    settings.MYSQLQUEUE = {"DATABASE": PRIVATE, "METRICS_TOKEN": "0123456789abcdefghij"}
    User.objects.all().delete()
    for model in (ConsumerGroup, Operation):
        model.objects.using(PRIVATE).all().delete()
    groups.register(PRIVATE, REF, mode="ordered", start="earliest")
    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    yield client
    User.objects.all().delete()


# -- pages --------------------------------------------------------------------


@pytest.mark.promise("Health")
def test_pages_tell_that_a_frozen_server_does_not_answer(site, server, settings, monkeypatch):
    """A web worker that waited for it without end would be lost to all other pages of the site."""
    own = connections[PRIVATE].settings_dict
    limited = {**own, "OPTIONS": {**own["OPTIONS"], "connect_timeout": PAGES_CONNECT}}
    monkeypatch.setattr(connections[PRIVATE], "settings_dict", limited)
    assert site.get(DASHBOARD).status_code == 200
    # The request's own connection is open already, without limits.
    connections[PRIVATE].ensure_connection()
    freeze(server.pid)
    try:
        for where in (f"{DASHBOARD}group/?group=g&topic=t", f"{DASHBOARD}operations/"):
            began = time.monotonic()
            response = site.get(where)
            assert time.monotonic() - began < PAGES_CONNECT + 5
            assert response.status_code == 503
            assert f"The database '{PRIVATE}' does not answer: (2013" in unescape(response.content.decode())
        scrape = site.get("/metrics/", headers={"Authorization": "Bearer 0123456789abcdefghij"})
        assert (scrape.status_code, scrape.content) == (503, f"The database '{PRIVATE}' does not answer.\n".encode())
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert site.get(DASHBOARD).status_code == site.get(f"{DASHBOARD}operations/").status_code == 200


class OnPrivate:
    """A router: what the admin reads is on the server that a test freezes."""

    def db_for_read(self, model, **hints):
        return PRIVATE if model._meta.app_label in ("auth", "sessions") else None

    db_for_write = db_for_read


def reads_user(get_response):
    """Middleware that reads user and session after the view, as those of many projects do."""

    def respond(request):
        response = get_response(request)
        response["X-User"] = f"{request.user}, {request.session.get('_auth_user_id')}"
        return response

    return respond


@pytest.mark.promise("Health")
@pytest.mark.parametrize(
    ("method", "address"), [("get", ""), ("get", "do/pause/?group=g&topic=t"), ("post", "do/pause/")]
)
def test_a_cold_page_whose_session_cannot_be_read_answers_in_time(site, server, settings, method, address, caplog):
    settings.DATABASE_ROUTERS = [OnPrivate()]
    settings.SESSION_SAVE_EVERY_REQUEST = True
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.reads_user"]
    ask = getattr(site, method)
    # No project would let it wait without end: the mails of the log read the user, too.
    settings.ADMINS = ["ada@example.com"] if django.VERSION >= (6, 0) else [("Ada", "ada@example.com")]
    settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}  # Django 6.1
    settings.DEBUG = False
    User.objects.all().delete()
    site.force_login(User.objects.create_superuser("ada"))
    assert ask(f"{DASHBOARD}{address}").headers["X-User"].startswith("ada, ")
    connections[PRIVATE].ensure_connection()
    freeze(server.pid)
    began = time.monotonic()
    try:
        response = ask(f"{DASHBOARD}{address}")
        took = time.monotonic() - began
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert several.ANSWER_SECONDS - 1 < took < several.ANSWER_SECONDS + 2
    assert (response.status_code, response["Retry-After"], response["Cache-Control"]) == (503, "10", "no-store")
    assert response["Refresh"] == "10", "a tab that was opened meanwhile would never see the end of the outage"
    text = unescape(response.content.decode())
    assert f"The database '{PRIVATE}' does not answer." in text
    assert "2013" not in text, "the driver's text may name users and hosts"
    assert response.headers["X-User"] == "AnonymousUser, None"
    assert response.cookies == {}, "nobody is logged out"
    assert ask(f"{DASHBOARD}{address}").headers["X-User"].startswith("ada, ")


@pytest.mark.promise("Health")
def test_the_index_of_the_admin_does_not_wait_for_a_frozen_server(site, server):
    with frozen(server):
        began = time.monotonic()
        assert site.get("/admin/").status_code == 200
        assert time.monotonic() - began < 1


@pytest.mark.promise("Health")
def test_a_health_check_names_the_frozen_databases(db, server, settings, monkeypatch):
    settings.MYSQLQUEUE = {"TOPICS": {"a": {"DATABASE": PRIVATE}, "b": {"DATABASE": f"{PRIVATE}_queue"}}}
    for alias in (PRIVATE, f"{PRIVATE}_queue"):
        monkeypatch.setitem(connections.databases[alias]["OPTIONS"], "connect_timeout", PAGES_CONNECT)
    began = time.monotonic()
    with frozen(server), pytest.raises(ServiceUnavailable) as caught:
        QueueHealth().run()
    assert time.monotonic() - began < 2 * PAGES_CONNECT, "not one after another"
    assert str(caught.value) == "Unavailable: " + " ".join(
        f"The database '{alias}' does not answer." for alias in (PRIVATE, f"{PRIVATE}_queue")
    )


@pytest.mark.promise("Health")
def test_a_scrape_shows_the_other_databases_while_one_is_frozen(site, server, settings, monkeypatch):
    monkeypatch.setattr(QueueCollector, "patience", 2.0)
    settings.MYSQLQUEUE = {
        "METRICS_TOKEN": "0123456789abcdefghij",
        "TOPICS": {"a": {"DATABASE": PRIVATE}, "b": {"DATABASE": f"{PRIVATE}_queue"}},
    }
    began = time.monotonic()
    with frozen(server):
        response = site.get("/metrics/", headers={"Authorization": "Bearer 0123456789abcdefghij"})
        assert time.monotonic() - began < CONNECT - 2, "it does not wait until the driver gives up"
    found = Samples(parsed(response.content.decode()))
    ups = [found.value("database_up", database=alias) for alias in ("default", PRIVATE, f"{PRIVATE}_queue")]
    assert ups == [1, 0, 0]
    assert found.value("outbox_waiting") == 0
    assert {dict(labels)["database"] for name, labels in found if name == "mysqlqueue_more_groups"} == {"default"}


def test_an_operation_tells_that_a_frozen_server_does_not_answer(site, server):
    connections[PRIVATE].ensure_connection()
    freeze(server.pid)
    began = time.monotonic()
    try:
        response = site.get(f"{DASHBOARD}do/pause/?group=g&topic=t&asked=yes")
        took = time.monotonic() - began
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert several.ANSWER_SECONDS - 1 < took < several.ANSWER_SECONDS + 2
    assert f"The database &#x27;{PRIVATE}&#x27; does not answer" in response.content.decode()
    assert confirm(site, "pause", group="g", topic="t") == ["The group g/t is paused."]
    assert ConsumerGroup.objects.using(PRIVATE).get(consumer_group="g").paused
    assert Operation.objects.using(PRIVATE).count() == 1


@pytest.mark.promise("Health")
def test_a_frozen_database_delays_the_overview_of_all_by_its_limit(site, server, settings):
    """However many there are: here two of three."""
    frozen_ones = [PRIVATE, f"{PRIVATE}_queue"]
    settings.MYSQLQUEUE = {"TOPICS": {f"orders-{n}": {"DATABASE": alias} for n, alias in enumerate(frozen_ones)}}
    groups.register("default", REF, mode="ordered", start="earliest")
    assert [row.state for row in site.get(DASHBOARD).context["rows"]] == ["OK"] * 3
    for alias in frozen_ones:
        connections[alias].ensure_connection()
    freeze(server.pid)
    try:
        for _ in range(2):
            began = time.monotonic()
            response = site.get(DASHBOARD)
            assert several.ANSWER_SECONDS - 1 < time.monotonic() - began < several.ANSWER_SECONDS + 2
            assert response.status_code == 200
            states = {row.alias: row.state for row in response.context["rows"]}
            assert states == {"default": "OK", **dict.fromkeys(frozen_ones, "Stopped")}
            text = unescape(response.content.decode())
            for alias in frozen_ones:
                assert f"The database '{alias}' does not answer: (2013" in text
        # Pages of the others do not ask it.
        began = time.monotonic()
        assert site.get(f"{DASHBOARD}group/?group=g&topic=t").status_code == 200
        assert time.monotonic() - began < several.ANSWER_SECONDS - 1
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert [row.state for row in site.get(DASHBOARD).context["rows"]] == ["OK"] * 3


def test_pages_tell_an_answer_that_refuses(site, server):
    own = connections[PRIVATE].settings_dict
    connections[PRIVATE].settings_dict = {**own, "USER": "nobody"}
    try:
        response = site.get(DASHBOARD)
    finally:
        connections[PRIVATE].settings_dict = own
    assert response.status_code == 503
    assert "refuses access to the user of DATABASES: (1045" in response.content.decode()


def test_a_page_sees_what_others_have_committed_and_leaves_the_requests_transaction(server):
    """Under ATOMIC_REQUESTS at REPEATABLE READ the request's snapshot may be old."""
    with transaction.atomic(using=PRIVATE):
        Session(PRIVATE).row("SELECT COUNT(*) FROM queue_consumer_groups")
        own = connections[PRIVATE].connection.thread_id()
        with bounded(PRIVATE):
            assert connections[PRIVATE].connection is None
            Session(PRIVATE).row("SELECT 1")
            assert connections[PRIVATE].connection.thread_id() != own
            with apart(PRIVATE):
                assert not connections[PRIVATE].in_atomic_block
        assert connections[PRIVATE].connection.thread_id() == own
        assert connections[PRIVATE].in_atomic_block


def test_a_slow_statement_of_a_page_is_given_up(server):
    began = time.monotonic()
    with pytest.raises(OperationalError) as caught, bounded(PRIVATE, read=1):
        Session(PRIVATE).row("SELECT SLEEP(20)")
    assert time.monotonic() - began < 10
    assert failures.kind_of(PRIVATE, caught.value) == "no_answer"
