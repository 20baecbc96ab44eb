"""What rank 0 tells all ranks to do, itself included, in order. Travels as JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from trt_redknot.request.file import RequestFile


class _Command(BaseModel):
    """Attributes: job: number that rank 0 gave the request."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    job: int


class Preload(_Command):
    """Verify these artifacts in the background, and hold them until the job is admitted or dropped."""

    op: Literal["preload"] = "preload"
    tenant: str
    artifact_ids: tuple[str, ...]


class Admit(_Command):
    """Agree on the request's artifacts. Collective.

    Attributes:
        request: without texts.
        left_s: seconds left of those that the ranks may spend on the artifacts before the request is recomputed.
    """

    op: Literal["admit"] = "admit"
    tenant: str
    request: RequestFile
    left_s: float


class Begin(_Command):
    """Give an admitted request its place in the pool."""

    op: Literal["begin"] = "begin"


class Build(_Command):
    """Begin to build a document's artifact; its place in the pool comes with the first step."""

    op: Literal["build"] = "build"
    tenant: str
    tokens: tuple[int, ...]
    rebuild: bool


class Advance(_Command):
    """So many steps of a prompt or of a document, or as many as are left. Collective."""

    op: Literal["advance"] = "advance"
    steps: int


class Decode(BaseModel):
    """One token for each of these jobs. Collective."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    op: Literal["decode"] = "decode"
    jobs: tuple[int, ...]


class Finish(_Command):
    """Make the answer's report, and free what the job holds. Collective."""

    op: Literal["finish"] = "finish"


class Drop(_Command):
    """Free whatever the job holds."""

    op: Literal["drop"] = "drop"


class Stop(BaseModel):
    """Free everything and leave."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    op: Literal["stop"] = "stop"


Command = Preload | Admit | Begin | Build | Advance | Decode | Finish | Drop | Stop
_COMMANDS: TypeAdapter[list[Command]] = TypeAdapter(list[Annotated[Command, Field(discriminator="op")]])


def encode_commands(commands: list[Command]) -> bytes:
    return _COMMANDS.dump_json(commands)


def decode_commands(payload: bytes) -> list[Command]:
    """What `encode_commands` made. pydantic's ValidationError for anything else: a bug, for ranks run the same code."""
    return _COMMANDS.validate_json(payload)
