"""Request and response bodies, from which the OpenAPI document is generated."""

from typing import Annotated, Literal, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)
from pydantic_core.core_schema import ListSchema

from bertsmith.serving.requests import Operation

MAX_ITEMS = 100_000
"""Maximum length of every list; `Limits` are lower."""
MAX_FIELDS = 256
"""Maximum number of fields of every object."""
MAX_TARGETS = 1000
"""Maximum number of tokens to choose from for a mask."""

Item = TypeVar("Item")


class _StopAtFirstError:
    """Validates a list up to its first invalid item: an error for each of many items would take seconds."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> ListSchema:
        schema = cast(ListSchema, handler(source))
        return {**schema, "fail_fast": True, "max_length": MAX_ITEMS}


Many = Annotated[list[Item], _StopAtFirstError()]
"""A list in a request."""


def _without_fraction(value: object) -> object:
    """Return a whole number such as 3.0 as an integer, which it is in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Whole = BeforeValidator(_without_fraction)
Integer = Annotated[int, _Whole]
Count = Annotated[int, Field(ge=1), _Whole]
Row = dict[str, str | Many[str]]
"""An input of a task by column."""
TaskInput = str | Many[str] | Row
"""One input of a task: a text, several texts or words, or a row."""
Direction = Literal["right", "Right"]
"""Texts are truncated on the right; the field is accepted because clients send it."""

ModelName = Annotated[
    str | None, Field(description="The model to use; the first one by default.", examples=[None], max_length=200)
]
Truncate = Annotated[
    bool | None,
    Field(description="Truncate texts that are too long instead of rejecting them; default: the service's setting."),
]


class RequestBody(BaseModel):
    """Base class of request bodies: strict types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class EmbedRequest(RequestBody):
    """Texts to embed."""

    inputs: Annotated[
        str | Many[str] | Many[Integer] | Many[Many[Integer]],
        Field(
            description="A text, a list of texts, or their token ids without special tokens.",
            examples=[["a text", "another"]],
        ),
    ]
    normalize: Annotated[bool | None, Field(description="Normalise vectors to length 1; true by default.")] = True
    truncate: Truncate = None
    truncation_direction: Direction = "right"
    prompt_name: Annotated[None, Field(description="Not supported; must be null.")] = None
    dimensions: Annotated[Count | None, Field(description="Truncate vectors to this many dimensions.")] = None
    encoding_format: Literal["float"] = "float"
    model: ModelName = None


class PredictRequest(RequestBody):
    """Inputs of the model's task."""

    inputs: Annotated[
        str | Row | Many[str | Many[str] | Row],
        Field(
            description="One input or a list of them. An input is a text, a list of texts if the task reads several "
            "(a pair, a question and a passage; for tagging: words), or an object with the task's columns.",
            examples=["The gate was forged well."],
        ),
    ]
    raw_scores: Annotated[bool, Field(description="Return logits instead of probabilities.")] = False
    truncate: Truncate = None
    truncation_direction: Direction = "right"
    model: ModelName = None


class RerankRequest(RequestBody):
    """Texts to sort by relevance to a query."""

    query: Annotated[str, Field(examples=["who forged the gate?"])]
    texts: Annotated[Many[str], Field(examples=[["a smith forged it", "the river is wide"]])]
    raw_scores: Annotated[bool, Field(description="Return raw scores instead of scores from 0 to 1.")] = False
    return_text: Annotated[bool, Field(description="Return the texts as well.")] = False
    truncate: Truncate = None
    truncation_direction: Direction = "right"
    model: ModelName = None


class FillParameters(RequestBody):
    """Parameters that Hugging Face's clients send in a nested object."""

    top_k: Annotated[
        Annotated[int, Field(ge=1, le=100), _Whole] | None, Field(description="Number of tokens per mask.")
    ] = None
    targets: Annotated[
        Many[str] | None,
        Field(
            min_length=1, max_length=MAX_TARGETS, description="Tokens to choose from instead of the whole vocabulary."
        ),
    ] = None


class FillMaskRequest(FillParameters):
    """Texts with masks."""

    inputs: Annotated[str | Many[str], Field(examples=["the smith forges an iron [MASK]"])]
    parameters: FillParameters | None = None
    truncate: Truncate = None
    model: ModelName = None


