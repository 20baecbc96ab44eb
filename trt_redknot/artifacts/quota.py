"""The quota of a namespace, kept in the store so that it binds every process, whatever capacity that one names."""

from __future__ import annotations

import json
import os
import uuid
from typing import TYPE_CHECKING

from trt_redknot.artifacts.files import Descriptor, ensure_folder, sync_folder, write_file
from trt_redknot.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

    from trt_redknot.artifacts.folder import StoreFolder

_KEY = "capacity_bytes"
_MAX_BYTES = 4096


def quota_path(store: StoreFolder) -> Path:
    return store.root / ".quotas" / f"{store.namespace}.json"


def read_quota(store: StoreFolder) -> int | None:
    """Bytes, None where the namespace has no quota. StoreError where its record is malformed. OSError passes."""
    path = quota_path(store)
    try:
        with Descriptor(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as target:
            text = os.pread(target.fd, _MAX_BYTES, 0)
        quota = json.loads(text)[_KEY]
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError):
        quota = None
    if type(quota) is not int or quota < 1:
        raise StoreError(
            "the quota of the namespace is malformed", expected=f'{{"{_KEY}": bytes}}', path=path,
            remedy="Set it again with `artifacts quota`.",
        )  # fmt: skip
    return quota


def write_quota(store: StoreFolder, quota: int | None) -> None:
    """Set or remove the quota; in one rename. The caller holds the mutex. OSError passes.

    Raises:
        StoreError: not positive.
    """
    path = quota_path(store)
    if quota is None:
        if path.exists():
            store.files.remove(path)
        return
    if quota < 1:
        raise StoreError("the quota is not positive", expected="bytes > 0", found=quota)
    ensure_folder(store.files, path.parent)
    beside = path.with_name(f".{uuid.uuid4().hex}")
    write_file(store.files, beside, [memoryview(json.dumps({_KEY: quota}).encode())])
    store.files.rename(beside, path)
    sync_folder(store.files, path.parent)


def effective_capacity(store: StoreFolder, own: int | None) -> int | None:
    """The smaller of the process's own limit and the namespace's quota; None where there is neither."""
    limits = [limit for limit in (own, read_quota(store)) if limit is not None]
    return min(limits, default=None)
