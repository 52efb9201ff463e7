"""Who may call: keys that callers show, the same for REST and gRPC."""

import hashlib
import hmac
from collections.abc import Iterable, Sequence

SCHEME = "Bearer"

FAIR_KEY_DIGITS = 16
"""Enough to tell keys apart; too few to be mistaken for one."""


class Keys:
    """The keys of which one is to be shown as `Authorization: Bearer {key}`.

    Without any key everybody may call.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = tuple(key.encode() for key in keys)

    def accept(self, values: Sequence[bytes]) -> bool:
        """Return whether the `Authorization` headers of a call, all of them, let it in.

        Takes as long for a wrong key as for a right one, whichever it is. Two headers
        are one too many: proxies differ in which of them they believe.
        """
        if not self._keys:
            return True
        if len(values) != 1:
            return False
        scheme, _, shown = values[0].strip().partition(b" ")
        if scheme.lower() != SCHEME.lower().encode():
            return False
        shown = shown.strip()
        if not shown:  # not even where a configured key is empty by mistake
            return False
        # Bytes: text that is not ASCII can't be compared so. All of them, to take as long.
        found = [hmac.compare_digest(shown, key) for key in self._keys]
        return any(found)

    def fair_key(self, values: Sequence[bytes]) -> str:
        """Return what names a caller who was let in to routers: nothing that would let him in.

        The first 16 hexadecimal digits of the SHA-256 of his key. Empty where everybody may
        call: what callers say of themselves then does not share anything out.
        """
        if not self._keys or not values:
            return ""
        shown = values[0].strip().partition(b" ")[2].strip()
        return hashlib.sha256(shown).hexdigest()[:FAIR_KEY_DIGITS]
