"""Why a database refuses a statement or does not answer."""

from __future__ import annotations

import pytest
from django.db import OperationalError

from tests.support.internals import failures, mysql, sqlite


@pytest.mark.parametrize(
    "kind",
    [
        mysql.failure_kind(OperationalError(1317, "Query execution was interrupted")),
        mysql.failure_kind(OperationalError(1969, "Query execution was interrupted (max_statement_time exceeded)")),
        mysql.failure_kind(OperationalError(3024, "maximum statement execution time exceeded")),
        sqlite.failure_kind(OperationalError("interrupted")),
    ],
    ids=["KILL QUERY", "max_statement_time", "max_execution_time", "SQLite"],
)
def test_a_statement_that_was_interrupted_is_told(monkeypatch, kind):
    monkeypatch.setattr(failures, "failure_kind", lambda connection, error: kind)
    text = failures.summarize("default", OperationalError())
    assert text.startswith("The database 'default' has interrupted a statement")
