"""Which servers a download may be sent to: public ones, never this machine or its network.

The one server the user configured is exempt; these rules are for where it sends us.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from node.errors import SourceError

if TYPE_CHECKING:
    import httpx

__all__ = ["check_foreign", "check_peer", "host", "origin"]

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# This machine, its link (cloud metadata among it), multicast, translated and reserved addresses.
_NEVER = tuple(
    map(
        ipaddress.ip_network,
        "0.0.0.0/8 127.0.0.0/8 169.254.0.0/16 224.0.0.0/3"
        " ::/127 64:ff9b::/32 2002::/16 fe80::/10 ff00::/8".split(),
    )
)
_PRIVATE = tuple(
    map(
        ipaddress.ip_network,
        "10.0.0.0/8 100.64.0.0/10 172.16.0.0/12 192.168.0.0/16 198.18.0.0/15 fc00::/7".split(),
    )
)


def origin(url: str) -> tuple[str, str, int | None]:
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError as error:
        raise SourceError("the server sent an address that is none") from error
    return parts.scheme, (parts.hostname or "").rstrip(".").lower(), port


def host(url: str) -> str:
    return origin(url)[1] or "the server"


def check_foreign(url: str, endpoint: str) -> None:
    """A server may send us to another one, but not off https and not into this machine.

    Into a private network only when the configured server is in one itself.
    """
    scheme, name, port = origin(url)
    if scheme not in ("http", "https") or (scheme == "http" and endpoint.startswith("https:")):
        raise SourceError(f"{host(endpoint)} redirects to a {scheme or 'nameless'} address")
    literal = _address(name)
    if literal is None and _through_proxy(scheme, name):
        return  # the proxy resolves the name, and sits where such addresses mean nothing to us
    for address in [literal] if literal else _resolve(name, port):
        _check(address, name, endpoint)


def check_peer(response: httpx.Response, endpoint: str) -> None:
    """The name was checked before; this is the address that was really connected to."""
    scheme, name, _ = origin(str(response.url))
    stream = response.extensions.get("network_stream")
    peer = stream.get_extra_info("server_addr") if stream is not None else None
    address = _address(peer[0]) if peer else None
    if address is not None and not _through_proxy(scheme, name):
        _check(address, name, endpoint)


def _check(address: _Address, name: str, endpoint: str) -> None:
    address = getattr(address, "ipv4_mapped", None) or address
    if _is_in(address, _NEVER):
        raise SourceError(f"refused to be sent to {name}: it is no address of the public network")
    if _is_in(address, _PRIVATE) and not _is_private(endpoint):
        raise SourceError(f"refused to be sent to {name}: it is in a private network")


def _is_private(endpoint: str) -> bool:
    _, name, port = origin(endpoint)
    literal = _address(name)
    return any(_is_in(a, _PRIVATE) for a in ([literal] if literal else _resolve(name, port)))


def _is_in(address: _Address, networks: Sequence[_Network]) -> bool:
    return any(address.version == net.version and address in net for net in networks)


def _address(name: str) -> _Address | None:
    try:
        return ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None


def _resolve(name: str, port: int | None) -> list[_Address]:
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SourceError(f"the name {name} cannot be resolved; is the network up?") from error
    return [a for info in found if (a := _address(str(info[4][0]))) is not None]


def _through_proxy(scheme: str, name: str) -> bool:
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    return bool(proxies.get(scheme) or proxies.get("all")) and not proxy_bypass(name)
