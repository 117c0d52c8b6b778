"""`bertsmith evaluate --metric word_perplexity`: perplexity per word of a causal language model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bertsmith.data.progress import progress_bar
from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.runs.folder import RECIPE
from bertsmith.runs.result import OneShotResult, print_plain
from bertsmith.runs.text_run import TextRun, split_name, window_length
from bertsmith.text.tokenizer import ROLES
from bertsmith.text.wikitext import join_articles, published_articles, running_text
from bertsmith.toml import read_toml
from bertsmith.training.word_perplexity import encode_texts, measure, token_log_probabilities

CAUSAL_OBJECTIVES = ("causal_lm", "masked_and_causal")
DEFAULT_LENGTH = 512


@dataclass(frozen=True, kw_only=True)
class WordPerplexityResult(OneShotResult):
    """Perplexity of a causal language model on a text."""

    metric: str = "word_perplexity"
    word_perplexity: float
    """exp of the negative log-likelihood per word of the original text."""
    bits_per_byte: float
    token_perplexity_not_comparable: float
    """Perplexity per token: it depends on the vocabulary."""
    nats: float
    """Negative log-likelihood of the whole text."""
    words: int
    """Words of the original text, separated by white space."""
    count: Literal["words", "published"]
    """Divisor of the log-likelihood: words, or words and line ends, empty lines included."""
    line_ends: int
    """Predicted line ends; 0 with count = "words"."""
    bytes: int
    """UTF-8 bytes of the original text and the predicted line ends."""
    tokens: int
    tokens_per_word: float
    unknown_tokens: int
    texts: int
    text: Literal["raw", "detokenised"]
    """The text that was scored: as it stands, or with WikiText's tokenisation undone."""
    unit: Literal["documents", "articles"]
    """Texts that were scored on their own."""
    is_lossless: bool
    """Whether decoding the tokens restores every text; if not, this is the perplexity of the normalised text."""
    length: int
    stride: int
    split: str
    model: str
    data: str

    @property
    def score(self) -> float:
        return self.word_perplexity


def evaluate_word_perplexity(
    run: TextRun,
    *,
    field: str = "text",
    length: int | None = None,
    stride: int | None = None,
    articles: bool = False,
    detokenise: bool = False,
    count: Literal["words", "published"] = "words",
    allow_lossy: bool = False,
) -> WordPerplexityResult:
    """Score the documents of a split with a causal language model, and write result.json."""
    originals = run.read_texts(field)
    if count == "published":
        texts = _published_texts(originals, articles=articles, detokenise=detokenise)
    else:
        documents = join_articles(originals) if articles else originals
        documents = [running_text(document) for document in documents] if detokenise else documents
        # line ends are not predicted, nor is white space at both ends of a text
        texts = [document.replace("\n", " ").strip() for document in documents]
    model = run.load()
    check_causal(model, run.folder)
    tokenizer = model.require_tokenizer()
    length = window_length(model, length, DEFAULT_LENGTH)
    stride = max(1, length // 2) if stride is None else stride
    rows, is_lossless = encode_texts(tokenizer, texts, allow_lossy=allow_lossy)
    unknown = [tokenizer.vocabulary[name] for name in ROLES["unknown"] if name in tokenizer.vocabulary]
    with progress_bar("evaluate") as watch:
        values = token_log_probabilities(model, rows, start=tokenizer.start, length=length, stride=stride, watch=watch)
    found = measure(values, originals, line_ends=sum(text.count("\n") for text in texts))
    result = WordPerplexityResult(
        word_perplexity=found.word_perplexity,
        bits_per_byte=found.bits_per_byte,
        token_perplexity_not_comparable=found.token_perplexity,
        nats=found.nats,
        words=found.words,
        count=count,
        line_ends=found.line_ends,
        bytes=found.bytes,
        tokens=found.tokens,
        tokens_per_word=found.tokens / found.words,
        unknown_tokens=sum(int(np.isin(row, unknown).sum()) for row in rows),
        texts=len(texts),
        text="detokenised" if detokenise else "raw",
        unit="articles" if articles else "documents",
        is_lossless=is_lossless,
        length=length,
        stride=stride,
        split=split_name(run.data, run.split),
        model=str(run.folder),
        data=run.data,
    )
    run.write(result)
    _print_result(result, run.out)
    return result


def _published_texts(lines: list[str], *, articles: bool, detokenise: bool) -> list[str]:
    if not articles or detokenise:
        given = "with --detokenise" if detokenise else "without --articles"
        raise InputError(
            f"--count published is given {given}; published figures are of WikiText's raw articles: use --articles and "
            "omit --detokenise"
        )
    return published_articles(lines)


def check_causal(model: Model, folder: Path) -> None:
    """Raise InputError unless the model was trained to predict next tokens."""
    recipe = read_toml(folder / RECIPE) if (folder / RECIPE).is_file() else {}
    objective = recipe.get("objective", {}).get("kind")
    if not model.config.is_causal and objective not in CAUSAL_OBJECTIVES:
        raise InputError(
            f"{str(folder)!r} has no word perplexity: its attention is not causal and its {RECIPE} names no objective "
            f"of next tokens ({', '.join(CAUSAL_OBJECTIVES)}); a masked language model has a pseudo-perplexity only"
        )


def _print_result(result: WordPerplexityResult, out: Path) -> None:
    ends = f" and {result.line_ends:,} line ends" if result.count == "published" else ""
    lossy = "" if result.is_lossless else " of the text as the tokenizer normalises it"
    print_plain(
        f"{result.split}: word perplexity {result.word_perplexity:.4g}{lossy}, {result.bits_per_byte:.4f} bits per "
        f"byte; {result.words:,} words{ends}, {result.text}, {result.tokens_per_word:.3f} tokens per word, windows of "
        f"{result.length} tokens every {result.stride}\n"
        f"perplexity per token {result.token_perplexity_not_comparable:.4g} (not comparable between vocabularies); "
        f"written to {out}"
    )
