//! What befalls the fleet: partitions, broken connections, stopped and dying processes, a directory that errs, a lane
//! that is full, frames of strangers. Each ends by itself, or at the latest when faults end.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kv_core::net::Endpoint;
use kv_core::transport::TransportErrorKind;

use super::config::Rates;
use super::{Ev, Sim};
use crate::directory::Answer;
use crate::net::{Action, Faults, Flight};

const MS: u64 = 1_000_000;

/// Rates that can be turned off while closures hold them.
#[derive(Clone, Default)]
pub(super) struct SharedRates(Arc<Mutex<Rates>>);

impl SharedRates {
    pub(super) fn get(&self) -> Rates {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, rates: Rates) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = rates;
    }
}

/// What a fault's end puts right.
#[derive(Clone, Debug)]
pub(super) enum Undo {
    Heal(Endpoint, Endpoint),
    GoOn(bool, usize),
    Directory(usize),
    Capacity,
    Lane(usize),
    Connector(usize),
    NodeLost(String),
}

impl Sim {
    /// Losses, duplicates, reordering of messages.
    pub(super) fn message_rules(&mut self) {
        self.net.set_faults(Faults { delay: self.episode.latency.clone(), ..Faults::default() });
        let to_decode = |f: &Flight| f.to.host() == "10.0.1.1";
        let (rates, mut rng, trace, limits) =
            (self.rates.clone(), self.rng.fork(), self.trace.clone(), self.limits.clone());
        let (hooks, told) = (self.episode.prefills[0].hooks.clone(), self.told.clone());
        self.net.rule(Action::Drop, move |f| {
            let text = super::print::message(hooks.dialect(), &f.frames, &limits, to_decode(f));
            // A registration is lost with its connection only: decode hears of that, and registers again.
            let lost = rng.chance(rates.get().loss) && !text.starts_with("registration");
            let from = f.from.as_ref().map_or_else(|| "stranger".into(), Endpoint::to_string);
            trace.message();
            if let Some(from) = f.from.as_ref().filter(|_| to_decode(f)) {
                told.add(hooks.dialect(), from, &f.to, &f.frames, &limits);
            }
            trace.line(format_args!("{from} -> {}  {text}{}", f.to, if lost { "  LOST" } else { "" }));
            lost
        });
        let (rates, mut rng) = (self.rates.clone(), self.rng.fork());
        self.net.rule(Action::Duplicate(1), move |_| rng.chance(rates.get().duplicate));
        // Towards prefill the order of a connection holds, as it does in TCP, unless every message names its life;
        // statuses and ACKs may come in any order.
        let any_order = self.episode.all_ours;
        for late in [300, 3_000, 30_000] {
            let (rates, mut rng) = (self.rates.clone(), self.rng.fork());
            self.net.rule(Action::Overtaken(Duration::from_micros(late)), move |f| {
                (any_order || to_decode(f)) && rng.chance(rates.get().overtaken / 3.0)
            });
        }
    }

    pub(super) fn next_fault(&mut self) {
        let Some(gap) = self.episode.fault_gap else { return };
        let at = self.rng.below(2 * gap.as_nanos() as u64);
        self.after(at, Ev::Fault);
    }

