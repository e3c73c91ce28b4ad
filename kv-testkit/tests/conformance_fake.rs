//! The conformance suite over the fake transport; and proof that the suite can fail.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::net::Endpoint;
use kv_core::transport::{Capabilities, Transport};
use kv_testkit::Rng;
use kv_testkit::conformance::{self, Absent, Harness, LocalFaults, LocalTarget, RemoteTarget, Target};
use kv_testkit::fake_transport::{FakeFabric, Flaw, Policy};

/// Fake sources and targets on a fresh fabric each trial.
struct Fake {
    fabric: FakeFabric,
    made: u16,
    flaw: Option<Flaw>,
    device_memory: bool,
    /// Talk to targets over pipes, as if they were another process.
    piped: bool,
}

impl Fake {
    fn new(flaw: Option<Flaw>) -> Self {
        Self { fabric: fabric(), made: 0, flaw, device_memory: false, piped: false }
    }

    fn target_at(&mut self, endpoint: Endpoint) -> Box<dyn Target> {
        self.made += 1;
        let name = format!("target-{}", self.made);
        let builder = self.fabric.builder(&name);
        let transport = match self.flaw {
            Some(flaw) => builder.flaw(flaw).build(),
            None => builder.build(),
        };
        let faults = Faults { fabric: self.fabric.clone(), name };
        if self.piped {
            let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
            let input = std::io::BufReader::new(there.try_clone().unwrap());
            std::thread::spawn(move || conformance::serve(transport, endpoint, faults, input, there));
            return Box::new(RemoteTarget::over(here.try_clone().unwrap(), here));
        }
        Box::new(LocalTarget::with_faults(transport, endpoint, faults))
    }
}

fn fabric() -> FakeFabric {
    let fabric = FakeFabric::new();
    fabric.refuse_quietly();
    fabric.watch_sources(false);
    fabric
}

struct Faults {
    fabric: FakeFabric,
    name: String,
}

impl LocalFaults for Faults {
    fn kill(&mut self) -> Result<(), Absent> {
        self.fabric.kill(&self.name);
        Ok(())
    }
    fn pause(&mut self, paused: bool) -> Result<(), Absent> {
        self.fabric.pause(&self.name, paused);
        Ok(())
    }
    fn cut(&mut self) -> Result<(), Absent> {
        self.fabric.cut(&self.name);
        Ok(())
    }
}

impl Harness for Fake {
    fn name(&self) -> String {
        match self.flaw {
            Some(flaw) => format!("fake with {flaw:?}"),
            None => "fake".into(),
        }
    }

    fn source(&mut self) -> Arc<dyn Transport> {
        self.made += 1;
        let name = format!("source-{}", self.made);
        let policy = Policy::Seeded { rng: Rng::new(u64::from(self.made)), max_polls: 4, busy: 0.02 };
        let capabilities = Capabilities {
            name: "fake",
            host_memory: true,
            device_memory: self.device_memory,
            max_op_bytes: Some(256 << 10),
            submit_blocks: false,
            done_proves_placement: true,
            settles_unresolved: true,
            unregister_revokes: true,
            checks_destinations: false,
        };
        let builder = self.fabric.builder(&name).policy(policy).capacity(64).capabilities(capabilities);
        match self.flaw {
            Some(flaw) => builder.flaw(flaw).build(),
            None => builder.build(),
        }
    }

    fn target(&mut self) -> Box<dyn Target> {
        let port = 1000 + self.made;
        self.target_at(Endpoint::new("127.0.0.1", port))
    }

    fn successor(&mut self, old: &mut dyn Target) -> Result<Box<dyn Target>, Absent> {
        let endpoint = old.descriptor().expect("still there").endpoint;
        // A peer that kept the old generation would not be noticed if its memory were out of reach.
        if self.flaw != Some(Flaw::KeepsOldGeneration) && !self.piped {
            old.kill()?;
        }
        Ok(self.target_at(endpoint))
    }

    /// Fakes move when polled.
    fn idle(&mut self) {
        if self.piped {
            std::thread::yield_now();
        }
    }

    /// What has not come after this long of polling never comes; a sound fake never waits at all.
    fn patience(&self) -> Duration {
        if self.flaw == Some(Flaw::ForgetsOutcome) { Duration::from_millis(300) } else { Duration::from_secs(60) }
    }

    fn watch_polls(&self) -> u32 {
        50
    }

    fn flipped_blobs(&self) -> u32 {
        40
    }

    fn piece(&self) -> usize {
        4096
    }

    fn large(&self) -> usize {
        1 << 20
    }

