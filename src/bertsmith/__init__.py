"""Bertsmith: the workbench for efficient text encoders, from raw text to a model that fits a budget.

Public names are imported on first use, so that `import bertsmith` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "GenerationConfig": "bertsmith.models.seq2seq",
    "InputError": "bertsmith.errors",
    "Model": "bertsmith.models.model",
    "Predictor": "bertsmith.tasks.predictor",
    "SearchIndex": "bertsmith.models.search",
    "SequenceLayout": "bertsmith.data.layout",
    "Subnet": "bertsmith.layers.subnet",
    "Tokenizer": "bertsmith.text.tokenizer",
    "build": "bertsmith.models.build",
    "compare": "bertsmith.runs.compare",
    "convert": "bertsmith.models.convert",
    "corpus": "bertsmith.runs.corpus",
    "evaluate": "bertsmith.runs.evaluate",
    "export": "bertsmith.exporting",
    "extract": "bertsmith.models.build",
    "factorise": "bertsmith.models.convert",
    "finetune": "bertsmith.runs.finetune",
    "fit": "bertsmith.runs.fit",
    "inspect": "bertsmith.runs.inspect",
    "load": "bertsmith.checkpoint.store",
    "pairs": "bertsmith.runs.pairs",
    "predict": "bertsmith.runs.predict",
    "preset": "bertsmith.models.published",
    "pretrain": "bertsmith.runs.pretrain",
    "reproduce": "bertsmith.runs.reproduce",
    "save": "bertsmith.checkpoint.store",
    "serve": "bertsmith.runs.serve",
    "shrink": "bertsmith.runs.shrink",
    "tokenizer": "bertsmith.runs.tokenizer",
    "verify": "bertsmith.runs.verify",
}

__all__ = [
    "GenerationConfig",
    "InputError",
    "Model",
    "Predictor",
    "SearchIndex",
    "SequenceLayout",
    "Subnet",
    "Tokenizer",
    "build",
    "compare",
    "convert",
    "corpus",
    "evaluate",
    "export",
    "extract",
    "factorise",
    "finetune",
    "fit",
    "inspect",
    "load",
    "pairs",
    "predict",
    "preset",
    "pretrain",
    "reproduce",
    "save",
    "serve",
    "shrink",
    "tokenizer",
    "verify",
]

if TYPE_CHECKING:
    from bertsmith.checkpoint.store import load, save
    from bertsmith.data.layout import SequenceLayout
    from bertsmith.errors import InputError
    from bertsmith.exporting import export
    from bertsmith.layers.subnet import Subnet
    from bertsmith.models.build import build, extract
    from bertsmith.models.convert import convert, factorise
    from bertsmith.models.model import Model
    from bertsmith.models.published import preset
    from bertsmith.models.search import SearchIndex
    from bertsmith.models.seq2seq import GenerationConfig
    from bertsmith.runs.compare import compare
    from bertsmith.runs.corpus import corpus
    from bertsmith.runs.evaluate import evaluate
    from bertsmith.runs.finetune import finetune
    from bertsmith.runs.fit import fit
    from bertsmith.runs.inspect import inspect
    from bertsmith.runs.pairs import pairs
    from bertsmith.runs.predict import predict
    from bertsmith.runs.pretrain import pretrain
    from bertsmith.runs.reproduce import reproduce
    from bertsmith.runs.serve import serve
    from bertsmith.runs.shrink import shrink
    from bertsmith.runs.tokenizer import tokenizer
    from bertsmith.runs.verify import verify
    from bertsmith.tasks.predictor import Predictor
    from bertsmith.text.tokenizer import Tokenizer


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'bertsmith' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
