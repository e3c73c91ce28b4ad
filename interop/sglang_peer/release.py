"""Held pages of failed rooms, as SGLang's DecodeTransferQueue holds them.

A room that failed after its metadata went out may still be written to.  SGLang
tells every prefill rank (ABORT) and frees the pages when each has acknowledged
(ABORT_ACK) or after SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.
"""
import time


class Held:
    def __init__(self, r, fields, since, required, deadline):
        self.r, self.fields, self.since, self.required, self.deadline = r, fields, since, required, deadline


class Releases:
    def __init__(self, mgr):
        from sglang.srt.environ import envs

        self.mgr, self.held = mgr, []
        self.timeout_s = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get()

    def notify(self, receiver, published):
        """Tell prefill of a failed room (its own abort() or timeout may have); whether its pages must be held."""
        if not (self.mgr.enable_deferred_decode_kv_release and published):
            return False
        if not receiver.abort_notified:
            receiver.ensure_abort_notified(force_arm=True)
        return receiver.abort_notified

    def hold(self, r, fields, since):
        required = len(r.receiver.bootstrap_infos)
        self.held.append(Held(r, fields, since, required, time.perf_counter() + self.timeout_s))

    def due(self, final=False):
        """(room, fields of its event) of the rooms whose pages are free now; `final`: of all."""
        out, now = [], time.perf_counter()
        for h in list(self.held):
            acked = self.mgr.is_abort_release_safe(h.r.room, h.required)
            if acked or final or now >= h.deadline:
                self.held.remove(h)
                self.mgr.clear_deferred_abort_state(h.r.room)
                h.r.receiver.clear()
                out.append((h.r, dict(h.fields, abort_ack=acked, abort_ack_ms=round((now - h.since) * 1e3, 3),
                                      required_acks=h.required)))
        return out
