"""The main load under what servers and connections are set to, with an account of every message.

The server is private to this file; each cell of the matrix sets it, runs
publishers, a real subscriber, a redrive and GC there, and compares what was
committed with what every group did. Where ``check`` refuses a setting, the
publishers have the remedy that it names, and the subscriber has not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

import pytest
from django.db import OperationalError, connections

from django_mysqlqueue.inspection import get_overview
from django_mysqlqueue.models import DeliveryState, OutboxMessage, PartitionLease, QueueMessage
from tests.app.models import Effect
from tests.conftest import QUEUE_MODELS
from tests.support import accounts, load
from tests.support.harness import USING
from tests.support.internals import GroupRef, groups
from tests.support.paths import ROOT
from tests.support.private_servers import alias_of, private_server
from tests.support.processes import SHORT, Worker, wait_for
from tools import servers

pytestmark = [pytest.mark.processes, pytest.mark.servers_only, pytest.mark.timeout(300)]

PUBLISHERS = ("a", "b")
UNITS = 60
"""Of each publisher."""
GROUPS = {"plain": "p.plain", "atomic": "p.plain", "shared": "p.shared", "strict": "p.strict", "batch": "p.batch"}
HELD = GroupRef("held", "p.plain")
"""A group that nobody runs: GC must leave its topic alone."""
IN_ORDER = {"GROUPS": {"plain": {"ON_FAILURE": "block"}, "atomic": {"ON_FAILURE": "block"}}}


@dataclass(frozen=True)
class Setting:
    """One cell: what the server or the project's connections are set to."""

    name: str
    globals: Mapping[str, str] = field(default_factory=dict)
    start: tuple[str, ...] = ()
    """Options that a server takes at its start only."""
    init_command: str = ""
    isolation: str = ""
    charset: str = "utf8mb4"
    refused: tuple[str, ...] = ()
    """The variables that ``check`` refuses; on MariaDB not autocommit, which Django sets right there."""
    exists_on: tuple[str, ...] = servers.ENGINES
    quick: bool = False
    """Run with every test run, too."""

    def __str__(self):
        return self.name


def mode(name, **more):
    return Setting(name, {"sql_mode": f"CONCAT(@@GLOBAL.sql_mode, ',{name}')"}, **more)


TIMES = ("wait_timeout", "net_read_timeout", "net_write_timeout", "lock_wait_timeout", "innodb_lock_wait_timeout")
STATEMENT_TIME = {"mariadb": ("max_statement_time", "1"), "mysql": ("max_execution_time", "1000")}
SETTINGS = [
    Setting(
        "autocommit=0, sql_select_limit=2",
        {"autocommit": "0", "sql_select_limit": "2"},
        refused=("autocommit", "sql_select_limit"),
        quick=True,
    ),
    Setting("autocommit=0", {"autocommit": "0"}, refused=("autocommit",)),
    Setting("sql_select_limit=2", {"sql_select_limit": "2"}, refused=("sql_select_limit",)),
    Setting(
        "sql_select_limit=20 of a connection", init_command="SET sql_select_limit=20", refused=("sql_select_limit",)
    ),
    Setting("completion_type=1", {"completion_type": "1"}, refused=("completion_type",)),
    Setting("completion_type=2", {"completion_type": "2"}, refused=("completion_type",)),
    Setting("sql_safe_updates=1", {"sql_safe_updates": "1"}, refused=("sql_safe_updates",)),
    Setting("max_join_size=1", {"max_join_size": "1", "sql_big_selects": "0"}, refused=("sql_big_selects",)),
    mode("EMPTY_STRING_IS_NULL", refused=("sql_mode",), exists_on=("mariadb",)),
    mode("ANSI_QUOTES"),
    mode("NO_BACKSLASH_ESCAPES"),
    mode("PIPES_AS_CONCAT"),
    mode("ORACLE", exists_on=("mariadb",)),
    mode("TRADITIONAL"),
    Setting("SERIALIZABLE", isolation="serializable"),
    Setting("REPEATABLE READ", isolation="repeatable read"),
    Setting("READ UNCOMMITTED", isolation="read uncommitted"),
    Setting("time-outs of 1 s", dict.fromkeys((*TIMES, "statement time"), "1")),
    Setting("auto_increment 3 from 2", {"auto_increment_increment": "3", "auto_increment_offset": "2"}),
    Setting("time zone -11:30", {"time_zone": "'-11:30'"}),
    Setting("latin1 database", charset="latin1"),
    Setting("packets of 1 MB", {"max_allowed_packet": "1048576"}),
    Setting("innodb_rollback_on_timeout", start=("--innodb-rollback-on-timeout=ON",)),
]


