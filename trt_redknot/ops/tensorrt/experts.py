"""Routers and experts of a layer as plugins, between native projections."""

from __future__ import annotations

from trt_redknot.errors import EngineError
from trt_redknot.ops.experts import EXPERT_BLOCK
from trt_redknot.ops.tensorrt.calls import PluginOps, times
from trt_redknot.ops.tensorrt.tensors import ElementType, NetworkExperts, NetworkTensor, Shape, Size

_SCORING = {"sqrtsoftplus": 0, "sigmoid": 1, "softmax": 2}


class ExpertOps(PluginOps):
    """The feed-forward part of :class:`trt_redknot.ops.interface.Ops`."""

    def route_learned(
        self,
        x_RM: NetworkTensor,
        weight_XM: NetworkTensor,
        bias_X: NetworkTensor,
        *,
        top_k: int,
        scale: float,
        scoring: str,
        tau: float,
    ) -> tuple[NetworkTensor, NetworkTensor]:
        assert self._calling.tau is not None, "a plan with a learned router has an input for tau"
        ids, weights = self._call(
            "route_learned", "MoeRouteLearned",
            {"experts": weight_XM.fixed(0), "top_k": top_k, "scale": scale, "scoring": _SCORING[scoring]},
            {"logits": self.linear(x_RM, weight_XM), "bias": bias_X, "tau": self._calling.tau},
            **_routes(x_RM.shape[0], top_k),
        )  # fmt: skip
        return ids, weights

    def route_hash(
        self,
        x_RM: NetworkTensor,
        weight_XM: NetworkTensor,
        table_Vk: NetworkTensor,
        tokens_R: NetworkTensor,
        *,
        scale: float,
        scoring: str,
    ) -> tuple[NetworkTensor, NetworkTensor]:
        top_k = table_Vk.fixed(1)
        ids, weights, faults = self._call(
            "route_hash", "MoeRouteHash",
            {"experts": weight_XM.fixed(0), "top_k": top_k, "scale": scale, "scoring": _SCORING[scoring]},
            {"logits": self.linear(x_RM, weight_XM), "table": self._writer.cast(table_Vk, ElementType.INT64),
             "tokens": tokens_R},
            **_routes(x_RM.shape[0], top_k),
            faults=(ElementType.INT32, (1,)),
        )  # fmt: skip
        self.faults.append(faults)
        return ids, weights

    def experts(
        self,
        x_RM: NetworkTensor,
        ids_Rk: NetworkTensor,
        weights_Rk: NetworkTensor,
        gate_up: NetworkExperts,
        down: NetworkExperts,
        *,
        first: int,
        limit: float,
    ) -> NetworkTensor:
        rows, hidden, top_k = x_RM.shape[0], x_RM.fixed(1), ids_Rk.fixed(1)
        experts, width = down.codes.fixed(0), down.codes.fixed(2)
        if hidden % EXPERT_BLOCK or width % EXPERT_BLOCK:
            raise EngineError(
                "op 'experts' has no implementation in the tensorrt backend for this geometry",
                expected=f"hidden and expert width that {EXPERT_BLOCK} divides", found=f"{hidden} and {width}",
                remedy="Build with --backend torch, which serves every geometry.",
            )  # fmt: skip
        permuted, inverse, ends = self._call(
            "experts", "MoePermute", {"hidden": hidden, "top_k": top_k, "first": 0, "experts": experts},
            {"x": x_RM, "ids": self._held_here(ids_Rk)},
            permuted=(ElementType.BFLOAT16, (times(rows, top_k), hidden)),
            inverse=(ElementType.INT32, (rows, top_k)),
            ends=(ElementType.INT32, (experts,)),
        )  # fmt: skip
        (activated,) = self._call(
            "experts", "MoeActivation", {"width": width, "experts": experts, "limit": limit},
            {"gate_up": self._grouped_gemm(permuted, ends, gate_up), "ends": ends},
            activated=(ElementType.BFLOAT16, (permuted.shape[0], width)),
        )  # fmt: skip
        (total,) = self._call(
            "experts", "MoeCombine", {"hidden": hidden, "top_k": top_k},
            {"y": self._grouped_gemm(activated, ends, down), "inverse": inverse, "weights": weights_Rk},
            sum=(ElementType.BFLOAT16, (rows, hidden)),
        )  # fmt: skip
        return total

    def _held_here(self, ids_Rk: NetworkTensor) -> NetworkTensor:
        """Ids counted from this rank's first expert, so that plans do not depend on the rank; others stay outside."""
        first = self._calling.first_expert
        assert first is not None, "a plan with experts has an input for their first id"
        kinds = self._writer.module.ElementWiseOperation
        return self._writer.elementwise(ids_Rk, self._writer.reshape(first, (1, 1)), kinds.SUB)

    def _grouped_gemm(self, x: NetworkTensor, ends: NetworkTensor, weight: NetworkExperts) -> NetworkTensor:
        experts, width, depth = (weight.codes.fixed(axis) for axis in range(3))
        (out,) = self._call(
            "experts", "MoeGroupedGemm", {"experts": experts, "depth": depth, "width": width},
            {"x": x, "ends": ends, "weight": weight.codes, "weight_scale": weight.scales},
            out=(ElementType.BFLOAT16, (x.shape[0], width)),
        )  # fmt: skip
        return out


def _routes(rows: int | Size, top_k: int) -> dict[str, tuple[ElementType, Shape]]:
    return {"ids": (ElementType.INT64, (rows, top_k)), "weights": (ElementType.FLOAT32, (rows, top_k))}
