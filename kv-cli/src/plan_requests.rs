//! Trace + model + pools -> the requests of a run, in waves that fit.
//!
//! Everything here follows from the trace and the pool size alone, so that a prefill and a decode on two machines
//! come to the same requests, rooms and waves without talking to each other.

use std::ops::Range;

use kv_core::Room;
use serde::{Deserialize, Serialize};

use crate::error::{CliError, Result};
use crate::model::ModelSpec;
use crate::pattern::{PageSource, Pattern};
use crate::shape::{Rank, Shape};
use crate::trace::{BLOCK_TOKENS, TraceRequest};

/// Prompt tokens that prefill computes, and sends, at a time.
pub const CHUNK_TOKENS: u32 = 8192;

/// Room of the first request of a run. Below are the rooms of [`gate_room`] and the probe.
pub const FIRST_ROOM: u64 = 1 << 20;

/// Zero-page rooms that measure the fixed overhead of a room before the clock starts.
pub const PROBE_ROOMS: u64 = 33;

/// One request of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedRequest {
    /// Its place in the trace, from 0.
    pub index: usize,
    /// Its room.
    pub room: Room,
    /// Prompt tokens that travel (after the cut).
    pub tokens: u32,
    /// Pages.
    pub pages: u32,
    /// Block ids, the short last one included.
    pub blocks: Vec<u64>,
    /// Prompt tokens before the cut; `None` when nothing was cut.
    pub clamped_from: Option<u32>,
}

impl PlannedRequest {
    /// Ids of the blocks whose every token travels: what a prefix cache may keep.
    pub fn full_blocks(&self) -> &[u64] {
        &self.blocks[..(self.tokens / BLOCK_TOKENS) as usize]
    }

    /// What each page holds, in order. With [`Pattern::Sglang`] the room stands for the request; 0 when `share_src`.
    pub fn sources(&self, pattern: Pattern, page_tokens: u32, share_src: bool) -> Vec<PageSource> {
        (0..self.pages)
            .map(|page| {
                let token = page * page_tokens;
                match pattern {
                    Pattern::Keyed { .. } => PageSource {
                        id: self.blocks[(token / BLOCK_TOKENS) as usize],
                        first_token: token % BLOCK_TOKENS,
                    },
                    Pattern::Sglang => {
                        PageSource { id: if share_src { 0 } else { self.room.get() }, first_token: token }
                    }
                }
            })
            .collect()
    }
}

/// The requests of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// In order of the trace.
    pub requests: Vec<PlannedRequest>,
    /// Requests that run together: their pages fit both pools at once, whatever the caches hold.
    pub waves: Vec<Range<usize>>,
}

impl Plan {
    /// Plan `requests` for pools of `pool_pages` pages; `max_tokens` cuts requests further.
    pub fn new(requests: &[TraceRequest], page_tokens: u32, pool_pages: u32, max_tokens: Option<u32>) -> Result<Self> {
        let limit = u64::from(pool_pages) * u64::from(page_tokens);
        let limit = max_tokens.map_or(limit, |m| limit.min(u64::from(m)));
        if limit == 0 {
            return Err(CliError::new("the pools hold not one page").hint("give a larger --pool-mib"));
        }
        let mut planned = Vec::with_capacity(requests.len());
        for (index, request) in requests.iter().enumerate() {
            let tokens = u32::try_from(u64::from(request.input_tokens).min(limit)).unwrap_or(u32::MAX);
            let room = FIRST_ROOM + index as u64;
            planned.push(PlannedRequest {
                index,
                room: Room::new(room).ok_or_else(|| CliError::new("room 0"))?,
                tokens,
                pages: tokens.div_ceil(page_tokens),
                blocks: request.blocks[..tokens.div_ceil(BLOCK_TOKENS) as usize].to_vec(),
                clamped_from: (tokens < request.input_tokens).then_some(request.input_tokens),
            });
        }
        let mut waves: Vec<Range<usize>> = Vec::new();
        let mut left = 0;
        for (i, request) in planned.iter().enumerate() {
            match waves.last_mut() {
                Some(wave) if request.pages <= left => wave.end = i + 1,
                _ => {
                    waves.push(i..i + 1);
                    left = pool_pages;
                }
            }
            left -= request.pages;
        }
        Ok(Self { requests: planned, waves })
    }

