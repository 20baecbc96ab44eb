"""Two hosts on one folder: let in where locks reach both, refused with the other's name where they do not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.artifacts.processes import Child
from tests.artifacts.support import GEOMETRY, PROFILE, build_artifact, identity
from trt_redknot.artifacts import ArtifactStore
from trt_redknot.artifacts.hosts import Host, LockReach, Mount, find_mount, mount_of
from trt_redknot.collectives import LocalCollectives
from trt_redknot.errors import StoreError

LOCAL = LocalCollectives()
TOKENS = list(range(20))
MOUNTS = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
40 27 0:50 / /mnt/nfs rw,relatime - nfs4 server:/x rw,vers=4.2,local_lock=none
41 27 0:51 / /mnt/old rw,relatime - nfs server:/x rw,vers=3,local_lock=all
42 27 0:52 / /mnt/with\040space rw,relatime - fuse.sshfs me@there:/ rw
43 40 0:53 / /mnt/nfs/lustre rw - lustre a@tcp:/b rw,flock
44 40 0:54 / /mnt/nfs/lustre2 rw - lustre a@tcp:/b rw,localflock
45 27 0:55 / /mnt/cifs rw - cifs //a/b rw
46 27 0:56 / /mnt/cifs rw - tmpfs tmpfs rw
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "kind", "reach"),
    [
        ("/home/x", "ext4", LockReach.KERNEL),
        ("/mnt/nfs/store", "nfs4", LockReach.HOSTS),
        ("/mnt/nfsx", "ext4", LockReach.KERNEL),
        ("/mnt/old", "nfs", LockReach.UNKNOWN),
        ("/mnt/with space/store", "fuse.sshfs", LockReach.UNKNOWN),
        ("/mnt/nfs/lustre/a", "lustre", LockReach.HOSTS),
        ("/mnt/nfs/lustre2", "lustre", LockReach.UNKNOWN),
        ("/mnt/cifs/a", "tmpfs", LockReach.KERNEL),
    ],
)
def test_the_mount_of_a_path(path: str, kind: str, reach: LockReach) -> None:
    mount = find_mount(MOUNTS, Path(path))
    assert mount is not None
    assert (mount.kind, mount.reach) == (kind, reach)


def test_this_machine_knows_its_mounts(tmp_path: Path) -> None:
    found = mount_of(tmp_path / "not" / "there")
    assert found is not None
    assert tmp_path.is_relative_to(found.point)
    assert find_mount("", tmp_path) is None


def mounted(kind: str, *options: str) -> Mount:
    return Mount(point=Path("/"), kind=kind, options=frozenset(options))


def store_on(root: Path, kernel: str, mount: Mount | None) -> ArtifactStore:
    return ArtifactStore(root, host=Host(kernel=kernel, name=f"host-{kernel}", mount_of=lambda _: mount))


@pytest.mark.parametrize("mount", [mounted("nfs4", "local_lock=none"), mounted("xfs")])
def test_where_locks_reach_any_host_may_come(tmp_path: Path, mount: Mount) -> None:
    artifact_id = build_artifact(store_on(tmp_path, "one", mount), TOKENS, LOCAL)
    other = store_on(tmp_path, "two", mount)
    other.open(artifact_id, rank=0).close()
    build_artifact(other, TOKENS[:5], LOCAL)
    assert not (tmp_path / ".locks" / "kernel.json").exists()


@pytest.mark.parametrize("mount", [mounted("nfs", "nolock"), mounted("fuse.sshfs"), None])
def test_where_they_do_not_the_store_belongs_to_its_first_host(tmp_path: Path, mount: Mount | None) -> None:
    first, second = store_on(tmp_path, "one", mount), store_on(tmp_path, "two", mount)
    artifact_id = build_artifact(first, TOKENS, LOCAL)
    for use in (
        lambda: second.open(artifact_id),
        lambda: build_artifact(second, TOKENS[:5], LOCAL),
        lambda: second.rm(artifact_id),
        second.gc,
        lambda: second.pin(artifact_id),
    ):
        with pytest.raises(StoreError, match=r"another host.*host-one.*artifacts adopt"):
            use()
    first.open(artifact_id, rank=0).close()
    assert len(first.ls()) == 1
    # A new process of the first host comes in, the other one after it took the store over.
    store_on(tmp_path, "one", mount).open(artifact_id, rank=0).close()
    second.adopt()
    second.open(artifact_id, rank=0).close()
    build_artifact(second, TOKENS[:5], LOCAL)
    with pytest.raises(StoreError, match=r"host-two"):
        build_artifact(store_on(tmp_path, "one", mount), TOKENS[:6], LOCAL)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 9999, b'{"kernel": 3}'])
def test_a_spoiled_record_refuses(tmp_path: Path, content: bytes) -> None:
    store = store_on(tmp_path, "one", None)
    artifact_id = build_artifact(store, TOKENS, LOCAL)
    (tmp_path / ".locks" / "kernel.json").write_bytes(content)
    with pytest.raises(StoreError, match="another host"):
        store_on(tmp_path, "one", None).open(artifact_id)


def test_who_comes_at_once_agrees_on_one_owner(tmp_path: Path) -> None:
    torch.set_num_threads(1)

    def claim(kernel: str, log: Path) -> None:
        with store_on(tmp_path / "store", kernel, None)._folder.mutex():
            log.touch()

    logs = [tmp_path / f"won-{number}" for number in range(6)]
    children = [Child(lambda _, n=n: claim(str(n), logs[n]), quiet=StoreError) for n in range(6)]
    assert sorted(child.wait() for child in children) == [0, 1, 1, 1, 1, 1]
    assert sum(log.exists() for log in logs) == 1


def test_containers_of_one_kernel_wait_for_each_other(tmp_path: Path) -> None:
    """Other host names, one local disk: the lock holds, and who waits too long is told the other's name."""
    torch.set_num_threads(1)
    store = ArtifactStore(tmp_path)

    def hold(tell: object) -> None:
        import socket

        socket.gethostname = lambda: "another-container"
        with ArtifactStore(tmp_path).begin(
            TOKENS, identity=identity(), geometry=GEOMETRY, profile=PROFILE, collectives=LOCAL
        ):
            tell()  # type: ignore[operator]
            os.read(os.pipe()[0], 1)

    child = Child(hold)
    child.wait_for_signal()
    try:
        with pytest.raises(StoreError, match=f"pid {child.pid} on another-container"):
            build_artifact(store, TOKENS, LOCAL, wait_s=0.1)
    finally:
        child.kill()
    assert json.loads((tmp_path / ".locks" / "store.lock").read_text())["host"]
