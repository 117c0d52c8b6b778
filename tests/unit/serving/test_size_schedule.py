"""Size schedules and their controller: which sizes are served, when the size goes down and up, and no oscillation."""

from collections.abc import Callable

import pytest
from scheduler_cases import record_of

from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.serving.size_schedule import ServedSize, SizeController, SizeSchedule

WHOLE, NARROW, SMALL = None, Subnet(width=0.5), Subnet(width=0.5, depth=0.5)


class Clock:
    """A clock that the test sets."""

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
def test_floor_selects_the_sizes(floor: float | None, sizes: list[Subnet | None]) -> None:
    """A size that is slower and worse than another is left out."""
    assert [size.subnet for size in SizeSchedule.of(record_of(), floor).sizes] == sizes


def test_sizes_have_scores_and_speeds() -> None:
    sizes = SizeSchedule.of(record_of(), 0.9).sizes
    assert [size.score for size in sizes] == [90.0, 89.0, 86.0]
    assert [size.speed for size in sizes] == pytest.approx([1, 8 / 5, 8 / 3])


def test_dominated_sizes_are_left_out() -> None:
    grid = ((1.0, 1.0, 90.0, 8.0), (0.5, 1.0, 88.0, 5.0), (0.5, 0.5, 91.0, 3.0))
    assert [size.subnet for size in SizeSchedule.of(record_of(grid), 0.9).sizes] == [WHOLE, SMALL]


@pytest.mark.parametrize("floor", [0.0, -1.0, 1.01, 97.0, float("nan")])
def test_floor_out_of_range_raises(floor: float) -> None:
    with pytest.raises(InputError, match=r"floor is .*; allowed: a share of the whole model's score"):
        SizeSchedule.of(record_of(), floor)


def test_record_without_the_whole_model_raises() -> None:
    with pytest.raises(InputError, match="no width 1 at depth 1"):
        SizeSchedule.of(record_of([(0.5, 1.0, 89.0, 5.0)]), 0.9)


def test_model_without_a_record_has_one_size() -> None:
    assert SizeSchedule.of(None, 0.9).sizes == (ServedSize(None),)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def controller(clock: Clock) -> SizeController:
    """Three sizes of 1000, 1600 and 2667 tokens per second; the target is a wait of 0.5 s."""
    return SizeController(
        SizeSchedule.of(record_of(), 0.9), target=0.5, quiet=10.0, tokens_per_second=1000.0, clock=clock
    )


def test_level_goes_down_step_by_step_under_load(controller: SizeController) -> None:
    assert controller.choose(500) == 0
    assert controller.choose(501) == 1
    assert controller.choose(700) == 1  # 0.44 s at this size
    assert controller.choose(900) == 2
    assert controller.choose(10**6) == 2


def test_level_goes_down_after_a_refusal(controller: SizeController) -> None:
    """A short queue rejects requests although its expected wait is short."""
    controller.count_refusal()
    assert [controller.choose(10), controller.choose(10)] == [1, 1]
    controller.count_refusal()
    assert controller.choose(10) == 2


def run(controller: SizeController, clock: Clock, seconds: float, demand: int, waiting: int) -> list[int]:
    """Return the levels chosen at a constant demand in tokens per second and a constant queue."""
    levels = []
    for _ in range(int(seconds * 10)):
        clock.now += 0.1
        controller.count_demand(demand // 10)
        levels.append(controller.choose(waiting))
    return levels


def test_level_goes_up_only_after_a_quiet_period(controller: SizeController, clock: Clock) -> None:
    controller.choose(10**6), controller.choose(10**6)
    assert set(run(controller, clock, 9.0, demand=100, waiting=10)) == {2}
    levels = run(controller, clock, 30.0, demand=100, waiting=10)
    assert levels[-1] == 0
    assert levels == sorted(levels, reverse=True)
    assert levels.count(1) == pytest.approx(100, abs=2)


def test_level_stays_down_while_the_larger_size_is_too_slow_for_the_demand(
    controller: SizeController, clock: Clock
) -> None:
    """The queue is empty because the small size is fast enough; going up would fill it again."""
    controller.choose(600)
    assert set(run(controller, clock, 60.0, demand=1200, waiting=0)) == {1}
    assert run(controller, clock, 40.0, demand=500, waiting=0)[-1] == 0


def test_burst_restarts_the_quiet_period(controller: SizeController, clock: Clock) -> None:
    controller.choose(600)
    run(controller, clock, 9.0, demand=10, waiting=0)
    assert controller.choose(500) == 1  # more than half the target
    assert set(run(controller, clock, 9.5, demand=10, waiting=0)) == {1}
    assert run(controller, clock, 1.0, demand=10, waiting=0)[-1] == 0


def test_whole_model_answers_after_a_pause(controller: SizeController, clock: Clock) -> None:
    controller.count_demand(10**6), controller.choose(10**6), controller.choose(10**6)
    clock.now += 100.0
    assert controller.choose(10) == 0


def test_pause_of_one_quiet_period_is_one_step(controller: SizeController, clock: Clock) -> None:
    controller.count_demand(10), controller.choose(10**6), controller.choose(10**6)
    clock.now += 10.5
    assert controller.choose(10) == 1


def test_relax_never_goes_down(controller: SizeController) -> None:
    assert [controller.relax(10**6) for _ in range(3)] == [0, 0, 0]


def test_measured_speed_replaces_the_estimate(controller: SizeController) -> None:
    for _ in range(50):
        controller.update_speed(0, 4000, 1.0)
    assert controller.choose(1900) == 0
    assert controller.expected_wait(4000) == pytest.approx(1.0, rel=0.01)


def test_memory_is_bounded(controller: SizeController, clock: Callable[[], float]) -> None:
    assert isinstance(clock, Clock)
    run(controller, clock, 100.0, demand=100, waiting=0)
    for _ in range(10_000):
        controller.count_demand(1)
    assert len(controller._demand) <= 22
