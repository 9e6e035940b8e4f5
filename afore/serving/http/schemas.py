"""What clients may send: one pydantic model for each endpoint, strict in types, closed to unknown fields.

A field that is null is a field that is not there, as clients send it both ways. Fields of OpenAI's and of other servers that are
not implemented are taken where their value asks for nothing (``presence_penalty: 0``) and refused by name where it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from afore.serving.admission import MOST_LOGPROBS, MOST_STOP_CHARACTERS, MOST_STOPS

MOST_CHOICES = 128
"""n, and prompts of one request."""
MOST_MESSAGES = 4096
_INT64 = 2**63

Real = Annotated[float, Field(allow_inf_nan=False)]
StopString = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, lt=_INT64)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_CHOICES)]
Batches = Annotated[
    list[Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]],
    Field(fail_fast=True, min_length=1, max_length=MOST_CHOICES),
]
Count = Annotated[int, Field(ge=1, lt=_INT64)]


def _only(is_neutral: Callable[[Any], bool]) -> AfterValidator:
    """Refuses every value that asks for something."""

    def check(value: Any) -> Any:
        if not is_neutral(value):
            raise PydanticCustomError("not_supported", "not supported by this server; leave it out")
        return value

    return AfterValidator(check)


def _is(number: int) -> AfterValidator:
    return _only(lambda value: type(value) in (int, float) and value == number)


Off = Annotated[Any, _is(0), WithJsonSchema({"type": "number", "minimum": 0, "maximum": 0})]
One = Annotated[Any, _is(1), WithJsonSchema({"type": "number", "minimum": 1, "maximum": 1})]
Empty = Annotated[Any, _only(lambda value: value in ("", [], {})), WithJsonSchema({"enum": ["", [], {}]})]
OnlyTrue = Annotated[Any, _only(lambda value: value is True), WithJsonSchema({"type": "boolean", "const": True})]
OnlyFalse = Annotated[Any, _only(lambda value: value is False), WithJsonSchema({"type": "boolean", "const": False})]
NoTool = Annotated[Any, _only(lambda value: value in ("none", "auto")), WithJsonSchema({"enum": ["none", "auto"]})]
PlainText = Annotated[Any, _only(lambda value: value == {"type": "text"}), WithJsonSchema({"const": {"type": "text"}})]
TextOnly = Annotated[Any, _only(lambda value: value == ["text"]), WithJsonSchema({"const": ["text"]})]


class Body(BaseModel):
    """Closed, strict, and null means absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(Body):
    """How a stream is written."""

    include_usage: bool = False
    """A last chunk without choices, with the usage."""
    include_obfuscation: OnlyFalse = False


class Generation(Body):
    """What completions and chat completions have in common."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    """The served model's name; none takes it."""
    max_tokens: Count | None = None
    """Most tokens to generate."""
    temperature: Annotated[Real, Field(ge=0, le=100)] = 1.0
    """0 is greedy."""
    top_p: Annotated[Real, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    """0 or -1 keeps all tokens."""
    seed: Annotated[int, Field(ge=-_INT64, lt=2 * _INT64)] | None = None
    """Same seed, same tokens, whatever else is in the batch."""
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    """The output ends before the first of these."""
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    """Choices for each prompt."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    """Go on after the model's end token."""
    repetition_penalty: Annotated[Real, Field(ge=0.01, le=100)] = 1.0
    """1 is off; above 1 tokens that are there already become less likely."""
    # Taken and of no consequence here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Not implemented: taken where they ask for nothing.
    presence_penalty: Off = 0
    frequency_penalty: Off = 0
    min_p: Off = 0
    min_tokens: Off = 0
    length_penalty: One = 1
    best_of: Any = None
    logit_bias: Empty = None
    use_beam_search: OnlyFalse = False
    include_stop_str_in_output: OnlyFalse = False
    skip_special_tokens: OnlyTrue = True
    spaces_between_special_tokens: OnlyTrue = True
    stop_token_ids: Empty = None

    @model_validator(mode="after")
    def _check(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "only for stream: true")
        if self.best_of is not None and not (type(self.best_of) is int and self.best_of == self.n):
            raise FieldError("best_of", "not supported by this server unless it equals n; leave it out")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class FieldError(ValueError):
    """A field that does not go with the others."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}")


class CompletionRequest(Generation):
    """POST /v1/completions"""

    prompt: str | TokenIds | Texts | Batches
    """Text, token ids, or several of either."""
    echo: bool = False
    """The prompt comes before the output."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Log-probabilities of the chosen tokens, and of that many best ones."""
    suffix: Empty = None

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise FieldError("logprobs", "not supported by this server together with echo: a prompt's are not computed")
        return self


class TextPart(Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_MESSAGES)] = ""
    name: str | None = None

    @property
    def text(self) -> str:
        """Its content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Generation):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    """The conversation so far."""
    max_completion_tokens: Count | None = None
    """The present name of max_tokens."""
    logprobs: bool = False
    """Log-probabilities of the chosen tokens."""
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """And of that many best ones."""
    parallel_tool_calls: bool | None = None
    tools: Empty = None
    functions: Empty = None
    tool_choice: NoTool = None
    function_call: NoTool = None
    response_format: PlainText = None
    modalities: TextOnly = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "only for logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise FieldError("max_tokens", "differs from max_completion_tokens; give one of them")
        return self


class TokenizeRequest(Body):
    """POST /tokenize: of a text, or of a conversation as the model sees it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)] | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: TokenIds
