"""Every plugin in its variants: fields, tensors and what the outputs must be, for the contract and the device tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benches.common import Layout, attention_case, make_table, place, random_rope, table_to
from benches.elementwise_cases import compress_case, expert_case, generator_of, mix_case, normal
from trt_redknot.ops.cuda import attention, elementwise, indexer, moe
from trt_redknot.ops.cuda.elementwise import RowFormat
from trt_redknot.ops.experts import quantise_experts
from trt_redknot.ops.reference.packing import latent_pitch, pack_rows, row_bytes

Outputs = tuple[torch.Tensor, ...]
_TYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int32: "int32",
    torch.int64: "int64",
}
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plugin on given tensors.

    Attributes:
        outputs: name, dtype and shape of every output.
        expected: the outputs through torch, on a GPU: what the plugin's bytes must be.
        valid: rows of each output, from the first, that the op defines.
        aligned: bytes that the addresses of inputs must be multiples of, where it is more than an element.
    """

    plugin: str
    fields: Mapping[str, int | float]
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    expected: Callable[[], Mapping[str, torch.Tensor]]
    valid: Callable[[], Mapping[str, int]] = field(default=dict)
    aligned: Mapping[str, int] = field(default_factory=dict)
    communicator: int | None = None

    def write(self, folder: Path, *, contents: bool) -> Path:
        """The manifest, and with `contents` the inputs' bytes beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"plugin {self.plugin}"]
        lines += [f"field {'float32' if isinstance(v, float) else 'int32'} {k} {v!r}" for k, v in self.fields.items()]
        for name, tensor in self.inputs.items():
            path = folder / f"{name}.in"
            if contents:
                path.write_bytes(raw_bytes(tensor))
            lines.append(_line("input", name, tensor.dtype, tensor.shape, str(path) if contents else "-"))
        for name, (dtype, shape) in self.outputs.items():
            lines.append(_line("output", name, dtype, shape, str(self.output_path(folder, name)) if contents else "-"))
        lines += [f"aligned {name} {size}" for name, size in self.aligned.items()]
        if self.communicator is not None:
            lines.append(f"communicator {self.communicator}")
        manifest = folder / "manifest"
        manifest.write_text("\n".join(lines) + "\n")
        return manifest

    def output_path(self, folder: Path, name: str) -> Path:
        return folder / f"{name}.out"


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _line(kind: str, name: str, dtype: torch.dtype, shape: tuple[int, ...], path: str) -> str:
    return " ".join([kind, _TYPES[dtype], name, path, *map(str, shape)])


def all_cases(seed: int, device: str, rows: int) -> list[Case]:
    """Every plugin in its variants on `rows` rows (0 allowed)."""
    return [
        *restore_cases(seed, device, rows),
        *norm_cases(seed, device, rows),
        *compress_cases(seed, device, rows),
        *mix_cases(seed, device, rows),
        *router_cases(seed, device, rows),
        *expert_cases(seed, device, rows),
        *attention_cases(seed, device, rows),
        *indexer_cases(seed, device, rows),
        *collective_cases(seed, device, rows),
    ]


def restore_cases(seed: int, device: str, rows: int) -> list[Case]:
    generator = generator_of(seed, device)
    width, local = 136, rows // 3
    state, kept = normal(generator, rows, width), normal(generator, local, width)
    cases = []
    for packed in (False, True):
        for indexed in (False, True):
            tile = normal(generator, rows - local + (4 if indexed else 0), width)
            tile = pack_rows(tile) if packed else tile
            inputs = {"global": state, "local": kept, "restored": tile}
            index = None
            if indexed:
                index = torch.randperm(tile.shape[0], generator=generator, device=device)[: rows - local]
                inputs["index"] = index
            cases.append(
                Case(
                    plugin="RestoreReplace",
                    fields={"width": width, "packed": int(packed), "indexed": int(indexed)},
                    inputs=inputs,
                    outputs={"state": (torch.bfloat16, (rows, width))},
                    expected=lambda tile=tile, index=index: {
                        "state": elementwise.restore_replace(state, kept, tile, index=index)
                    },
                )
            )
    return cases


def norm_cases(seed: int, device: str, rows: int) -> list[Case]:
    generator = generator_of(seed, device)
    width, rope_dim = 512, 64
    x, heads = normal(generator, rows, width), normal(generator, rows, 3, width)
    norm, rope = normal(generator, width) + 1, random_rope(64, rope_dim).to(device)
    positions = torch.randint(0, 64, (rows,), generator=generator, device=device)
    sizes = {
        0: (torch.bfloat16, width),
        1: (torch.int8, latent_pitch(width, rope_dim)),
        2: (torch.int8, row_bytes(width)),
    }
    cases = [
        Case(
            plugin="NormRopePack",
            fields={"width": width, "rope_dim": rope_dim, "format": number, "eps": EPS},
            inputs={"x": x, "norm": norm, "rope": rope, "positions": positions},
            outputs={"rows": (dtype, (rows, size))},
            expected=lambda number=number: {
                "rows": elementwise.norm_rope_pack(x, norm, rope, positions, eps=EPS, row_format=RowFormat(number))
            },
        )
        for number, (dtype, size) in sizes.items()
    ]
    cases.append(
        Case(
            plugin="NormRopePack",
            fields={"width": width, "heads": 3, "weighted": 0, "eps": EPS},
            inputs={"x": heads},
            outputs={"rows": (torch.bfloat16, (rows, 3, width))},
            expected=lambda: {"rows": elementwise.query_norm(heads, eps=EPS)},
        )
    )
    cases.append(
        Case(
            plugin="NormRopePack",
            fields={"width": width, "eps": EPS},
            inputs={"x": x, "norm": norm.float()},
            outputs={"rows": (torch.bfloat16, (rows, width))},
            expected=lambda: {"rows": elementwise.rms_norm(x, norm.float(), eps=EPS)},
        )
    )
    return cases


def compress_cases(seed: int, device: str, rows: int) -> list[Case]:
    cases = []
    rope = random_rope(max(rows, 1), 64).to(device)
    for ratio, series, width, number in ((4, 2, 512, 0), (4, 2, 128, 2), (128, 1, 512, 1)):
        case = compress_case(rows, ratio, series, width, seed=seed, device=device, float_weights=number == 0)
        entries = case.table.slots.shape[0]
        size = {
            0: (torch.bfloat16, width),
            1: (torch.int8, latent_pitch(width, 64)),
            2: (torch.int8, row_bytes(width)),
        }
        dtype, stored = size[number]
        cases.append(
            Case(
                plugin="Compress",
                fields={
                    "width": width, "series": series, "ratio": ratio, "rope_dim": 64, "format": number, "eps": EPS,
                },
                inputs={
                    "kv": case.kv, "gate": case.gate, "ape": case.ape, "norm": case.norm, "rope": rope,
                    "slots": case.table.slots, "positions": case.table.positions,
                },
                outputs={"entries": (dtype, (entries, stored))},
                expected=lambda case=case, number=number: {
                    "entries": elementwise.compress(
                        case.kv, case.gate, case.ape, case.norm, rope, case.table, eps=EPS, row_format=RowFormat(number)
                    )
                },
            )
        )  # fmt: skip
    return cases


def mix_cases(seed: int, device: str, rows: int) -> list[Case]:
    streams, hidden = 4, 72
    case = mix_case(rows, streams, hidden, seed=seed, device=device)
    post = normal(generator_of(seed, device), rows, streams, dtype=torch.float32)
    comb = normal(generator_of(seed + 1, device), rows, streams, streams, dtype=torch.float32)
    sizes = {"streams": streams, "hidden": hidden}

    def pre() -> Mapping[str, torch.Tensor]:
        names = ("normed", "post", "comb")
        found = elementwise.hyper_connection_pre(
            case.streams, case.fn, case.base, case.scale, case.norm, iterations=20, eps=EPS, norm_eps=EPS
        )
        return dict(zip(names, found, strict=True))

    return [
        Case(
            plugin="HyperConnectionPre",
            fields={**sizes, "iterations": 20, "eps": EPS, "norm_eps": EPS},
            inputs={
                "streams": case.streams, "fn": case.fn, "base": case.base, "scale": case.scale, "norm": case.norm
            },
            outputs={
                "normed": (torch.bfloat16, (rows, hidden)),
                "post": (torch.float32, (rows, streams)),
                "comb": (torch.float32, (rows, streams, streams)),
            },
            expected=pre,
        ),
        Case(
            plugin="HyperHead",
            fields={**sizes, "eps": EPS, "norm_eps": EPS},
            inputs={
                "streams": case.streams, "fn": case.head_fn, "base": case.head_base, "scale": case.head_scale,
                "norm": case.norm.float(),
            },
            outputs={"normed": (torch.bfloat16, (rows, hidden))},
            expected=lambda: {
                "normed": elementwise.hyper_head(
                    case.streams, case.head_fn, case.head_base, case.head_scale, case.norm.float(), eps=EPS,
                    norm_eps=EPS,
                )
            },
        ),
        Case(
            plugin="HyperConnectionPost",
            fields=sizes,
            inputs={"streams": case.streams, "output": case.output, "post": post, "comb": comb},
            outputs={"mixed": (torch.bfloat16, (rows, streams, hidden))},
            expected=lambda: {"mixed": elementwise.hyper_connection_post(case.streams, case.output, post, comb)},
        ),
    ]  # fmt: skip


def router_cases(seed: int, device: str, rows: int) -> list[Case]:
    generator = generator_of(seed, device)
    experts, top_k, vocab = 24, 6, 40
    logits = normal(generator, rows, experts)
    bias = normal(generator, experts, dtype=torch.float32)
    table = torch.rand((vocab, experts), generator=generator, device=device).argsort(1)[:, :top_k].contiguous()
    tokens = torch.randint(0, vocab, (rows,), generator=generator, device=device)
    fields = {"experts": experts, "top_k": top_k, "scale": 1.5, "scoring": 0}
    identity = torch.eye(experts, device=device, dtype=torch.bfloat16)
    outputs = {"ids": (torch.int64, (rows, top_k)), "weights": (torch.float32, (rows, top_k))}

    def learned() -> Mapping[str, torch.Tensor]:
        found = moe.route_learned(logits, identity, bias, top_k=top_k, scale=1.5, scoring="sqrtsoftplus", tau=0.85)
        return dict(zip(("ids", "weights"), found, strict=True))

    def hashed() -> Mapping[str, torch.Tensor]:
        ids, weights = moe.route_hash(logits, identity, table, tokens, scale=1.5, scoring="sqrtsoftplus")
        return {"ids": ids, "weights": weights, "faults": torch.zeros(1, dtype=torch.int32)}

    return [
        Case(
            plugin="MoeRouteLearned",
            fields=fields,
            inputs={"logits": logits, "bias": bias, "tau": torch.tensor([0.85], device=device)},
            outputs=outputs,
            expected=learned,
        ),
        Case(
            plugin="MoeRouteHash",
            fields=fields,
            inputs={"logits": logits, "table": table, "tokens": tokens},
            outputs={**outputs, "faults": (torch.int32, (1,))},
            expected=hashed,
        ),
    ]  # fmt: skip


def expert_cases(seed: int, device: str, rows: int) -> list[Case]:
    hidden, width, held, top_k = 64, 40, 8, 6
    case = expert_case(
        rows, hidden, width, total=24, held=held, first=5, top_k=top_k, dropped=0.2, seed=seed, device=device
    )
    capacity = rows * top_k
    gate_up, y = (normal(generator_of(seed, device), capacity, count) for count in (2 * width, hidden))
    local = (case.ids - case.first).flatten()
    places = torch.randperm(capacity, generator=generator_of(seed, device), device=device).int()
    inverse = torch.where((local >= 0) & (local < held), places, -1).int().view(rows, top_k)
    ends = torch.linspace(0, capacity // 2, held, device=device).int()

    quantised = quantise_experts(normal(generator_of(seed, device), held, 256, 128, dtype=torch.float32))
    weight, scale = quantised.codes, quantised.scales
    deep = normal(generator_of(seed + 2, device), capacity, 128)

    def permuted() -> Mapping[str, torch.Tensor]:
        found = moe.permute(case.x, case.ids, first=case.first, experts=held)
        return dict(zip(("permuted", "inverse", "ends"), found, strict=True))

    return [
        Case(
            plugin="MoePermute",
            fields={"hidden": hidden, "top_k": top_k, "first": case.first, "experts": held},
            inputs={"x": case.x, "ids": case.ids},
            outputs={
                "permuted": (torch.bfloat16, (capacity, hidden)),
                "inverse": (torch.int32, (rows, top_k)),
                "ends": (torch.int32, (held,)),
            },
            expected=permuted,
            valid=lambda: {"permuted": int(permuted()["ends"][-1])},
        ),
        Case(
            plugin="MoeActivation",
            fields={"width": width, "experts": held, "limit": 1.0},
            inputs={"gate_up": gate_up, "ends": ends},
            outputs={"activated": (torch.bfloat16, (capacity, width))},
            expected=lambda: {"activated": moe.activate(gate_up, ends, limit=1.0)},
            valid=lambda: {"activated": capacity // 2},
        ),
        Case(
            plugin="MoeGroupedGemm",
            fields={"experts": held, "depth": 128, "width": 256},
            inputs={"x": deep, "ends": ends, "weight": weight.view(torch.int8), "weight_scale": scale},
            outputs={"out": (torch.bfloat16, (capacity, 256))},
            expected=lambda: {"out": moe.grouped_gemm_fp8(deep, ends, weight, scale)},
            valid=lambda: {"out": capacity // 2},
        ),
        Case(
            plugin="MoeCombine",
            fields={"hidden": hidden, "top_k": top_k},
            inputs={"y": y, "inverse": inverse, "weights": case.weights},
            outputs={"sum": (torch.bfloat16, (rows, hidden))},
            expected=lambda: {"sum": moe.combine(y, inverse, case.weights)},
        ),
    ]


def attention_cases(seed: int, device: str, rows: int) -> list[Case]:
    cases = []
    few, many = (1, 7), (8, 56)  # heads; many of them need a workspace where pools are packed
    for ratio, top_k, packed, heads in (
        (0, None, False, few), (4, 16, True, few), (128, None, True, few), (4, 16, True, many), (16, None, False, many)
    ):  # fmt: skip
        layout = Layout(sequences=((3 * rows // 4 + 1, rows + 130),), ratio=ratio)
        total = sum(layout.sequences[0])
        positions = torch.randperm(total, generator=generator_of(seed, "cpu"))[:rows].sort().values
        case = attention_case(
            layout, [(0, positions)], full_rows=rows // 2, heads=heads, top_k=top_k, packed=packed, device=device,
            seed=seed,
        )  # fmt: skip
        inputs = {
            "q_global": case.q_global, "q_local": case.q_local, "segments": case.table.segments,
            "row_segments": case.table.row_segments, "positions": case.table.positions, "visible": case.table.visible,
            "sinks_global": case.sinks_global, "sinks_local": case.sinks_local, "rope": case.rope,
            "latents": case.latents,
        }  # fmt: skip
        if case.entries is not None:
            inputs["entries"] = case.entries
        if case.selected is not None:
            inputs["selected"] = case.selected

        def attend(case: object = case) -> Mapping[str, torch.Tensor]:
            found = attention.seg_latent_attention(
                case.q_global, case.q_local, case.table, case.latents, case.entries, case.selected, case.sinks_global,
                case.sinks_local, case.rope, window=128,
            )  # fmt: skip
            return dict(zip(("out_global", "out_local"), found, strict=True))

        cases.append(
            Case(
                plugin="SegLatentAttention",
                fields={
                    "global_heads": heads[0], "local_heads": heads[1], "window": 128,
                    "entries": int(case.entries is not None), "selected": int(case.selected is not None),
                    "packed": int(packed),
                },
                inputs=inputs,
                outputs={
                    "out_global": (torch.bfloat16, (rows, heads[0], 512)),
                    "out_local": (torch.bfloat16, (rows // 2, heads[1], 512)),
                },
                expected=attend,
                aligned=dict.fromkeys(("q_global", "q_local", "rope", "latents", "entries"), 16),
            )
        )  # fmt: skip
    return cases


def indexer_cases(seed: int, device: str, rows: int) -> list[Case]:
    generator = generator_of(seed, device)
    layout = Layout(sequences=((3 * rows // 4 + 1, rows + 130),), ratio=4)
    pools = place(layout)
    positions = torch.randperm(sum(layout.sequences[0]), generator=generator_of(seed, "cpu"))[:rows]
    table = table_to(make_table(layout, pools, [(0, positions)]), device)
    q, weights = normal(generator, rows, 64, 128), normal(generator, rows, 64)
    plain, rope = normal(generator, pools.owned_entries.shape[0], 128), random_rope(2 * rows + 132, 64).to(device)
    cases = []
    for packed, fp8 in ((0, 0), (0, 1), (1, 1)):
        keys = pack_rows(plain) if packed else plain

        def select(keys: torch.Tensor = keys, fp8: int = fp8) -> Mapping[str, torch.Tensor]:
            found = indexer.lightning_indexer(q, weights, keys, table, rope, top_k=16, fp8=bool(fp8))
            return {"selected": found}

        cases.append(
            Case(
                plugin="LightningIndexer",
                fields={"top_k": 16, "rows_at_a_time": 8, "packed": packed, "fp8": fp8},
                inputs={
                    "q": q, "weights": weights, "keys": keys, "segments": table.segments,
                    "row_segments": table.row_segments, "positions": table.positions, "visible": table.visible,
                    "rope": rope,
                },
                outputs={"selected": (torch.int64, (rows, 16))},
                expected=select,
                aligned={"q": 16, "keys": 16, "rope": 8},
            )
        )  # fmt: skip
    return cases


def collective_cases(seed: int, device: str, rows: int) -> list[Case]:
    """Over a communicator of one rank, where every collective hands its input on."""
    generator = generator_of(seed, device)
    sources = (
        normal(generator, rows, 24),
        normal(generator, rows, 24, dtype=torch.float32),
        normal(generator, rows, 24),
    )
    return [
        Case(
            plugin="Collective",
            fields={"kind": kind, "group": 3, "world": 1},
            inputs={"source": source},
            outputs={"result": (source.dtype, (rows, 24))},
            expected=lambda source=source: {"result": source},
            communicator=3,
        )
        for kind, source in enumerate(sources)
    ]