class TokenizeRequest(RequestBody):
    """Texts to tokenise."""

    inputs: Annotated[str | Many[str], Field(examples=[["a text"]])]
    add_special_tokens: bool = True
    model: ModelName = None


class DecodeRequest(RequestBody):
    """Token ids to decode."""

    ids: Annotated[Many[Integer] | Many[Many[Integer]], Field(examples=[[5, 6, 7]])]
    model: ModelName = None


class OpenAIRequest(RequestBody):
    """Embeddings request of OpenAI's clients."""

    input: Annotated[str | Many[str], Field(description="A text or a list of texts.", examples=[["a text", "another"]])]
    model: ModelName = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Count | None, Field(description="Truncate vectors to this many dimensions.")] = None
    user: Annotated[str | None, Field(description="Ignored.")] = None

    @field_validator("input", mode="before")
    @classmethod
    def _reject_ids(cls, value: object) -> object:
        """Reject token ids, which clients make with OpenAI's tokenizers: they would be other words here."""
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, int | list):
            raise ValueError(
                "token ids are not accepted, because clients make them with the tokenizer of another model; send texts "
                "(LangChain: check_embedding_ctx_length=False), or ids of this model's tokenizer to /embed"
            )
        return value


class HubParameters(FillParameters):
    """The supported parameters of Hugging Face's pipelines."""

    function_to_apply: Annotated[
        Literal["softmax", "sigmoid", "none"] | None, Field(description="Function applied to the logits.")
    ] = None
    aggregation_strategy: Annotated[
        Literal["none", "simple", "first", "average", "max"] | None,
        Field(description="none: one entry per word; else: one per entity."),
    ] = None
    ignore_labels: Many[str] | None = None


class HubRequest(RequestBody):
    """Request of huggingface_hub's InferenceClient, for every pipeline."""

    inputs: Annotated[str | Many[str] | Row, Field(examples=["The gate was forged well."])]
    parameters: HubParameters = HubParameters()
    normalize: bool | None = None
    truncate: Truncate = None
    truncation_direction: Direction = "right"
    prompt_name: Annotated[None, Field(description="Not supported; must be null.")] = None
    dimensions: Count | None = None
    encoding_format: Literal["float"] = "float"


class ExploreRequest(RequestBody):
    """One input for one size of a model."""

    work: Annotated[
        Operation,
        Field(description="The operation: run the task head, compare texts, or fill masks.", examples=["vectors"]),
    ]
    inputs: Annotated[
        str | Many[str] | Row,
        Field(
            description="A text, texts to compare, or the columns of the task by name.",
            examples=[["a text", "another"]],
        ),
    ]
    width: Annotated[float, Field(gt=0, le=1, description="Share of heads and neurons.")] = 1.0
    depth: Annotated[float, Field(gt=0, le=1, description="Share of layers.")] = 1.0
    maps: Annotated[bool, Field(description="Return the attention maps of one sequence.")] = False
    sequence: Annotated[
        int,
        Field(ge=0, le=1000, description="Index of the sequence for the maps, if the input is split into several."),
        _Whole,
    ] = 0
    model: ModelName = None


class _OmitsNone(BaseModel):
    """Base class of responses that omit optional fields instead of returning null."""

    @model_serializer(mode="wrap")
    def _omit_none(self, handler: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]
        return {name: value for name, value in handler(self).items() if value is not None}


class LabelScore(BaseModel):
    label: str
    score: float


class Value(BaseModel):
    """Prediction of regression."""

    value: float


class Tag(_OmitsNone):
    word: str
    tag: str
    score: float
    start: int | None = None
    end: int | None = None


class EntityResponse(BaseModel):
    type: str
    text: str
    start: int
    end: int
    score: float


class TagsResponse(_OmitsNone):
    """Prediction of tagging; entities only if the labels mark them (B-, I-)."""

    tags: list[Tag]
    entities: list[EntityResponse] | None = None


class ConstituentResponse(BaseModel):
    label: str
    begin: int
    end: int


