"""Publishers wake the subscribers of other hosts by UDP."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time

import pytest
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import publish
from tests.support.harness import USING, Sub, handler
from tests.support.internals import GroupRef, Subscriber, bell, get_settings, heartbeats, polling, remote_bell, wakeups
from tests.support.publishing import rolled_back
from tests.support.still_time import Time

pytestmark = pytest.mark.promise("Wake-ups")
SECRET = "a key of the rings alone"  # noqa: S105
LOCAL = ["127.0.0.1", "[::1]"]


def free_port(ip="127.0.0.1"):
    """Return a port of an address at which nobody listens."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((ip.strip("[]"), 0))
        return probe.getsockname()[1]


def until(condition):
    """Wait for something that another thread does."""
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


class Host:
    """Another host: it has a directory of its own, and this process is its gateway and its subscriber."""

    def __init__(self, settings, directory, ip="127.0.0.1"):
        self.address = f"{ip}:{free_port(ip)}"
        here = settings.MYSQLQUEUE
        settings.MYSQLQUEUE = {
            **here,
            "BELL": {"DIRECTORY": str(directory), "LISTEN": self.address, "SECRET": SECRET},
        }
        self.rung = {topic: threading.Event() for topic in "tu"}
        self.listeners = [bell.Listener(USING, [topic], event.set) for topic, event in self.rung.items()]
        self.gateway = remote_bell.Gateway()
        self.gateway.open()
        self.packets = {topic: packet_for(topic) for topic in "tu"}
        settings.MYSQLQUEUE = here
        self.announce()

    def announce(self, address=None, host="far", topic="t", name="s"):
        heartbeats.beat(USING, name, [GroupRef("g", topic)], {"host": host, "bell": address or self.address})

    def hears(self, topic="t", seconds=60):
        """Return whether it is rung within some seconds, and wait for the next ring."""
        found = self.rung[topic].wait(seconds)
        self.rung[topic].clear()
        return found

    def receive(self, *packets):
        """Packets from anywhere, all of which have been looked at in the end."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            ip, port = self.address.rsplit(":", 1)
            for packet in (*packets, self.packets["u"]):
                sender.sendto(packet, (ip, int(port)))
                if packet == self.packets["u"]:
                    assert self.hears("u")

    def stop(self):
        self.gateway.stop()
        for listener in self.listeners:
            listener.stop()


def packet_for(topic):
    """Return what a publisher sends, by what it sends to a socket of this test."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(60)
        heartbeats.beat(
            USING, "probe", [GroupRef("g", topic)], {"host": "far", "bell": f"127.0.0.1:{receiver.getsockname()[1]}"}
        )
        remote_bell._known.clear()
        remote_bell.ring(USING, {topic})
        heartbeats.forget(USING, "probe", [GroupRef("g", topic)])
        return receiver.recv(100)


@pytest.fixture
def here(db, settings, tmp_path_factory):
    """This host: it only publishes."""
    directory = str(tmp_path_factory.mktemp("b"))
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "BELL": {"DIRECTORY": directory, "SECRET": SECRET}}


@pytest.fixture
def host(here, settings, tmp_path_factory):
    found = Host(settings, tmp_path_factory.mktemp("b"))
    yield found
    found.stop()


def reads():
    """Record statements that read addresses."""
    return CaptureQueriesContext(connection)


def of_addresses(captured):
    return [query["sql"] for query in captured.captured_queries if "SELECT h.topic, h.info FROM" in query["sql"]]


# -- rings --------------------------------------------------------------------


def test_after_the_commit(host):
    with transaction.atomic():
        publish("t", 1)
        assert not host.hears(seconds=0.1)
    assert host.hears()


def test_not_after_a_rollback(host):
    with rolled_back():
        publish("t", 1)
    with transaction.atomic(), rolled_back():
        publish("t", 1)
    publish("v", 1)
    assert not host.hears(seconds=0.1)


def test_only_for_its_topics(host):
    host.announce(topic="u")
    publish("u", 1)
    assert host.hears("u")
    assert not host.rung["t"].is_set()


@pytest.mark.parametrize("ip", LOCAL)
def test_addresses_of_both_families(here, settings, tmp_path_factory, ip):
    try:
        host = Host(settings, tmp_path_factory.mktemp("b"), ip)
    except OSError:
        assert ip == "[::1]"
        pytest.skip("this host has no IPv6")
    publish("t", 1)
    assert host.hears()
    host.stop()


def test_a_packet_names_no_topic_and_has_a_fixed_length(host):
    assert {len(packet) for packet in host.packets.values()} == {3 + 24 + 16}
    assert host.packets["t"][:15] == host.packets["u"][:15], "the database is the same"
    assert host.packets["t"][15:27] != host.packets["u"][15:27]
    assert packet_for("t") == host.packets["t"]


