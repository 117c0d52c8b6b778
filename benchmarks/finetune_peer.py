"""Fine-tuning with the Trainer of transformers, for benchmarks/finetune.py.

It gets the same sequences as ours (same tokenizer, truncation and targets), pads every batch to its longest sequence,
and is scored with the same task.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from bertsmith.answers.sequences import Features
from bertsmith.training.finetuning import FinetuneSettings


def rows_of(features: Features) -> list[dict[str, Any]]:
    """Items in the format of the Trainer; every item must be one sequence."""
    if len(features.tokens) != len(features):
        raise SystemExit("an item of this task has several sequences; the Trainer supports one each")
    target = next(features.targets[name] for name in ("label", "value", "tags") if name in features.targets)
    rows = []
    for index in range(len(features)):
        value = target[index]
        row = {"input_ids": features.tokens[index].tolist()}
        row["labels"] = value.tolist() if isinstance(value, np.ndarray) else value.item()
        row["attention_mask"] = [1] * len(row["input_ids"])
        if features.types is not None:
            row["token_type_ids"] = features.types[index].tolist()
        rows.append(row)
    return rows


def peer_trainer(
    settings: FinetuneSettings,
    features: Features,
    out: Path,
    *,
    device: str,
    is_by_length: bool = False,
    steps: int = -1,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trainer:
    """Return a Trainer with the model, data and settings of our run; `steps` replaces the epochs if given."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    name = settings.model.name
    tokenizer = AutoTokenizer.from_pretrained(name)
    is_for_tokens = "tags" in features.targets
    kind = AutoModelForTokenClassification if is_for_tokens else AutoModelForSequenceClassification
    torch.manual_seed(settings.run.seed)
    model = kind.from_pretrained(name, num_labels=len(getattr(settings.task, "labels", ())) or 1, dtype=torch.float32)
    collator = (DataCollatorForTokenClassification if is_for_tokens else DataCollatorWithPadding)(tokenizer)
    optimizer, schedule, size = settings.optimizer, settings.schedule, settings.batch.examples
    total = steps if steps > 0 else round(settings.run.epochs * -(-len(features) // size))
    arguments = TrainingArguments(
        output_dir=str(out),
        seed=settings.run.seed,
        per_device_train_batch_size=size,
        per_device_eval_batch_size=64,
        num_train_epochs=settings.run.epochs,
        max_steps=steps,
        learning_rate=optimizer.learning_rate,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip,
        lr_scheduler_type="linear",
        warmup_steps=round(schedule.warmup * total),
        bf16=settings.run.run(1).is_half(device),
        use_cpu=device == "cpu",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=device == "cuda",
        **(_grouping() if is_by_length else {}),
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows_of(features), data_collator=collator, callbacks=list(callbacks)
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def peer_outputs(trainer: Trainer, features: Features) -> list[np.ndarray]:
    """Return the outputs of the Trainer's model for every item, in the format of a task's `answers`."""
    said = trainer.predict(rows_of(features)).predictions
    if said.ndim == 2:
        return list(said)
    return [row[:length] for row, length in zip(said, features.tokens.lengths, strict=True)]


def _grouping() -> dict[str, Any]:
    """Return the argument for grouping by length, whose name depends on the version."""
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    is_new = "train_sampling_strategy" in fields
    return {"train_sampling_strategy": "group_by_length"} if is_new else {"group_by_length": True}
