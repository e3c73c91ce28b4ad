//! What one episode is made of, drawn from its seed.

use std::ops::Range;
use std::time::Duration;

use kv_core::room::{FailedStatusPolicy, ReleasePolicy};

use crate::Rng;
use crate::directory::Shape;
use crate::world::WorldSpec;

/// Bytes of a page: a header that names its owner, and a pattern.
pub(super) const PAGE_LEN: usize = 32;

/// How often each kind of trouble is drawn. Everything off is a network that works.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rates {
    /// A message is lost.
    pub(super) loss: f64,
    /// A message arrives twice.
    pub(super) duplicate: f64,
    /// A message to decode is overtaken by those behind it.
    pub(super) overtaken: f64,
    /// A lane says Busy.
    pub(super) busy: f64,
    /// A submission is rejected.
    pub(super) reject: f64,
    /// A write ends in anything but Done.
    pub(super) op_error: f64,
}

/// One episode: a fleet, its policies, its troubles.
#[derive(Clone)]
pub(super) struct Episode {
    pub(super) seed: u64,
    /// One entry a prefill engine.
    pub(super) prefills: Vec<WorldSpec>,
    /// One entry a decode engine; `shape.decode_tp` ranks each.
    pub(super) decodes: Vec<WorldSpec>,
    pub(super) lives: u64,
    /// Room lives at a time.
    pub(super) concurrent: usize,
    /// Mean time between the births of two lives.
    pub(super) birth_gap: Duration,
    /// Mean time between two faults of the fleet.
    pub(super) fault_gap: Option<Duration>,
    pub(super) rates: Rates,
    pub(super) latency: Range<Duration>,
    /// Clocks that run apart.
    pub(super) skew: bool,
    /// An old generation's writes are not proven quiet by the new one's connect.
    pub(super) leave_superseded: bool,
    pub(super) release: ReleasePolicy,
    pub(super) failed_status: FailedStatusPolicy,
    /// Both sides of every pair say that they are ours, and name lives.
    pub(super) all_ours: bool,
    /// Room numbers are used again as soon as both sides have cleared them, whatever is still held or under way for them.
    pub(super) reuse: bool,
}

/// Deadlines of every episode; a fleet's are a hundred times as long.
pub(super) const BOOTSTRAP: Duration = Duration::from_secs(2);
pub(super) const WAITING: Duration = Duration::from_secs(2);
pub(super) const EARLY: Duration = Duration::from_secs(2);
pub(super) const TOMBSTONE: Duration = Duration::from_secs(4);
pub(super) const RELEASE: Duration = Duration::from_secs(3);