def test_what_was_forged_rings_nobody(host, settings):
    right = host.packets["t"]
    forged = [right[:27] + secrets.token_bytes(16), right[:-1] + bytes([right[-1] ^ 1]), right[:-1], right + b"0"]
    forged += [host.packets["u"][:27] + right[27:], right[:27], b"", b"mq1", secrets.token_bytes(43), b"x" * 1000]
    settings.MYSQLQUEUE = {
        **settings.MYSQLQUEUE,
        "BELL": {**settings.MYSQLQUEUE["BELL"], "SECRET": "the secret of a stranger"},
    }
    forged.append(packet_for("t"))
    host.receive(*forged)
    host.receive()
    assert not host.rung["t"].is_set()


def test_names_other_than_folders_are_refused_even_from_who_knows_the_secret(host, monkeypatch):
    looked = []
    monkeypatch.setattr(bell, "listeners_in", lambda folder: looked.append(folder) or ())
    settings = get_settings().bell
    for name in (b"mq1../../../../../../../..", b"mq1" + b"A" * 24, b"mq2" + b"a" * 24, b"mq1" + b"a" * 23):
        remote_bell._pass_on(name + remote_bell._mac(settings, name), settings)
    assert looked == []
    name = b"mq1" + b"a" * 24
    remote_bell._pass_on(name + remote_bell._mac(settings, name), settings)
    assert len(looked) == 1


def test_a_packet_that_is_sent_again_is_a_ring_and_no_more(host):
    for _ in range(3):
        host.receive(host.packets["t"])
        assert host.hears()


def test_a_gateway_that_stands_still_does_not_hold_publishers_up(host, monkeypatch):
    held = threading.Event()
    monkeypatch.setattr(remote_bell, "_pass_on", lambda packet, settings: held.wait())
    for number in range(200):
        publish("t", number)
    held.set()


def test_an_address_that_cannot_be_reached_is_skipped(host, monkeypatch):
    real = socket.socket.sendto
    sent = []

    class Refusing(socket.socket):
        def sendto(self, packet, *where):
            if self.family == socket.AF_INET:
                assert where[0] == socket.MSG_DONTWAIT
                sent.append(where[1])
                if where[1][0] == "192.0.2.1":
                    raise OSError(101, "Network is unreachable")
            return real(self, packet, *where)

    monkeypatch.setattr(remote_bell.socket, "socket", Refusing)
    monkeypatch.setattr(remote_bell, "_senders", {})
    host.announce("192.0.2.1:7070", name="other")
    publish("t", 1)
    assert host.hears()
    assert len(sent) == 2
    remote_bell._senders.popitem()[1].close()


# -- a flood ------------------------------------------------------------------


def test_the_pause_after_packets_is_a_multiple_of_their_cost(host, monkeypatch):
    pauses, batch, batches, held = [], [], [], threading.Event()

    def sleep(seconds):
        pauses.append(seconds)
        batches.append(len(batch))
        batch.clear()
        held.wait()

    cost = iter([0.0, 0.125] * 1000)
    clock = type("Time", (), {"sleep": staticmethod(sleep), "thread_time": lambda: next(cost)})
    monkeypatch.setattr(remote_bell, "time", clock)
    monkeypatch.setattr(remote_bell, "_pass_on", lambda packet, settings: batch.append(packet))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        ip, port = host.address.rsplit(":", 1)

        def send():
            sender.sendto(secrets.token_bytes(43), (ip, int(port)))

        send()
        until(lambda: pauses)
        for _ in range(30):
            send()
        held.set()
        until(lambda: sum(batches) == 31)
    assert set(pauses) == {remote_bell.REST * 0.125}
    assert max(batches) == remote_bell.PACKETS


@pytest.fixture
def still(here, monkeypatch):
    return Time(monkeypatch)


class Rung:
    """A subscriber that is rung every millisecond, and how often it polls."""

    def __init__(self, still, monkeypatch, processes=1):
        self.still, self.polls, real = still, 0, polling.poll

        def poll(session, refs=()):
            self.polls += 1
            return real(session, refs)

        self.sub = Sub(handler(), max_poll_interval=0.1)
        self.listeners = [wakeups.Listening(USING, ["t"], lambda: None) for _ in range(processes)]
        self.sub.poller.listen(self.listeners[0])
        self.sub.step()
        monkeypatch.setattr(polling, "poll", poll)

    def for_ms(self, milliseconds, *, publishes=False):
        """Return the number of polls."""
        before = self.polls
        for number in range(milliseconds):
            self.still.move(1)
            if publishes:
                publish("t", number)
            self.sub.inbox.wake()
            self.sub.poller.sleep()
            self.sub.poller.step()
        return self.polls - before

    def stop(self):
        for listener in self.listeners:
            listener.stop()