class TreeResponse(BaseModel):
    """Prediction of parsing: the tree in brackets, and its constituents as ranges of words, the upper one first."""

    tree: str
    words: list[str]
    constituents: list[ConstituentResponse]


class SpanResponse(BaseModel):
    text: str
    start: int | None
    end: int | None
    score: float


class SpanAnswerResponse(SpanResponse):
    """Prediction of span extraction, empty if the passage has no answer, with the next best spans."""

    others: list[SpanResponse]


class ChoiceResponse(BaseModel):
    """Prediction of multiple choice."""

    index: int
    text: str
    score: float
    scores: list[float]


class Vector(BaseModel):
    """Embedding of one text."""

    vector: list[float]


class SimilarityResponse(BaseModel):
    """Cosine similarity of two texts."""

    similarity: float


Prediction = (
    list[LabelScore]
    | Value
    | TagsResponse
    | TreeResponse
    | SpanAnswerResponse
    | ChoiceResponse
    | Vector
    | SimilarityResponse
)


class RankedText(_OmitsNone):
    index: int
    score: float
    text: str | None = None


class MaskToken(BaseModel):
    """A candidate token for a mask, and the text with the mask filled."""

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


class HubTag(_OmitsNone):
    """A word or an entity of Hugging Face's token-classification pipeline."""

    entity: str | None = None
    entity_group: str | None = None
    index: int | None = None
    word: str
    score: float
    start: int | None = None
    end: int | None = None


class HubSpan(BaseModel):
    """An answer of Hugging Face's question-answering pipeline."""

    answer: str
    score: float
    start: int | None
    end: int | None


class OpenAIVector(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class OpenAIUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class OpenAIAnswer(BaseModel):
    object: Literal["list"] = "list"
    data: list[OpenAIVector]
    model: str
    usage: OpenAIUsage


class OpenAIModel(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "bertsmith"


class OpenAIModels(BaseModel):
    object: Literal["list"] = "list"
    data: list[OpenAIModel]


class HealthResponse(BaseModel):
    status: Literal["ready", "draining"]


class SizeInfo(BaseModel):
    width: float
    depth: float


class LoadInfo(BaseModel):
    waiting_sequences: int
    waiting_tokens: int
    sequences_per_second: float
    answered: int
    refused: int
    late: int


class ModelInfo(BaseModel):
    """Properties, operations and load of one model."""

    name: str
    family: str
    works: list[str]
    task: str | None
    labels: list[str] | None
    columns: list[str] | None
    max_length: int
    is_elastic: bool
    sizes: list[SizeInfo]
    device: str
    precision: str
    cuda_graphs: int
    engine: LoadInfo


class Info(BaseModel):
    """Models and limits of the service, named as in text-embeddings-inference where possible."""

    model_id: str
    version: str
    max_input_length: int
    max_client_batch_size: int
    max_batch_tokens: int
    max_concurrent_requests: int
    auto_truncate: bool
    models: list[ModelInfo]


class Live(BaseModel):
    """State of every scheduler: the fields of SchedulerStats, and width and depth of the sub-network in use."""

    models: dict[str, dict[str, int | float | None]]


class RecordedSize(BaseModel):
    """One sub-network of elastic.json."""

    width: float
    depth: float
    score: float
    parameters: int
    latency_ms: float


class PageSizes(BaseModel):
    """Sizes that the page offers: the grid of elastic.json ("recorded"), any size ("free"), or one size ("one")."""

    kind: Literal["recorded", "free", "one"]
    widths: list[float] | None = None
    depths: list[float] | None = None
    grid: list[RecordedSize] | None = None
    metric: str | None = None


class PageColumn(BaseModel):
    column: str
    role: str


class PageTask(BaseModel):
    kind: str
    columns: list[PageColumn]
    threshold: float | None = None
    lowest: float | None = None
    highest: float | None = None
    types: list[str] | None = None


class PageModel(BaseModel):
    """Properties of a model for the page."""

    name: str
    works: list[Operation]
    task: PageTask | None
    mask: str | None
    sizes: dict[Operation, PageSizes]
    parameters: int
    layers: int
    heads: int
    length: int
    maps: bool


class PageModels(BaseModel):
    version: str
    models: list[PageModel]
