"""Keys for tests: an owner, devices, and a registrar that keeps its list in memory."""

from __future__ import annotations

from edgespec.errors import AccessRefused
from edgespec.net.keys import Identity, KeyPair
from edgespec.runtime.access_policy import OWNER, STAGE, TOKEN

OWN = KeyPair.from_words("the coordinator of the tests")
OWNER_IDENTITY = Identity.of_coordinator(OWN)


def identity(name: str) -> Identity:
    """A device of the tests' cluster."""
    return Identity(KeyPair.from_words(name), OWN.public)


def everybody(key: str) -> str:
    """Admits whoever has a key at all."""
    return ""


class ListedKeys:
    """A registrar: the owner, and whoever is put into `roles`."""

    def __init__(self) -> None:
        self.roles = {OWN.public: OWNER}
        self.names: dict[str, str] = {}

    def add(self, name: str, role: str = STAGE) -> Identity:
        """A device that may do what its role may."""
        one = identity(name)
        self.roles[one.own.public] = role
        return one

    def role_of(self, key: str) -> str | None:
        """See Registrar."""
        return self.roles.get(key)

    def why_not(self, key: str) -> str:
        """See Registrar."""
        return "it is not known"

    def enrol(self, token_key: str, device_key: str, name: str) -> str:
        """See Registrar; a token counts once."""
        if self.roles.get(token_key) != TOKEN:
            raise AccessRefused("its token was used")
        del self.roles[token_key]
        self.roles[device_key] = STAGE
        self.names[device_key] = name
        return name

    def forget(self, key: str) -> None:
        """See Registrar."""
        self.roles.pop(key, None)
