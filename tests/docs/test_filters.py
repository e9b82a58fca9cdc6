"""The examples, operators and limits of the page about filters are those of the code."""

from __future__ import annotations

import json
import re

import pytest

from django_mysqlqueue import filter_conditions, filter_policies
from django_mysqlqueue.filter_policies import parse
from tests.support.documents import DOCS, _block, blocks

pytestmark = pytest.mark.any_engine

PAGE = DOCS / "reference" / "filters.md"


def rows(*heading: str) -> list[list[str]]:
    """The cells of all tables with a heading."""
    tables = re.findall(r"^\| (.*) \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", PAGE.read_text(), re.MULTILINE)
    found = [body for head, body in tables if head.split(" | ") == list(heading)]
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for body in found for line in body.splitlines()]


def codes(cell: str) -> list[str]:
    found = re.findall(r"`([^`]+)`", cell)
    assert " ".join(f"`{one}`" for one in found) == cell
    return found


EXAMPLES = rows("Filter", "Matches", "Does not match")


@pytest.mark.parametrize(("policy", "matching", "others"), EXAMPLES, ids=[row[0] for row in EXAMPLES])
def test_examples_match(policy, matching, others):
    found = parse(json.loads(*codes(policy)))
    for metadata in codes(matching):
        assert found.matches(json.loads(metadata)), metadata
    for metadata in codes(others):
        assert not found.matches(json.loads(metadata)), metadata


def test_there_are_examples_of_every_operator():
    text = " ".join(row[0] for row in EXAMPLES)
    assert all(f'"{name}": ' in text for name in (*filter_policies.OPERATORS, filter_policies.OR))
    assert len(EXAMPLES) > 30


@pytest.mark.parametrize(("policy", "text"), rows("Filter", "Error"))
def test_errors_have_the_text(policy, text):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        parse(json.loads(*codes(policy)))
    assert [str(caught.value)] == codes(text)


@pytest.mark.parametrize(("policy", "canonical"), rows("Filter", "Canonical form"))
def test_canonical_forms_are_those_of_the_code(policy, canonical):
    assert json.dumps(parse(json.loads(*codes(policy))).as_json()) == codes(canonical)[0]


def test_every_operator_is_in_the_reference():
    listed = rows("Operator", "Operand", "Matches")
    assert {codes(row[0])[0] for row in listed} == set(filter_policies.OPERATORS)
    operands = " ".join(row[1] for row in listed)
    for name in (*filter_conditions.COMPARISONS, *filter_conditions.TEXT_OPERATORS):
        assert f"`{name}`" in operands


MISSING = {
    "missing": {},
    "`null`": {"key": None},
    "an empty string": {"key": ""},
    "an empty array": {"key": []},
    "an object": {"key": {"a": 1}},
}
CONDITIONS = {
    "`exists: false`": {"exists": False},
    "the exact value `null`": None,
    'the exact value `""`': "",
    '`equals-ignore-case` of `""`': {"equals-ignore-case": ""},
    "`anything-but`": {"anything-but": "x"},
    "a prefix": {"prefix": "x"},
    "`exists: true`": {"exists": True},
}


def test_the_table_of_missing_values_is_complete():
    listed = dict(rows("Metadata at the key", "Which conditions match"))
    assert set(listed) == set(MISSING)
    for case, text in listed.items():
        for name, condition in CONDITIONS.items():
            assert parse({"key": [condition]}).matches(MISSING[case]) == (name in text), (case, name)
        nested = parse({"key": {"a": [1]}}).matches(MISSING[case])
        assert nested == ("a dict of nested keys" in text), case


def test_limits_are_those_of_the_code():
    listed = [int(row[1].replace(",", "")) for row in rows("Limit", "Maximum")]
    assert listed == [
        filter_policies.MAX_KEYS,
        filter_policies.MAX_VALUES,
        filter_policies.MAX_NESTING,
        filter_policies.MAX_COMBINATIONS,
        filter_policies.MAX_POLICY_BYTES,
    ]


def test_the_example_prints_what_the_page_shows(capsys):
    exec(_block("reference/filters.md", "policy.explain("), {})  # noqa: S102
    ((_, shown),) = blocks(PAGE, "text")
    assert capsys.readouterr().out == shown
