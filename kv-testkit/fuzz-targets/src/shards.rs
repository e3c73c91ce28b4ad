//! Scripts of engine calls, faults and time, played to real shards on a simulated network and a fake transport.
//!
//! What must hold at every rest: a terminal state stays; freed pages are not taken back; a source that was given back is
//! read no more (it is overwritten at once), a destination that was given back by proof is written no more (it is put
//! under guard at once); every write that is not proven quiet is held by its shard; Success means the right bytes. In
//! the end, when all is settled and cleared, nothing is held.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_core::engine::{ChunkExtras, RoomShared};
use kv_core::event::{SourceEvent, WaitEvent};
use kv_core::net::Endpoint;
use kv_core::poll::KvPoll;
use kv_core::room::{FailedStatusPolicy, ReleasePolicy};
use kv_core::transport::TransportErrorKind;
use kv_testkit::directory::Shape;
use kv_testkit::fake_transport::{OpInfo, Policy, Verdict};
use kv_testkit::net::{Action, Flight, RuleId};
use kv_testkit::{World, WorldSpec};

use crate::input::Input;

const PAGES: usize = 64;
const PAGE_LEN: usize = 16;
/// Pages of one request.
const REQUEST: usize = 2;
/// Requests of one script: each has pages of its own.
const MAX_LIVES: usize = PAGES / REQUEST;
/// Steps of one script.
const MAX_STEPS: usize = 96;

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// One room on one rank.
struct Life {
    number: u64,
    node: usize,
    shared: Arc<RoomShared>,
    pages: [i32; REQUEST],
    sent: usize,
    seen: KvPoll,
    was_releasable: bool,
}

struct Sim {
    w: World,
    p: Vec<Life>,
    d: Vec<Life>,
    events: Vec<SourceEvent>,
    rules: Vec<RuleId>,
    /// By room number: what its source pages held, entry by entry.
    sent: BTreeMap<u64, Vec<Vec<u8>>>,
    opened: usize,
    restarts: usize,
    /// A room number was used again on prefill while decode still held its old life: bytes of either may arrive.
    mixed: bool,
    /// Messages were made up: their receivers are free to believe them.
    forged: bool,
    /// Proof was withheld for good: something stays held, and rightly so.
    stuck: bool,
    /// A message or a process was lost: a decode that waits for proof may wait for ever.
    lossy: bool,
    proof: bool,
    /// Releases by time so far, over all decodes that live.
    without_proof: u64,
}

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let mut sim = Sim::new(&mut input);
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        sim.act(&mut input);
        if input.u8() & 7 != 7 {
            sim.rest();
        }
    }
    sim.end();
}

impl Sim {
    fn new(i: &mut Input<'_>) -> Self {
        let kind = i.u8();
        let (shape, decodes) = match kind & 7 {
            0..=3 => (Shape::default(), 1),
            4 => (Shape { prefill_tp: 2, mla: true, ..Shape::default() }, 1),
            5 => (Shape { decode_tp: 2, mla: true, ..Shape::default() }, 2),
            6 => (Shape { prefill_pp: 2, ..Shape::default() }, 1),
            _ => (Shape { prefill_tp: 2, decode_tp: 2, ..Shape::default() }, 2),
        };
        let proof = kind & 16 != 0;
        let mut spec = WorldSpec {
            pages: PAGES,
            page_len: PAGE_LEN,
            failed_status: if kind & 8 != 0 { FailedStatusPolicy::WhenSettled } else { FailedStatusPolicy::AtOnce },
            release: if proof { ReleasePolicy::Proof } else { ReleasePolicy::AckOrTimeout(secs(30)) },
            ..WorldSpec::of(shape, decodes)
        };
        if kind & 128 != 0 {
            // One side or both are as 0.5.23.
            spec.prefill_ext = kind & 3 == 1;
            spec.decode_ext = kind & 3 == 2;
        }
        if kind & 32 != 0 {
            spec.limits.max_ops_in_flight = 1;
            spec.limits.max_early_rooms = 1;
            spec.limits.max_chunks_per_room = 2;
        }
        let w = World::new(spec);
        for node in &w.p {
            node.transport.set_policy(if kind & 64 != 0 { Policy::seeded(kind.into()) } else { Policy::Hold });
        }
        Self {
            w,
            p: Vec::new(),
            d: Vec::new(),
            events: Vec::new(),
            rules: Vec::new(),
            sent: BTreeMap::new(),
            opened: 0,
            restarts: 0,
            mixed: false,
            forged: false,
            stuck: false,
            lossy: false,
            proof,
            without_proof: 0,
        }
    }

