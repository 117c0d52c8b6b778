"""Captured forward passes of a served model: on a GPU, CUDA graphs of fixed packed shapes.

The kernels of a small batch take less time than their launches. A graph launches all of them at once; its inputs and
outputs are always at the same addresses. A batch is therefore written into pinned memory, copied to the inputs of the
smallest shape that holds it, computed, and copied back. While the GPU works on one batch, another thread prepares
the next.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain
from queue import SimpleQueue
from threading import Lock
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bertsmith.data.inference import inference_autocast
from bertsmith.data.layout import SequenceLayout
from bertsmith.data.progress import Watch
from bertsmith.errors import first_line
from bertsmith.layers.subnet import Subnet
from bertsmith.models.encoder import EncoderInputs
from bertsmith.models.model import Model
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import Operation, TokenSequence
from bertsmith.serving.shapes import PackedShape, assign, shape_classes

IN_FLIGHT = 2
"""Batches that are on their way to the GPU, computed there or on their way back."""
Replay = Callable[[], None]
_Key = tuple[Operation, Subnet | None, PackedShape]


class CaptureFailed(Exception):
    """The forward passes of a model cannot be captured; the message is the reason."""


class Event(Protocol):
    """Marks the end of the work that was launched before `record`."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class Recorder(Protocol):
    """Captures functions that read and write fixed addresses."""

    device: torch.device

    def capture(self, function: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """Return the output of a function, and a function that computes it again in the same memory."""

    def launching(self) -> AbstractContextManager[object]:
        """Context manager for copies and replays, which run in the order of their launches."""

    def event(self) -> Event: ...


class CudaRecorder:
    """Captures CUDA graphs, which share their memory for activations and run on one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # which has written the weights
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        with self.launching():
            function()  # compiles and loads kernels, which a capture must not do
            with _synchronisation_raises():
                function()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # other threads may use the GPU meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = function()
            except BaseException:
                with suppress(RuntimeError):  # the capture is invalid; the first error says why
                    graph.capture_end()
                raise
            graph.capture_end()
        return output, graph.replay

    def launching(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def event(self) -> Event:
        # a blocking event lets the waiting thread sleep
        event: Event = torch.cuda.Event(blocking=True)
        return event


@contextmanager
def _synchronisation_raises() -> Iterator[None]:
    """Raise RuntimeError where the host waits for the GPU.

    It would invalidate a capture, and PyTorch's allocator does not recover from an invalid one.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class _Transfer:
    """Memory of the host for the inputs and outputs of one forward pass."""

    def __init__(self, inputs: int, outputs: int, recorder: Recorder) -> None:
        is_pinned = recorder.device.type == "cuda"
        self.inputs = torch.empty(inputs, dtype=torch.int32, pin_memory=is_pinned)
        self.outputs = torch.empty(outputs, dtype=torch.float32, pin_memory=is_pinned)
        self.done = recorder.event()

    def write(self, shape: PackedShape, sequences: Sequence[TokenSequence], pad: int) -> Tensor:
        """Write tokens, types and starts, and return the part of `inputs` that has them."""
        inputs = self.inputs[: _input_size(shape)]
        tokens, types, starts = np.split(inputs.numpy(), [shape.tokens, 2 * shape.tokens])
        lengths = [len(sequence.tokens) for sequence in sequences]
        starts[:] = shape.starts(lengths)
        end = sum(lengths)
        tokens[end:], types[:] = pad, 0
        if sequences:
            np.concatenate([sequence.tokens for sequence in sequences], out=tokens[:end], casting="same_kind")
        for sequence, start in zip(sequences, starts.tolist(), strict=False):
            if sequence.types is not None:
                types[start : start + len(sequence.types)] = sequence.types
        return inputs


class CapturedModel:
    """The captured forward passes of a model, for every size of its schedule."""

    def __init__(
        self,
        served: ServedModel,
        batch_tokens: int,
        recorder: Recorder,
        watch: Watch = lambda done, total: None,
    ) -> None:
        """Capture all forward passes; raise CaptureFailed if one cannot be captured."""
        self._served, self._recorder = served, recorder
        self._launch = Lock()
        self._operations = captured_operations(served)
        self._classes = {
            one: shape_classes(batch_tokens, served.max_length(one)) for one in sorted(set(self._operations.values()))
        }
        largest = max(_input_size(shape) for classes in self._classes.values() for shape in chain(*classes))
        self._inputs = torch.zeros(largest, dtype=torch.int32, device=recorder.device)
        self._passes: dict[_Key, tuple[Tensor, Replay]] = {}
        started_at = time.perf_counter()
        try:
            self._capture_all(_Transfer(largest, 0, recorder), watch)
        except (RuntimeError, NotImplementedError) as error:  # out of memory and CUDA errors are RuntimeErrors
            self._passes.clear()
            raise CaptureFailed(first_line(error)) from error
        self.seconds = time.perf_counter() - started_at
        """Duration of capturing."""
        outputs = max(output.numel() for output, _ in self._passes.values())
        self._transfers: SimpleQueue[_Transfer] = SimpleQueue()
        for _ in range(IN_FLIGHT):
            self._transfers.put(_Transfer(largest, outputs, recorder))

    def __len__(self) -> int:
        """Number of captured forward passes."""
        return len(self._passes)

    def supports(self, operation: Operation, subnet: Subnet | None) -> bool:
        """Whether an operation was captured in this size."""
        return operation in self._operations and subnet in self._sizes(self._operations[operation])

    def run(self, operation: Operation, sequences: Sequence[TokenSequence], subnet: Subnet | None) -> list[np.ndarray]:
        """Return the float32 outputs of every sequence, in order (shapes: serving/requests.py)."""
        operation = self._operations[operation]
        outputs: list[np.ndarray] = [np.empty(0)] * len(sequences)
        lengths = [len(sequence.tokens) for sequence in sequences]
        for shape, indices in assign(lengths, self._classes[operation]):
            computed = self._run_pass((operation, subnet, shape), [sequences[index] for index in indices])
            for index, output in zip(indices, computed, strict=True):
                outputs[index] = output
        return outputs

    @torch.inference_mode()
    def _run_pass(self, key: _Key, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Replay one forward pass and wait for its outputs."""
        (operation, _, shape), (output, replay) = key, self._passes[key]
        is_for_tokens = operation == "task" and self._served.runner.is_for_tokens
        lengths = [len(sequence.tokens) for sequence in sequences]
        transfer = self._transfers.get()
        try:
            inputs = transfer.write(shape, sequences, self._served.tokenizer.pad)
            real = output[: sum(lengths) if is_for_tokens else len(sequences)]
            host = transfer.outputs[: real.numel()].view(real.shape)
            # copies and replays of one batch must not mix with those of another
            with self._launch, self._recorder.launching():
                self._inputs[: len(inputs)].copy_(inputs, non_blocking=True)
                replay()
                host.copy_(real, non_blocking=True)
                transfer.done.record()
            transfer.done.synchronize()
            computed = host.numpy().copy()
        finally:
            self._transfers.put(transfer)
        return np.split(computed, np.cumsum(lengths)[:-1]) if is_for_tokens else list(computed)

    @torch.inference_mode()
    def _capture_all(self, transfer: _Transfer, watch: Watch) -> None:
        """Capture every operation in every size and shape, large shapes first: smaller ones reuse their memory."""
        keys = [
            (operation, subnet, shape)
            for operation, classes in self._classes.items()
            for subnet in self._sizes(operation)
            for shape in sorted(chain(*classes), key=lambda shape: -shape.tokens)
        ]
        for index, key in enumerate(keys):
            inputs = transfer.write(key[2], [], self._served.tokenizer.pad)
            self._inputs[: len(inputs)].copy_(inputs)
            self._passes[key] = self._recorder.capture(self._forward(*key))
            watch(index + 1, len(keys))

    def _forward(self, operation: Operation, subnet: Subnet | None, shape: PackedShape) -> Callable[[], Tensor]:
        """Return the function to capture: from the static inputs to float32 outputs."""
        network, has_types = self._served.networks[subnet], self._served.runner.config.encoder.embedding.types > 1
        fields = self._inputs[: _input_size(shape)].split([shape.tokens, shape.tokens, shape.sequences + 1])

        def forward() -> Tensor:
            tokens, types, starts = fields
            layout = SequenceLayout.packed(starts, shape.max_length)
            inputs = EncoderInputs(tokens.long(), layout, types.long() if has_types else None)
            with inference_autocast(self._recorder.device, "bfloat16" if self._served.is_half else "float32"):
                return _outputs(network, operation, inputs).float()

        return forward

    def _sizes(self, operation: Operation) -> list[Subnet | None]:
        """Return the sizes that the scheduler may choose for an operation."""
        sizes = [size.subnet for size in self._served.schedule.sizes]
        return sizes if self._served.is_elastic(operation) else sizes[:1]


def capture_graphs(served: ServedModel, batch_tokens: int, watch: Watch = lambda done, total: None) -> CapturedModel:
    """Capture the forward passes of a model on a GPU; raise CaptureFailed with the reason if that is not possible."""
    reason = why_not_captured(served)
    if reason is not None:
        raise CaptureFailed(reason)
    captured = CapturedModel(served, batch_tokens, CudaRecorder(served.runner.device), watch)
    torch.cuda.empty_cache()  # the memory of the runs before the captures
    return captured


def why_not_captured(served: ServedModel) -> str | None:
    """Return why the forward passes of a model cannot be captured; None if nothing is known to prevent it."""
    encoder = served.runner.config.encoder
    if served.runner.device.type != "cuda":
        return f"the model runs on {served.runner.device.type}"
    if not served.is_half:
        return "in float32, attention pads packed sequences"
    if served.runner.has_early_exits:
        return "the number of layers depends on the text, which may exit early"
    if encoder.equilibrium is not None:
        return "the number of iterations depends on the text"
    if encoder.universal is not None and encoder.universal.halting is not None:
        return "the number of steps depends on the text"
    return None if captured_operations(served) else "it only fills masks, whose number varies"


def captured_operations(served: ServedModel) -> dict[Operation, Operation]:
    """Return the operations to capture, each with the operation that computes the same."""
    operations = sorted(served.operations - {"fill_mask"})
    return {one: "vectors" if served.has_embedder else one for one in operations}


def _outputs(network: Model, operation: Operation, inputs: EncoderInputs) -> Tensor:
    if operation == "vectors":
        return network.vectors(inputs)
    return network.outputs(inputs.tokens, inputs.layout, inputs.types)


def _input_size(shape: PackedShape) -> int:
    """Number of integers of tokens, types and starts."""
    return 2 * shape.tokens + shape.sequences + 1
