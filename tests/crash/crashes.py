"""Ends an operation at every statement that it sends, and says what must hold afterwards.

A statement is what the server gets (on SQLite: what the library begins): SET,
COMMIT, ROLLBACK and SAVEPOINT count, as Django sends them. How many an
operation has is found by running it until it ends without having been stopped.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import select
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.db import connection, connections

from django_mysqlqueue.options.topics import dlq_topic
from tests.support import refusing
from tests.support.harness import USING
from tests.support.internals import dialect_of, drop_connection, end_ahead, limited_settings, packets_of, use_packets
from tests.support.proxy import COM_QUERY, Link, Proxy
from tests.support.server_sessions import processlist

ALIAS = "fragile"
"""The database of the tests by another alias: operations run on it, and their connections end."""
TOPIC = "t"
DLQ = dlq_topic(TOPIC)

CUT = "cut"
"""The connection ends when statement k is sent: it never reaches the server, and the process lives on."""
KILL = "kill"
"""SIGKILL to the process when it sends statement k, which never reaches the server; at last after all of them."""
LOST = "lost"
"""The k-th statement that commits something is carried out, and the connection ends before its answer is read."""
STAYS = "stays"
"""As ``CUT``, and the server has not noticed: the session lives on, with its transaction and locks, until somebody
waits for it."""
LATE = "late"
"""As ``STAYS`` at the k-th statement that commits something; when the session has been waited for, it arrives."""
GONE = "gone"
"""As ``KILL``, and the session lives on: the whole host is gone."""
LINGERS = (STAYS, LATE, GONE)
MODES = (CUT, KILL, LOST) if os.environ.get("DATABASE_URL") else (KILL,)
ENDS = tuple(mode for mode in MODES if os.environ.get("TEST_CRASHES", mode) == mode or mode == LOST)
"""The modes that are tested here. A server does not see whether a process has cut its connection or was killed, and
what the process does next is the same for both servers. So at every statement ``make test`` cuts the connection on one
of them (``TEST_CRASHES=cut``) and kills the process on the other; ``make test-slow`` does both on both."""

LONGEST = 60.0
"""Seconds for which anything is waited for."""
ANSWERED_WITHIN = 90.0
"""Seconds for which a connection waits for an answer: longer than the gate, which says what it has waited for."""
FROM_HERE = "DO 'from here on by', "
"""After this statement, with the number of its process, a connection's statements are counted."""
BETWEEN = re.compile("; (?=[A-Z(])")
"""Between two statements of a packet."""
REFUSAL = re.compile(rb"\xff..#[0-9A-Z]{5}", re.DOTALL)
"""The server's answer that a statement has failed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run of an operation ended."""

    stopped: bool
    """It was stopped, instead of running to its end."""
    error: BaseException | None = None
    """What it raised; a killed process raises nothing."""
    committed: bool | None = None
    """Something that it sent has been committed; None: nobody saw it (SQLite, or on another connection)."""
    sent: tuple[str, ...] = ()


# -- on the wire --------------------------------------------------------------