    /// A number that two plans share only when they hold the same requests (FNV-1a over lengths and blocks).
    pub fn digest(&self) -> u64 {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        let mut add = |word: u64| {
            for byte in word.to_le_bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
            }
        };
        for request in &self.requests {
            add(u64::from(request.tokens));
            request.blocks.iter().copied().for_each(&mut add);
        }
        hash
    }

    /// Requests that were cut.
    pub fn clamped(&self) -> usize {
        self.requests.iter().filter(|r| r.clamped_from.is_some()).count()
    }

    /// What to say aloud about the cut; `None` when nothing was cut.
    pub fn clamp_notice(&self, pool_pages: u32, max_tokens: Option<u32>) -> Option<String> {
        let longest = self.requests.iter().filter_map(|r| r.clamped_from).max()?;
        let to = self.requests.iter().filter(|r| r.clamped_from.is_some()).map(|r| r.tokens).max()?;
        // The cut is at the smaller of the two; a cut at --max-tokens was asked for.
        let (cause, advice) = match max_tokens {
            Some(max) if to == max => (format!("--max-tokens {max}"), ""),
            _ => (format!("the {pool_pages} pages of a pool"), "; a larger --pool-mib keeps them whole"),
        };
        Some(format!(
            "clamped: {} of {} requests are longer than {cause} and are cut to {to} tokens (the longest has {longest})\
             {advice}",
            self.clamped(),
            self.requests.len()
        ))
    }
}

/// The room that opens wave `wave`: no pages, so its Success says that prefill has filled the wave's pages.
pub fn gate_room(wave: usize) -> u64 {
    PROBE_ROOMS + 1 + wave as u64
}

/// Pages sent with each chunk.
pub fn chunk_pages(page_tokens: u32) -> u32 {
    (CHUNK_TOKENS / page_tokens.max(1)).max(1)
}

/// Sizes of the chunks that `pages` pages are sent in; one empty chunk when there are none (aux still travels).
pub fn chunks(pages: usize, chunk_pages: u32) -> impl Iterator<Item = Range<usize>> {
    let step = chunk_pages.max(1) as usize;
    let n = pages.div_ceil(step).max(1);
    (0..n).map(move |i| i * step..((i + 1) * step).min(pages))
}

/// Memory for the pools of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Budget {
    /// Pages in the pool of each rank of each side.
    pub pool_pages: u32,
    /// Bytes of one page over all ranks of one side.
    pub page_bytes: u64,
    /// Bytes of one side's pools together.
    pub side_bytes: u64,
}

/// Pools take at most this part of the free memory, both sides together.
const SHARE_OF_FREE: f64 = 0.55;
/// Largest pool of one side that is taken unasked: filling more only makes a run longer.
const MAX_SIDE_BYTES: u64 = 3 << 30;

/// Bytes of one page over all ranks of a side.
pub fn side_page_bytes(model: &ModelSpec, shape: Shape) -> Result<u64> {
    shape.all_ranks().into_iter().map(|rank: Rank| Ok(model.rank_geometry(shape, rank)?.page_bytes())).sum()
}

