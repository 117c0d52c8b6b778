"""Speed and memory of `bertsmith corpus`: MB of text per second, and peak memory of all processes together.

python benchmarks/corpus.py                          # on 20 and 160 MB of generated text
python benchmarks/corpus.py --data FILES --tokenizer FOLDER
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bertsmith.text.learn import learn_tokenizer
from small_world import small_world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--workers", default=2, type=int)
    options = parser.parse_args()
    print(f"{'text MB':>9}{'tokens':>14}{'workers':>9}{'seconds':>9}{'MB/s':>7}{'peak MB':>9}")
    with tempfile.TemporaryDirectory() as folder:
        if options.data:
            _measure(options.data, options.tokenizer, Path(folder) / "corpus", options.workers)
            return
        tokenizer = Path(folder) / "tokenizer"
        tokenizer.mkdir()
        learn_tokenizer(small_world(4_000), "wordpiece", 600, progress=False).save(tokenizer)
        # two sizes, because memory must not grow with the text
        for copies in (1, 8):
            text = Path(folder) / f"stories-{copies}.txt"
            with text.open("w", encoding="utf-8") as file:
                for copy in range(copies):
                    for story in small_world(170_000, seed=copy):
                        file.write(story + "\n\n")
            _measure([text], tokenizer, Path(folder) / f"corpus-{copies}", options.workers)


def _measure(data: list[Path], tokenizer: Path, out: Path, workers: int) -> None:
    # a separate process, so that the memory of this one is not counted
    command = [sys.executable, "-m", "bertsmith", "corpus", *map(str, data), "--tokenizer", str(tokenizer)]
    subprocess.run([*command, "--out", str(out), "--workers", str(workers)], check=True, stdout=subprocess.DEVNULL)
    row = json.loads((out / "result.json").read_text())
    print(
        f"{row['megabytes']:>9.1f}{row['tokens']:>14,}{workers:>9}{row['seconds']:>9.1f}"
        f"{row['megabytes_per_second']:>7.1f}{row['peak_memory_mb']:>9.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
