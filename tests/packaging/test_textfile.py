"""Text files: whole or as they were, and only what is a file is replaced."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from trt_redknot.textfile import replace_text


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "answer.json"
    replace_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "n\u00ebw" * 9000 + "\udcff")
    assert path.read_text(encoding="utf-8") == "old"
    with pytest.raises(IsADirectoryError):
        replace_text(path.parent, "new")
    assert [entry.name for entry in tmp_path.rglob("*")] == ["deep", "answer.json"]
    replace_text(path, "n\u00ebw")
    assert path.read_text(encoding="utf-8") == "n\u00ebw"
    assert [entry.name for entry in tmp_path.rglob("*")] == ["deep", "answer.json"]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        replace_text(tmp_path / "answer.json", "mine")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "answer.json").stat().st_mode) == 0o600


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "latest.html"
    for target in (tmp_path / "there" / "page.html", Path("there") / "page.html"):
        link.symlink_to(target)
        for text in ("one", "two"):
            replace_text(link, text)
            assert link.is_symlink()
            assert (tmp_path / "there" / "page.html").read_text(encoding="utf-8") == text
        link.unlink()


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text(encoding="utf-8")))
    reader.start()
    replace_text(pipe, "through")
    reader.join(timeout=60)
    assert read == ["through"]
    assert pipe.is_fifo()
