"""Rectangles of stored tensors, decoded into a caller's buffer a bounded number of rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trt_redknot.checkpoint.codecs import FP8_BLOCK, dequantize_fp4, dequantize_fp8
from trt_redknot.checkpoint.headers import StoredTensor
from trt_redknot.checkpoint.names import Piece
from trt_redknot.errors import CheckpointError

# Elements decoded at a time: 32 MiB of fp32 scratch.
_CHUNK_ELEMENTS = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Region:
    """Rows and columns of a matrix, of one expert where experts are fused. Columns of FP4 are whole rows."""

    rows: range
    columns: range
    expert: int | None = None


class SliceReader:
    """Reads slices; a context manager that keeps files open (mapped) between reads and closes them at its end.

    What it returns is copied out of the mapping, so that nothing keeps a file open afterwards.
    """

    def __init__(self, directory: Path, pieces: Mapping[Piece, StoredTensor]) -> None:
        self._directory = directory
        self._pieces = pieces
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def read_vector(self, piece: Piece, owned: range, out: torch.Tensor) -> None:
        """Entries `owned` of a one-dimensional tensor into `out`, converted to its dtype."""
        stored = self._pieces[piece]
        out.copy_(self._slice(stored, slice(owned.start, owned.stop)))

    def read_matrix(self, piece: Piece, region: Region, out: torch.Tensor) -> None:
        """A rectangle of a matrix into `out` [rows, columns], dequantised and rounded to its dtype.

        Raises:
            CheckpointError: the file cannot be read (any more), an integer does not fit, or a scale is not finite.
        """
        rows, columns = region.rows, region.columns
        step = max(FP8_BLOCK, _CHUNK_ELEMENTS // max(len(columns), 1) // FP8_BLOCK * FP8_BLOCK)
        for first in range(rows.start, rows.stop, step):
            chunk = range(first, min(first + step, rows.stop))
            decoded = self._decode(piece, Region(rows=chunk, columns=columns, expert=region.expert))
            out[chunk.start - rows.start : chunk.stop - rows.start].copy_(decoded)

    def _decode(self, piece: Piece, region: Region) -> torch.Tensor:
        stored = self._pieces[piece]
        rows, columns = region.rows, region.columns
        if stored.dtype == "F8_E4M3":
            codes = self._rectangle(stored, region.expert, rows, columns)
            scales = self._scales(piece, region.expert, _blocks(rows), _blocks(columns))
            return dequantize_fp8(codes, scales, first_row=rows.start, first_column=columns.start)
        if stored.dtype in ("I8", "U8"):
            assert columns.start == 0, "FP4 tensors are never split along their rows"
            codes = self._rectangle(stored, region.expert, rows, range(stored.shape[-1]))
            blocks = range(self._pieces[Piece(piece.name, is_scale=True)].shape[-1])
            return dequantize_fp4(codes, self._scales(piece, region.expert, rows, blocks))
        values = self._rectangle(stored, region.expert, rows, columns)
        # Widening on purpose: an id beyond int32 must not wrap into a valid one.
        return values.clamp(min=-1, max=torch.iinfo(torch.int32).max) if stored.dtype == "I64" else values

    def _scales(self, piece: Piece, expert: int | None, rows: range, columns: range) -> torch.Tensor:
        stored = self._pieces[Piece(piece.name, is_scale=True)]
        scales = self._rectangle(stored, expert, rows, columns).to(torch.float32)
        if not bool(torch.isfinite(scales).all()):
            raise CheckpointError(
                f"tensor {stored.name} has a block scale that is not finite",
                path=self._directory / stored.file,
                remedy="Fetch the checkpoint again.",
            )
        return scales

    def _rectangle(self, stored: StoredTensor, expert: int | None, rows: range, columns: range) -> torch.Tensor:
        area = (slice(rows.start, rows.stop), slice(columns.start, columns.stop))
        if expert is None:
            return self._slice(stored, area)
        return self._slice(stored, (slice(expert, expert + 1), *area)).squeeze(0)

    def _slice(self, stored: StoredTensor, area: slice | tuple[slice, ...]) -> torch.Tensor:
        try:
            if stored.file not in self._files:
                handle = safe_open(self._directory / stored.file, framework="pt")
                self._files[stored.file] = self._stack.enter_context(handle)
            view = self._files[stored.file].get_slice(stored.name)
            if tuple(view.get_shape()) == stored.shape and view.get_dtype() == stored.dtype:
                tensor: torch.Tensor = view[area]
                return tensor
        except (OSError, SafetensorError) as error:
            raise self._changed(stored, str(error)) from error
        raise self._changed(stored, f"{view.get_dtype()} {view.get_shape()}")

    def _changed(self, stored: StoredTensor, found: str) -> CheckpointError:
        return CheckpointError(
            f"tensor {stored.name} cannot be read any more",
            expected=f"{stored.dtype} {list(stored.shape)}",
            found=found,
            path=self._directory / stored.file,
            remedy="The file changed after the checkpoint was opened: open it again.",
        )


def _blocks(indices: range) -> range:
    """Blocks of 128 that `indices` touch."""
    return range(indices.start // FP8_BLOCK, -(-indices.stop // FP8_BLOCK))
