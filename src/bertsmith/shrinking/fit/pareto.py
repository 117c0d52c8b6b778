"""Which candidates nothing else beats in everything."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def pareto_front(items: Sequence[T], cost: Callable[[T], float], score: Callable[[T], float]) -> list[T]:
    """The items that no other one beats in cost and score together, cheapest first.

    >>> pareto_front([(3, 9.0), (1, 5.0), (2, 4.0), (3, 8.0)], lambda p: p[0], lambda p: p[1])
    [(1, 5.0), (3, 9.0)]
    """
    front: list[T] = []
    for item in sorted(items, key=lambda one: (cost(one), -score(one))):
        if not front or score(item) > score(front[-1]):
            front.append(item)
    return front
