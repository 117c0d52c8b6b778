"""A model for users: a network with its tokenizer, which takes texts."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import bertsmith
from bertsmith.answers.sequences import Ragged, TextEncoding, length_batches
from bertsmith.data.batch import packed, padded
from bertsmith.data.inference import (
    InferencePrecision,
    in_background,
    inference_autocast,
    is_half,
    to_device,
    token_budget,
    windows,
)
from bertsmith.data.layout import SequenceLayout
from bertsmith.data.progress import progress_bar
from bertsmith.errors import InputError, nearest
from bertsmith.layers.subnet import Subnet
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import Encoder, EncoderInputs, Want
from bertsmith.models.heads.task import Embedder, Similarity, TextsConfig
from bertsmith.models.network import Network
from bertsmith.models.search import Hit, SearchIndex, similarities
from bertsmith.text.tokenizer import Tokenizer


class Model(Network):
    """A network with its tokenizer; `load` and `build` return one."""

    can_embed = True
    generator: "Model | None"

    def __init__(
        self, config: ModelConfig, encoder: Encoder, heads: dict[str, nn.Module], generator: "Model | None" = None
    ) -> None:
        super().__init__(config, encoder, heads, generator)
        self.tokenizer: Tokenizer | None = None
        self._max_seq_length: int | None = None

    @property
    def torch_model(self) -> "Model":
        """The model itself: part of the contract of runners (engines/base.py)."""
        return self

    @overload
    def encode(
        self, texts: str | Iterable[str], *, convert_to: Literal["tensor"] = ..., **options: Unpack["EncodeArguments"]
    ) -> Tensor: ...
    @overload
    def encode(
        self, texts: str | Iterable[str], *, convert_to: Literal["numpy"], **options: Unpack["EncodeArguments"]
    ) -> np.ndarray: ...
    def encode(
        self,
        texts: str | Iterable[str],
        *,
        batch_size: int | None = None,
        normalize: bool = False,
        convert_to: Literal["tensor", "numpy"] = "tensor",
        prompt: str | None = None,
        prompt_name: str | None = None,
        show_progress: bool = False,
        subnet: Subnet | None = None,
        precision: InferencePrecision = "auto",
        **aliases: Unpack["EncodeAliases"],
    ) -> Tensor | np.ndarray:
        """Return one float32 vector per text: the output of the embedder head, or else the mean of the hidden states.

        Texts of similar length share a batch of a fixed number of tokens, and of at most `batch_size` texts if that is
        given; the vectors are in the order of the texts. `normalize` gives them length 1 if the model does not.
        `prompt` is put before every text; `prompt_name` selects one of the model's own. `show_progress` shows a bar on
        a terminal. The names of sentence-transformers, such as `normalize_embeddings`, work as well.
        Shape: (texts, width); (width,) for a single string.
        """
        normalize = aliases.pop("normalize_embeddings", normalize)
        show_progress = bool(aliases.pop("show_progress_bar", show_progress))
        if aliases.pop("convert_to_numpy", False) and not aliases.pop("convert_to_tensor", False):
            convert_to = "numpy"
        aliases.pop("convert_to_tensor", None)
        if aliases:
            own = [name for name in inspect.signature(Model.encode).parameters if name not in ("self", "aliases")]
            names = [*own, *EncodeAliases.__annotations__]
            raise InputError(f"encode has no argument {next(iter(aliases))!r}; {nearest(next(iter(aliases)), names)}")
        if convert_to not in ("tensor", "numpy"):
            raise InputError(f"convert_to is {convert_to!r}; allowed: tensor, numpy")
        rows = [texts] if isinstance(texts, str) else list(texts)
        check_texts(rows, batch_size)
        is_half(self.device, precision)  # raises InputError for an unknown precision
        prefix = self._prompt(prompt, prompt_name)
        options = EncodeOptions(batch_size, subnet, precision)
        parts = [torch.empty(0, self._vector_width, device=self.device)]
        with progress_bar("encode", is_shown=show_progress) as watch:
            for window in self._encode_windows(windows(with_prompt(prefix, rows)), options) if rows else ():
                parts.append(window)
                watch(sum(map(len, parts)), len(rows))
        vectors = torch.cat(parts)
        vectors = functional.normalize(vectors, dim=-1) if normalize else vectors
        vectors = vectors[0] if isinstance(texts, str) else vectors
        return vectors.cpu().numpy() if convert_to == "numpy" else vectors

    def encode_query(self, texts: Iterable[str], **options: Unpack["EncodeArguments"]) -> Tensor:
        """Return the vectors of `encode` with the model's prompt for queries, if it has one."""
        return self._encode_as(_QUERY_PROMPTS, texts, options)

    def encode_document(self, texts: Iterable[str], **options: Unpack["EncodeArguments"]) -> Tensor:
        """Return the vectors of `encode` with the model's prompt for documents, if it has one."""
        return self._encode_as(_DOCUMENT_PROMPTS, texts, options)

    def encode_stream(
        self,
        texts: Iterable[str],
        *,
        batch_size: int | None = None,
        subnet: Subnet | None = None,
        precision: InferencePrecision = "auto",
    ) -> Iterator[Tensor]:
        """Yield the vectors of `encode` in order, some thousand texts at a time: for texts that do not fit in memory.

        Shape: (texts of the window, width) each.
        """
        if isinstance(texts, str):
            raise InputError("encode_stream takes an iterable of texts, not a string; put it in a list")
        check_texts((), batch_size)
        is_half(self.device, precision)  # raises InputError for an unknown precision
        prefix = self._prompt(None, None)
        prompted = with_prompt(prefix, texts)
        return self._encode_windows(windows(prompted), EncodeOptions(batch_size, subnet, precision))

    def encode_window(self, texts: Sequence[str], *, precision: InferencePrecision = "auto") -> Tensor:
        """Return the vectors of one window of `encode_stream`: (texts, width)."""
        prompted = with_prompt(self._prompt(None, None), texts)
        return next(self._encode_windows([list(prompted)], EncodeOptions(None, None, precision)))

    def similarity(self, first: "Texts", second: "Texts") -> Tensor:
        """Return the similarity of every text or vector of `first` with every one of `second`: (n, m).

        It is the cosine unless the model was trained for another comparison.
        """
        return similarities(self._as_vectors(first), self._as_vectors(second), self.similarity_kind)

    def rank(self, query: str, texts: Iterable[str], *, top_k: int | None = None) -> list[Hit]:
        """Return texts with their similarity to a query, best first; `SearchIndex` keeps the vectors of a corpus."""
        return SearchIndex(self, texts).search(query, top_k=top_k)

    @property
    def similarity_kind(self) -> Similarity:
        """The comparison of vectors that the model was trained for."""
        return "cosine" if self.config.embedder is None else self.config.embedder.similarity

    @property
    def max_seq_length(self) -> int:
        """Number of tokens that `encode` truncates texts to; a changed value of an embedder is saved with the model."""
        return self._max_seq_length or self.config.text_length

    @max_seq_length.setter
    def max_seq_length(self, length: int) -> None:
        embedding, embedder = self.config.encoder.embedding, self.config.embedder
        if length < 1 or (embedding.positions != "none" and length > embedding.max_length):
            raise InputError(f"max_seq_length is {length}; allowed: 1 to {embedding.max_length}")
        self._max_seq_length = length
        if embedder is not None:
            changed = embedder.changed(texts=embedder.texts.changed(max_length=length))
            heads = tuple(changed if head is embedder else head for head in self.config.heads)
            self.config = self.config.changed(heads=heads)

    def save(self, folder: str | Path, *, force: bool = False) -> None:
        """Save the model as a folder of ours, which `bertsmith.load` opens; the short form of `bertsmith.save`."""
        bertsmith.save(self, folder, force=force)

    def save_pretrained(self, folder: str | Path, *, force: bool = False) -> None:
        """Save the model for transformers and sentence-transformers; the short form of `bertsmith.export`."""
        bertsmith.export(self, folder, force=force)

    @overload
    def fill_mask(  # type: ignore[overload-overlap]  # a string is an iterable of strings, too
        self, text: str, *, top_k: int = ...
    ) -> "Filled": ...
    @overload
    def fill_mask(self, text: Iterable[str], *, top_k: int = ...) -> list["Filled"]: ...
    @torch.inference_mode()
    def fill_mask(self, text: str | Iterable[str], *, top_k: int = 5) -> "Filled | list[Filled]":
        """Return the most probable tokens of every mask in the text, with their probabilities; a list for a list.

        A model without a masked_tokens head uses its generator.
        """
        if not isinstance(text, str):
            return [self.fill_mask(one, top_k=top_k) for one in text]
        if top_k < 1:
            raise InputError(f"top_k is {top_k}; allowed: 1 or more")
        tokenizer = self.require_tokenizer()
        if "masked_tokens" not in self.heads and self.generator is not None:
            self.generator.tokenizer = tokenizer
            return self.generator.fill_mask(text, top_k=top_k)
        batch = self._batch([text])
        is_mask = batch["input_ids"] == tokenizer.mask
        if not is_mask.any():
            mask = tokenizer.tokens([tokenizer.mask])[0]
            raise InputError(f"the text {text!r} contains no {mask} to fill")
        head = self.head("masked_tokens")
        with self.evaluating():
            layout = SequenceLayout.rows(batch["input_ids"], batch["attention_mask"])
            positions = is_mask.flatten().nonzero().squeeze(-1)
            inputs = EncoderInputs(batch["input_ids"], layout, batch["token_type_ids"])
            output = self.run(inputs, Want(masked_positions=positions))
            scores = head(output.masked_states, self.token_table).float()
        best = scores.softmax(-1).topk(min(top_k, self.config.encoder.vocabulary))
        return [
            list(zip(tokenizer.tokens(tokens), probabilities, strict=True))
            for tokens, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def require_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer; raise InputError if it has none."""
        if self.tokenizer is None:
            raise InputError("this model has no tokenizer; load one with its folder or set model.tokenizer")
        return self.tokenizer

    def _encode_windows(self, texts: Iterable[list[str]], options: "EncodeOptions") -> Iterator[Tensor]:
        """Yield the vectors of windows of texts; a thread tokenises the next window."""
        tokenizer, embedding = self.require_tokenizer(), self.config.encoder.embedding
        has_types = embedding.types > 1 and tokenizer.single_texts_have_types
        encoding = TextEncoding(tokenizer, self.max_seq_length, has_types)
        for tokens, types in in_background(encoding.sequences(window) for window in texts):
            yield self._encode_window(tokens, types, options)

    @torch.inference_mode()
    def _encode_window(self, tokens: Ragged, types: Ragged | None, options: "EncodeOptions") -> Tensor:
        """Return the vectors of sequences in their order, (sequences, width)."""
        device = self.device
        # kernels for packed sequences are for half precision on a GPU; on a CPU they would be padded in every layer
        collate = packed if device.type != "cpu" and is_half(device, options.precision) else padded
        batches = list(length_batches(tokens.lengths, token_budget(device), options.batch_size))
        vectors = []
        with self.evaluating(), inference_autocast(device, options.precision):
            for batch in batches:
                rows, layout = collate(tokens.take(batch), 0)  # padding is masked: any id will do
                inputs = EncoderInputs(to_device(rows, device), to_device(layout, device), subnet=options.subnet)
                if types is not None:
                    row_types, _ = collate(types.take(batch), 0)
                    inputs = replace(inputs, types=to_device(row_types, device))
                computed = self.vectors(inputs)
                vectors.append(computed.to(torch.promote_types(computed.dtype, torch.float32)))
        order = torch.from_numpy(np.concatenate(batches).argsort())
        return torch.cat(vectors)[to_device(order, device)]

    @property
    def _vector_width(self) -> int:
        """Width of the vectors of `encode`."""
        embedders = [head for head in self.heads.values() if isinstance(head, Embedder)]
        return embedders[0].width if embedders else self.config.encoder.width

    def _prompt(self, prompt: str | None, name: str | None) -> str:
        """Return the text to put before every text: the given one, a named one, or the model's default."""
        texts = TextsConfig() if self.config.embedder is None else self.config.embedder.texts
        if prompt is not None and name is not None:
            raise InputError("prompt and prompt_name are given; allowed: one of them")
        if prompt is not None:
            return prompt
        name = texts.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in texts.prompts:
            known = ", ".join(texts.prompts) or "none"
            raise InputError(f"prompt_name is {name!r}; the names of this model's prompts are: {known}")
        return texts.prompts[name]

    def _encode_as(self, names: tuple[str, ...], texts: Iterable[str], options: "EncodeArguments") -> Tensor:
        """Return the vectors of `encode` with the first of these prompts that the model has."""
        prompts = {} if self.config.embedder is None else self.config.embedder.texts.prompts
        known = next((name for name in names if name in prompts), None)
        arguments = EncodeArguments(prompt=None if known is None else prompts[known])
        arguments.update(options)
        return self.encode(texts, **arguments)

    def _as_vectors(self, given: "Texts") -> Tensor:
        """Return vectors as a tensor, (n, width); texts are encoded."""
        if isinstance(given, np.ndarray | Tensor):
            vectors = torch.as_tensor(given, device=self.device)
            return vectors[None] if vectors.dim() == 1 else vectors
        return self.encode([given] if isinstance(given, str) else given)

    def _batch(self, texts: Sequence[str]) -> dict[str, Tensor]:
        arrays = self.require_tokenizer().encode(list(texts), max_length=self.config.encoder.embedding.max_length)
        batch = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
        if not self.config.encoder.embedding.types:
            batch["token_type_ids"] = None  # type: ignore[assignment]
        return batch


@dataclass(frozen=True)
class EncodeOptions:
    """Options of `Model.encode`."""

    batch_size: int | None
    subnet: Subnet | None
    precision: InferencePrecision


class EncodeAliases(TypedDict, total=False):
    """Arguments of `Model.encode` by their names in sentence-transformers."""

    normalize_embeddings: bool
    convert_to_numpy: bool
    convert_to_tensor: bool
    show_progress_bar: bool | None


class EncodeArguments(EncodeAliases, total=False):
    """Arguments of `Model.encode` that `encode_query` and `encode_document` pass on."""

    batch_size: int | None
    normalize: bool
    prompt: str | None
    prompt_name: str | None
    show_progress: bool
    subnet: Subnet | None
    precision: InferencePrecision


Texts: TypeAlias = str | Iterable[str] | Tensor | np.ndarray
"""Texts, or vectors of texts that were encoded before."""
Filled: TypeAlias = list[list[tuple[str, float]]]
"""The most probable tokens of every mask of a text, with their probabilities."""
_QUERY_PROMPTS = ("query",)
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


def with_prompt(prompt: str, texts: Iterable[str]) -> Iterable[str]:
    """Put a prompt before every text; values that are not texts stay, for the tokenizer to refuse."""
    return (prompt + text if isinstance(text, str) else text for text in texts) if prompt else texts


def check_texts(texts: Sequence[str], batch_size: int | None) -> None:
    """Raise InputError if `texts` is not a list of strings or the batch size is not positive."""
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"texts[{index}] is {type(text).__name__}; it must be a string")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size is {batch_size}; allowed: 1 or more")
