"""A running service of tiny models, for the tests and the screenshots of the page."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
import uvicorn
from task_cases import TASK_CASES

from bertsmith.engines.exit_runner import ModelRunner
from bertsmith.layers.subnet import Subnet
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.build import build, extract
from bertsmith.models.cost import parameters
from bertsmith.models.model import Model
from bertsmith.models.published import overridable, preset
from bertsmith.serving.http.app import make_app
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import Operation
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import ServeSettings
from bertsmith.serving.size_schedule import SizeSchedule
from bertsmith.shrinking.elastic_metadata import ElasticMetadata, SubnetworkMetadata
from bertsmith.tasks import TASKS
from bertsmith.tasks.base import Encoding
from bertsmith.tasks.data_source import recognise
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.rows import table_of
from bertsmith.text.tokenizer import Tokenizer

WIDTHS, DEPTHS = (0.25, 0.5, 1.0), (0.5, 1.0)
SIZES = {
    "width": 32,
    "layers": 4,
    "heads": 4,
    "max_length": 160,
    "embedding_width": 16,
    "init_std": 0.3,
    "dropout": 0.0,
}
WORDS = (
    "the smith forges an iron gate in the cold workshop by the river and anna carries seven old lanterns to the "
    "harbour of new rome my parcel was due on monday and there is still no sign of it where is order delivery has not "
    "arrived how do i reset password cannot log in to account app crashes when open nowhere at all then does"
)


class Exported(ModelRunner):
    """A runner without a PyTorch model, as of an exported graph."""

    torch_model = None


@cache
def tokenizer() -> Tokenizer:
    """Return a tokenizer that knows the words of the page's examples."""
    return learn_tokenizer([WORDS] * 20, "wordpiece", 400, progress=False)


def network(family: str, seed: int = 0) -> Model:
    """Return a tiny encoder of a family, with random weights that are large enough for answers to differ."""
    sizes = {**SIZES, "vocabulary": tokenizer().size}
    model = build(
        preset(family, **{key: value for key, value in sizes.items() if key in overridable(family)}), seed=seed
    )
    model.tokenizer = tokenizer()
    return model.eval()


def served(
    case: str | None, family: str = "bert-tiny", *, name: str, is_elastic: bool = False, floor: float | None = None
) -> ServedModel:
    """Return a model with the task of a case; without a case, a pre-trained one."""
    model, task = network(family), None
    operations: set[Operation] = {"vectors"}
    if case is not None:
        sample = TASK_CASES[case]
        table = table_of(sample.rows, "rows")
        settings = {**recognise(table, sample.kind, [], {}), **sample.task}
        task = TASKS[sample.kind].parse(settings).resolve(table)
        model = with_task_head(model, task.head(model.config), seed=1).eval()
        with torch.no_grad():
            for weight in model.task_head.parameters():
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)) * 0.4)
        operations.add("task")
    if model.can_fill_masks:
        operations.add("fill_mask")
    record = elastic_record(model) if is_elastic else None
    encoding = Encoding.of(model, 128)
    return ServedModel(
        name=name,
        runner=model,
        tokenizer=tokenizer(),
        encoding=encoding,
        operations=frozenset(operations),
        schedule=SizeSchedule.of(record, floor),
        task=task,
        elastic=record,
    )


def elastic_record(model: Model) -> ElasticMetadata:
    """Return an elastic record with made-up scores and latencies."""
    sizes = [(width, depth) for depth in DEPTHS for width in WIDTHS]
    grid = tuple(
        SubnetworkMetadata(
            width=width,
            depth=depth,
            score=80 + 12 * width + 4 * depth,
            parameters=parameters(extract(model, Subnet(width=width, depth=depth)).config),
            flops=1e6 * width * depth,
            latency_ms=4 * width * depth,
        )
        for width, depth in sizes
    )
    return ElasticMetadata(
        metric="accuracy",
        teacher_score=96.5,
        depth_rule="keep_last",
        length=32,
        grid=grid,
        head_scores=(),
        head_order=(),
        neuron_order=(),
    )


@contextmanager
def running(models: Sequence[ServedModel], settings: ServeSettings | None = None) -> Iterator[str]:
    """Run a service of these models and yield its URL."""
    schedulers = {model.name: Scheduler(model) for model in models}
    for scheduler in schedulers.values():
        scheduler.start()
    config = uvicorn.Config(
        make_app(schedulers, settings or ServeSettings()), port=0, log_level="warning", ws="none", timeout_keep_alive=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the service stopped before it was ready"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        for scheduler in schedulers.values():
            scheduler.close()
