"""Search a text file by meaning with the bundled model: no training, no download.

    python examples/semantic_search.py notes.txt "how do I get my money back"

Each line of the file is one text.
"""

import argparse
from pathlib import Path

import torch

import bertsmith


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a file with one text per line")
    parser.add_argument("query", help="what to look for")
    parser.add_argument("--top", type=int, default=5, help="number of results")
    parser.add_argument("--model", default="small", help="bundled model or folder")
    options = parser.parse_args()

    texts = [line.strip() for line in options.file.read_text(encoding="utf-8").splitlines() if line.strip()]
    model = bertsmith.load(options.model)
    vectors = torch.nn.functional.normalize(model.encode([options.query, *texts]), dim=-1)
    similarity = vectors[1:] @ vectors[0]  # cosine of each text with the query
    for index in similarity.argsort(descending=True)[: options.top].tolist():
        print(f"{similarity[index]:.2f}  {texts[index]}")


if __name__ == "__main__":
    main()
