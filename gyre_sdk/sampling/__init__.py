"""Token-in, token-out sampling: the request, the reply, and a client for engines that speak SGLang's contract."""

from gyre_sdk.sampling.sglang import SGLangClient
from gyre_sdk.sampling.types import (
    Chunk,
    Completion,
    Finish,
    GenerateRequest,
    ModelInfo,
    Sampling,
    TokenClient,
)

__all__ = [
    "Chunk",
    "Completion",
    "Finish",
    "GenerateRequest",
    "ModelInfo",
    "SGLangClient",
    "Sampling",
    "TokenClient",
]
