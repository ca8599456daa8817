"""Keys: the CURVE key pairs by which nodes prove who they are, and the tokens that admit a key.

A key is 32 bytes (Curve25519), written in ZeroMQ's Z85: 40 characters. What a node may do follows
from the public key that it has proved, and from nothing that it says of itself.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
import zlib
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from edgespec.errors import AccessRefused

KEY_BYTES = 32
KEY_CHARS = 40
_Z85 = frozenset(z85.Z85CHARS.decode())

_TOKEN_MARK = "edge-"
_TOKEN_BYTES = 18  # of the secret: 2**144 are too many to try over a network; no padding
_SUM_BYTES = 4


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, both keys in Z85; the secret one is never shown."""

    public: str
    secret: str = field(repr=False)

    @staticmethod
    def new() -> KeyPair:
        public, secret = zmq.curve_keypair()
        return KeyPair(public.decode(), secret.decode())

    @staticmethod
    def from_secret(secret: str) -> KeyPair:
        """Raises ValueError if it is no key."""
        if not is_key(secret):
            raise ValueError("a secret key has 40 characters of Z85")
        return KeyPair(zmq.curve_public(secret.encode()).decode(), secret)

    @staticmethod
    def from_words(words: str) -> KeyPair:
        """The pair of a shared secret."""
        digest = hashlib.sha256(b"edgespec key pair " + words.encode()).digest()
        return KeyPair.from_secret(z85.encode(digest).decode())


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's own key pair, and the public key of its coordinator."""

    own: KeyPair
    coordinator: str

    @staticmethod
    def of_coordinator(own: KeyPair) -> Identity:
        """Of the coordinator itself, and of the cluster's owner, who may read its key."""
        return Identity(own, own.public)


@dataclass(frozen=True, slots=True)
class Token:
    """Admits a device or a client to a cluster: the coordinator's public key, and a secret.

    The secret gives a key pair, whose holder may do one thing: have its own public key admitted.
    The coordinator keeps only the public key of the pair, and the secret is never sent.
    """

    coordinator: str
    pair: KeyPair
    text: str = field(repr=False)

    @staticmethod
    def new(coordinator: str) -> Token:
        """A random one for the coordinator with this public key."""
        return Token._of(z85.decode(coordinator), secrets.token_bytes(_TOKEN_BYTES))

    @staticmethod
    def parse(text: str) -> Token:
        """Raises AccessRefused if it is no token, or not all of one."""
        text = text.strip()
        try:
            raw = base64.b64decode(text.removeprefix(_TOKEN_MARK), "-_", validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        body = raw[:-_SUM_BYTES]
        if len(body) == KEY_BYTES + _TOKEN_BYTES:
            token = Token._of(body[:KEY_BYTES], body[KEY_BYTES:])
            if token.text == text:  # its mark, its sum, and nothing that only decodes alike
                return token
        raise AccessRefused(
            "this is no token, or not all of it; copy the whole line that `edgespec init` or "
            "`edgespec token new` printed on the coordinator"
        )

    @staticmethod
    def _of(coordinator: bytes, secret: bytes) -> Token:
        body = coordinator + secret
        text = _TOKEN_MARK + base64.urlsafe_b64encode(body + _sum(body)).decode()
        return Token(z85.encode(coordinator).decode(), KeyPair.from_words(secret.hex()), text)


def is_key(text: object) -> bool:
    if not (isinstance(text, str) and len(text) == KEY_CHARS and _Z85.issuperset(text)):
        return False
    try:
        return len(z85.decode(text)) == KEY_BYTES
    except Exception:  # five characters can stand for more than four bytes hold
        return False


def short(key: str) -> str:
    """The fingerprint of a public key, for users: it needs no quoting in a shell."""
    return hashlib.sha256(key.encode()).hexdigest()[:12]


def _sum(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(_SUM_BYTES, "big")
