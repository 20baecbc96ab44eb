"""Writes a small DeepSeek-V4 checkpoint with seeded random weights, through transformers itself.

It has every part of the real network (all three kinds of layers, both routers, YaRN, sinks, hyper-connections) at
sizes that a laptop runs, in the format of a released repository: config.json, sharded safetensors, tokenizer. It has
learned nothing: its answers are random, and two ways of computing them can still be compared exactly.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trt_redknot.cli.command import run_command
from trt_redknot.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, PreTrainedTokenizerBase

TOKENIZER = Path(__file__).resolve().parent / "tokenizer"
LAYERS = 10
HASH_LAYERS = 3
EXPERTS = 8
EXPERTS_PER_TOKEN = 6
# Standard deviation of the logits: enough that the most likely tokens stand out, as in a trained network.
LOGIT_SPREAD = 3.0
# The same of the router's logits: rows then differ in how many experts carry most of the weight.
ROUTER_SPREAD = 6.0


def nano_config(tokenizer: PreTrainedTokenizerBase) -> DeepseekV4Config:
    """Ten layers: two sliding, then CSA and HCA in turn; the released proportions of rope, groups and YaRN."""
    from transformers import DeepseekV4Config

    compressed = ["compressed_sparse_attention", "heavily_compressed_attention"]
    return DeepseekV4Config(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        hidden_size=256,
        num_hidden_layers=LAYERS,
        layer_types=["sliding_attention", "sliding_attention", *compressed * ((LAYERS - 2) // 2)],
        mlp_layer_types=["hash_moe"] * HASH_LAYERS + ["moe"] * (LAYERS - HASH_LAYERS),
        num_attention_heads=16,
        head_dim=64,
        partial_rotary_factor=0.25,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=64,
        sliding_window=64,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
        index_n_heads=8,
        index_head_dim=32,
        index_topk=32,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        moe_intermediate_size=128,
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


def randomise(model: DeepseekV4ForCausalLM, generator: torch.Generator) -> None:
    """Draw every parameter and buffer that a checkpoint stores, in the order of their names."""
    import torch

    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    stored = model.state_dict()
    with torch.no_grad():
        for name in sorted(stored):
            tensors[name].copy_(_draw(name, tensors[name], generator))


def _draw(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    import torch

    def normal(mean: float, deviation: float) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator) * deviation + mean

    last = name.rsplit(".", 1)[-1]
    if last == "tid2eid":
        # Each token has its own set of distinct experts, as in a released table.
        return torch.rand(like.shape[0], EXPERTS, generator=generator).argsort(dim=1)[:, : like.shape[1]]
    if last == "sinks":
        return normal(0.0, 1.0)
    if last == "position_bias":
        return normal(0.0, 0.5)
    if last == "e_score_correction_bias":
        return normal(0.0, 0.05)
    if last in ("base", "hc_base"):
        return normal(0.0, 0.5)
    if last in ("scale", "hc_scale"):
        return normal(1.0, 0.2)
    if name == "model.embed_tokens.weight":
        return normal(0.0, 1.0)
    if name == "lm_head.weight":
        return normal(0.0, LOGIT_SPREAD / math.sqrt(like.shape[1]))
    if name.endswith("mlp.gate.weight"):
        return normal(0.0, ROUTER_SPREAD / math.sqrt(like.shape[1]))
    if like.dim() == 1:
        return normal(1.0, 0.1)
    return normal(0.0, 1.0 / math.sqrt(like.shape[-1]))


def write_checkpoint(output: Path, seed: int, dtype: torch.dtype) -> int:
    """Write the checkpoint; returns the number of parameters. Raises CheckpointError when `output` holds files."""
    import torch
    from transformers import AutoTokenizer, DeepseekV4ForCausalLM

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(
            "the output is in use", expected="a new or empty folder", path=output, remedy="Remove it or name another."
        )
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    model = DeepseekV4ForCausalLM(nano_config(tokenizer))
    randomise(model, torch.Generator().manual_seed(seed))
    torch.nn.Module.to(model, dtype).save_pretrained(output, max_shard_size="16MB")
    tokenizer.save_pretrained(output)
    return sum(parameter.numel() for parameter in model.parameters())


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--output", type=click.Path(path_type=Path), required=True, help="New or empty folder to write.")
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True, help="Same seed, same bytes.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
def main(output: Path, seed: int, dtype: str) -> None:
    """Write a small DeepSeek-V4 checkpoint with random weights and the example tokenizer."""
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    parameters = write_checkpoint(output, seed, torch.float32 if dtype == "float32" else torch.bfloat16)
    click.echo(f"{output}: {parameters:,} parameters, seed {seed}, {dtype}")


if __name__ == "__main__":
    run_command(lambda: main(standalone_mode=False))