    fn act(&mut self, i: &mut Input<'_>) {
        match i.below(28) {
            0 | 1 => self.open(i),
            2 | 3 => self.send(i),
            4 | 5 => {
                if let Some((n, life)) = pick(&self.d, i) {
                    let slot = 1 + (n % 4) as u32;
                    self.w.publish(life.node, &life.shared, &life.pages, slot);
                }
            }
            6 => pick(&self.p, i).into_iter().for_each(|(_, l)| self.w.abort_p(l.node, &l.shared)),
            7 => pick(&self.d, i).into_iter().for_each(|(_, l)| self.w.abort_d(l.node, &l.shared)),
            8 => pick(&self.p, i).into_iter().for_each(|(_, l)| self.w.clear_p(l.node, &l.shared)),
            9 => pick(&self.d, i).into_iter().for_each(|(_, l)| self.w.clear_d(l.node, &l.shared)),
            10..=12 => self.end_op(i),
            13 => self.settle_op(i),
            14 => {
                self.w.p.iter().for_each(|n| {
                    n.transport.complete_all();
                });
            }
            15 | 16 => self.network(i),
            17 => self.w.net.release_all(),
            18 => self.forge(i),
            19 => self.w.advance(secs(i.u8().into())),
            20 => self.w.jump(secs(u64::from(i.u8()) * 4)),
            21 => {
                let (node, stopped) = (i.below(self.w.p.len() + self.w.d.len()), i.flag());
                match node.checked_sub(self.w.p.len()) {
                    None => self.w.p[node].stopped = stopped,
                    Some(d) => self.w.d[d].stopped = stopped,
                }
            }
            22 => {
                let p = i.below(self.w.p.len());
                match i.below(4) {
                    0 => self.w.p[p].connector.hold(true),
                    1 => self.w.p[p].connector.hold(false),
                    _ => self.w.p[p].transport.fail_connect(TransportErrorKind::BadPeer, "not now"),
                }
            }
            23 => self.restart(i),
            24 => self.lose(i),
            25 => {
                let p = i.below(self.w.p.len());
                let verdict = i.pick(&[
                    Verdict::Busy,
                    Verdict::Reject(TransportErrorKind::Refused),
                    Verdict::Complete,
                    Verdict::AfterPolls(3),
                    Verdict::Unresolve,
                    Verdict::Fail { src_quiet: true, dst_quiet: true },
                ]);
                self.w.p[p].transport.script_next(verdict);
            }
            26 => {
                if let Some(event) = self.events.pop() {
                    event.signal(if i.below(4) == 3 { Err("the event failed".into()) } else { Ok(()) });
                }
            }
            _ => {
                let d = i.below(self.w.d.len());
                self.w.d[d].directory.node_lost(&self.w.spec.shape.bootstrap_addr);
            }
        }
    }

