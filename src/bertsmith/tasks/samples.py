"""Batches of a task's rows, for those who measure a model on what it will read."""

from bertsmith.batches.examples import EvaluationPlan, ExampleReader, TaskBatch
from bertsmith.engines.base import Inputs, Runner
from bertsmith.tasks.base import Encoding
from bertsmith.tasks.predictor import KeptTask
from bertsmith.text.tables import Table

_MICRO_TOKENS = 2048  # of one batch: ranges of activations are kept for each


def sample_inputs(model: Runner, kept: KeptTask, table: Table, *, rows: int = 128) -> list[Inputs]:
    """Some rows of a table, evenly spread over it, as batches of padded rows; they need no targets."""
    count = min(rows, len(table))
    chosen = table.take([index * len(table) // count for index in range(count)])
    examples = kept.task.examples(chosen, has_targets=False)
    features = kept.task.features(examples, Encoding.of(model, kept.sequences.length))
    reader = ExampleReader(features, kept.sequences, model.require_tokenizer().pad)
    samples = []
    for plan in EvaluationPlan(features, _MICRO_TOKENS).one_epoch():
        batch = reader[plan].batch
        assert isinstance(batch, TaskBatch)
        tokens, layout = batch.layout.pad(batch.tokens)
        types = None if batch.types is None else batch.layout.pad(batch.types)[0]
        samples.append(Inputs(tokens, layout, types))
    return samples
