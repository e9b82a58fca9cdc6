"""Conditions of the filter language on one value of a message's metadata: exact values and operators.

The functions parse a value of a policy's list, compile it, and put it in its canonical form.
"""

from __future__ import annotations

import ipaddress
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from types import NoneType
from typing import Any, NamedTuple, NoReturn

from django_mysqlqueue.arguments import SHOWN, cut, is_unicode, shown
from django_mysqlqueue.text.humanize import close_names, did_you_mean

SHOWN_VALUES = 10
"""Maximum number of values in the text of one condition."""
IGNORE_CASE = "equals-ignore-case"
ANYTHING_BUT = "anything-but"
UNSUPPORTED = ("wildcard",)
"""Operators that Amazon EventBridge has, but SNS has not."""

Test = Callable[[Any], bool]
"""Returns whether a scalar matches."""
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Condition(NamedTuple):
    """One value of a key's list, or all exact ones of it."""

    values: list[Any]
    """The canonical values of the list."""
    text: str
    """What people read after the key."""
    test: Test
    size: int = 1
    """Number of values that were given."""
    is_range: bool = False
    """Whether the text contains ``and``."""


def refuse(place: str, rule: str) -> NoReturn:
    """Raise the error about a place of a policy.

    ``place``: the place, for example ``filter['region'][0]``.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{place}: {rule}")


# -- values of metadata -------------------------------------------------------

SCALARS = frozenset({str, int, float, bool, NoneType})
NOTHING = ()
"""The value of a missing key. It is an empty array, because an empty array counts as missing."""


def flat(value: Any) -> Iterator[Any]:
    """Yield a value, or if it is an array, its elements and those of the arrays in it. This does not recurse."""
    levels = [iter((value,))]
    while levels:
        for one in levels[-1]:
            if isinstance(one, (list, tuple)):
                levels.append(iter(one))
                break
            yield one
        else:
            levels.pop()


def scalars(value: Any) -> list[Any]:
    """Return the scalars that the conditions of a key are compared with. Objects have none."""
    return [one for one in flat(value) if type(one) in SCALARS]


def is_present(value: Any) -> bool:
    """Return whether a scalar counts as a value, as SNS documents it for ``exists``: it is neither null nor empty."""
    return value is not None and value != ""


# -- exact values -------------------------------------------------------------


def parse_scalar(value: object, place: str) -> Any:
    """Return an exact value of a policy in its canonical form: 300.0 becomes 300.

    Raises:
        ValueError: it is not a value of JSON, or metadata could not contain it.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return parse_string(value, place)
    if isinstance(value, (int, float)):
        return parse_number(value, place)
    refuse(place, f"must be a string, a number, True, False or None, not {named(value)}")


def parse_string(value: object, place: str) -> str:
    """Return a string of a policy, without the class of an enum's member.

    Raises:
        ValueError: it is not a string, or UTF-8 cannot encode it.
    """
    if not isinstance(value, str):
        refuse(place, f"must be a string, not {named(value)}")
    text = str.__str__(value)
    if not is_unicode(text):
        refuse(place, "contains a lone surrogate, which UTF-8 cannot encode")
    return text


def parse_number(value: object, place: str) -> float:
    """Return a number of a policy: an integer, unless it has a fraction or is beyond 64 bits.

    Raises:
        ValueError: it is not a number, or metadata could not contain it.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(place, f"must be a number, not {named(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        refuse(place, f"must be a finite number, not {value!r}")
    fits = -(2**63) <= value < 2**64
    if isinstance(value, float) and not (fits and value.is_integer()):
        return float(value)
    if not fits:
        refuse(place, "must fit in 64 bits, as the integers of metadata do")
    return int(value)


def exact(values: Iterable[Any]) -> Condition:
    """Return the condition that a value is one of some values. Python's ``True == 1`` does not count."""
    given = list(values)
    booleans = frozenset(value for value in given if type(value) is bool)
    others = frozenset(value for value in given if type(value) is not bool)
    numbers = sorted(value for value in others if type(value) in (int, float))
    strings = sorted(value for value in others if type(value) is str)
    ordered: list[Any] = [*({None} & others), *sorted(booleans), *numbers, *strings]

    def test(value: Any) -> bool:
        return value in booleans if type(value) is bool else value in others

    return Condition(ordered, _counted("is {}", "is one of {}", ordered), test, len(given))


# -- operators ----------------------------------------------------------------