    /// A request on every rank of the sides that `kind` names.
    fn open(&mut self, i: &mut Input<'_>) {
        if self.opened == MAX_LIVES {
            return;
        }
        let kind = i.u8();
        let mut number = if kind & 4 != 0 { self.free_number() } else { None }.unwrap_or(100 + self.opened as u64);
        if kind & 19 == 18 && !self.p.is_empty() {
            number = self.p[i.below(self.p.len())].number;
            self.mixed = true;
        }
        let first = (self.opened * REQUEST) as i32;
        let pages = [first, first + 1];
        self.opened += 1;
        let life = |node, shared: Arc<RoomShared>| Life {
            number,
            node,
            seen: shared.poll(),
            shared,
            pages,
            sent: 0,
            was_releasable: false,
        };
        if kind & 3 != 1 {
            for node in 0..self.w.p.len() {
                let shared = self.w.sender(node, number);
                self.p.push(life(node, shared));
            }
            let node = &self.w.p[0];
            let held = (0..node.entries).flat_map(|e| pages.map(|page| node.page(e, page))).collect();
            self.sent.insert(number, held);
        }
        if kind & 3 != 2 {
            for node in 0..self.w.d.len() {
                let shared = self.w.receiver(node, number);
                self.d.push(life(node, shared));
            }
        }
        // Mostly a request goes on at once.
        if kind & 8 != 0 {
            self.w.run();
            for life in self.d.iter().filter(|l| l.number == number) {
                self.w.publish(life.node, &life.shared, &life.pages, 1);
            }
        }
    }

    /// A room number whose every life is over on every rank, with no message on its way.
    fn free_number(&self) -> Option<u64> {
        let quiet =
            self.w.net.in_flight().is_empty() && self.w.p.iter().all(|n| n.shard.held().early == 0 && !n.stopped);
        if !quiet || self.forged || self.restarts > 0 {
            return None;
        }
        let p_over = |l: &&Life| {
            let freed = self.w.p[l.node].freed.lock().expect("not poisoned");
            freed.iter().any(|(_, life)| *life == l.shared.life())
        };
        let d_over = |l: &&Life| {
            let freed = self.w.d[l.node].freed.lock().expect("not poisoned");
            freed.iter().any(|(_, life)| *life == l.shared.life())
        };
        let over = |number: u64| {
            self.p.iter().filter(|l| l.number == number).all(|l| p_over(&l))
                && self.d.iter().filter(|l| l.number == number).all(|l| d_over(&l))
        };
        let mut numbers: Vec<u64> = self.p.iter().chain(&self.d).map(|l| l.number).collect();
        numbers.dedup();
        numbers.into_iter().find(|n| over(*n))
    }

    /// The next pages of a request, all at once or one by one.
    fn send(&mut self, i: &mut Input<'_>) {
        let Some((n, _)) = pick(&self.p, i) else { return };
        let life = &mut self.p[n];
        let kind = i.u8();
        let left = REQUEST - life.sent;
        let count = if kind & 1 != 0 { left.min(1) } else { left };
        let pages = &life.pages[life.sent..life.sent + count];
        let event = (kind & 14 == 14).then(SourceEvent::new);
        self.events.extend(event.clone());
        let extras = ChunkExtras { wait_event: event.map(|e| Arc::new(e) as Arc<dyn WaitEvent>), trace: None };
        let start = life.sent as u32;
        life.sent += count;
        let is_last = life.sent == REQUEST;
        self.w.send_chunk(life.node, &life.shared, pages, start, is_last, extras);
    }

    fn op(&self, i: &mut Input<'_>, of: impl Fn(&OpInfo) -> bool) -> Option<(usize, OpInfo)> {
        let p = i.below(self.w.p.len());
        let ops: Vec<_> = self.w.p[p].transport.not_quiet().into_iter().filter(of).collect();
        let at = i.below(ops.len());
        ops.into_iter().nth(at).map(|op| (p, op))
    }

    fn end_op(&mut self, i: &mut Input<'_>) {
        let Some((p, op)) = self.op(i, |o| o.outcome.is_none()) else { return };
        let transport = &self.w.p[p].transport;
        match i.below(8) {
            0 => transport.unresolve(op.id),
            1 => transport.fail(op.id, true, true),
            2 => transport.fail(op.id, true, false),
            3 => transport.fail(op.id, false, true),
            4 => transport.land(op.id),
            5 => transport.land_spans(op.id, 0..1),
            _ => transport.complete(op.id),
        }
    }

