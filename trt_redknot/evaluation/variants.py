"""What is compared with recomputation: policies, cuttings and engines, one axis at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trt_redknot.config.policy import DEFAULT_TAU, ReusePolicy
from trt_redknot.evaluation.prompts import Cutting

BASE_ENGINE = "base"
BUDGETS = (0.0, 0.10, 0.20, 0.25, 0.50, 1.0)
TAUS = (0.5, 0.6, 0.7, 0.8, DEFAULT_TAU, 0.9, 0.95, 1.0)
DOCUMENTS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One thing that is compared with recomputation.

    Attributes:
        name: unique in a run; `axis=value`.
        axis, value: what is varied, and how it is shown.
        engine: name of the engine that runs both arms.
    """

    name: str
    axis: str
    value: str
    policy: ReusePolicy
    cutting: Cutting = field(default_factory=Cutting)
    engine: str = BASE_ENGINE

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "axis": self.axis,
            "value": self.value,
            "policy": self.policy.model_dump(mode="json"),
            "cutting": {
                "order": self.cutting.order,
                "documents": self.cutting.documents,
                "multiple": self.cutting.multiple,
            },
            "engine": self.engine,
        }


def single(policy: ReusePolicy) -> list[Variant]:
    """Only the policy itself."""
    return [Variant(name="policy", axis="policy", value="as asked", policy=policy)]


def sweep(policy: ReusePolicy, axes: Sequence[str], *, multiple: int, engines: Iterable[str] = ()) -> list[Variant]:
    """Variants of `policy` along the axes named.

    Args:
        multiple: tokens that aligned documents are multiples of: the coarsest compression window.
        engines: names of further engines, each run with the policy itself (axis `engine`).
    """
    makers: dict[str, Callable[[ReusePolicy], list[Variant]]] = {
        "budget": _budgets,
        "protected": _protected,
        "epilogue": _epilogues,
        "tau": _taus,
        "fanout": lambda base: _fanout(base, multiple),
        "documents": _documents,
        "order": _orders,
        "alignment": lambda base: _alignment(base, multiple),
    }
    variants = [variant for axis in axes if axis in makers for variant in makers[axis](policy)]
    if "engine" in axes:
        variants += [
            Variant(name=f"engine={name}", axis="engine", value=name, policy=policy, engine=name)
            for name in (BASE_ENGINE, *engines)
        ]
    return variants


def joined(variants: Sequence[Variant], documents: int | None) -> list[Variant]:
    """The variants with contexts of so many documents, where they do not say how many themselves."""
    return [
        variant
        if variant.cutting.documents is not None
        else replace(variant, cutting=replace(variant.cutting, documents=documents))
        for variant in variants
    ]


AXES = ("budget", "protected", "epilogue", "tau", "fanout", "documents", "order", "alignment", "engine")


def _changed(policy: ReusePolicy, **changes: Any) -> ReusePolicy:
    return ReusePolicy.model_validate(policy.model_dump() | changes)


def _along(axis: str, policies: Iterable[tuple[str, ReusePolicy]]) -> list[Variant]:
    return [Variant(name=f"{axis}={value}", axis=axis, value=value, policy=policy) for value, policy in policies]


def _budgets(policy: ReusePolicy) -> list[Variant]:
    return _along("budget", [(f"{budget:.0%}", _changed(policy, budget=budget)) for budget in BUDGETS])


def _protected(policy: ReusePolicy) -> list[Variant]:
    off = {
        "no boundary": {"boundary": 0},
        "no I_top": {"top_entries": 0},
        "no tail": {"tail": 0},
        "none of them": {"boundary": 0, "top_entries": 0, "tail": 0},
    }
    switched = [(value, _changed(policy, **changes)) for value, changes in off.items()]
    return _along("protected", [("all sets", policy), *switched])


def _epilogues(policy: ReusePolicy) -> list[Variant]:
    return _along("epilogue", [(value, _changed(policy, epilogue=value)) for value in ("full", "active")])


def _taus(policy: ReusePolicy) -> list[Variant]:
    return _along("tau", [(f"{tau:g}", _changed(policy, tau=tau)) for tau in TAUS])


def _fanout(policy: ReusePolicy, multiple: int) -> list[Variant]:
    """Adaptive fanout alone: every row protected and every window whole, so attention is that of recomputation."""
    return [
        Variant(
            name=f"fanout={tau:g}",
            axis="fanout",
            value=f"{tau:g}",
            policy=_changed(policy, protect="all", tau=tau),
            cutting=Cutting(multiple=multiple),
        )
        for tau in TAUS
    ]


def _documents(policy: ReusePolicy) -> list[Variant]:
    return [
        Variant(name=f"documents={count}", axis="documents", value=str(count), policy=policy,
                cutting=Cutting(documents=count))
        for count in DOCUMENTS
    ]  # fmt: skip


def _orders(policy: ReusePolicy) -> list[Variant]:
    cuttings = [Cutting(order="given"), Cutting(order="reversed"), Cutting(order="shuffled")]
    return [
        Variant(name=f"order={cutting.order}", axis="order", value=cutting.order, policy=policy, cutting=cutting)
        for cutting in cuttings
    ]


def _alignment(policy: ReusePolicy, multiple: int) -> list[Variant]:
    return [
        Variant(name="alignment=as cut", axis="alignment", value="as cut", policy=policy),
        Variant(name=f"alignment={multiple}", axis="alignment", value=f"multiples of {multiple}", policy=policy,
                cutting=Cutting(multiple=multiple)),
    ]  # fmt: skip
