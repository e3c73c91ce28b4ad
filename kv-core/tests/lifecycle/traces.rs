//! Trace contexts (A3): what is said of a chunk is said in its own context, and each context is finished on every way the
//! chunk can end.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};

use kv_core::engine::ChunkExtras;
use kv_core::event::SourceEvent;
use kv_testkit::fake_transport::Verdict;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::{LookupSpan, Registry};

use super::support::*;

/// The `traceparent` of a span, or the message and the chunk of an event.
#[derive(Clone, Default)]
struct Seen {
    traceparent: String,
    message: String,
    chunk: Option<u64>,
}

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "traceparent" => self.traceparent = format!("{value:?}").trim_matches('"').into(),
            "message" => self.message = format!("{value:?}"),
            _ => {}
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "chunk" {
            self.chunk = Some(value);
        }
    }
}

/// What was said of chunks, in which context; and the contexts that are finished.
#[derive(Clone, Default)]
struct Log {
    said: Arc<Mutex<Vec<(u64, String, String)>>>,
    finished: Arc<Mutex<BTreeSet<String>>>,
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Log {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, cx: Context<'_, S>) {
        let mut seen = Seen::default();
        attributes.record(&mut seen);
        cx.span(id).unwrap().extensions_mut().insert(seen);
    }

    fn on_event(&self, event: &Event<'_>, cx: Context<'_, S>) {
        let mut seen = Seen::default();
        event.record(&mut seen);
        let Some(chunk) = seen.chunk else { return };
        let span = cx.event_span(event);
        let within = span.and_then(|s| s.extensions().get::<Seen>().map(|s| s.traceparent.clone()));
        self.said.lock().unwrap().push((chunk, seen.message, within.unwrap_or_default()));
    }

    fn on_close(&self, id: Id, cx: Context<'_, S>) {
        let seen = cx.span(&id).unwrap().extensions().get::<Seen>().cloned().unwrap_or_default();
        self.finished.lock().unwrap().insert(seen.traceparent);
    }
}

impl Log {
    fn run(scenario: impl FnOnce(&Self)) {
        let log = Self::default();
        tracing::subscriber::with_default(Registry::default().with(log.clone()), || scenario(&log));
    }

    /// What was said of this chunk, having been said in its context.
    fn of(&self, chunk: u64) -> Vec<String> {
        let said = self.said.lock().unwrap();
        let of: Vec<_> = said.iter().filter(|(c, _, _)| *c == chunk).collect();
        of.iter().for_each(|(_, text, within)| assert_eq!(*within, name(chunk), "{text}"));
        of.iter().map(|(_, text, _)| text.clone()).collect()
    }

    fn finished(&self) -> Vec<String> {
        self.finished.lock().unwrap().iter().cloned().collect()
    }
}

fn name(chunk: u64) -> String {
    format!("00-{chunk:032x}-01")
}

fn context(chunk: u64) -> ChunkExtras {
    let span = tracing::info_span!("kv_send", traceparent = name(chunk));
    ChunkExtras { trace: Some(span), wait_event: None }
}

#[test]
fn r_a3_each_chunks_context_reaches_what_is_said_of_it_and_ends_with_it() {
    Log::run(|log| {
        let mut w = held_world(WorldSpec::default());
        let (s, r) = w.open(7, &[4, 5, 6]);
        for n in 0..3_u8 {
            w.send_chunk(0, &s[0], &[n.into()], n.into(), n == 2, context(n.into()));
        }
        for n in 0..3 {
            w.run();
            assert_eq!(log.of(n), ["kv write posted"]);
            assert_eq!(log.finished(), (0..n).map(name).collect::<Vec<_>>());
            w.p[0].transport.complete(w.p[0].transport.only().id);
            w.run();
            assert_eq!(log.of(n), ["kv write posted", "kv write done", "kv chunk sent"]);
        }
        assert_eq!(log.finished(), [0, 1, 2].map(name));
        end(&mut w, &s, &r);
    });
}

#[test]
fn r_a3_a_failure_is_said_in_every_context_of_the_room_and_finishes_them() {
    Log::run(|log| {
        let mut w = held_world(WorldSpec::default());
        w.p[0].transport.script_next(Verdict::Fail { src_quiet: true, dst_quiet: true });
        let (s, r) = w.open(7, &[4, 5]);
        w.send_chunk(0, &s[0], &[0], 0, false, context(0));
        w.send_chunk(0, &s[0], &[1], 1, true, context(1));
        w.run();
        assert_eq!(s[0].poll(), FAILED);
        assert_eq!(log.of(0), ["kv write posted", "kv write failed", "kv chunk failed with its room"]);
        assert_eq!(log.of(1), ["kv chunk failed with its room"]);
        assert_eq!(log.finished(), [0, 1].map(name));
        end(&mut w, &s, &r);
    });
}

/// How a room ends: its two sides, and the event its last chunk waits for.
type End = fn(&mut World, &Room, &Room, &SourceEvent);

#[test]
fn r_a3_the_context_is_finished_on_every_terminal_path() {
    let ends: [(&str, End); 7] = [
        ("abort here", |w, s, _, _| w.abort_p(0, s)),
        ("abort there", |w, _, r, _| w.abort_d(0, r)),
        ("clear", |w, s, _, _| w.clear_p(0, s)),
        ("peer lost", |w, _, _, _| {
            let peer = w.p[0].transport.connected()[0].0;
            w.p[0].transport.lose_peer(peer);
        }),
        ("unresolved", |w, _, _, _| w.p[0].transport.unresolve(w.p[0].transport.only().id)),
        ("failed event", |_, _, _, wait| wait.signal(Err("device lost".into()))),
        ("cleared and unresolved", |w, s, _, _| {
            w.p[0].transport.unresolve(w.p[0].transport.only().id);
            w.clear_p(0, s);
        }),
    ];
    for (how, act) in ends {
        Log::run(|log| {
            let (mut w, wait) = (held_world(WorldSpec::default()), SourceEvent::new());
            let (s, r) = w.open(7, &[4, 5]);
            w.send_chunk(0, &s[0], &[0], 0, false, context(0));
            let extras = ChunkExtras { wait_event: after(&wait).wait_event, ..context(1) };
            w.send_chunk(0, &s[0], &[1], 1, true, extras);
            w.run();
            assert_eq!(log.finished(), [""; 0], "{how}");
            act(&mut w, &s[0], &r[0], &wait);
            w.run();
            assert_eq!(log.finished(), [0, 1].map(name), "{how}");
            // What is sent afterwards is refused, and its context with it (C1).
            w.send_chunk(0, &s[0], &[1], 1, true, context(2));
            w.run();
            assert_eq!(log.finished(), [0, 1, 2].map(name), "{how}");
            w.abandon();
        });
    }
}
