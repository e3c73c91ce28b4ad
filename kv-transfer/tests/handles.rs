//! Handles over real threads, sockets and memory: what their callers may do in any order, and from any thread.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use kv_transfer::bootstrap::{BootstrapServer, RegistrationConfig};
use kv_transfer::hooks::TcpHooks;
use kv_transfer::layout::{AttentionKind, EntryDesc, LayoutSpec, LocalLayout};
use kv_transfer::manager::{
    DecodeConfig, DecodeManager, MetadataOptions, PrefillConfig, PrefillManager, RoomError, SendOptions, poll_many,
};
use kv_transfer::tcp::{HostArena, SameHost, TcpConfig, TcpTransport};
use kv_transfer::transport::Transport;
use kv_transfer::{KvPoll, Limits, Room};

const HOST: &str = "127.0.0.1";
const LAYERS: u64 = 2;
const PAGES: u64 = 64;
const PAGE: u64 = 4096;
const ROW: u64 = 64;
/// Long enough for a machine that does much else; nothing waits for it when all is well.
const HANG: Duration = Duration::from_secs(60);

fn pool(config: TcpConfig) -> (Arc<HostArena>, Arc<TcpTransport>, LocalLayout) {
    let arena = Arc::new(HostArena::new((LAYERS * PAGES * PAGE + PAGES * ROW) as usize).unwrap());
    let transport = Arc::new(TcpTransport::new(config).unwrap());
    let region = transport.register(arena.clone()).unwrap();
    let entry = |offset, items, item_len| EntryDesc {
        region: region.id(),
        offset,
        len: items * item_len,
        item_len,
        layer_id: None,
    };
    let spec = LayoutSpec {
        kv: (0..LAYERS).map(|l| entry(l * PAGES * PAGE, PAGES, PAGE)).collect(),
        aux: vec![entry(LAYERS * PAGES * PAGE, PAGES, ROW)],
        page_size: 64,
        kv_cache_dtype: "bfloat16".into(),
        attention: AttentionKind::Mla,
        ..LayoutSpec::default()
    };
    let layout = LocalLayout::new(spec, [region]).unwrap();
    (arena, transport, layout)
}

struct Pair {
    p: PrefillManager,
    source: Arc<HostArena>,
    d: DecodeManager,
    target: Arc<HostArena>,
    addr: String,
    _server: BootstrapServer,
}

fn pair() -> Pair {
    pair_with(TcpConfig::loopback())
}

/// `config`: of prefill's transport.
fn pair_with(config: TcpConfig) -> Pair {
    let (source, transport, layout) = pool(config);
    let config = PrefillConfig { host: Some(HOST.into()), ..PrefillConfig::default() };
    let p = PrefillManager::start(config, transport, Arc::new(TcpHooks::new()), layout).unwrap();
    let server = BootstrapServer::bind(HOST, 0, Limits::default()).unwrap();
    let port = server.local_addr().port();
    p.register(&RegistrationConfig::new(HOST, port)).unwrap();
    let (target, transport, layout) = pool(TcpConfig::loopback());
    let config = DecodeConfig { host: Some(HOST.into()), ..DecodeConfig::default() };
    let d = DecodeManager::start(config, transport, Arc::new(TcpHooks::new()), layout).unwrap();
    Pair { p, source, d, target, addr: format!("{HOST}:{port}"), _server: server }
}

fn room(n: u64) -> Room {
    Room::new(n).unwrap()
}

/// One request of `sent` pages where decode asked for `asked`; what both sides say in the end.
fn transfer(pair: &Pair, n: u64, sent: &[i32], asked: &[i32], aux: Option<u32>) -> (KvPoll, KvPoll, Option<String>) {
    let receiver = pair.d.receiver(room(n), &pair.addr).unwrap();
    receiver.init(None).unwrap();
    assert_eq!(receiver.ready_timeout(HANG), KvPoll::WaitingForInput);
    receiver.send_metadata(asked, 3, MetadataOptions::default()).unwrap();
    let sender = pair.p.sender(room(n), &pair.addr).unwrap();
    sender.init(sent.len() as u32, aux).unwrap();
    sender.send(sent, SendOptions::default()).unwrap();
    let polls = (sender.wait_timeout(HANG), receiver.wait_timeout(HANG));
    assert!(receiver.released_timeout(HANG), "the pages come back");
    (polls.0, polls.1, receiver.failure().map(|e| e.reason))
}

#[test]
fn every_byte_arrives_and_polls_agree() {
    let pair = pair();
    bytes_arrive(&pair);
    let senders: Vec<_> = (2..5).map(|n| pair.p.sender(room(n), "").unwrap()).collect();
    let mut polls = [KvPoll::Failed; 3];
    poll_many(&senders.iter().collect::<Vec<_>>(), &mut polls);
    assert_eq!(polls, [KvPoll::Bootstrapping; 3]);
}

