"""Models by the names of repositories: ORG/NAME or ORG/NAME@REVISION. huggingface_hub brings its cache, locks and
settings (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE). Only the files that are served are downloaded.

A snapshot in the hub's cache is served by its repository's name, even when its directory was given.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pdcluster.checkpoint.inspection import INDEX, SINGLE, named_shards
from pdcluster.checkpoint.text_files import TEXT_FILES
from pdcluster.core.errors import ModelError

REPOSITORY = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)
SNAPSHOT = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")
# For the hub to answer what it has, before the cache is used instead.
ANSWER_S = 5.0
log = logging.getLogger(__name__)


def is_repository(model: Path) -> bool:
    """A name of that form, unless something here has it."""
    return REPOSITORY.fullmatch(str(model)) is not None and not model.exists() and model.suffix.lower() != ".gguf"


def local_model(model: Path) -> Path:
    """The model's directory or file. Of a repository: the snapshot, downloaded where it is missing. Raises
    ModelError.
    """
    if not is_repository(model):
        return model
    name, revision = _name_and_revision(model)
    with _told(name, revision):
        snapshot = _fetch(name, revision, [*TEXT_FILES, INDEX])
        _fetch(name, snapshot.name, _weights(snapshot))
    return snapshot


def fill(model: Path, folder: Path) -> bool:
    """Download a repository into a folder that is not there yet; False where it is.

    The folder appears when it is whole. What an attempt brought stands beside it, and the next one goes on with that.
    Raises ModelError.
    """
    if folder.exists():
        return False
    name, revision = _name_and_revision(model)
    partial = folder.with_name(f".{folder.name}.partial")
    with _told(name, revision, partial):
        partial.mkdir(parents=True, exist_ok=True)
        snapshot = _fetch(name, revision, [*TEXT_FILES, INDEX])
        _fetch(name, snapshot.name, [*TEXT_FILES, INDEX, *_weights(snapshot)], partial)
        shutil.rmtree(partial / ".cache", ignore_errors=True)  # the library's notes on the download
        partial.rename(folder)
    return True


def _name_and_revision(model: Path) -> tuple[str, str | None]:
    found = REPOSITORY.fullmatch(str(model))
    if found is None:
        raise ModelError(f"{model} is no repository of the hub; give ORG/NAME or ORG/NAME@REVISION")
    return found["name"], found["revision"]


def served_name(model: Path) -> str:
    """The name of a model that nobody named: that of its repository, its file without the ending, or its directory."""
    whole = model.absolute()
    if whole.suffix.lower() == ".gguf":
        return whole.stem
    if whole.parent.name == "snapshots" and (found := SNAPSHOT.fullmatch(whole.parent.parent.name)):
        return f"{found['org']}/{found['name']}"
    return whole.resolve().name


def _weights(snapshot: Path) -> list[str]:
    """The shards that the index names, else the one file."""
    index = snapshot / INDEX
    return named_shards(index) if index.exists() else [SINGLE]


def _fetch(name: str, revision: str | None, files: Sequence[str], into: Path | None = None) -> Path:
    """The folder with these files: `into`, or the snapshot in the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    return Path(
        snapshot_download(name, revision=revision, allow_patterns=list(files), etag_timeout=ANSWER_S, local_dir=into)
    )


@contextmanager
def _told(name: str, revision: str | None, into: Path | None = None) -> Iterator[None]:
    """What goes wrong, as one ModelError with the way out. No token is in it.

    into: where files go, besides the hub's cache.
    """
    try:
        from huggingface_hub import constants, errors
    except ImportError as error:
        raise ModelError(
            f"{name} is a repository's name, which needs huggingface_hub: pip install 'pdcluster[node]'; or give a "
            "directory"
        ) from error
    what = f"{name}@{revision}" if revision else name
    by_hand = f"or download it elsewhere (hf download {name}) and give its directory"
    cache = f"{what} is not in the cache {constants.HF_HUB_CACHE}"
    log.info("looking for %s at %s and in %s", what, constants.ENDPOINT, constants.HF_HUB_CACHE)
    try:
        yield
    except ModelError:
        raise
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{what} is gated: accept its terms on its page, then set HF_TOKEN to a token of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{name} has no revision {revision!r}; give a branch, tag or commit that it has") from error
    except errors.RepositoryNotFoundError as error:
        way_out = "check the name; if it is private, set HF_TOKEN to a token that may read it"
        raise ModelError(f"{constants.ENDPOINT} has no repository {name}, or hides it; {way_out}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if constants.HF_HUB_OFFLINE:
            raise ModelError(f"{cache} and HF_HUB_OFFLINE is set; unset it, {by_hand}") from error
        raise ModelError(
            f"{constants.ENDPOINT} cannot be reached and {cache}; look at the network and HF_ENDPOINT, {by_hand}"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no status"
        raise ModelError(f"{constants.ENDPOINT} answered {status} for {what}; try again later, {by_hand}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(
                f"no space is left for {what} in {into or constants.HF_HUB_CACHE}; free some, or set HF_HOME to "
                "another disk"
            ) from error
        raise ModelError(
            f"the download of {what} broke off ({type(error).__name__}: {error}); start again, which goes on with it"
        ) from error
    except Exception as error:  # of whatever HTTP library the hub's uses
        raise ModelError(
            f"the download of {what} broke off ({type(error).__name__}: {error}); start again, which goes on with it"
        ) from error
