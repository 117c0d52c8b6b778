"""A run that ends at an exact moment, as kill -9 would end it."""

import pytest


class Killed(BaseException):
    """What stands for kill -9 where the moment must be exact: nothing in between handles it."""


def killed(patch: pytest.MonkeyPatch, owner: object, name: str, *, after: int, before_it: bool) -> None:
    """The run ends at call number `after` of a function, before it does anything or once it is done."""
    real, calls = getattr(owner, name), []

    def call(*arguments: object, **more: object) -> object:
        calls.append(name)
        if len(calls) == after and before_it:
            raise Killed
        done = real(*arguments, **more)
        if len(calls) == after:
            raise Killed
        return done

    patch.setattr(owner, name, call)
