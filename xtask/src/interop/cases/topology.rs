//! Several ranks a side.

use super::super::case::{Case, Registry};

pub fn cases() -> Vec<Case> {
    vec![
        Case::new("tp2-mha", "TP 2 on both sides, heads split").both("--attn mha --heads 8 --tp-size 2"),
        Case::new("tp2-mla", "TP 2 on both sides, MLA").both("--tp-size 2"),
        Case::new("pp2-mla", "prefill PP 2 to decode PP 1, MLA").prefill("--pp-size 2 --chunk-pages 5"),
        Case::new("pp2-mha", "prefill PP 2 to decode PP 1, MHA, layers by ids")
            .both("--attn mha --layer-ids force")
            .prefill("--pp-size 2"),
        Case::new("tp2-pp2-mla", "prefill TP 2 PP 2, decode TP 2").both("--tp-size 2").prefill("--pp-size 2"),
        Case::new("tp2-tp1-mla", "prefill TP 2 to decode TP 1, MLA: rank 1 is a dummy")
            .prefill("--tp-size 2")
            // The dummy rank has not read the metadata when the rooms are over.
            .decode("--d-linger 1"),
        Case::new("tp1-tp2-mla", "prefill TP 1 to decode TP 2, MLA: a room has two destinations").decode("--tp-size 2"),
        Case::new("dp2-by-room", "prefill DP 2, the rank follows from the room's number")
            .both("--rooms 100:4")
            .prefill("--dp-size 2"),
        Case::new("dp2-by-table", "prefill DP 2, the rank is in /register_dp_rank and /query_dp_ranks")
            .both("--rooms 100:4")
            .prefill("--dp-size 2 --load-balance-method round_robin"),
        Case::new("dp2-by-table-foreign", "the same, the table in the other program's server")
            .both("--rooms 100:4")
            .prefill("--dp-size 2 --load-balance-method round_robin")
            .registry(Registry::Foreign),
    ]
}
