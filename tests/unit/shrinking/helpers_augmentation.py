"""A tiny masked language model over a handful of words."""

import copy
import json

import bertsmith
from bertsmith.models.model import Model
from bertsmith.text.learn import Kind, learn_tokenizer
from bertsmith.text.rows import Table, table_of
from bertsmith.text.tokenizer import Tokenizer

TEXTS = [
    "The old smith forges an iron gate by the cold river.",
    "My neighbour REPAIRS the heavy anvil; don't forget!",
    "Seven lanterns (broken) near Ann's harbour",
    "the smith weighs seven letters and the mp3 clock",
]


def masked_lm(kind: Kind = "wordpiece", *, max_length: int = 64, tokens: int = 160) -> Model:
    """Return a tiny BERT in float64, so that rounding does not affect the ranking of words."""
    tokenizer = learn_tokenizer(TEXTS * 4, kind, tokens, progress=False)
    if kind == "unigram":  # it learns hardly any whole word from so little text
        content = copy.deepcopy(tokenizer.content)
        words = "smith seven lanterns river forges gate anvil clock letters weighs harbour"
        content["model"]["vocab"] += [[f"▁{word}", -1.0] for word in words.split()]
        tokenizer = Tokenizer.from_json(json.dumps(content))
    sizes = {"width": 16, "heads": 2, "layers": 2, "max_length": max_length, "init_std": 0.3}
    model = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, **sizes), seed=0).double().eval()
    model.tokenizer = tokenizer
    return model


def rows_of(*texts: str) -> Table:
    return table_of([{"text": text, "label": "no" if index % 2 else "yes"} for index, text in enumerate(texts)], "rows")
