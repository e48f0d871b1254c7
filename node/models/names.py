"""Model names: what is allowed, how they become folder names, and names made from file names.

A name is `base` or `base:tag` in lower case, such as `qwen3:8b` or `qwen3-8b:q4_k_m`.
"""

from __future__ import annotations

import re

from node.errors import InvalidRequest

__all__ = ["check_name", "folder_name", "name_from_file", "name_from_folder", "slug"]

_PIECE = r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9_])?"
_NAME = re.compile(rf"{_PIECE}(?::{_PIECE})?")
# Windows opens a device for these, with whatever suffix.
_DEVICES = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:[.:].*)?")
_QUANT = re.compile(
    r"[-._](?P<tag>(?:ud-)?i?q\d(?:_[a-z0-9]+)*|tq\d_\d|mxfp4(?:_moe)?|nvfp4|bf16|f16|fp16|f32)$"
)
_PART = re.compile(r"-\d{5}-of-\d{5}$")


def check_name(name: str) -> str:
    """The name itself.

    Raises:
        InvalidRequest: it is not a name a model may have.
    """
    if not _NAME.fullmatch(name) or _DEVICES.fullmatch(name):
        raise InvalidRequest(
            f"{name[:80]!r} cannot be a model name: use lower-case letters, digits, '.', '_', '-'"
            " and at most one ':' before a tag",
            param="model",
        )
    return name


def folder_name(name: str) -> str:
    """`base:tag` as a folder name; Windows allows no colon, and no name has a plus sign."""
    return check_name(name).replace(":", "+")


def name_from_folder(folder: str) -> str:
    return check_name(folder.replace("+", ":"))


def slug(text: str) -> str:
    """Any text as one piece of a name."""
    cleaned = re.sub(r"[^a-z0-9._-]+", "-", text.lower())[:64].strip("._-")
    return f"{cleaned}-model" if _DEVICES.fullmatch(cleaned) else cleaned or "model"


def name_from_file(file_name: str) -> str:
    """`Qwen3-8B-Q4_K_M-00001-of-00002.gguf` → `qwen3-8b:q4_k_m`."""
    stem = re.sub(r"\.gguf$", "", file_name.lower())
    stem = _PART.sub("", stem)
    quant = _QUANT.search(stem)
    if quant is None or quant.start() == 0:
        return check_name(slug(stem))
    return check_name(f"{slug(stem[: quant.start()])}:{slug(quant['tag'])}")
