//! One prefill, one decode, every byte in its place.

use super::super::case::{Case, Check, Fail, Outcome, When, Who};
use super::super::program::Backend::Nixl;
use super::super::program::{Direction, Program};

/// Why there is no case of them.
const KINDS: &str = "its messages have no kind of memory";

pub fn cases() -> Vec<Case> {
    vec![
        Case::new("one-room", "one room of 1 MiB, MLA").both("--rooms 100:1"),
        Case::new("rooms-64", "64 rooms at the same time").both("--rooms 100:64 --layers 8"),
        Case::new("rooms-waves", "64 rooms, at most 8 in flight").both("--rooms 100:64 --concurrency 8"),
        Case::new("mha", "K and V, 8 heads").both("--attn mha --heads 8"),
        Case::new("chunked", "prefill sends 16 pages in chunks of 5").prefill("--chunk-pages 5"),
        Case::new("chunked-mha", "chunks of 1 page, K and V").both("--attn mha").prefill("--chunk-pages 1"),
        Case::new("full-prefix", "decode holds all pages: metadata and aux alone").decode("--decode-prefix-pages 16"),
        Case::new("partial-prefix", "decode holds 5 of 16 pages; chunks of 4")
            .prefill("--chunk-pages 4")
            .decode("--decode-prefix-pages 5"),
        Case::new("pages-reversed", "pages in falling order on both sides").both("--page-order reversed"),
        Case::new("pages-strided", "every second page first").both("--page-order strided").prefill("--chunk-pages 5"),
        Case::new("pages-shuffled", "pages in random order, MHA, chunks")
            .both("--attn mha --page-order shuffled")
            .prefill("--chunk-pages 5"),
        Case::new("pages-mixed", "prefill's pages in order, decode's in random order").decode("--page-order shuffled"),
        Case::new("page-of-16", "pages of 16 tokens, 9 KiB").both("--page-size 16 --item-len 9216"),
        Case::new("fp8", "another kv_cache_dtype, the same on both sides").both("--dtype-str fp8_e4m3"),
        Case::new("dram", "both call their memory DRAM instead of VRAM").both("--mem-kind DRAM").only(Nixl, KINDS),
        Case::new("dram-vram", "ours calls its memory DRAM, SGLang's calls its own VRAM")
            .of(Program::Ours, "", "--mem-kind DRAM")
            .only(Nixl, KINDS),
        Case::new("layer-ids", "layers by explicit ids").both("--attn mha --layer-ids force"),
        Case::new("aux-checksum", "one more aux row, of --disaggregation-enable-kv-checksum").both("--aux checksum"),
        Case::new("ucx-tcp", "UCX may use TCP only").both("--env UCX_TLS=tcp,self").only(Nixl, "there is no UCX"),
        Case::new("ipv6", "everything over ::1")
            .both("--bootstrap-host ::1 --host-ip ::1")
            .only(Nixl, "this Mooncake's TCP handshake does not take IPv6, with and without MC_USE_IPV6=1"),
        Case::new("extension-unsent", "the extension is sent to none that is not known to be ours")
            .prefill("--chunk-pages 5")
            .check(Check::PlainFrames),
        Case::new("fewer-pages", "decode announces 8 pages, prefill has 10")
            .prefill("--pages 10")
            .decode("--pages 8")
            .rule_when(When::In(Direction::OURS_OURS), Who::Decode, "", Outcome::Failed(Fail::ANY))
            .note(When::In(Direction::SGLANG_OURS), "SGLang's prefill cuts its pages and reports Success"),
    ]
}
