"""Requests that the served models accept, for the OpenAPI document: operations, columns, ids, masks and limits.

A schema cannot express the number of tokens of a text or a request (413), nor list a vocabulary, whose tokens have a
format of their own.
"""

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI

from bertsmith.answers.chart import SPECIAL_TOKENS
from bertsmith.serving.http.explore import MAX_COMPARED_TEXTS, describe_sizes
from bertsmith.serving.http.hub import Pipeline, default_pipeline, pipelines
from bertsmith.serving.http.service import Service
from bertsmith.serving.http.tasks import can_rerank
from bertsmith.serving.http.wire import MAX_ITEMS, MAX_TARGETS
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import Operation
from bertsmith.serving.settings import Limits
from bertsmith.tasks import AnyTask
from bertsmith.tasks.choice import Choice
from bertsmith.tasks.embedding import TextEmbedding

Schema = dict[str, Any]
"""A JSON schema."""
Variant = dict[str, Schema]
"""The fields of a request body that depend on the model; a body may have several variants."""

VOCABULARY_FORMAT = "vocabulary-token"
"""Format of a token of the model's vocabulary, which has too many to list."""
_TEXT: Schema = {"type": "string"}
_VISIBLE_TEXT: Schema = {"type": "string", "pattern": r"\S"}
_EXAMPLES = ("The gate was forged well.", "A smith forged the gate.", "The river is wide.")


def describe_models(app: FastAPI, service: Service) -> None:
    """Restrict the request bodies of the OpenAPI document to what the served models accept.

    Endpoints that no model supports are left out, and paths with the name of a model are listed for each model.
    """
    document = app.openapi()
    schemas = document["components"]["schemas"]
    paths: dict[str, Schema] = {}
    for path, methods in document["paths"].items():
        others = {method: details for method, details in methods.items() if method != "post"}
        for details in others.values():
            for parameter in details.get("parameters", ()):
                parameter["schema"]["enum"] = list(service.schedulers)
        if others:
            paths[path] = others
        if "post" in methods:
            for concrete, bodies in _bodies(path, _body(methods["post"], schemas), service).items():
                if bodies:
                    paths.setdefault(concrete, {})["post"] = _with_bodies(methods["post"], bodies, concrete)
    document["paths"] = paths


def _bodies(path: str, base: Schema, service: Service) -> dict[str, list[Schema]]:
    """Return the bodies that the models accept: of the path itself, or of each path with a model's name."""
    limits = service.settings.limits
    models = [scheduler.served for scheduler in service.schedulers.values()]
    if path in _VARIANTS:
        variants = [(served, variant) for served in models for variant in _VARIANTS[path](served, limits)]
        return {path: [_with_model(_narrowed(base, variant), served.name, service) for served, variant in variants]}
    bodies = {}
    for served in models[:1] if path == "/" else models:
        supported = pipelines(served)
        if path.endswith("{pipeline}"):
            groups = {path.replace("{pipeline}", pipeline): [pipeline] for pipeline in supported}
        else:  # the pipeline of the task; similarities are recognised by their fields
            groups = {path: [one for one in supported if one in (default_pipeline(served), "sentence-similarity")]}
        for template, group in groups.items():
            concrete = template.replace("{name}", quote(served.name, safe=""))
            bodies[concrete] = [_narrowed(base, _pipeline(served, one, limits)) for one in group]
    return bodies