impl Budget {
    /// Size pools. `pool_mib` is what one side may have; without it a share of the free memory. `sides` of the run are
    /// on this machine.
    pub fn new(model: &ModelSpec, shape: Shape, free: u64, pool_mib: Option<u64>, sides: u32) -> Result<Self> {
        let page_bytes = side_page_bytes(model, shape)?;
        let may = (free as f64 * SHARE_OF_FREE) as u64 / u64::from(sides.max(1));
        let side = match pool_mib {
            Some(mib) => mib.saturating_mul(1 << 20),
            None => may.min(MAX_SIDE_BYTES),
        };
        if side.saturating_mul(u64::from(sides)) > free {
            return Err(CliError::new(format!(
                "pools of {} MiB for each of {sides} sides do not fit the {} MiB that are free",
                side >> 20,
                free >> 20
            ))
            .hint("use a smaller --pool-mib or a machine with more memory"));
        }
        let pool_pages = u32::try_from(side / page_bytes).unwrap_or(i32::MAX as u32).min(i32::MAX as u32);
        if pool_pages == 0 {
            return Err(CliError::new(format!(
                "a pool of {} MiB does not hold one page of {} ({page_bytes} bytes)",
                side >> 20,
                model.name
            ))
            .hint(match pool_mib {
                Some(_) => format!("give --pool-mib {} or more, or a smaller model", page_bytes.div_ceil(1 << 20)),
                None => "use a smaller model or a machine with more memory".into(),
            }));
        }
        Ok(Self { pool_pages, page_bytes, side_bytes: u64::from(pool_pages) * page_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::TraceSource;
    use proptest::prelude::*;

    fn request(tokens: u32) -> TraceRequest {
        let blocks = (0..u64::from(tokens.div_ceil(BLOCK_TOKENS))).collect();
        TraceRequest { timestamp_ms: 0, input_tokens: tokens, output_tokens: 1, blocks }
    }

    #[test]
    fn tokens_become_pages_and_long_requests_are_cut_aloud() {
        let plan = Plan::new(&[request(65), request(121_298)], 64, 100, None).unwrap();
        assert_eq!((plan.requests[0].pages, plan.requests[0].clamped_from), (2, None));
        let long = &plan.requests[1];
        assert_eq!((long.tokens, long.pages, long.clamped_from), (6400, 100, Some(121_298)));
        assert_eq!((long.blocks.len(), long.full_blocks().len()), (13, 12));
        assert_eq!(plan.waves, vec![0..1, 1..2]);
        let notice = plan.clamp_notice(100, None).unwrap();
        assert!(notice.contains("1 of 2 requests") && notice.contains("cut to 6400 tokens"), "{notice}");
        assert!(notice.contains("100 pages of a pool") && notice.contains("--pool-mib"), "{notice}");
        // What --max-tokens cut, no pool keeps whole.
        let plan = Plan::new(&[request(65), request(121_298)], 64, 100, Some(640)).unwrap();
        let notice = plan.clamp_notice(100, Some(640)).unwrap();
        assert!(notice.contains("longer than --max-tokens 640") && !notice.contains("pool"), "{notice}");
        assert_eq!(Plan::new(&[request(65)], 64, 100, None).unwrap().clamp_notice(100, None), None);
        assert!(Plan::new(&[request(65)], 64, 0, None).is_err());
    }

    #[test]
    fn sources_name_the_block_and_the_token_in_it() {
        let plan = Plan::new(&[request(600)], 64, 100, None).unwrap();
        let sources = plan.requests[0].sources(Pattern::Keyed { seed: 0 }, 64, false);
        assert_eq!(sources.len(), 10);
        assert_eq!(sources[7], PageSource { id: 0, first_token: 448 });
        assert_eq!(sources[9], PageSource { id: 1, first_token: 64 });
        let sources = plan.requests[0].sources(Pattern::Sglang, 64, false);
        assert_eq!(sources[9], PageSource { id: FIRST_ROOM, first_token: 576 });
        assert_eq!(plan.requests[0].sources(Pattern::Sglang, 64, true)[9].id, 0);
    }

    #[test]
    fn chunks_cover_all_pages_and_an_empty_request_is_one_chunk() {
        assert_eq!(chunk_pages(64), 128);
        assert_eq!(chunks(300, 128).collect::<Vec<_>>(), vec![0..128, 128..256, 256..300]);
        assert_eq!(chunks(128, 128).collect::<Vec<_>>(), vec![0..128]);
        assert_eq!(chunks(0, 128).collect::<Vec<_>>(), vec![0..0]);
    }

    #[test]
    fn budget_follows_the_machine_and_refuses_what_does_not_fit() {
        let model = ModelSpec::preset("Qwen3-0.6B").unwrap();
        let eight_gib = Budget::new(&model, Shape::default(), 7 << 30, None, 2).unwrap();
        assert!(eight_gib.side_bytes * 2 < 4 << 30, "{eight_gib:?}");
        assert!(eight_gib.pool_pages >= 200, "{eight_gib:?}");
        // Ranks share the side's memory: the same pages, whatever the shape.
        let tp2 = Shape { tp: 2, ..Shape::default() };
        assert_eq!(Budget::new(&model, tp2, 7 << 30, None, 2).unwrap().pool_pages, eight_gib.pool_pages);
        let e = Budget::new(&model, Shape::default(), 1 << 30, Some(1000), 2).unwrap_err().one_line();
        assert!(e.contains("1000 MiB for each of 2 sides do not fit the 1024 MiB"), "{e}");
        let e = Budget::new(&model, Shape::default(), 1 << 30, Some(1), 2).unwrap_err().one_line();
        assert!(e.contains("does not hold one page") && e.contains("give --pool-mib 7 or more"), "{e}");
    }

    #[test]
    fn rooms_of_gates_probes_and_requests_do_not_meet() {
        assert!(gate_room(0) > PROBE_ROOMS);
        assert!(gate_room(500_000) < FIRST_ROOM);
    }

    proptest! {
        #[test]
        fn every_wave_fits_and_none_is_left_out(lens in prop::collection::vec(1u32..20_000, 1..40), pool in 1u32..200) {
            let requests: Vec<_> = lens.iter().map(|n| request(*n)).collect();
            let plan = Plan::new(&requests, 64, pool, None).unwrap();
            let mut next = 0;
            for wave in &plan.waves {
                prop_assert_eq!(wave.start, next);
                next = wave.end;
                prop_assert!(plan.requests[wave.clone()].iter().map(|r| r.pages).sum::<u32>() <= pool);
            }
            prop_assert_eq!(next, requests.len());
        }
    }

    #[test]
    fn the_built_in_trace_fits_a_machine_of_8_gib() {
        let model = ModelSpec::preset("Qwen3-0.6B").unwrap();
        let budget = Budget::new(&model, Shape::default(), 7 << 30, None, 2).unwrap();
        let requests = TraceSource::open(None).unwrap().first(500).unwrap();
        let plan = Plan::new(&requests, 64, budget.pool_pages, None).unwrap();
        assert_eq!(plan.requests.len(), 500);
        assert!(plan.clamped() > 0 && plan.clamped() < 250);
    }
}
