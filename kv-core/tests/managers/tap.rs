//! A tool that listens in on both sides of one room.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use kv_core::control::ControlTap;
use kv_core::manager::{DecodeConfig, PrefillConfig};
use kv_core::{Endpoint, KvPoll};

use super::support::*;

#[derive(Default)]
struct Recorder {
    sent: Mutex<Vec<(Endpoint, Vec<Bytes>)>>,
    received: Mutex<Vec<Vec<Bytes>>>,
}

impl ControlTap for Recorder {
    fn sent(&self, to: &Endpoint, frames: &[Bytes]) {
        self.sent.lock().unwrap().push((to.clone(), frames.to_vec()));
    }
    fn received(&self, frames: &[Bytes]) {
        self.received.lock().unwrap().push(frames.to_vec());
    }
}

/// What one side sends, the other takes, frame by frame and in this order.
#[test]
fn a_tap_hears_the_whole_conversation_of_a_rank() {
    let (p_tap, d_tap) = (Arc::new(Recorder::default()), Arc::new(Recorder::default()));
    let mut cluster = Cluster::new();
    let config = PrefillConfig { tap: Some(p_tap.clone()), ..PrefillConfig::default() };
    assert!(format!("{config:?}").contains("tap: Some(ControlTap)"));
    let p = cluster.prefill(config);
    let d = cluster.decode(DecodeConfig { tap: Some(d_tap.clone()), ..DecodeConfig::default() });
    let receiver = d.manager.receiver(room(7), &cluster.addr()).unwrap();
    receiver.init(None).unwrap();
    ask(&receiver);
    let sender = p.manager.sender(room(7), &cluster.addr()).unwrap();
    send(&sender);
    assert_eq!(receiver.wait_timeout(HANG), KvPoll::Success, "{:?}", receiver.failure());
    arrived(&p, &d);
    // What it hears belongs to a step that may not have ended; the end of the managers waits for it.
    let (to_prefill, to_decode) = (p.manager.endpoint().clone(), d.manager.endpoint().clone());
    drop((sender, receiver, p, d));

    let frames = |sent: &Recorder, to: &Endpoint| -> Vec<Vec<Bytes>> {
        let sent = sent.sent.lock().unwrap();
        assert!(sent.iter().all(|(endpoint, _)| endpoint == to));
        sent.iter().map(|(_, frames)| frames.clone()).collect()
    };
    let (asked, told) = (frames(&d_tap, &to_prefill), frames(&p_tap, &to_decode));
    assert_eq!(asked, *p_tap.received.lock().unwrap());
    assert_eq!(told, *d_tap.received.lock().unwrap());
    let first = |messages: &[Vec<Bytes>], at: usize| -> Vec<Bytes> { messages.iter().map(|m| m[at].clone()).collect() };
    assert_eq!(first(&asked, 1), ["None", "7"], "the registration, then the metadata");
    assert_eq!(first(&told, 0), ["KV_STATUS"]);
}
