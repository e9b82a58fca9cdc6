"""Names of lanes, partitions by priority, and which priority has its turn."""

from __future__ import annotations

import enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_mysqlqueue.exceptions import InvalidMessage
from tests.support.internals import (
    KEY_LENGTH,
    LANE_KEY_LENGTH,
    ByPriority,
    Lane,
    Turns,
    check_priority,
    lane,
    lane_of,
    partition_text,
    priority_of,
)

keys = st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda key: not key.startswith("__p:"))
partitions = keys | st.integers(0, 99).map("__p:{}".format)
priorities = st.integers(-100, 100)


@given(partitions, priorities)
def test_a_lane_names_its_priority_and_partition(partition, priority):
    assert lane_of(lane(partition, priority)) == Lane(priority, partition)
    assert priority_of(lane(partition, priority)) == priority


@given(st.tuples(partitions, priorities), st.tuples(partitions, priorities))
def test_lanes_have_different_names(one, other):
    assert (lane(*one) == lane(*other)) == (one == other)


@pytest.mark.parametrize(
    ("partition", "priority", "name"),
    [
        ("a", 0, "a"),
        ("a", 10, "__p:+010:a"),
        ("", -100, "__p:-100:"),
        ("__p:3", 10, "__p:+010:__p:3"),
        (":=+x", 1, "__p:+001::=+x"),
    ],
)
def test_names_are_those_that_are_documented(partition, priority, name):
    assert lane(partition, priority) == name


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("__p:3", Lane(0, "__p:3")),
        ("__P:+010:a", Lane(0, "__P:+010:a")),
    ],
)
def test_names_without_a_lane(name, found):
    assert lane_of(name) == found
    assert priority_of(name) == found.priority


@pytest.mark.parametrize("priority", [-100, 0, 100])
def test_possible_priorities(priority):
    assert check_priority(priority) == priority


def test_members_of_an_enumeration_are_integers():
    class Priority(enum.IntEnum):
        HIGH = 10

    assert type(check_priority(Priority.HIGH)) is int
    assert lane("a", check_priority(Priority.HIGH)) == "__p:+010:a"


@pytest.mark.parametrize("priority", [101, -101, 1.0, "5", True, None])
def test_impossible_priorities(priority):
    with pytest.raises(InvalidMessage, match=f"priority {priority!r}: must be an integer from -100 to 100"):
        check_priority(priority)


def test_the_longest_key():
    assert len(lane("k" * LANE_KEY_LENGTH, 1)) == KEY_LENGTH
    with pytest.raises(InvalidMessage, match="182 characters, but with a priority at most 181 are allowed"):
        lane("k" * (LANE_KEY_LENGTH + 1), 1)
    assert lane("k" * KEY_LENGTH, 0) == "k" * KEY_LENGTH


@pytest.mark.parametrize(
    ("name", "text", "quoted"),
    [
        ("ada", "ada", "'ada'"),
        ("", "''", "''"),
        ("__p:3", "__p:3", "'__p:3'"),
        ("__p:+010:ada", "ada (priority 10)", "'ada' (priority 10)"),
        ("__p:-100:__p:3", "__p:3 (priority -100)", "'__p:3' (priority -100)"),
        ("__p:+010:", "'' (priority 10)", "'' (priority 10)"),
    ],
)
def test_names_for_people(name, text, quoted):
    assert partition_text(*lane_of(name)) == text
    assert partition_text(*lane_of(name), quoted=True) == quoted


# -- partitions by priority ---------------------------------------------------

names = st.sampled_from([lane(key, priority) for key in "abc" for priority in (-5, 0, 5)])


@given(st.lists(st.tuples(st.sampled_from(["set", "pop", "to_end", "clear"]), names), max_size=30))
def test_partitions_are_a_dict_in_the_order_of_priorities(actions):
    model: dict[str, int] = {}
    mapping = ByPriority[int]()
    for number, (action, name) in enumerate(actions):
        if action == "set":
            model[name] = mapping[name] = number
        elif action == "pop":
            assert mapping.pop(name, None) == model.pop(name, None)
        elif action == "to_end":
            mapping.to_end([name])
            if name in model:
                model[name] = model.pop(name)
        else:
            model.clear()
            mapping.clear()
        assert (name in mapping) == (name in model)
    assert list(mapping.items()) == sorted(model.items(), key=lambda item: -priority_of(item[0]))
    assert (len(mapping), bool(mapping)) == (len(model), bool(model))
    assert mapping.priorities() == sorted({priority_of(name) for name in model}, reverse=True)
    for priority in (-5, 0, 5):
        assert list(mapping.of(priority)) == [name for name in model if priority_of(name) == priority]
    with pytest.raises(KeyError):
        mapping["missing"]


# -- turns --------------------------------------------------------------------


def turns(count, share, *among):
    found, decided = [], Turns()
    for _ in range(count):
        order = decided.order(among, share)
        assert sorted(order) == sorted(among)
        decided.took(order[0], among)
        found.append(order[0])
    return found


@pytest.mark.parametrize("share", [2, 3, 16])
def test_one_turn_in_so_many_is_of_a_lower_priority(share):
    found = turns(10 * share, share, 0, 5)
    assert found == ([5] * (share - 1) + [0]) * 10


def test_lower_priorities_take_turns():
    assert turns(12, 3, 7, -1, 3) == [7, 7, 3, 7, 7, -1] * 2


def test_without_a_share_lower_priorities_have_no_turn():
    assert set(turns(100, 0, 0, 5)) == {5}


def test_turns_without_a_choice_do_not_count():
    """Otherwise a message with a high priority could wait for one with a low priority that came with it."""
    decided = Turns()
    for _ in range(100):
        decided.took(0, [0])
    assert decided.order([0, 5], 16) == [5, 0]
