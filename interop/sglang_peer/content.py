"""Fill prefill's buffers with the byte pattern; check decode's against it."""
import numpy as np

from sglang_peer.pattern import KV_AUX, KV_MAMBA, KV_SWA, POISON, row, salt, words


class Content:
    def __init__(self, buffers):
        self.b, self.a = buffers, buffers.a
        self._checked = {}  # --share-src: place -> what its pages were found to be
        self._filled = set()

    # ---- what must be where ------------------------------------------------
    def _room_salt(self, room):
        return 0 if self.a.share_src else room

    def _kv(self, order, room):
        """(region, expected [pages, words]) of the pages with these indices in the room."""
        b, ps = self.b, self.a.page_size
        toks = (np.asarray(order)[:, None] * ps + np.arange(ps)[None, :]).ravel()
        base = words(0, toks, b.head_ids, b.head_bytes // 4).reshape(len(order), -1)
        for kv in range(b.nkv):
            for layer in range(b.nlayers):
                yield kv * b.nlayers + layer, base + np.uint32(salt(self._room_salt(room), b.layer0 + layer, kv))

    def _aux(self, j, room):
        size = self.b.aux[j].shape[1]
        if j != self.b.room_row:
            return row(salt(room, j, KV_AUX), [0], [0], size // 4)
        # SGLang's decode compares slot 0 of this row with the room
        out = np.zeros(size, dtype=np.uint8)
        out[:8] = np.frombuffer(int(room).to_bytes(8, "little"), dtype=np.uint8)
        return out

    def _state(self, kind, j, n, room):
        a, b = self.a, self.b
        if kind == "mamba":  # [dim, bytes per dim], dims sharded over attention TP
            dims = [a.tp_rank * a.state_dim + d for d in range(a.state_dim)]
            return row(salt(room, j, KV_MAMBA), dims, [0], a.state_item_len // a.state_dim // 4)
        toks = range(n * a.page_size, (n + 1) * a.page_size)
        per_token = a.state_item_len // a.page_size
        return row(salt(room, j, KV_SWA), toks, b.head_ids, per_token // len(b.head_ids) // 4)

    def _state_rows(self, i):
        """(kind, tensor number, tensor, index in the room, slot) of a room."""
        for c, kind in enumerate(self.b.state_types):
            for j, tensor in enumerate(self.b.state[c]):
                for n, slot in enumerate(self.b.state_indices(i)[c]):
                    yield kind, j, tensor.numpy(), n, slot

    # ---- prefill -----------------------------------------------------------
    def fill(self, i, room):
        """Write the bytes of a room (its KV once for all rooms with --share-src)."""
        b, place = self.b, self.b.place_of(i)
        if place not in self._filled and self.a.pages:
            self._filled.add(place)
            pages = b.pages_of(i)
            order = np.argsort(pages)  # ascending, so that numpy writes forward
            for region, want in self._kv(order, room):
                b.kv_pages(region, np.uint32)[pages[order]] = want
        for j, buffer in enumerate(b.aux):
            buffer[b.aux_slot(i)] = self._aux(j, room)
        for kind, j, array, n, slot in self._state_rows(i):
            array[slot] = self._state(kind, j, n, room)

    # ---- decode ------------------------------------------------------------
    def check(self, i, room, prefix_pages=0):
        """Number of wrong pages and rows of a room, and the first few places."""
        bad, where = self._check_kv(i, room, prefix_pages)
        where = list(where)
        aux = [j for j, buffer in enumerate(self.b.aux) if not np.array_equal(buffer[self.b.aux_slot(i)], self._aux(j, room))]
        if aux:
            bad += len(aux)
            where.append(f"aux{aux}")
        for kind, j, array, n, slot in self._state_rows(i):
            if not np.array_equal(array[slot], self._state(kind, j, n, room)):
                bad += 1
                where.append(f"{kind}[{j}] slot{slot}")
        return bad, where[:8]

    def _check_kv(self, i, room, prefix_pages):
        place = self.b.place_of(i)
        if self.a.share_src and place in self._checked:
            return self._checked[place]
        bad, where = 0, []
        pages = self.b.pages_of(i)[prefix_pages:]
        if len(pages):
            for region, want in self._kv(np.arange(prefix_pages, prefix_pages + len(pages)), room):
                wrong = (self.b.kv_pages(region, np.uint32)[pages] != want).any(axis=1)
                if wrong.any():
                    kv, layer = divmod(region, self.b.nlayers)
                    bad += int(wrong.sum())
                    where.append(f"kv{kv} layer{self.b.layer0 + layer} pages{np.nonzero(wrong)[0][:4].tolist()}")
        self._checked[place] = bad, where
        return bad, where

    def check_untouched(self, announced, prefix_pages=0):
        """Where something was written outside the pages and slots of the rooms (indices) that were announced."""
        b, out = self.b, []
        free = np.ones(b.pool_pages, dtype=bool)
        for i in announced:
            free[b.pages_of(i)[prefix_pages:]] = False
        for region in range(len(b.kv)):
            if not (b.kv_pages(region)[free] == POISON).all():
                out.append(f"region{region}")
        for c, kind in enumerate(b.state_types):
            for j, tensor in enumerate(b.state[c]):
                free = np.ones(len(tensor), dtype=bool)
                for i in announced:
                    free[b.state_indices(i)[c]] = False
                if not (tensor.numpy()[free] == POISON).all():
                    out.append(f"{kind}[{j}]")
        return out[:8]

    def corrupt(self, what, i):
        """--self-test-corrupt: flip one byte that `check` or `check_untouched` must notice."""
        b = self.b
        if what == "kv":
            b.kv_pages(-1)[b.pages_of(i)[-1], -1] ^= 1
        elif what == "aux":
            b.aux[3][b.aux_slot(i), -1] ^= 1
        elif what == "state":
            b.state[-1][-1].numpy()[b.state_indices(i)[-1][-1], -1] ^= 1
        elif what == "stray":
            b.kv_pages(0)[0, 5] ^= 1
