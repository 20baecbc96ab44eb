"""JSON documents from disk into validated models: every fault becomes one ConfigError that names the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trt_redknot.errors import ConfigError, RedKnotError

# A config.json is a few kilobytes; anything near this limit is some other file.
MAX_DOCUMENT_BYTES = 16 << 20

Model = TypeVar("Model", bound=BaseModel)


def read_json_object(
    path: Path, *, limit: int = MAX_DOCUMENT_BYTES, error: type[RedKnotError] = ConfigError
) -> dict[str, Any]:
    """The JSON object in `path`.

    Args:
        path: the file.
        limit: bytes; a larger file is refused before it is read.
        error: class to raise.

    Raises:
        RedKnotError: of class `error`: the file is missing, unreadable, too large, not JSON, not an object, or names a
            key twice.
    """
    try:
        size = path.stat().st_size
        if size > limit:
            raise error(
                "the file is too large for what it should be", expected=f"at most {limit} bytes", found=size, path=path
            )
        content = path.read_bytes()
    except OSError as cause:
        reason = cause.strerror or type(cause).__name__
        raise error(
            "the file cannot be read", found=reason, path=path, remedy="Name an existing, readable file."
        ) from cause
    try:
        return parse_json_object(content)
    except ValueError as cause:
        raise error(
            "the file is ill-formed", found=str(cause), path=path, remedy="Fix or fetch the file again."
        ) from cause


# Characters of a key that an error shows.
_SHOWN = 80


def parse_json_object(content: bytes) -> dict[str, Any]:
    """The JSON object in `content`.

    Raises:
        ValueError: not UTF-8, not JSON, not an object, nested too deeply, a number of thousands of digits, or a key
            that occurs twice in one object.
    """
    try:
        document = json.loads(content.decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    # A repeated key, and the integers Python refuses to convert for their length, are plain ValueErrors already.
    if not isinstance(document, dict):
        raise ValueError(f"expected a JSON object, found {type(document).__name__}")
    return document


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, value in pairs:
        if name in document:
            raise ValueError(f"key {name[:_SHOWN]!r} occurs twice")
        document[name] = value
    return document


def validated(model: type[Model], values: Mapping[str, Any], source: Path | str) -> Model:
    """`values` as a `model`.

    Raises:
        ConfigError: names every key at fault, what is wrong with it and what was found.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise _config_error(error, source) from error


def validated_json(model: type[Model], values: Mapping[str, Any], source: Path | str) -> Model:
    """Like :func:`validated`, with JSON's own idea of types: object keys are strings, tuples are arrays."""
    try:
        return model.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise _config_error(error, source) from error


def validated_strings(model: type[Model], values: Mapping[str, str], source: Path | str) -> Model:
    """Like :func:`validated`, for values that all come as strings."""
    try:
        return model.model_validate_strings(dict(values))
    except ValidationError as error:
        raise _config_error(error, source) from error


def _config_error(error: ValidationError, source: Path | str) -> ConfigError:
    faults = []
    for fault in error.errors(include_url=False):
        key = ".".join(str(part) for part in fault["loc"] if part != "[key]")
        if fault["type"] == "extra_forbidden":
            faults.append(f"key {key!r} is unknown")
        elif fault["type"] == "missing":
            faults.append(f"key {key!r} is missing")
        else:
            faults.append(f"key {key!r} is invalid ({fault['msg']}; found {_short(fault['input'])})")
    return ConfigError("; ".join(faults), path=source, remedy="Correct or remove the keys named.")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
