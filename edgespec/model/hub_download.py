"""Downloading a file of the hub into huggingface_hub's cache; large ones go on where they stopped.

huggingface_hub 2 begins a file anew that another process did not finish. So a large file's content
is fetched beside its place first, by that library's own function for it, and moved there whole.

Nor does that library see to it that what it wrote survives a loss of power: a file of its cache
bears the hub's hash of it, and small ones are compared with it before they are used.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import socket
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from edgespec.errors import ModelError
from edgespec.files import file_hash, locked, settle

LARGE = (".safetensors", ".gguf", ".bin")
"""Endings of the files that may take long."""

_MOST = 50 * 1000**3
"""Bytes from which on the hub gives a file through Xet alone."""

_COMMIT = re.compile(rb"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

_log = logging.getLogger(__name__)
_seen: set[Path] = set()
"""Files that were compared in this process."""

_CONNECT_S = 3.0
"""Seconds after which the hub, or the proxy to it, counts as out of reach."""


def is_offline() -> bool:
    """Whether the hub is not to be asked (HF_HUB_OFFLINE=1), or cannot be reached."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE or not _is_reachable(constants.ENDPOINT)


@functools.cache
def _is_reachable(endpoint: str) -> bool:
    """One try for the whole process: huggingface_hub takes half a minute for each file."""
    # What it tries again is its own affair; if that is in vain, this program says so.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    place = urlsplit(endpoint)
    proxy = getproxies().get(place.scheme)
    if proxy and not proxy_bypass(place.hostname or ""):
        place = urlsplit(proxy)
    port = place.port or {"http": 80}.get(place.scheme, 443)
    reached = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((place.hostname or "", port), _CONNECT_S).close()
        except OSError:
            return
        reached.set()

    trying = threading.Thread(target=connect, daemon=True)  # a name server may take longer
    trying.start()
    trying.join(_CONNECT_S)
    return reached.is_set()


def fetch(hub_id: str, name: str, revision: str | None = None) -> Path:
    """Where the file is in the cache, downloaded if need be. Raises what huggingface_hub does."""
    from huggingface_hub import errors, hf_hub_download

    here = cached_file(hub_id, name, revision)
    if isinstance(here, str) and (revision is not None or is_offline()):
        return Path(here)
    if is_offline():  # hf_hub_download would ask the hub who we are all the same
        raise errors.LocalEntryNotFoundError(f"{hub_id} has no {name} in the cache")
    if name.endswith(LARGE) and not isinstance(here, str):
        _content(hub_id, name, revision)
    return Path(hf_hub_download(hub_id, name, revision=revision))


def cached_file(hub_id: str, name: str, revision: str | None = None) -> object:
    """What huggingface_hub knows of a file without asking the hub: its path, a text; that there is
    none; or None. A small file that is torn is removed, and so is a torn note of a revision."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    repository = repo_folder_name(repo_id=hub_id, repo_type="model")
    newest = Path(constants.HF_HUB_CACHE, repository, "refs", "main")
    with suppress(OSError):
        if revision is None and not _COMMIT.fullmatch(newest.read_bytes()):
            newest.unlink()
    here = try_to_load_from_cache(hub_id, name, revision=revision)
    if isinstance(here, str) and not name.endswith(LARGE) and drop_torn(Path(here)):
        return None
    return here


def drop_torn(file: Path) -> bool:
    """Remove a file of the cache that is not what its hash there says; whether it was removed."""
    content = file.resolve()
    if file in _seen or not content.is_file() or not _HASH.fullmatch(content.name):
        return False
    _seen.add(file)
    with suppress(OSError):  # a cache that is not ours
        if content.name in _hashes(content):
            return False
        _log.warning("%s is damaged; it is removed, and downloaded again", file)
        file.unlink()
        content.unlink()
        return True
    return False


def _hashes(file: Path) -> set[str]:
    """What the hub, or a server between us and it, may call a file's content."""
    if len(file.name) == 64:
        return {file_hash(file)}
    plain = file.read_bytes()
    as_in_git = b"blob %d\0" % len(plain) + plain
    return {hashlib.sha1(content).hexdigest() for content in (plain, as_in_git)}


def _content(hub_id: str, name: str, revision: str | None) -> None:
    """Put the file's content where hf_hub_download will find it."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get, repo_folder_name
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = hf_hub_url(hub_id, name, revision=revision)
    about = get_hf_file_metadata(url)
    if about.etag is None or about.size is None or about.size > _MOST:
        return
    repository = repo_folder_name(repo_id=hub_id, repo_type="model")
    whole = Path(constants.HF_HUB_CACHE, repository, "blobs", about.etag)
    part = whole.with_name(f"{about.etag}.edgespec-part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    with locked(part, lambda: None):
        if whole.exists():  # another process was quicker
            part.unlink(missing_ok=True)
            return
        headers = build_hf_headers()
        if urlsplit(about.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # as huggingface_hub does: the key is the hub's
        with part.open("ab") as file:
            if file.tell() > about.size:
                file.truncate(0)
            http_get(
                about.location,
                file,
                resume_size=file.tell(),
                headers=headers,
                expected_size=about.size,
                displayed_filename=name,
            )
        _check(part, about.etag, name)
        settle(part, whole)


def _check(part: Path, etag: str, name: str) -> None:
    """The hub names large files by their SHA-256: what was put together must be that."""
    if len(etag) == 64 and file_hash(part) != etag:
        part.unlink()
        raise ModelError(f"{name} did not arrive as it is on the hub; download it again")
