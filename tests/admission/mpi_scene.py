"""One rank of an MPI job: builds two artifacts, then spoils one rank's copy in several ways. Prints what each rank saw.

Arguments: a folder that all ranks see.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from mpi4py import MPI

from tests.admission.support import DOCUMENTS
from tests.artifacts.support import GEOMETRY, PROFILE, build_artifact, identity
from trt_redknot.admission import admit
from trt_redknot.artifacts import ArtifactStore
from trt_redknot.collectives.mpi import MpiCollectives
from trt_redknot.request.request import Artifact


def run(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = MpiCollectives(MPI.COMM_WORLD)
    shared = folder / "shared"
    ids = [build_artifact(ArtifactStore(shared), document, ranks) for document in DOCUMENTS]
    seen = []
    for case in ("nothing", "deleted", "truncated", "identity", "removed"):
        root = shared
        odd = ranks.rank == ranks.size - 1
        if odd and case != "nothing":
            root = folder / case
            shutil.copytree(shared, root)
            group = root / "default" / ids[1] / "gen-00000001" / f"rank-{ranks.rank:04d}" / "group-000.safetensors"
            if case == "deleted":
                group.unlink()
            elif case == "truncated":
                os.truncate(group, 100)
            elif case == "removed":
                shutil.rmtree(root / "default" / ids[0])
        with admit(
            [Artifact(artifact_id) for artifact_id in ids],
            ArtifactStore(root),
            identity=identity(checkpoint="f" * 64 if odd and case == "identity" else "a" * 64),
            geometry=GEOMETRY,
            profile=PROFILE,
            collectives=ranks,
            deadline_s=60.0,
        ) as admission:
            tokens = [document.tokens.tolist() for document in admission.documents]
            seen.append([case, admission.reason, tokens == list(DOCUMENTS)])
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
