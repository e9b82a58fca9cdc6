"""What ``Session`` reads: rows by the names of their columns, one SELECT for each of some keys, joined keys."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from django_mysqlqueue.sql import session as sessions
from django_mysqlqueue.sql.session import Session, built
from tests.support.harness import USING

pytestmark = pytest.mark.usefixtures("db")


@dataclass(frozen=True)
class Found:
    key: str
    offset: int
    text: str = ""


def test_rows_have_the_names_of_their_columns():
    (row,) = Session(USING).named("SELECT 'k' AS `key`, 7 AS `offset`, 1 AS other, COUNT(*) FROM (SELECT 1) v")
    assert (row.key, row.offset, row.other) == ("k", 7, 1)
    assert row == ("k", 7, 1, 1), "also by position, for columns without a name"
    assert built(Found, row) == Found("k", 7)
    assert built(Found, row, text="more", offset=8) == Found("k", 8, "more"), "other values, instead of columns too"


@pytest.mark.parametrize("terms", [1, 2, 200])
def test_a_select_is_read_for_each_of_its_parameters(terms, monkeypatch):
    monkeypatch.setattr(sessions, "UNION_TERMS", terms)
    session = Session(USING)
    parameters = [("a", 1), ("b", 2), ("c", 3)]
    assert sorted(session.each("SELECT %s AS k, %s AS n", parameters)) == parameters
    assert sorted(session.each("SELECT %s AS k, %s AS n", parameters, whole=2)) == parameters
    assert session.each("SELECT %s AS k, %s AS n", []) == []


def test_keys_are_joined_once_each_in_chunks(monkeypatch):
    session = Session(USING)
    monkeypatch.setattr(type(session.dialect), "max_rows", 2)
    assert [row.k for row in session.joined("SELECT v.k", "k", ["c", "a", "b", "a"], "")] == ["a", "b", "c"]
    rows = session.joined(
        "SELECT %s AS x, v.k, v.n", "kn", [("b", 2), ("a", 1)], "WHERE v.n > %s", before=[9], after=[1]
    )
    assert [tuple(row) for row in rows] == [(9, "b", 2)]
