"""The vocabulary as one more thing to cut: pieces that the task's texts do not use are dropped."""

from bertsmith.models.model import Model
from bertsmith.shrinking.vocabulary import VocabularyConfig, cut_vocabulary
from bertsmith.tasks.predictor import KeptTask
from bertsmith.text.tables import Table


def cut_model(model: Model, kept: KeptTask, train: Table | None, dev: Table) -> tuple[Model, str]:
    """The model with the pieces that the training texts use, and a sentence on what that changed.

    Where there is no training part, the texts it is scored on stand in for it.
    """
    task = kept.task
    texts = list(task.texts(task.examples(dev if train is None else train, has_targets=False)))
    small, _ = cut_vocabulary(model, texts, VocabularyConfig())
    before, after = model.config.encoder.vocabulary, small.config.encoder.vocabulary
    if before == after:
        return small, f"the vocabulary stays as it is: the texts use all of its {before:,} pieces"
    return small, f"the vocabulary is cut from {before:,} to {after:,} pieces, those that the texts use"
