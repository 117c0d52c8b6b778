"""The command line: every command is a function in runs/, and its signature and docstring define flags and help."""

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter, UnknownOptionError

from bertsmith import __version__
from bertsmith.errors import InputError

COMMANDS = {
    "demo": ("bertsmith.runs.demo:demo", "Run the whole pipeline on this machine and write a report."),
    "tokenizer": ("bertsmith.runs.tokenizer:tokenizer", "Learn a vocabulary from text files, or extend one."),
    "corpus": ("bertsmith.runs.corpus:corpus", "Tokenise text files into shards for pre-training."),
    "pairs": ("bertsmith.runs.pairs:pairs", "Make pairs of related texts to train text embeddings."),
    "pretrain": ("bertsmith.runs.pretrain:pretrain", "Pre-train an encoder on a corpus."),
    "compare": ("bertsmith.runs.compare:compare", "Pre-train several recipes with the same budget and compare them."),
    "finetune": ("bertsmith.runs.finetune:finetune", "Fine-tune a model for a task."),
    "fit": ("bertsmith.runs.fit:fit", "Find the best model within a latency and memory budget on this machine."),
    "evaluate": ("bertsmith.runs.evaluate:evaluate", "Score a fine-tuned model on a task."),
    "predict": ("bertsmith.runs.predict:predict", "Predict with a fine-tuned model."),
    "shrink": ("bertsmith.runs.shrink:shrink", "Make a fine-tuned model smaller or elastic."),
    "convert": ("bertsmith.runs.convert:convert_model", "Replace full attention by FAVOR+ (Performer), or back."),
    "inspect": ("bertsmith.runs.inspect:inspect", "Visualise the attention of a model."),
    "import": ("bertsmith.runs.exchange:import_model", "Convert a Hugging Face model folder to Bertsmith's format."),
    "export": ("bertsmith.runs.exchange:export_model", "Export a model to Hugging Face transformers, ONNX or int8."),
    "serve": ("bertsmith.runs.serve:serve", "Serve models over HTTP."),
}
"""Function and one-line summary of every command. The function is imported only when its command is called."""
RENAMED_FLAGS = {"--part": "--split", "--pieces": "--tokens", "--shortest": "--min-words", "--longest": "--max-words"}
"""New names of renamed flags, for the error message."""


def make_app(command: str | None = None) -> App:
    """Build the command-line app; `command` gets the help text of its docstring, all others their summary."""
    app = App(
        name="bertsmith",
        help="The workbench for efficient text encoders: from raw text to a model that fits your budget.",
        version=__version__,
        default_parameter=Parameter(negative_iterable=()),  # no --empty-set beside --set
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        help_format="markdown" if command in COMMANDS else "plaintext",  # Markdown takes 0.15 s to import
    )
    for name, (function, summary) in COMMANDS.items():
        app.command(function, name=name, help=None if name == command else summary)
    return app


app = make_app()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; bad input prints one sentence to standard error and exits with code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        result = make_app(arguments[0] if arguments else None)(arguments)
    except UnknownOptionError as error:
        flag = (error.token.keyword or error.token.value).partition("=")[0]
        new_flag = RENAMED_FLAGS.get(flag)
        is_known = new_flag is not None and any(new_flag in argument.names for argument in error.argument_collection)
        sys.exit(_print_error(f"unknown option {flag}; it was renamed to {new_flag}" if is_known else str(error)))
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
