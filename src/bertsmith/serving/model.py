"""A folder as something that can be asked: the model, its task, its tokenizer and the sizes it may answer in."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from bertsmith.bundled import bundled_hint, model_folder
from bertsmith.checkpoint.files import read_json
from bertsmith.engines.artefact import open_runner, read_artefact
from bertsmith.engines.base import Runner
from bertsmith.engines.exit_runner import ModelRunner
from bertsmith.engines.onnx_engine import OnnxRunner
from bertsmith.engines.onnx_graph import has_task_head, longest_input
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import extract
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import MaskDecoderConfig
from bertsmith.models.model import Model
from bertsmith.serving.requests import Operation, TokenSequence
from bertsmith.serving.settings import default_threads
from bertsmith.serving.size_schedule import SizeSchedule
from bertsmith.serving.worker import Rows, answers
from bertsmith.shrinking.elastic_metadata import ELASTIC_FILE, ElasticRecord, read_record
from bertsmith.tasks.base import Encoding
from bertsmith.tasks.predictor import TASK_FILE, TaskRecord, read_task_record
from bertsmith.text.tokenizer import Tokenizer

_WARM = (8, 33)  # tokens of the sequences with which every work is tried before a model counts as ready


@dataclass(frozen=True)
class ServedModel:
    """A model and all that is needed to ask it; make one with `open`."""

    name: str
    runner: Runner
    tokenizer: Tokenizer
    encoding: Encoding
    works: frozenset[Operation]
    """What it can do."""
    schedule: SizeSchedule = field(default_factory=SizeSchedule)
    """The sizes it may answer in of its own accord; one for a model that is not elastic."""
    kept: TaskRecord | None = None
    """The task of a fine-tuned model."""
    model: Model | None = None
    """The model itself where PyTorch runs it."""
    record: ElasticRecord | None = None
    """What is known of the sub-networks of an elastic model."""
    rows: Rows = "packed"
    """How its batches lie."""
    threads: int = 1
    """Of one product; several batches may be worked on at a time."""
    networks: dict[Subnet, Model] = field(default_factory=dict)
    """The smaller sizes of the schedule as models of their own."""

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        name: str | None = None,
        device: str = "auto",
        threads: int | None = None,
        floor: float | None = None,
    ) -> "ServedModel":
        """What a folder holds, tried and ready; raises InputError with a sentence if it cannot be served.

        `threads` are those of one product (None: serving/settings.py); `floor` is the share of its whole score that an
        elastic model must keep when it answers in a smaller size, which it does only if one is given.
        """
        folder = model_folder(folder)
        _check_folder(folder)
        threads = default_threads() if threads is None else threads
        if threads < 1:
            raise InputError(f"threads is {threads}; allowed: 1 or more")
        runner = open_runner(folder, device=device, threads=threads)
        torch.set_num_threads(threads)
        model = runner if isinstance(runner, Model) else runner.model if isinstance(runner, ModelRunner) else None
        if runner.tokenizer is None:
            raise InputError(f"{str(folder)!r} has no tokenizer.json, so no text can be given to its model")
        kept = read_task_record(folder) if (folder / TASK_FILE).is_file() and has_task_head(runner.config) else None
        works = _works(runner, model, kept)
        if not works:
            raise InputError(f"{str(folder)!r} has a task's head and no {TASK_FILE}, so nothing can be asked of it")
        record = read_record(folder) if model is not None and (folder / ELASTIC_FILE).is_file() else None
        schedule = SizeSchedule.of(record, floor)
        longest = runner.config.encoder.embedding.longest
        engine = read_artefact(folder).engine
        served = cls(
            name=name or folder.resolve().name,
            runner=runner,
            tokenizer=runner.tokenizer,
            encoding=Encoding.of(runner, kept.sequences.length if kept is not None else longest),
            works=works,
            schedule=schedule,
            kept=kept,
            model=model,
            record=record,
            rows="packed" if engine == "torch" else "fixed" if engine == "compiled" else "padded",
            threads=threads,
            networks={} if model is None else _networks(model, schedule),
        )
        served.warm_up()
        return served

    def longest(self, work: Operation) -> int:
        """The most tokens a sequence may have; where a model takes any number, as many as it was made for."""
        embedding = self.runner.config.encoder.embedding
        limits = [longest_input(self.runner.config) or max(embedding.longest, self.encoding.length)]
        if work == "fill_mask":
            limits += [head.longest for head in self._filling.heads if isinstance(head, MaskDecoderConfig)]
        return min(limits)

    @property
    def _filling(self) -> ModelConfig:
        """The config of what fills masks: the model, or the generator beside it."""
        config = self.runner.config
        has_head = any(head.kind == "masked_tokens" for head in config.heads)
        return config if has_head or config.generator is None else config.generator.model

    @property
    def has_embedder(self) -> bool:
        """Whether its head was trained to make vectors; else they are means of token states."""
        return any(head.kind == "embedder" for head in self.runner.config.heads)

    def check(self, work: Operation, asked: TokenSequence, subnet: Subnet | None = None) -> None:
        """Raises InputError if a sequence cannot be worked on, so that none spoils the batch it would stand in."""
        if work not in self.works:
            raise InputError(f"work is {work!r}; {self.name!r} does {', '.join(sorted(self.works))}")
        tokens, types, places = asked.tokens, asked.types, asked.places
        encoder = self.runner.config.encoder
        longest = self.longest(work)
        if tokens.ndim != 1 or not 1 <= len(tokens) <= longest:
            raise InputError(f"a sequence has the shape {tokens.shape}; {self.name!r} takes 1 to {longest} tokens")
        if int(tokens.min()) < 0 or int(tokens.max()) >= encoder.vocabulary:
            raise InputError(f"a sequence holds a token outside of 0 to {encoder.vocabulary - 1}")
        kinds = max(1, encoder.embedding.types)
        if types is not None and (types.shape != tokens.shape or int(types.min()) < 0 or int(types.max()) >= kinds):
            raise InputError(f"types must be as many as tokens, each from 0 to {kinds - 1}")
        if work == "fill_mask" and (places is None or not set(places.tolist()) <= set(range(len(tokens)))):
            raise InputError(f"places must be given for fill_mask, each from 0 to {len(tokens) - 1}")
        if work == "fill_mask" and places is not None and not 0 < len(np.unique(places)) == len(places):
            raise InputError("places must hold one place or more, and none twice")
        if subnet is not None:
            if self.model is None or (work == "fill_mask" and self._filling is not self.runner.config):
                raise InputError(f"subnet is given, and {self.name!r} has one size for {work}; allowed: None")
            subnet.cuts(self.model.encoder.units)

    def answers(self, work: Operation, asked: list[TokenSequence], subnet: Subnet | None = None) -> list[np.ndarray]:
        """What is said of sequences that are worked on together, in their order (serving/requests.py)."""
        network = None if subnet is None or work == "fill_mask" else self.networks.get(subnet)
        if network is not None:
            return answers(network, work, asked, rows=self.rows, pad=self.tokenizer.pad)
        return answers(self.runner, work, asked, rows=self.rows, pad=self.tokenizer.pad, subnet=subnet)

    def warm_up(self) -> None:
        """Does every work at every size once, so that the first caller waits for no preparation."""
        for work in sorted(self.works):
            lengths = [min(length, self.longest(work)) for length in _WARM]
            tokens = [np.full(length, self.tokenizer.start, dtype=np.int64) for length in lengths]
            asked = [TokenSequence(own, None, np.zeros(1, dtype=np.int64)) for own in tokens]
            for size in self.schedule.sizes:
                self.answers(work, asked, size.subnet)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"model folder {str(folder)!r} does not exist{bundled_hint(folder)}")
    if not (folder / "config.json").is_file():
        raise InputError(f"{str(folder)!r} has no config.json, so it is no folder of a model")
    data = read_json(folder / "config.json")
    told = data.get("model")
    if isinstance(told, dict) and told.get("decoder") is not None:
        raise InputError(f"{str(folder)!r} holds a model with a decoder; allowed: encoders")


def _works(runner: Runner, model: Model | None, kept: TaskRecord | None) -> frozenset[Operation]:
    works: set[Operation] = {"task"} if kept is not None else set()
    if isinstance(runner, OnnxRunner):  # a graph has one end
        if runner.head in (None, "embedder"):
            works.add("vectors")
        if runner.head == "masked_tokens":
            works.add("fill_mask")
    if model is not None:
        works.add("vectors")
        beside = model.generator
        if "masked_tokens" in model.heads or (beside is not None and "masked_tokens" in beside.heads):
            works.add("fill_mask")
    return frozenset(works)


def _networks(model: Model, schedule: SizeSchedule) -> dict[Subnet, Model]:
    """The smaller sizes as models of their own, which are faster than the whole one cut in every call.

    They share what is not cut, the embedding first of all, and layers that are cut alike.
    """
    made: dict[Subnet, Model] = {}
    units, whole = model.encoder.units, model.encoder
    blocks = {(index, cut): whole.blocks[index] for index, cut in enumerate(units)}
    for size in schedule.sizes:
        if size.subnet is None:
            continue
        small = extract(model, size.subnet)
        small.encoder.embedding, small.encoder.final_norm = whole.embedding, whole.final_norm
        small.encoder.relative = whole.relative
        for place, cut in enumerate(size.subnet.cuts(units)):
            small.encoder.blocks[place] = blocks.setdefault(cut, small.encoder.blocks[place])
        for kind in small.heads:
            small.heads[kind] = model.heads[kind]
        made[size.subnet] = small.eval()
    return made
