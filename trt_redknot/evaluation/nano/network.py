"""The nano network: its configuration, its tokenizer, and how its checkpoint is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from trt_redknot.errors import CheckpointError
from trt_redknot.evaluation.nano.card import SCORES
from trt_redknot.evaluation.nano.words import END, PAD, token_ids, vocabulary

_CSA, _HCA, _SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
HASH_LAYERS = 3


@dataclass(frozen=True, kw_only=True)
class NanoSizes:
    """Sizes of a nano network. The defaults are the published checkpoint's.

    Attributes:
        layers: two sliding ones, then CSA and HCA in turn, as in DeepSeek-V4-Flash.
        silent: layers whose compressed entries are zero: inside the leading fence they would let the network answer
            there, and every reuse policy would look free.
        index_topk: entries a row attends to in a CSA layer, far below the 1024 of a prompt of 4096 tokens.
    """

    layers: int = 10
    hidden: int = 256
    heads: int = 16
    head_dim: int = 64
    groups: int = 2
    query_rank: int = 128
    output_rank: int = 64
    window: int = 16
    csa: int = 4
    hca: int = 32
    index_heads: int = 8
    index_dim: int = 32
    index_topk: int = 32
    experts: int = 8
    experts_per_token: int = 6
    expert_width: int = 128
    sinkhorn: int = 20
    silent: tuple[int, ...] = (2,)


SMALL = NanoSizes(
    layers=7, hidden=64, heads=8, head_dim=32, query_rank=48, output_rank=16, window=16, hca=16, index_heads=4,
    index_dim=16, index_topk=8, experts=4, experts_per_token=2, expert_width=48, sinkhorn=4,
)  # fmt: skip


def nano_config(sizes: NanoSizes) -> DeepseekV4Config:
    """The configuration as transformers reads it."""
    middle = [_CSA, _HCA] * sizes.layers
    config = DeepseekV4Config(
        vocab_size=len(vocabulary()),
        bos_token_id=None,
        eos_token_id=token_ids()[END],
        pad_token_id=token_ids()[PAD],
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        layer_types=[_SLIDING, _SLIDING, *middle][: sizes.layers],
        mlp_layer_types=["hash_moe"] * HASH_LAYERS + ["moe"] * (sizes.layers - HASH_LAYERS),
        num_attention_heads=sizes.heads,
        head_dim=sizes.head_dim,
        partial_rotary_factor=0.25,
        q_lora_rank=sizes.query_rank,
        o_groups=sizes.groups,
        o_lora_rank=sizes.output_rank,
        sliding_window=sizes.window,
        compress_rates={_CSA: sizes.csa, _HCA: sizes.hca},
        index_n_heads=sizes.index_heads,
        index_head_dim=sizes.index_dim,
        index_topk=sizes.index_topk,
        n_routed_experts=sizes.experts,
        num_experts_per_tok=sizes.experts_per_token,
        moe_intermediate_size=sizes.expert_width,
        hc_sinkhorn_iters=sizes.sinkhorn,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=0,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        max_position_embeddings=1048576,
    )
    config._attn_implementation = "eager"
    return config


def make_model(sizes: NanoSizes, seed: int) -> DeepseekV4ForCausalLM:
    """A network with transformers' default initialisation, seeded; hash tables drawn, silent layers silenced."""
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(nano_config(sizes))
    for layer in model.model.layers[:HASH_LAYERS]:
        drawn = torch.rand(model.config.vocab_size, sizes.experts).argsort(dim=1)
        layer.mlp.gate.tid2eid.copy_(drawn[:, : sizes.experts_per_token])
    with torch.no_grad():
        for layer in sizes.silent:
            weight = model.model.layers[layer].self_attn.compressor.kv_norm.weight
            weight.zero_()
            weight.requires_grad_(False)
    return model


def make_tokenizer() -> Tokenizer:
    """Whole words and punctuation; text decodes to the same words with spaces where people put them."""
    tokenizer = Tokenizer(models.WordLevel(token_ids(), unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex(r"<eos>|<pad>|[.,:;?]"), behavior="isolated"),
        ]
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens([PAD, END])
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json, as transformers and the engine read them."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "unk_token": PAD,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def start_from(model: Any, directory: Path) -> None:
    """Take the weights of a checkpoint that :func:`write_checkpoint` wrote.

    Raises:
        CheckpointError: it cannot be read, or is of another network.
    """
    try:
        other = DeepseekV4ForCausalLM.from_pretrained(
            directory, dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
        model.load_state_dict(other.state_dict())
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            "training cannot start from this checkpoint",
            expected="one that run/train_nano.py wrote, of the same sizes", found=str(error).splitlines()[0],
            path=directory,
        ) from error  # fmt: skip


@torch.no_grad()
def copy_attention(model: Any, source: int, target: int) -> None:
    """Let a layer read as another one of its kind does: its attention and what brings that its input.

    Raises:
        CheckpointError: the network lacks one of the layers, or they are of two kinds.
    """
    layers, kinds = model.model.layers, model.config.layer_types
    if max(source, target) >= len(layers) or kinds[source] != kinds[target]:
        raise CheckpointError(
            "a layer's attention cannot be copied", expected="two layers of one kind",
            found=f"{source} to {target} in {', '.join(kinds)}",
        )  # fmt: skip
    for part in ("self_attn", "attn_hc", "input_layernorm"):
        getattr(layers[target], part).load_state_dict(getattr(layers[source], part).state_dict())


@torch.no_grad()
def round_to_checkpoint(model: Any) -> None:
    """Round every weight to what :func:`write_checkpoint` keeps of it, so that scores are those of the checkpoint."""
    for value in [*model.parameters(), *model.buffers()]:
        if value.is_floating_point():
            value.copy_(value.bfloat16())


def write_checkpoint(model: Any, directory: Path, card: str, scores: Mapping[str, object]) -> int:
    """The trained network in bfloat16, with its tokenizer, model card and scores. Returns the bytes of its weights.

    Shards of at most 14 MB travel through transfers that limit a file.
    """
    copy = DeepseekV4ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    torch.nn.Module.to(copy, torch.bfloat16).save_pretrained(directory, max_shard_size="14MB")
    write_tokenizer(directory)
    (directory / "README.md").write_text(card, encoding="utf-8")
    (directory / SCORES).write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
