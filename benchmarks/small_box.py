"""Write a pre-trained model into the package as the bundled model `small`: float16 weights, compact tokenizer, recipe.

    python benchmarks/small_box.py runs/small --vectors runs/vectors

RUN is the folder of `bertsmith pretrain disentangled-small`. --vectors is a fine-tuning of it for the task `embedding`
with a frozen embedding, whose encoder and head replace its own. The model card is kept. Prints the bytes of every file.
"""

import argparse
import json
import shutil
from pathlib import Path

import bertsmith
from bertsmith.checkpoint.hf.writing import tokenizer_config
from bertsmith.files import write_json, write_seal
from bertsmith.models.convert import with_encoder
from bertsmith.toml import read_toml, to_toml

ROOT = Path(__file__).parents[1]


def main() -> None:
    arguments = _arguments()
    model, box = bertsmith.load(arguments.run), arguments.box
    if arguments.vectors is not None:
        model = with_encoder(model, bertsmith.load(arguments.vectors))
    card = (box / "README.md").read_text(encoding="utf-8") if (box / "README.md").exists() else "# small\n"
    shutil.rmtree(box, ignore_errors=True)
    bertsmith.save(model, box, precision="float16")
    tokenizer = json.loads((box / "tokenizer.json").read_text(encoding="utf-8"))
    compact = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
    (box / "tokenizer.json").write_text(compact, encoding="utf-8")
    write_json(box / "tokenizer_config.json", tokenizer_config(model))
    write_seal(box)
    (box / "README.md").write_text(card, encoding="utf-8")
    recipe = read_toml(arguments.run / "recipe.toml")
    (box / "recipe.toml").write_text(to_toml({**recipe, "data": None}), encoding="utf-8")
    sizes = {path.name: path.stat().st_size for path in sorted(box.iterdir())}
    for name, size in sizes.items():
        print(f"{size:>12,}  {name}")
    print(f"{sum(sizes.values()):>12,}  in all")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--vectors", type=Path, help="folder of a fine-tuned embedder")
    parser.add_argument("--box", type=Path, default=ROOT / "src" / "bertsmith" / "bundled" / "small")
    return parser.parse_args()


if __name__ == "__main__":
    main()