    /// Something goes wrong.
    pub(super) fn fault(&mut self) {
        if self.healing {
            return;
        }
        self.next_fault();
        self.report.faults += 1;
        let (p, d) = (self.rng.below(self.p.len() as u64) as usize, self.rng.below(self.d.len() as u64) as usize);
        let last = [MS, 20 * MS, 1_500 * MS][self.rng.below(3) as usize];
        let lasts = self.rng.below(last);
        let (pe, de) = (self.p[p].node.endpoint.clone(), self.d[d].node.endpoint.clone());
        let what = self.rng.below(100);
        self.trace.line(format_args!("fault {what}: prefill {pe} decode {de}, {} us", lasts / 1000));
        match what {
            0..15 => {
                self.net.partition(&pe, &de);
                self.after(lasts, Ev::Undo(Undo::Heal(pe, de)));
            }
            15..25 => {
                let (at, peer) = if self.rng.chance(0.5) { (pe, de) } else { (de, pe) };
                self.trouble_at = self.clock.now();
                self.net.lose_peer(&at, &peer, "connection reset");
            }
            25..35 => {
                self.p[p].node.stopped = true;
                self.after(lasts, Ev::Undo(Undo::GoOn(true, p)));
            }
            35..45 => {
                self.d[d].node.stopped = true;
                // Now and then beyond its rooms' deadline.
                let lasts = if self.rng.chance(0.2) { 1_500 * MS + lasts } else { lasts };
                self.after(lasts, Ev::Undo(Undo::GoOn(false, d)));
            }
            45..52 => self.restart_decode(d),
            52..58 => {
                self.trouble_at = self.clock.now();
                let addr = self.episode.prefills[self.p[p].engine].shape.bootstrap_addr.clone();
                self.restart_prefill(p);
                // Heartbeats see it, after their time.
                self.after(lasts.min(1_000 * MS), Ev::Undo(Undo::NodeLost(addr)));
            }
            58..64 => {
                let peers = self.p[p].node.transport.connected();
                if let Some((peer, _)) = self.rng.pick(&peers) {
                    self.p[p].node.transport.lose_peer(*peer);
                }
            }
            64..70 => {
                let addr = self.episode.prefills[self.p[p].engine].shape.bootstrap_addr.clone();
                self.d[d].node.directory.node_lost(&addr);
            }
            70..76 => {
                let addr = self.episode.prefills[self.p[p].engine].shape.bootstrap_addr.clone();
                let answer = if self.rng.chance(0.5) {
                    Answer::Refused("the bootstrap server answers 503".into())
                } else {
                    Answer::Peers(self.peers(self.p[p].engine, d))
                };
                let slow = Duration::from_nanos(self.rng.below(200 * MS));
                self.d[d].node.directory.answer_after(&addr, slow, answer);
                self.after(lasts, Ev::Undo(Undo::Directory(d)));
            }
            76..82 => {
                self.trouble_at = self.clock.now() + Duration::from_nanos(lasts);
                let messages = self.rng.below(4) as usize;
                self.net.set_capacity(messages);
                self.after(lasts, Ev::Undo(Undo::Capacity));
            }
            82..88 => {
                let ops = self.rng.below(3) as usize;
                self.p[p].node.transport.set_capacity(Some(ops));
                self.after(lasts, Ev::Undo(Undo::Lane(p)));
            }
            88..92 => {
                self.p[p].node.connector.hold(true);
                self.after(lasts, Ev::Undo(Undo::Connector(p)));
            }
            92..95 => self.p[p].node.transport.fail_connect(TransportErrorKind::Unavailable, "no route"),
            _ => self.stranger(&pe, &de),
        }
    }

    /// Frames that nobody of ours sends, about rooms that are live.
    fn stranger(&mut self, pe: &Endpoint, de: &Endpoint) {
        let lives: Vec<u64> = self.lives.values().map(|l| l.room).collect();
        let room = self.rng.pick(&lives).copied().unwrap_or(1).to_string();
        let frames = |all: [&str; 4]| all.map(|f| f.as_bytes().to_vec()).to_vec();
        let (to, frames) = match self.rng.below(4) {
            // (An ABORT without a generation proves nothing to anybody; but it ends a room, so none is sent.)
            0 | 1 => (de, frames(["KV_STATUS", &room, "4", "77"])),
            2 => (de, frames(["ABORT_ACK", &room, "77", "3"])),
            _ => {
                let mut junk = Vec::new();
                for _ in 0..self.rng.below(12) {
                    let n = self.rng.below(40) as usize;
                    junk.push(self.rng.bytes(n));
                }
                (if self.rng.chance(0.5) { pe } else { de }, junk)
            }
        };
        self.net.inject(to, frames);
    }

    pub(super) fn undo(&mut self, undo: Undo) {
        self.trace.line(format_args!("over: {undo:?}"));
        match undo {
            Undo::Heal(a, b) => self.net.heal(&a, &b),
            Undo::GoOn(true, p) => self.p[p].node.stopped = false,
            Undo::GoOn(false, d) => self.d[d].node.stopped = false,
            Undo::Directory(d) => self.serve(d),
            Undo::Capacity => self.net.set_capacity(usize::MAX),
            Undo::Lane(p) => self.p[p].node.transport.set_capacity(None),
            Undo::Connector(p) => self.p[p].node.connector.hold(false),
            Undo::NodeLost(addr) => self.d.iter().for_each(|d| d.node.directory.node_lost(&addr)),
        }
    }
}
