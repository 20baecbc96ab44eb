"""Configuration: geometry of a checkpoint, split profile, reuse policy. Frozen, validated, hashed."""

from trt_redknot.config.geometry import AttentionKind, ModelGeometry, RopeGeometry, RouterKind
from trt_redknot.config.parse import geometry_from_config, load_geometry
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.config.profile import SplitProfile
from trt_redknot.config.profiles import load_profile
from trt_redknot.config.released import released_geometry

__all__ = [
    "AttentionKind",
    "ModelGeometry",
    "ReusePolicy",
    "RopeGeometry",
    "RouterKind",
    "SplitProfile",
    "geometry_from_config",
    "load_geometry",
    "load_profile",
    "released_geometry",
]
