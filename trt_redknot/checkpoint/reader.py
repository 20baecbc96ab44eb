"""A checkpoint: opened from headers alone, then read layer by layer, each rank its own slices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from trt_redknot.checkpoint.files import content_files, weight_files
from trt_redknot.checkpoint.inventory import Inventory, expert_parts, stored_shape, take_inventory
from trt_redknot.checkpoint.names import Piece
from trt_redknot.checkpoint.slices import Region, SliceReader
from trt_redknot.checkpoint.specs import (
    Storage,
    TensorSpec,
    check_parallelism,
    layer_specs,
    rank_bytes,
    shared_specs,
)
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.digests import digest_file, digest_json
from trt_redknot.errors import CheckpointError

_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Weights of one network in safetensors files.

    Attributes:
        directory: where the files lie.
        geometry: the network they must belong to.
        inventory: where each tensor lies; its `ignored` names the multi-token-prediction tensors left aside.
        content_files: names of all files whose content decides an answer: weights, config, tokenizer.
    """

    directory: Path
    geometry: ModelGeometry
    inventory: Inventory
    content_files: tuple[str, ...]

    @classmethod
    def open(cls, directory: Path, geometry: ModelGeometry) -> Checkpoint:
        """Check a checkpoint against `geometry`; reads the index and headers, no weights.

        Raises:
            CheckpointError: one error that lists every unreadable file and every missing, unexpected, misshapen or
                truncated tensor.
        """
        directory = Path(directory)
        files = weight_files(directory)
        inventory = take_inventory(directory, files, geometry)
        return cls(
            directory=directory,
            geometry=geometry,
            inventory=inventory,
            content_files=content_files(directory, files),
        )

    def load_layer(self, layer: int, tp_rank: int, tp_size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """A rank's tensors of `layer`, by canonical name without `layers.<i>.`.

        Memory: the tensors returned, and a bounded scratch for the one being decoded.

        Args:
            layer: 0 to layers - 1.
            tp_rank: this rank, 0 to tp_size - 1.
            tp_size: ranks; must divide the output groups.
            dtype: float32 or bfloat16, for all tensors that are not always fp32 (norms, hyper-connections, sinks, ape,
                router bias) or int32 (`router.tid2eid`).

        Raises:
            CheckpointError: the arguments do not fit, a file changed since it was opened, a block scale is not finite,
                or `router.tid2eid` names an expert that does not exist.
        """
        if not 0 <= layer < self.geometry.layers:
            raise CheckpointError("no such layer", expected=f"0 to {self.geometry.layers - 1}", found=layer)
        return self._load(f"layers.{layer}.", layer_specs(self.geometry, layer), tp_rank, tp_size, dtype)

    def load_shared(self, tp_rank: int, tp_size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """A rank's tensors outside the layers: `embed` (whole), `head` (its rows), `norm`, `hc_head.*`.

        Arguments, memory and errors are those of :meth:`load_layer`.
        """
        return self._load("", shared_specs(self.geometry), tp_rank, tp_size, dtype)

    def tensor_bytes(self, tp_rank: int, tp_size: int, dtype: torch.dtype) -> int:
        """Bytes of all tensors a rank holds after loading everything as `dtype`."""
        return rank_bytes(self.geometry, tp_rank, tp_size, dtype)

    def content_digests(self, indices: Iterable[int]) -> dict[str, str]:
        """BLAKE3 by file name of some of `content_files`, by index, so that ranks can share the work.

        Raises:
            CheckpointError: an index is out of range, or a file cannot be read.
        """
        digests = {}
        for index in indices:
            if not 0 <= index < len(self.content_files):
                raise CheckpointError(
                    "no such content file", expected=f"0 to {len(self.content_files) - 1}", found=index
                )
            path = self.directory / self.content_files[index]
            try:
                digests[self.content_files[index]] = digest_file(path)
            except OSError as error:
                raise CheckpointError("the file cannot be read", found=error.strerror, path=path) from error
        return digests

    def fingerprint(self, digests: Mapping[str, str]) -> str:
        """One digest for the checkpoint, from those of all its `content_files`.

        Raises:
            CheckpointError: a file's digest is missing, or one is of no content file.
        """
        if digests.keys() != set(self.content_files):
            differing = sorted(digests.keys() ^ set(self.content_files))
            raise CheckpointError(
                "the digests are not those of the checkpoint's files",
                expected=list(self.content_files),
                found=f"a difference in {differing}",
                path=self.directory,
            )
        return digest_json(dict(digests))

    def _load(
        self, prefix: str, specs: Iterable[TensorSpec], tp_rank: int, tp_size: int, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        check_parallelism(self.geometry, tp_rank, tp_size)
        if dtype not in _DTYPES:
            raise CheckpointError("weights cannot be loaded as this dtype", expected=_DTYPES, found=dtype)
        loaded = {}
        with self._slices() as reader:
            for spec in specs:
                shape = spec.local_shape(tp_rank, tp_size)
                tensor = torch.empty(shape, dtype=spec.loaded_dtype(dtype))
                if spec.storage is Storage.EXPERTS:
                    self._fill_experts(reader, prefix, spec, spec.owned(tp_rank, tp_size), tensor)
                else:
                    self._fill(reader, prefix + spec.name, spec, spec.owned(tp_rank, tp_size), tensor)
                loaded[spec.name] = tensor
        table = loaded.get("router.tid2eid")
        if table is not None:
            self._check_table(prefix, table)
        return loaded

    @contextmanager
    def _slices(self) -> Iterator[SliceReader]:
        with SliceReader(self.directory, self.inventory.pieces) as reader:
            yield reader

    def _fill(self, reader: SliceReader, name: str, spec: TensorSpec, owned: range, out: torch.Tensor) -> None:
        stored = stored_shape(spec)
        if len(stored) == 1:
            reader.read_vector(Piece(name), owned, out)
            return
        rows, columns = range(stored[0]), range(stored[1])
        if spec.axis == 1:
            columns = owned
        elif len(spec.shape) == 3:
            rows = range(owned.start * spec.shape[1], owned.stop * spec.shape[1])
        else:
            rows = owned
        reader.read_matrix(Piece(name), Region(rows=rows, columns=columns), out.view(len(rows), len(columns)))

    def _fill_experts(
        self, reader: SliceReader, prefix: str, spec: TensorSpec, owned: range, out: torch.Tensor
    ) -> None:
        _, rows, columns = spec.shape
        fused = Piece(prefix + spec.name)
        for index, expert in enumerate(owned):
            if fused in self.inventory.pieces:
                whole = Region(rows=range(rows), columns=range(columns), expert=expert)
                reader.read_matrix(fused, whole, out[index])
                continue
            first = 0
            for part, count in expert_parts(spec.name, rows):
                region = Region(rows=range(count), columns=range(columns))
                reader.read_matrix(Piece(f"{prefix}experts.{expert}.{part}"), region, out[index, first : first + count])
                first += count

    def _check_table(self, prefix: str, table: torch.Tensor) -> None:
        outside = (table < 0) | (table >= self.geometry.experts)
        if bool(outside.any()):
            token, column = (int(value) for value in outside.nonzero()[0])
            stored = self.inventory.pieces[Piece(prefix + "router.tid2eid")]
            raise CheckpointError(
                f"tensor {stored.name} names an expert that does not exist, at token {token}, column {column}",
                expected=f"0 to {self.geometry.experts - 1}",
                found=int(table[token, column]),
                path=self.directory / stored.file,
                remedy="Fetch the checkpoint again.",
            )
