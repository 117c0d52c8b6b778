"""The command line: every command is a function of runs/; its flags and help come from the signature and docstring."""

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter

from bertsmith import __version__
from bertsmith.errors import InputError

COMMANDS = {
    "demo": ("bertsmith.runs.demo:demo", "Run the whole pipeline on this machine and write a report."),
    "tokenizer": ("bertsmith.runs.tokenizer:tokenizer", "Learn a vocabulary from text files, or extend one."),
    "corpus": ("bertsmith.runs.corpus:corpus", "Tokenise text files into shards for pre-training."),
    "pairs": ("bertsmith.runs.pairs:pairs", "Make pairs of related passages from documents."),
    "pretrain": ("bertsmith.runs.pretrain:pretrain", "Pre-train an encoder on a corpus."),
    "compare": ("bertsmith.runs.compare:compare", "Pre-train several recipes at an equal budget and compare them."),
    "finetune": ("bertsmith.runs.finetune:finetune", "Fine-tune a model for a task."),
    "fit": ("bertsmith.runs.fit:fit", "Find the best model within a latency and memory budget on this machine."),
    "evaluate": ("bertsmith.runs.evaluate:evaluate", "Score a fine-tuned model on a task."),
    "predict": ("bertsmith.runs.predict:predict", "Answer new inputs with a fine-tuned model."),
    "shrink": ("bertsmith.runs.shrink:shrink", "Make a fine-tuned model smaller or elastic."),
    "inspect": ("bertsmith.runs.inspect:inspect", "Show what the heads of a model attend to."),
    "import": ("bertsmith.runs.exchange:import_model", "Convert a Hugging Face folder into ours."),
    "export": ("bertsmith.runs.exchange:export_model", "Write a model for Hugging Face or ONNX Runtime."),
    "serve": ("bertsmith.runs.serve:serve", "Serve models over HTTP."),
}
"""Function (imported when the command is called) and one line of help by command."""

app = App(
    name="bertsmith",
    help="The workbench for efficient text encoders: from raw text to a model that fits your budget.",
    version=__version__,
    default_parameter=Parameter(negative_iterable=()),  # no --empty-set beside --set
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
)
for _name, (_function, _help) in COMMANDS.items():
    app.command(_function, name=_name, help=_help)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; bad input ends with one sentence on standard error and exit code 2."""
    try:
        result = app(arguments)
    except (InputError, CycloptsError) as error:
        sys.exit(_print_error(str(error)))
    except OSError as error:  # a folder that cannot be written, a full disk
        sys.exit(_print_error(f"{error.filename or 'the system'}: {error.strerror or error}"))
    except KeyboardInterrupt:
        sys.exit(_print_error("interrupted", 130))
    code = getattr(result, "exit_code", 0)
    if code:
        sys.exit(code)


def _print_error(text: str, code: int = 2) -> int:
    print(f"bertsmith: {text}", file=sys.stderr)
    return code
