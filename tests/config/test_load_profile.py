"""Split profiles by name and from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trt_redknot.config import ModelGeometry, geometry_from_config, load_profile, released_geometry
from trt_redknot.errors import ConfigError


@pytest.fixture
def geometry() -> ModelGeometry:
    return geometry_from_config({"num_hidden_layers": 8, "num_attention_heads": 16, "o_groups": 2}, source="test")


def document(**changes: Any) -> dict[str, Any]:
    return {
        "name": "mine",
        "layers": 8,
        "output_groups": 2,
        "heads_per_group": 8,
        "leading_fence": 2,
        "trailing_fence": 1,
        "global_heads": {"3": [5, 0]},
    } | changes


@pytest.mark.parametrize(("name", "reusable"), [("flash", range(3, 40)), ("pro", range(3, 58))])
def test_released_profiles(name: str, reusable: range) -> None:
    profile = load_profile(name, released_geometry(name))
    assert (profile.name, profile.reusable) == (name, reusable)
    assert profile.digest == load_profile("auto", released_geometry(name)).digest


def test_a_released_profile_needs_its_network(geometry: ModelGeometry) -> None:
    with pytest.raises(ConfigError, match="not the released flash"):
        load_profile("flash", geometry)
    altered = replace(released_geometry("pro"), window=64)
    with pytest.raises(ConfigError, match=r"not the released pro.*'window': 128.*'window': 64"):
        load_profile("pro", altered)


def test_a_file(tmp_path: Path, geometry: ModelGeometry) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document()))
    profile = load_profile(str(path), geometry)
    assert profile.reusable == range(2, 7)
    assert [profile.global_head(3, group) for group in range(2)] == [5, 0]
    assert profile.global_head(4, 0) == 0


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("layers", {"layers": 9}),
        ("layers", {"layers": "8"}),
        ("heads_per_group", {"heads_per_group": 4}),
        ("unknown_key", {"unknown_key": 1}),
        ("fence", {"leading_fence": 6, "trailing_fence": 6}),
        ("leading_fence", {"leading_fence": -1}),
        ("global_heads", {"global_heads": {"0": [0, 0]}}),
        ("global_heads", {"global_heads": {"3": [0, 8]}}),
        ("global_heads", {"global_heads": {"3": [0]}}),
        ("global_heads", {"global_heads": {"three": [0, 0]}}),
        ("global_heads.3", {"global_heads": {"3": [0, 1.5]}}),
    ],
)
def test_bad_files_name_the_key(tmp_path: Path, geometry: ModelGeometry, key: str, changes: dict[str, Any]) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document(**changes)))
    with pytest.raises(ConfigError, match=key):
        load_profile(str(path), geometry)


def test_a_missing_key_is_named(tmp_path: Path, geometry: ModelGeometry) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({key: value for key, value in document().items() if key != "trailing_fence"}))
    with pytest.raises(ConfigError, match=r"'trailing_fence' is missing.*profile\.json"):
        load_profile(str(path), geometry)


@pytest.mark.parametrize("value", ["Flash", "", "profile.yaml", "missing.json"])
def test_unknown_values(value: str, geometry: ModelGeometry) -> None:
    with pytest.raises(ConfigError):
        load_profile(value, geometry)
