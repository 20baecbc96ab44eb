"""How an engine is served: what is opened, how much runs and waits at once, what holds for requests that do not say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from trt_redknot.artifacts.certificate import NAMESPACE_PATTERN
from trt_redknot.config.documents import validated_strings

Missing = Literal["recompute", "build", "refuse"]


class ServingConfig(BaseModel):
    """Settings of one service, the same on every rank.

    Attributes:
        engine: the engine directory.
        store: the artifact store; its folder is created by the first build.
        namespace: the tenant of requests that name none.
        world_size: ranks the engine was built for.
        device: where every rank computes, as torch names it.
        verify: compare the engine's files with the manifest's digests when it is opened.
        capacity_bytes: quota of every namespace of the store; None: only the disk limits it.
        max_queue: requests that wait at most; the next one is refused with `queue_full`.
        max_batch: sequences that are decoded together, and requests that hold cache rows at once.
        cache_tokens: rows of the cache pool, prompts and answers together; None: the engine's own longest
            request, at most 65536.
        max_prefills: requests and builds whose prompt rows run by turns.
        prefill_steps: steps of prompts between two decode steps; a step is one row chunk's projection or attention in
            one layer.
        lookahead: requests whose artifacts are verified in the background before their turn.
        loader_threads: threads a rank does that with.
        default_deadline_s: seconds from submission to the last token for requests that name none; None: no limit.
        missing: what becomes of a document that is not in the store and whose tokens are known: recompute the request,
            build the document first, or refuse the request.
        stall_s: seconds that a turn may take before the service counts as unhealthy and ends; also the most that a
            request's artifacts may be waited for, whatever its policy says.
        log: file for JSON lines, "-" for stderr; None: whatever the process does with its log records.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    engine: Path = Field(strict=False)
    store: Path = Field(strict=False)
    namespace: str = Field(default="default", pattern=NAMESPACE_PATTERN)
    world_size: int = Field(default=1, ge=1, le=4096)
    device: str | None = None
    verify: bool = True
    capacity_bytes: int | None = Field(default=None, ge=1)
    max_queue: int = Field(default=64, ge=1, le=100_000)
    max_batch: int = Field(default=8, ge=1, le=4096)
    cache_tokens: int | None = Field(default=None, ge=2)
    max_prefills: int = Field(default=2, ge=1, le=64)
    prefill_steps: int = Field(default=8, ge=1, le=100_000)
    lookahead: int = Field(default=4, ge=1, le=256)
    loader_threads: int = Field(default=2, ge=1, le=64)
    default_deadline_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    missing: Missing = "recompute"
    stall_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    log: str | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, str], source: Path | str = "the model's parameters") -> ServingConfig:
        """From strings, as Triton hands over a model's parameters. An empty string is a setting left out.

        Raises:
            ConfigError: names every parameter that is unknown, missing or ill-formed.
        """
        return validated_strings(cls, {name: value for name, value in parameters.items() if value != ""}, source)
