"""Quality of the vectors of models without any training: similarity of sentences, and a linear classifier on top.

    python benchmarks/frozen_vectors.py small MINILM --sts STS-B

Every MODEL is a folder or a bundled name. Prints the Spearman correlation of the cosines with the scores of the dev
split of --sts (columns sentence1, sentence2, label), and the accuracy on the demo's support-desk messages of logistic
regression and of the nearest training message. Needs scikit-learn.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

import bertsmith
from bertsmith.models.model import Model
from bertsmith.tasks.data_source import task_splits
from bertsmith.tasks.metrics.ranking import evaluate_similarity
from bertsmith.text import support_desk

REGULARISATION = 10.0  # C of scikit-learn, for vectors of length 1


def unit_vectors(model: Model, texts: list[str]) -> np.ndarray:
    """Return the vectors of texts, scaled to length 1."""
    return torch.nn.functional.normalize(model.encode(texts), dim=-1).numpy()


def similarity(model: Model, folder: Path) -> float:
    """Return the Spearman correlation of cosines and scores on dev, in percent."""
    rows = list(task_splits(folder, file_is="dev").read("dev"))
    first, second = (unit_vectors(model, [row[name] for row in rows]) for name in ("sentence1", "sentence2"))
    scores = np.array([float(row["label"]) for row in rows])
    return evaluate_similarity((first * second).sum(-1), scores, None).score


def messages(model: Model) -> tuple[float, float]:
    """Return the accuracy of logistic regression and of the nearest neighbour on the messages' dev, in percent."""
    train, dev = support_desk.support_desk("train"), support_desk.support_desk("dev")
    known, queries = (unit_vectors(model, [row["text"] for row in rows]) for rows in (train, dev))
    labels, expected = (np.array([row["label"] for row in rows]) for rows in (train, dev))
    linear = LogisticRegression(C=REGULARISATION, max_iter=2000).fit(known, labels)
    nearest = labels[(queries @ known.T).argmax(-1)]
    return 100 * float((linear.predict(queries) == expected).mean()), 100 * float((nearest == expected).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--sts", type=Path, required=True, help="folder with a dev split of scored pairs")
    arguments = parser.parse_args()
    for name in arguments.models:
        model = bertsmith.load(name)
        linear, nearest = messages(model)
        row = {"model": name, "spearman": similarity(model, arguments.sts), "linear": linear, "nearest": nearest}
        print(json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}))


if __name__ == "__main__":
    main()
