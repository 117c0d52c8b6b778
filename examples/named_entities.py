"""Train a named-entity recogniser and print the entities of a sentence.

    python examples/named_entities.py people.jsonl --out runs/entities

Each line of the file is a sentence: {"words": ["Ada", "lives", "in", "Paris"], "tags": ["B-PER", "O", "O", "B-LOC"]}.
"""

import argparse
from pathlib import Path

import bertsmith


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a JSON Lines file, or a folder with train.jsonl and dev.jsonl")
    parser.add_argument("--model", default="small", help="bundled model, folder or Hugging Face folder to start from")
    parser.add_argument("--epochs", type=float, help="default: as published for the model's family and size")
    parser.add_argument("--sentence", default="Grace moved from London to New York", help="a sentence to tag")
    parser.add_argument("--out", type=Path, default=Path("runs/entities"), help="folder for the fine-tuned model")
    options = parser.parse_args()

    result = bertsmith.finetune(
        options.model, data=options.data, task="tagging", epochs=options.epochs, out=options.out
    )
    print(f"{result.metric} on the held-out sentences: {result.score:.1f}")

    tagger = bertsmith.Predictor.load(options.out)
    words = options.sentence.split()
    (tags,) = tagger.predict([words])
    for word, tag in zip(words, tags, strict=True):
        print(f"{tag:8} {word}")


if __name__ == "__main__":
    main()
