"""What the tests of the tensorrt backend share: geometries, and a platform that builds on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.parse import geometry_from_config
from trt_redknot.config.released import released_config, released_geometry
from trt_redknot.engine.tensorrt.build import plan_specs
from trt_redknot.engine.tensorrt.platform import Platform, make_logger
from trt_redknot.engine.tensorrt.specification import PlanFormat, PlanSpec
from trt_redknot.ops.tensorrt.plugins import CutPort

BFLOAT16 = PlanFormat()
PACKED = PlanFormat(packed_cache=True, packed_local=True)
WORLDS = {"nano": 2, "flash": 8, "pro": 8}


def nano_config() -> dict[str, Any]:
    """Six small layers of every kind with the head sizes that the kernels serve, as a released config.json."""
    config = released_config("flash") | {
        "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
        "hidden_size": 256,
        "index_topk": 64,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_attention_heads": 16,
        "num_hidden_layers": 6,
        "o_groups": 2,
        "o_lora_rank": 64,
        "q_lora_rank": 128,
        "vocab_size": 515,
    }
    del config["quantization_config"]
    return config


def nano_geometry() -> ModelGeometry:
    return geometry_from_config(nano_config(), source="nano")


def write_nano(directory: Path) -> Path:
    """A checkpoint of the nano geometry with random weights, written by transformers."""
    # Ranks that only build have no use for it, and it takes seconds to import.
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    model = DeepseekV4ForCausalLM(DeepseekV4Config.from_dict(nano_config()))
    model.save_pretrained(directory)
    return directory


def geometry(name: str) -> ModelGeometry:
    return nano_geometry() if name == "nano" else released_geometry(name)


def specs(name: str, format: PlanFormat = BFLOAT16, world: int | None = None) -> tuple[PlanSpec, ...]:
    return plan_specs(geometry(name), world=world or WORLDS[name], format=format)


def cpu_platform(module: Any, port: Callable[[], CutPort] = CutPort) -> Platform:
    """TensorRT for RTX: a whole builder that needs no GPU and has no plugin layers. Its plans run on no Hopper GPU."""

    def for_one_target(config: Any) -> None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(module.ComputeCapability.SM120, 0)

    return Platform(
        module=module, logger=make_logger(module), gpu="none (SM 12.0 as target)", free_bytes=2**40,
        plugin_build="cut", port=port, configure=for_one_target,
    )  # fmt: skip