    fn settle_op(&mut self, i: &mut Input<'_>) {
        let Some((p, op)) = self.op(i, |o| o.outcome.is_some() && o.settlement.is_none()) else { return };
        let transport = &self.w.p[p].transport;
        match i.below(8) {
            0 if !op.dst_quiet => transport.land(op.id),
            1 => {
                transport.settle(op.id, true, false);
                self.stuck |= !op.dst_quiet;
            }
            2 => {
                transport.settle(op.id, false, true);
                self.stuck |= !op.src_quiet;
            }
            3 => transport.peer_generation_dead(op.id),
            _ => transport.settle(op.id, true, true),
        }
    }

    /// What becomes of the next messages.
    fn network(&mut self, i: &mut Input<'_>) {
        let n = u64::from(i.u8());
        let action = match i.below(8) {
            0 => Action::Drop,
            1 => Action::Delay(secs(n)),
            2 => Action::Duplicate(1),
            3 => Action::Overtaken(secs(n)),
            4 | 5 => Action::Hold,
            6 => Action::Stall,
            _ => Action::Unreachable,
        };
        self.lossy |= matches!(action, Action::Drop | Action::Stall | Action::Unreachable);
        let tag: Option<&[u8]> = i.pick(&[None, Some(b"KV_STATUS"), Some(b"ABORT"), Some(b"ABORT_ACK")]);
        let matches = move |f: &Flight| tag.is_none_or(|t| f.frames.first().is_some_and(|x| x.as_ref() == t));
        self.rules.push(self.w.net.rule_times(1 + i.below(3) as u32, action, matches));
    }

    fn nodes(&self) -> Vec<Endpoint> {
        let p = self.w.p.iter().map(|n| n.endpoint.clone());
        p.chain(self.w.d.iter().map(|n| n.endpoint.clone())).collect()
    }

    /// A message from nowhere: one that is on its way, damaged, or any frames.
    fn forge(&mut self, i: &mut Input<'_>) {
        let to = self.nodes()[i.below(self.nodes().len())].clone();
        let flights = self.w.net.in_flight();
        let mut frames: Vec<Bytes> = match i.below(3) {
            0 if !flights.is_empty() => flights[i.below(flights.len())].frames.to_vec(),
            1 => {
                let word = |n: usize| Bytes::copy_from_slice(crate::wire::WORDS[n % crate::wire::WORDS.len()]);
                (0..i.below(24)).map(|_| word(i.u8().into())).collect()
            }
            _ => {
                let room = Bytes::from((100 + i.below(4)).to_string());
                let number = |i: &mut Input<'_>| Bytes::from(i.number().to_string());
                match i.below(4) {
                    0 => vec!["KV_STATUS".into(), room, number(i), number(i), "why".into()],
                    1 => vec!["ABORT".into(), room, "10.0.1.1".into(), "7000".into(), number(i)],
                    2 => vec!["ABORT_ACK".into(), room, number(i), number(i)],
                    _ => vec!["ABORT".into(), room],
                }
            }
        };
        if i.flag() && !frames.is_empty() {
            let at = i.below(frames.len());
            let mut bytes = frames[at].to_vec();
            let place = i.below(bytes.len());
            if let Some(byte) = bytes.get_mut(place) {
                *byte ^= i.u8();
            }
            frames[at] = bytes.into();
            frames.truncate(1 + i.below(frames.len() + 4));
        }
        self.forged = true;
        self.w.net.inject(&to, frames);
    }

    /// Another process at a rank's address.
    fn restart(&mut self, i: &mut Input<'_>) {
        if self.restarts == 3 {
            return;
        }
        self.restarts += 1;
        let d = i.below(self.w.d.len() + self.w.p.len());
        if let Some(p) = d.checked_sub(self.w.d.len()) {
            // A process that ends over its writes ends them, which the fabric takes for a lane that was dropped.
            if !self.w.p[p].transport.not_quiet().is_empty() {
                return;
            }
            self.lossy = true;
            self.w.restart_prefill(p, &format!("prefill-{p}-{}", self.restarts));
            self.p.retain(|life| life.node != p);
            return;
        }
        let name = format!("decode-{d}-{}", self.restarts);
        self.lossy = true;
        self.w.restart_decode(d, &name);
        // Its rooms are gone with it.
        self.d.retain(|life| life.node != d);
    }