/// On both paths, a write that is larger than the transport's largest op goes in several.
#[test]
fn r_f1_a_write_over_max_op_bytes_arrives_in_pieces() {
    for same_host in [SameHost::Auto, SameHost::Off] {
        let pair = pair_with(TcpConfig { max_op_bytes: 2 * PAGE + 100, same_host, ..TcpConfig::loopback() });
        bytes_arrive(&pair);
        let posted = pair.p.stats().ops_posted.get();
        assert!(posted >= 4, "{posted} ops for {} bytes", 4 * LAYERS * PAGE);
    }
}

fn bytes_arrive(pair: &Pair) {
    for page in 0..4u64 {
        for layer in 0..LAYERS {
            let bytes = [(1 + page * LAYERS + layer) as u8; PAGE as usize];
            pair.source.write_at(((layer * PAGES + page) * PAGE) as usize, &bytes);
        }
    }
    let done = transfer(pair, 1, &[0, 1, 2, 3], &[40, 7, 8, 30], Some(0));
    assert_eq!((done.0, done.1), (KvPoll::Success, KvPoll::Success));
    for (page, at) in [40u64, 7, 8, 30].into_iter().enumerate() {
        for layer in 0..LAYERS {
            let got = pair.target.to_vec(((layer * PAGES + at) * PAGE) as usize, PAGE as usize);
            assert!(got.iter().all(|b| *b == (1 + page as u64 * LAYERS + layer) as u8));
        }
    }
}

#[test]
fn r_h3_cat_f47_sides_that_disagree_about_the_length_fail_by_name() {
    let pair = pair();
    for (n, sent, asked) in [(1, 4, 8), (2, 8, 4), (3, 0, 4), (4, 4, 0)] {
        let (sent, asked): (Vec<i32>, Vec<i32>) = ((0..sent).collect(), (20..20 + asked).collect());
        let (_, decode, reason) = transfer(&pair, n, &sent, &asked, Some(0));
        assert_eq!(decode, KvPoll::Failed, "{} sent, {} asked", sent.len(), asked.len());
        assert!(reason.unwrap().contains("pages"), "it says what differs");
    }
    let (prefill, decode, reason) = transfer(&pair, 5, &[0], &[20], None);
    assert_eq!((prefill, decode), (KvPoll::Failed, KvPoll::Failed));
    assert!(reason.unwrap().contains("metadata slot 3"));
}

#[test]
fn r_a5_the_fake_host_succeeds_and_sends_nothing() {
    let pair = pair();
    let receiver = pair.d.receiver(room(1), "2.2.2.2:8998").unwrap();
    receiver.init(None).unwrap();
    receiver.send_metadata(&[1], 0, MetadataOptions::default()).unwrap();
    let sender = pair.p.sender(room(1), "2.2.2.2:8998").unwrap();
    sender.init(1, Some(0)).unwrap();
    sender.send(&[1], SendOptions::default()).unwrap();
    assert_eq!((sender.poll(), receiver.poll()), (KvPoll::Success, KvPoll::Success));
    assert!(sender.releasable() && receiver.releasable());
    assert_eq!((pair.p.stats().messages_in.get(), pair.d.stats().messages_out.get()), (0, 0));
}

#[test]
fn r_d2_a_host_destination_is_refused_by_name() {
    let pair = pair();
    let receiver = pair.d.receiver(room(1), &pair.addr).unwrap();
    let options = MetadataOptions { host_destination: true, ..MetadataOptions::default() };
    let refused = receiver.send_metadata(&[1], 0, options).unwrap_err();
    assert!(matches!(refused, RoomError::NotSupported { what: "a host destination", backend: "tcp", .. }), "{refused}");
    assert_eq!(receiver.poll(), KvPoll::Bootstrapping, "the room is not changed");
}

#[test]
fn r_d6_room_zero_cannot_be_made() {
    assert!(Room::new(0).is_none());
    assert!(Room::try_from(0).unwrap_err().to_string().contains("room 0"), "so no handle of it can be asked for");
}

#[test]
fn r_d8_failure_concludes_clears_and_says_who_failed() {
    let pair = pair();
    let receiver = pair.d.receiver(room(1), &pair.addr).unwrap();
    receiver.init(None).unwrap();
    assert_eq!(receiver.ready_timeout(HANG), KvPoll::WaitingForInput);
    // Asked before this rank knows of any failure: another rank's failed.
    let error = receiver.failure().unwrap();
    assert!(error.from_another_rank && error.reason == "Failed due to an unknown reason from another rank");
    assert_eq!(receiver.poll(), KvPoll::Failed);
    pair.d.receiver(room(1), &pair.addr).expect("the number is free again");

    let sender = pair.p.sender(room(2), "").unwrap();
    sender.abort();
    let error = sender.failure().unwrap();
    assert_eq!((error.room, error.reason.as_str(), error.from_another_rank), (room(2), "Aborted by AbortReq.", false));
}

