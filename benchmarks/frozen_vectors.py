"""Quality of the vectors of models without any training: similarity of sentences, and a linear classifier on top.

    python benchmarks/frozen_vectors.py small MINILM --data DATA [--out frozen.jsonl]

Every MODEL is a folder or a bundled name. Prints a line of scores in percent for each, from the dev splits of DATA:

- similarity: Spearman correlation of the cosines and the scores of glue/STS-B
- topics: accuracy of logistic regression on 192 activities of hellaswag, trained and tested on one half of dev each
- sentiment: the same on glue/SST-2, trained on 2,000 rows of train
- messages, nearest: accuracy on the support-desk messages of the demo, of logistic regression and of the nearest
  training message

Select models by the first three: the demo should not be tuned on its own dev. Needs scikit-learn.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

import bertsmith
from bertsmith.models.model import Model
from bertsmith.tasks.metrics.ranking import evaluate_similarity
from bertsmith.text import support_desk
from bertsmith.text.tables import read_split

REGULARISATION = 10.0  # C of scikit-learn, for vectors of length 1
SENTIMENT_ROWS = 2000

Labelled = Sequence[tuple[str, object]]
"""Texts with their labels."""


def unit_vectors(model: Model, texts: Sequence[str]) -> np.ndarray:
    """Return the vectors of texts, scaled to length 1."""
    return torch.nn.functional.normalize(model.encode(list(texts)), dim=-1).cpu().numpy()


def similarity(model: Model, data: Path) -> float:
    """Return the Spearman correlation of cosines and scores on dev, in percent."""
    rows = list(read_split(data / "glue" / "STS-B", "dev"))
    first, second = (unit_vectors(model, [row[name] for row in rows]) for name in ("sentence1", "sentence2"))
    scores = np.array([float(row["label"]) for row in rows])
    return evaluate_similarity((first * second).sum(-1), scores, None).score


def linear(model: Model, train: Labelled, dev: Labelled) -> tuple[float, float]:
    """Return the accuracy of logistic regression and of the nearest training text on dev, in percent."""
    known, queries = (unit_vectors(model, [text for text, _ in split]) for split in (train, dev))
    labels, expected = (np.array([label for _, label in split]) for split in (train, dev))
    classifier = LogisticRegression(C=REGULARISATION, max_iter=2000).fit(known, labels)
    nearest = labels[(queries @ known.T).argmax(-1)]
    return 100 * float((classifier.predict(queries) == expected).mean()), 100 * float((nearest == expected).mean())


def activities(data: Path) -> Labelled:
    """Return the contexts of HellaSwag's dev with the names of their activities."""
    parts = (row["context"].partition(": ") for row in read_split(data / "hellaswag", "dev"))
    return [(context, activity) for activity, _, context in parts]


def sentiment(data: Path, split: str) -> Labelled:
    return [(row["sentence"], row["label"]) for row in read_split(data / "glue" / "SST-2", split)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="file to which the lines are appended as well")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data, topics = arguments.data, activities(arguments.data)
    messages = [
        [(row["text"], row["label"]) for row in support_desk.support_desk(name)] for name in support_desk.SPLITS
    ]
    for name in arguments.models:
        model = bertsmith.load(name, device=device)
        scores = {
            "similarity": similarity(model, data),
            "topics": linear(model, topics[::2], topics[1::2])[0],
            "sentiment": linear(model, sentiment(data, "train")[:SENTIMENT_ROWS], sentiment(data, "dev"))[0],
        }
        scores["messages"], scores["nearest"] = linear(model, *messages)
        line = json.dumps({"model": name, **{key: round(score, 2) for key, score in scores.items()}})
        print(line, flush=True)
        if arguments.out is not None:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