@dataclass
class Plan:
    """What is to happen to the next connection that counts."""

    mode: str = ""
    number: int = 0
    stopped: bool = False
    committed: bool = False
    sent: list[str] = field(default_factory=list)
    sessions: set[int] = field(default_factory=set)
    over: threading.Event = field(default_factory=threading.Event)
    """The session that lives on may end."""
    waited_for: bool = False
    """Somebody needed what it had locked."""
    errors: list[BaseException] = field(default_factory=list)
    """Of the threads of connections."""

    def raise_error(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


class Gate(Proxy):
    """A proxy that counts statements and ends the connection, or the process behind it, at one of them."""

    def __init__(self, path: Path, target: Path) -> None:
        self.plan = Plan()
        self.longest = LONGEST
        self._watch = connections.create_connection(USING)
        self._watch.settings_dict = limited_settings(self._watch, read=LONGEST)
        self._watch.inc_thread_sharing()
        self._watching = threading.Lock()
        super().__init__(path, target)

    def close(self) -> None:
        super().close()
        self._watch.close()
        self.plan.raise_error()

    def sleeps(self, session: int) -> bool:
        """Whether the server waits for a session's next statement."""
        with self._watching, self._watch.cursor() as cursor:
            return commands(cursor).get(session, "Sleep") == "Sleep"

    def somebody_waits(self) -> bool:
        """Whether a statement waits for a row that another session has locked."""
        with self._watching, self._watch.cursor() as cursor:
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
            return int(cursor.fetchone()[1]) > 0

    def _link(self, client: socket.socket, target: Path, *, dark: bool) -> Link:
        return CountingLink(client, target, gate=self)


def commands(cursor: Any) -> dict[int, str]:
    """By number, what each session of the server does: "Sleep" if it waits for its client."""
    cursor.execute(f"SELECT CONNECTION_ID(), id, command FROM {processlist()}")
    rows = cursor.fetchall()
    assert any(own == session for own, session, _ in rows), "the server must run with performance_schema=ON"
    return {session: command for _, session, command in rows}


def deadline(what: str, longest: float = LONGEST) -> Callable[[], None]:
    """A function that fails once something has been waited for long enough."""
    until = time.monotonic() + longest

    def check() -> None:
        assert time.monotonic() < until, f"{what} (within {longest:g} s)"

    return check


class CountingLink(Link):
    """A connection whose statements are counted once it has sent ``FROM_HERE``."""

    def __init__(self, client: socket.socket, target: Path, *, gate: Gate) -> None:
        self._gate = gate
        self._plan: Plan | None = None
        self._process = self._session = 0
        self._autocommit = True
        self._began = False
        self._keeps_answer = self._goes_on = self._had_committed = False
        self._answered = threading.Event()
        super().__init__(client, target, dark=False)

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """An error of this thread ends both sides, so that nobody waits for it, and fails the test."""
        try:
            yield
        except OSError:
            pass  # One of the sides has ended.
        except BaseException as error:
            (self._plan or self._gate.plan).errors.append(error)
            self.close()

    def _forward(self) -> None:
        with self._noting_errors(), self._client.makefile("rb") as stream:
            while header := stream.read(4):
                body = stream.read(int.from_bytes(header[:3], "little"))
                if body[:1] == bytes([COM_QUERY]):
                    sql = body[1:].decode(errors="replace")
                    statements = BETWEEN.split(sql)
                    self._had_committed = self._plan is not None and self._plan.committed
                    through = list(itertools.takewhile(self._lets_through, statements))
                    if len(through) < len(statements):
                        if through:
                            self._send_beginning(header, body[: 1 + len("; ".join(through).encode())])
                        if self._plan is not None and self._plan.mode in (KILL, GONE):
                            os.kill(self._process, signal.SIGKILL)
                        self._linger(header + body)
                        break
                self._server.sendall(header + body)
        self.close()

    def _send_beginning(self, header: bytes, body: bytes) -> None:
        """The statements of a packet before the one at which it ends, which are carried out."""
        self._keeps_answer = self._goes_on = True
        self._server.sendall(len(body).to_bytes(3, "little") + header[3:] + body)
        self._await_answer("the beginning of a packet")

    def _await_answer(self, what: str) -> None:
        longest = self._gate.longest
        assert self._answered.wait(longest), f"the server has not answered {what} (within {longest:g} s)"

    def _linger(self, packet: bytes) -> None:
        """Ends the client's side alone, where the plan says so, until the session may end."""
        plan = self._plan
        assert plan is not None
        if plan.mode not in LINGERS:
            return
        self._keeps_answer = self._goes_on = True
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)
        check = deadline("nobody has waited for the session that lives on, or ended it")
        while not plan.over.wait(0.002):
            check()
            if self._gate.somebody_waits():
                plan.waited_for = True
                plan.over.set()
        if plan.mode == LATE:
            self._server.sendall(packet)
            self._await_answer("what has arrived late")

    def _answer(self) -> None:
        with self._noting_errors():
            while data := self._server.recv(65536):
                if not self._session:
                    assert data[4:5] != b"\xff", f"the server refuses the connection: {data[7:]!r}"
                    # The greeting: a header, the protocol's version, the server's, the session's number.
                    place = data.index(b"\0", 5) + 1
                    self._session = int.from_bytes(data[place : place + 4], "little")
                if self._plan is not None and REFUSAL.search(data):
                    self._plan.committed = self._had_committed  # The COMMIT behind it was not executed.
                if self._keeps_answer:
                    self._await_all()
                    break
                self._client.sendall(data)
        self._answered.set()
        if not self._goes_on:  # Else the other thread kills the process before that can tell.
            self.close()

    def _await_all(self) -> None:
        """What is answered has been done; of a packet, the server answers the statements one after another."""
        check = deadline("the server has not carried out what it has begun to answer", self._gate.longest)
        while not self._gate.sleeps(self._session):
            check()
            time.sleep(0.001)

    def _lets_through(self, sql: str) -> bool:
        if sql.startswith(FROM_HERE):
            self._plan = self._gate.plan
            self._process = int(sql.removeprefix(FROM_HERE))
            self._plan.sessions.add(self._session)
            return True
        commits = self._commits(sql)
        plan = self._plan
        if plan is None:
            return True
        counts = commits if plan.mode in (LOST, LATE) else True
        plan.number -= counts
        if counts and plan.number == 0:
            plan.stopped = True
            if plan.mode != LOST:
                return False
            self._keeps_answer = True
        plan.sent.append(sql)
        plan.committed = plan.committed or commits
        return True

    def _commits(self, sql: str) -> bool:
        """Whether the statement ends a transaction with changes in it, or is one by itself."""
        switch = re.match(r"SET autocommit\s*=\s*([01])", sql, re.IGNORECASE)
        if switch:
            self._autocommit = switch[1] == "1"
            return False
        verb = sql.split(None, 1)[0].upper()
        if verb == "START":
            self._began, self._autocommit = True, False
        elif self._began and verb in ("COMMIT", "ROLLBACK") and " TO " not in sql:
            self._began, self._autocommit = False, True
        return verb == "COMMIT" or (self._autocommit and verb in ("INSERT", "UPDATE", "DELETE", "REPLACE"))


