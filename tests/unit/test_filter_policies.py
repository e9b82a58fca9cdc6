"""The filter language: what each operator matches, what is refused, and what people read about it."""

from __future__ import annotations

import copy
import enum
import json
import pickle
import re
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_mysqlqueue import filter_policies
from django_mysqlqueue.filter_policies import parse
from tests.support.paths import ROOT

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""For slow machines."""
NAN, INFINITY = float("nan"), float("inf")
DEEP = json.loads("[" * 500 + "1" + "]" * 500)
for _ in range(10_000):
    DEEP = [DEEP]


class Region(enum.StrEnum):
    EU = "eu"


class Size(enum.IntEnum):
    LARGE = 3


# -- what matches -------------------------------------------------------------

VALUES = [
    # exact strings
    (["eu"], ["eu", ["eu"], ["us", "eu"], [["eu"]]], ["us", "EU", "e", "eu ", "", None, 0, True, [], {}, {"eu": 1}]),
    (["eu", "us"], ["eu", "us", ["us", "x"]], ["x", ["x"], "eu,us"]),
    ([""], ["", ["a", ""]], [None, [], False, 0]),
    (["5"], ["5"], [5, 5.0]),
    (["true"], ["true"], [True]),
    ([Region.EU], ["eu"], ["Region.EU"]),
    # exact numbers
    ([5], [5, 5.0, [4, 5]], ["5", True, 4, 5.1, None]),
    ([300], [300, 300.0, 3.0e2], [300.0000001, "300"]),
    ([300.0], [300, 300.0], [301]),
    ([0], [0, 0.0, -0.0], [False, None, "", []]),
    ([1], [1, 1.0], [True, [True]]),
    ([1, True], [1, True], [0, False]),
    ([0.1], [0.1], [0.1 + 1e-16, 0.10000001, 0]),
    ([2**53 + 1], [2**53 + 1], [2**53, float(2**53)]),
    ([2**64 - 1], [2**64 - 1], [float(2**64), 2**64]),
    ([-(2**63)], [-(2**63), -float(2**63)], [2**63]),
    ([1e300], [1e300, int(1e300)], [1e301]),
    ([Size.LARGE], [3], ["3"]),
    # booleans and null
    ([True], [True, [False, True]], [1, 1.0, "true", False, None, []]),
    ([False], [False], [0, 0.0, "", None, [], True]),
    ([None], [None, [None], ["a", None]], [0, "", False, [], {}, "null"]),
    (["a", None], ["a", None], ["", "b"]),
    # prefix and suffix
    ([{"prefix": "eu-"}], ["eu-", "eu-west", ["us", "eu-1"]], ["eu", "EU-1", "x-eu-", "", None, 5, True, [], {}]),
    ([{"prefix": "5"}], ["5", "50"], [5, 50]),
    ([{"prefix": "a"}, {"prefix": "b"}], ["ax", "bx"], ["cx"]),
    ([{"suffix": ".png"}], [".png", "a.png", ["x", "b.png"]], ["png", "a.PNG", "a.png ", None, 5, [], {}]),
    ([{"suffix": "0"}], ["10"], [10]),
    # equals-ignore-case
    ([{"equals-ignore-case": "Eu"}], ["eu", "EU", "eU", ["x", "EU"]], ["eu ", "e", None, 5, True, {}]),
    ([{"equals-ignore-case": "STRASSE"}], ["straße", "Strasse"], ["strase"]),
    ([{"equals-ignore-case": ""}], [""], [None, " ", []]),
    # anything-but
    ([{"anything-but": "eu"}], ["us", "EU", "", 5, 0, True, False, ["us"], ["eu", "us"]], ["eu", ["eu"], None, [], {}]),
    ([{"anything-but": ["eu", "us"]}], ["x", ["eu", "x"]], ["eu", "us", ["eu", "us"], [None], [{"eu": 1}]]),
    ([{"anything-but": 100}], [101, 100.1, "100", True, [100, 50]], [100, 100.0, [100], None]),
    ([{"anything-but": [100, 500]}], [101, [100, 50]], [100, 500, [500, 100.0]]),
    ([{"anything-but": 1}], [True, 2], [1, 1.0]),
    ([{"anything-but": True}], [1, False, "true"], [True]),
    ([{"anything-but": [None]}], [0, "", False, "x"], [None, [None], []]),
    ([{"anything-but": ["a", 1]}], ["b", 2, "1"], ["a", 1]),
    (
        [{"anything-but": {"prefix": "eu-"}}],
        ["us", "eu", "", 5, True, ["eu-1", "us"]],
        ["eu-1", ["eu-1"], None, [], {}],
    ),
    ([{"anything-but": {"prefix": ["eu-", "us-"]}}], ["asia"], ["eu-1", "us-1"]),
    ([{"anything-but": {"suffix": ".png"}}], ["a.jpg", 5], ["a.png", None]),
    ([{"anything-but": {"suffix": [".png", ".gif"]}}], ["a.jpg"], ["a.png", "a.gif"]),
    ([{"anything-but": {"equals-ignore-case": "eu"}}], ["us", 5], ["eu", "EU", None]),
    ([{"anything-but": {"equals-ignore-case": ["eu", "US"]}}], ["asia"], ["EU", "us"]),
    ([{"anything-but": "eu"}, {"exists": False}], ["us", None, [], {}], ["eu"]),
    ([{"anything-but": "eu"}, None], ["us", None], ["eu"]),
    # numeric
    ([{"numeric": ["=", 301.5]}], [301.5, 3.015e2], [301, "301.5", None]),
    ([{"numeric": ["=", 1]}], [1, 1.0], [True, "1"]),
    ([{"numeric": ["<", 0]}], [-1, -0.001, -INFINITY, -(10**400)], [0, -0.0, 1, "-1", None, False, NAN]),
    ([{"numeric": ["<=", 0]}], [0, -0.0, -1], [0.001, False, None, NAN]),
    ([{"numeric": [">", 0]}], [1, 0.001, 10**400, INFINITY, [-1, 1]], [0, -1, True, "1", [], {}, NAN]),
    ([{"numeric": [">=", 0]}], [0, -0.0, 1], [-0.001, "0", False, NAN]),
    ([{"numeric": [">", 0, "<=", 150]}], [1, 150, 150.0, [0, 5]], [0, 150.1, -1, [0, 151]]),
    ([{"numeric": ["<", 150, ">=", 0]}], [0, 149.9], [150, -1]),
    ([{"numeric": [">", 2**53]}], [2**53 + 1], [2**53, float(2**53)]),
    # exists
    (
        [{"exists": True}],
        ["a", 0, False, 0.0, ["a"], [None, 1], [[0]]],
        [None, "", [], {}, [None], [""], [{}], {"a": 1}],
    ),
    ([{"exists": False}], [None, "", [], {}, [None, ""], {"a": 1}, [{"a": 1}]], ["a", 0, False, [None, 1]]),
    ([{"exists": False}, "eu"], ["eu", None, "", []], ["us", [None, "us"]]),
    ([{"exists": True}, None], ["a", None], ["", []]),
    # cidr
    (
        [{"cidr": "10.0.0.0/24"}],
        ["10.0.0.0", "10.0.0.255", ["x", "10.0.0.9"]],
        ["10.0.1.0", "10.0.0", "", 167772160, None],
    ),
    ([{"cidr": "10.0.0.7"}], ["10.0.0.7"], ["10.0.0.8", "10.0.0.07"]),
    ([{"cidr": "2001:db8::/32"}], ["2001:db8::1", "2001:0DB8:0::1"], ["2001:db9::1", "2001:db8::1%eth0", "10.0.0.1"]),
    # several operators
    (["eu", {"prefix": "us-"}, {"numeric": [">", 5]}], ["eu", "us-1", 6], ["us", 5]),
]


@pytest.mark.parametrize(("conditions", "matching", "others"), VALUES, ids=lambda value: repr(value)[:60])
def test_values_match(conditions, matching, others):
    policy = parse({"key": conditions})
    assert [value for value in matching if not policy.matches({"key": value})] == []
    assert [value for value in others if policy.matches({"key": value})] == []
    for value in (*matching, *others):
        assert policy.matches({"key": value, "other": "eu"}) == policy.matches({"key": value})


@pytest.mark.parametrize("conditions", [case[0] for case in VALUES], ids=lambda value: repr(value)[:60])
def test_a_missing_key_matches_only_exists_false(conditions):
    absent = {"exists": False} in conditions
    policy = parse({"key": conditions})
    assert policy.matches({}) == policy.matches({"other": "eu"}) == policy.matches({"key": []}) == absent


@pytest.mark.parametrize(
    "value", [0, "", None, True, False, "a", NAN, [], [[]], {}, {"a": 1}, [None], ["", {}], [["a"]], DEEP], ids=type
)
def test_exists_true_and_false_are_opposites(value):
    exists, absent = parse({"key": [{"exists": True}]}), parse({"key": [{"exists": False}]})
    assert exists.matches({"key": value}) != absent.matches({"key": value})


POLICIES = [
    # all keys must match
    ({"a": [1], "b": [2]}, [{"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}], [{"a": 1}, {"b": 2}, {"a": 1, "b": 3}, {}]),
    ({"a": [1], "b": [2], "c": [3]}, [{"a": 1, "b": 2, "c": 3}], [{"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 4}]),
    # nested keys
    (
        {"a": {"b": ["x"]}},
        [{"a": {"b": "x"}}, {"a": {"b": ["x"], "c": 1}}],
        [{"a": "x"}, {"a": None}, {"a": []}, {"b": "x"}, {"a.b": "x"}, {}, {"a": {"b": {"b": "x"}}}],
    ),
    ({"a": {"b": {"c": ["x"]}}}, [{"a": {"b": {"c": "x"}}}], [{"a": {"b": "x"}}, {"a": {"c": "x"}}]),
    (
        {"a": {"b": [{"exists": False}]}},
        [{}, {"a": 1}, {"a": {}}, {"a": {"c": 1}}, {"a": {"b": None}}],
        [{"a": {"b": 1}}],
    ),
    ({"a": {"b": [{"anything-but": 1}]}}, [{"a": {"b": 2}}], [{}, {"a": {}}, {"a": 2}, {"a": {"b": 1}}]),
    # arrays of objects: one object must meet all conditions
    (
        {"items": {"sku": ["a"], "qty": [{"numeric": [">", 1]}]}},
        [
            {"items": {"sku": "a", "qty": 2}},
            {"items": [{"sku": "a", "qty": 2}]},
            {"items": [{"sku": "b", "qty": 1}, {"sku": "a", "qty": 2}]},
            {"items": ["x", [{"sku": "a", "qty": 2}]]},
        ],
        [{"items": [{"sku": "a", "qty": 1}, {"sku": "b", "qty": 2}]}, {"items": []}, {"items": "a"}],
    ),
    ({"items": {"sku": [{"exists": False}]}}, [{"items": []}, {"items": [{"sku": 1}, {}]}], [{"items": [{"sku": 1}]}]),
    # keys are not paths, and those of objects do not count as values
    ({"a.b": ["x"]}, [{"a.b": "x"}], [{"a": {"b": "x"}}]),
    ({"": ["x"]}, [{"": "x"}], [{}]),
    ({"prefix": ["x"]}, [{"prefix": "x"}], [{}]),
    # $or
    ({"$or": [{"a": [1]}, {"b": [2]}]}, [{"a": 1}, {"b": 2}, {"a": 1, "b": 3}], [{}, {"a": 2, "b": 1}, {"$or": 1}]),
    (
        {"s": ["x"], "$or": [{"a": [1]}, {"b": [2], "c": [3]}]},
        [{"s": "x", "a": 1}, {"s": "x", "b": 2, "c": 3}],
        [{"a": 1}, {"s": "x"}, {"s": "x", "b": 2}, {"s": "x", "c": 3}],
    ),
    (
        {"$or": [{"a": [1]}, {"b": [1]}, {"$or": [{"c": [1]}, {"d": [1]}]}]},
        [{"a": 1}, {"b": 1}, {"c": 1}, {"d": 1}],
        [{"a": 2, "d": 2}],
    ),
    (
        {"d": {"$or": [{"a": [1]}, {"b": [2]}]}, "$or": [{"x": [1]}, {"y": [1]}]},
        [{"d": {"a": 1}, "x": 1}, {"d": {"b": 2}, "y": 1}],
        [{"d": {"a": 1}}, {"x": 1}, {"a": 1, "x": 1}],
    ),
    ({"$or": [{"a": {"b": [1]}}, {"c": [1]}]}, [{"a": {"b": 1}}, {"c": 1}], [{"b": 1}]),
]


@pytest.mark.parametrize(("policy", "matching", "others"), POLICIES, ids=lambda value: repr(value)[:60])
def test_policies_match(policy, matching, others):
    found = parse(policy)
    assert [metadata for metadata in matching if not found.matches(metadata)] == []
    assert [metadata for metadata in others if found.matches(metadata)] == []


def test_tuples_and_other_mappings_are_read_like_lists_and_dicts():
    from types import MappingProxyType

    policy = parse(MappingProxyType({"a": ({"numeric": (">", 1)}, {"anything-but": ("x",)})}))
    assert policy == parse({"a": [{"numeric": [">", 1]}, {"anything-but": ["x"]}]})
    assert policy.matches(MappingProxyType({"a": ("x", "y")}))
    assert parse({"a": {"b": [1]}}).matches({"a": MappingProxyType({"b": 1})})


# -- what is refused ----------------------------------------------------------


def nested(levels: int) -> dict[str, object]:
    policy: dict[str, object] = {"a": [1]}
    for _ in range(levels - 1):
        policy = {"a": policy}
    return policy


cyclic: dict[str, object] = {}
cyclic["a"] = cyclic
LEAF = "must be a list of values or a dict of nested keys, not"
REFUSED = [
    # the policy
    ("eu", "filter: must be a dict of keys and lists of values, not 'eu'"),
    (None, "filter: must be a dict of keys and lists of values, not None"),
    ([{"a": [1]}], "filter: must be a dict of keys and lists of values, not list"),
    ({}, "filter: must not be empty. To receive all messages, leave the filter out"),
    ({1: ["a"]}, "filter: has the key 1, but keys must be strings"),
    ({("a",): ["a"]}, "filter: has the key tuple, but keys must be strings"),
    ({"\ud800": ["a"]}, r"filter['\ud800']: contains a lone surrogate, which UTF-8 cannot encode"),
    ({"a": {}}, "filter['a']: must not be empty"),
    ({"a": "eu"}, f"filter['a']: {LEAF} 'eu'"),
    ({"a": True}, f"filter['a']: {LEAF} True"),
    ({"a": {"b": 5}}, f"filter['a']['b']: {LEAF} 5"),
    ({"a": {1, 2}}, f"filter['a']: {LEAF} set"),
    ({"a" * 99: 1}, f"filter['{'a' * 59}…]: {LEAF} 1"),
    ({"a": []}, "filter['a']: must not be an empty list, because no message would match"),
    # values
    ({"a": ["eu", ["us"]]}, "filter['a'][1]: must be a string, a number, True, False or None, not list"),
    ({"a": [b"eu"]}, "filter['a'][0]: must be a string, a number, True, False or None, not bytes"),
    ({"a": [NAN]}, "filter['a'][0]: must be a finite number, not nan"),
    ({"a": [-INFINITY]}, "filter['a'][0]: must be a finite number, not -inf"),
    ({"a": [2**64]}, "filter['a'][0]: must fit in 64 bits, as the integers of metadata do"),
    ({"a": [-(2**63) - 1]}, "filter['a'][0]: must fit in 64 bits, as the integers of metadata do"),
    ({"a": [10**5000]}, "filter['a'][0]: must fit in 64 bits, as the integers of metadata do"),
    ({"a": ["\udfff"]}, "filter['a'][0]: contains a lone surrogate, which UTF-8 cannot encode"),
    # operators
    ({"a": [{}]}, "filter['a'][0]: must be a dict with one operator, not 0"),
    ({"a": [{"prefix": "a", "suffix": "b"}]}, "filter['a'][0]: must be a dict with one operator, not 2"),
    ({"a": [{"prefx": "a"}]}, "filter['a'][0]: there is no operator 'prefx'. Did you mean prefix?"),
    ({"a": [{"Numeric": [">", 1]}]}, "filter['a'][0]: there is no operator 'Numeric'. Did you mean numeric?"),
    ({"a": [{"anything_but": 1}]}, "filter['a'][0]: there is no operator 'anything_but'. Did you mean anything-but?"),
    (
        {"a": [{"zzz": 1}]},
        (
            "filter['a'][0]: there is no operator 'zzz'. Operators: prefix, suffix, equals-ignore-case, anything-but, "
            "numeric, exists, cidr"
        ),
    ),
    (
        {"a": [{1: 1}]},
        (
            "filter['a'][0]: there is no operator 1. Operators: prefix, suffix, equals-ignore-case, anything-but, "
            "numeric, exists, cidr"
        ),
    ),
    (
        {"a": [{"wildcard": "a*"}]},
        "filter['a'][0]: the operator 'wildcard' is not supported. Use prefix, suffix or equals-ignore-case",
    ),
    (
        {"a": {"numeric": [">=", 100]}},
        "filter['a']['numeric']: 'numeric' is an operator here, which must be a dict in a list: [{'numeric': …}]",
    ),
    (
        {"$or": [{"prefix": ["a"]}, {"b": [1]}]},
        "filter['$or'][0]['prefix']: 'prefix' is an operator here, which must be a dict in a list: [{'prefix': …}]",
    ),
    ({"a": [{"prefix": 5}]}, "filter['a'][0]['prefix']: must be a string, not 5"),
    ({"a": [{"prefix": ["b"]}]}, "filter['a'][0]['prefix']: must be a string, not list"),
    ({"a": [{"prefix": ""}]}, "filter['a'][0]['prefix']: must not be empty, because every string would match"),
    ({"a": [{"suffix": ""}]}, "filter['a'][0]['suffix']: must not be empty, because every string would match"),
    ({"a": [{"suffix": None}]}, "filter['a'][0]['suffix']: must be a string, not None"),
    ({"a": [{"equals-ignore-case": 1}]}, "filter['a'][0]['equals-ignore-case']: must be a string, not 1"),
    ({"a": [{"anything-but": []}]}, "filter['a'][0]['anything-but']: must not be an empty list"),
    (
        {"a": [{"anything-but": ["x", ["y"]]}]},
        "filter['a'][0]['anything-but'][1]: must be a string, a number, True, False or None, not list",
    ),
    ({"a": [{"anything-but": NAN}]}, "filter['a'][0]['anything-but']: must be a finite number, not nan"),
    (
        {"a": [{"anything-but": {"numeric": ["=", 1]}}]},
        (
            "filter['a'][0]['anything-but']: must be a value, a list of values, or a dict with one of prefix, suffix, "
            "equals-ignore-case"
        ),
    ),
    (
        {"a": [{"anything-but": {}}]},
        (
            "filter['a'][0]['anything-but']: must be a value, a list of values, or a dict with one of prefix, suffix, "
            "equals-ignore-case"
        ),
    ),
    (
        {"a": [{"anything-but": {"prefix": "a", "suffix": "b"}}]},
        (
            "filter['a'][0]['anything-but']: must be a value, a list of values, or a dict with one of prefix, suffix, "
            "equals-ignore-case"
        ),
    ),
    ({"a": [{"anything-but": {"prefix": []}}]}, "filter['a'][0]['anything-but']['prefix']: must not be an empty list"),
    (
        {"a": [{"anything-but": {"prefix": ["b", ""]}}]},
        "filter['a'][0]['anything-but']['prefix'][1]: must not be empty, because every string would match",
    ),
    (
        {"a": [{"anything-but": {"equals-ignore-case": ["b", 1]}}]},
        "filter['a'][0]['anything-but']['equals-ignore-case'][1]: must be a string, not 1",
    ),
    ({"total": [{"numeric": [">=", "100"]}]}, "filter['total'][0]['numeric'][1]: must be a number, not '100'"),
    ({"a": [{"numeric": [">=", True]}]}, "filter['a'][0]['numeric'][1]: must be a number, not True"),
    ({"a": [{"numeric": [">", INFINITY]}]}, "filter['a'][0]['numeric'][1]: must be a finite number, not inf"),
    (
        {"a": [{"numeric": ["<", 2**70]}]},
        "filter['a'][0]['numeric'][1]: must fit in 64 bits, as the integers of metadata do",
    ),
    ({"a": [{"numeric": ["!=", 1]}]}, "filter['a'][0]['numeric'][0]: must be one of =, <, <=, >, >=, not '!='"),
    ({"a": [{"numeric": [1, ">"]}]}, "filter['a'][0]['numeric'][0]: must be one of =, <, <=, >, >=, not 1"),
    ({"a": [{"numeric": [">", 1, [], 2]}]}, "filter['a'][0]['numeric'][2]: must be one of =, <, <=, >, >=, not list"),
    *(
        (
            {"a": [{"numeric": operand}]},
            (
                "filter['a'][0]['numeric']: must be a list of a comparison and a number, or of two of them for a "
                "range, such as ['>=', 100]"
            ),
        )
        for operand in (5, [], [">"], [">", 1, "<"], [">", 1, "<", 2, "<", 3], ">5", {">": 5})
    ),
    *(
        (
            {"a": [{"numeric": operand}]},
            "filter['a'][0]['numeric']: must have one lower bound (> or >=) and one upper bound (< or <=)",
        )
        for operand in ([">", 1, ">=", 2], ["<", 1, "<=", 2], ["=", 1, "<", 2], [">", 1, "=", 2], ["=", 1, "=", 1])
    ),
    (
        {"a": [{"numeric": [">", 5, "<", 5.0]}]},
        "filter['a'][0]['numeric']: the lower bound 5 must be less than the upper bound 5",
    ),
    (
        {"a": [{"numeric": ["<", 1, ">", 2.5]}]},
        "filter['a'][0]['numeric']: the lower bound 2.5 must be less than the upper bound 1",
    ),
    ({"a": [{"exists": 1}]}, "filter['a'][0]['exists']: must be True or False, not 1"),
    ({"a": [{"exists": "true"}]}, "filter['a'][0]['exists']: must be True or False, not 'true'"),
    ({"a": [{"cidr": 5}]}, "filter['a'][0]['cidr']: must be a string, not 5"),
    *(
        (
            {"a": [{"cidr": network}]},
            f"filter['a'][0]['cidr']: must be a network without host bits, such as '10.0.0.0/24', not {network!r}",
        )
        for network in ("10.0.0.1/24", "10.0.0.0/33", "", "x")
    ),
    # $or
    *(
        ({"$or": value}, "filter['$or']: must be a list of two or more dicts, of which one must match")
        for value in ([], [{"a": [1]}], {"a": [1]}, "x", None)
    ),
    ({"$or": [{"a": [1]}, "b"]}, "filter['$or'][1]: must be a dict of keys and lists of values, not 'b'"),
    ({"$or": [{"a": [1]}, {}]}, "filter['$or'][1]: must not be empty"),
    ({"$or": [{"a": [1, 2]}, {"b": [1]}, {"a": [2, 1.0]}]}, "filter['$or'][2]: repeats an alternative"),
    ({"b": {"$or": [{"a": [1]}, {"a": 1}]}}, f"filter['b']['$or'][1]['a']: {LEAF} 1"),
    # bounds
    (
        nested(31),
        f"filter{'[' + repr('a') + ']'}".replace("['a']", "['a']" * 30) + ": is nested more than 30 levels deep",
    ),
    (cyclic, "filter" + "['a']" * 30 + ": is nested more than 30 levels deep"),
    ({f"k{i:02}": [1] for i in range(51)}, "filter['k50']: is key 51 of the filter, but at most 50 are allowed"),
    (
        {"$or": [{f"k{i:02}": [j] for i in range(26)} for j in range(2)]},
        "filter['$or'][1]['k24']: is key 51 of the filter, but at most 50 are allowed",
    ),
    (
        {"a": list(range(300)), "b": [{"anything-but": list(range(201))}]},
        "filter['b']: brings the filter to 501 values, but at most 500 are allowed",
    ),
    (
        {"a": list(range(300)), "b": [{"anything-but": {"prefix": ["x"] * 201}}]},
        "filter['b']: brings the filter to 501 values, but at most 500 are allowed",
    ),
    (
        {"a": list(range(498)), "b": [{"numeric": [">", 0, "<", 1]}, {"exists": True}]},
        "filter['b']: brings the filter to 501 values, but at most 500 are allowed",
    ),
    (
        {f"k{i}": {"$or": [{"a": [1]}, {"b": [1]}]} for i in range(8)},
        "filter: $or has 256 combinations, but at most 150 are allowed",
    ),
    (
        {"$or": [{f"k{i}": {"$or": [{"a": [1]}, {"b": [1]}]} for i in range(n)} for n in (7, 6)]},
        "filter: $or has 192 combinations, but at most 150 are allowed",
    ),
    ({"a": ["é" * 32_764]}, "filter: has 65,538 bytes as JSON, but at most 65,535 are allowed"),
]


@pytest.mark.parametrize(("policy", "text"), REFUSED, ids=[text[:70] for _, text in REFUSED])
def test_invalid_policies_are_refused(policy, text):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        parse(policy)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "policy",
    [
        nested(30),
        {f"k{i}": [1] for i in range(50)},
        {"a": list(range(500))},
        {"a": list(range(300)), "b": [{"anything-but": list(range(200))}]},
        {f"k{i}": {"$or": [{"a": [1]}, {"b": [1]}]} for i in range(7)},
        {"$or": [{f"k{i}": [1]} for i in range(50)]},
        {"a": ["é" * 32_762 + "x"]},
    ],
    ids=lambda policy: repr(policy)[:50],
)
def test_policies_at_the_bounds_are_accepted(policy):
    found = parse(policy)
    assert parse(found.as_json()) == found


def test_the_longest_policy_has_the_bytes_that_are_allowed():
    assert len(parse({"a": ["é" * 32_762 + "x"]}).text.encode()) == filter_policies.MAX_POLICY_BYTES == 65_535


# -- the canonical form -------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "canonical"),
    [
        ({"b": [1], "a": [2]}, {"a": [2], "b": [1]}),
        ({"a": ["b", 2, True, None, "a", 1.5, False]}, {"a": [None, False, True, 1.5, 2, "a", "b"]}),
        ({"a": [300.0, 300, 3e2]}, {"a": [300]}),
        ({"a": [-0.0]}, {"a": [0]}),
        ({"a": [True, 1, 1.0, 0, False]}, {"a": [False, True, 0, 1]}),
        ({"a": [float(2**63)]}, {"a": [2**63]}),
        ({"a": [1e300]}, {"a": [1e300]}),
        ({"a": [{"numeric": ["=", 5.0]}]}, {"a": [5]}),
        ({"a": [{"numeric": ["<", 5, ">", 1]}]}, {"a": [{"numeric": [">", 1, "<", 5]}]}),
        ({"a": [{"anything-but": "x"}]}, {"a": [{"anything-but": ["x"]}]}),
        ({"a": [{"anything-but": ["y", "x", "x"]}]}, {"a": [{"anything-but": ["x", "y"]}]}),
        ({"a": [{"anything-but": {"prefix": ["x"]}}]}, {"a": [{"anything-but": {"prefix": "x"}}]}),
        ({"a": [{"anything-but": {"suffix": ["y", "x"]}}]}, {"a": [{"anything-but": {"suffix": ["x", "y"]}}]}),
        ({"a": [{"equals-ignore-case": "EU"}]}, {"a": [{"equals-ignore-case": "eu"}]}),
        (
            {"a": [{"anything-but": {"equals-ignore-case": ["EU", "eu", "A"]}}]},
            {"a": [{"anything-but": {"equals-ignore-case": ["a", "eu"]}}]},
        ),
        (
            {"a": [{"suffix": "x"}, {"exists": False}, "y", {"prefix": "z"}, {"suffix": "x"}]},
            {"a": ["y", {"exists": False}, {"prefix": "z"}, {"suffix": "x"}]},
        ),
        (
            {"a": [{"cidr": "2001:DB8::/32"}, {"cidr": "10.0.0.1"}]},
            {"a": [{"cidr": "10.0.0.1/32"}, {"cidr": "2001:db8::/32"}]},
        ),
        ({"$or": [{"b": [2, 1]}, {"a": [1]}]}, {"$or": [{"a": [1]}, {"b": [1, 2]}]}),
        ({"a": [Region.EU, Size.LARGE]}, {"a": [3, "eu"]}),
    ],
    ids=repr,
)
def test_equal_policies_have_one_canonical_form(policy, canonical):
    found = parse(policy)
    assert json.dumps(found.as_json()) == json.dumps(canonical)
    assert found == parse(canonical)
    assert hash(found) == hash(parse(canonical))
    assert found.text == parse(found.as_json()).text == json.dumps(canonical, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": [1]}, {"a": [True]}),
        ({"a": [1]}, {"a": ["1"]}),
        ({"a": ["x"]}, {"b": ["x"]}),
        ({"a": ["x"]}, {"a": ["X"]}),
        ({"a": [None]}, {"a": [{"exists": False}]}),
        ({"a": [{"numeric": [">", 1]}]}, {"a": [{"numeric": [">=", 1]}]}),
    ],
)
def test_different_policies_are_not_equal(one, other):
    assert parse(one) != parse(other)


def test_a_policy_is_immutable_and_keeps_nothing_of_its_argument():
    given = {"a": ["x"]}
    policy = parse(given)
    given["a"].append("y")
    policy.as_json()["a"].append("z")
    assert policy.as_json() == {"a": ["x"]}
    assert not policy.matches({"a": "y"})
    with pytest.raises(AttributeError):
        policy.text = "{}"


def test_a_policy_can_be_pickled_and_copied():
    policy = parse({"a": ["x", {"numeric": [">", 1]}], "$or": [{"b": [1]}, {"c": {"d": [None]}}]})
    for other in (pickle.loads(pickle.dumps(policy)), copy.copy(policy), copy.deepcopy(policy)):  # noqa: S301
        assert other == policy
        assert other.matches({"a": 2, "b": 1})


def test_the_module_needs_no_settings():
    code = (
        "from django_mysqlqueue.filter_policies import parse; p = parse({'a': [1]}); "
        "print(p, p.matches({'a': 1}), p.explain({}))\n"
        "try: parse({'a': [{'prefx': 'x'}]})\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "a is 1 True Does not match: a is missing (required: a is 1)."
    assert "Did you mean prefix?" in done.stdout


# -- texts for people ---------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ({"region": ["eu"], "total": [{"numeric": [">=", 100]}]}, 'region is "eu" and total >= 100'),
        ({"a": ["x", "y"]}, 'a is one of "x", "y"'),
        ({"a": [None, True, 1, 1.5, "x"]}, 'a is one of null, true, 1, 1.5, "x"'),
        ({"a": list(range(12))}, "a is one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"),
        ({"a": ["x" * 99]}, f'a is "{"x" * 59}…'),
        ({"a": ['"\n']}, r'a is "\"\n"'),
        ({"a": [{"prefix": "x"}]}, 'a begins with "x"'),
        ({"a": [{"suffix": "x"}]}, 'a ends with "x"'),
        ({"a": [{"equals-ignore-case": "X"}]}, 'a equals "x" in any case'),
        ({"a": [{"anything-but": "x"}]}, 'a is not "x"'),
        ({"a": [{"anything-but": ["x", 5]}]}, 'a is none of 5, "x"'),
        ({"a": [{"anything-but": {"prefix": ["x", "y"]}}]}, 'a does not begin with "x", "y"'),
        ({"a": [{"anything-but": {"suffix": "x"}}]}, 'a does not end with "x"'),
        ({"a": [{"anything-but": {"equals-ignore-case": "X"}}]}, 'a does not equal "x" in any case'),
        ({"a": [{"numeric": ["=", 5]}]}, "a is 5"),
        ({"a": [{"numeric": [">", 0, "<=", 150]}]}, "a > 0 and <= 150"),
        ({"a": [{"exists": True}]}, "a exists"),
        ({"a": [{"exists": False}]}, "a does not exist"),
        ({"a": [{"cidr": "10.0.0.0/8"}]}, "a is an address in 10.0.0.0/8"),
        ({"a": ["x", {"prefix": "y"}]}, 'a is "x" or a begins with "y"'),
        ({"a": ["x", {"prefix": "y"}], "b": [1]}, '(a is "x" or a begins with "y") and b is 1'),
        ({"a": ["x", {"numeric": [">", 0, "<", 9]}]}, 'a is "x" or (a > 0 and < 9)'),
        ({"a": [{"numeric": [">", 0, "<", 9]}], "b": [1]}, "(a > 0 and < 9) and b is 1"),
        ({"a": {"b": {"c": [1]}}}, "a.b.c is 1"),
        ({"a": {"b": [1], "c": [2]}, "d": [3]}, "a.b is 1 and a.c is 2 and d is 3"),
        ({"a": {"b": [1, {"exists": False}]}, "d": [3]}, "(a.b is 1 or a.b does not exist) and d is 3"),
        ({"a.b": [1], "c d": {"e-f": [2]}}, '"a.b" is 1 and "c d".e-f is 2'),
        ({"$or": [{"a": [1]}, {"b": [2]}]}, "a is 1 or b is 2"),
        ({"s": [1], "$or": [{"a": [1]}, {"b": [2], "c": [3]}]}, "(a is 1 or (b is 2 and c is 3)) and s is 1"),
        ({"d": {"$or": [{"a": [1]}, {"b": {"c": [2], "e": [3]}}]}}, "d.a is 1 or (d.b.c is 2 and d.b.e is 3)"),
        ({"$or": [{"a": [{"numeric": [">", 0, "<", 9]}]}, {"b": [2]}]}, "(a > 0 and < 9) or b is 2"),
    ],
)
def test_text(policy, text):
    assert str(parse(policy)) == text


BOTH = {"region": ["eu"], "total": [{"numeric": [">=", 100]}]}
EITHER = {"s": [1], "$or": [{"a": [1]}, {"b": [2], "c": [3]}]}
ITEMS = {"items": {"sku": ["a"], "qty": [{"numeric": [">", 1]}]}}


@pytest.mark.parametrize(
    ("policy", "metadata", "text"),
    [
        (BOTH, {"region": "eu", "total": 250}, 'Matches: region is "eu" and total is 250.'),
        (BOTH, {"region": "eu", "total": 50}, "Does not match: total is 50 (required: total >= 100)."),
        (BOTH, {"region": "us", "total": 5}, 'Does not match: region is "us" (required: region is "eu").'),
        (BOTH, {"total": 250}, 'Does not match: region is missing (required: region is "eu").'),
        (BOTH, {"region": None}, 'Does not match: region is null (required: region is "eu").'),
        (BOTH, {"region": True}, 'Does not match: region is true (required: region is "eu").'),
        (BOTH, {"region": {"a": 1}}, 'Does not match: region is an object (required: region is "eu").'),
        (BOTH, {"region": [{}]}, 'Does not match: region is an array without values (required: region is "eu").'),
        (BOTH, {"region": []}, 'Does not match: region is an array without values (required: region is "eu").'),
        (BOTH, {"region": ["us", [1]]}, 'Does not match: region is ["us", 1] (required: region is "eu").'),
        (
            BOTH,
            {"region": list(range(99))},
            'Does not match: region is [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …] (required: region is "eu").',
        ),
        (
            BOTH,
            {"region": "eu", "total": 10**5000, "x": 1},
            'Matches: region is "eu" and total is an integer beyond 64 bits.',
        ),
        (BOTH, {"region": "x" * 10**6}, f'Does not match: region is "{"x" * 59}… (required: region is "eu").'),
        (BOTH, {"region": "\ud800"}, r'Does not match: region is "\ud800" (required: region is "eu").'),
        (BOTH, {"region": {1}}, 'Does not match: region is of type set (required: region is "eu").'),
        ({"a": [{"exists": False}]}, {}, "Matches: a is missing."),
        (
            {"a": ["x", {"prefix": "y"}]},
            {"a": "z"},
            'Does not match: a is "z" (required: a is "x" or a begins with "y").',
        ),
        (EITHER, {"s": 1, "a": 1}, "Matches: a is 1 and s is 1."),
        (EITHER, {"s": 1, "b": 2, "c": 3}, "Matches: b is 2 and c is 3 and s is 1."),
        (
            EITHER,
            {"s": 1, "b": 2},
            "Does not match: a is missing and c is missing (required: a is 1 or (b is 2 and c is 3)).",
        ),
        (EITHER, {"a": 1}, "Does not match: s is missing (required: s is 1)."),
        (
            {"$or": [{"a": [1]}, {"a": [{"prefix": "x"}]}]},
            {"a": 2},
            'Does not match: a is 2 (required: a is 1 or a begins with "x").',
        ),
        (ITEMS, {"items": {"sku": "a", "qty": 5}}, 'Matches: items.qty is 5 and items.sku is "a".'),
        (ITEMS, {"items": [{}, {"sku": "a", "qty": 5}]}, 'Matches: items.qty is 5 and items.sku is "a".'),
        (ITEMS, {"items": [{"sku": "b", "qty": 5}]}, 'Does not match: items.sku is "b" (required: items.sku is "a").'),
        (ITEMS, {"items": "a"}, "Does not match: items.qty is missing (required: items.qty > 1)."),
        (
            ITEMS,
            {"items": [{"sku": "b", "qty": 5}, {}]},
            'Does not match: none of the 2 objects in items matches (required: items.qty > 1 and items.sku is "a").',
        ),
    ],
)
def test_explanation(policy, metadata, text):
    assert parse(policy).explain(metadata) == text


# -- anything -----------------------------------------------------------------

texts = st.text(max_size=4) | st.sampled_from(["eu", "EU", "us-1", "ß", "SS", "10.0.0.1", ""])
keys = st.sampled_from(["a", "b", "c", "", "x.y"])
utf8 = st.text(st.characters(codec="utf-8"), max_size=4) | st.sampled_from(["eu", "EU", "us-", "ß", "SS", "İ"])
whole = st.integers(-(2**63), 2**64 - 1) | st.integers(-3, 3)
numbers = whole | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.5, 1.0, -0.0])
scalars = st.none() | st.booleans() | numbers | utf8


def some(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return strategy | st.lists(strategy, min_size=1, max_size=3)


filled = utf8.filter(bool)
comparisons = st.sampled_from(["=", "<", "<=", ">", ">="])
ranges = st.tuples(
    st.sampled_from([">", ">="]), st.integers(-9, 0), st.sampled_from(["<", "<="]), st.integers(1, 9) | st.just(1.5)
)
OPERATORS = st.one_of(
    st.fixed_dictionaries({"prefix": filled}),
    st.fixed_dictionaries({"suffix": filled}),
    st.fixed_dictionaries({"equals-ignore-case": utf8}),
    st.fixed_dictionaries({"anything-but": some(scalars)}),
    st.fixed_dictionaries({"anything-but": st.fixed_dictionaries({"prefix": some(filled)})}),
    st.fixed_dictionaries({"anything-but": st.fixed_dictionaries({"suffix": some(filled)})}),
    st.fixed_dictionaries({"anything-but": st.fixed_dictionaries({"equals-ignore-case": some(utf8)})}),
    st.fixed_dictionaries({"numeric": st.tuples(comparisons, numbers).map(list) | ranges.map(list)}),
    st.fixed_dictionaries({"exists": st.booleans()}),
    st.fixed_dictionaries({"cidr": st.sampled_from(["10.0.0.0/8", "::/0", "10.0.0.1"])}),
)


# Composite strategies have short names: Hypothesis warns about long ones, and these are recursive.
@st.composite
def operator(draw):
    return draw(OPERATORS)


operators = operator()


@st.composite
def leaf(draw):
    return draw(st.lists(scalars | operators, min_size=1, max_size=3))


@st.composite
def group(draw, inner):
    policy = draw(st.dictionaries(keys, leaf() | inner, max_size=3))
    if not policy or draw(st.booleans()):
        policy["$or"] = draw(st.lists(inner, min_size=2, max_size=3, unique_by=lambda one: parse(one).text))
    return policy


policies = st.recursive(st.dictionaries(keys, leaf(), min_size=1, max_size=3), group, max_leaves=4)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | texts, inner, max_size=3),
    max_leaves=8,
)
metadata = st.dictionaries(keys | st.just("$or"), values, max_size=5)


@PATIENT
@given(policies, st.lists(metadata, max_size=5))
def test_the_canonical_form_is_the_same_policy(policy, messages):
    found = parse(policy)
    again = parse(json.loads(json.dumps(found.as_json())))
    assert again == found
    assert again.text == found.text
    assert str(again) == str(found)
    for message in messages:
        assert again.matches(message) is found.matches(message)


@PATIENT
@given(policies, metadata)
def test_no_metadata_raises_an_exception_and_the_explanation_agrees(policy, message):
    found = parse(policy)
    matches = found.matches(message)
    assert type(matches) is bool
    assert found.explain(message).startswith("Matches: " if matches else "Does not match: ")
    found.explain(message).encode()
    assert found.matches(message) is matches


@PATIENT
@given(policies, policies, metadata)
def test_or_is_or_and_keys_are_and(one, other, message):
    first, second = parse(one), parse(other)
    if first != second:
        either = parse({"$or": [one, other]})
        assert either.matches(message) == (first.matches(message) or second.matches(message))
    nested = parse({"n": one, "m": other})
    assert nested.matches({"n": message, "m": message}) == (first.matches(message) and second.matches(message))


@PATIENT
@given(st.lists(scalars | operators, min_size=1, max_size=3), values)
def test_a_list_is_an_or_of_its_values(conditions, value):
    message = {"a": value}
    assert parse({"a": conditions}).matches(message) == any(parse({"a": [one]}).matches(message) for one in conditions)


@PATIENT
@given(scalars | operators.filter(lambda one: "exists" not in one), st.lists(values, min_size=1, max_size=3))
def test_an_array_matches_if_one_of_its_elements_does(condition, elements):
    policy = parse({"a": [condition]})
    assert policy.matches({"a": elements}) == any(policy.matches({"a": one}) for one in elements)


@PATIENT
@given(
    st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner)) | values
)
def test_any_policy_is_parsed_or_refused_with_its_place(policy):
    operands = ({"a": [{name: policy}]} for name in filter_policies.OPERATORS)
    for one in (policy, {"a": policy}, {"a": [policy]}, {"$or": policy}, *operands):
        refused = ""
        try:
            parse(one)
        except ValueError as error:
            refused = str(error)
        assert re.match(r"filter(\[.*\])?: |$", refused, re.DOTALL)


@pytest.mark.parametrize(
    "value",
    [DEEP, [{"key": n} for n in range(10_000)], 10**5000, "x" * 10**6, "\ud800", NAN, {"key": DEEP}, [[], [[]], {}]],
    ids=type,
)
def test_hostile_metadata_is_harmless(value):
    for conditions, *_ in VALUES:
        for policy in (parse({"key": conditions}), parse({"key": {"key": conditions}})):
            policy.matches({"key": value})
            assert len(policy.explain({"key": value})) < 2_000
