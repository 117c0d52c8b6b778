"""The shapes of requests and answers, as the OpenAPI document has them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Row = dict[str, str | list[str]]
"""An input of a task by the names of its columns."""
Direction = Literal["right", "Right"]
"""Texts are cut at their right end; the field is there because clients send it."""

ModelName = Annotated[
    str | None, Field(description="Which model is asked; the first one if not given.", examples=[None], max_length=200)
]
Truncate = Annotated[
    bool | None,
    Field(description="Whether texts that are too long are cut, not refused; the service's setting if not given."),
]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class EmbedRequest(_Body):
    """Texts that each get a vector."""

    inputs: Annotated[
        str | list[str] | list[int] | list[list[int]],
        Field(
            description="A text, a list of texts, or their token ids without marks.", examples=[["a text", "another"]]
        ),
    ]
    normalize: Annotated[bool | None, Field(description="Whether vectors have length 1; true if not given.")] = True
    truncate: Truncate = None
    truncation_direction: Direction = "right"
    prompt_name: Annotated[None, Field(description="Models here have no prompts.")] = None
    dimensions: Annotated[int | None, Field(ge=1, description="Keep the first numbers of a vector only.")] = None
    encoding_format: Literal["float"] = "float"
    model: ModelName = None


class PredictRequest(_Body):
    """Inputs that the model's task is done on."""

    inputs: Annotated[
        str | Row | list[str | list[str] | Row],
        Field(
            description="One input or a list of them. An input is a text, a list of texts where the task reads several "
            "(a pair, a question and a passage; for tagging: words), or an object with the task's columns.",
            examples=["The gate was forged well."],
        ),
    ]
    raw_scores: Annotated[bool, Field(description="Scores as the head gives them, not as shares.")] = False
    truncate: Truncate = None
    truncation_direction: Direction = "right"
    model: ModelName = None


class RerankRequest(_Body):
    """Texts to be put in order by how well they fit a query."""

    query: Annotated[str, Field(examples=["who forged the gate?"])]
    texts: Annotated[list[str], Field(examples=[["a smith forged it", "the river is wide"]])]
    raw_scores: Annotated[bool, Field(description="Scores as the head gives them, not from 0 to 1.")] = False
    return_text: Annotated[bool, Field(description="Whether the texts are sent back.")] = False
    truncate: Truncate = None
    truncation_direction: Direction = "right"
    model: ModelName = None


class FillParameters(_Body):
    """Settings as Hugging Face's clients nest them."""

    top_k: Annotated[int | None, Field(ge=1, le=100, description="How many pieces are told.")] = None
    targets: Annotated[
        list[str] | None, Field(max_length=1000, description="Pieces to choose among, instead of the vocabulary.")
    ] = None


class FillMaskRequest(FillParameters):
    """Texts with masks in them."""

    inputs: Annotated[str | list[str], Field(examples=["the smith forges an iron [MASK]"])]
    parameters: FillParameters | None = None
    truncate: Truncate = None
    model: ModelName = None


class TokenizeRequest(_Body):
    """Texts to be cut into tokens."""

    inputs: Annotated[str | list[str], Field(examples=[["a text"]])]
    add_special_tokens: bool = True
    model: ModelName = None


class DecodeRequest(_Body):
    """Token ids to be turned back into texts."""

    ids: Annotated[list[int] | list[list[int]], Field(examples=[[5, 6, 7]])]
    model: ModelName = None


class OpenAIRequest(_Body):
    """What OpenAI's clients send for embeddings."""

    input: Annotated[
        str | list[str] | list[int] | list[list[int]],
        Field(
            description="A text, a list of texts, or their token ids without marks.", examples=[["a text", "another"]]
        ),
    ]
    model: ModelName = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, Field(ge=1, description="Keep the first numbers of a vector only.")] = None
    user: Annotated[str | None, Field(description="Taken and not looked at.")] = None


class HubParameters(FillParameters):
    """The settings of Hugging Face's pipelines that make sense here."""

    function_to_apply: Annotated[
        Literal["softmax", "sigmoid", "none"] | None, Field(description="What turns scores into what is told.")
    ] = None
    aggregation_strategy: Annotated[
        Literal["none", "simple", "first", "average", "max"] | None,
        Field(description="none: every word; else: the stretches that tags stand for."),
    ] = None
    ignore_labels: list[str] | None = None


class HubRequest(_Body):
    """What huggingface_hub's InferenceClient sends, whatever it is asked for."""

    inputs: Annotated[str | list[str] | Row, Field(examples=["The gate was forged well."])]
    parameters: HubParameters = HubParameters()
    normalize: bool | None = None
    truncate: Truncate = None
    truncation_direction: Direction = "right"
    prompt_name: Annotated[None, Field(description="Models here have no prompts.")] = None
    dimensions: Annotated[int | None, Field(ge=1)] = None
    encoding_format: Literal["float"] = "float"


class Labelled(BaseModel):
    label: str
    score: float


class Ranked(BaseModel):
    index: int
    score: float
    text: str | None = None


class Filled(BaseModel):
    score: float
    token: int
    token_str: str
    sequence: str


class Token(BaseModel):
    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class OpenAIVector(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class OpenAIUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class OpenAIAnswer(BaseModel):
    object: Literal["list"]
    data: list[OpenAIVector]
    model: str
    usage: OpenAIUsage


class OpenAIModel(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class OpenAIModels(BaseModel):
    object: Literal["list"]
    data: list[OpenAIModel]


class Health(BaseModel):
    status: Literal["ready", "draining"]


class ModelInfo(BaseModel):
    """What one model is and can do."""

    name: str
    family: str
    works: list[str]
    task: str | None
    labels: list[str] | None
    columns: list[str] | None
    max_length: int
    is_elastic: bool
    sizes: list[dict[str, float]]
    engine: dict[str, Any]


class Info(BaseModel):
    """What the service is, in the words of text-embeddings-inference where it has them."""

    model_id: str
    version: str
    max_input_length: int
    max_client_batch_size: int
    max_batch_tokens: int
    max_concurrent_requests: int
    auto_truncate: bool
    models: list[ModelInfo]
