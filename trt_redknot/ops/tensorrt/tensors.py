"""What the emitted network computes with: a network tensor, its element type, sizes that change from call to call."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorrt as trt

    from trt_redknot.ops.tensorrt.handle import TensorRT


class ElementType(StrEnum):
    """Element types of plan inputs and outputs."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT32 = "int32"
    INT64 = "int64"

    def of(self, trt_module: TensorRT) -> trt.DataType:
        kinds = trt_module.DataType
        return {
            ElementType.FLOAT32: kinds.FLOAT,
            ElementType.BFLOAT16: kinds.BF16,
            ElementType.INT8: kinds.INT8,
            ElementType.INT32: kinds.INT32,
            ElementType.INT64: kinds.INT64,
        }[self]


class Extent(StrEnum):
    """Sizes known only when a plan runs. Each has a range in every optimization profile, and is at least 1."""

    OWN_ROWS = "own_rows"
    ROWS = "rows"
    FULL_ROWS = "full_rows"
    RESTORED_ROWS = "restored_rows"
    RAW_ROWS = "raw_rows"
    WRITTEN_ENTRIES = "written_entries"
    LATENT_POOL = "latent_pool"
    ENTRY_POOL = "entry_pool"
    SEGMENTS = "segments"
    POSITIONS = "positions"
    VOCABULARY_SHARE = "vocabulary_share"


@dataclass(frozen=True, kw_only=True)
class Size:
    """`factor` times an extent."""

    extent: Extent
    factor: int = 1

    def __str__(self) -> str:
        return str(self.extent) if self.factor == 1 else f"{self.factor} * {self.extent}"


Shape = tuple[int | Size, ...]


def network_dims(shape: Shape) -> tuple[int, ...]:
    """The shape as TensorRT takes it: -1 where a size changes from call to call."""
    return tuple(-1 if isinstance(size, Size) else size for size in shape)


@dataclass(frozen=True, kw_only=True)
class NetworkTensor:
    """A tensor of the network that is being emitted."""

    tensor: trt.ITensor
    type: ElementType
    shape: Shape

    def fixed(self, axis: int) -> int:
        """Size of an axis that never changes."""
        size = self.shape[axis]
        assert isinstance(size, int), f"axis {axis} of {self.shape} is dynamic"
        return size


@dataclass(frozen=True, kw_only=True)
class NetworkExperts:
    """FP8 weights of the experts of a rank.

    Attributes:
        codes: e4m3 [E, N, K], as bytes: every TensorRT release moves those between plugins.
        scales: fp32 [E, K / 128, N / 128].
    """

    codes: NetworkTensor
    scales: NetworkTensor


@dataclass(frozen=True, kw_only=True)
class NetworkRows:
    """A number of rows of the network: its size, and the int64 [1] tensor that holds it."""

    size: Size
    count: trt.ITensor


@dataclass(frozen=True, kw_only=True)
class NetworkPool:
    """Rows of a cache that the runtime owns: what is written there becomes an output of the plan."""

    name: str
