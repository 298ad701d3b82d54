"""Addresses of this machine alone, and the door beside ours.

A link that holds a secret names an address, never ``localhost``: a browser looks that name up as it
likes, and may ask ``::1`` first, where any user of the machine can listen at the same port.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator

from ampscope.errors import BadInput

EVERY = ("0.0.0.0", "::")
_TAKEN = (errno.EADDRINUSE, errno.EACCES)


def is_loopback(name: str) -> bool:
    """Whether ``name`` is ``localhost`` or a loopback address, without brackets. Nothing is looked
    up."""
    if name == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return False


def address(host: str) -> str:
    """The loopback address that ``host`` stands for on this machine, IPv4 before IPv6, or every
    address, which has other spellings too (``0``); any other host as it is."""
    with contextlib.suppress(OSError, UnicodeError):
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, None)]
        own = [one for one in found if is_loopback(one) or one in EVERY]
        return min(own, key=lambda one: ":" in one, default=host)
    return host


@contextlib.contextmanager
def held(host: str, port: int) -> Iterator[None]:
    """Keep ``port`` of the other address family from every program while ``host`` is served, an
    address: who opens ``localhost``, or this machine's name, finds us or no server there. Raises
    BadInput where another program has it; where there is no such family nothing is held."""
    other = "127.0.0.1" if ":" in host else "::1"
    if host == "0.0.0.0":
        other = "::"
    elif not is_loopback(host):
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            is_ipv6 = ":" in other
            family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
            kept = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            if is_ipv6:
                kept.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            kept.bind((other, port))  # without listening: a connection is refused
        except OSError as error:
            if error.errno in _TAKEN:
                shown = f"[{other}]" if is_ipv6 else other
                raise BadInput(
                    f"{shown}:{port} is taken by another program, which could get what is meant "
                    f"for {host}:{port}. Choose another port."
                ) from error
        yield
