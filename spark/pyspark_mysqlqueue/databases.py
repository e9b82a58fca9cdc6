"""Connections to the queue's database for programs without Django.

A ``Place`` names the source of the connection's details: a MySQL option file, an environment variable or a SQLite
file. It holds no password, so Spark may pickle it for executors and print it in plans.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.shared.session_variables import NOW_MS_MYSQL, NOW_MS_SQLITE, SESSION_MYSQL

URL_VARIABLE = "MYSQLQUEUE_URL"
CONNECT_TIMEOUT = 10
NETWORK_TIMEOUT = 300
"""Seconds to wait for an answer from the server before the connection counts as lost."""
SLOW_READER = 3600
"""Seconds that the server waits for a reader to fetch its rows (the server's default is 60)."""
IDLE = 86_400
"""Seconds that a connection may be idle: the archive's connection holds a lock while it waits for Spark's tasks."""
REFUSED = frozenset({"url", "user", "username", "password", "passwd", "host", "port", "dbtable", "query", "database"})


@dataclass(frozen=True, slots=True)
class Place:
    """Where the details of a database connection come from.

    The first one that is set applies: ``sqlite_file``, ``defaults_file``, ``url_variable``.

    Attributes:
        sqlite_file: A SQLite database file.
        defaults_file: A MySQL option file (``my.cnf``), readable on every executor.
        defaults_group: The group in the option file.
        url_variable: The environment variable that contains ``mysql://user:password@host:port/database`` or
            ``sqlite:///path``.
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
        """Create a place from the options of a data source.

        Raises:
            PipelineError: The options contain connection parameters, for example a password, which would appear in
                query plans, tasks and logs.
        """
        for name in options:
            if name.lower() in REFUSED:
                raise PipelineError(
                    f"option {name!r}: connection parameters cannot be passed as options, because Spark pickles "
                    f"and prints options; use an option file (defaultsFile) or the environment variable {URL_VARIABLE}"
                )
        given = {field: str(options[name]) for name, field in cls.OPTIONS.items() if name in options}
        return cls(**given)

    def options(self) -> dict[str, str]:
        """Return the options that make a data source use this place."""
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
        """Open a connection. Close it, or use it as a context manager.

        Raises:
            PipelineError: The environment variable is not set or not a valid URL, or the file does not exist.
        """
        if self.sqlite_file:
            return SQLiteFile(self.sqlite_file)
        if self.defaults_file:
            if not Path(self.defaults_file).is_file():
                raise PipelineError(f"defaultsFile {self.defaults_file!r}: no such file on this machine")
            return Server({"read_default_file": self.defaults_file, "read_default_group": self.defaults_group})
        text = os.environ.get(self.url_variable)
        if not text:
            raise PipelineError(
                f"the queue's database is not configured: set the environment variable {self.url_variable} "
                "(on Spark's executors too), or the option defaultsFile or sqliteFile"
            )
        if text.startswith("{"):  # set by django_mysqlqueue.management.spark.project_place()
            details = json.loads(text)
            return SQLiteFile(details["sqlite_file"]) if "sqlite_file" in details else Server(details)
        return _from_url(text, self.url_variable)


def _from_url(url: str, variable: str) -> Database:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its message may contain a part of the password
        raise PipelineError(
            f"{variable} is not a URL: in user and password, encode characters such as / # ? [ @ as %2F, %23, …"
        ) from None
    if parts.scheme == "sqlite":
        return SQLiteFile(unquote(parts.path)[1:])
    if parts.scheme not in ("mysql", "mariadb"):
        raise PipelineError(
            f"{variable}: the scheme {parts.scheme!r} is not supported; use 'mysql', 'mariadb' or 'sqlite'"
        )
    details: dict[str, Any] = {
        "host": parts.hostname,
        "port": port,
        "user": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
        "database": unquote(parts.path)[1:],
    }
    for name, value in parse_qsl(parts.query):
        if name not in ("unix_socket", "ssl_ca"):
            raise PipelineError(f"{variable}: unknown parameter {name!r}; the URL accepts unix_socket and ssl_ca")
        details |= {"ssl": {"ca": value}} if name == "ssl_ca" else {name: value}
    return Server({name: value for name, value in details.items() if value is not None})


class Cursor(Protocol):
    """The part of a DB-API cursor that the pipeline uses."""

    def execute(self, sql: str, parameters: Sequence[Any], /) -> Any:
        """Run a statement."""

    def fetchmany(self, size: int, /) -> Sequence[tuple[Any, ...]]:
        """Return the next ``size`` rows, or fewer at the end of the result."""


class Database(ABC):
    """A connection. SQL uses ``%s`` placeholders on every engine."""

    now_ms: str
    """An SQL expression: the database's clock in epoch milliseconds."""

    @abstractmethod
    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return a small result. Numbers are int, texts are str."""

    @abstractmethod
    def cursor(self, sql: str, parameters: Sequence[Any]) -> Cursor:
        """Return a cursor on a large result, which is read as it is fetched. Numbers are int, other values bytes.

        To abandon the result before its end, close the connection: otherwise the driver reads the rest.
        """

    @abstractmethod
    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement. Return the number of rows that it changed."""

    @abstractmethod
    def insert(self, table: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """Insert rows, whose values are str, bytes, int or None. Each column has as many values as there are rows."""

    @abstractmethod
    def snapshot(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager: a read-only transaction that sees one state of the database."""

    @abstractmethod
    def transaction(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager: a transaction that commits at the end of the block, or rolls back on an error."""

    @abstractmethod
    def lock(self, name: str) -> bool:
        """Take a named lock. The end of the connection releases it.

        Returns:
            Whether the lock was taken; False if another connection holds it.
        """

    @abstractmethod
    def force_index(self, name: str) -> str:
        """Return the index hint to put after a table's name."""

    @abstractmethod
    def byte_length(self, expression: str) -> str:
        """Return an expression for the length of a text in bytes."""

    @abstractmethod
    def joined(self, expressions: Sequence[str]) -> str:
        """Return an expression that joins values with commas."""

    @abstractmethod
    def max_statement_bytes(self) -> int:
        """Return the maximum length of a statement, in bytes."""

    @abstractmethod
    def keeps_order(self) -> bool:
        """Return whether transactions become visible here in the order in which they were committed."""

    @abstractmethod
    def is_duplicate(self, error: Exception) -> bool:
        """Return whether the error means that a row with the same key exists."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection. This releases its lock."""

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Return the only row of a result."""
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
    """Return whether the same work may succeed on a new connection."""
    if isinstance(error, sqlite3.OperationalError):
        return "locked" in str(error)
    is_driver_error = type(error).__module__.startswith(DRIVERS)
    return is_driver_error and error.args[:1] != () and error.args[0] in LOST


DRIVERS = ("MySQLdb", "pymysql")
"""The modules of mysqlclient and of PyMySQL, which needs no compiler. The first one that is installed is used."""


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """Raise errors of the driver and of the operating system as a ``PipelineError`` with one line."""
    try:
        yield
    except Exception as error:
        is_of_driver = isinstance(error, sqlite3.Error) or type(error).__module__.startswith(DRIVERS)
        if not is_of_driver and not isinstance(error, OSError):
            raise
        code, text = error.args if is_of_driver and len(error.args) == 2 else ("", error)
        line = " ".join(f"{text} ({code})".split()) if code else " ".join(str(text).split())
        what = "the queue's database" if is_of_driver else "a file or a connection"
        raise PipelineError(f"{what}: {line}; fix the cause and run again") from error


def _driver() -> Any:
    for name in DRIVERS:
        with contextlib.suppress(ImportError):
            for part in ("constants.FIELD_TYPE", "converters", "cursors"):
                import_module(f"{name}.{part}")
            return import_module(name)
    raise PipelineError(
        "no driver for MySQL and MariaDB is installed: run pip install 'pyspark-mysqlqueue[mysql]' or, where "
        "mysqlclient cannot be compiled, 'pyspark-mysqlqueue[pymysql]'"
    )


def _check_encryption(driver: Any, details: Mapping[str, Any]) -> None:
    """Refuse options by which mysqlclient requires TLS, and which PyMySQL would ignore."""
    given = set(details)
    if "read_default_file" in details:
        parser = driver.optionfile.Parser()
        parser.read(details["read_default_file"])
        group = details.get("read_default_group", "client")
        given |= {name.replace("-", "_") for name, _ in (parser.items(group) if parser.has_section(group) else ())}
    for name in ("ssl_mode", "ssl_verify_server_cert"):
        if name in given:
            raise PipelineError(
                f"PyMySQL does not support the option {name}: require TLS by naming the certificate authority in "
                "ssl_ca, or install mysqlclient"
            )


class Server(Database):
    """MySQL or MariaDB."""

    now_ms = f"({NOW_MS_MYSQL})"

    def __init__(self, details: Mapping[str, Any]) -> None:
        driver = _driver()
        if driver.__name__ == "pymysql":
            _check_encryption(driver, details)
        self._is_locking = False
        self._streaming = driver.cursors.SSCursor
        self._error = driver.Error
        # Texts and payloads stay bytes: Arrow takes bytes without a conversion, three times as fast as str.
        numbers = ("TINY", "SHORT", "INT24", "LONG", "LONGLONG", "NEWDECIMAL")
        conv: dict[Any, Any] = {
            key: value for key, value in driver.converters.conversions.items() if not isinstance(key, int)
        }
        conv |= {getattr(driver.constants.FIELD_TYPE, name): int for name in numbers}
        self._connection = driver.connect(
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
        # mysqlclient's. PyMySQL has another one, which is slower.
        self._quote: Callable[[bytes], bytes] | None = getattr(self._connection, "string_literal", None)
        session = {variable.name: variable.value for variable in SESSION_MYSQL}
        # Strict mode: a value that does not fit is an error, regardless of the server's default.
        session["sql_mode"] = f"CONCAT_WS(',', {session['sql_mode']}, 'STRICT_ALL_TABLES')"
        session |= {"net_write_timeout": str(SLOW_READER), "wait_timeout": str(IDLE)}
        self.execute("SET SESSION " + ", ".join(f"{name} = {value}" for name, value in session.items()))

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return a small result."""
        with contextlib.closing(self._connection.cursor()) as cursor:
            cursor.execute(sql, tuple(parameters))
            return _decoded(cursor.fetchall())

    def cursor(self, sql: str, parameters: Sequence[Any]) -> Cursor:
        """Return a cursor that the server streams rows to."""
        cursor: Cursor = self._connection.cursor(self._streaming)
        cursor.execute(sql, tuple(parameters))
        return cursor

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement. Return the number of rows that it changed."""
        with contextlib.closing(self._connection.cursor()) as cursor:
            return int(cursor.execute(sql, tuple(parameters)))

    def insert(self, table: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """Insert rows. Escaping column by column takes a third of the time of the driver's placeholders."""
        rows = zip(*map(self._literals, columns.values()), strict=True)
        names = ", ".join(f"`{name}`" for name in columns)
        with contextlib.closing(self._connection.cursor()) as cursor:
            cursor.execute(
                f"INSERT INTO {table} ({names}) VALUES (".encode() + b"),(".join(map(b",".join, rows)) + b")"
            )

    def _literals(self, values: Sequence[Any]) -> list[bytes]:
        first = values[0]
        if values.count(first) == len(values):
            return [self._literal(first)] * len(values)
        if self._quote is None or None in values:
            return list(map(self._literal, values))
        if isinstance(first, str):
            return list(map(self._quote, map(str.encode, values)))
        if isinstance(first, bytes):
            return [b"_binary%b" % quoted for quoted in map(self._quote, values)]
        return [b"%d" % value for value in values]

    def _literal(self, value: Any) -> bytes:
        found: bytes | str = self._connection.literal(value) if self._quote else self._connection.escape(value)
        return found if isinstance(found, bytes) else found.encode("utf-8", "surrogateescape")

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Open a read-only transaction with a consistent snapshot."""
        self.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        self.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        yield
        # Not in a finally block: after an error the caller closes the connection, which ends the transaction.
        self.execute("COMMIT")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Open a transaction at READ COMMITTED."""
        self.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        self.execute("START TRANSACTION")
        try:
            yield
        except BaseException:
            with contextlib.suppress(self._error):  # raise the first error, not that of the rollback
                self.execute("ROLLBACK")
            raise
        self.execute("COMMIT")

    def lock(self, name: str) -> bool:
        """Take a lock with GET_LOCK(). Its name contains that of the database."""
        ((database,),) = self.rows("SELECT DATABASE()")
        full = "mysqlqueue_" + hashlib.sha256(f"{database}/{name}".encode()).hexdigest()[:40]
        # Wait 2 seconds: the server may need a moment to notice that the previous holder's connection has ended.
        self._is_locking = self.rows("SELECT GET_LOCK(%s, 2)", (full,)) == [(1,)]
        return self._is_locking

    def force_index(self, name: str) -> str:
        """Return a FORCE INDEX hint."""
        return f" FORCE INDEX ({name})"

    def byte_length(self, expression: str) -> str:
        """Return a call of LENGTH()."""
        return f"LENGTH({expression})"

    def joined(self, expressions: Sequence[str]) -> str:
        """Return a call of CONCAT_WS()."""
        return f"CONCAT_WS(',', {', '.join(expressions)})"

    def keeps_order(self) -> bool:
        """Return False for a replica that applies transactions in parallel and out of order."""
        # A MySQL replica that applies transactions in parallel may show a later one first if
        # replica_preserve_commit_order is OFF. On a primary the variable has no effect. MariaDB's replicas keep the
        # order and have no such variables.
        found: dict[str, str] = dict(
            self.rows(
                "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('read_only', "
                "'replica_parallel_workers', 'replica_preserve_commit_order', "
                # The names before MySQL 8.0.26.
                "'slave_parallel_workers', 'slave_preserve_commit_order')"
            )
        )
        preserve = found.get("replica_preserve_commit_order", found.get("slave_preserve_commit_order"))
        workers = found.get("replica_parallel_workers", found.get("slave_parallel_workers", "0"))
        return not (preserve == "OFF" and int(workers) > 1 and found["read_only"] == "ON")

    def is_duplicate(self, error: Exception) -> bool:
        """Return whether the error is 1062, a duplicate entry."""
        return isinstance(error, self._error) and error.args[:1] == (1062,)

    def max_statement_bytes(self) -> int:
        """Return the server's max_allowed_packet."""
        ((size,),) = self.rows("SELECT @@max_allowed_packet")
        return int(size)

    def close(self) -> None:
        """Release the lock, if any, and close the connection."""
        with contextlib.suppress(self._error):  # the connection may be lost already
            if self._is_locking:
                self.execute("DO RELEASE_ALL_LOCKS()")
            self._connection.close()


class SQLiteFile(Database):
    """SQLite, on the host that has the file."""

    now_ms = NOW_MS_SQLITE

    def __init__(self, path: str) -> None:
        if not Path(path).is_file():
            raise PipelineError(f"SQLite database {path!r}: no such file")
        self._path = path
        self._connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        self._connection.text_factory = bytes
        self._connection.create_function("CRC32", 1, _crc32, deterministic=True)
        self._lock: int | None = None

    @staticmethod
    def _spelled(sql: str) -> str:
        return sql.replace("%s", "?")

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return a small result."""
        return _decoded(self._connection.execute(self._spelled(sql), parameters).fetchall())

    def cursor(self, sql: str, parameters: Sequence[Any]) -> Cursor:
        """Return a cursor, which reads rows as they are fetched."""
        return self._connection.execute(self._spelled(sql), parameters)

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement. Return the number of rows that it changed."""
        return self._connection.execute(self._spelled(sql), parameters).rowcount

    def insert(self, table: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """Insert rows, one by one."""
        names = ", ".join(f"`{name}`" for name in columns)
        marks = ", ".join("?" * len(columns))
        self._connection.executemany(
            f"INSERT INTO {table} ({names}) VALUES ({marks})", zip(*columns.values(), strict=True)
        )

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Open a transaction that sees the current state."""
        # A deferred transaction sees the state at its first read, so read now.
        with self._within("BEGIN"):
            self.rows("SELECT 1 FROM sqlite_master LIMIT 1")
            yield

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        """Open a transaction that holds the write lock."""
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
        """Take a lock with flock() on a file beside the database."""
        self._lock = os.open(f"{self._path}-{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def force_index(self, name: str) -> str:
        """Return no hint."""
        return ""

    def byte_length(self, expression: str) -> str:
        """Return the length of the expression as a BLOB."""
        return f"LENGTH(CAST({expression} AS BLOB))"

    def joined(self, expressions: Sequence[str]) -> str:
        """Return a concatenation with the operator ``||``."""
        return " || ',' || ".join(expressions)

    def keeps_order(self) -> bool:
        """Return True: there is one writer at a time."""
        return True

    def is_duplicate(self, error: Exception) -> bool:
        """Return whether the error is a violated constraint."""
        return isinstance(error, sqlite3.IntegrityError)

    def max_statement_bytes(self) -> int:
        """Return the default limit of SQLite."""
        return 1_000_000_000  # SQLITE_MAX_LENGTH

    def close(self) -> None:
        """Close the connection, and release the lock, if any."""
        self._connection.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _crc32(value: bytes | str | int | None) -> int | None:
    """Compute CRC32() as the servers do: that of a number is the one of its digits."""
    if value is None:
        return None
    return zlib.crc32(value if isinstance(value, bytes) else str(value).encode())
