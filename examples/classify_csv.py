"""Fine-tune a text classifier on a CSV file, then classify new texts.

    python examples/classify_csv.py reviews.csv --text review --label stars --out runs/reviews

Without a dev file every tenth row is held out for evaluation.
"""

import argparse
from pathlib import Path

import bertsmith


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", help="a CSV file with a column of texts and a column of labels")
    parser.add_argument("--text", default="text", help="column of the texts")
    parser.add_argument("--label", default="label", help="column of the labels")
    parser.add_argument("--model", default="small", help="bundled model, folder or Hugging Face folder to start from")
    parser.add_argument("--epochs", type=float, help="default: as published for the model's family and size")
    parser.add_argument("--out", type=Path, default=Path("runs/classifier"), help="folder for the fine-tuned model")
    options = parser.parse_args()

    result = bertsmith.finetune(
        options.model,
        data=options.csv,
        task="classification",
        column=[f"text={options.text}", f"label={options.label}"],
        epochs=options.epochs,
        out=options.out,
    )
    print(f"{result.metric} on the held-out rows: {result.score:.1f}")

    # the folder holds everything that is needed later: model, tokenizer, labels
    classifier = bertsmith.Predictor.load(options.out)
    for text in ("Arrived on time and works.", "It broke after a week."):
        answer = classifier.details([text])[0]
        print(f"{answer['answer']} ({answer['score']:.0%})  {text}")


if __name__ == "__main__":
    main()