def _body(post: Schema, schemas: dict[str, Schema]) -> Schema:
    """Return the schema of a request body."""
    name = post["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    body: Schema = schemas[name]
    return body


def _with_bodies(post: Schema, bodies: Sequence[Schema], path: str) -> Schema:
    """Return the operation with other bodies, and without the parameters of its path."""
    changed = {key: deepcopy(value) for key, value in post.items() if key != "parameters"}
    changed["requestBody"]["content"]["application/json"]["schema"] = _either(*bodies)
    return changed | {"operationId": "post" + re.sub(r"\W", "_", path)}


def _narrowed(base: Schema, variant: Variant) -> Schema:
    """Replace the types of some fields; title, description and default stay."""
    properties = dict(base["properties"])
    for name, schema in variant.items():
        kept = {key: properties[name][key] for key in ("title", "description", "default") if key in properties[name]}
        properties[name] = kept | schema
    return base | {"properties": properties}


def _with_model(body: Schema, name: str, service: Service) -> Schema:
    """Restrict the field `model` to one model; without the field, the first model answers."""
    names = list(service.schedulers)
    if len(names) == 1 and not service.settings.strict_names:
        return body
    if name == names[0]:
        return _narrowed(body, {"model": {"enum": [name, None], "examples": [name]}})
    required = [*body["required"], "model"]
    return _narrowed(body, {"model": {"enum": [name], "examples": [name]}}) | {"required": required}


def _embed(served: ServedModel, limits: Limits) -> list[Variant]:
    if "vectors" not in served.operations:
        return []
    ids = _ids(served.runner.config.encoder.vocabulary)
    rows = _list(_list(ids), 1, limits.texts)
    inputs = _either(_TEXT, _list(_TEXT, 1, limits.texts), _list(ids, 1), rows)
    return [{"inputs": inputs | {"examples": [["a text", "another"]]}, "dimensions": _dimensions(served)}]


def _embeddings(served: ServedModel, limits: Limits) -> list[Variant]:
    if "vectors" not in served.operations:
        return []
    inputs = _either(_TEXT, _list(_TEXT, 1, limits.texts))
    return [{"input": inputs | {"examples": [["a text", "another"]]}, "dimensions": _dimensions(served)}]


def _predict(served: ServedModel, limits: Limits) -> list[Variant]:
    if served.task is None:
        return []
    forms = _input_forms(served, served.task, _TEXT)
    inputs = _either(*_without_words(served.task, forms), _list(_either(*forms), 1, limits.texts))
    return [{"inputs": inputs | {"examples": [_example(served.task)]}}]


def _rerank(served: ServedModel, limits: Limits) -> list[Variant]:
    texts = _list(_TEXT, 1, limits.texts) | {"examples": [["a smith forged it", "the river is wide"]]}
    return [{"texts": texts}] if can_rerank(served) else []


def _fill_mask(served: ServedModel, limits: Limits) -> list[Variant]:
    if "fill_mask" not in served.operations:
        return []
    text, targets = _masked_text(served), _targets()
    texts = _list(text, 1, min(limits.texts, limits.masks))  # every text has a mask
    inputs = _either(text, texts) | {"examples": [_masked_example(served)]}
    top = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 100}, {"type": "null"}]}
    nested = {"type": "object", "properties": {"top_k": top, "targets": targets}, "additionalProperties": False}
    return [{"inputs": inputs, "targets": targets, "parameters": _either(nested, {"type": "null"})}]


def _tokenize(served: ServedModel, limits: Limits) -> list[Variant]:
    return [{"inputs": _either(_TEXT, _list(_TEXT, 1, limits.texts)) | {"examples": [["a text"]]}}]


def _decode(served: ServedModel, limits: Limits) -> list[Variant]:
    ids = _ids(served.tokenizer.size)
    return [{"ids": _either(_list(ids, 1), _list(_list(ids), 1, limits.texts)) | {"examples": [[5, 6, 7]]}}]


def _explore(served: ServedModel, limits: Limits) -> list[Variant]:
    variants = []
    for operation in sorted(served.operations):
        work = {"enum": [operation], "examples": [operation]}
        variants.append(
            {"work": work, "inputs": _explored_inputs(served, operation, limits), **_size(served, operation)}
        )
    return variants


def _explored_inputs(served: ServedModel, operation: Operation, limits: Limits) -> Schema:
    if operation == "vectors":
        return _either(_TEXT, _list(_TEXT, 1, MAX_COMPARED_TEXTS)) | {"examples": [["a text", "another"]]}
    if operation == "fill_mask":
        text = _masked_text(served)
        return _either(text, _list(text, 1, 1)) | {"examples": [_masked_example(served)]}
    assert served.task is not None
    forms = _input_forms(served, served.task, _VISIBLE_TEXT, 1, limits.texts)
    return _either(*forms) | {"examples": [_example(served.task)]}


def _size(served: ServedModel, operation: Operation) -> Variant:
    """Return the widths and depths of which a request may choose one each."""
    sizes = describe_sizes(served, operation)
    if sizes.kind == "free":
        return {}
    widths, depths = sizes.widths or [], sizes.depths or []
    return {"width": {"enum": sorted({*widths, 1.0})}, "depth": {"enum": sorted({*depths, 1.0})}}


