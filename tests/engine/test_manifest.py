"""engine.json is checked before anything loads: every altered field and file is one error that says what and where."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.networks import NetworkOptions, build_engine, network, write_network
from trt_redknot import Engine
from trt_redknot.digests import digest_file, digest_json
from trt_redknot.engine.manifest import MANIFEST, read_manifest
from trt_redknot.errors import EngineError

Change = Callable[[dict[str, Any]], object]
TOKENIZER = Path(__file__).parents[2] / "examples" / "tokenizer" / "tokenizer.json"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manifest")
    options = NetworkOptions(kinds="sc", hash_layers=1, seed=random.randrange(2**31))
    checkpoint = write_network(network(options), folder / "checkpoint")
    shutil.copyfile(TOKENIZER, checkpoint / "tokenizer.json")
    return build_engine(checkpoint, folder / "engine")


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    shutil.copytree(built, tmp_path / "engine")
    return tmp_path / "engine"


def refusal(engine: Path) -> EngineError:
    with pytest.raises(EngineError) as caught:
        Engine.open(engine)
    assert "\n" not in str(caught.value)
    assert str(engine) in str(caught.value)
    return caught.value


def tamper(engine: Path, change: Change, *, sign: bool = True) -> None:
    """Alter the manifest. `sign` repairs its digest, so that the other checks are reached."""
    data = json.loads((engine / MANIFEST).read_text(encoding="utf-8"))
    change(data)
    if sign:
        data["digest"] = digest_json({key: value for key, value in data.items() if key != "digest"})
    (engine / MANIFEST).write_text(json.dumps(data), encoding="utf-8")


def setting(value: object, *keys: str | int) -> Change:
    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return change


def test_an_untouched_engine_opens(engine: Path) -> None:
    manifest, geometry = read_manifest(engine)
    assert Engine.open(engine).manifest == manifest
    assert geometry.layers == 2
    assert manifest.encode() == (engine / MANIFEST).read_bytes()


# key changed -> new value, and what the message must name: the key, what was expected, what was found.
FIELDS: dict[str, tuple[Change, list[str]]] = {
    "geometry": (setting(65, "geometry", "hidden"), ["geometry_digest", "expected", "found"]),
    "geometry of another type": (setting("wide", "geometry", "hidden"), ["geometry.hidden", "integer", "'wide'"]),
    "geometry with an unknown key": (setting(1, "geometry", "widht"), ["geometry.widht", "unknown"]),
    "geometry with an unknown kind": (
        setting(["sliding", "dense"], "geometry", "attention_kinds"),
        ["geometry.attention_kinds.1", "'dense'", "csa"],
    ),
    "geometry without a key": (lambda data: data["geometry"].pop("vocab"), ["geometry.vocab", "required"]),
    "geometry_digest": (setting("0" * 64, "geometry_digest"), ["geometry_digest", "found " + "0" * 64]),
    "profile": (setting(1, "profile", "trailing_fence"), ["profile_digest", "expected", "found"]),
    "profile of another network": (setting(9, "profile", "layers"), ["'profile'", "layers", "expected 2", "found 9"]),
    "profile_digest": (setting("0" * 64, "profile_digest"), ["profile_digest", "found " + "0" * 64]),
    "format_version": (setting(3, "format_version"), ["format version", "expected 2", "found 3"]),
    "format_version missing": (lambda data: data.pop("format_version"), ["format version", "expected 2"]),
    "tp_size": (setting(2, "tp_size"), ["'ranks'", "expected [0, 1]", "found [0]"]),
    "rank number": (setting(1, "ranks", 0, "rank"), ["'ranks'", "expected [0]", "found [1]"]),
    "no ranks": (setting([], "ranks"), ["'ranks'", "expected [0]", "found []"]),
    "backend": (setting("onnx", "backend"), ["'backend'", "'torch' or 'tensorrt'", "'onnx'"]),
    "dtype": (setting("int3", "dtype"), ["'dtype'", "float32", "'int3'"]),
    "artifact_format": (setting("fp9", "artifact_format"), ["'artifact_format'", "fp8", "'fp9'"]),
    "max_length": (setting(0, "max_length"), ["'max_length'", "greater than or equal to 1", "found 0"]),
    "chunk_rows": (setting(-4, "chunk_rows"), ["'chunk_rows'", "greater than or equal to 1", "found -4"]),
    "unknown key": (setting(1, "chunk_row"), ["'chunk_row'", "unknown"]),
    "unknown key of a file": (setting(1, "ranks", 0, "files", 0, "mode"), ["ranks.0.files.0.mode", "unknown"]),
    "missing key": (lambda data: data.pop("checkpoint_fingerprint"), ["'checkpoint_fingerprint'", "missing"]),
    "negative size": (setting(-1, "ranks", 0, "files", 0, "bytes"), ["ranks.0.files.0.bytes", "found -1"]),
    "file size": (setting(12, "ranks", 0, "files", 0, "bytes"), ["layer-0000.safetensors", "expected 12", "found"]),
    "file digest": (
        setting("0" * 64, "ranks", 0, "files", 1, "digest"),
        ["layer-0001.safetensors", "expected " + "0" * 64, "found"],
    ),
    "file left out": (lambda data: data["ranks"][0]["files"].pop(0), ["'ranks.0.files'", "layer-0000", "found"]),
    "files of nobody": (setting([], "ranks", 0, "files"), ["'ranks.0.files'", "layer-0000", "found []"]),
    "file outside": (setting("../secret", "ranks", 0, "files", 0, "path"), ["ranks.0.files.0.path", "'../secret'"]),
    "file outside, inside out": (
        setting("rank-0000/../../secret", "ranks", 0, "files", 0, "path"),
        ["ranks.0.files.0.path", "'rank-0000/../../secret'"],
    ),
    "absolute file": (setting("/etc/passwd", "ranks", 0, "files", 0, "path"), ["files.0.path", "'/etc/passwd'"]),
    "file with a NUL": (setting("a\0b", "tokenizer_files", 0, "path"), ["tokenizer_files.0.path", "a\\x00b"]),
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_altered_field_is_named(engine: Path, name: str) -> None:
    change, parts = FIELDS[name]
    tamper(engine, change)
    text = str(refusal(engine))
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_length", 2**40),
        ("checkpoint_fingerprint", "0" * 64),
        ("dtype", "bfloat16"),
        ("gpu", "H200"),
        ("digest", 7),
    ],
)
def test_no_field_changes_unseen(engine: Path, key: str, value: object) -> None:
    """Fields that contradict nothing else are under the manifest's own digest."""
    stated = json.loads((engine / MANIFEST).read_text(encoding="utf-8"))["digest"]
    tamper(engine, setting(value, key), sign=False)
    text = str(refusal(engine))
    assert "'digest'" in text
    assert (stated if key != "digest" else "found 7") in text
    assert MANIFEST in text


