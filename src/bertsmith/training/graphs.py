"""Functions on a GPU that are recorded once per shape as CUDA graphs, then replayed with a single launch."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from bertsmith.data.nested import map_tensors, signature, tensors
from bertsmith.errors import InputError, first_line

EAGER_CALLS = 2
"""Calls per signature that run eagerly: they compile layers and choose kernels, which cannot be recorded."""
MAX_RECORDINGS = 64
"""Recordings of one function; further signatures run eagerly."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class RecordingError(InputError):
    """A function cannot be recorded as a CUDA graph."""


class Graphed(Generic[Arguments, Result]):
    """A function of tensors, replayed as a CUDA graph; the next call overwrites its result.

    Arguments and results are tensors in dataclasses, tuples, lists and dictionaries. One graph is recorded for every
    signature: shapes and dtypes of the tensors, and values of everything else, which become constants of the graph.
    Everything the function writes to, such as gradients, must exist before it is recorded and stay in place.

    Dropout draws new numbers at every replay: the graph reads seed and offset of PyTorch's generator when it starts, so
    a replay draws the same numbers as an eager call after the same `torch.manual_seed`.
    """

    def __init__(self, function: Callable[Arguments, Result]) -> None:
        self.function = function
        self.eager_calls: Counter[Hashable] = Counter()
        self.recordings: dict[Hashable, Recording] = {}

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        assert not kwargs, "arguments are positional"
        key = signature(args)
        recording = self.recordings.get(key)
        if recording is None:
            if self.eager_calls[key] < EAGER_CALLS or len(self.recordings) >= MAX_RECORDINGS:
                self.eager_calls[key] += 1
                return self.function(*args, **kwargs)
            earlier = next(iter(self.recordings.values()), None)
            recording = self.recordings[key] = record(self.function, args, earlier)
        result: Result = recording.replay(args)
        return result


@dataclass(frozen=True)
class Recording:
    """A recorded call."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    """The tensors that the graph reads."""
    result: Any

    def replay(self, arguments: tuple[Any, ...]) -> Any:
        for own, given in zip(self.inputs, tensors(arguments), strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.result


def record(function: Callable[..., Any], arguments: tuple[Any, ...], earlier: Recording | None) -> Recording:
    """Record a call without running it; raise RecordingError if it synchronises or the memory is not sufficient.

    It uses the memory of an earlier recording, which never runs at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    own = map_tensors(torch.clone, arguments)
    pool = None if earlier is None else earlier.graph.pool()
    random_state = torch.cuda.get_rng_state()
    try:
        # the outer context restores the stream if the end of a failed recording raises; thread_local, because the
        # loader's thread allocates pinned memory meanwhile
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            result = map_tensors(Tensor.detach, function(*own))
    except RuntimeError as error:
        _restore_generator(random_state)
        reason = first_line(error.__context__ or error)  # the end of the recording fails, too
        raise RecordingError(f'run.compile is "graphs", but the step cannot be recorded: {reason}; use "on"') from error
    return Recording(graph, tensors(own), result)


def _restore_generator(state: Tensor) -> None:
    """Set the device's generator back to a state; after a failed recording it would still be in recording mode."""
    device = torch.cuda.current_device()
    fresh = torch.Generator(device=f"cuda:{device}")
    fresh.set_state(state)
    torch.cuda.default_generators[device].graphsafe_set_state(fresh.graphsafe_get_state())
