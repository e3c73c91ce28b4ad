//! The processes of an episode: real shards, each with a clock of its own, and the engine's page pools.

use std::sync::Arc;

use kv_core::directory::PrefillPeers;
use kv_core::memory::MemoryOwner as _;
use kv_core::net::Endpoint;
use kv_core::time::Timestamp;

use super::Sim;
use super::config::PAGE_LEN;
use crate::Rng;
use crate::directory::{Answer, Shape};
use crate::world::{AUX_LEN, DecodeNode, PrefillNode, WorldSpec, process};

/// A clock that is off, and runs fast or slow: local = base + time * num / 1000.
#[derive(Clone, Copy)]
pub(super) struct Skew {
    base: u64,
    num: u64,
}

impl Skew {
    fn draw(rng: &mut Rng, on: bool) -> Self {
        if on { Self { base: rng.below(1 << 50), num: 850 + rng.below(400) } } else { Self { base: 0, num: 1000 } }
    }

    pub(super) fn local(self, now: Timestamp) -> Timestamp {
        Timestamp::from_nanos(self.base + (u128::from(now.as_nanos()) * u128::from(self.num) / 1000) as u64)
    }

    /// The earliest time at which the clock shows `local`.
    pub(super) fn global(self, local: Timestamp) -> Timestamp {
        let passed = u128::from(local.as_nanos().saturating_sub(self.base));
        Timestamp::from_nanos((passed * 1000).div_ceil(u128::from(self.num)) as u64)
    }
}

/// Items an engine gives out.
pub(super) struct Pool {
    free: Vec<i32>,
    total: usize,
}

impl Pool {
    fn new(total: usize) -> Self {
        Self { free: (0..total as i32).collect(), total }
    }

    pub(super) fn available(&self) -> usize {
        self.free.len()
    }

    pub(super) fn all_back(&self) -> bool {
        self.free.len() == self.total
    }

    /// Random ones, or runs of them, so that plans coalesce now and then.
    pub(super) fn take(&mut self, n: usize, rng: &mut Rng) -> Vec<i32> {
        if rng.chance(0.5) {
            self.free.sort_unstable();
        } else {
            rng.shuffle(&mut self.free);
        }
        let at = self.free.len() - n;
        let mut out = self.free.split_off(at);
        if rng.chance(0.3) {
            rng.shuffle(&mut out);
        }
        out
    }

    pub(super) fn give(&mut self, items: &[i32]) {
        for item in items {
            assert!(!self.free.contains(item), "item {item} was given back twice");
        }
        self.free.extend_from_slice(items);
    }
}

/// A prefill rank.
pub(super) struct P {
    pub(super) node: PrefillNode,
    pub(super) name: String,
    /// Unique over all processes of the episode.
    pub(super) process: u64,
    pub(super) engine: usize,
    pub(super) skew: Skew,
    pub(super) pages: Pool,
    pub(super) rows: Pool,
    /// Ops of the transport that were looked at.
    pub(super) seen: usize,
    /// Lives whose sender this process was made to create, and those refused.
    pub(super) created: u64,
    pub(super) generation: u32,
}

/// A decode rank.
pub(super) struct D {
    pub(super) node: DecodeNode,
    pub(super) process: u64,
    pub(super) engine: usize,
    pub(super) rank: u32,
    pub(super) skew: Skew,
    pub(super) pages: Pool,
    pub(super) rows: Pool,
    pub(super) created: u64,
    pub(super) generation: u32,
}

impl P {
    pub(super) fn write_page(&self, page: i32, entry: u32, bytes: &[u8]) {
        self.node.kv.write(entry as usize * self.node.entry_len + page as usize * PAGE_LEN, bytes);
    }

    /// Bytes that belong to no life.
    pub(super) fn destroy(&self, pages: &[i32]) {
        for page in pages {
            (0..self.node.entries).for_each(|entry| self.write_page(*page, entry, &[0xdd; PAGE_LEN]));
        }
    }

    pub(super) fn fill_row(&self, row: i32, bytes: &[u8]) {
        self.node.aux.write(row as usize * AUX_LEN, bytes);
    }
}

impl Sim {
    pub(super) fn prefill_ranks(&self, engine: usize) -> Vec<usize> {
        (0..self.p.len()).filter(|i| self.p[*i].engine == engine).collect()
    }

    pub(super) fn decode_ranks(&self, engine: usize) -> Vec<usize> {
        (0..self.d.len()).filter(|i| self.d[*i].engine == engine).collect()
    }

    /// What decode rank `d` is told about prefill engine `engine`.
    pub(super) fn shape(&self, engine: usize, d: usize) -> Shape {
        let decode_tp = self.episode.decodes[self.d[d].engine].shape.decode_tp;
        Shape { decode_tp, decode_rank: self.d[d].rank, ..self.episode.prefills[engine].shape.clone() }
    }

