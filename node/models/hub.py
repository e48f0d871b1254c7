"""Models from a Hugging Face hub: addresses and the token by `huggingface_hub`, bytes by ours.

`HF_ENDPOINT`, `HF_TOKEN` and a saved login count as for every program of that family. Files go
into our own store, so that `rm` really frees their space.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from node.errors import NotFound, SourceError
from node.models.download import OnProgress, RemoteFile, Source, need_space
from node.models.gguf import split_paths

__all__ = ["HubSource", "fetch_from_hub", "hub_digest"]


@dataclass(frozen=True, slots=True)
class HubSource:
    """`file` is a path in the repository, the first part when the model is split."""

    repo: str
    file: str
    revision: str | None = None

    @property
    def origin(self) -> str:
        return f"hf:{self.repo}/{self.file}" + (f"@{self.revision}" if self.revision else "")


def fetch_from_hub(source: HubSource, folder: Path, report: OnProgress) -> tuple[Path, str]:
    """All files of the model into `folder`: the first of them, and the digest of `hub_digest`.

    Raises:
        NotFound, SourceError, NoSpace: with what to do about it.
    """
    server = _server(source)
    files = _remote_files(server, source)
    need_space(folder, sum(file.size_bytes or 0 for file in files), source.origin)
    paths, digests = [], []
    for file in files:
        partial, digest = server.fetch(file, folder.parent, report)
        paths.append(partial.rename(folder / file.name))
        digests.append(digest)
    return paths[0], _joint(digests)


def hub_digest(source: HubSource) -> str | None:
    """sha256 of the file on the hub now (of a split model: of its parts' digests, one a line).

    None when the hub does not tell.
    """
    digests = [file.sha256 for file in _remote_files(_server(source), source)]
    known = [digest for digest in digests if digest is not None]
    return _joint(known) if len(known) == len(digests) else None


def _joint(digests: Sequence[str]) -> str:
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()


def _remote_files(server: Source, source: HubSource) -> list[RemoteFile]:
    from huggingface_hub import hf_hub_url

    revision = source.revision
    files = []
    for part in split_paths(Path(source.file)):
        name = part.as_posix()
        url = hf_hub_url(source.repo, name, revision=revision, endpoint=server.endpoint)
        headers = server.head(url)
        commit = headers.get("x-repo-commit", "")
        if re.fullmatch(r"[0-9a-f]{40}", commit) and commit != revision:
            # All parts, and a resumed download, come from this one state of the repository.
            revision = commit
            url = hf_hub_url(source.repo, name, revision=revision, endpoint=server.endpoint)
        files.append(_remote_file(url, PurePosixPath(name).name, headers))
    return files


def _remote_file(url: str, name: str, headers: Any) -> RemoteFile:
    etag = (headers.get("x-linked-etag") or headers.get("etag") or "").removeprefix("W/").strip('"')
    size = headers.get("x-linked-size") or ""
    if not size and "location" not in headers:
        size = headers.get("content-length", "")
    return RemoteFile(
        url=url,
        name=name,
        size_bytes=int(size) if size.isdecimal() else None,
        # Large files have their sha256 as etag; others a git hash, which is no use to us.
        sha256=etag if re.fullmatch(r"[0-9a-f]{64}", etag) else None,
        etag=etag or None,
    )


def _server(source: HubSource) -> Source:
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise SourceError("HF_HUB_OFFLINE is set: unset it to pull from the hub")
    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    def explain(response: Any) -> str | None:
        return _explain(response, source, endpoint, bool(token))

    return Source(endpoint, headers, explain)


def _explain(response: Any, source: HubSource, endpoint: str, has_token: bool) -> str | None:
    page = f"{endpoint}/{source.repo}"
    code, status = response.headers.get("x-error-code", ""), response.status_code
    if code == "GatedRepo":
        return (
            f"{source.repo} is gated: accept its terms at {page}, then set HF_TOKEN and pull again"
        )
    if code == "EntryNotFound":
        raise NotFound(f"{source.repo} has no file {source.file}; see {page}/tree/main")
    if code == "RevisionNotFound":
        raise NotFound(f"{source.repo} has no revision {source.revision}; see {page}")
    if status in (401, 403) and has_token:
        return f"the hub refused HF_TOKEN for {source.repo}: is it valid, and may it read {page}?"
    if status in (401, 403, 404):
        raise NotFound(
            f"{source.repo} does not exist on {endpoint}, or is private: check the name, and set"
            " HF_TOKEN if you have access"
        )
    return None
