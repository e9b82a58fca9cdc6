"""What the pipeline's connections conclude from what a server says."""

import pytest

from pyspark_mysqlqueue import databases
from pyspark_mysqlqueue.databases import Place, Server
from pyspark_mysqlqueue.errors import PipelineError


def server(**variables: str) -> Server:
    """A connection to a server with these global variables."""

    class Said(Server):
        def __init__(self) -> None:
            pass

        def rows(self, sql, parameters=()):
            return [(name, value) for name, value in variables.items() if f"'{name}'" in sql]

    return Said()


@pytest.mark.parametrize("word", ["replica", "slave"])  # the names from MySQL 8.0.26 on, and before
@pytest.mark.parametrize(
    ("workers", "preserve", "read_only", "keeps"),
    [
        ("4", "OFF", "ON", False),
        ("4", "ON", "ON", True),
        ("4", "OFF", "OFF", True),
        ("1", "OFF", "ON", True),
        ("0", "OFF", "ON", True),
    ],
)
def test_a_parallel_replica_without_commit_order_is_known_by_both_names(word, workers, preserve, read_only, keeps):
    variables = {f"{word}_parallel_workers": workers, f"{word}_preserve_commit_order": preserve}
    assert server(**variables, read_only=read_only).keeps_order() is keeps


def test_a_replica_of_mariadb_keeps_the_order():
    assert server(read_only="ON").keeps_order()


@pytest.mark.parametrize("name", ["ssl-mode", "ssl_mode"])
def test_an_option_that_pymysql_would_ignore_is_refused(monkeypatch, tmp_path, name):
    monkeypatch.setattr(databases, "DRIVERS", ("pymysql",))
    file = tmp_path / "queue.cnf"
    file.write_text(f"[client]\nhost=127.0.0.1\n{name}=REQUIRED\n")
    with pytest.raises(PipelineError, match="PyMySQL does not support the option ssl_mode: require TLS by"):
        Place(defaults_file=str(file)).connect()


def test_without_a_driver_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(databases, "DRIVERS", ("no_driver",))
    with pytest.raises(PipelineError, match=r"'pyspark-mysqlqueue\[mysql\]' or, .*'pyspark-mysqlqueue\[pymysql\]'"):
        Server({})
