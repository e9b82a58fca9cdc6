"""Real subscribers while the clock of their database server is set forward and back.

libfaketime moves the clock of a private server. It does not work with MySQL's, so this file runs on MariaDB only.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from itertools import pairwise
from signal import SIGTERM
from urllib.parse import quote

import pytest

from django_mysqlqueue import Message, publish_many
from tests.app.models import Effect
from tests.support.outages import PRIVATE
from tests.support.private_servers import alias_of, private_server
from tests.support.processes import Worker, wait_for
from tools import servers

pytestmark = [pytest.mark.processes, pytest.mark.servers_only]

GROUPS = ("controlled", "controlled_shared")
TOTAL, KEYS = 240, 8
PATIENT = {"LEASE_DURATION": 12, "GROUPS": {"controlled_shared": {"VISIBILITY_TIMEOUT": 12}}}
"""A busy machine must not be the reason for a takeover."""


@pytest.fixture
def clock(engine, tmp_path, monkeypatch):
    """The file that says by how much the clock of the next server is wrong."""
    if engine != "mariadb":
        pytest.skip("MySQL's server does not start under libfaketime")
    path = tmp_path / "clock"
    path.write_text("+0\n")
    try:
        library = servers.faketime()
    except servers.NotAvailable as error:
        pytest.skip(str(error))
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("FAKETIME_TIMESTAMP_FILE", str(path))
        patch.setenv("FAKETIME_CACHE_DURATION", "1")
        patch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        with private_server() as server:
            patch.undo()
            yield server, path


def steps(workers):
    """How many steps of the clock each has noticed."""
    return [worker.output.count("clock.stepped") for worker in workers]


def calls(group):
    """When each call of the handler began and ended, and its number."""
    rows = Effect.objects.using(PRIVATE).filter(name__startswith=f"{group}|").values_list("name", "value")
    return sorted((*map(float, name.split("|")[1:]), number) for name, number in rows)


@pytest.mark.timeout(600)  # That server is slow.
@pytest.mark.promise("Clocks", "One owner")
def test_live_subscribers_keep_what_they_hold(clock, tmp_path):
    server, path = clock
    with alias_of(server, PRIVATE):
        url = f"mysql://root@/{servers.DATABASE}?unix_socket={quote(str(server.socket), safe='')}"
        arguments = [argument for group in GROUPS for argument in ("--group", group)]
        workers = [
            Worker(tmp_path, *arguments, "--name", name, "--threads", "4", env={"DATABASE_URL": url}, **PATIENT)
            for name in "ab"
        ]
        try:
            for worker in workers:
                wait_for(worker.is_ready, worker)
            publish_many(
                "p.controlled",
                (
                    Message({"n": n, "do": "hang", "seconds": 0.3}, key=f"k{n % KEYS}", metadata={"region": "eu"})
                    for n in range(TOTAL)
                ),
                using=PRIVATE,
            )
            for number, offset in enumerate(("+1h", "+0", "-1h", "+0"), 1):
                before = len(calls("controlled"))
                wait_for(lambda before=before: len(calls("controlled")) >= before + 12, workers[0])
                path.write_text(f"{offset}\n")
                wait_for(lambda number=number: steps(workers) == [number, number], workers[0])
                time.sleep(2)  # Two ticks.
            wait_for(lambda: all(len(calls(group)) >= TOTAL for group in GROUPS), workers[0], timeout=120)
            for worker in workers:
                worker.send(SIGTERM)
            assert [worker.wait() for worker in workers] == [0, 0]
            assert steps(workers) == [4, 4]
            found = {group: calls(group) for group in GROUPS}
        finally:
            for worker in workers:
                worker.end()
    for group in GROUPS:
        assert Counter(number for _, _, number in found[group]) == Counter(range(TOTAL)), group
    by_key = defaultdict(list)
    for began, ended, number in found["controlled"]:
        by_key[number % KEYS].append((began, ended, number))
    for mine in by_key.values():
        assert [number for _, _, number in mine] == sorted(number for _, _, number in mine)
        assert not [(one, other) for one, other in pairwise(mine) if other[0] < one[1]]
