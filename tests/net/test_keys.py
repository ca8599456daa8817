"""Keys and tokens: both ways, damage, and what is never shown."""

from __future__ import annotations

import hashlib
import string

import pytest
import zmq
from zmq.utils import z85

from edgespec.errors import AccessRefused
from edgespec.net.keys import Identity, KeyPair, Token, is_key, short

WORDS = "correct horse battery staple"


def test_a_pair_follows_from_its_secret_key() -> None:
    pair = KeyPair.new()
    assert KeyPair.from_secret(pair.secret) == pair
    assert zmq.curve_public(pair.secret.encode()).decode() == pair.public
    assert KeyPair.new() != pair


def test_words_give_one_pair_that_is_the_hash_of_them() -> None:
    digest = hashlib.sha256(b"edgespec key pair correct horse battery staple").digest()
    secret = z85.encode(digest)
    pair = KeyPair.from_words(WORDS)
    assert (pair.secret, pair.public) == (secret.decode(), zmq.curve_public(secret).decode())
    assert KeyPair.from_words(WORDS) == pair
    assert KeyPair.from_words(WORDS + " ") != pair


@pytest.mark.parametrize(
    "text",
    ["", "a" * 39, "a" * 41, "ä" * 40, " " * 40, "#" * 40, "a" * 39 + "\n", None, 5, b"a" * 40],
)
def test_what_is_no_key_is_refused(text: object) -> None:
    """Also five characters of the right kind that stand for more than four bytes hold."""
    assert not is_key(text)
    with pytest.raises(ValueError, match="40 characters of Z85"):
        KeyPair.from_secret(text)  # type: ignore[arg-type]


def test_keys_are_keys() -> None:
    for pair in (KeyPair.new(), KeyPair.from_words("")):
        assert is_key(pair.public)
        assert is_key(pair.secret)


def test_a_fingerprint_tells_keys_apart_and_suits_a_shell() -> None:
    one, other = KeyPair.new().public, KeyPair.new().public
    assert short(one) == hashlib.sha256(one.encode()).hexdigest()[:12] != short(other)


def test_a_token_holds_the_coordinators_key_and_a_secret_of_its_own() -> None:
    coordinator = KeyPair.new().public
    token = Token.new(coordinator)
    assert token.coordinator == coordinator
    assert Token.parse(token.text) == token
    assert Token.parse(f"  {token.text}\r\n") == token
    assert set(token.text) <= set(string.ascii_letters + string.digits + "-_")
    other = Token.new(coordinator)
    assert other.pair != token.pair
    assert other.text != token.text


def test_every_single_character_of_a_token_counts() -> None:
    text = Token.new(KeyPair.new().public).text
    characters = string.printable + "ä\0"
    tried = 0
    for at, was in enumerate(text):
        for wrong in {*characters, ""} - {was}:
            damaged = text[:at] + wrong + text[at + 1 :]
            if damaged.strip() in (text, damaged[:0]):
                continue
            tried += 1
            with pytest.raises(AccessRefused, match="no token, or not all of it"):
                Token.parse(damaged)
    assert tried > 7_000


@pytest.mark.parametrize("text", ["", "edge-", "edge-AAAA", "edge-" + "A" * 72, "http://x", "ä"])
def test_what_is_no_token_is_refused_with_what_to_do(text: str) -> None:
    with pytest.raises(AccessRefused, match="edgespec token new"):
        Token.parse(text)


def test_a_token_is_needed_whole_and_once() -> None:
    text = Token.new(KeyPair.new().public).text
    for damaged in (text[:-1], text[1:], text + text, text + "A", text + "=", text.upper()):
        with pytest.raises(AccessRefused):
            Token.parse(damaged)


def test_no_secret_is_ever_shown() -> None:
    pair = KeyPair.new()
    token = Token.new(pair.public)
    shown = f"{pair!r} {pair} {Identity.of_coordinator(pair)!r} {token!r} {token}"
    assert pair.public in shown
    assert token.pair.public in shown
    for secret in (pair.secret, token.pair.secret, token.text, token.text[-20:]):
        assert secret not in shown


def test_the_coordinator_belongs_to_itself() -> None:
    own = KeyPair.new()
    assert Identity.of_coordinator(own) == Identity(own, own.public)
