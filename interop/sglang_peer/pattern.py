"""The byte pattern of every buffer, and which bytes of it a rank holds (README.md, "Byte pattern").

All arithmetic is modulo 2**32, words are little-endian.  A foreign peer
implements the same few lines.
"""
import numpy as np

MASK = 0xFFFFFFFF
K_ROOM, K_LAYER, K_KV = 0x27D4EB2F, 0x165667B1, 0x1B873593
K_TOK, K_HEAD, K_WORD = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35

# the `kv` of a salt
KV_MAMBA, KV_SWA, KV_AUX = 2, 3, 4  # 0: K or MLA, 1: V

POISON = 0xEE


def salt(room, layer, kv):
    return (room * K_ROOM + layer * K_LAYER + kv * K_KV) & MASK


def words(salt_value, toks, heads, nwords):
    """uint32[len(toks), len(heads), nwords]."""
    t = (np.asarray(toks, dtype=np.uint64) * K_TOK).astype(np.uint32)
    h = (np.asarray(heads, dtype=np.uint64) * K_HEAD).astype(np.uint32)
    w = (np.arange(nwords, dtype=np.uint64) * K_WORD).astype(np.uint32)
    out = np.empty((len(t), len(h), nwords), dtype=np.uint32)
    np.add(t[:, None, None], h[None, :, None] + w[None, None, :], out=out)
    out += np.uint32(salt_value)
    return out


def row(salt_value, toks, heads, nwords):
    """The same as one flat row of bytes."""
    return words(salt_value, toks, heads, nwords).ravel().view(np.uint8)
