"""Corrupt generations out of the way: moved beside a file that says why, never served, never counted."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from trt_redknot.artifacts.files import ensure_folder, sync_folder, write_file
from trt_redknot.artifacts.folder import GENERATION_FOLDER, REASON_FILE, Published, StoreFolder


def set_aside(store: StoreFolder, found: Published, reason: str) -> Path | None:
    """Move a corrupt generation into quarantine beside a reason; None where it is leased or gone. OSError passes."""
    with store.mutex():
        try:
            lock = store.try_own(found.path)
        except OSError:
            lock = None
            if not os.path.lexists(found.path):
                return None
        else:
            if lock is None:
                return None
        with lock or contextlib.nullcontext():
            place = store.quarantine / store.unique_name(found.artifact_id, found.generation)
            ensure_folder(store.files, place)
            note = {"artifact_id": found.artifact_id, "generation": found.generation, "reason": reason}
            write_file(store.files, place / REASON_FILE, [memoryview(json.dumps(note).encode())])
            store.files.rename(found.path, place / GENERATION_FOLDER)
            sync_folder(store.files, store.quarantine)
    store.events.quarantined(found.artifact_id, found.generation, reason)
    return place