    fn end_trial(&mut self) {
        // Benches end with ops in flight after failures; their lanes say so.
        self.fabric.take_violations();
        self.fabric = fabric();
    }
}

/// Open files are counted for the whole process: one test at a time may open them by the hundred, or count.
static FILES: Mutex<()> = Mutex::new(());

fn files() -> MutexGuard<'static, ()> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn the_fake_conforms() {
    let _files = files();
    let report = conformance::run(&mut Fake::new(None));
    report.assert_passed();
    report.assert_skips(&[]);
    assert_eq!(report.passed(), conformance::trials());
}

#[test]
fn the_fake_conforms_over_pipes() {
    let mut fake = Fake::new(None);
    fake.piped = true;
    let report = conformance::run_some(&mut fake, |t| t != "many_small_ops_bounded_resources");
    report.assert_passed();
    // Without a child process there is nothing to kill or pause; each skip is named.
    report.assert_skips(&[
        "killed_peer_proves_nothing_false",
        "paused_peer_proves_nothing",
        "unresolved_stays_until_proof",
    ]);
}

#[test]
fn an_ability_that_is_absent_is_a_printed_skip() {
    let mut fake = Fake::new(None);
    fake.device_memory = true;
    let report = conformance::run_some(&mut fake, |t| t == "unsupported_memory_refused");
    report.assert_skips(&["unsupported_memory_refused"]);
    let text = report.to_string();
    assert!(text.contains("... skipped: this backend takes device memory"), "{text}");
    assert!(text.ends_with("conformance fake: 0 passed, 1 skipped, 0 failed"), "{text}");
}

/// Each flaw, a trial that must catch it, and what the trial must say.
const CAUGHT_BY: [(Flaw, &str, &str); 21] = [
    (Flaw::DoneBeforeLanding, "bytes_contiguous", "is Done but its bytes are not in place"),
    (Flaw::DuplicateOutcome, "outcome_exactly_once", "has a second outcome: Done, then Done"),
    (Flaw::ForgetsOutcome, "outcome_exactly_once", "waited in vain for the outcome of every op"),
    (Flaw::LandsAfterDstQuiet, "cut_connection_no_late_writer", "memory that nobody may write changed"),
    (Flaw::IgnoresBounds, "destination_out_of_range_refused", "the write was Done"),
    (Flaw::TrustsForgedPeer, "forged_peer_refused", "a peer whose blob has another name: the write was Done"),
    (Flaw::SettlesTwice, "unresolved_stays_until_proof", "settled twice"),
    (Flaw::SettlesDone, "outcome_exactly_once", "was quiet already and settled"),
    (Flaw::DropsRegions, "regions_held_in_flight", "is Done but its bytes are not in place"),
    (Flaw::CorruptsByte, "bytes_random_plans", "is Done but its bytes are not in place"),
    (Flaw::SpillsOver, "bytes_strided", "memory that nobody may write changed"),
    (Flaw::ProvesPausedPeer, "paused_peer_proves_nothing", "was called quiet while the peer was paused, and landed"),
    (Flaw::DoneOnDeath, "killed_peer_proves_nothing_false", "is Done but its bytes are not in place"),
    (Flaw::KeepsOldGeneration, "new_generation_tears_down_the_old", "through the generation that was replaced"),
    (Flaw::AcceptsUnknownPeer, "unknown_peer_rejected", "a write to an unknown peer was not rejected"),
    (Flaw::CrossesLanes, "two_lanes_keep_to_themselves", "of lane 0 came out of lane 1"),
    (Flaw::BusyButPosted, "busy_hands_back_then_accepts", "which was not accepted"),
    (Flaw::ReadsAnySource, "source_out_of_range_refused", "source over the end: the write was Done"),
    (Flaw::KeepsUnregistered, "unregister_then_write_refused", "memory that is not registered any more"),
    (Flaw::NeverReconnects, "reconnect_after_disconnect", "was rejected"),
    (Flaw::LeaksFiles, "many_small_ops_bounded_resources", "ops left more behind"),
];

#[test]
fn negative_control_every_flaw_is_caught_by_its_trial() {
    for (flaw, trial, text) in CAUGHT_BY {
        let _files = (flaw == Flaw::LeaksFiles).then(files);
        let report = conformance::run_some(&mut Fake::new(Some(flaw)), |t| t == trial);
        assert_eq!(report.failed(), [trial], "{flaw:?} was not caught:\n{report}");
        assert!(report.to_string().contains(text), "{flaw:?}: {text:?} is not in\n{report}");
    }
}

#[test]
fn negative_control_no_flaw_was_left_out() {
    assert_eq!(CAUGHT_BY.map(|(flaw, ..)| flaw), Flaw::ALL);
}