def test_any_flipped_bit_of_the_manifest_is_refused(engine: Path) -> None:
    whole = (engine / MANIFEST).read_bytes()
    for _ in range(60):
        content = bytearray(whole)
        place = random.randrange(len(content))
        content[place] ^= 1 << random.randrange(8)
        (engine / MANIFEST).write_bytes(content)
        try:
            equal = json.loads(content) == json.loads(whole)
        except ValueError:
            equal = False
        if not equal:
            refusal(engine)


CONTENTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not valid JSON"),
    "cut": (b'{"format_version": 2, "backend"', "not valid JSON"),
    "not JSON": (b"\x80\x04\x95pickle", "not UTF-8"),
    "not an object": (b"[1, 2]", "found list"),
    "a number": (b"1", "found int"),
    "deep": (b"[" * 200_000, "nested too deeply"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_what_is_no_manifest_is_refused(engine: Path, name: str) -> None:
    content, reason = CONTENTS[name]
    (engine / MANIFEST).write_bytes(content)
    text = str(refusal(engine))
    assert reason in text
    assert MANIFEST in text


def test_a_key_that_occurs_twice_is_refused(engine: Path) -> None:
    text = (engine / MANIFEST).read_text(encoding="utf-8")
    (engine / MANIFEST).write_text(text.replace('"tp_size": 1', '"tp_size": 1, "tp_size": 1'), encoding="utf-8")
    assert "key 'tp_size' occurs twice" in str(refusal(engine))


def test_a_huge_manifest_is_refused_unread(engine: Path) -> None:
    os.truncate(engine / MANIFEST, 2**40)
    text = str(refusal(engine))
    assert "too large" in text
    assert str(2**40) in text


def test_no_engine_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for path in (tmp_path / "absent", tmp_path / "file", tmp_path):
        assert "expected engine.json" in str(refusal(path))


@pytest.mark.parametrize("name", ["rank-0000/layer-0001.safetensors", "rank-0000/shared.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "grown", "flipped", "linked", "folder"])
def test_every_damaged_file_is_named(engine: Path, tmp_path: Path, name: str, damage: str) -> None:
    path = engine / name
    size, digest = path.stat().st_size, digest_file(path)
    expected = [name]
    if damage == "truncated":
        os.truncate(path, size - 1)
        expected += [f"expected {size}", f"found {size - 1}"]
    elif damage == "grown":
        path.write_bytes(path.read_bytes() + b"\0")
        expected += [f"expected {size}", f"found {size + 1}"]
    elif damage == "flipped":
        content = bytearray(path.read_bytes())
        content[random.randrange(size)] ^= 1 << random.randrange(8)
        path.write_bytes(content)
        expected += [f"expected {digest}", f"found {digest_file(path)}"]
    elif damage == "linked":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        expected += ["outside", str(tmp_path / "elsewhere")]
    else:
        path.unlink()
        expected += ["missing"]
        if damage == "folder":
            path.mkdir()
    text = str(refusal(engine))
    assert [part for part in expected if part not in text] == [], text


def test_content_may_be_trusted_on_request_but_never_sizes(engine: Path) -> None:
    path = engine / "rank-0000" / "shared.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert Engine.open(engine, verify=False).geometry.layers == 2
    os.truncate(path, len(content) - 1)
    with pytest.raises(EngineError, match="another size"):
        Engine.open(engine, verify=False)


def test_a_file_that_is_no_safetensors_is_refused_although_its_digest_is_right(engine: Path) -> None:
    path = engine / "rank-0000" / "shared.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")

    def change(data: dict[str, Any]) -> None:
        data["ranks"][0]["files"][-1] |= {"bytes": path.stat().st_size, "digest": digest_file(path)}

    tamper(engine, change)
    assert "shared.safetensors" in str(refusal(engine))
