"""Memory with room for rows to come: a new token's row is written there, and no older row is copied."""
ROOM = 128  # rows that a new buffer has room for


def joined(buffer, recent, rows):
    """The rows `recent` (B, Hkv, r, d), which lie in `buffer` if there is one, and new rows (B, Hkv, T, d) -> the
    buffer (B, Hkv, r + T and more, d), and the part of it that holds them all, (B, Hkv, r + T, d)."""
    B, Hkv, T, d = rows.shape
    r = recent.shape[2]
    if buffer is None or r + T > buffer.shape[2]:
        buffer = rows.new_empty(B, Hkv, r + T + ROOM, d)
        # a prefix, which a cache may begin with, is held once for all sequences of a batch
        buffer[:, :, :r] = recent
    buffer[:, :, r:r + T] = rows
    return buffer, buffer[:, :, :r + T]


def reserved(cache):
    """Bytes of the buffers of a `KVCache` that hold no token yet, which `cache.nbytes` leaves out."""
    with_buffer = [rows for layer in cache.layers for rows in (layer.keys, layer.values) if rows.buffer is not None]
    return sum(rows.buffer.nbytes - rows.recent.nbytes for rows in with_buffer)