    /// A connection breaks.
    fn lose(&mut self, i: &mut Input<'_>) {
        let (p, d) = (i.below(self.w.p.len()), i.below(self.w.d.len()));
        self.lossy = true;
        match i.below(4) {
            0 => {
                let peers = self.w.p[p].transport.connected();
                if let Some((peer, _)) = peers.get(i.below(peers.len())) {
                    self.w.p[p].transport.lose_peer(*peer);
                }
            }
            1 => self.w.net.lose_peer(&self.w.p[p].endpoint, &self.w.d[d].endpoint, "broken"),
            2 => self.w.net.lose_peer(&self.w.d[d].endpoint, &self.w.p[p].endpoint, "broken"),
            _ => self.w.fabric.cut(&self.w.d[d].name),
        }
    }

    /// Run until nothing moves, then look at everything.
    fn rest(&mut self) {
        self.w.run();
        let without_proof = self.w.d.iter().map(|n| n.stats.released_without_proof.get()).sum();
        let proven = without_proof == std::mem::replace(&mut self.without_proof, without_proof);
        for life in &mut self.p {
            if life.news() {
                // The engine takes its pages back at once.
                let node = &self.w.p[life.node];
                for entry in 0..node.entries as usize {
                    let at = (entry * PAGES + life.pages[0] as usize) * PAGE_LEN;
                    node.kv.fill(at, REQUEST * PAGE_LEN, 0xee);
                }
            }
        }
        for life in &mut self.d {
            let succeeded = life.seen != KvPoll::Success && life.shared.poll() == KvPoll::Success;
            if succeeded && !self.forged && !self.mixed && self.w.p.len() == 1 {
                let node = &self.w.d[life.node];
                let held: Vec<_> = (0..node.entries).flat_map(|e| life.pages.map(|page| node.page(e, page))).collect();
                assert_eq!(Some(&held), self.sent.get(&life.number), "Success over other bytes: room {}", life.number);
            }
            if life.news() && proven && !self.forged {
                self.w.d[life.node].guard_pages(&self.w.fabric, &life.pages, "these pages were given back by proof");
            }
        }
        for node in self.w.p.iter().filter(|n| !n.stopped) {
            let (held, unquiet) = (node.shard.held().ops, node.transport.not_quiet().len());
            assert_eq!(held, unquiet, "prefill rank {}: writes held, and writes that are not quiet", node.rank);
        }
        self.w.fabric.assert_no_premature_release();
    }

    /// Everything is made good, settled and cleared: nothing may be left.
    fn end(mut self) {
        self.rules.iter().for_each(|rule| self.w.net.remove_rule(*rule));
        self.w.p.iter_mut().for_each(|n| n.stopped = false);
        self.w.d.iter_mut().for_each(|n| n.stopped = false);
        self.w.p.iter().for_each(|n| n.connector.hold(false));
        self.w.net.release_all();
        self.events.iter().for_each(|e| e.signal(Ok(())));
        self.settle_all();
        for life in &self.p {
            self.w.clear_p(life.node, &life.shared);
        }
        for life in &self.d {
            self.w.clear_d(life.node, &life.shared);
        }
        self.settle_all();
        // Delayed messages, then what they left behind.
        for _ in 0..2 {
            self.w.advance(secs(1300));
            self.settle_all();
        }
        if self.stuck {
            self.w.abandon();
            return;
        }
        if self.proof && (self.lossy || self.forged) {
            let (p, _) = self.w.held();
            assert!(p.iter().all(|held| held.ops == 0 && held.rooms == 0), "{p:?}");
        } else {
            self.w.assert_nothing_held();
            for life in self.p.iter().chain(&self.d) {
                assert!(life.shared.poll().is_terminal() && life.shared.releasable(), "room {}", life.number);
            }
        }
    }

