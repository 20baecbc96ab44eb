"""Certificates: what is written is read, and one test per malformed file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.artifacts.support import GEOMETRY, PROFILE, identity
from trt_redknot.artifacts.certificate import (
    MAX_CERTIFICATE_BYTES,
    Certificate,
    CertifiedFile,
    certificate_bytes,
    certified_ranks,
    parse_certificate,
)
from trt_redknot.artifacts.contents import LAYERS_PER_GROUP
from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.artifacts.identity import TpGeometry, artifact_id_of
from trt_redknot.artifacts.layout import plan_files
from trt_redknot.digests import digest_bytes, digest_tokens
from trt_redknot.errors import ConfigError


def certificate(tokens: int = 37, tp_size: int = 2, form: ArtifactFormat = ArtifactFormat.FP8) -> Certificate:
    who = identity(form)
    digest = digest_tokens(list(range(tokens)))
    plans = plan_files(GEOMETRY, PROFILE, tokens=tokens, tp_size=tp_size, form=form)
    return Certificate(
        format_version=1,
        namespace="default",
        artifact_id=artifact_id_of("default", digest, who),
        generation=3,
        created_at="2026-11-30T01:02:03Z",
        token_count=tokens,
        token_digest=digest,
        checkpoint_fingerprint=who.checkpoint_fingerprint,
        profile_digest=who.profile_digest,
        geometry_digest=who.geometry_digest,
        rope_digest=who.rope_digest,
        artifact_format=form,
        head_dim=GEOMETRY.head_dim,
        rope_dim=GEOMETRY.rope_dim,
        index_dim=GEOMETRY.index_dim,
        local_width=GEOMETRY.projected // tp_size,
        layers=tuple(range(GEOMETRY.layers)),
        layers_per_group=LAYERS_PER_GROUP,
        tp_size=tp_size,
        ranks=certified_ranks(TpGeometry.even(GEOMETRY, tp_size)),
        files=tuple(CertifiedFile(path=plan.path, size=plan.bytes, digest="ab" * 32) for plan in plans),
    )


def signed(body: dict[str, Any]) -> bytes:
    """Canonical bytes with a digest that fits, as a careful forger would write them."""
    body = {key: value for key, value in body.items() if key != "digest"}
    plain = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**body, "digest": digest_bytes(plain)}, sort_keys=True, separators=(",", ":")).encode()


def fault_of(raw: bytes) -> ArtifactFault:
    with pytest.raises(ArtifactError) as caught:
        parse_certificate(raw, label="here/certificate.json")
    assert "here/certificate.json" in str(caught.value)
    return caught.value.fault


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 400), st.sampled_from([1, 2, 4, 8]), st.sampled_from(list(ArtifactFormat)))
def test_what_is_written_is_read(tokens: int, tp_size: int, form: ArtifactFormat) -> None:
    written = certificate(tokens, tp_size, form)
    raw = written.encode()
    assert parse_certificate(raw, label="x") == written
    sizes = [(file.path, file.size) for file in written.files]
    assert certificate_bytes(written, sizes) == len(raw)


def test_agreement_ignores_generation_and_time_only() -> None:
    one = certificate()
    other = one.model_copy(update={"generation": 9, "created_at": "2027-01-01T00:00:00Z"})
    assert one.agreement_digest == other.agreement_digest
    assert one.agreement_digest != one.model_copy(update={"rope_digest": "0" * 64}).agreement_digest


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    body = json.loads(certificate().encode())
    change(body)
    return signed(body)


def setting(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda body: body.__setitem__(key, value)


def path_setting(path: str) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["files"][1].__setitem__("path", path)


MALFORMED: dict[str, tuple[Callable[[], bytes], ArtifactFault]] = {
    "empty": (lambda: b"", ArtifactFault.CERTIFICATE_NOT_JSON),
    "too large": (lambda: b" " * (MAX_CERTIFICATE_BYTES + 1), ArtifactFault.CERTIFICATE_TOO_LARGE),
    "not utf-8": (lambda: b"\xff\xfe{}", ArtifactFault.CERTIFICATE_NOT_JSON),
    "not json": (lambda: b"{", ArtifactFault.CERTIFICATE_NOT_JSON),
    "deeply nested": (lambda: b"[" * 200_000, ArtifactFault.CERTIFICATE_NOT_JSON),
    "endless number": (lambda: b'{"generation":' + b"9" * 100_000 + b"}", ArtifactFault.CERTIFICATE_NOT_JSON),
    "not an object": (lambda: b"[1]", ArtifactFault.CERTIFICATE_NOT_JSON),
    "pickle": (lambda: b"\x80\x04\x95", ArtifactFault.CERTIFICATE_NOT_JSON),
    "truncated": (lambda: certificate().encode()[:-20], ArtifactFault.CERTIFICATE_NOT_JSON),
    "no version": (lambda: changed(lambda body: body.pop("format_version")), ArtifactFault.CERTIFICATE_VERSION),
    "later version": (lambda: changed(setting("format_version", 2)), ArtifactFault.CERTIFICATE_VERSION),
    "version as bool": (lambda: changed(setting("format_version", True)), ArtifactFault.CERTIFICATE_VERSION),
    "unknown key": (lambda: changed(setting("comment", "hi")), ArtifactFault.CERTIFICATE_FIELDS),
    "missing key": (lambda: changed(lambda body: body.pop("token_count")), ArtifactFault.CERTIFICATE_FIELDS),
    "count as text": (lambda: changed(setting("token_count", "37")), ArtifactFault.CERTIFICATE_FIELDS),
    "count as float": (lambda: changed(setting("token_count", 37.0)), ArtifactFault.CERTIFICATE_FIELDS),
    "negative count": (lambda: changed(setting("token_count", -1)), ArtifactFault.CERTIFICATE_FIELDS),
    "huge count": (lambda: changed(setting("token_count", 1 << 62)), ArtifactFault.CERTIFICATE_FIELDS),
    "generation zero": (lambda: changed(setting("generation", 0)), ArtifactFault.CERTIFICATE_FIELDS),
    "bad digest": (lambda: changed(setting("token_digest", "xyz")), ArtifactFault.CERTIFICATE_FIELDS),
    "unknown format": (lambda: changed(setting("artifact_format", "fp4")), ArtifactFault.CERTIFICATE_FIELDS),
    "namespace with slash": (lambda: changed(setting("namespace", "a/b")), ArtifactFault.CERTIFICATE_FIELDS),
    "ranks contradict": (lambda: changed(setting("tp_size", 4)), ArtifactFault.CERTIFICATE_FIELDS),
    "layers out of order": (lambda: changed(lambda body: body["layers"].reverse()), ArtifactFault.CERTIFICATE_FIELDS),
    "no files": (lambda: changed(setting("files", [])), ArtifactFault.CERTIFICATE_FIELDS),
    "file twice": (
        lambda: changed(lambda body: body["files"].append(body["files"][0])),
        ArtifactFault.CERTIFICATE_FIELDS,
    ),
    "negative size": (
        lambda: changed(lambda body: body["files"][0].__setitem__("size", -5)),
        ArtifactFault.CERTIFICATE_FIELDS,
    ),
    "rope wider than head": (lambda: changed(setting("rope_dim", 999)), ArtifactFault.CERTIFICATE_FIELDS),
    "id of other tokens": (lambda: changed(setting("token_digest", "0" * 64)), ArtifactFault.CERTIFICATE_FIELDS),
    "absolute path": (lambda: changed(path_setting("/etc/passwd")), ArtifactFault.CERTIFICATE_PATH),
    "parent path": (lambda: changed(path_setting("common/../../x")), ArtifactFault.CERTIFICATE_PATH),
    "hidden path": (lambda: changed(path_setting(".x/file")), ArtifactFault.CERTIFICATE_PATH),
    "empty path": (lambda: changed(path_setting("")), ArtifactFault.CERTIFICATE_PATH),
    "empty component": (lambda: changed(path_setting("common//x")), ArtifactFault.CERTIFICATE_PATH),
    "backslash": (lambda: changed(path_setting("common\\x")), ArtifactFault.CERTIFICATE_PATH),
    "newline": (lambda: changed(path_setting("common/x\n")), ArtifactFault.CERTIFICATE_PATH),
    "nul": (lambda: changed(path_setting("common/x\0")), ArtifactFault.CERTIFICATE_PATH),
    "own name": (lambda: changed(path_setting("certificate.json")), ArtifactFault.CERTIFICATE_PATH),
    "spaces": (
        lambda: json.dumps(json.loads(certificate().encode()), sort_keys=True).encode(),
        ArtifactFault.CERTIFICATE_NOT_CANONICAL,
    ),
    "duplicate key": (
        lambda: b'{"artifact_format":"fp8",' + certificate().encode()[1:],
        ArtifactFault.CERTIFICATE_NOT_JSON,
    ),
    "other digest": (
        lambda: certificate().encode().replace(b'"generation":3', b'"generation":4'),
        ArtifactFault.CERTIFICATE_DIGEST,
    ),
    "no digest": (
        lambda: json.dumps(
            {k: v for k, v in json.loads(certificate().encode()).items() if k != "digest"},
            sort_keys=True,
            separators=(",", ":"),
        ).encode(),
        ArtifactFault.CERTIFICATE_NOT_CANONICAL,
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_certificate_is_refused(case: str) -> None:
    make, fault = MALFORMED[case]
    assert fault_of(make()) is fault


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_no_flipped_bit_goes_unnoticed(data: st.DataObject) -> None:
    raw = bytearray(certificate().encode())
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    assert fault_of(bytes(raw)).startswith("certificate_")


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300))
def test_garbage_is_refused_with_a_fault(raw: bytes) -> None:
    assert fault_of(raw).startswith("certificate_")


@pytest.mark.parametrize("size", [0, 3, 5, 7, 16, -1])
def test_ranks_that_cannot_share_the_groups_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=r"\[1, 2, 4, 8\]"):
        TpGeometry.even(GEOMETRY, size)
