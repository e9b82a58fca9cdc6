"""Errors that differ by numbers, ids and addresses alone are the same."""

from __future__ import annotations

import pytest

from tests.support.internals import error_class, error_name, masked


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("no customer 17", "no customer <number>"),
        ("took 1.5 s at 2026-11-26 10:00:00,123", "took <number> s at <number> <number>"),
        ("order-4711 of utf8 is HTTP2, k1234", "order-<number> of utf8 is HTTP2, k<number>"),
        ("no 0190f3a2-7b1c-7e3d-9d51-6a0c5b8e2f10", "no <id>"),
        ("commit deadbeefcafe1234 of facade", "commit <id> of facade"),
        ("ada@example.com refused", "<address> refused"),
        ("https://shop.example/a?b=1 timed out", "<address> timed out"),
        ("10.0.0.7:5432 refused <object at 0x7f8f47dd1610>", "<address> refused <object at <address>>"),
        ("", ""),
    ],
)
def test_numbers_ids_and_addresses_are_masked(line, same):
    assert masked(line) == same


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("ValueError: no <number>: <address>", "ValueError"),
        ("shop.errors.Refused: no", "shop.errors.Refused"),
        ("KeyboardInterrupt", "KeyboardInterrupt"),
        ("no customer <number>: gone", ""),
        ("<number>: no", ""),
        ("", ""),
    ],
)
def test_the_class_is_the_name_before_the_colon(line, name):
    assert error_class(line) == name


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("shop.errors.PartnerTimeout: no answer from 10.0.0.7", "PartnerTimeout"),
        ("ValueError", "ValueError"),
        ("urllib.error.HTTPError: HTTP Error 429: Too Many Requests", "HTTP 429"),
        ("requests.exceptions.HTTPError: 503 Server Error: Unavailable for url: https://a.example", "HTTP 503"),
        ("httpx.HTTPStatusError: Client error '429 Too Many Requests' for url", "HTTP 429"),
        ("HTTP 429", "HTTP 429"),
        ("ValueError: 429 items", "ValueError"),
        ("X" * 60 + ": long", "X" * 40),
        ("no such customer: ada", ""),
        ("ada", ""),
        ("(errors of jobs are hidden)", ""),
        ("", ""),
    ],
)
def test_the_name_of_an_error_for_a_headline(line, name):
    assert error_name(line) == name
