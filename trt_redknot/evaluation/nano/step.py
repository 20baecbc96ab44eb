"""Training steps of one stage: computed one operation after the other, or, on a GPU, replayed as one CUDA graph.

A step has some ten thousand small operations; launched one by one they take several times as long as they run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from trt_redknot.evaluation.nano.batches import Batch, Stage
from trt_redknot.evaluation.nano.lean import LeanNetwork
from trt_redknot.evaluation.nano.objective import AuxiliaryHeads, Losses, losses_of

if TYPE_CHECKING:
    from trt_redknot.evaluation.nano.training import Recipe

# Steps before a capture: they make the optimizer's state, and what libraries allocate on first use.
_WARM_UP = 3
_WATCHED = 4
_INPUTS = ("tokens", "targets", "subjects", "kinds", "bridges")


class StageSteps:
    """The steps of one stage. On a GPU all of them run on the current stream, which must not be the default one.

    Args:
        named: parameters by name.
        captured: replay steps as a CUDA graph; where the capture fails, `note` is told and steps go on without.
    """

    def __init__(
        self, recipe: Recipe, stage: Stage, network: LeanNetwork, heads: AuxiliaryHeads,
        optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor], device: torch.device, *, captured: bool,
        note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._recipe, self._stage, self._network, self._heads = recipe, stage, network, heads
        self._optimizer, self._parameters, self._device = optimizer, list(named.values()), device
        self._captured, self._note = captured, note
        late = recipe.late_first if stage.length == recipe.lengths[0] else recipe.late
        self._late, self._told = int(stage.sequences * late), int(stage.sequences * recipe.told)
        first = self._late + self._told
        self._fine = slice(first, first + int(stage.sequences * recipe.fine))
        self._dense = max(stage.sequences - round(stage.sequences * recipe.sparse), self._fine.stop)
        self._muted = min(int(stage.sequences * recipe.mute), stage.sequences - self._dense)
        shape = (stage.sequences, stage.length)
        self._inputs = {name: torch.zeros(shape, dtype=torch.int64, device=device) for name in _INPUTS}
        self._watched = torch.zeros(max(1, network.sizes.block // _WATCHED), dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logged = torch.zeros(0)
        self._steps = 0

    def run(self, batch: Batch, rate: float, seed: int) -> torch.Tensor:
        """One step. Returns the logged values, fp32 [values of `Logged`]; the next step overwrites them.

        Args:
            seed: of the places at which Indexers are watched.
        """
        for name, tensor in self._inputs.items():
            tensor.copy_(self._moved(torch.from_numpy(getattr(batch, name).copy())))
        generator = torch.Generator().manual_seed(seed)
        places = torch.randperm(self._network.sizes.block, generator=generator)[: len(self._watched)]
        self._watched.copy_(self._moved(places.sort().values))
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self._captured and self._graph is None and self._steps >= _WARM_UP:
            self._capture()
        if self._graph is None:
            self._logged = self._compute()
        else:
            self._graph.replay()
        self._steps += 1
        return self._logged

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._optimizer.zero_grad(set_to_none=True)
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                self._logged = self._compute()
        except RuntimeError as error:
            self._captured = False
            self._optimizer.zero_grad(set_to_none=True)
            self._note(f"the step cannot be captured, it goes on without: {str(error).splitlines()[0]}")
            return
        self._graph = graph

    def _compute(self) -> torch.Tensor:
        told = slice(self._late, self._late + self._told)
        inputs = self._inputs
        hint = self._heads.hint(inputs["tokens"], inputs["targets"], inputs["bridges"], told)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            forward = self._network(
                self._inputs["tokens"], dense=self._dense, muted=self._muted, late=self._late, fine=self._fine,
                watched=self._watched, keep=self._heads.layers, hint=hint,
            )  # fmt: skip
            losses = losses_of(
                forward, self._heads, *(self._inputs[name] for name in _INPUTS), weights=self._recipe.weights,
                silent=self._recipe.sizes.silent, muted=self._muted, late=self._late, told=self._told,
                fine=self._fine.stop - self._fine.start,
            )  # fmt: skip
        self._optimizer.zero_grad(set_to_none=True)
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, self._recipe.clip)
        for value in self._parameters:
            # One batch that overflows must not end a run: its norm is not finite, and then no gradient is.
            if value.grad is not None:
                value.grad.nan_to_num_(0.0, 0.0, 0.0)
        self._optimizer.step()
        return logged_values(losses)


def logged_values(losses: Losses) -> torch.Tensor:
    """All values of the losses in the order of their fields, fp32."""
    return torch.cat([getattr(losses, field.name).detach().float().flatten() for field in fields(losses)])


def named_values(values: Sequence[float], kinds: Sequence[str]) -> dict[str, float]:
    """What `logged_values` holds, by name; of all questions and by kind the share of words that was found."""
    scalars = [field.name for field in fields(Losses) if not field.name.startswith("kinds_")]
    named = dict(zip(scalars, values, strict=False))
    right, asked = values[len(scalars) : len(scalars) + len(kinds)], values[len(scalars) + len(kinds) :]
    named["found"] = sum(right) / max(1.0, sum(asked))
    shares = {f"found_{kind}": r / a for kind, r, a in zip(kinds, right, asked, strict=True) if a}
    return named | shares
