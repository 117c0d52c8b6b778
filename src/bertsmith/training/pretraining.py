"""Pre-training: settings, corpus, model, objective and trainer of a run."""

import hashlib
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from pydantic import model_validator

from bertsmith.bundled import model_folder
from bertsmith.checkpoint.source import GeneratorSource, ModelSource, check_encoder
from bertsmith.data.devices import device_type
from bertsmith.data.loader import BatchReader, SpecialTokens
from bertsmith.data.plan import Plan, SequenceConfig
from bertsmith.data.random import key
from bertsmith.data.shards import MANIFEST, TokenCorpus, read_manifest, unigram_level
from bertsmith.errors import InputError
from bertsmith.models.build import assemble, rebuild
from bertsmith.models.config import ModelConfig
from bertsmith.models.cost import training_flops, training_memory
from bertsmith.models.heads import MaskDecoderConfig
from bertsmith.models.model import Model
from bertsmith.objectives.base import ObjectiveConfig
from bertsmith.objectives.causal_lm import CausalLMConfig, MaskedAndCausalConfig
from bertsmith.objectives.masked_lm import MaskedLMConfig
from bertsmith.objectives.replaced_tokens import ReplacedTokenDetectionConfig
from bertsmith.settings import ByKind, Record
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.budget import Budget, calibrate, steps_within
from bertsmith.training.checkpoint import newest_network
from bertsmith.training.distillation import GeneralDistillationConfig, make_student
from bertsmith.training.feed import PhaseData, TrainingData
from bertsmith.training.health import Baseline
from bertsmith.training.optimizer import BatchConfig, OptimizerConfig, ScheduleConfig
from bertsmith.training.phases import PhaseConfig, TokenPhase, all_phases
from bertsmith.training.run_config import Method, RunConfig
from bertsmith.training.starting_model import pretraining_config, pretraining_model
from bertsmith.training.trainer import Trainer

OBJECTIVES: dict[str, type[ObjectiveConfig]] = {
    "masked_lm": MaskedLMConfig,
    "replaced_tokens": ReplacedTokenDetectionConfig,
    "causal_lm": CausalLMConfig,
    "masked_and_causal": MaskedAndCausalConfig,
}


