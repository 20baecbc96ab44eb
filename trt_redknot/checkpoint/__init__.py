"""Checkpoints: names, dtypes, slices of a rank. Nothing else knows tensor names."""

from trt_redknot.checkpoint.codecs import (
    dequantize_fp4,
    dequantize_fp8,
    quantize_fp4,
    quantize_fp8_blocks,
    repack_fp4_to_fp8,
)
from trt_redknot.checkpoint.reader import Checkpoint
from trt_redknot.checkpoint.specs import TensorSpec, layer_specs, rank_bytes, shared_specs

__all__ = [
    "Checkpoint",
    "TensorSpec",
    "dequantize_fp4",
    "dequantize_fp8",
    "layer_specs",
    "quantize_fp4",
    "quantize_fp8_blocks",
    "rank_bytes",
    "repack_fp4_to_fp8",
    "shared_specs",
]
