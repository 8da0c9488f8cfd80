"""Files that are read again: a change once it has settled, swapped links, and none that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdcluster.core.errors import ConfigError
from pdcluster.settings.changed_files import LOOKS_AGAIN, ChangedFiles


def changed_files(*files: Path) -> ChangedFiles[str]:
    def read() -> str:
        try:
            return "+".join(file.read_text() for file in files)
        except OSError as error:
            raise ConfigError(str(error)) from error

    return ChangedFiles(files, read)


def replace(file: Path, text: str) -> None:
    """As editors do."""
    new = file.with_name("new")
    new.write_text(text)
    os.replace(new, file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "one"
    found.write_text("a")
    return found


def test_what_does_not_change_is_read_once(file: Path) -> None:
    files = changed_files(file)
    assert files.first == "a"
    assert [files.look() for _ in range(3)] == [None, None, None]


def test_a_change_is_read_once_it_has_settled(file: Path) -> None:
    files = changed_files(file)
    replace(file, "b")
    assert files.look() is None
    replace(file, "bc")
    assert files.look() is None  # it moves on
    assert files.look() == "bc"
    assert files.look() is None


def test_several_files_are_one(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("x")
    files = changed_files(file, other)
    replace(other, "y")
    assert [files.look(), files.look()] == [None, "a+y"]


def test_the_swap_of_a_link_to_a_folder_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes updates a Secret: file → ..data/file, ..data → a folder by date."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name[:1])
    data = tmp_path / "..data"
    data.symlink_to("first")
    (tmp_path / "file").symlink_to("..data/file")
    files = changed_files(tmp_path / "file")
    assert files.first == "f"
    (tmp_path / "new").symlink_to("second")
    os.replace(tmp_path / "new", data)
    assert [files.look(), files.look()] == [None, "s"]


def test_what_cannot_be_read_is_reported_once(file: Path) -> None:
    files = changed_files(file)
    file.unlink()
    assert files.look() is None
    with pytest.raises(ConfigError):
        files.look()
    assert [files.look(), files.look()] == [None, None]
    file.write_text("again")
    assert [files.look(), files.look()] == [None, "again"]


def test_another_mode_is_a_change(file: Path) -> None:
    """A file that was refused for its mode, and then got the mode that the error asks for."""
    files = changed_files(file)
    file.chmod(0o600)
    assert [files.look(), files.look()] == [None, "a"]


def test_what_could_not_be_read_for_a_moment_is_read_later(file: Path) -> None:
    """Such as without free descriptors: nothing about the files changes when that is over."""
    is_short = [False]

    def read() -> str:
        if is_short[0]:
            raise ConfigError("too many open files")
        return file.read_text()

    files = ChangedFiles([file], read)
    is_short[0] = True
    replace(file, "b")
    assert files.look() is None
    with pytest.raises(ConfigError):
        files.look()
    is_short[0] = False
    assert [files.look() for _ in range(LOOKS_AGAIN)] == [None] * (LOOKS_AGAIN - 1) + ["b"]
    assert [files.look() for _ in range(2 * LOOKS_AGAIN)] == [None] * (2 * LOOKS_AGAIN)


def test_an_old_file_that_comes_back_is_read(file: Path) -> None:
    """The same inode and time as at the start, after something that could not be read."""
    files = changed_files(file)
    kept = file.with_name("kept")
    os.rename(file, kept)
    with pytest.raises(ConfigError):
        for _ in range(2):
            files.look()
    os.rename(kept, file)
    assert [files.look(), files.look()] == [None, "a"]


def test_the_first_reading_fails_as_reading_does(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none"):
        changed_files(tmp_path / "none")
