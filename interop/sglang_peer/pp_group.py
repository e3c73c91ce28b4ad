"""The one thing SGLang's PPConsensusStore asks of a pipeline group: an object from its first rank."""
import datetime
import pickle


class PPGroup:
    def __init__(self, a):
        from torch.distributed import TCPStore

        host, port = a.pp_store.rsplit(":", 1)
        self.world_size, self.rank_in_group, self.calls = a.pp_size, a.pp_rank, 0
        self.is_first_rank, self.is_last_rank = a.pp_rank == 0, a.pp_rank == a.pp_size - 1
        self.tag = f"{a.dp_rank}.{a.cp_rank}.{a.tp_rank}"
        self.store = TCPStore(host, int(port), is_master=False, timeout=datetime.timedelta(seconds=60))

    def broadcast_object(self, obj, src=0):
        key = f"pp.{self.tag}.{self.calls}"
        self.calls += 1
        if self.rank_in_group == src:
            self.store.set(key, pickle.dumps(obj))
            return obj
        return pickle.loads(self.store.get(key))
