"""Which files make up a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from trt_redknot.config.documents import read_json_object
from trt_redknot.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
# The index of the largest release has 145,116 entries in about 12 MB.
_MAX_INDEX_BYTES = 256 << 20
_CONFIG_AND_TOKENIZER = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """Weight files of a checkpoint.

    Attributes:
        names: file names, sorted.
        index: tensor name -> file name, where the checkpoint has an index.
    """

    names: tuple[str, ...]
    index: Mapping[str, str] | None

    def listed_in(self, file: str) -> tuple[str, ...]:
        """Tensors that the index places in `file`."""
        return self._by_file.get(file, ())

    @cached_property
    def _by_file(self) -> Mapping[str, tuple[str, ...]]:
        grouped: dict[str, list[str]] = {}
        for tensor, file in (self.index or {}).items():
            grouped.setdefault(file, []).append(tensor)
        return {file: tuple(tensors) for file, tensors in grouped.items()}


def weight_files(directory: Path) -> WeightFiles:
    """Files named by the index, or every safetensors file where there is no index.

    Raises:
        CheckpointError: not a directory, no weights, or an index that is ill-formed or names files elsewhere.
    """
    if not directory.is_dir():
        raise CheckpointError(
            "the checkpoint is not a directory",
            path=directory,
            remedy="Name a directory with config.json and safetensors files.",
        )
    index_path = directory / INDEX_FILE
    if index_path.exists():
        index = _read_index(index_path)
        return WeightFiles(names=tuple(sorted(set(index.values()))), index=index)
    names = tuple(sorted(path.name for path in directory.glob(f"*{_SUFFIX}")))
    if not names:
        raise CheckpointError(
            "the checkpoint has no weights",
            expected=f"{INDEX_FILE} or *{_SUFFIX}",
            path=directory,
            remedy="Convert the weights to safetensors, or name another directory.",
        )
    return WeightFiles(names=names, index=None)


def content_files(directory: Path, files: WeightFiles) -> tuple[str, ...]:
    """Files whose content decides what a checkpoint answers: weights, config and tokenizer, sorted."""
    present = [name for name in _CONFIG_AND_TOKENIZER if (directory / name).is_file()]
    return tuple(sorted([*files.names, *present]))


def _read_index(path: Path) -> dict[str, str]:
    document = read_json_object(path, limit=_MAX_INDEX_BYTES, error=CheckpointError)
    index = document.get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise CheckpointError(
            "the index has no usable 'weight_map'",
            expected="an object: tensor name to file name",
            found=type(index).__name__ if not isinstance(index, dict) else "no entries, or entries that are no names",
            path=path,
            remedy="Fetch the index again.",
        )
    for file in sorted(set(index.values())):
        # A file beside the index and nothing else. Links are followed: caches of checkpoints are made of them.
        if PurePosixPath(file).name != file or "\\" in file or "\0" in file or not file.endswith(_SUFFIX):
            raise CheckpointError(
                "the index names a file that is no safetensors file beside it",
                expected=f"a plain name that ends in {_SUFFIX}",
                found=repr(file),
                path=path,
                remedy="Do not use this checkpoint: its index may be forged.",
            )
    return index
