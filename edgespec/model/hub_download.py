"""Downloading a file of the hub into huggingface_hub's cache; large ones go on where they stopped.

huggingface_hub 2 begins a file anew that another process did not finish. So a large file's content
is fetched beside its place first, by that library's own function for it, and moved there whole.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.parse import urlsplit

from edgespec.errors import ModelError
from edgespec.files import locked

LARGE = (".safetensors", ".gguf", ".bin")
"""Endings of the files that may take long."""

_MOST = 50 * 1000**3
"""Bytes from which on the hub gives a file through Xet alone."""

_BLOCK = 1 << 20


def fetch(hub_id: str, name: str, revision: str | None = None) -> Path:
    """Where the file is in the cache, downloaded if need be. Raises what huggingface_hub does."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    here = try_to_load_from_cache(hub_id, name, revision=revision)
    wanted = name.endswith(LARGE) and not constants.HF_HUB_OFFLINE
    if wanted and not isinstance(here, str):
        _content(hub_id, name, revision)
    return Path(hf_hub_download(hub_id, name, revision=revision))


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
        part.rename(whole)


def _check(part: Path, etag: str, name: str) -> None:
    """The hub names large files by their SHA-256: what was put together must be that."""
    digest = hashlib.sha256()
    if len(etag) != 2 * digest.digest_size:
        return
    with part.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != etag:
        part.unlink()
        raise ModelError(f"{name} did not arrive as it is on the hub; download it again")
