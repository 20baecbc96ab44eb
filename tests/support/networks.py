"""Small DeepSeek-V4 networks that transformers itself makes and writes: the oracle of the tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.checkpoint import Checkpoint
from trt_redknot.collectives import LocalCollectives
from trt_redknot.config.parse import load_geometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.engine.build import BuildOptions, build_torch_engine
from trt_redknot.engine.engine import Engine

# Chunks end inside a window of either kind of compression, and long requests have several.
CHUNK_ROWS = 101

KINDS = {
    "s": "sliding_attention",
    "c": "compressed_sparse_attention",
    "h": "heavily_compressed_attention",
}


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Sizes of a test network. `kinds` has one letter a layer: s(liding), c(sa), h(ca)."""

    seed: int = 0
    kinds: str = "schchc"
    hash_layers: int = 2
    groups: int = 2
    heads_per_group: int = 4
    csa: int = 4
    hca: int = 16
    window: int = 16
    topk: int = 8
    vocab: int = 97
    experts: int = 8
    experts_per_token: int = 4
    hidden: int = 64
    head_dim: int = 32
    rope_dim: int = 8
    index_heads: int = 16
    index_dim: int = 16
    expert_width: int = 32


def network_config(options: NetworkOptions) -> DeepseekV4Config:
    layers = len(options.kinds)
    config = DeepseekV4Config(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        moe_intermediate_size=options.expert_width,
        num_hidden_layers=layers,
        num_attention_heads=options.groups * options.heads_per_group,
        head_dim=options.head_dim,
        partial_rotary_factor=options.rope_dim / options.head_dim,
        q_lora_rank=24,
        num_experts_per_tok=options.experts_per_token,
        n_routed_experts=options.experts,
        layer_types=[KINDS[letter] for letter in options.kinds],
        compress_rates={KINDS["c"]: options.csa, KINDS["h"]: options.hca},
        mlp_layer_types=["hash_moe"] * options.hash_layers + ["moe"] * (layers - options.hash_layers),
        sliding_window=options.window,
        o_groups=options.groups,
        o_lora_rank=16,
        # Another number than the released networks have, so that it is read; smaller, so that calls take less time.
        hc_sinkhorn_iters=6,
        # Many index heads: with few, whole rows of scores are exactly zero and torch breaks the ties as it likes.
        index_n_heads=options.index_heads,
        index_head_dim=options.index_dim,
        index_topk=options.topk,
        initializer_range=0.12,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=options.vocab - 1,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    )
    config._attn_implementation = "eager"
    return config


@torch.no_grad()
def network(options: NetworkOptions) -> DeepseekV4ForCausalLM:
    """A network with every parameter away from its initial constant, so that none can be left out unseen."""
    generator = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)
    model = DeepseekV4ForCausalLM(network_config(options)).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        last = name.rsplit(".", 1)[-1]
        if last in ("sinks", "position_bias", "base", "hc_base"):
            tensor.normal_(0.0, 0.5, generator=generator)
        elif last == "e_score_correction_bias":
            tensor.normal_(0.0, 0.1, generator=generator)
        elif last == "tid2eid":
            scores = torch.rand(tensor.shape[0], options.experts, generator=generator)
            tensor.copy_(scores.argsort(dim=1)[:, : options.experts_per_token])
        elif last in ("scale", "hc_scale") or "norm" in name:
            tensor.uniform_(0.5, 1.5, generator=generator)
    return model


def write_network(model: DeepseekV4ForCausalLM, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def build_engine(
    checkpoint: Path, output: Path, *, profile: SplitProfile | None = None, options: BuildOptions | None = None
) -> Path:
    """A one-rank engine of a written network."""
    geometry = load_geometry(checkpoint)
    build_torch_engine(
        Checkpoint.open(checkpoint, geometry),
        profile or SplitProfile.default(geometry),
        output,
        options or BuildOptions(chunk_rows=CHUNK_ROWS),
        LocalCollectives(),
    )
    return output


def open_network(
    directory: Path,
    options: NetworkOptions | None = None,
    *,
    profile: SplitProfile | None = None,
    build: BuildOptions | None = None,
) -> tuple[DeepseekV4ForCausalLM, Engine]:
    """transformers' network and our engine of the same weights."""
    model = network(options or NetworkOptions())
    checkpoint = write_network(model, directory / "checkpoint")
    return model, Engine.open(build_engine(checkpoint, directory / "engine", profile=profile, options=build))


@torch.no_grad()
def native_logits(model: DeepseekV4ForCausalLM, tokens: list[int]) -> torch.Tensor:
    """fp32 [len(tokens), V] of transformers, without a cache."""
    result: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return result


def fp64(**options: int) -> BuildOptions:
    """An engine in which rounding decides no near tie of a router or of the Indexer, so that equal means equal."""
    return BuildOptions(
        **{"chunk_rows": CHUNK_ROWS, **options}, dtype="float64", artifact_format=ArtifactFormat.FLOAT64
    )
