"""A pre-training run from its settings: corpus, model, objective and method put together."""

import hashlib
from pathlib import Path
from typing import Annotated

from pydantic import model_validator

from bertsmith.batches.loader import BatchReader, SpecialTokens
from bertsmith.batches.plan import Plan, SequenceConfig
from bertsmith.batches.shards import MANIFEST, TokenCorpus
from bertsmith.errors import InputError
from bertsmith.models.build import assemble
from bertsmith.models.config import ModelConfig
from bertsmith.models.cost import training_flops, training_memory
from bertsmith.models.heads import MaskDecoderConfig
from bertsmith.models.model import Model
from bertsmith.objectives.base import ObjectiveConfig
from bertsmith.objectives.masked_lm import MaskedLMConfig
from bertsmith.objectives.replaced_tokens import ReplacedTokensConfig
from bertsmith.settings import ByKind, Record
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.checkpoint import newest_network
from bertsmith.training.choice import GeneratorChoice, ModelChoice, chosen_config, chosen_model
from bertsmith.training.continued import check_encoder
from bertsmith.training.method import Method, RunConfig
from bertsmith.training.optimizer import BatchConfig, OptimizerConfig, ScheduleConfig
from bertsmith.training.trainer import Trainer, TrainingData

OBJECTIVES: dict[str, type[ObjectiveConfig]] = {"masked_lm": MaskedLMConfig, "replaced_tokens": ReplacedTokensConfig}


class PretrainSettings(Record):
    """All that a pre-training run depends on."""

    data: str | None = None
    """The folder that `bertsmith corpus` wrote."""
    model: ModelChoice
    generator: GeneratorChoice = GeneratorChoice()
    sequences: SequenceConfig = SequenceConfig()
    objective: Annotated[ObjectiveConfig, ByKind(OBJECTIVES, default="masked_lm")] = MaskedLMConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _check_pairs(self) -> "PretrainSettings":
        has_pairs = isinstance(self.objective, MaskedLMConfig) and self.objective.next_sentence
        if has_pairs and self.sequences.cut != "sentence_pairs":
            raise ValueError('objective.next_sentence is true, which needs sequences.cut = "sentence_pairs"')
        return self

    @model_validator(mode="after")
    def _check_generator(self) -> "PretrainSettings":
        if not self.has_generator and self.generator != GeneratorChoice():
            kind = self.objective.kind
            raise ValueError(f"generator is given with objective.kind {kind!r}; it needs 'replaced_tokens'")
        return self

    @property
    def method(self) -> Method:
        return Method(self.run, self.batch, self.optimizer, self.schedule)

    @property
    def has_generator(self) -> bool:
        return isinstance(self.objective, ReplacedTokensConfig)

    def network(self, vocabulary: int, tokenizer: Tokenizer | None = None) -> ModelConfig:
        """The model's config for a vocabulary, with exactly the heads the objective trains, and a mask decoder's."""
        generator = self.generator if self.has_generator else None
        config = chosen_config(self.model, generator, self.objective.heads, vocabulary, tokenizer)
        self._check_network(config, 0 if tokenizer is None and self.has_folder else vocabulary)
        return config

    def start(self, tokenizer: Tokenizer) -> tuple[Model, list[str]]:
        """The model to train, with its first weights, and what a person should know about them."""
        generator, heads = self.generator if self.has_generator else None, self.objective.heads
        model, notices = chosen_model(self.model, generator, heads, tokenizer.size, tokenizer, seed=self.run.seed)
        self._check_network(model.config, tokenizer.size)
        return model, notices

    @property
    def has_folder(self) -> bool:
        """Whether weights come from a folder."""
        return self.model.folder is not None or self.generator.folder is not None

    def _check_network(self, config: ModelConfig, vocabulary: int) -> None:
        """Raises a sentence if a network cannot read the sequences."""
        check_encoder(config, self.model.preset or self.model.folder or "network")
        for part in (config, *([] if config.generator is None else [config.generator.model])):
            if part.encoder.vocabulary < vocabulary:
                raise InputError(f"the model's vocabulary is {part.encoder.vocabulary}; the corpus needs {vocabulary}")
            types = part.encoder.embedding.types
            if self.sequences.cut == "sentence_pairs" and types < 2 and part is config:
                raise InputError(
                    f"sequences.cut is 'sentence_pairs' and the model has {types} token types; allowed: 2 or more"
                )
            tables = [head.longest for head in part.heads if isinstance(head, MaskDecoderConfig)]
            longest = min([part.encoder.embedding.longest, *tables])
            if self.sequences.length > longest:
                raise InputError(
                    f"sequences.length is {self.sequences.length}; the model takes at most {longest} tokens"
                )


