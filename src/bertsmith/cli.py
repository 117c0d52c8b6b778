"""The command line: every command is a function in runs/, and its signature and docstring define flags and help."""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from cyclopts import App, CoercionError, CycloptsError, Parameter, UnknownOptionError

from bertsmith import __version__
from bertsmith.data.devices import Device, unknown_device
from bertsmith.errors import InputError

COMMANDS = {
    "demo": ("bertsmith.runs.demo:demo", "Run the whole pipeline on this machine and write a report."),
    "tokenizer": ("bertsmith.runs.tokenizer:tokenizer", "Learn a vocabulary from text files, or extend one."),
    "corpus": ("bertsmith.runs.corpus:corpus", "Tokenise text files into shards for pre-training."),
    "pairs": ("bertsmith.runs.pairs:pairs", "Make pairs of related texts to train text embeddings."),
    "pretrain": ("bertsmith.runs.pretrain:pretrain", "Pre-train an encoder on a corpus."),
    "compare": ("bertsmith.runs.compare:compare", "Pre-train several recipes with the same budget and compare them."),
    "reproduce": ("bertsmith.runs.reproduce:reproduce", "Run tables of experiments and decide their claims."),
    "finetune": ("bertsmith.runs.finetune:finetune", "Fine-tune a model for a task."),
    "fit": ("bertsmith.runs.fit:fit", "Find the best model within a latency and memory budget on this machine."),
    "evaluate": ("bertsmith.runs.evaluate:evaluate", "Score a fine-tuned model on a task."),
    "predict": ("bertsmith.runs.predict:predict", "Predict with a fine-tuned model."),
    "encode": ("bertsmith.runs.encode:encode", "Encode texts as vectors."),
    "fill-mask": ("bertsmith.runs.encode:fill_mask", "Fill the masks of a text."),
    "shrink": ("bertsmith.runs.shrink:shrink", "Make a fine-tuned model smaller or elastic."),
    "convert": ("bertsmith.runs.convert:convert_model", "Replace full attention by FAVOR+ (Performer), or back."),
    "inspect": ("bertsmith.runs.inspect:inspect", "Visualise the attention of a model."),
    "import": ("bertsmith.runs.exchange:import_model", "Convert a Hugging Face model folder to Bertsmith's format."),
    "export": ("bertsmith.runs.exchange:export_model", "Export a model to Hugging Face transformers, ONNX or int8."),
    "push": ("bertsmith.runs.push:push", "Upload a finished folder to the Hugging Face hub."),
    "list": ("bertsmith.runs.listing:list_names", "List bundled models, presets, recipes and tasks."),
    "info": ("bertsmith.runs.listing:info", "Describe a model folder."),
    "verify": ("bertsmith.runs.verify:verify", "Compare the files of a folder with their checksums."),
    "serve": ("bertsmith.runs.serve:serve", "Serve models over HTTP."),
}
"""Function and one-line summary of every command. The function is imported only when its command is called."""
FLAG_HINTS: dict[str, tuple[str, ...]] = {
    "--part": ("--split",),
    "--pieces": ("--tokens",),
    "--shortest": ("--min-words",),
    "--longest": ("--max-words",),
    "--lr": ("--learning-rate", "optimizer.learning_rate"),
    "--learning-rate": ("optimizer.learning_rate",),
    "--batch-size": ("--batch", "batch.tokens"),
    "--per-device-train-batch-size": ("--batch", "batch.tokens"),
    "--output": ("--out",),
    "--output-dir": ("--out",),
    "--overwrite": ("--force",),
    "--overwrite-output-dir": ("--force",),
    "--dataset": ("--data",),
    "--data-dir": ("--data",),
    "--train-file": ("--data",),
    "--num-epochs": ("--epochs", "run.steps"),
    "--num-train-epochs": ("--epochs", "run.steps"),
    "--epochs": ("run.steps",),
    "--steps": ("run.steps",),
    "--max-steps": ("run.steps",),
    "--max-length": ("sequences.length",),
    "--max-seq-length": ("sequences.length",),
    "--warmup": ("schedule.warmup",),
    "--warmup-ratio": ("schedule.warmup",),
    "--weight-decay": ("optimizer.weight_decay",),
    "--bf16": ("--precision", "run.precision"),
    "--fp16": ("--precision", "run.precision"),
    "--cuda": ("--device",),
    "--gpu": ("--device",),
}
"""Flags of other programs or of earlier versions, and the flag or setting to use instead, best first."""


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
    app.register_install_completion_command(help="Install tab completion for your shell.")
    return app


app = make_app()


class _InterruptWatch:
    """Context manager: raise KeyboardInterrupt if a library turned Ctrl-C into an error, as pydantic does."""

    def __enter__(self) -> None:
        self.is_made = False
        # other handlers stay, such as the one of a notebook; they can be set in the main thread only
        is_ours = threading.current_thread() is threading.main_thread()
        self.is_set = is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self.is_set:
            signal.signal(signal.SIGINT, self._handle)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.is_set:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.is_made and kind is not None and issubclass(kind, Exception):
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_made = True
        raise KeyboardInterrupt


def _is_machine_busy() -> bool:
    """Whether more threads than cores ran in the last minute.

    Threads that spin while they wait take the cores from the others on a busy machine. On an idle one, threads that
    sleep instead are slower (docs/explanations/decisions.md).
    """
    try:
        return os.getloadavg()[0] > (os.cpu_count() or 1)
    except OSError:  # the system does not tell
        return False


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; bad input prints one sentence to standard error and exits with code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if _is_machine_busy():  # before PyTorch starts its threads, which read the variable once
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with _InterruptWatch():
            result = make_app(arguments[0] if arguments else None)(arguments)
    except UnknownOptionError as error:
        sys.exit(_print_error(_unknown_flag(error)))
    except CoercionError as error:
        is_device = error.argument is not None and error.argument.hint is Device
        sys.exit(_print_error(str(unknown_device(error.token.value) if is_device and error.token else error)))
    except (InputError, CycloptsError) as error:
        sys.exit(_print_error(str(error)))
    except OSError as error:  # a folder that cannot be written, a full disk
        sys.exit(_print_error(f"{error.filename or 'the system'}: {error.strerror or error}"))
    except KeyboardInterrupt:
        sys.exit(_print_error("interrupted", 130))
    code = getattr(result, "exit_code", 0)
    if code:
        sys.exit(code)


def _unknown_flag(error: UnknownOptionError) -> str:
    """Return the message for an unknown flag, with the flag or the setting of this command to use instead."""
    flag = (error.token.keyword or error.token.value).partition("=")[0]
    known = [name for argument in error.argument_collection for name in argument.names]
    for hint in FLAG_HINTS.get(flag, ()):
        if hint in known:
            return f"unknown option {flag}; use {hint}"
        if not hint.startswith("--") and "--set" in known:
            return f"unknown option {flag}; use --set {hint}=…"
    return str(error)


def _print_error(text: str, code: int = 2) -> int:
    print(f"bertsmith: {text}", file=sys.stderr)
    return code
