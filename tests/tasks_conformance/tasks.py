"""The tasks that the suite enqueues."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from django.db import connection

from tests.app.models import Effect

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

calls: list[Any] = []
"""What tasks were called with."""
hooks: dict[str, Callable[..., Any]] = {}
"""Functions of the test that the task ``hooked`` calls."""


class CustomError(Exception):
    """An exception of the project."""

    class Nested(Exception):
        """One whose qualified name has a dot."""


@task
def note(*args, **kwargs):
    calls.append((args, kwargs))


@task
def add(a, b=1):
    calls.append((a, b))
    return a + b


@task
def echo(value):
    return value


@task(takes_context=True)
def with_context(context, *args, **kwargs):
    calls.append((context, args, kwargs))
    return context.attempt


@task(takes_context=True)
def hooked(context, name="call"):
    return hooks[name](context)


@task
def double_dictionary(key):
    return {key: key * 2}


@task
def fail(text="no"):
    calls.append(text)
    raise ValueError(text)


@task
def fail_with(kind):
    raise {"custom": CustomError, "nested": CustomError.Nested, "exit": SystemExit, "key": KeyError}[kind]("no")


@task(takes_context=True)
def fail_first(context):
    calls.append(context.attempt)
    if context.attempt < 3:
        raise ValueError(f"attempt {context.attempt}")
    return context.attempt


@task
def return_object():
    return object()


@task
def return_tuple():
    return (1, (2, "three"))


@task
def query_nonsense():
    with connection.cursor() as cursor:
        cursor.execute("SELECT nonsense")


@task
def count_effects(name):
    return Effect.objects.filter(name=name).count()


@task
def pid():
    return os.getpid()


@task
async def add_later(a, b=1):
    await asyncio.sleep(0)
    calls.append((a, b))
    return a + b


@task(takes_context=True)
async def with_context_later(context, value):
    return [context.attempt, value]


@task
async def fail_later():
    await asyncio.sleep(0)
    raise ValueError("later")


def undecorated(value=None):
    return value


def with_wrong_context(request):
    return None


async def undecorated_later():
    return None
