"""Random inputs of a plan that a real run could have: tables that point into their pools, routers with real experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.config.rope import inverse_frequencies
from trt_redknot.engine.tensorrt.specification import PlanSpec, PlanTensor
from trt_redknot.engine.tensorrt.stages import Stage
from trt_redknot.engine.weights import SCALE
from trt_redknot.ops.experts import quantise_experts
from trt_redknot.ops.reference.numerics import rope_table
from trt_redknot.ops.reference.packing import pack_pool_latents, pack_rows
from trt_redknot.ops.tensorrt.tensors import ElementType, Extent, Size
from trt_redknot.partition import even_split

# Two segments of one sequence; the rows of a chunk lie in the second.
_FIRST, _SECOND = 70, 330
_DTYPES = {ElementType.FLOAT32: torch.float32, ElementType.BFLOAT16: torch.bfloat16}


class PlanSample:
    """Inputs of one plan, drawn from a seed.

    Attributes:
        tensors: by name, in the types and shapes of the specification, on the CPU.
        full_rows: rows that run all heads.
        own_rows: rows that this rank owns.
        first_expert: id of the first expert that this rank holds.
    """

    def __init__(self, spec: PlanSpec, seed: int, *, rank: int = 0) -> None:
        self.spec = spec
        self.first_expert = spec.geometry.experts // spec.world * rank
        self.full_rows = 7
        self._random = torch.Generator().manual_seed(seed)
        length = _FIRST + _SECOND
        self.own_rows = rows = 9
        self._sizes = {
            Extent.OWN_ROWS: rows,
            # The head runs on few rows in any engine.
            Extent.ROWS: 2 if spec.kind.stage is Stage.HEAD else rows,
            Extent.RESTORED_ROWS: rows - self.full_rows,
            Extent.RAW_ROWS: length,
            Extent.WRITTEN_ENTRIES: 6,
            Extent.LATENT_POOL: length,
            Extent.ENTRY_POOL: sum(self._entries()) if self._ratio() else 1,
            Extent.SEGMENTS: 2,
            Extent.POSITIONS: length,
            Extent.VOCABULARY_SHARE: len(even_split(spec.geometry.vocab, spec.world)[rank]),
        }
        self._positions = torch.arange(length - rows, length)
        self.tensors: dict[str, torch.Tensor] = {}
        for tensor in spec.inputs:
            if tensor.name not in self.tensors:
                self._draw(tensor)

    def _draw(self, tensor: PlanTensor) -> None:
        special: dict[str, Callable[[tuple[int, ...]], torch.Tensor]] = {
            "tokens": lambda shape: self._integers(self.spec.geometry.vocab, shape),
            "frames": lambda shape: self._integers(_SECOND, shape),
            "rope": lambda shape: self._rope(),
            "segments": lambda shape: self._segments(),
            "row_segments": lambda shape: torch.tensor([[0, 2]]).repeat(shape[0], 1),
            "positions": lambda shape: self._positions,
            "visible": lambda shape: self._visible(),
            "slots": lambda shape: self._integers(_FIRST, shape).masked_fill(self._uniform(shape) < 0.1, -1),
            "selected": self._selected,
            "latents": self._latents,
            "entries": self._latents,
            "index_keys": lambda shape: pack_rows(self._normal((shape[0], self.spec.geometry.index_dim))),
            "restored": lambda shape: pack_rows(
                self._normal((shape[0], self.spec.geometry.projected // self.spec.world))
            ),
            "first_expert": lambda shape: torch.tensor([self.first_expert]),
            "tau": lambda shape: torch.tensor([0.7]),
            "router.tid2eid": self._experts_of_tokens,
        }
        shape = self._shape(tensor)
        if tensor.name in special and (tensor.type not in _DTYPES or tensor.name in ("rope", "tau")):
            self.tensors[tensor.name] = special[tensor.name](shape)
        elif tensor.name.startswith("experts.") and not tensor.name.endswith(SCALE):
            weight = self._normal(shape) * shape[-1] ** -0.5
            quantised = quantise_experts(weight)
            self.tensors[tensor.name] = quantised.codes.view(torch.int8)
            self.tensors[tensor.name + SCALE] = quantised.scales
        else:
            self.tensors[tensor.name] = self._values(tensor, shape).to(_DTYPES[tensor.type])

    def _values(self, tensor: PlanTensor, shape: tuple[int, ...]) -> torch.Tensor:
        if not tensor.weight:
            return self._normal(shape)
        if "norm" in tensor.name:
            return 1 + 0.2 * self._normal(shape)
        return self._normal(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.5)

    def _shape(self, tensor: PlanTensor) -> tuple[int, ...]:
        return tuple(
            self._sizes[size.extent] * size.factor if isinstance(size, Size) else size for size in tensor.shape
        )

    def _normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self._random)

    def _uniform(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=self._random)

    def _integers(self, below: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(below, shape, generator=self._random)

    def _rope(self) -> torch.Tensor:
        layers = self.spec.kind.layers(self.spec.geometry)
        rope = self.spec.geometry.rope(layers[0])
        return rope_table(
            inverse_frequencies(rope), self._sizes[Extent.POSITIONS], factor=rope.attention_factor, dtype=torch.float32
        )

    def _ratio(self) -> int:
        geometry: ModelGeometry = self.spec.geometry
        kinds = {AttentionKind.CSA: geometry.csa_ratio, AttentionKind.HCA: geometry.hca_ratio}
        return 0 if self.spec.kind.attention is None else kinds.get(self.spec.kind.attention, 0)

    def _entries(self) -> tuple[int, int]:
        """Entries of the segments; the first is a document and ends in a partial window."""
        ratio = self._ratio()
        return -(-_FIRST // ratio), _SECOND // ratio

    def _segments(self) -> torch.Tensor:
        first, second = self._entries() if self._ratio() else (0, 0)
        length = _FIRST + _SECOND
        return torch.tensor([[0, _FIRST, 0, 0, first], [_FIRST, length, _FIRST, first, second]])

    def _visible(self) -> torch.Tensor:
        ratio = self._ratio()
        if not ratio:
            return torch.zeros_like(self._positions)
        return self._entries()[0] + (self._positions - _FIRST + 1) // ratio

    def _selected(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Distinct visible entries, -1 where there are fewer than asked for."""
        selected = torch.full(shape, -1)
        for row, visible in enumerate(self._visible().tolist()):
            chosen = torch.randperm(visible, generator=self._random)[: shape[1]]
            selected[row, : len(chosen)] = chosen
        return selected

    def _latents(self, shape: tuple[int, ...]) -> torch.Tensor:
        geometry = self.spec.geometry
        return pack_pool_latents(self._normal((shape[0], geometry.head_dim)), geometry.rope_dim)

    def _experts_of_tokens(self, shape: tuple[int, ...]) -> torch.Tensor:
        order = self._uniform((shape[0], self.spec.geometry.experts)).argsort(dim=1)
        return order[:, : shape[1]].int()