    pub(super) fn add_prefills(&mut self) {
        for engine in 0..self.episode.prefills.len() {
            let shape = self.episode.prefills[engine].shape.clone();
            for tp in 0..shape.prefill_tp {
                for pp in 0..shape.prefill_pp {
                    for cp in 0..shape.prefill_cp {
                        let p = self.new_prefill(engine, (tp, cp, pp), 0);
                        self.p.push(p);
                    }
                }
            }
        }
    }

    fn new_prefill(&mut self, engine: usize, place: (u32, u32, u32), generation: u32) -> P {
        let spec: WorldSpec = self.episode.prefills[engine].clone();
        let rank = spec.shape.prefill_rank(place.0, place.1, place.2);
        let name = format!("p{engine}-{rank}.{generation}");
        let node = PrefillNode::new(&spec, &self.net, &self.fabric, rank, place, &name);
        node.kv.fill(0, node.entries as usize * node.entry_len, 0);
        self.processes += 1;
        self.set_policy(&node);
        P {
            name,
            process: self.processes,
            engine,
            skew: Skew::draw(&mut self.rng, self.episode.skew),
            pages: Pool::new(spec.pages),
            rows: Pool::new(spec.aux_rows),
            seen: 0,
            created: 0,
            generation,
            node,
        }
    }

    pub(super) fn add_decodes(&mut self) {
        for engine in 0..self.episode.decodes.len() {
            for rank in 0..self.episode.decodes[engine].shape.decode_tp {
                let d = self.new_decode(engine, rank, 0);
                self.d.push(d);
            }
        }
        for d in 0..self.d.len() {
            self.serve(d);
        }
    }

    fn new_decode(&mut self, engine: usize, rank: u32, generation: u32) -> D {
        let spec = self.episode.decodes[engine].clone();
        let name = format!("d{engine}-{rank}.{generation}");
        let port = 7000 + 100 * engine as u16 + rank as u16;
        let node = DecodeNode::at_endpoint(
            &spec,
            &self.clock,
            &self.net,
            &self.fabric,
            rank,
            &name,
            Endpoint::new("10.0.1.1", port),
        );
        node.directory.keep_answers();
        self.processes += 1;
        self.owners.add(
            &name,
            (node.kv.base(), node.kv.len()),
            node.entry_len as u64,
            (node.aux.base(), node.aux.len()),
        );
        D {
            process: self.processes,
            engine,
            rank,
            skew: Skew::draw(&mut self.rng, self.episode.skew),
            pages: Pool::new(spec.pages),
            rows: Pool::new(spec.aux_rows),
            created: 0,
            generation,
            node,
        }
    }

    /// What the directory has about prefill engine `engine`, for decode rank `d`.
    pub(super) fn peers(&self, engine: usize, d: usize) -> Arc<PrefillPeers> {
        let mut peers = self.shape(engine, d).peers();
        if self.episode.prefills[engine].prefill_ext {
            for record in &mut peers.records {
                let p = self.p.iter().find(|p| p.engine == engine && p.node.rank == record.rank);
                record.ext = p.map(|p| process(&p.name));
            }
        }
        Arc::new(peers)
    }

    /// Decode rank `d` finds every prefill engine.
    pub(super) fn serve(&mut self, d: usize) {
        for engine in 0..self.episode.prefills.len() {
            let addr = self.episode.prefills[engine].shape.bootstrap_addr.clone();
            let peers = self.peers(engine, d);
            self.d[d].node.directory.answer(&addr, Answer::Peers(peers));
        }
    }

    /// The process of prefill rank `p` ends; another starts at its address. Heartbeats will tell.
    pub(super) fn restart_prefill(&mut self, p: usize) {
        let (engine, place, generation) = (self.p[p].engine, self.p[p].node.place, self.p[p].generation + 1);
        let name = self.p[p].name.clone();
        self.trace.line(format_args!("{name} dies; its successor starts"));
        self.net.crash(&self.p[p].node.endpoint);
        self.fabric.exit(&name);
        self.told.restarted(&self.p[p].node.endpoint);
        let process = self.p[p].process;
        self.writes.retain(|(owner, _), _| *owner != process);
        self.senders_gone(p);
        self.p[p] = self.new_prefill(engine, place, generation);
        // The registry has its row at once; decode has what it fetched before.
        (0..self.d.len()).for_each(|d| self.serve(d));
    }

    /// The process of decode rank `d` ends; another starts at its address.
    pub(super) fn restart_decode(&mut self, d: usize) {
        let (engine, rank, generation) = (self.d[d].engine, self.d[d].rank, self.d[d].generation + 1);
        let name = self.d[d].node.name.clone();
        self.trace.line(format_args!("{name} dies; its successor starts"));
        self.net.crash(&self.d[d].node.endpoint);
        self.fabric.kill(&name);
        self.owners.forget(&name);
        self.receivers_gone(d);
        self.d[d] = self.new_decode(engine, rank, generation);
        self.serve(d);
        self.writes_to_the_dead(&name);
    }
}
