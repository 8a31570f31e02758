"""Block hashes as the engines compute them, so that what is published looks, chains and differs as theirs does.

A chain is a function of (digest of the block before, b"" at the root; tokens of the block; cache namespace). The
digests of two chains with different seeds have nothing in common.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b, sha256

Chain = Callable[[bytes, Sequence[int], str], bytes]

SALT_DOMAIN = b"sglang-cache-salt-v1\0"


def namespace_parts(namespace: str) -> tuple[str, str]:
    """(adapter, salt) of a cache namespace; what else keeps requests apart is not told to anybody."""
    adapter, _, rest = namespace.partition("\x1f")
    return adapter, rest.partition("\x1f")[0]


def quick_chain(parent: bytes, tokens: Sequence[int], namespace: str) -> bytes:
    """16 bytes that name the prefix ending with this block: for a cache whose hashes nobody sees."""
    return blake2b((parent or namespace.encode()) + array("Q", tokens).tobytes(), digest_size=16).digest()


def _head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes((major << 5 | value,))
    size = 0 if value < 1 << 8 else 1 if value < 1 << 16 else 2 if value < 1 << 32 else 3
    return bytes((major << 5 | 24 + size,)) + value.to_bytes(1 << size, "big")


def cbor(value: object) -> bytes:
    """Canonical CBOR of what a block's hash covers: null, unsigned integers, bytes, text and lists."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(3, len(text)) + text
    if isinstance(value, list):
        return _head(4, len(value)) + b"".join(map(cbor, value))
    raise TypeError(f"no hash covers a {type(value).__name__}")


def vllm_chain(seed: int) -> Chain:
    """vLLM's sha256_cbor with PYTHONHASHSEED=``seed``: sha256 over (parent, tokens, extra keys), 32 bytes."""
    root = sha256(cbor(str(seed))).digest()

    def chain(parent: bytes, tokens: Sequence[int], namespace: str) -> bytes:
        adapter, salt = namespace_parts(namespace)
        extra: list[object] = [["lora", adapter, adapter]] if adapter else []
        if salt and not parent:
            extra.append(["cache_salt", salt])
        return sha256(cbor([parent or root, list(tokens), extra or None])).digest()

    return chain


def sglang_chain(seed: int) -> Chain:
    """SGLang's page hash: sha256(digest before || each token as u32), the salt in place of the root's digest.

    SGLang has no seed: 0 is what it computes, anything else makes an engine whose hashes are its own.
    """
    root = sha256(b"seed" + str(seed).encode()).digest() if seed else b""

    def chain(parent: bytes, tokens: Sequence[int], namespace: str) -> bytes:
        if not parent:
            salt = namespace_parts(namespace)[1]
            parent = root + (sha256(SALT_DOMAIN + salt.encode()).digest() if salt else b"")
            if namespace and namespace != f"\x1f{salt}\x1f":
                parent += sha256(namespace.encode()).digest()
        # Pages are told apart by length as well; a token that does not fit 32 bits is none of SGLang's vocabulary.
        return sha256(parent + array("I", [token & 0xFFFFFFFF for token in tokens]).tobytes()).digest()

    return chain


def unsigned(digest: bytes) -> int:
    """vLLM's number for a hash: the low 64 bits of the digest."""
    return int.from_bytes(digest[-8:], "big")


def signed(digest: bytes) -> int:
    """SGLang's number for a hash: the high 64 bits of the digest, as a signed integer."""
    return int.from_bytes(digest[:8], "big", signed=True)