impl Episode {
    pub(super) fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mla = rng.chance(0.4);
        // MHA ranks pair one to one in TP (head slices need staging); MLA ranks take any sizes that divide.
        let tp = 1 + rng.below(2) as u32;
        let two_stages = rng.chance(0.4);
        let release = match rng.below(3) {
            0 => ReleasePolicy::Proof,
            1 => ReleasePolicy::AckOrTimeout(RELEASE),
            _ => ReleasePolicy::PerPeer(RELEASE),
        };
        let failed_status = match rng.below(3) {
            0 => FailedStatusPolicy::AtOnce,
            1 => FailedStatusPolicy::WhenSettled,
            _ => FailedStatusPolicy::PerPeer,
        };
        // Everybody is ours and names lives; or some are, and the others are as 0.5.23.
        let all_ours = rng.chance(0.6);
        let base = WorldSpec {
            pages: 96,
            page_len: PAGE_LEN,
            aux_rows: 40,
            failed_status,
            release,
            bootstrap_timeout: BOOTSTRAP,
            waiting_timeout: WAITING,
            early_timeout: EARLY,
            tombstone_timeout: TOMBSTONE,
            ..WorldSpec::default()
        };
        let layers = if two_stages { 2 } else { 1 };
        let prefills: Vec<WorldSpec> = (0..1 + rng.below(3))
            .map(|i| {
                let prefill_pp = if two_stages && rng.chance(0.6) { 2 } else { 1 };
                let prefill_cp = if rng.chance(0.25) { 2 } else { 1 };
                let shape = Shape {
                    bootstrap_addr: format!("p{i}:8998"),
                    prefill_tp: if mla { 1 + rng.below(2) as u32 } else { tp },
                    prefill_cp,
                    prefill_pp,
                    mla,
                    all_cp: true,
                    host: format!("10.0.0.{}", i + 1),
                    ..Shape::default()
                };
                let prefill_ext = all_ours || rng.chance(0.4);
                WorldSpec { shape, prefill_ext, layers: layers / prefill_pp, ..base.clone() }
            })
            .collect();
        let decodes = (0..1 + rng.below(3))
            .map(|_| {
                let decode_tp = if mla { 1 + rng.below(2) as u32 } else { tp };
                let shape = Shape { decode_tp, mla, ..Shape::default() };
                let decode_ext = all_ours || rng.chance(0.4);
                WorldSpec { shape, decode_ext, layers, decodes: decode_tp, ..base.clone() }
            })
            .collect();
        let calm = rng.chance(0.15);
        let pick = |rng: &mut Rng, all: &[f64]| rng.pick(all).copied().unwrap_or_default();
        let rates = Rates {
            loss: pick(&mut rng, &[0.0, 0.0, 0.002, 0.02]),
            duplicate: pick(&mut rng, &[0.0, 0.02, 0.1]),
            overtaken: pick(&mut rng, &[0.0, 0.05, 0.2]),
            busy: pick(&mut rng, &[0.0, 0.02, 0.2]),
            reject: pick(&mut rng, &[0.0, 0.0, 0.005]),
            op_error: pick(&mut rng, &[0.0, 0.02, 0.1, 0.3]),
        };
        let gap = [20, 60, 200][rng.below(3) as usize];
        Self {
            seed,
            prefills,
            decodes,
            lives: 120 + rng.below(240),
            concurrent: 4 + rng.below(28) as usize,
            birth_gap: Duration::from_micros(50 + rng.below(2000)),
            fault_gap: (!calm).then(|| Duration::from_millis(gap)),
            rates: if calm { Rates::default() } else { rates },
            latency: Duration::from_micros(5)..Duration::from_micros(20 + rng.below(2000)),
            skew: rng.chance(0.5),
            leave_superseded: rng.chance(0.5),
            release,
            failed_status,
            all_ours,
            reuse: all_ours && rng.chance(0.7),
        }
    }

    /// Prefill engine and decode engine are both ours, and know it.
    fn ours(&self, prefill: usize, decode: usize) -> bool {
        self.prefills[prefill].prefill_ext && self.decodes[decode].decode_ext
    }

    /// Decode gives pages of failed rooms back by proof only.
    pub(super) fn by_proof(&self, prefill: usize) -> bool {
        match self.release {
            ReleasePolicy::Proof => true,
            ReleasePolicy::AckOrTimeout(_) => false,
            // What a rank of ours acks is proof also to a decode that does not say that it is ours.
            ReleasePolicy::PerPeer(_) => self.prefills[prefill].prefill_ext,
        }
    }

    /// Decode is told of a failure over writes in flight.
    pub(super) fn tells_at_once(&self, prefill: usize, decode: usize) -> bool {
        match self.failed_status {
            FailedStatusPolicy::AtOnce => true,
            FailedStatusPolicy::WhenSettled => false,
            FailedStatusPolicy::PerPeer => self.ours(prefill, decode),
        }
    }

    /// In a line.
    pub(super) fn describe(&self) -> String {
        let ours = |ours: bool| if ours { "" } else { " (0.5.23)" };
        let prefill = |s: &WorldSpec| {
            let Shape { prefill_tp, prefill_pp, prefill_cp, .. } = s.shape;
            format!("tp{prefill_tp}pp{prefill_pp}cp{prefill_cp}{}", ours(s.prefill_ext))
        };
        let p: Vec<String> = self.prefills.iter().map(prefill).collect();
        let decode = |s: &WorldSpec| format!("tp{}{}", s.shape.decode_tp, ours(s.decode_ext));
        let d: Vec<String> = self.decodes.iter().map(decode).collect();
        let mla = if self.prefills[0].shape.mla { "MLA" } else { "MHA" };
        format!(
            "episode {}: {mla}, prefill {}, decode {}, {} lives, {} at a time, numbers used again: {}, {:?}, {:?}, {:?}, a \
             fault every {:?}",
            self.seed,
            p.join(" "),
            d.join(" "),
            self.lives,
            self.concurrent,
            self.reuse,
            self.release,
            self.failed_status,
            self.rates,
            self.fault_gap
        )
    }
}
