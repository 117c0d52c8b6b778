"""The command line: every command is a function of commands/, its flags and help come from the signature."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature as inspect_signature
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from bertsmith import __version__
from bertsmith.commands.compare import compare
from bertsmith.commands.corpus import corpus
from bertsmith.commands.demo import demo
from bertsmith.commands.evaluate import evaluate
from bertsmith.commands.exchange import export_model, import_model
from bertsmith.commands.finetune import finetune
from bertsmith.commands.fit import fit
from bertsmith.commands.inspect import inspect
from bertsmith.commands.pairs import pairs
from bertsmith.commands.predict import predict
from bertsmith.commands.pretrain import pretrain
from bertsmith.commands.shrink import shrink
from bertsmith.commands.tokenizer import tokenizer
from bertsmith.errors import InputError
from bertsmith.runs.serve import serve

app = App(
    name="bertsmith",
    help="The workbench for efficient text encoders: from raw text to a model that fits your budget.",
    version=__version__,
    default_parameter=Parameter(negative_iterable=()),  # no --empty-set beside --set
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
)
COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": demo,
    "tokenizer": tokenizer,
    "corpus": corpus,
    "pairs": pairs,
    "pretrain": pretrain,
    "compare": compare,
    "finetune": finetune,
    "fit": fit,
    "evaluate": evaluate,
    "predict": predict,
    "shrink": shrink,
    "inspect": inspect,
    "import": import_model,
    "export": export_model,
    "serve": serve,
}
_PYTHON_ONLY = {"train"}  # what no flag could give
_SEVERAL = {"depths", "kinds", "learning_rates", "widths"}  # flags that take all the values that follow them


def _for_the_command_line(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as flags can call it: without the arguments that only Python can give."""
    signature = inspect_signature(function)
    kept = [
        parameter.replace(annotation=Annotated[parameter.annotation, Parameter(consume_multiple=True)])
        if name in _SEVERAL
        else parameter
        for name, parameter in signature.parameters.items()
        if name not in _PYTHON_ONLY
    ]
    if kept == list(signature.parameters.values()):
        return function

    @wraps(function)
    def command(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    command.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    # the parser takes the types from here, and from what is wrapped if that can be seen
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in kept}
    del command.__wrapped__
    return command


for _name, _function in COMMANDS.items():
    app.command(_for_the_command_line(_function), name=_name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command; bad input ends with one sentence on standard error and exit code 2.

    A budget that nothing keeps is no bad input: the exit code is 1.
    """
    try:
        found = app(arguments)
    except (InputError, CycloptsError) as error:
        sys.exit(_complain(str(error)))
    except OSError as error:  # a folder that cannot be written, a full disk
        sys.exit(_complain(f"{error.filename or 'the system'}: {error.strerror or error}"))
    except KeyboardInterrupt:
        sys.exit(_complain("interrupted", 130))
    if isinstance(found, dict) and found.get("fits") is False:
        sys.exit(1)


def _complain(text: str, code: int = 2) -> int:
    print(f"bertsmith: {text}", file=sys.stderr)
    return code