def _after_transactions(execute: Any, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Do what the first wrapper of a handler's thread does before statements outside of a transaction."""
    if not context["connection"].in_atomic_block:
        end_ahead(context["connection"])
    return execute(sql, params, many, context)


class ServerCrashes:
    """MySQL and MariaDB: operations run behind a gate before the server."""

    def __init__(self, gate: Gate, target: Path) -> None:
        self._gate = gate
        self._target = target

    def run(
        self,
        mode: str,
        number: int,
        operation: Callable[[], object],
        *,
        packets: bool = False,
        ends_together: bool = False,
    ) -> Ended:
        plan = self._gate.plan = Plan(mode, number)
        connections[ALIAS].close()
        dies = mode in (KILL, GONE)
        if packets:
            use_packets(connections[ALIAS])
        if ends_together:
            connections[ALIAS].ends_together = True  # type: ignore[attr-defined]
            connections[ALIAS].begun_ahead = None  # type: ignore[attr-defined]
            connections[ALIAS].execute_wrappers.insert(0, _after_transactions)
        options = connections[ALIAS].settings_dict["OPTIONS"]
        options["unix_socket"] = str(self._gate.path)
        try:
            error = (_in_child if dies else _here)(operation, self._count)
        finally:
            options["unix_socket"] = str(self._target)  # nothing is counted any more, and the gate takes time
            if packets or ends_together:
                connections[ALIAS].close()
                del connections[ALIAS]
            plan.raise_error()
        if plan.stopped and mode in LINGERS:
            assert plan.over.is_set() or plan.sessions <= self._sessions(), "the session has ended with its client"
        else:
            self._wait_until_gone(plan.sessions)
        if dies:
            assert isinstance(error, _Killed) == plan.stopped
            error = None
        # A process that outlives a failed ROLLBACK goes on with another connection.
        is_unseen = plan.stopped and not plan.committed and error is None and not dies
        return Ended(plan.stopped, error, None if is_unseen else plan.committed, tuple(plan.sent))

    def release(self) -> bool:
        """Ends the session that lives on, unless somebody has waited for it: the answer."""
        plan = self._gate.plan
        plan.over.set()
        self._wait_until_gone(plan.sessions)
        plan.raise_error()
        return plan.waited_for

    @staticmethod
    def _count() -> None:
        _execute(ALIAS, f"{FROM_HERE}{os.getpid()}")
        packets = packets_of(connections[ALIAS])
        if packets is not None:
            packets.is_usable = True

    @staticmethod
    def _sessions() -> set[int]:
        with connection.cursor() as cursor:
            return set(commands(cursor))

    def _wait_until_gone(self, gone: set[int]) -> None:
        """Until the server has rolled back what the session had not committed."""
        check = deadline("the server has not ended the session of a connection that has ended")
        while gone & self._sessions() or self._has_locks():
            check()
            time.sleep(0.001)

    @staticmethod
    def _has_locks() -> bool:
        """MySQL forgets a session before its rollback has ended: its locks were still there a second later."""
        if dialect_of(connection).name != "mysql":
            return False
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT @@performance_schema, EXISTS (SELECT 1 FROM performance_schema.data_locks "
                "WHERE object_schema = DATABASE())"
            )
            can_tell, has_locks = cursor.fetchone()
        assert can_tell, "the server must run with performance_schema=ON, which tells its locks"
        return bool(has_locks)


class FileCrashes:
    """SQLite: there is no connection to cut, and the process that dies counts its statements itself."""

    def run(self, mode: str, number: int, operation: Callable[[], object]) -> Ended:
        assert mode == KILL
        # SQLite keeps its locks in the process's memory: a fork must not find any there.
        for alias in (USING, ALIAS, "queue"):
            connections[alias].close()
        sent: list[str] = []

        def statement(sql: str) -> None:
            if sql.startswith("--"):
                return  # a statement within a statement
            if len(sent) + 1 == number:
                os.kill(os.getpid(), signal.SIGKILL)
            sent.append(sql)

        def count() -> None:
            # What a process has written outlives it without a sync: nobody pulls the plug here.
            _execute(ALIAS, "PRAGMA synchronous=OFF")
            connections[ALIAS].connection.set_trace_callback(statement)

        error = _in_child(operation, count)
        _execute(USING, "PRAGMA synchronous=OFF")
        stopped = isinstance(error, _Killed)
        return Ended(stopped, None if stopped else error)


def _execute(alias: str, statement: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(statement)


class _Killed(Exception):
    """The process was killed before the operation had ended."""


def _here(operation: Callable[[], object], count: Callable[[], None]) -> BaseException | None:
    error = None
    count()
    try:
        operation()
    except Exception as raised:
        error = raised
    drop_connection(connections[ALIAS])
    return error


def _in_child(operation: Callable[[], object], count: Callable[[], None]) -> BaseException | None:
    """Runs it in a forked process, which is killed even if nobody stops it: right after its end."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        # The gate's threads are the parent's; the child touches nothing of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        gc.disable()  # a collection would copy all pages of the parent
        try:
            count()
            operation()
            os.write(write, b"done")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode()[:4000])
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    try:
        with open(read, "rb") as pipe:
            ended, _, _ = select.select([pipe], [], [], LONGEST)
            assert ended, f"the operation has not ended in its process (within {LONGEST:g} s)"
            said = pipe.read().decode(errors="replace")
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    if said and said != "done":
        raise AssertionError(f"the operation failed in its process: {said}")
    return None if said else _Killed()


@contextlib.contextmanager
def crashes(folder: Path) -> Iterator[ServerCrashes | FileCrashes]:
    """The alias ``fragile``, what ends its connections, and a log that refuses some messages.

    A server must be reached by its Unix socket.
    """
    database = limited_settings(connections[USING], read=ANSWERED_WITHIN, connect=LONGEST)
    gate = None
    if connection.vendor == "mysql":
        target = Path(database["OPTIONS"]["unix_socket"])
        gate = Gate(folder / "gate", target)
    connections.settings[ALIAS] = database
    try:
        with refusing.refusing():
            yield ServerCrashes(gate, target) if gate is not None else FileCrashes()
    finally:
        connections[ALIAS].close()
        del connections[ALIAS]
        del connections.settings[ALIAS]
        if gate is not None:
            gate.close()
        else:
            connections[USING].close()  # with its PRAGMA
