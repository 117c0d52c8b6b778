"""Stop a run at an exact point, as kill -9 would."""

import pytest


class Killed(BaseException):
    """Simulates kill -9 at an exact point; a BaseException, so that no handler catches it."""


def kill_at(patch: pytest.MonkeyPatch, owner: object, name: str, *, after: int, before_it: bool) -> None:
    """Raise Killed at call number `after` of a function, before or after the call."""
    real, calls = getattr(owner, name), []

    def call(*arguments: object, **more: object) -> object:
        calls.append(name)
        if len(calls) == after and before_it:
            raise Killed
        result = real(*arguments, **more)
        if len(calls) == after:
            raise Killed
        return result

    patch.setattr(owner, name, call)
