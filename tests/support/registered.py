"""Functions and callables of every kind, to be registered."""

from __future__ import annotations

from tests.support.internals import handlers


def handle(delivery):
    return None


def only():
    """The one resolved handler."""
    (handler,) = handlers().values()
    return handler


async def coroutine_function(delivery):
    pass


class AsyncCallable:
    async def __call__(self, delivery):
        return "awaited", delivery


class Methods:
    def generator(self, delivery):
        yield

    async def coroutine(self, delivery):
        return "awaited", delivery

    def plain(self, delivery):
        return "called", delivery

    @staticmethod
    def static_generator(delivery):
        yield