#[test]
fn cat_f40_a_live_room_is_refused_and_not_touched() {
    let pair = pair();
    let first = pair.p.sender(room(7), "").unwrap();
    assert_eq!(pair.p.sender(room(7), "").err(), Some(RoomError::RoomInUse(room(7))));
    let receiver = pair.d.receiver(room(7), &pair.addr).unwrap();
    assert_eq!(pair.d.receiver(room(7), &pair.addr).err(), Some(RoomError::RoomInUse(room(7))));
    assert_eq!((first.poll(), receiver.poll()), (KvPoll::Bootstrapping, KvPoll::Bootstrapping));
    first.clear();
    pair.p.sender(room(7), "").expect("free after clear()");
}

#[test]
fn init_after_or_beside_clear_leaves_nothing_behind() {
    let pair = pair();
    let cleared = pair.d.receiver(room(1), &pair.addr).unwrap();
    cleared.clear();
    assert!(matches!(cleared.init(None), Err(RoomError::Order { what: "init() after clear()", .. })));
    for n in 2..300 {
        let receiver = pair.d.receiver(room(n), &pair.addr).unwrap();
        let start = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                let _ = receiver.init(None);
            });
            start.wait();
            receiver.clear();
        });
        assert_eq!(receiver.wait_timeout(HANG), KvPoll::Failed, "room {n}");
    }
    // Whatever is still under way ends.
    let last = pair.d.receiver(room(1000), &pair.addr).unwrap();
    last.init(None).unwrap();
    last.ready_timeout(HANG);
    drop(last);
    // The shard's thread may be the one that carries it out.
    let patience = std::time::Instant::now() + HANG;
    while pair.d.stats().rooms_live.get() > 0 {
        assert!(std::time::Instant::now() < patience, "a room is left behind");
        std::thread::yield_now();
    }
}

#[test]
fn r_f6_a_number_is_free_as_soon_as_its_handle_or_its_pages_are() {
    let pair = pair();
    // Cleared in one thread, taken at once in another: never refused inside.
    let bad = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let Ok(sender) = pair.p.sender(room(7), "") else { continue };
                    let reason = sender.failure().map(|e| e.reason).unwrap_or_default();
                    bad.fetch_add(u64::from(reason.contains("in use")), Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(bad.load(Ordering::Relaxed), 0);
    for _ in 0..200 {
        let receiver = pair.d.receiver(room(7), &pair.addr).expect("released means free");
        receiver.init(None).unwrap();
        receiver.ready_timeout(HANG);
        receiver.send_metadata(&[1], 0, MetadataOptions::default()).unwrap();
        receiver.clear();
        assert!(receiver.released_timeout(HANG));
    }
}

#[test]
fn managers_that_are_dropped_end() {
    for _ in 0..40 {
        let pair = pair();
        let receiver = pair.d.receiver(room(1), &pair.addr).unwrap();
        receiver.init(None).unwrap();
        receiver.ready_timeout(HANG);
    }
}

#[test]
fn a_busy_caller_does_not_keep_the_others_out() {
    let pair = pair();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 1_000_000.. {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let _ = pair.p.sender(room(n), "");
            }
        });
        // Each needs prefill's thread to read a message between the other's commands.
        for n in 1..20 {
            let done = transfer(&pair, n, &[1], &[2], Some(0));
            assert_eq!((done.0, done.1), (KvPoll::Success, KvPoll::Success));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn cat_f67_sixty_four_managers_on_one_host_have_their_own_ports_and_names() {
    let mut ports = std::collections::BTreeSet::new();
    let mut names = std::collections::BTreeSet::new();
    let (mut prefills, mut decodes) = (Vec::new(), Vec::new());
    for n in 0..64 {
        let (_, transport, layout) = pool(TcpConfig::loopback());
        names.insert(transport.local_name().to_owned());
        let hooks = Arc::new(TcpHooks::new());
        let endpoint = if n % 2 == 0 {
            let config = PrefillConfig { host: Some(HOST.into()), ..PrefillConfig::default() };
            prefills.push(PrefillManager::start(config, transport, hooks, layout).unwrap());
            prefills[n / 2].endpoint().clone()
        } else {
            let config = DecodeConfig { host: Some(HOST.into()), ..DecodeConfig::default() };
            decodes.push(DecodeManager::start(config, transport, hooks, layout).unwrap());
            decodes[n / 2].endpoint().clone()
        };
        ports.insert(endpoint.port());
    }
    assert_eq!((ports.len(), names.len()), (64, 64));
}
