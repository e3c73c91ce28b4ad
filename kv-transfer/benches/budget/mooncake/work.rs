//! What is written: rooms of a model's shape, or so many pieces of one length that do not lie back to back.

use kv_transfer::RegionId;
use kv_transfer::plan::{EntryPair, PlanGroup, Run, WritePlan};
use serde_json::{Value, json};

use crate::Result;
use crate::bulk::same_plan;
use crate::child::number;
use crate::pair::Geometry;
use crate::stats::shuffled_pages;

/// Rooms until the pools come round again.
const POOL: u64 = 4;

/// One contiguous copy: addresses here and there, bytes.
#[derive(Clone, Copy)]
pub struct Piece {
    pub from: u64,
    pub to: u64,
    pub len: u64,
}

/// Pools of both sides.
#[derive(Clone, Copy)]
pub struct Shape {
    pub pool: Geometry,
}

impl Shape {
    /// Pools for rooms of this shape.
    pub fn new(layers: u64, room_pages: u64, page: u64) -> Self {
        Self { pool: Geometry { layers, pages: POOL * room_pages, page } }
    }

    pub fn to_json(self) -> Value {
        let g = self.pool;
        json!({ "layers": g.layers, "pages": g.pages, "page": g.page })
    }

    pub fn from_json(v: &Value) -> Result<Self> {
        let pool = Geometry { layers: number(v, "layers")?, pages: number(v, "pages")?, page: number(v, "page")? };
        Ok(Self { pool })
    }

    /// Bytes of a room, without its metadata row.
    pub fn room_bytes(self) -> u64 {
        self.pool.layers * self.pool.pages / POOL * self.pool.page
    }

    /// Source and destination pages of the room of this number: slices of two shuffles.
    pub fn pages(self, number: u64) -> [Vec<i32>; 2] {
        let n = (self.pool.pages / POOL) as usize;
        let at = (number % POOL) as usize * n;
        [21, 22].map(|seed| shuffled_pages(self.pool.pages as usize, seed)[at..at + n].to_vec())
    }

    /// The ops of a request, for a peer whose pool is at `base`: `rooms`, or `pieces` of `len` bytes, `count` times.
    pub fn plans(self, request: &Value, region: RegionId, base: u64) -> Result<Vec<WritePlan>> {
        let count = number(request, "count")?;
        if request.get("pieces").is_none() {
            let plan = |n| {
                let [src, dst] = self.pages(n);
                same_plan(region, (&self.pool, &self.pool), base, (&src, &dst), n)
            };
            return (1..=count).map(plan).collect();
        }
        let (pieces, len) = (number(request, "pieces")?, number(request, "len")?);
        let entry = EntryPair {
            src_entry: 0,
            dst_entry: 0,
            src_region: region,
            src_offset: 0,
            dst_addr: base,
            item_len: len,
            src_stride: len,
            dst_stride: if pieces > 1 { 2 * len } else { len },
            dst_kind: Default::default(),
        };
        let run = Run { src: 0, dst: 0, count: pieces as u32 };
        Ok(vec![WritePlan::new([PlanGroup { entries: [entry].into(), runs: [run].into() }]); count as usize])
    }
}

/// The pieces of a plan, whose source is at `base`.
pub fn pieces(plan: &WritePlan, base: u64) -> Vec<Piece> {
    let mut out = Vec::new();
    plan.for_each_span(|s| out.push(Piece { from: base + s.src_offset, to: s.dst_addr, len: s.len }));
    out
}