def parse_operator(value: Mapping[Any, Any], place: str) -> Condition:
    """Return the condition of a dict with an operator.

    Raises:
        ValueError: it is not one operator with a valid operand; the text names the place and the rule.
    """
    if len(value) != 1:
        refuse(place, f"must be a dict with one operator, not {len(value)}")
    ((name, operand),) = value.items()
    if name in UNSUPPORTED:
        refuse(place, f"the operator {name!r} is not supported. Use prefix, suffix or {IGNORE_CASE}")
    if not isinstance(name, str) or name not in OPERATORS:
        near = close_names(name, OPERATORS, most=1) if isinstance(name, str) else []
        hint = did_you_mean(near) or f"Operators: {', '.join(OPERATORS)}"
        refuse(place, f"there is no operator {shown(name)}. {hint}")
    return OPERATORS[name](operand, f"{place}[{name!r}]")


def _of_text(name: str, operand: object, place: str) -> Condition:
    kind = TEXT_OPERATORS[name]
    text = kind.parse(operand, place)
    return Condition([{name: text}], kind.text.format(quoted(text)), kind.make([text]))


def _anything_but(operand: object, place: str) -> Condition:
    if isinstance(operand, Mapping):
        return _anything_but_texts(operand, place)
    found = exact(_each(operand, place, parse_scalar))
    text = _counted("is not {}", "is none of {}", found.values)
    return Condition([{ANYTHING_BUT: found.values}], text, _not(found.test), found.size)


def _anything_but_texts(operand: Mapping[Any, Any], place: str) -> Condition:
    name = next(iter(operand), None)
    if len(operand) != 1 or name not in TEXT_OPERATORS:
        refuse(place, f"must be a value, a list of values, or a dict with one of {', '.join(TEXT_OPERATORS)}")
    kind = TEXT_OPERATORS[name]
    given = _each(operand[name], f"{place}[{name!r}]", kind.parse)
    values = sorted(set(given))
    text = _counted(kind.negated, kind.negated, values)
    canonical = values[0] if len(values) == 1 else values
    return Condition([{ANYTHING_BUT: {name: canonical}}], text, _not(kind.make(values)), len(given))


def _numeric(operand: object, place: str) -> Condition:
    if not isinstance(operand, (list, tuple)) or len(operand) not in (2, 4):
        refuse(place, "must be a list of a comparison and a number, or of two of them for a range, such as ['>=', 100]")
    pairs = []
    for index in range(0, len(operand), 2):
        sign = operand[index]
        if not isinstance(sign, str) or sign not in COMPARISONS:
            refuse(f"{place}[{index}]", f"must be one of {', '.join(COMPARISONS)}, not {named(sign)}")
        pairs.append((sign, parse_number(operand[index + 1], f"{place}[{index + 1}]")))
    if len(pairs) == 2:
        return _range(*sorted(pairs, key=lambda pair: not pair[0].startswith(">")), place=place)
    ((sign, bound),) = pairs
    if sign == "=":
        return exact([bound])
    return Condition([{"numeric": [sign, bound]}], f"{sign} {bound!r}", _compares(sign, bound))


def _range(lower: tuple[str, float], upper: tuple[str, float], *, place: str) -> Condition:
    if not lower[0].startswith(">") or not upper[0].startswith("<"):
        refuse(place, "must have one lower bound (> or >=) and one upper bound (< or <=)")
    if lower[1] >= upper[1]:
        refuse(place, f"the lower bound {lower[1]!r} must be less than the upper bound {upper[1]!r}")
    above, below = _compares(*lower), _compares(*upper)
    text = f"{lower[0]} {lower[1]!r} and {upper[0]} {upper[1]!r}"
    return Condition(
        [{"numeric": [*lower, *upper]}], text, lambda value: above(value) and below(value), 2, is_range=True
    )


def _exists(operand: object, place: str) -> Condition:
    if not isinstance(operand, bool):
        refuse(place, f"must be True or False, not {named(operand)}")
    return EXISTS if operand else ABSENT


def _cidr(operand: object, place: str) -> Condition:
    text = parse_string(operand, place)
    try:
        network = ipaddress.ip_network(text)
    except ValueError:
        refuse(place, f"must be a network without host bits, such as '10.0.0.0/24', not {named(text)}")
    return Condition([{"cidr": str(network)}], f"is an address in {network}", _is_in(network))


def _each(operand: object, place: str, parse: Callable[[object, str], Any]) -> list[Any]:
    """Parse a value or a list of values."""
    if not isinstance(operand, (list, tuple)):
        return [parse(operand, place)]
    if not operand:
        refuse(place, "must not be an empty list")
    return [parse(one, f"{place}[{index}]") for index, one in enumerate(operand)]