@pytest.mark.parametrize("processes", [1, 4])
def test_rings_for_nothing_cause_no_more_polls_than_the_shortest_interval(still, monkeypatch, processes):
    rung = Rung(still, monkeypatch, processes)
    rung.for_ms(200)
    assert 8 <= rung.for_ms(1000) <= 10 / (1 - rung.sub.poller._pace.jitter)
    assert rung.listeners[0].bell.rest == rung.sub.poller._pace.initial == 0.1
    rung.stop()


@pytest.mark.parametrize("processes", [1, 4])
def test_rings_for_messages_cause_a_limited_number_of_polls(still, monkeypatch, processes):
    rung = Rung(still, monkeypatch, processes)
    rung.for_ms(200)
    rung.for_ms(100, publishes=True)
    assert 25 / processes <= rung.for_ms(200, publishes=True) <= 30 / processes + 1
    assert rung.listeners[0].bell.rest == processes / 150
    rung.stop()


# -- addresses ----------------------------------------------------------------


def test_addresses_are_read_after_the_commit_and_not_in_a_transaction(host):
    with transaction.atomic():
        with reads() as inside:
            publish("t", 1)
            wakeups.notify(USING, ["t"])
        assert of_addresses(inside) == []
        outside = reads().__enter__()
    outside.__exit__(None, None, None)
    assert len(of_addresses(outside)) == 1
    assert host.hears()


def test_addresses_are_read_at_most_every_few_seconds(still, host):
    remote_bell._known.clear()
    with reads() as first:
        for topic in "tutv":
            publish(topic, 1)
    assert len(of_addresses(first)) == 1
    still.move(4_999)
    with reads() as early:
        publish("t", 1)
    assert of_addresses(early) == []
    still.move(1)
    with reads() as late:
        publish("t", 1)
        publish("t", 1)
    assert len(of_addresses(late)) == 1


def test_lost_subscribers_are_not_rung(still, host):
    still.move(31_000)
    heartbeats.beat(USING, "new", [GroupRef("g", "u")], {"host": "far", "bell": host.address})
    assert set(remote_bell._addresses(USING)) == {"u"}


def test_neither_this_host_nor_what_is_not_an_address_is_sent_to(host):
    for number, (name, address) in enumerate(
        [(socket.gethostname(), "10.0.0.5:7070"), ("far", "localhost:7070"), ("far", "nonsense"), ("far", "1.2.3.4:0")]
    ):
        host.announce(address, name, name=f"s{number}")
    heartbeats.beat(USING, "without", [GroupRef("g", "t")], {"host": "far"})
    assert {topic: set(map(str, found)) for topic, found in remote_bell._addresses(USING).items()} == {
        "t": {host.address}
    }


def test_an_error_while_addresses_are_read_is_logged_once_and_reaches_nobody(still, host, monkeypatch, caplog):
    errors = ["gone", "gone", "refused", None, "gone"]

    def bells(session, lease_ms, real=heartbeats.bells):
        error = errors.pop(0)
        if error is not None:
            raise OperationalError(error)
        return real(session, lease_ms)

    monkeypatch.setattr(heartbeats, "bells", bells)
    remote_bell._known.clear()
    with caplog.at_level(logging.WARNING, "django_mysqlqueue.service"):
        while errors:
            publish("t", 1)
            still.move(5_000)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"bell.addresses_unknown database={USING} error={text}" for text in ("gone", "refused", "gone")]


def test_without_a_secret_publishers_do_nothing(db, settings, tmp_path_factory):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "BELL": {"DIRECTORY": str(tmp_path_factory.mktemp("b"))}}
    assert not wakeups.has_listeners(USING, "t")
    with reads() as captured:
        publish("t", 1)
        with transaction.atomic():
            publish("t", 1)
            assert connection.run_on_commit == []
        wakeups.notify(USING, ["t"])
    assert of_addresses(captured) == []


def test_the_end_of_a_job_is_for_this_host_only(here):
    assert wakeups.has_listeners(USING, "t")
    assert not wakeups.has_listeners(USING, wakeups.RESULTS)
    with reads() as captured:
        wakeups.notify(USING, [wakeups.RESULTS])
    assert of_addresses(captured) == []


# -- the gateway --------------------------------------------------------------


def test_the_next_process_takes_the_port_over(host, settings, tmp_path_factory):
    settings.MYSQLQUEUE = {
        **settings.MYSQLQUEUE,
        "BELL": {"DIRECTORY": str(tmp_path_factory.mktemp("b")), "LISTEN": host.address, "SECRET": SECRET},
    }
    other, woken = remote_bell.Gateway(), threading.Event()
    listener = bell.Listener(USING, ["t"], woken.set)
    other.open()
    assert other._thread is None
    host.gateway.stop()
    other.open()
    other.open()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        ip, port = host.address.rsplit(":", 1)
        sender.sendto(host.packets["t"], (ip, int(port)))
    assert woken.wait(60)
    other.stop()
    other.stop()
    listener.stop()


