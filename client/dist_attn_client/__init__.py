"""A typed client of the HTTP service, synchronous and asynchronous; never loads torch. See docs/how-to/client.md.

with Client("http://127.0.0.1:8000") as client:
    for row in client.encode(Path("book.txt"), window=512):
        print(row.index, row.embedding[:3])
"""

from dist_attn_api.errors import ClientError
from dist_attn_api.search_types import RerankResult, RerankResults, SearchResult, SearchResults
from dist_attn_api.types import (
    AppendProgress,
    AppendSummary,
    Checkpoint,
    Choice,
    ChoiceLogprobs,
    Completion,
    CompletionUsage,
    EncodingSummary,
    EngineStatus,
    Estimate,
    Feeding,
    File,
    Generation,
    Job,
    Model,
    PromptProgress,
    Session,
    Status,
)
from dist_attn_client.asynchronous import AsyncClient
from dist_attn_client.attempts import Retry
from dist_attn_client.encodings import EncodingProgress, Row
from dist_attn_client.errors import (
    BrokenOff,
    Busy,
    Conflict,
    KeyRefused,
    Missing,
    NotOurAnswer,
    OutOfTime,
    Overloaded,
    QuotaUsed,
    Refused,
    ServiceFailed,
    TooLarge,
    Unreachable,
    Unusable,
)
from dist_attn_client.jobs import JobEvent
from dist_attn_client.plan import Reached
from dist_attn_client.sessions import State
from dist_attn_client.streams import AsyncStream, Stream
from dist_attn_client.synchronous import Client
from dist_attn_client.texts import DrawnEnd

__all__ = [
    "AppendProgress",
    "AppendSummary",
    "AsyncClient",
    "AsyncStream",
    "BrokenOff",
    "Busy",
    "Checkpoint",
    "Choice",
    "ChoiceLogprobs",
    "Client",
    "ClientError",
    "Completion",
    "CompletionUsage",
    "Conflict",
    "DrawnEnd",
    "EncodingProgress",
    "EncodingSummary",
    "EngineStatus",
    "Estimate",
    "Feeding",
    "File",
    "Generation",
    "Job",
    "JobEvent",
    "KeyRefused",
    "Missing",
    "Model",
    "NotOurAnswer",
    "OutOfTime",
    "Overloaded",
    "PromptProgress",
    "QuotaUsed",
    "Reached",
    "Refused",
    "RerankResult",
    "RerankResults",
    "Retry",
    "Row",
    "SearchResult",
    "SearchResults",
    "ServiceFailed",
    "Session",
    "State",
    "Status",
    "Stream",
    "TooLarge",
    "Unreachable",
    "Unusable",
]
