"""Split profiles by name or from a file."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from trt_redknot.config.documents import read_json_object, validated_json
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.config.released import ReleasedName, released_geometry
from trt_redknot.errors import ConfigError


def load_profile(value: str, geometry: ModelGeometry) -> SplitProfile:
    """The split profile that `value` names, checked against `geometry`.

    Args:
        value: `auto` (fences and Global heads by default), `flash` or `pro` (the same, and the network must be that
            one), or a path of a JSON file with the fields of :class:`SplitProfile`.

    Raises:
        ConfigError: the network is not the one named, the file is unreadable or ill-formed, or it does not fit.
    """
    if value == "auto":
        return SplitProfile.default(geometry)
    if value in get_args(ReleasedName):
        _check_released(value, geometry)
        return SplitProfile.default(geometry, name=value)
    path = Path(value)
    if path.suffix != ".json":
        raise ConfigError(
            "the split profile is unknown",
            expected="auto, flash, pro or a .json file",
            found=value,
            remedy="Use --profile auto.",
        )
    profile = validated_json(SplitProfile, read_json_object(path), path)
    profile.check(geometry)
    return profile


def _check_released(name: str, geometry: ModelGeometry) -> None:
    released = released_geometry(name)
    if released.digest == geometry.digest:
        return
    fields = [field for field in released.__dataclass_fields__ if getattr(released, field) != getattr(geometry, field)]
    raise ConfigError(
        f"the checkpoint is not the released {name}",
        expected={field: getattr(released, field) for field in fields[:3]},
        found={field: getattr(geometry, field) for field in fields[:3]},
        remedy="Use --profile auto.",
    )
