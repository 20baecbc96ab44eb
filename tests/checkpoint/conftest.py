"""A small network that transformers itself builds and writes, and helpers to rewrite its files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

from trt_redknot.config import ModelGeometry, load_geometry

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network and its tensors under transformers' module names."""

    model: DeepseekV4ForCausalLM
    geometry: ModelGeometry
    truth: dict[str, torch.Tensor]
    released: dict[str, torch.Tensor]


def released_style(saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What save_pretrained writes, renamed to what the published files are named."""
    published = {}
    for name, tensor in saved.items():
        bare = name.removeprefix("model.").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_")
        published[bare.replace(".attn.norm.", ".attn.kv_norm.")] = tensor
    return published


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    """Sizes that no block of 128 divides, and ranks whose slices begin inside a block."""
    config = DeepseekV4Config(
        vocab_size=131,
        hidden_size=160,
        moe_intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=8,
        head_dim=40,
        q_lora_rank=136,
        o_groups=4,
        o_lora_rank=72,
        n_routed_experts=6,
        num_experts_per_tok=2,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=4,
        sliding_window=8,
        hc_mult=2,
        layer_types=[SLIDING, CSA, HCA, CSA],
        mlp_layer_types=["hash_moe", "moe", "moe", "hash_moe"],
        compress_rates={CSA: 4, HCA: 32},
        qk_rope_head_dim=10,
        max_position_embeddings=1024,
    )
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    model = DeepseekV4ForCausalLM(config)
    for name, tensor in model.state_dict().items():
        if name.endswith("tid2eid"):
            tensor.copy_(torch.randint(0, config.n_routed_experts, tensor.shape, generator=generator))
        else:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    directory = tmp_path_factory.mktemp("network")
    model.save_pretrained(directory)
    return Network(
        model=model,
        geometry=load_geometry(directory),
        truth={name.removeprefix("model."): tensor.clone() for name, tensor in model.state_dict().items()},
        released=released_style(load_file(directory / "model.safetensors")),
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write(tensors, shards=1, index=None): a checkpoint directory of those tensors; an index where shards > 1."""

    def write_tensors(tensors: dict[str, torch.Tensor], *, shards: int = 1) -> Path:
        directory = tmp_path / "checkpoint"
        directory.mkdir()
        if shards == 1:
            save_file(tensors, directory / "model.safetensors")
            return directory
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: tensor for index, (name, tensor) in enumerate(tensors.items()) if index % shards == shard}
            save_file(part, directory / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        return directory

    return write_tensors


@pytest.fixture
def rewrite_header() -> Callable[[Path, Callable[[dict], dict]], None]:
    """rewrite_header(path, change): replaces a file's header by what `change` makes of it, data untouched."""

    def rewrite(path: Path, change: Callable[[dict], dict]) -> None:
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.dumps(change(json.loads(content[8 : 8 + length]))).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])

    return rewrite
