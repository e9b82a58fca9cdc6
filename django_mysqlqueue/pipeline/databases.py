"""Connections to the queue's database for programs without Django.

A ``Place`` says *where the details of the connection stand*: a MySQL option
file, an environment variable, a SQLite file. It holds no password, so it may be
pickled to Spark's executors and printed in a plan.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from django_mysqlqueue.limits import NOW_MS_MYSQL, NOW_MS_SQLITE, SESSION_MYSQL
from django_mysqlqueue.pipeline.errors import PipelineError

URL_VARIABLE = "MYSQLQUEUE_URL"
CONNECT_TIMEOUT = 10
NETWORK_TIMEOUT = 300
"""Seconds until a server that has fallen silent is given up."""
SLOW_READER = 3600
"""Seconds that the server waits for a reader that does not take its rows (its default is 60)."""
IDLE = 86_400
"""Seconds that a connection may wait for Spark's tasks: that of the archive holds its lock meanwhile."""
REFUSED = frozenset({"url", "user", "username", "password", "passwd", "host", "port", "dbtable", "query", "database"})


@dataclass(frozen=True, slots=True)
class Place:
    """Where the connection's details stand.

    Attributes:
        defaults_file: a MySQL option file (``my.cnf``), readable on every executor.
        defaults_group: its group.
        sqlite_file: a SQLite database instead.
        url_variable: else the environment variable that holds
            ``mysql://user:password@host:port/database`` or ``sqlite:///path``.
    """

    defaults_file: str = ""
    defaults_group: str = "client"
    sqlite_file: str = ""
    url_variable: str = URL_VARIABLE

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "defaultsfile": "defaults_file",
        "defaultsgroup": "defaults_group",
        "sqlitefile": "sqlite_file",
        "urlvariable": "url_variable",
    }

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Place:
        """From a data source's options; a detail of the connection among them is refused.

        Raises:
            PipelineError: the option would travel with every plan, task and log line.
        """
        for name in options:
            if name.lower() in REFUSED:
                raise PipelineError(
                    f"option {name!r}: details of the connection are not taken as options, which are pickled and "
                    f"printed; put them into an option file (defaultsFile) or into the environment ({URL_VARIABLE})"
                )
        given = {field: str(options[name]) for name, field in cls.OPTIONS.items() if name in options}
        return cls(**given)

    def options(self) -> dict[str, str]:
        """The data source's options that name this place."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        default = {field.name: field.default for field in fields(self)}
        spelled = {
            "defaults_file": "defaultsFile",
            "defaults_group": "defaultsGroup",
            "sqlite_file": "sqliteFile",
            "url_variable": "urlVariable",
        }
        return {spelled[name]: value for name, value in given.items() if value != default[name]}

    def connect(self) -> Database:
        """A new connection; close it, or use it as a context manager.

        Raises:
            PipelineError: nothing says where the database is.
        """
        if self.sqlite_file:
            return SQLiteFile(self.sqlite_file)
        if self.defaults_file:
            if not Path(self.defaults_file).is_file():
                raise PipelineError(f"defaultsFile {self.defaults_file!r}: there is no such file on this machine")
            return Server({"read_default_file": self.defaults_file, "read_default_group": self.defaults_group})
        text = os.environ.get(self.url_variable)
        if not text:
            raise PipelineError(
                f"nothing says where the queue's database is: set the environment variable {self.url_variable} "
                "(on Spark's executors too), or the option defaultsFile or sqliteFile"
            )
        if text.startswith("{"):  # as a project's commands give it
            details = json.loads(text)
            return SQLiteFile(details["sqlite_file"]) if "sqlite_file" in details else Server(details)
        return _from_url(text, self.url_variable)


def _from_url(url: str, variable: str) -> Database:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # whose text has a piece of what may be the password
        raise PipelineError(
            f"{variable}: is not a URL; in user and password, characters such as / # ? [ @ are written as %2F, %23, …"
        ) from None
    if parts.scheme == "sqlite":
        return SQLiteFile(unquote(parts.path)[1:])
    if parts.scheme not in ("mysql", "mariadb"):
        raise PipelineError(f"{variable}: begins with {parts.scheme!r}, must begin with 'mysql:' or 'sqlite:'")
    details: dict[str, Any] = {
        "host": parts.hostname,
        "port": port,
        "user": unquote(parts.username) if parts.username else None,
        "passwd": unquote(parts.password) if parts.password else None,
        "db": unquote(parts.path)[1:],
    }
    for name, value in parse_qsl(parts.query):
        if name not in ("unix_socket", "ssl_ca"):
            raise PipelineError(f"{variable}: knows unix_socket and ssl_ca after the question mark, not {name!r}")
        details |= {"ssl": {"ca": value}} if name == "ssl_ca" else {name: value}
    return Server({name: value for name, value in details.items() if value is not None})


class Cursor(Protocol):
    """What of a DB-API cursor is used."""

    def execute(self, sql: str, parameters: Sequence[Any], /) -> Any: ...

    def fetchmany(self, size: int, /) -> Sequence[tuple[Any, ...]]: ...


class Database(ABC):
    """One connection. SQL has ``%s`` placeholders on every engine."""

    now_ms: str
    """The database's clock in epoch milliseconds."""

    @abstractmethod
    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """A small result: numbers are int, texts str."""

    @abstractmethod
    def cursor(self, sql: str, parameters: Sequence[Any]) -> Cursor:
        """A large result, not read before it is fetched: numbers are int, everything else bytes.

        To leave it before its end, close the connection: the driver would read the rest.
        """

    @abstractmethod
    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Runs a statement and returns how many rows it changed."""

    @abstractmethod
    def snapshot(self) -> contextlib.AbstractContextManager[None]:
        """A read-only transaction that sees one state of the database."""

    @abstractmethod
    def transaction(self) -> contextlib.AbstractContextManager[None]:
        """Commits at the end of the block, or rolls back."""

    @abstractmethod
    def lock(self, name: str) -> bool:
        """Takes a lock that ends with the connection; false: another one has it."""

    @abstractmethod
    def force_index(self, name: str) -> str:
        """The hint after a table's name."""

    @abstractmethod
    def byte_length(self, expression: str) -> str:
        """The length of a text in bytes."""

    @abstractmethod
    def joined(self, expressions: Sequence[str]) -> str:
        """Values as one text, with commas between them."""

    @abstractmethod
    def max_statement_bytes(self) -> int:
        """The longest statement that the server takes, in bytes."""

    @abstractmethod
    def keeps_order(self) -> bool:
        """Whether transactions become visible here in the order in which they were committed."""

    @abstractmethod
    def is_duplicate(self, error: Exception) -> bool:
        """Whether a row of that key is there already."""

    @abstractmethod
    def close(self) -> None: ...

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...]:
        (found,) = self.rows(sql, parameters)
        return found

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _decoded(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [tuple(value.decode() if isinstance(value, bytes) else value for value in row) for row in rows]


LOST = frozenset({1040, 1053, 1077, 1079, 1080, 1158, 1159, 1160, 1161, 1205, 1213, 1927, 2002, 2003, 2006, 2013, 2055})
"""Too many connections, shutdown, network, lock wait, deadlock, connection killed, gone away, lost during a query."""


def is_lost(error: Exception) -> bool:
    """Whether the same work may succeed on a new connection."""
    if isinstance(error, sqlite3.OperationalError):
        return "locked" in str(error)
    is_driver_error = type(error).__module__.startswith("MySQLdb")
    return is_driver_error and error.args[:1] != () and error.args[0] in LOST


class Server(Database):
    """MySQL or MariaDB."""

    now_ms = f"({NOW_MS_MYSQL})"

    def __init__(self, details: Mapping[str, Any]) -> None:
        import MySQLdb
        import MySQLdb.cursors
        from MySQLdb.constants import FIELD_TYPE
        from MySQLdb.converters import conversions

        self._is_locking = False
        self._streaming = MySQLdb.cursors.SSCursor
        self._error = MySQLdb.Error
        # Texts and payloads stay bytes, which Arrow takes as they are: three times as fast as str.
        numbers = ("TINY", "SHORT", "INT24", "LONG", "LONGLONG", "NEWDECIMAL")
        conv: dict[Any, Any] = {key: value for key, value in conversions.items() if not isinstance(key, int)}
        conv |= {getattr(FIELD_TYPE, name): int for name in numbers}
        self._connection = MySQLdb.connect(
            **details,
            conv=conv,
            charset="utf8mb4",
            use_unicode=False,
            binary_prefix=True,
            autocommit=True,
            connect_timeout=CONNECT_TIMEOUT,
            read_timeout=NETWORK_TIMEOUT,
            write_timeout=NETWORK_TIMEOUT,
        )
        session = {variable.name: variable.value for variable in SESSION_MYSQL}
        # Strict: a value that does not fit is an error, whatever the server's default is.
        session["sql_mode"] = f"CONCAT_WS(',', {session['sql_mode']}, 'STRICT_ALL_TABLES')"
        session |= {"net_write_timeout": str(SLOW_READER), "wait_timeout": str(IDLE)}
        self.execute("SET SESSION " + ", ".join(f"{name} = {value}" for name, value in session.items()))

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with contextlib.closing(self._connection.cursor()) as cursor:
            cursor.execute(sql, tuple(parameters))
            return _decoded(cursor.fetchall())

    def cursor(self, sql: str, parameters: Sequence[Any]) -> Cursor:
        cursor: Cursor = self._connection.cursor(self._streaming)
        cursor.execute(sql, tuple(parameters))
        return cursor

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        with contextlib.closing(self._connection.cursor()) as cursor:
            return int(cursor.execute(sql, tuple(parameters)))

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        self.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        self.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        yield
        # Not in a finally: after an error the connection is closed, which ends the transaction.
        self.execute("COMMIT")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        self.execute("START TRANSACTION")
        try:
            yield
        except BaseException:
            with contextlib.suppress(self._error):  # the first error is the one to tell
                self.execute("ROLLBACK")
            raise
        self.execute("COMMIT")

    def lock(self, name: str) -> bool:
        ((database,),) = self.rows("SELECT DATABASE()")
        full = "mysqlqueue_" + hashlib.sha256(f"{database}/{name}".encode()).hexdigest()[:40]
        # A server may take a moment to notice that the one who held it has gone.
        self._is_locking = self.rows("SELECT GET_LOCK(%s, 2)", (full,)) == [(1,)]
        return self._is_locking

    def force_index(self, name: str) -> str:
        return f" FORCE INDEX ({name})"

    def byte_length(self, expression: str) -> str:
        return f"LENGTH({expression})"

    def joined(self, expressions: Sequence[str]) -> str:
        return f"CONCAT_WS(',', {', '.join(expressions)})"

    def keeps_order(self) -> bool:
        # A replica of MySQL that applies transactions in parallel may show a later one first, if it is told that it
        # may. (MariaDB's keeps the order; it has no such variables.) Off on a primary it says nothing.
        found: dict[str, str] = dict(
            self.rows(
                "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('read_only', "
                "'replica_parallel_workers', 'replica_preserve_commit_order', "
                # As they are called before MySQL 8.0.26.
                "'slave_parallel_workers', 'slave_preserve_commit_order')"
            )
        )
        preserve = found.get("replica_preserve_commit_order", found.get("slave_preserve_commit_order"))
        workers = found.get("replica_parallel_workers", found.get("slave_parallel_workers", "0"))
        return not (preserve == "OFF" and int(workers) > 1 and found["read_only"] == "ON")

    def is_duplicate(self, error: Exception) -> bool:
        return isinstance(error, self._error) and error.args[:1] == (1062,)

    def max_statement_bytes(self) -> int:
        ((size,),) = self.rows("SELECT @@max_allowed_packet")
        return int(size)

    def close(self) -> None:
        with contextlib.suppress(self._error):  # it is gone already
            if self._is_locking:
                self.execute("DO RELEASE_ALL_LOCKS()")
            self._connection.close()


class SQLiteFile(Database):
    """The embedded database, on the one host that has the file."""

    now_ms = NOW_MS_SQLITE

    def __init__(self, path: str) -> None:
        if not Path(path).is_file():
            raise PipelineError(f"SQLite database {path!r}: there is no such file")
        self._path = path
        self._connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        self._connection.text_factory = bytes
        self._connection.create_function("CRC32", 1, _crc32, deterministic=True)
        self._lock: int | None = None

    @staticmethod
    def _spelled(sql: str) -> str:
        return sql.replace("%s", "?")

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return _decoded(self._connection.execute(self._spelled(sql), parameters).fetchall())

    def cursor(self, sql: str, parameters: Sequence[Any]) -> Cursor:
        return self._connection.execute(self._spelled(sql), parameters)

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        return self._connection.execute(self._spelled(sql), parameters).rowcount

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        # A deferred transaction's state is that of its first read.
        with self._within("BEGIN"):
            self.rows("SELECT 1 FROM sqlite_master LIMIT 1")
            yield

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        return self._within("BEGIN IMMEDIATE")

    @contextlib.contextmanager
    def _within(self, begin: str) -> Iterator[None]:
        self.execute(begin)
        try:
            yield
        except BaseException:
            self.execute("ROLLBACK")
            raise
        self.execute("COMMIT")

    def lock(self, name: str) -> bool:
        self._lock = os.open(f"{self._path}-{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def force_index(self, name: str) -> str:
        return ""

    def byte_length(self, expression: str) -> str:
        return f"LENGTH(CAST({expression} AS BLOB))"

    def joined(self, expressions: Sequence[str]) -> str:
        return " || ',' || ".join(expressions)

    def keeps_order(self) -> bool:
        return True

    def is_duplicate(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.IntegrityError)

    def max_statement_bytes(self) -> int:
        return 1_000_000_000  # SQLITE_MAX_LENGTH

    def close(self) -> None:
        self._connection.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _crc32(value: bytes | str | int | None) -> int | None:
    """As the servers' function: of a number, that of its digits."""
    if value is None:
        return None
    return zlib.crc32(value if isinstance(value, bytes) else str(value).encode())