class PretrainSettings(Record):
    """Settings of a pre-training run."""

    data: str | None = None
    """The folder that `bertsmith corpus` wrote."""
    verify_data: bool = True
    """Compare every shard with its checksum before the training, which reads the corpus once, at about 1 GB/s."""
    branch: str | None = None
    """Checkpoint of another run to start from, with its optimiser state and its position in the data."""
    tier: str = "custom"
    """Fidelity to a publication: "paper", "crammed", "modern" (docs/reference/recipes.md) or your own label."""
    model: ModelSource
    generator: GeneratorSource = GeneratorSource()
    sequences: SequenceConfig = SequenceConfig()
    phases: tuple[PhaseConfig, ...] = ()
    """Later phases with other sequences, such as [{begin = 0.9, length = 512}]."""
    objective: Annotated[ObjectiveConfig, ByKind(OBJECTIVES, default="masked_lm")] = MaskedLMConfig()
    distillation: GeneralDistillationConfig | None = None
    """Distillation from a teacher; None to learn from the text alone."""
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
    def _check_distillation(self) -> "PretrainSettings":
        if self.distillation is None:
            return self
        if not isinstance(self.objective, MaskedLMConfig) or self.objective.next_sentence:
            raise ValueError(
                f"distillation is given with objective.kind {self.objective.kind!r}; allowed with it: 'masked_lm' "
                "without next_sentence"
            )
        if self.run.compile not in ("auto", "off", "on"):
            raise ValueError(
                f"distillation is given and run.compile is {self.run.compile!r}; allowed with it: auto, off, on"
            )
        return self

    @model_validator(mode="after")
    def _check_generator(self) -> "PretrainSettings":
        if not self.has_generator and self.generator != GeneratorSource():
            kind = self.objective.kind
            raise ValueError(f"generator is given with objective.kind {kind!r}; it needs 'replaced_tokens'")
        return self

    @model_validator(mode="after")
    def _check_phases(self) -> "PretrainSettings":
        for number, phase in enumerate(self.phases):
            if number and phase.begin <= self.phases[number - 1].begin:
                raise ValueError(f"phases.{number}.begin is {phase.begin}; allowed: more than the previous phase's")
        for number, later in enumerate(self.all_phases[1:]):
            if later.micro_tokens < later.length:
                raise ValueError(
                    f"phases.{number}: micro_tokens {later.micro_tokens} is less than length {later.length}"
                )
        return self

    @property
    def all_phases(self) -> tuple[TokenPhase, ...]:
        """Return the first phase and the later ones."""
        return all_phases(self.sequences.length, self.sequences.micro_tokens, self.batch, self.phases)

    @property
    def method(self) -> Method:
        return Method(self.run, self.optimizer, self.schedule, self.all_phases)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the corpus; None without a corpus."""
        return None if self.data is None else corpus_tokenizer(Path(self.data))

    def flops_per_token(self, config: ModelConfig) -> tuple[float, ...]:
        """Return the training FLOPs per token in each phase, forward and backward."""
        targets = self.objective.targets_per_token
        passes = self.objective.passes
        own = tuple(passes * training_flops(config, phase.length, targets) for phase in self.method.phases)
        if self.distillation is None:
            return own
        teacher = self.distillation.teacher_config
        # the teacher runs forward only: a third of its training cost
        forward = (training_flops(teacher, phase.length, targets) / 3 for phase in self.method.phases)
        return tuple(map(sum, zip(own, forward, strict=True)))

    @property
    def has_generator(self) -> bool:
        return isinstance(self.objective, ReplacedTokenDetectionConfig)

    def network(self, tokenizer: Tokenizer | None) -> ModelConfig:
        """Return the model's config for a corpus, with exactly the heads that the objective trains.

        Without a corpus the vocabulary is the model folder's, or as large as BERT's.
        """
        vocabulary = 30522 if tokenizer is None else tokenizer.size
        generator = self.generator if self.has_generator else None
        config = pretraining_config(self.model, generator, self.objective.heads, vocabulary, tokenizer)
        config = self.objective.network(config)
        self._check_network(config, 0 if tokenizer is None and self.has_folder else vocabulary)
        return config

    def start(self, tokenizer: Tokenizer) -> tuple[Model, list[str]]:
        """Return the model to train with its initial weights, and notices about them."""
        generator, heads = self.generator if self.has_generator else None, self.objective.heads
        model, notices = pretraining_model(self.model, generator, heads, tokenizer.size, tokenizer, seed=self.run.seed)
        config = self.objective.network(model.config)
        model = model if config == model.config else rebuild(model, config)
        self._check_network(model.config, tokenizer.size)
        return model, notices

    @property
    def has_folder(self) -> bool:
        """Whether weights come from a folder."""
        return self.model.folder is not None or self.generator.folder is not None

    @property
    def inputs(self) -> tuple[Path, ...]:
        """Folders that the run reads."""
        teacher = None if self.distillation is None else self.distillation.teacher
        models = (self.model.folder, self.generator.folder, teacher)
        read = [Path(path) for path in (self.data, self.branch) if path is not None]
        return (*read, *(model_folder(name) for name in models if name is not None))

    def _check_network(self, config: ModelConfig, vocabulary: int) -> None:
        """Raise InputError if the network cannot read the sequences."""
        check_encoder(config, self.model.name)
        for part in (config, *([] if config.generator is None else [config.generator.model])):
            if part.encoder.vocabulary < vocabulary:
                raise InputError(f"the model's vocabulary is {part.encoder.vocabulary}; the corpus needs {vocabulary}")
            types = part.encoder.embedding.types
            if self.sequences.has_types and types == 1 and part is config:  # without types, [SEP] alone separates them
                cut = self.sequences.cut
                raise InputError(f"sequences.cut is {cut!r} and the model has 1 token type; allowed: 0 or 2")
            tables = [head.max_length for head in part.heads if isinstance(head, MaskDecoderConfig)]
            max_length = min([part.encoder.embedding.max_length, *tables])
            for number, phase in enumerate(self.method.phases):
                if phase.length > max_length:
                    name = f"phases.{number - 1}.length" if number else "sequences.length"
                    raise InputError(f"{name} is {phase.length}; the model takes at most {max_length} tokens")


def corpus_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a corpus; raise InputError if the folder holds no corpus."""
    read_manifest(folder)
    return Tokenizer.load(folder)


