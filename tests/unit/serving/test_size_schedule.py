"""The schedule of sizes and the switch: which sizes there are, when it goes down, and that it does not flap."""

from collections.abc import Callable

import pytest
from scheduler_cases import record_of

from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.serving.size_schedule import Size, SizeController, SizeSchedule

WHOLE, NARROW, SMALL = None, Subnet(width=0.5), Subnet(width=0.5, depth=0.5)


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("floor", "sizes"),
    [
        (None, [WHOLE]),
        (1.0, [WHOLE]),
        (0.98, [WHOLE, NARROW]),
        (0.9, [WHOLE, NARROW, SMALL]),
        (0.01, [WHOLE, NARROW, SMALL]),
    ],
)
def test_a_floor_decides_which_sizes_may_answer(floor: float | None, sizes: list[Subnet | None]) -> None:
    """The one that is slower and worse than another is in no schedule."""
    assert [size.subnet for size in SizeSchedule.of(record_of(), floor).sizes] == sizes


def test_rungs_know_how_fast_and_how_good_they_are() -> None:
    sizes = SizeSchedule.of(record_of(), 0.9).sizes
    assert [size.score for size in sizes] == [90.0, 89.0, 86.0]
    assert [size.speed for size in sizes] == pytest.approx([1, 8 / 5, 8 / 3])


def test_a_smaller_size_that_is_better_leaves_out_those_between() -> None:
    """Nobody wants a size that is slower and worse than the next one."""
    grid = ((1.0, 1.0, 90.0, 8.0), (0.5, 1.0, 88.0, 5.0), (0.5, 0.5, 91.0, 3.0))
    assert [size.subnet for size in SizeSchedule.of(record_of(grid), 0.9).sizes] == [WHOLE, SMALL]


@pytest.mark.parametrize("floor", [0.0, -1.0, 1.01, 97.0, float("nan")])
def test_a_floor_is_a_share(floor: float) -> None:
    with pytest.raises(InputError, match=r"floor is .*; allowed: a share of the whole model's score"):
        SizeSchedule.of(record_of(), floor)


def test_a_record_without_the_whole_model_has_no_share_to_keep() -> None:
    with pytest.raises(InputError, match="no width 1 at depth 1"):
        SizeSchedule.of(record_of([(0.5, 1.0, 89.0, 5.0)]), 0.9)


def test_a_model_without_a_record_has_one_size() -> None:
    assert SizeSchedule.of(None, 0.9).sizes == (Size(None),)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def switch(clock: Clock) -> SizeController:
    """Three sizes of 1000, 1600 and 2667 tokens a second; half a second may be waited for."""
    return SizeController(
        SizeSchedule.of(record_of(), 0.9), target=0.5, quiet=10.0, tokens_per_second=1000.0, clock=clock
    )


def test_it_goes_down_step_by_step_while_too_much_waits(switch: SizeController) -> None:
    assert switch.choose(500) == 0
    assert switch.choose(501) == 1
    assert switch.choose(700) == 1  # 0.44 s at this size
    assert switch.choose(900) == 2
    assert switch.choose(10**6) == 2


def test_it_goes_down_when_the_queue_was_full(switch: SizeController) -> None:
    """A short queue never holds enough to wait for long, and refuses all the same."""
    switch.refuse()
    assert [switch.choose(10), switch.choose(10)] == [1, 1]
    switch.refuse()
    assert switch.choose(10) == 2


def run(switch: SizeController, clock: Clock, seconds: float, asked: int, waiting: int) -> list[int]:
    """The levels chosen in a time in which so many tokens are asked every second and so many wait."""
    levels = []
    for _ in range(int(seconds * 10)):
        clock.now += 0.1
        switch.ask(asked // 10)
        levels.append(switch.choose(waiting))
    return levels


def test_it_goes_up_only_after_it_was_quiet_for_long(switch: SizeController, clock: Clock) -> None:
    switch.choose(10**6), switch.choose(10**6)
    assert set(run(switch, clock, 9.0, asked=100, waiting=10)) == {2}
    levels = run(switch, clock, 30.0, asked=100, waiting=10)
    assert levels[-1] == 0
    assert levels == sorted(levels, reverse=True)
    assert levels.count(1) == pytest.approx(100, abs=2)  # the next quiet time is another


def test_it_stays_down_while_the_larger_size_could_not_do_what_is_asked(switch: SizeController, clock: Clock) -> None:
    """Nothing waits because the small size is fast enough: going up would bring the queue back, and so on for ever."""
    switch.choose(600)
    assert set(run(switch, clock, 60.0, asked=1200, waiting=0)) == {1}
    assert run(switch, clock, 40.0, asked=500, waiting=0)[-1] == 0


def test_a_burst_in_a_quiet_time_begins_it_anew(switch: SizeController, clock: Clock) -> None:
    switch.choose(600)
    run(switch, clock, 9.0, asked=10, waiting=0)
    assert switch.choose(500) == 1  # more than half the target
    assert set(run(switch, clock, 9.5, asked=10, waiting=0)) == {1}
    assert run(switch, clock, 1.0, asked=10, waiting=0)[-1] == 0


def test_after_a_silence_the_whole_model_answers(switch: SizeController, clock: Clock) -> None:
    """No batch was there to see the quiet times."""
    switch.ask(10**6), switch.choose(10**6), switch.choose(10**6)
    clock.now += 100.0
    assert switch.choose(10) == 0


def test_a_silence_of_one_quiet_time_is_one_step(switch: SizeController, clock: Clock) -> None:
    switch.ask(10), switch.choose(10**6), switch.choose(10**6)
    clock.now += 10.5
    assert switch.choose(10) == 1


def test_to_look_at_it_is_no_step_down(switch: SizeController) -> None:
    assert [switch.relax(10**6) for _ in range(3)] == [0, 0, 0]


def test_it_learns_how_fast_sizes_are(switch: SizeController) -> None:
    for _ in range(50):
        switch.learn(0, 4000, 1.0)
    assert switch.choose(1900) == 0
    assert switch.expected_wait(4000) == pytest.approx(1.0, rel=0.01)


def test_what_it_remembers_is_bounded(switch: SizeController, clock: Callable[[], float]) -> None:
    assert isinstance(clock, Clock)
    run(switch, clock, 100.0, asked=100, waiting=0)
    for _ in range(10_000):
        switch.ask(1)
    assert len(switch._asked) <= 22
