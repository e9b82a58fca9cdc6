"""Errors that differ by numbers, ids and addresses alone are the same."""

from __future__ import annotations

import pytest

from django_mysqlqueue.error_texts import LONGEST, masked


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("ValueError: no customer 4711", "ValueError: no customer <n>"),
        ("KeyError: 'order-4711'", "KeyError: 'order-<n>'"),
        ("rate 0.5 of 1,234.5", "rate <n> of <n>"),
        ("no 018f3b1e-7c1a-7d2b-9e4f-0123456789ab", "no <id>"),
        ("no 9f86d081884c7d65", "no <id>"),
        ("<Order object at 0x7f3a2c>", "<Order object at <address>>"),
        ("ConnectionError: 10.0.0.7:3306 refused", "ConnectionError: <ip> refused"),
        ("no route to fe80::1ff:fe23:4567:890a", "no route to <ip>"),
        ("SMTPRecipientsRefused: ada@example.com", "SMTPRecipientsRefused: <email>"),
        ("GET https://shop.example/orders/17?x=1 failed", "GET <url> failed"),
        ("decade, facade and deadbeef", "decade, facade and deadbeef"),
        ("Table shop.orders does not exist", "Table shop.orders does not exist"),
        ("at 12:30", "at <n>:<n>"),
    ],
)
def test_what_is_masked(text, same):
    assert masked(text) == same


def test_only_the_beginning_is_compared():
    assert masked("x" * (LONGEST + 1)) == "x" * LONGEST
