"""The state of a training run in one safetensors file: nothing is pickled, and readers see the old state or the new."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trt_redknot.errors import CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(kw_only=True)
class Progress:
    """Where a run stands: steps taken, seconds of training, stage, steps in it, share of the run at its beginning."""

    step: int = 0
    seconds: float = 0.0
    stage: int = 0
    stage_steps: int = 0
    stage_share: float = 0.0


def save_state(
    path: Path, named: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, progress: Progress,
    recipe: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write parameters, optimizer moments, progress and the recipe, and put them in place by one rename."""
    tensors = {f"value/{name}": value.detach().cpu().contiguous() for name, value in named.items()}
    for name, value in named.items():
        for moment, tensor in optimizer.state.get(value, {}).items():
            tensors[f"{moment}/{name}"] = tensor.detach().cpu().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"progress": json.dumps(asdict(progress)), "recipe": json.dumps(recipe)})
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)


def load_state(
    path: Path, named: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, recipe: Mapping[str, Any]
) -> Progress:
    """Put a saved state into the parameters and the optimizer.

    Raises:
        CheckpointError: unreadable, of another recipe, or of other tensors.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        progress = Progress(**json.loads(metadata["progress"]))
        saved = json.loads(metadata["recipe"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError("the training state cannot be read", found=error, path=path) from error
    differing = sorted(key for key in {*saved, *recipe} if saved.get(key) != recipe.get(key))
    if differing:
        raise CheckpointError(
            "the training state is of another recipe",
            expected={key: recipe.get(key) for key in differing},
            found={key: saved.get(key) for key in differing},
            path=path,
            remedy="Name another output, or train with the same options.",
        )
    wanted = {f"value/{name}": value.shape for name, value in named.items()}
    found = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("value/")}
    if wanted != found:
        raise CheckpointError("the training state is of another network", path=path)
    with torch.no_grad():
        for name, value in named.items():
            value.copy_(tensors[f"value/{name}"])
            moments = {m: tensors[f"{m}/{name}"] for m in _MOMENTS if f"{m}/{name}" in tensors}
            if moments:
                step = moments.pop("step")
                optimizer.state[value] = {
                    "step": step.to(value.device) if value.is_cuda else step,
                    **{key: tensor.to(value.device) for key, tensor in moments.items()},
                }
    return progress