def make_trainer(
    settings: PretrainSettings, out: Path, *, device: str = "auto", show: bool = True, resume: bool = False
) -> Trainer:
    """Build the trainer of a run; a run to resume does not read the model folder it started from."""
    if settings.data is None:
        raise InputError("data is not given: pass --data with a folder that `bertsmith corpus` wrote")
    tokenizer = corpus_tokenizer(Path(settings.data))
    # the run's own checkpoint has config and weights; the folder may have changed since, or be gone
    earlier = newest_network(out / "checkpoints") if resume and settings.has_folder else None
    model, notices = settings.start(tokenizer) if earlier is None else (assemble(earlier), [])
    model.tokenizer = tokenizer
    config = model.config
    objective = settings.objective.build(tokenizer, config.encoder.ponder_weight, config.encoder.jacobian_weight)
    if settings.distillation is not None:
        model, objective = make_student(settings.distillation, model, objective, seed=settings.run.seed)
    return Trainer(
        model,
        objective,
        _data(settings, tokenizer, settings.flops_per_token(config), device),
        settings.method,
        out,
        fingerprint=_fingerprint(settings, device),
        settings=settings.plain(),
        baseline=_baseline(settings),
        branch=None if settings.branch is None else Path(settings.branch),
        device=device,
        show=show,
        notices=notices,
    )


def steps_for(settings: PretrainSettings, budget: Budget, device: str = "auto") -> int:
    """Return the steps of a run within a budget; a time is measured on the device, in a temporary folder."""
    if budget.kind == "tokens":
        return steps_within(settings.method, budget)
    if budget.kind == "flops":
        return steps_within(settings.method, budget, settings.flops_per_token(settings.network(settings.tokenizer)))
    with TemporaryDirectory() as folder:
        trainer = make_trainer(settings, Path(folder), device=device, show=False)
        return calibrate(trainer, budget.amount)


def explain(settings: PretrainSettings) -> dict[str, str]:
    """Return the expected costs of a run as names and values to print."""
    config = settings.network(settings.tokenizer)
    rate, passes = settings.objective.targets_per_token, settings.objective.passes
    micro = max(phase.micro_tokens for phase in settings.all_phases)
    memory = training_memory(config, passes * micro, rate, half=settings.run.is_half("auto"))
    return {
        "vocabulary": f"{config.encoder.vocabulary:,}" + ("" if settings.data else " (no --data given)"),
        **settings.method.costs(config, settings.flops_per_token(config)),
        "memory": f"about {memory / 2**30:.2f} GiB on each device",
    }


def _fingerprint(settings: PretrainSettings, device: str) -> str:
    """Identify the corpus and the precision, which must not change when a run is resumed."""
    manifest = hashlib.sha256((Path(str(settings.data)) / MANIFEST).read_bytes()).hexdigest()
    return f"{manifest} {'bfloat16' if settings.run.is_half(device) else 'float32'}"


def _data(
    settings: PretrainSettings, tokenizer: Tokenizer, flops_per_token: tuple[float, ...], device: str
) -> TrainingData:
    """Return the data of every phase; held-out sequences are always the first phase's, so that losses compare."""
    assert settings.data is not None
    folder = Path(settings.data)
    special = SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator)
    corpus = TokenCorpus(folder, "train", verify=settings.verify_data)
    if corpus.manifest.tokenizer_hash != tokenizer.hash:
        raise InputError(f"{settings.data!r}: tokenizer.json is not the tokenizer the shards were made with")
    # a compiled step needs one shape; otherwise empty sequences would only cost time
    compile = settings.run.compile
    has_one_shape = device_type(device) == "cuda" if compile == "auto" else compile != "off"
    phases = []
    for number, (phase, flops) in enumerate(zip(settings.all_phases, flops_per_token, strict=True)):
        config = settings.sequences.changed(length=phase.length, micro_tokens=phase.micro_tokens)
        seed = key(settings.run.seed, 13, number) if number else settings.run.seed
        plan = Plan(corpus, config, seed).check("train")
        slots = plan.slots if has_one_shape else None
        phases.append(PhaseData(plan, BatchReader(corpus, config, special, slots), flops, seed))
    if not corpus.manifest.splits["held_out"].tokens:
        return TrainingData(tuple(phases), None, None, has_one_shape)
    held_out = TokenCorpus(folder, "held_out", verify=settings.verify_data)
    held_out_plan = Plan(held_out, settings.sequences, 0).check("held_out")
    reader = BatchReader(held_out, settings.sequences, special, None)
    return TrainingData(tuple(phases), held_out_plan, reader, has_one_shape)


def _baseline(settings: PretrainSettings) -> Baseline:
    """Return the unigram level of the held-out split, or of the training split if nothing is held out."""

    @cache  # it reads some of the corpus: at most once, and only on demand
    def level() -> float:
        train = TokenCorpus(Path(str(settings.data)), "train", verify=False)  # the trainer has verified it
        has_held_out = train.manifest.splits["held_out"].tokens > 0
        return unigram_level(train, TokenCorpus(train.folder, "held_out", verify=False) if has_held_out else train)

    return Baseline(settings.objective.token_term, level)
