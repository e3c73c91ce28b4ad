"""The memory of one rank, and which of it each room uses."""
import numpy as np

from sglang_peer.pattern import POISON


class Buffers:
    """KV pool, SGLang's MetadataBuffers and state pools of this rank.

    Prefill and decode place a room at different page, row and slot numbers, so
    that mixing up source and destination shows.  Decode memory starts as POISON.
    """

    def __init__(self, a, role):
        self.a, self.role, self.prefill = a, role, role == "prefill"
        per = a.layers // a.pp_size
        self.layer0, self.nlayers = a.pp_rank * per, per
        if a.attn == "mha":
            local = max(1, a.heads // a.tp_size)
            self.head_ids = [a.tp_rank * a.heads // a.tp_size + i for i in range(local)]
            self.nkv = 2
        else:
            self.head_ids, self.nkv = [0], 1
        self.head_bytes = a.item_len // a.page_size // len(self.head_ids)
        rooms = 1 if a.share_src and self.prefill else len(a.rooms)
        self.first_page = 0 if self.prefill else 2
        self.pool_pages = a.pool_pages or rooms * a.pages + (1 if self.prefill else 3)
        self._alloc_kv()
        self._alloc_aux()
        self._alloc_state()

    def _alloc_kv(self):
        import torch

        a = self.a
        # SGLang's order: all K regions, then all V regions
        shape = (self.pool_pages * a.page_size, len(self.head_ids), self.head_bytes)
        self.kv = [torch.full(shape, self._blank(), dtype=torch.uint8) for _ in range(self.nkv * self.nlayers)]

    def _alloc_aux(self):
        import ctypes

        import torch
        from sglang.srt.disaggregation.utils import MetadataBuffers

        a = self.a
        self.meta = MetadataBuffers(len(a.rooms) + 3, hidden_size=a.hidden_size, hidden_states_dtype=torch.bfloat16,
                                    max_sampling_mask_tokens=0, kv_checksum_enabled=a.aux == "checksum")
        # one array [slot, bytes] for each buffer
        self.aux = [np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(p)).reshape(-1, item)
                    for p, n, item in zip(*self.meta.get_buf_infos())]
        self.room_row = len(self.aux) - (2 if a.aux == "checksum" else 1)  # the buffer that holds the room number

    def _alloc_state(self):
        import torch

        a = self.a
        self.state_types, self.state = [], []
        for kind, slots, count in (
            ("mamba", len(a.rooms) + 3, 2 * a.state_layers),
            ("swa", len(a.rooms) * a.swa_pages + 3, (2 if a.attn == "mha" else 1) * a.state_layers),
        ):
            if kind in a.state:
                self.state_types.append(kind)
                self.state.append([torch.full((slots, a.state_item_len), self._blank(), dtype=torch.uint8) for _ in range(count)])

    def _blank(self):
        return 0 if self.prefill else POISON

    def kv_pages(self, region, dtype=np.uint8):
        """A region as [page, words or bytes of the page]."""
        return self.kv[region].numpy().reshape(self.pool_pages, -1).view(dtype)

    def place_of(self, i):
        """Rooms with the same place use the same pages (--share-src only: their bytes are the same)."""
        if self.prefill and self.a.share_src or not self.a.pages:
            return 0
        return i % max(1, (self.pool_pages - self.first_page) // self.a.pages)

    def pages_of(self, i):
        """Page numbers of the room with index i, in the room's order."""
        n, place, order = self.a.pages, self.place_of(i), self.a.page_order
        pages = np.arange(place * n, (place + 1) * n) + self.first_page
        if order == "reversed":
            pages = pages[::-1]
        elif order == "shuffled":
            pages = np.random.default_rng(place + (0 if self.prefill else 7919)).permutation(pages)
        elif order == "strided":
            pages = np.concatenate([pages[0::2], pages[1::2]])
        return pages.astype(np.int32)

    def aux_slot(self, i):
        return i if self.prefill else i + 2

    def state_indices(self, i):
        """Slots of each state pool, as the transfer classes take them."""
        out = []
        for kind in self.state_types:
            if kind == "mamba":
                out.append(np.array([i if self.prefill else i + 1], dtype=np.int32))
            else:
                n, low = self.a.swa_pages, 0 if self.prefill else 2
                out.append(np.arange(i * n + low, (i + 1) * n + low, dtype=np.int32))
        return out or None

    def room_bytes(self, prefix_pages=0):
        """KV bytes that one room brings to this rank."""
        return (self.a.pages - prefix_pages) * self.a.item_len * len(self.kv)
