"""Patterns of database users."""

from __future__ import annotations

import pytest

from django_mysqlqueue.options.allowed_users import MOST
from tests.support.internals import is_allowed, parse_allowed_users


@pytest.mark.parametrize(
    ("pattern", "user", "allowed"),
    [
        ("billing@%", "billing@10.0.0.5", True),
        ("billing@%", "billing2@10.0.0.5", False),
        ("bill%@10.0.%", "billing@10.0.0.5", True),
        ("bill%@10.0.%", "billing@10.1.0.5", False),
        ("billing@localhost", "billing@localhost", True),
        ("Billing@localhost", "billing@localhost", False),
        ("b_lling@%", "billing@localhost", False),
        ("a.c@%", "abc@localhost", False),
        ("%@%", "", False),
    ],
)
def test_a_pattern(pattern, user, allowed):
    assert is_allowed((pattern,), user) is allowed


def test_patterns_are_sorted_and_unique():
    assert parse_allowed_users(["b@%", "a@%", "b@%"]) == ("a@%", "b@%")


@pytest.mark.parametrize("value", ["a@b", 5, [], ["a"], ["a@b@c"], ["a b@c"], ["a@b,c@d"], [5], ["a@" + "x" * 400]])
def test_invalid_patterns(value):
    with pytest.raises(ValueError, match=r"must be|must have"):
        parse_allowed_users(value)


def test_too_many():
    with pytest.raises(ValueError, match=f"1 to {MOST}"):
        parse_allowed_users([f"u{n}@%" for n in range(MOST + 1)])