_VARIANTS: dict[str, Callable[[ServedModel, Limits], list[Variant]]] = {
    "/embed": _embed,
    "/v1/embeddings": _embeddings,
    "/predict": _predict,
    "/rerank": _rerank,
    "/fill-mask": _fill_mask,
    "/tokenize": _tokenize,
    "/decode": _decode,
    "/explore": _explore,
}


def _pipeline(served: ServedModel, pipeline: Pipeline, limits: Limits) -> Variant:
    """Return the fields of a Hugging Face pipeline, which takes no lists of lists."""
    texts = _list(_TEXT, 1, limits.texts)
    if pipeline == "feature-extraction":
        return {"inputs": _either(_TEXT, texts) | {"examples": ["a text"]}, "dimensions": _dimensions(served)}
    if pipeline == "sentence-similarity":
        sentences = _object({"source_sentence": _TEXT, "sentences": texts})
        return {"inputs": sentences | {"examples": [{"source_sentence": "a text", "sentences": ["another"]}]}}
    if pipeline == "fill-mask":
        (fill,) = _fill_mask(served, limits)
        return {"inputs": fill["inputs"], "parameters": fill["parameters"]["anyOf"][0]}
    assert served.task is not None
    forms = _without_words(served.task, _input_forms(served, served.task, _TEXT))
    forms += [texts] if _TEXT in forms else []
    return {"inputs": _either(*forms) | {"examples": [_example(served.task)]}}


def _input_forms(
    served: ServedModel, task: AnyTask, text: Schema, least: int = 0, most: int = MAX_ITEMS
) -> list[Schema]:
    """Return the forms of one input: a text, several texts, or the columns of the task.

    Lists have `least` to `most` texts.
    """
    if task.kind == "parsing":  # a tree needs every word
        most = min(most, served.encoding.length - SPECIAL_TOKENS)
    columns, words = task.input_columns, _list(text, least, most)
    either = _either(text, words)
    optional = {str(getattr(task, role)): either for role in ("document", "id") if hasattr(task, role)}
    if isinstance(task, Choice):
        first = {column: either if column == task.context else text for column in columns if column != task.choices}
        numbered = {f"{task.choices}{number}": text for number in range(2)}
        pattern = {"patternProperties": {f"^{re.escape(task.choices)}[0-9]+$": text}}
        return [
            _object(first | {task.choices: _list(text, 2, most)}),
            _object(first | numbered) | pattern,
        ]
    if isinstance(task, TextEmbedding):
        pair = {} if task.pair is None else {task.pair: text}
        return [text, _list(text, 2, 2), _object({str(task.text): text}, pair)]
    if task.kind in ("tagging", "parsing"):
        return [text, words, _object({columns[0]: either}, optional)]
    row = _object(dict.fromkeys(columns, text), optional)
    return [text, row] if len(columns) == 1 else [_list(text, len(columns), len(columns)), row]


def _without_words(task: AnyTask, forms: Sequence[Schema]) -> list[Schema]:
    """Return the forms of an input outside a list, where a list of strings is several texts and not words."""
    has_words = task.kind in ("tagging", "parsing")
    return [form for form in forms if not (has_words and form["type"] == "array")]


def _example(task: AnyTask) -> Any:
    """Return one input of a task."""
    columns = task.input_columns
    if isinstance(task, Choice):
        texts: dict[str, Any] = dict(zip(columns, _EXAMPLES, strict=False))
        return texts | {task.choices: list(_EXAMPLES[:2])}
    return _EXAMPLES[0] if task.takes_one_text else list(_EXAMPLES[: len(columns)])


def _masked_text(served: ServedModel) -> Schema:
    return {"type": "string", "pattern": re.escape(_mask(served))}


def _masked_example(served: ServedModel) -> str:
    return f"the smith forges an iron {_mask(served)}"


def _mask(served: ServedModel) -> str:
    return served.tokenizer.tokens([served.tokenizer.mask])[0]


def _targets() -> Schema:
    token = {"type": "string", "format": VOCABULARY_FORMAT}
    return _either(_list(token, 1, MAX_TARGETS), {"type": "null"})


def _ids(count: int) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": count - 1}


def _dimensions(served: ServedModel) -> Schema:
    return _either({"type": "integer", "minimum": 1, "maximum": served.vector_width}, {"type": "null"})


def _list(items: Schema, least: int = 0, most: int = MAX_ITEMS) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def _either(*schemas: Schema) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": [*schemas]}