    fn settle_all(&mut self) {
        for _ in 0..64 {
            self.rest();
            let mut moved = false;
            for node in &self.w.p {
                for op in node.transport.not_quiet() {
                    match (&op.outcome, op.settlement) {
                        (None, _) => node.transport.complete(op.id),
                        (Some(_), None) => node.transport.settle(op.id, true, true),
                        _ => continue,
                    }
                    moved = true;
                }
            }
            if !moved {
                return;
            }
        }
        panic!("writes without end: {:?}", self.w.held());
    }
}

fn pick<'a>(of: &'a [Life], i: &mut Input<'_>) -> Option<(usize, &'a Life)> {
    // The latest first.
    let n = of.len().checked_sub(1 + i.below(of.len()))?;
    Some((n, &of[n]))
}

impl Life {
    /// True once: when its pages have become free.
    fn news(&mut self) -> bool {
        let (poll, releasable) = (self.shared.poll(), self.shared.releasable());
        assert!(!self.seen.is_terminal() || poll == self.seen, "room {}: {:?} -> {poll:?}", self.number, self.seen);
        assert_eq!(self.shared.failure().is_some(), poll == KvPoll::Failed);
        assert!(releasable || !self.was_releasable, "room {}: pages were taken back", self.number);
        assert!(!releasable || poll.is_terminal());
        let news = releasable && !self.was_releasable;
        (self.seen, self.was_releasable) = (poll, releasable);
        news
    }
}

/// Requests that go well, are aborted over a write, restarted, reused; each in several worlds.
pub fn seeds() -> Vec<Vec<u8>> {
    // Each step ends with a byte that says whether to run.
    let (open, send, send_one) = ([0, 8, 0], [2, 0, 0, 0], [2, 0, 1, 0]);
    let done = [14, 0];
    let (clear_p, clear_d) = ([8, 0, 0], [9, 0, 0]);
    let (abort_p, abort_d) = ([6, 0, 0], [7, 0, 0]);
    let unresolve = [10, 0, 0, 0, 0];
    let settle = [13, 0, 0, 4, 0];
    let scripts: [&[&[u8]]; 16] = [
        &[&open, &send, &done, &clear_p, &clear_d],
        &[&open, &send_one, &done, &send_one, &done, &clear_p, &clear_d, &[0, 12, 0], &send, &done],
        &[&open, &send, &abort_d, &done],
        &[&open, &send, &unresolve, &clear_p, &[19, 31, 0], &settle],
        &[&open, &send, &unresolve, &abort_d, &[13, 0, 0, 1, 0], &clear_d],
        &[&open, &send, &[23, 0, 1, 0], &open, &send, &done],
        &[&open, &send, &done, &[23, 1, 0], &open, &send, &done],
        &[&open, &send, &[24, 0, 0, 0, 0, 0], &done, &abort_p],
        &[&[15, 9, 4, 0, 0, 0], &open, &send, &[17, 0], &done],
        &[&open, &[2, 0, 14, 0], &[26, 0, 0], &done, &clear_p],
        &[&open, &send, &[18, 0, 2, 0, 1, 4, 0, 0], &done],
        &[&[25, 0, 4, 0], &open, &send, &[20, 80, 0], &settle],
        &[&open, &send, &abort_d, &clear_p, &done],
        &[&open, &send, &unresolve, &clear_p, &[0, 18, 0, 0], &[7, 0, 0], &settle],
        &[&[15, 0, 4, 2, 0, 0], &open, &send, &clear_p, &[0, 18, 0, 0], &[17, 0], &done],
        &[&open, &open, &send, &send_one, &abort_p, &abort_d, &done, &[27, 0, 0]],
    ];
    (0u8..)
        .zip(scripts)
        .flat_map(|(n, s)| [n % 8, 8 | 16 | (n % 8), 64 | 32, 128 | (n % 4)].map(|k| [&[k][..], &s.concat()].concat()))
        .collect()
}