def make_trainer(
    settings: PretrainSettings, out: Path, *, device: str = "auto", show: bool = True, resume: bool = False
) -> Trainer:
    """The trainer of a run, ready to go; one that will resume needs no more of a folder it once began from."""
    if settings.data is None:
        raise InputError("data is not given: pass --data with a folder that `bertsmith corpus` wrote")
    tokenizer = Tokenizer.load(Path(settings.data))
    # the run's own checkpoint has config and weights; the folder may be another by now, or gone
    earlier = newest_network(out / "checkpoints") if resume and settings.has_folder else None
    model, notices = settings.start(tokenizer) if earlier is None else (assemble(earlier), [])
    model.tokenizer = tokenizer
    config = model.config
    return Trainer(
        model,
        settings.objective.build(tokenizer, config.encoder.ponder_weight),
        _data(settings, tokenizer),
        settings.method,
        out,
        fingerprint=_fingerprint(settings, device),
        flops_per_token=training_flops(config, settings.sequences.length, settings.objective.targets_per_token),
        device=device,
        show=show,
        notices=notices,
    )


def explain(settings: PretrainSettings) -> dict[str, str]:
    """What a run will cost, as names and values to print."""
    tokenizer = Tokenizer.load(Path(settings.data)) if settings.data else None
    config = settings.network(30522 if tokenizer is None else tokenizer.size, tokenizer)
    rate, micro = settings.objective.targets_per_token, settings.sequences.micro_tokens
    memory = training_memory(config, micro, rate, half=settings.run.is_half("auto"))
    return {
        "vocabulary": f"{config.encoder.vocabulary:,}" + ("" if settings.data else " (no --data given)"),
        **settings.method.costs(config, settings.sequences.length, rate, micro),
        "memory": f"about {memory / 2**30:.2f} GiB on each device",
    }


def _fingerprint(settings: PretrainSettings, device: str) -> str:
    """What a resumed run must share with its first part besides the settings: the corpus and the precision."""
    manifest = hashlib.sha256((Path(str(settings.data)) / MANIFEST).read_bytes()).hexdigest()
    return f"{manifest} {'bfloat16' if settings.run.is_half(device) else 'float32'}"


def _data(settings: PretrainSettings, tokenizer: Tokenizer) -> TrainingData:
    assert settings.data is not None
    folder, config = Path(settings.data), settings.sequences
    special = SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator)
    corpus = TokenCorpus(folder, "train")
    if corpus.manifest.tokenizer_hash != tokenizer.hash:
        raise InputError(f"{settings.data!r}: tokenizer.json is not the tokenizer the shards were made with")
    plan = Plan(corpus, config, settings.run.seed).check("train")
    # a compiled step wants one shape; otherwise empty sequences would only cost time
    slots = plan.slots if settings.run.compile != "off" else None
    reader = BatchReader(corpus, config, special, slots)
    if not corpus.manifest.parts["held_out"].tokens:
        return TrainingData(plan, reader, None, None)
    held_out = TokenCorpus(folder, "held_out")
    held_out_plan = Plan(held_out, config, 0).check("held_out")
    return TrainingData(plan, reader, held_out_plan, BatchReader(held_out, config, special, None))