def _affix(operand: object, place: str) -> str:
    text = parse_string(operand, place)
    if not text:
        refuse(place, "must not be empty, because every string would match")
    return text


def _folded(operand: object, place: str) -> str:
    return parse_string(operand, place).casefold()


# -- tests --------------------------------------------------------------------


def _begins_with(values: list[str]) -> Test:
    prefixes = tuple(values)
    return lambda value: type(value) is str and value.startswith(prefixes)


def _ends_with(values: list[str]) -> Test:
    suffixes = tuple(values)
    return lambda value: type(value) is str and value.endswith(suffixes)


def _equals_in_any_case(values: list[str]) -> Test:
    folded = frozenset(values)
    return lambda value: type(value) is str and value.casefold() in folded


def _not(test: Test) -> Test:
    """Negate a test. Null is not a value, so that it does not match either."""
    return lambda value: value is not None and not test(value)


def _compares(sign: str, bound: float) -> Test:
    """Compare without rounding, as Python compares integers with floats."""
    compare = COMPARISONS[sign]
    return lambda value: (type(value) is int or type(value) is float) and compare(value, bound)


def _is_in(network: Network) -> Test:
    def test(value: Any) -> bool:
        if type(value) is not str or "%" in value:  # an address with a zone belongs to one machine
            return False
        try:
            return ipaddress.ip_address(value) in network
        except ValueError:
            return False

    return test


class _TextOperator(NamedTuple):
    parse: Callable[[object, str], str]
    make: Callable[[list[str]], Test]
    """Returns the test for some strings, of which one must match."""
    text: str
    negated: str
    """The text in ``anything-but``."""


TEXT_OPERATORS: dict[Any, _TextOperator] = {
    "prefix": _TextOperator(_affix, _begins_with, "begins with {}", "does not begin with {}"),
    "suffix": _TextOperator(_affix, _ends_with, "ends with {}", "does not end with {}"),
    IGNORE_CASE: _TextOperator(_folded, _equals_in_any_case, "equals {} in any case", "does not equal {} in any case"),
}
OPERATORS: dict[str, Callable[[object, str], Condition]] = {
    **{name: partial(_of_text, name) for name in TEXT_OPERATORS},
    ANYTHING_BUT: _anything_but,
    "numeric": _numeric,
    "exists": _exists,
    "cidr": _cidr,
}
"""The parsers of the operators' operands."""
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
EXISTS = Condition([{"exists": True}], "exists", is_present)
ABSENT = Condition([{"exists": False}], "does not exist", lambda value: not is_present(value))
"""For an array, the test of a key requires that it holds for all elements."""


# -- text ---------------------------------------------------------------------


def named(value: object) -> str:
    """Return a value for an error about it, or the name of its type if its text could be long."""
    if isinstance(value, (str, float)) or value is None or (isinstance(value, int) and abs(value) < 2**64):
        return shown(value)
    return type(value).__name__


def quoted(value: Any) -> str:
    """Return a scalar as JSON, at most ``SHOWN`` characters long."""
    if type(value) is int and abs(value) >= 2**64:
        return "an integer beyond 64 bits"  # Python refuses to write those of more than 4,300 digits
    if type(value) is not str:
        return json.dumps(value)
    text = json.dumps(value[: SHOWN + 1], ensure_ascii=False)
    return cut(text.encode("utf-8", "backslashreplace").decode())


def found(value: Any) -> str:
    """Return what people read after a key: the value that a message has there."""
    if value is NOTHING:
        return "is missing"
    if isinstance(value, Mapping):
        return "is an object"
    if not isinstance(value, (list, tuple)):
        return f"is {quoted(value)}" if type(value) in SCALARS else f"is of type {type(value).__name__}"
    elements = list(islice((one for one in flat(value) if type(one) in SCALARS), SHOWN_VALUES + 1))
    if not elements:
        return "is an array without values"
    more = ", …" if len(elements) > SHOWN_VALUES else ""
    return f"is [{', '.join(map(quoted, elements[:SHOWN_VALUES]))}{more}]"


def _counted(one: str, several: str, values: list[Any]) -> str:
    shown = ", ".join(map(quoted, values[:SHOWN_VALUES]))
    if len(values) > SHOWN_VALUES:
        shown += f" and {len(values) - SHOWN_VALUES:,} more"
    return (one if len(values) == 1 else several).format(shown)