@pytest.fixture(scope="module")
def server(_database):
    """A private server of the engine under test."""
    with private_server() as server:
        server.execute("CREATE USER app@localhost; GRANT ALL ON `settings%`.* TO app@localhost")
        yield server


@pytest.fixture(scope="module")
def databases(server):
    """Gives the alias of an empty database of a character set; it is open before anything is set, so it stays sound."""
    aliases = {}
    with contextlib.ExitStack() as stack:

        def emptied(charset):
            if charset not in aliases:
                name = f"settings_{charset}"
                server.execute(f"CREATE DATABASE {name}_queue CHARACTER SET {charset}")
                aliases[charset] = stack.enter_context(alias_of(server, name, name, charset=charset))
            for model in (*QUEUE_MODELS, Effect):
                model.objects.using(aliases[charset]).all().delete()
            return aliases[charset]

        yield emptied


@contextlib.contextmanager
def set_to(server, setting, using):
    """The server is set so, and afterwards as it was."""
    if setting.start:
        connections[using].close()
        server.stop()
        server.start(*setting.start)
        connections[using].ensure_connection()
    before = {}
    try:
        with connections[using].cursor() as cursor:
            wanted = dict(
                STATEMENT_TIME[server.engine] if name == "statement time" else (name, value)
                for name, value in setting.globals.items()
            )
            for name in wanted:  # all first: some set others
                cursor.execute(f"SELECT @@GLOBAL.{name}")
                (before[name],) = cursor.fetchone()
            for name, value in wanted.items():
                cursor.execute(f"SET GLOBAL {name} = {value}")
        yield
    finally:
        with connections[using].cursor() as cursor:
            for name, value in before.items():
                cursor.execute(f"SET GLOBAL {name} = %s", (value,))
        if setting.start:
            connections[using].close()
            server.stop()
            server.start()