def test_a_port_that_cannot_be_used_is_logged_once_and_tried_again(here, settings, caplog):
    def listen_at(address):
        settings.MYSQLQUEUE = {
            **settings.MYSQLQUEUE,
            "BELL": {**settings.MYSQLQUEUE["BELL"], "LISTEN": address},
        }

    listen_at("192.0.2.1:7070")
    sub, gateway = Sub(handler()), remote_bell.Gateway()
    listening = wakeups.Listening(USING, ["t"], lambda: None)
    sub.poller.listen(listening, gateway)
    with caplog.at_level(logging.WARNING, "django_mysqlqueue.subscriber"):
        sub.step(times=3)
    (record,) = [one for one in caplog.records if one.mysqlqueue["event"] == "bell.unavailable"]
    assert str(record.mysqlqueue["error"]) == "192.0.2.1:7070: Cannot assign requested address"
    listen_at(f"127.0.0.1:{free_port()}")
    sub.step()
    assert gateway._thread is not None
    gateway.stop()
    listening.stop()


def test_a_subscriber_announces_its_address_with_its_heartbeat(here, settings, caplog):
    """It is reached by other hosts only if they can know where."""

    def announce(**given):
        settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "BELL": {**settings.MYSQLQUEUE["BELL"], **given}}
        (worker,) = Subscriber({USING: {GroupRef("g", "t"): handler()}}, get_settings()).workers
        return worker._announce(), worker.heart.info.get("bell")

    assert announce() == (None, None)
    gateway, address = announce(LISTEN="10.0.0.5:7070")
    assert gateway is not None
    assert address == "10.0.0.5:7070"
    assert caplog.records == []
    assert announce(LISTEN="[::]:7070") == (None, None)  # The database is on this host.
    (record,) = caplog.records
    assert record.mysqlqueue["event"] == "bell.unavailable"
    assert "Set BELL['ANNOUNCE']" in str(record.mysqlqueue["error"])


@pytest.mark.parametrize(
    ("given", "announced"),
    [
        ({}, None),
        ({"LISTEN": "10.0.0.5:7070"}, "10.0.0.5:7070"),
        ({"LISTEN": "0.0.0.0:7070", "ANNOUNCE": "10.0.0.6:7071"}, "10.0.0.6:7071"),
        ({"LISTEN": "[::]:7070", "ANNOUNCE": "[fd00::1]:7070"}, "[fd00::1]:7070"),
    ],
)
def test_the_address_that_is_announced(here, settings, given, announced):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "BELL": {"SECRET": SECRET, **given}}
    assert remote_bell.announced(USING) == announced


def test_without_one_it_is_that_from_which_the_database_is_reached(here, settings, monkeypatch):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "BELL": {"SECRET": SECRET, "LISTEN": "0.0.0.0:7070"}}
    reached = {"host": "db.example.com", "socket": ""}
    monkeypatch.setattr(
        remote_bell, "named_place", lambda connection: ("mysql", "shop", reached["host"], "", reached["socket"], "", "")
    )
    connected = []

    class Routed(socket.socket):
        def connect(self, address):
            connected.append(address)

        def getsockname(self):
            return ("10.0.0.7", 40_000)

    with monkeypatch.context() as patched:
        found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("10.0.0.1", 7070))]
        patched.setattr(socket, "getaddrinfo", lambda *given: found)
        patched.setattr(remote_bell.socket, "socket", Routed)
        assert remote_bell.announced(USING) == "10.0.0.7:7070"
        assert connected == [("10.0.0.1", 7070)]
    for host, unix_socket in [("127.0.0.1", ""), ("localhost", ""), ("", ""), ("", "/run/mysqld.sock")]:
        reached.update(host=host, socket=unix_socket)
        with pytest.raises(bell.Unavailable, match=r"does not reach the database by the network\. Set BELL"):
            remote_bell.announced(USING)


def test_the_name_of_the_database_s_host_is_not_known(here, settings, monkeypatch):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "BELL": {"SECRET": SECRET, "LISTEN": "0.0.0.0:7070"}}
    monkeypatch.setattr(remote_bell, "named_place", lambda connection: ("mysql", "shop", "db.test", "", "", "", ""))

    def unknown(*given):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(bell.Unavailable, match=r"^db\.test: Name or service not known\. Set BELL\['ANNOUNCE'\]\.$"):
        remote_bell.announced(USING)
