"""Training on pairs of texts from its settings: task folder, tokenizer, encoder-decoder and method put together."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pydantic import model_validator

from bertsmith.bundled import model_folder
from bertsmith.checkpoint.source import ModelSource
from bertsmith.checkpoint.store import load
from bertsmith.data.loader import SpecialTokens
from bertsmith.data.pairs import PairConfig, PairPlan, PairReader, Pairs
from bertsmith.errors import InputError
from bertsmith.models.build import build
from bertsmith.models.config import ModelConfig
from bertsmith.models.cost import training_flops
from bertsmith.models.published import PRESETS, preset
from bertsmith.models.seq2seq import GenerationConfig, Seq2Seq
from bertsmith.objectives.translation import TranslationConfig
from bertsmith.settings import Record
from bertsmith.text.tables import TextPairs, pair_columns, read_pairs
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.feed import PhaseData, TrainingData
from bertsmith.training.optimizer import BatchConfig, OptimizerConfig, ScheduleConfig
from bertsmith.training.phases import all_phases
from bertsmith.training.run_config import Method, RunConfig
from bertsmith.training.starting_model import TokenizerConfig
from bertsmith.training.trainer import Trainer

NO_DECODER = "MODEL {!r} has no decoder, which translation needs; the preset transformer-small has one"


class TranslationSettings(Record):
    """All that a training run on pairs of texts depends on."""

    data: str | None = None
    """A folder with train.jsonl and dev.jsonl, plain or packed."""
    source: str | None = None
    """The column to translate from; None for the first of the only two that hold text …"""
    target: str | None = None
    """… and to."""
    model: ModelSource
    tokenizer: TokenizerConfig = TokenizerConfig()
    sequences: PairConfig = PairConfig()
    objective: TranslationConfig = TranslationConfig()
    batch: BatchConfig = BatchConfig(tokens=4096)
    # the paper's: Adam without decay and without clipping, a rate that falls by the root of the step
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3, epsilon=1e-9, weight_decay=0.0, clip=0.0)
    schedule: ScheduleConfig = ScheduleConfig(kind="noam", warmup=0.1)
    run: RunConfig = RunConfig(steps=5000, evaluate_batches=1000)
    generation: GenerationConfig = GenerationConfig()
    """How the dev part is translated at the end."""

    @property
    def method(self) -> Method:
        sequences = self.sequences
        phases = all_phases(sequences.length, sequences.micro_tokens, self.batch, ())
        return Method(self.run, self.optimizer, self.schedule, phases)

    @model_validator(mode="after")
    def _check_shapes(self) -> "TranslationSettings":
        if self.run.compile in ("on", "graphs"):
            mode = self.run.compile
            raise ValueError(f'run.compile is "{mode}", which wants batches of one shape; allowed here: off, whole')
        return self


@dataclass(frozen=True)
class TranslationTask:
    """The texts of a task and the settings with the columns that were found."""

    settings: TranslationSettings
    train: TextPairs
    dev: TextPairs


def read_task(settings: TranslationSettings) -> TranslationTask:
    """The task of the settings, read whole: what is wrong with it is said before anything else happens."""
    if settings.data is None:
        raise InputError("data is not given: pass --data with a folder that holds train.jsonl and dev.jsonl")
    folder = Path(settings.data)
    source, target = pair_columns(folder, "train", settings.source, settings.target)
    train, dev = (read_pairs(folder, part, source, target) for part in ("train", "dev"))
    return TranslationTask(settings.model_copy(update={"source": source, "target": target}), train, dev)


def make_trainer(task: TranslationTask, out: Path, *, device: str = "auto", show: bool = True) -> Trainer:
    """The trainer of a run, ready to go."""
    settings = task.settings
    model = starting_model(settings, task.train)
    _check_lengths(settings, model)
    tokenizer, config, seed = model.require_tokenizer(), settings.sequences, settings.run.seed
    train, dev = (Pairs.tokenised(part.sources, part.targets, tokenizer, config) for part in (task.train, task.dev))
    special = SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator)
    length = int(max(side.mean() for side in train.lengths))
    flops = training_flops(model.config, length, settings.objective.targets_per_token)
    phase = PhaseData(PairPlan(train, config, seed), PairReader(train, config, special), flops, seed)
    data = TrainingData((phase,), PairPlan(dev, config, 0), PairReader(dev, config, special))
    return Trainer(
        model,
        settings.objective.build(),
        data,
        settings.method,
        out,
        fingerprint=_fingerprint(train, tokenizer, is_half=settings.run.is_half(device)),
        device=device,
        show=show,
    )


def pair_counts(task: TranslationTask, trainer: Trainer) -> dict[str, int]:
    """How many pairs a run learns from, how many it left out and why, and how many it cut."""
    plan = trainer.data.phases[0].plan
    assert isinstance(plan, PairPlan)
    return {
        "pairs": len(plan.pairs),
        "empty": task.train.empty,
        "dropped": plan.pairs.dropped,
        "cut": plan.pairs.cut,
    }


def explain(settings: TranslationSettings) -> dict[str, str]:
    """What a run will cost, as names and values to print; sequences count as full, the vocabulary as large as asked."""
    choice = settings.model
    config = _fresh(choice, settings.tokenizer.vocabulary) if choice.is_preset else _loaded(choice.name).config
    assert config.decoder is not None
    method = settings.method
    flops = training_flops(config, method.phases[0].length, settings.objective.targets_per_token)
    return {"vocabulary": f"{config.decoder.vocabulary:,}", **method.costs(config, [flops])}


def starting_model(settings: TranslationSettings, train: TextPairs) -> Seq2Seq:
    """The model in the folder the settings name, or a fresh one with a tokenizer learned from the training pairs."""
    choice = settings.model
    if not choice.is_preset:
        return _loaded(choice.name)
    _fresh(choice, settings.tokenizer.vocabulary)  # what is wrong with it is said before a tokenizer is learned
    tokenizer = settings.tokenizer.learn(text for part in (train.sources, train.targets) for text in part)
    network = _fresh(choice, tokenizer.size)
    if network.encoder.vocabulary < tokenizer.size:
        raise InputError(
            f"model.overrides.vocabulary is {network.encoder.vocabulary}; the tokenizer has {tokenizer.size} "
            "pieces: leave it out"
        )
    model = build(network, seed=settings.run.seed)
    model.tokenizer = tokenizer
    assert isinstance(model, Seq2Seq)
    return model


def _fresh(choice: ModelSource, vocabulary: int) -> ModelConfig:
    config = preset(choice.name, **{"vocabulary": vocabulary, **choice.overrides})
    if config.decoder is None:
        raise InputError(NO_DECODER.format(choice.name))
    return config


def _loaded(folder: str) -> Seq2Seq:
    if not model_folder(folder).is_dir():
        writers = [name for name in PRESETS if preset(name).decoder is not None]
        raise InputError(f"MODEL is {folder!r}; allowed: the folder of a model, {', '.join(writers)}")
    model = load(folder)
    if not isinstance(model, Seq2Seq):
        raise InputError(NO_DECODER.format(folder))
    model.require_tokenizer()
    return model


def _check_lengths(settings: TranslationSettings, model: Seq2Seq) -> None:
    for stack in (model.encoder, model.decoder):
        if stack.embedding.position is not None and settings.sequences.length > stack.embedding.longest:
            raise InputError(
                f"sequences.length is {settings.sequences.length}; the model takes at most {stack.embedding.longest}"
            )


def _fingerprint(train: Pairs, tokenizer: Tokenizer, *, is_half: bool) -> str:
    """What a resumed run must share with its first part besides the settings: the pairs and the precision."""
    digest = hashlib.sha256(tokenizer.hash.encode())
    for side in (train.source, train.target):
        digest.update(side.tokens.tobytes())
        digest.update(side.starts.tobytes())
    return f"{digest.hexdigest()} {'bfloat16' if is_half else 'float32'}"