class Cell:
    """Processes of a project on the private server."""

    def __init__(self, server, setting, using, tmp_path):
        self.server, self.setting, self.using, self.tmp_path = server, setting, using, tmp_path
        harmless = "autocommit" if server.engine == "mariadb" else None
        self.refused = [name for name in setting.refused if name != harmless]
        self.processes = []

    def env(self, *, init_command=None, **settings):
        options = {"unix_socket": str(self.server.socket)}
        command = self.setting.init_command if init_command is None else init_command
        if command:
            options["init_command"] = command
        return {
            **os.environ,
            "DATABASE_URL": f"mysql://app@/{self.using}?{urlencode(options)}",
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "TEST_WITHOUT_ADMIN": "1",
            "TEST_ISOLATION": self.setting.isolation,
            "TEST_MYSQLQUEUE": json.dumps(SHORT | IN_ORDER | settings),
        }

    def start(self, *arguments, **options):
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self.env(**options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def manage(self, *arguments, **options):
        return self.start("manage.py", *arguments, **options)

    def subscriber(self):
        arguments = [argument for group in GROUPS for argument in ("--group", group)]
        worker = Worker(self.tmp_path, *arguments, whole_env=self.env())
        self.processes.append(worker.process)
        wait_for(worker.is_ready, worker)
        return worker

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def ended(process):
    """Its output, once it has ended well."""
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output


def remedy(check, refused):
    """What the refusal names as ``init_command``, for all variables; "" where nothing is refused."""
    output, _ = check.communicate(timeout=60)
    said = re.findall(r"Connections to the queue's database 'default' have (\w+) = ", output)
    assert sorted(said) == sorted(refused), output
    assert check.returncode == (1 if refused else 0), output
    assert output.count("django_mysqlqueue.E017") == len(refused)
    commands = re.findall(r"\['init_command'\] = \"(SET .*)\"\.$", output, re.MULTILINE)
    assert len(commands) == len(refused)
    assert output.count(f"DATABASES['{USING}']") == len(refused)
    return "; ".join(commands)


def run_load(cell):
    """Publishes, handles, redrives and collects under the setting; returns the number of committed messages."""
    using = cell.using
    groups.register(using, HELD, mode="ordered", start="earliest")
    checking = cell.manage("check", "--database", USING)
    worker = cell.subscriber()
    mended = remedy(checking, cell.refused)
    again = cell.manage("check", "--database", USING, init_command=mended) if mended else None
    publishers = [
        cell.start("-m", "tests.support.load", name, str(UNITS), init_command=mended or None) for name in PUBLISHERS
    ]
    if "autocommit" in cell.refused:
        without, _ = cell.start("-m", "tests.support.load", "c", "1").communicate(timeout=60)
        assert "would never be committed. Nothing was stored." in without
        assert not Effect.objects.using(using).filter(name__contains="|c").exists()
    for publisher in publishers:
        ended(publisher)
    if again is not None:
        ended(again)
    wait_for(lambda: is_drained(using), worker, timeout=60)
    committed = set(accounts.effects("committed", using))
    dead = {(key, number) for key, number in committed if number % 50 == 0}
    assert_dead(using, dead)
    assert f"redriven: {len(dead)}." in ended(cell.manage("queueredrive", "p.strict", "--noinput"))
    wait_for(lambda: is_drained(using) and not redriven(using), worker, timeout=60)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.output
    assert_dead(using, dead)
    assert_handled(using, committed, dead)
    assert_texts(using)
    ended(cell.manage("queuegc", RETENTION=0))
    left = Counter(QueueMessage.objects.using(using).values_list("topic", flat=True))
    assert left == {"p.plain": len(committed), "p.strict_dlq": len(dead)}
    return len(committed) * len(load.TOPICS)


def is_drained(using):
    if any(model.objects.using(using).exists() for model in (OutboxMessage, DeliveryState, PartitionLease)):
        return False
    return all(not one.lag for one in get_overview(using=using, lease_duration=3).groups if one.ref.group in GROUPS)


def redriven(using):
    """Messages that were sent back and are not in the DLQ again."""
    return (
        QueueMessage.objects.using(using).filter(topic="p.strict_dlq").count()
        < Effect.objects.using(using).filter(name__startswith="committed|", value__in=(0, 50)).count()
    )


def assert_dead(using, dead):
    letters = QueueMessage.objects.using(using).filter(topic="p.strict_dlq")
    found = [(key, json.loads(bytes(payload))["n"]) for key, payload in letters.values_list("partition_key", "payload")]
    assert sorted(found) == sorted(dead)


def assert_handled(using, committed, dead):
    """Every group did what was committed and nothing else, in order, the atomic ones exactly once."""
    assert len(committed) == Effect.objects.using(using).filter(name__startswith="committed|").count()
    assert len(committed) > len(PUBLISHERS) * UNITS
    assert all(number < load.ROLLED_BACK for _, number in committed)
    for group in GROUPS:
        assert set(accounts.effects(group, using)) == committed, group
    for group in ("atomic", "batch"):
        assert Counter(accounts.effects(group, using)) == Counter(committed), group
    assert set(accounts.effects("done", using)) == committed - dead
    for group in ("plain", "atomic", "strict"):
        starts = defaultdict(list)
        for key, number in dict.fromkeys(accounts.effects(group, using)):
            starts[key].append(number)
        for key, numbers in starts.items():
            # What comes by publish_many has its numbers apart.
            expected = sorted(numbers, key=lambda number: (number % load.MANY, number))
            assert load.LATER in key or numbers == expected, (group, key)


def assert_texts(using):
    """What is in the log is what was published, byte for byte."""
    rows = QueueMessage.objects.using(using).filter(topic="p.plain").values_list("payload", "metadata", "partition_key")
    for payload, metadata, key in rows:
        body = json.loads(bytes(payload))
        assert body["text"] == (load.TEXT if body["n"] % load.MANY != 8 else "x" * load.LARGE)
        assert (metadata["text"], metadata["empty"]) == (load.TEXT, "")
        assert "ü" in key


@pytest.mark.promise("Server settings")
@pytest.mark.parametrize(
    "setting", [pytest.param(one, id=str(one), marks=[] if one.quick else [pytest.mark.slow]) for one in SETTINGS]
)
def test_the_load_under_a_setting(db, server, databases, setting, tmp_path, capsys):
    using = databases(setting.charset)
    if server.engine not in setting.exists_on:
        with pytest.raises(OperationalError, match="can't be set to the value"), set_to(server, setting, using):
            pass
        return
    cell = Cell(server, setting, using, tmp_path)
    began = time.monotonic()
    verdict, messages = "FAILED", 0
    try:
        with set_to(server, setting, using):
            messages = run_load(cell)
        verdict = "refused, and nothing lost" if cell.refused else "nothing lost"
    finally:
        cell.close()
        with capsys.disabled():
            print(f"\n{server.engine}, {setting}: {messages} messages, {time.monotonic() - began:.1f} s, {verdict}")
