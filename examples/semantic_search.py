"""Search a text file by meaning with the bundled model: no training, no download.

    python examples/semantic_search.py notes.txt "how do I get my money back"

Each line of the file is one text.
"""

import argparse
from pathlib import Path

import bertsmith


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a file with one text per line")
    parser.add_argument("query", help="what to look for")
    parser.add_argument("--top", type=int, default=5, help="number of results")
    parser.add_argument("--model", default="small", help="bundled model or folder")
    options = parser.parse_args()

    texts = [line.strip() for line in options.file.read_text(encoding="utf-8").splitlines() if line.strip()]
    index = bertsmith.SearchIndex(bertsmith.load(options.model), texts)
    for hit in index.search(options.query, top_k=options.top):
        print(f"{hit.score:.2f}  {hit.text}")


if __name__ == "__main__":
    main()
