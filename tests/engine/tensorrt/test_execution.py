"""What plans are given: padded rows, in the sizes of their specification, without a look at any value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.support.plans import PACKED, nano_geometry, specs
from trt_redknot.collectives import LocalCollectives
from trt_redknot.config.geometry import AttentionKind, RouterKind
from trt_redknot.engine.tensorrt.backend import PlanBackend
from trt_redknot.engine.tensorrt.execution import PlanExecutor
from trt_redknot.engine.tensorrt.profiles import PlanLimits
from trt_redknot.engine.tensorrt.running import bind_sizes, choose_phase, output_shape, plan_ranges
from trt_redknot.engine.tensorrt.specification import PlanFormat
from trt_redknot.engine.weights import stored_tensors
from trt_redknot.errors import EngineError
from trt_redknot.model.layers import Projected
from trt_redknot.model.spec import LayerSpec
from trt_redknot.ops.reference.backend import ReferenceOps
from trt_redknot.ops.reference.packing import latent_pitch
from trt_redknot.ops.tables import AttentionTable, CompressTable
from trt_redknot.ops.tensorrt.tensors import ElementType, Extent

META = torch.device("meta")
G = nano_geometry()
LIMITS = PlanLimits(chunk_rows=16, max_length=512, decode_rows=4)
DTYPES = {
    ElementType.FLOAT32: torch.float32, ElementType.BFLOAT16: torch.bfloat16, ElementType.INT8: torch.int8,
    ElementType.INT32: torch.int32, ElementType.INT64: torch.int64,
}  # fmt: skip


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


class Sizes:
    """A runtime without values: whoever looks at one, or waits for one, fails. Keeps the sizes of every run."""

    def __init__(self, form: PlanFormat, world: int) -> None:
        self.specs = {spec.kind.name: spec for spec in specs("nano", form, world=world)}
        self.runs: list[tuple[str, Mapping[Extent, int]]] = []

    def run(self, plan: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        spec = self.specs[plan]
        assert tensors.keys() == {tensor.name for tensor in spec.inputs}
        sizes = bind_sizes(spec, tensors)
        choose_phase(spec, plan_ranges(spec, LIMITS), sizes)
        self.runs.append((plan, sizes))
        return {t.name: meta(*output_shape(t, sizes), dtype=DTYPES[t.type]) for t in spec.outputs}


def executor(form: PlanFormat = PlanFormat(), world: int = 2) -> tuple[PlanExecutor, Sizes]:  # noqa: B008
    runtime = Sizes(form, world)

    def weights(layer: int | None) -> dict[str, torch.Tensor]:
        tensors = stored_tensors(G, layer, 0, world, torch.bfloat16, fp8_experts=True)
        return {tensor.name: meta(*tensor.shape, dtype=tensor.dtype) for tensor in tensors}

    ropes = {kind: meta(4096, G.rope_dim // 2, 2, dtype=torch.float32) for kind in AttentionKind}
    backend = PlanBackend(specs=tuple(runtime.specs.values()), limits=LIMITS, runtime=runtime)
    layers = [weights(layer) for layer in range(G.layers)]
    return PlanExecutor(G, backend, layers, weights(None), ropes, ReferenceOps(LocalCollectives())), runtime


def layer_of(kind: AttentionKind) -> LayerSpec:
    return LayerSpec(geometry=G, layer=G.attention_kinds.index(kind), tau=0.7, first_expert=0)


def table(rows: int) -> AttentionTable:
    whole = torch.int64
    return AttentionTable(
        segments=meta(3, 5, dtype=whole), row_segments=meta(rows, 2, dtype=whole), positions=meta(rows, dtype=whole),
        visible=meta(rows, dtype=whole),
    )  # fmt: skip


def own_rows(rows: int) -> Projected:
    return Projected(
        query_latent=meta(rows, G.q_lora_rank), latent=meta(rows, G.head_dim),
        post=meta(rows, G.streams, dtype=torch.float32), comb=meta(rows, G.streams, G.streams, dtype=torch.float32),
        raw=(), index_weights=meta(rows, G.index_heads),
    )  # fmt: skip


@pytest.mark.parametrize("rows", [0, 1, 5, 9])
def test_own_rows_are_padded_to_one_and_cut_back(rows: int) -> None:
    stages, runtime = executor()
    for kind in AttentionKind:
        found = stages.project(layer_of(kind), meta(rows, G.streams, G.hidden), meta(rows, dtype=torch.int64))
        tensors = (found.query_latent, found.latent, found.post, found.comb, *found.raw)
        assert {len(tensor) for tensor in tensors} == {rows}
        assert len(found.raw) == {AttentionKind.SLIDING: 0, AttentionKind.HCA: 2, AttentionKind.CSA: 4}[kind]
    assert {sizes[Extent.OWN_ROWS] for _, sizes in runtime.runs} == {max(1, rows)}


@pytest.mark.parametrize(("tokens", "pieces"), [(0, [1]), (9, [9]), (10, [9, 1]), (27, [9, 9, 9])])
def test_the_embedding_takes_a_prompt_in_pieces(tokens: int, pieces: list[int]) -> None:
    stages, runtime = executor()
    assert stages.embed(meta(tokens, dtype=torch.int64)).shape == (tokens, G.streams, G.hidden)
    assert [sizes[Extent.OWN_ROWS] for _, sizes in runtime.runs] == pieces


@pytest.mark.parametrize(("rows", "pieces"), [(0, [1]), (1, [1]), (7, [4, 3])])
def test_the_head_takes_rows_in_pieces(rows: int, pieces: list[int]) -> None:
    stages, runtime = executor()
    share = len(range(0, G.vocab, 2))
    assert stages.head(meta(rows, G.streams, G.hidden)).shape == (rows, share)
    assert [sizes[Extent.ROWS] for _, sizes in runtime.runs] == pieces


@pytest.mark.parametrize("form", [PlanFormat(), PACKED], ids=["bf16", "packed"])
@pytest.mark.parametrize(
    ("full", "restored", "sizes"), [(4, 3, (4, 3)), (7, 0, (7, 1)), (0, 7, (1, 7)), (1, 0, (1, 1)), (0, 1, (1, 1))]
)
def test_a_chunk_has_a_row_of_each_class(form: PlanFormat, full: int, restored: int, sizes: tuple[int, int]) -> None:
    stages, runtime = executor(form)
    rows, seen = full + restored, list[torch.Tensor]()
    packed = form.packed_cache
    latent = (latent_pitch(G.head_dim, G.rope_dim), torch.uint8) if packed else (G.head_dim, torch.bfloat16)
    for kind in AttentionKind:
        entries = None if kind is AttentionKind.SLIDING else meta(40, latent[0], dtype=latent[1])
        selected = meta(rows, G.index_topk, dtype=torch.int64) if kind is AttentionKind.CSA else None
        # Packing looks at no value, and has no meta kernel of its own: rows come packed from the CPU.
        width = G.projected // 2
        cached = torch.zeros(restored, width, dtype=torch.bfloat16, device="cpu" if packed else META)
        partial = stages.attend(
            layer_of(kind), meta(rows, G.q_lora_rank), full, table(rows), meta(60, latent[0], dtype=latent[1]),
            entries, selected, cached, tap=seen.append,
        )  # fmt: skip
        assert partial.shape == (rows, G.hidden)
    assert [len(local) for local in seen] == [full] * 3
    assert {(found[Extent.FULL_ROWS], found[Extent.RESTORED_ROWS]) for _, found in runtime.runs} == {sizes}


@pytest.mark.parametrize(("counts", "rank"), [((4, 4), 0), ((4, 3), 0), ((4, 3), 1), ((1, 0), 1), ((1, 0), 0)])
def test_ranks_give_plans_equally_many_rows(counts: tuple[int, int], rank: int) -> None:
    stages, runtime = executor()
    rows, whole = counts[rank], torch.int64
    csa = layer_of(AttentionKind.CSA)
    selected = stages.select(csa, own_rows(rows), meta(40, G.index_dim), table(rows), counts)
    assert selected.shape == (sum(counts), G.index_topk)
    for router in RouterKind:
        spec = LayerSpec(geometry=G, layer=G.router_kinds.index(router), tau=0.7, first_expert=4)
        streams, ids = stages.mix(
            spec, meta(rows, G.streams, G.hidden), own_rows(rows), meta(sum(counts), G.hidden),
            meta(rows, dtype=whole), counts,
        )  # fmt: skip
        assert streams.shape == (rows, G.streams, G.hidden)
        assert ids.shape == (rows, G.experts_per_token)
    assert {sizes[Extent.OWN_ROWS] for _, sizes in runtime.runs} == {max(counts)}


def test_a_step_that_writes_no_entry_runs_no_plan() -> None:
    stages, runtime = executor()
    slots = meta(0, 2 * G.csa_ratio, dtype=torch.int64)
    nothing = CompressTable(entries=slots[:, 0], slots=slots, positions=slots[:, 0])
    stages.compress(layer_of(AttentionKind.CSA), [], nothing, meta(4, G.head_dim), meta(4, G.index_dim))
    assert runtime.runs == []


def test_scalars_are_made_once_by_value() -> None:
    stages, _ = executor()
    device = torch.device("cpu")
    one: Any = stages._scalar(0.7, torch.float32, device)
    assert stages._scalar(0.7, torch.float32, device) is one
    assert stages._scalar(1.0, torch.float32, device) is not one
    assert one.tolist() == pytest.approx([0.7])


def test_a_fault_that_a_router_noted_is_an_error_once() -> None:
    stages, _ = executor()
    stages.check()
    stages._faults = torch.tensor([2], dtype=torch.int32)
    with pytest.raises(EngineError, match="outside of its table, found fault 2"):
        stages.check()
    stages.check()
