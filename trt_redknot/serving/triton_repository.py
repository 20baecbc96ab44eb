"""A model repository for Triton: the shipped one, with the settings of a service filled in."""

from __future__ import annotations

import re
import shutil
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from trt_redknot.errors import ConfigError, LaunchError
from trt_redknot.serving.config import ServingConfig

MODEL = "redknot"
Mode = Literal["orchestrator", "leader"]
# Parameters of the front end; all others are those of the service.
OWN_PARAMETERS = ("mode", "start_timeout_s")


def shipped_repository() -> Path:
    """The repository that comes with the source tree.

    Raises:
        LaunchError: this is an installed package without the source tree around it.
    """
    folder = Path(__file__).resolve().parents[2] / "triton" / "model_repository"
    if not (folder / MODEL / "config.pbtxt").is_file():
        raise LaunchError(
            "the model repository is not there", expected=f"{MODEL}/config.pbtxt", path=folder,
            remedy="Run from a checkout, or name a copy of triton/model_repository.",
        )  # fmt: skip
    return folder


def write_repository(target: Path, parameters: Mapping[str, str], *, source: Path | None = None) -> Path:
    """Copy the model repository to `target`, which must not exist or be empty, with `parameters` in its config.

    Args:
        parameters: settings by name, as strings; what is left out keeps its default.

    Raises:
        ConfigError: a setting that does not exist or is ill-formed.
        LaunchError: the repository cannot be written.
    """
    mode = parameters.get("mode") or "orchestrator"
    if mode not in get_args(Mode):
        raise ConfigError("unknown mode", expected=" or ".join(get_args(Mode)), found=mode)
    own = {name: value for name, value in parameters.items() if name not in OWN_PARAMETERS}
    ServingConfig.of(own, "the settings")
    names = (*OWN_PARAMETERS, *ServingConfig.model_fields)
    values = {name: _escaped(name, parameters.get(name, "")) for name in names} | {"mode": mode}
    model = (source or shipped_repository()) / MODEL
    try:
        if target.exists() and any(target.iterdir()):
            raise LaunchError(
                "the model repository would overwrite something", path=target, remedy="Name a new folder."
            )
        template = (model / "config.pbtxt").read_text(encoding="utf-8")
        # The comments show the form of a placeholder; only settings are filled in.
        filled = re.sub(
            r"string_value: \"\$\{\w+\}\"", lambda match: string.Template(match[0]).substitute(values), template
        )
        shutil.copytree(model, target / MODEL, ignore=shutil.ignore_patterns("__pycache__"))
        (target / MODEL / "config.pbtxt").write_text(filled, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"the model repository cannot be written: {error.strerror or error}", path=target) from error
    except KeyError as error:
        raise LaunchError("the model repository names an unknown setting", found=error, path=model) from error
    return target


def _escaped(name: str, value: str) -> str:
    """`value` between the quotes of a protobuf text file."""
    if not value.isprintable():
        raise ConfigError(f"setting {name!r} has a character that is not printable", found=repr(value))
    return value.replace("\\", "\\\\").replace('"', '\\"')
