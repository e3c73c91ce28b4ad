// The control plane over real sockets on loopback. Included once for each pair of implementations: PUSHER and PULLER.

/// Only there so that a hang fails; nothing is measured against it.
const HANG: Duration = Duration::from_secs(60);

fn message(frames: &[&[u8]]) -> Multipart {
    frames.iter().map(|f| Bytes::copy_from_slice(f)).collect()
}

fn inbox(host: &str, limits: &Limits) -> (ZmqInbox, Endpoint) {
    ZmqSockets::new(PULLER, limits).unwrap().bind(host, limits).unwrap()
}

fn raw(role: PushRole, limits: &Limits) -> ZmqOutbox {
    ZmqSockets::new(PUSHER, limits).unwrap().outbox(role, limits).unwrap()
}

/// An outbox and a thread that looks after its connections, as a shard's thread does. Each send is flushed.
struct Driven {
    outbox: Arc<Mutex<ZmqOutbox>>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

fn outbox(role: PushRole, limits: &Limits) -> Driven {
    driven(role, limits, false)
}

/// `sweeps`: with the time of day, for what waits for a time.
fn driven(role: PushRole, limits: &Limits, sweeps: bool) -> Driven {
    let outbox = Arc::new(Mutex::new(raw(role, limits)));
    let stop = Arc::new(AtomicBool::new(false));
    let (theirs, stopped) = (outbox.clone(), stop.clone());
    let fd = outbox.lock().unwrap().fd();
    let thread = std::thread::spawn(move || {
        let clock = MonotonicClock::new();
        while !stopped.load(Ordering::Relaxed) {
            match fd {
                Some(fd) => drop(zmq::poll(&mut [zmq::PollItem::from_fd(fd, zmq::POLLIN)], 5)),
                None => std::thread::sleep(Duration::from_millis(5)),
            }
            let mut outbox = theirs.lock().unwrap();
            outbox.poll_events(0, &mut Vec::new());
            if sweeps {
                outbox.sweep(clock.now());
            }
        }
    });
    Driven { outbox, stop, thread: Some(thread) }
}

impl Drop for Driven {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

impl Driven {
    fn send(&self, to: &Endpoint, message: Multipart) -> Result<(), ControlError> {
        let mut outbox = self.outbox.lock().unwrap();
        outbox.send(to, message)?;
        outbox.flush();
        Ok(())
    }
    fn poll_events(&self, max: usize, out: &mut Vec<ControlEvent>) {
        self.outbox.lock().unwrap().poll_events(max, out);
    }
    fn sweep(&self, now: Timestamp) -> Option<Timestamp> {
        self.outbox.lock().unwrap().sweep(now)
    }
    fn close(&self, to: &Endpoint) {
        self.outbox.lock().unwrap().close(to);
    }
    fn counters(&self) -> OutboxCounters {
        self.outbox.lock().unwrap().counters()
    }
    fn len(&self) -> usize {
        self.outbox.lock().unwrap().len()
    }
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    fn contains(&self, to: &Endpoint) -> bool {
        self.outbox.lock().unwrap().contains(to)
    }
}

/// Call `step` until it says true.
fn until(what: &str, mut step: impl FnMut() -> bool) {
    let end = Instant::now() + HANG;
    while !step() {
        assert!(Instant::now() < end, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Receive until there are `count` messages.
fn take(inbox: &mut ZmqInbox, count: usize) -> Vec<Multipart> {
    let end = Instant::now() + HANG;
    let mut all = Vec::new();
    while all.len() < count {
        assert!(Instant::now() < end, "{} of {count} messages arrived", all.len());
        inbox.wait(&[], Some(Duration::from_millis(100))).unwrap();
        inbox.recv(count - all.len(), &mut all).unwrap();
    }
    all
}

/// Sweep, never send, until a loss is reported.
fn until_lost(outbox: &Driven) -> (Endpoint, String) {
    until_lost_while(outbox, || ())
}

fn until_lost_while(outbox: &Driven, mut meanwhile: impl FnMut()) -> (Endpoint, String) {
    let clock = MonotonicClock::new();
    let mut events = Vec::new();
    until("a loss", || {
        meanwhile();
        outbox.sweep(clock.now());
        outbox.poll_events(1, &mut events);
        !events.is_empty()
    });
    match events.remove(0) {
        ControlEvent::PeerLost(endpoint, reason) => (endpoint, reason),
        other => panic!("{other:?}"),
    }
}

/// A listener that never answers a handshake, and its endpoint.
fn mute() -> (TcpListener, Endpoint) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = Endpoint::new("127.0.0.1", listener.local_addr().unwrap().port());
    (listener, endpoint)
}

/// Message `seq` of `sender`: three frames that name both.
fn numbered(sender: u64, seq: u64) -> Multipart {
    let name = [sender.to_le_bytes(), seq.to_le_bytes()].concat();
    message(&[&name, &name, &name])
}

/// Checks the shape of a `numbered` message.
fn number_of(message: &Multipart) -> (u64, u64) {
    assert_eq!(message.len(), 3);
    assert!(message.iter().all(|f| *f == message[0]), "frames of different messages: {message:?}");
    let word = |at: usize| u64::from_le_bytes(message[0][at..at + 8].try_into().unwrap());
    (word(0), word(8))
}

/// All of `senders` x `each` messages, whole, each sender's in order.
fn expect_numbered(inbox: &mut ZmqInbox, senders: u64, each: u64) {
    let mut next: HashMap<u64, u64> = HashMap::new();
    for message in take(inbox, usize::try_from(senders * each).unwrap()) {
        let (sender, seq) = number_of(&message);
        let expected = next.entry(sender).or_default();
        assert_eq!(seq, *expected, "order of sender {sender}");
        *expected += 1;
    }
    assert_eq!(next.len() as u64, senders);
    assert_eq!(inbox.counters(), InboxCounters { messages: senders * each, ..InboxCounters::default() });
}

#[test]
fn cat_f63_messages_of_16_outboxes_arrive_whole_and_in_order() {
    let limits = Limits::default();
    let (mut inbox, to) = inbox("127.0.0.1", &limits);
    let threads: Vec<_> = (0..16)
        .map(|sender| {
            let outbox = outbox(PushRole::ToPrefill, &limits);
            let to = to.clone();
            std::thread::spawn(move || {
                for seq in 0..10_000 {
                    outbox.send(&to, numbered(sender, seq)).unwrap();
                }
                // Dropping it now would leave only the linger time to deliver the rest.
                outbox
            })
        })
        .collect();
    expect_numbered(&mut inbox, 16, 10_000);
    for thread in threads {
        assert_eq!(thread.join().unwrap().counters().opened, 1);
    }
}

#[test]
fn cat_f63_16_threads_share_one_outbox_through_the_shard_lock() {
    let limits = Limits::default();
    let (mut inbox, to) = inbox("127.0.0.1", &limits);
    let outbox = outbox(PushRole::ToDecode, &limits);
    std::thread::scope(|scope| {
        for sender in 0..16 {
            let (outbox, to) = (&outbox, &to);
            scope.spawn(move || {
                for seq in 0..2_000 {
                    // Sixteen threads can be faster than one connection; back-pressure is an answer, not a loss.
                    while let Err(e) = outbox.send(to, numbered(sender, seq)) {
                        assert!(matches!(e, ControlError::Stalled { .. }), "{e}");
                        std::thread::yield_now();
                    }
                }
            });
        }
        expect_numbered(&mut inbox, 16, 2_000);
    });
    assert_eq!(outbox.counters().opened, 1);
}

#[test]
fn cat_f63_a_peer_that_comes_and_goes_never_sees_a_torn_message() {
    let limits = Limits { max_send_queue: 64, ..Limits::default() };
    let (first, to) = inbox("127.0.0.1", &limits);
    drop(first);
    let outbox = outbox(PushRole::ToDecode, &limits);
    let raw = zmq::Context::new();
    let mut seq = 0;
    for _ in 0..40 {
        let pull = raw.socket(zmq::PULL).unwrap();
        pull.set_linger(0).unwrap();
        until("the port", || pull.bind(&to.zmq_uri()).is_ok());
        let mut seen = 0;
        until("twenty messages", || {
            for _ in 0..20 {
                // Stalled, or gone twice in one call: both are fine here.
                let _ = outbox.send(&to, numbered(1, seq));
                seq += 1;
            }
            while let Ok(frames) = pull.recv_multipart(zmq::DONTWAIT) {
                number_of(&frames.into_iter().map(Bytes::from).collect());
                seen += 1;
            }
            seen >= 20
        });
    }
    assert!(outbox.counters().lost >= 39, "each restart was noticed: {:?}", outbox.counters());
    assert!(outbox.len() <= 1);
}

#[test]
fn cat_f63_a_message_cut_off_halfway_does_not_swallow_the_next_one() {
    let limits = Limits::default();
    // Large enough that a peer can go while it is being queued.
    let big: Multipart = std::iter::repeat_n(Bytes::from(vec![1u8; 1 << 20]), 32).collect();
    let (first, to) = inbox("127.0.0.1", &limits);
    drop(first);
    let outbox = outbox(PushRole::ToDecode, &limits);
    let raw = zmq::Context::new();
    let bind = || {
        let pull = raw.socket(zmq::PULL).unwrap();
        pull.set_linger(0).unwrap();
        pull.set_rcvtimeo(20).unwrap();
        until("the port", || pull.bind(&to.zmq_uri()).is_ok());
        pull
    };
    let (mut torn, mut pause) = (0, 0);
    until("three torn messages", || {
        let pull = bind();
        until("a connection", || outbox.send(&to, numbered(0, 0)).is_ok() && pull.recv_multipart(0).is_ok());
        pause = (pause + 1) % 10;
        let end = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(pause));
            drop(pull);
        });
        // Taken, lost with its connection, or gone twice.
        let _ = outbox.send(&to, big.clone());
        end.join().unwrap();
        let mut events = Vec::new();
        outbox.poll_events(99, &mut events);
        let within = |e: &ControlEvent| matches!(e, ControlEvent::PeerLost(_, why)
            if PUSHER == Implementation::Own || why.contains("within a message"));
        torn += events.iter().filter(|e| within(e)).count();
        torn >= 3
    });
    // The one that follows a torn one arrives: each was sent until it did, and this is the last time.
    let pull = bind();
    until("delivery", || outbox.send(&to, numbered(0, 1)).is_ok() && pull.recv_multipart(0).is_ok());
}

#[test]
fn cat_f64_a_peer_that_does_not_handshake_stalls_the_queue_not_the_caller() {
    let limits = Limits { max_send_queue: 10, ..Limits::default() };
    for role in [PushRole::ToDecode, PushRole::ToPrefill] {
        let (_listener, to) = mute();
        let outbox = outbox(role, &limits);
        for seq in 0..10 {
            assert_eq!(outbox.send(&to, numbered(0, seq)), Ok(()));
        }
        for _ in 0..3 {
            let stalled = ControlError::Stalled { endpoint: to.clone(), queued: 10 };
            assert_eq!(outbox.send(&to, numbered(0, 10)), Err(stalled));
        }
        assert_eq!(outbox.counters().stalled, 3);
    }
}

#[test]
fn cat_f64_a_peer_that_stops_reading_stalls_and_loses_nothing_that_was_taken() {
    let limits = Limits { max_send_queue: 10, ..Limits::default() };
    let (mut inbox, to) = inbox("127.0.0.1", &limits);
    let outbox = outbox(PushRole::ToDecode, &limits);
    let ballast = Bytes::from(vec![7u8; 16 << 10]);
    let mut accepted = 0u64;
    let send = |seq: u64| {
        let mut message = numbered(0, seq);
        message.push(ballast.clone());
        outbox.send(&to, message)
    };
    // Connected: only then does the kernel take anything.
    send(0).unwrap();
    assert_eq!(take(&mut inbox, 1).len(), 1);
    accepted += 1;
    // The queue also refuses while the I/O thread is merely busy: stalled means that many tries in a row, with time
    // for it between them, took nothing.
    let mut refused = 0;
    until("a stall", || {
        while send(accepted).map_err(|e| assert!(matches!(e, ControlError::Stalled { .. }), "{e}")).is_ok() {
            accepted += 1;
            refused = 0;
        }
        refused += 1;
        refused > 50
    });
    assert!(accepted > 100, "at least the buffers of the kernel were filled: {accepted}");
    for seq in 1..accepted {
        let mut message = take(&mut inbox, 1).remove(0);
        assert_eq!(message.pop(), Some(ballast.clone()));
        assert_eq!(number_of(&message), (0, seq));
    }
    until("room", || send(accepted).is_ok());
    assert_eq!(take(&mut inbox, 1)[0].len(), 4);
}

#[test]
fn cat_f66_ipv6_loopback_wildcards_and_names() {
    let limits = Limits::default();
    for host in ["[::1]", "::1", "::", "0.0.0.0", "127.0.0.1", "localhost"] {
        let (mut inbox, to) = inbox(host, &limits);
        assert_eq!(to.host(), host.trim_matches(['[', ']']));
        let outbox = outbox(PushRole::ToDecode, &limits);
        outbox.send(&to, numbered(6, 0)).unwrap();
        outbox.send(&to, numbered(6, 1)).unwrap();
        // A name is looked up elsewhere; the messages leave when the answer is taken.
        until("delivery", || {
            outbox.sweep(Timestamp::ZERO);
            inbox.wait(&[], Some(Duration::ZERO)).unwrap().inbox
        });
        let got: Vec<_> = take(&mut inbox, 2).iter().map(number_of).collect();
        assert_eq!(got, [(6, 0), (6, 1)], "{host}");
    }
}

#[test]
fn cat_f66_an_answer_to_a_lookup_wakes_the_shard() {
    let limits = Limits::default();
    let (mut inbox, to) = inbox("localhost", &limits);
    let wake = Arc::new(WakeFd::new().unwrap());
    let mut outbox = raw(PushRole::ToPrefill, &limits);
    outbox.set_wake(wake.clone());
    wake.arm();
    outbox.send(&to, numbered(0, 0)).unwrap();
    assert_eq!(inbox.wait(&[wake.fd()], Some(HANG)).unwrap().fds[..], [wake.fd()]);
    until("delivery", || {
        outbox.poll_events(1, &mut Vec::new());
        inbox.wait(&[], Some(Duration::from_millis(1))).unwrap().inbox
    });
    assert_eq!(take(&mut inbox, 1), [numbered(0, 0)]);
}

#[test]
fn r_h2_an_endpoint_that_cannot_exist_is_a_typed_error() {
    let limits = Limits::default();
    let outbox = outbox(PushRole::ToDecode, &limits);
    for (host, port) in [("10.0.0.1;10.0.0.2", 1), ("a\0b", 1), ("", 1), ("*", 1), ("127.0.0.1", 0)] {
        let sent = outbox.send(&Endpoint::new(host, port), numbered(0, 0));
        assert!(matches!(sent, Err(ControlError::Unreachable { .. })), "{host:?}: {sent:?}");
    }
    assert!(outbox.is_empty());
    let unknown = Endpoint::new("no-such-host.invalid", 1);
    outbox.send(&unknown, numbered(0, 0)).unwrap();
    assert_eq!(until_lost(&outbox).0, unknown);
    let bound = ZmqSockets::new(PULLER, &limits).unwrap().bind("203.0.113.1", &limits);
    assert!(matches!(bound, Err(ZmqError::Bind { host, .. }) if host == "203.0.113.1"));
}

#[test]
fn cat_f67_64_managers_have_64_ports() {
    let limits = Limits { max_sockets: 16, ..Limits::default() };
    let all: Vec<_> = (0..64).map(|_| inbox("127.0.0.1", &limits)).collect();
    let ports: BTreeSet<_> = all.iter().map(|(_, to)| to.port()).collect();
    assert_eq!(ports.len(), 64);
    assert!(!ports.contains(&0));
}

/// Connections to `port` on this host that are established, as the kernel sees them.
fn connections_to(port: u16) -> usize {
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let remote = format!(":{port:04X}");
    let columns = |line: &str| line.split_whitespace().skip(2).take(2).map(str::to_owned).collect::<Vec<_>>();
    table.lines().skip(1).map(columns).filter(|c| c[0].ends_with(&remote) && c[1] == "01").count()
}

#[test]
fn cat_f58_ten_thousand_messages_use_one_connection() {
    let limits = Limits::default();
    let (mut inbox, to) = inbox("127.0.0.1", &limits);
    let outbox = outbox(PushRole::ToDecode, &limits);
    for seq in 0..10_000 {
        outbox.send(&to, numbered(0, seq)).unwrap();
    }
    expect_numbered(&mut inbox, 1, 10_000);
    assert_eq!(connections_to(to.port()), 1);
    assert_eq!((outbox.counters().opened, outbox.len()), (1, 1));
}

#[test]
fn cat_f53_a_lost_decode_peer_is_reported_and_not_called_again() {
    let limits = Limits::default();
    let (mut gone, to) = inbox("127.0.0.1", &limits);
    let outbox = outbox(PushRole::ToDecode, &limits);
    outbox.send(&to, numbered(0, 0)).unwrap();
    // This one sends nothing any more when the peer is gone: it must not call it either.
    let unwatched = self::outbox(PushRole::ToDecode, &limits);
    unwatched.send(&to, numbered(1, 0)).unwrap();
    take(&mut gone, 2);
    drop(gone);
    assert_eq!(until_lost(&outbox), (to.clone(), "the peer closed the connection".to_owned()));
    assert!(outbox.is_empty());

    // Somebody else gets the port. The control group reconnects: three of its attempts are longer than one of ours.
    let mut successor = None;
    until("the port", || {
        successor = TcpListener::bind(("127.0.0.1", to.port())).ok();
        successor.is_some()
    });
    let successor = successor.unwrap();
    successor.set_nonblocking(true).unwrap();
    let (control, control_to) = mute();
    let reconnects = driven(PushRole::ToPrefill, &limits, true);
    reconnects.send(&control_to, numbered(0, 0)).unwrap();
    for _ in 0..3 {
        drop(control.accept().unwrap());
    }
    assert_eq!(successor.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);

    // The next use makes a new connection.
    outbox.send(&to, numbered(0, 1)).unwrap();
    until("a connection", || successor.accept().is_ok());
    assert_eq!(outbox.counters().opened, 2);
}

#[test]
fn cat_f53_a_refused_connection_is_a_lost_peer() {
    let limits = Limits::default();
    let (listener, to) = mute();
    drop(listener);
    let outbox = outbox(PushRole::ToDecode, &limits);
    outbox.send(&to, numbered(0, 0)).unwrap();
    assert_eq!(until_lost(&outbox), (to, "the connection was refused".to_owned()));
}

#[test]
fn cat_f53_connections_that_never_come_up_are_given_up() {
    let limits = Limits::default();
    for (role, patience) in [(PushRole::ToDecode, 30), (PushRole::ToPrefill, 60)] {
        let (_listener, to) = mute();
        let outbox = outbox(role, &limits);
        let at = |s: u64| Timestamp::ZERO + Duration::from_secs(s);
        let mut events = Vec::new();
        outbox.send(&to, numbered(0, 0)).unwrap();
        assert_eq!(outbox.sweep(at(1)), Some(at(1) + Duration::from_millis(100)));
        outbox.sweep(at(patience));
        outbox.poll_events(9, &mut events);
        assert_eq!(events, []);
        outbox.sweep(at(patience + 1));
        outbox.poll_events(9, &mut events);
        assert_eq!(events, [ControlEvent::PeerLost(to, format!("no connection for {patience} s"))]);
        assert_eq!(outbox.sweep(at(patience + 2)), None);
    }
}

#[test]
fn cat_f53_a_prefill_peer_that_restarts_is_found_again_and_a_closed_one_is_left_alone() {
    let limits = Limits::default();
    let (listener, to) = mute();
    let outbox = driven(PushRole::ToPrefill, &limits, true);
    outbox.send(&to, numbered(3, 0)).unwrap();
    // It accepts, dies, and comes back as a real peer: the message was kept.
    drop(listener.accept().unwrap());
    drop(listener);
    let raw = zmq::Context::new();
    let pull = raw.socket(zmq::PULL).unwrap();
    until("the port", || pull.bind(&to.zmq_uri()).is_ok());
    pull.set_rcvtimeo(60_000).unwrap();
    let got: Multipart = pull.recv_multipart(0).unwrap().into_iter().map(Bytes::from).collect();
    assert_eq!(number_of(&got), (3, 0));
    let mut events = Vec::new();
    outbox.poll_events(99, &mut events);
    outbox.close(&to);
    assert!(outbox.is_empty());
    until("the end of the connection", || connections_to(to.port()) == 0);
    events.clear();
    outbox.poll_events(9, &mut events);
    assert_eq!(events, [], "a close that was asked for is no loss");
}

/// What it was sent may be lost, and the process that comes next knows nothing of it. As long as nobody is there it is said
/// again: whoever asked a registry meanwhile may have got the old address.
#[test]
fn r_d7_a_connection_to_prefill_that_breaks_is_reported_until_it_is_made_again() {
    let limits = Limits::default();
    let (mut first, to) = inbox("127.0.0.1", &limits);
    let outbox = driven(PushRole::ToPrefill, &limits, true);
    outbox.send(&to, numbered(3, 0)).unwrap();
    assert_eq!(take(&mut first, 1), [numbered(3, 0)]);
    drop(first);
    assert_eq!(until_lost(&outbox), (to.clone(), "the peer closed the connection".to_owned()));
    assert!(outbox.contains(&to), "it is called again");
    outbox.send(&to, numbered(3, 1)).unwrap();
    assert_eq!(until_lost(&outbox).0, to, "nobody is there");
    assert!(outbox.contains(&to), "and again");
    let raw = zmq::Context::new();
    let pull = raw.socket(zmq::PULL).unwrap();
    until("the port", || pull.bind(&to.zmq_uri()).is_ok());
    pull.set_rcvtimeo(60_000).unwrap();
    let got: Multipart = pull.recv_multipart(0).unwrap().into_iter().map(Bytes::from).collect();
    assert_eq!(number_of(&got), (3, 1));
    let mut events = Vec::new();
    outbox.poll_events(99, &mut events);
    events.clear();
    std::thread::sleep(std::time::Duration::from_millis(200));
    outbox.poll_events(9, &mut events);
    assert_eq!((events, outbox.counters().opened), (Vec::new(), 1), "it is up, and was the same all along");
}

#[test]
fn evictions_hold_the_bound_and_spare_what_is_used_or_undelivered() {
    let limits = Limits { max_sockets: 3, ..Limits::default() };
    let mut peers: Vec<_> = (0..6).map(|_| inbox("127.0.0.1", &limits)).collect();
    let (_listener, pending) = mute();
    let outbox = outbox(PushRole::ToDecode, &limits);
    outbox.send(&pending, numbered(0, 0)).unwrap();
    for round in 0..2 {
        for (inbox, to) in &mut peers {
            outbox.send(to, numbered(round, 0)).unwrap();
            assert!(outbox.len() <= 3);
            // Delivered even when evicted later, and certainly connected now.
            assert_eq!(number_of(&take(inbox, 1)[0]), (round, 0));
            assert!(outbox.contains(&pending), "it has an undelivered message");
        }
    }
    assert_eq!(outbox.counters().evicted, 10);
    assert_eq!(outbox.counters().lost, 0);
}

#[test]
fn evictions_deliver_what_is_queued() {
    let limits = Limits { max_sockets: 1, ..Limits::default() };
    let mut peers: Vec<_> = (0..3).map(|_| inbox("127.0.0.1", &limits)).collect();
    let outbox = outbox(PushRole::ToDecode, &limits);
    for (_, to) in &peers {
        // Not even connected when the next send evicts it: there is no other, so the bound wins, and linger delivers.
        outbox.send(to, numbered(0, 0)).unwrap();
    }
    assert_eq!((outbox.len(), outbox.counters().evicted), (1, 2));
    let end = std::thread::spawn(move || drop(outbox));
    for (inbox, _) in &mut peers {
        assert_eq!(take(inbox, 1), [numbered(0, 0)]);
    }
    end.join().unwrap();
}

#[test]
fn cat_f61_messages_over_a_limit_are_dropped_whole_and_the_next_one_works() {
    let limits = Limits { max_frames: 4, max_message_bytes: 1000, ..Limits::default() };
    let (mut inbox, to) = inbox("127.0.0.1", &limits);
    let outbox = outbox(PushRole::ToDecode, &limits);
    let many: Multipart = std::iter::repeat_n(Bytes::from_static(b"x"), 40).collect();
    for bad in [many, message(&[&[0; 999], &[0; 2], b"tail"]), message(&[&[0; 1001]])] {
        outbox.send(&to, bad).unwrap();
    }
    outbox.send(&to, Multipart::new()).unwrap();
    let edge = message(&[b"", &[1; 500], &[2; 500], b""]);
    outbox.send(&to, edge.clone()).unwrap();
    outbox.send(&to, numbered(1, 1)).unwrap();
    assert_eq!(take(&mut inbox, 2), [edge, numbered(1, 1)]);
    assert_eq!(inbox.counters(), InboxCounters { messages: 2, too_many_frames: 1, too_many_bytes: 2, refused: 0 });
}

#[test]
fn cat_f61_a_frame_over_the_limit_costs_its_sender_the_connection_only() {
    let limits = Limits { max_frame_bytes: 1000, ..Limits::default() };
    let (mut inbox, to) = inbox("127.0.0.1", &limits);
    let other = outbox(PushRole::ToDecode, &limits);
    other.send(&to, numbered(2, 0)).unwrap();
    take(&mut inbox, 1);

    let bad = outbox(PushRole::ToDecode, &limits);
    bad.send(&to, message(&[&[0; 1001]])).unwrap();
    let lost = until_lost_while(&bad, || drop(inbox.wait(&[], Some(Duration::from_millis(1)))));
    assert_eq!(lost.0, to);
    bad.send(&to, numbered(1, 0)).unwrap();
    assert_eq!(take(&mut inbox, 1), [numbered(1, 0)]);
    other.send(&to, numbered(2, 1)).unwrap();
    assert_eq!(take(&mut inbox, 1), [numbered(2, 1)]);
    assert_eq!(other.counters().opened, 1);
}

#[test]
fn frames_of_every_size_arrive_as_sent() {
    let limits = Limits::default();
    let (mut inbox, to) = inbox("127.0.0.1", &limits);
    let outbox = outbox(PushRole::ToPrefill, &limits);
    let sizes = [0, 1, 29, 30, 33, 34, 255, 256, 4095, 4096, 8191, 8192, 70_000, 3 << 20];
    let frames: Multipart = sizes.iter().map(|&n| (0..n).map(|i| (i % 251) as u8).collect::<Vec<_>>().into()).collect();
    for _ in 0..3 {
        outbox.send(&to, frames.clone()).unwrap();
    }
    // Kept while later ones are received: no buffer is shared with libzmq's next read.
    assert_eq!(take(&mut inbox, 3), [frames.clone(), frames.clone(), frames]);
}

#[test]
fn a_wait_ends_by_message_by_wake_or_by_time() {
    let limits = Limits::default();
    let (mut inbox, to) = inbox("127.0.0.1", &limits);
    let wake = Arc::new(WakeFd::new().unwrap());
    let fds = [wake.fd()];

    let ready = inbox.wait(&fds, Some(Duration::from_micros(1))).unwrap();
    assert!(!ready.inbox && ready.fds.is_empty());

    // Armed, queue looked at, asleep; the waker queues first.
    let (commands, queue) = channel();
    wake.arm();
    assert!(queue.try_recv().is_err());
    let waker = wake.clone();
    let thread = std::thread::spawn(move || {
        commands.send(42).unwrap();
        waker.wake()
    });
    let ready = inbox.wait(&fds, Some(HANG)).unwrap();
    assert_eq!((ready.inbox, &ready.fds[..]), (false, &fds[..]));
    assert!(thread.join().unwrap(), "a sleeper costs the system call");
    wake.disarm();
    assert_eq!(queue.try_recv(), Ok(42));

    // A second message behind the first does not make the descriptor of the socket ready again; it is still seen.
    let outbox = outbox(PushRole::ToDecode, &limits);
    outbox.send(&to, numbered(0, 0)).unwrap();
    outbox.send(&to, numbered(0, 1)).unwrap();
    for seq in 0..2 {
        let ready = inbox.wait(&fds, Some(HANG)).unwrap();
        assert_eq!((ready.inbox, ready.fds.len()), (true, 0));
        let mut got = Vec::new();
        assert_eq!(inbox.recv(1, &mut got), Ok(1));
        assert_eq!(got, [numbered(0, seq)]);
    }
}

#[test]
fn no_wake_is_lost_between_arming_and_sleeping() {
    let limits = Limits::default();
    let (mut inbox, _) = inbox("127.0.0.1", &limits);
    let wake = Arc::new(WakeFd::new().unwrap());
    let (commands, queue) = channel::<u32>();
    let waker = wake.clone();
    let thread = std::thread::spawn(move || {
        for i in 0..20_000 {
            commands.send(i).unwrap();
            waker.wake();
        }
    });
    let mut next = 0;
    while next < 20_000 {
        wake.arm();
        let mut work = queue.try_recv().ok();
        if work.is_none() {
            let ready = inbox.wait(&[wake.fd()], Some(HANG)).unwrap();
            assert_eq!(ready.fds.len(), 1, "slept through command {next}");
        }
        wake.disarm();
        work = work.or_else(|| queue.try_recv().ok());
        while let Some(i) = work {
            assert_eq!(i, next);
            next += 1;
            work = queue.try_recv().ok();
        }
    }
    thread.join().unwrap();
}

#[test]
fn the_control_plane_reports_losses_and_messages_in_order() {
    let limits = Limits::default();
    let (mut inbox, to) = inbox("127.0.0.1", &limits);
    let mut plane = ZmqControl::new(raw(PushRole::ToDecode, &limits));
    for seq in 0..3 {
        plane.send(&to, numbered(0, seq)).unwrap();
    }
    let clock = MonotonicClock::new();
    let mut got = Vec::new();
    until("three messages", || {
        plane.flush();
        plane.tick(clock.now());
        inbox.wait(&[], Some(Duration::from_millis(1))).unwrap();
        inbox.recv(3, &mut got).unwrap();
        got.len() == 3
    });
    for message in got {
        plane.push_incoming(message);
    }
    drop(inbox);
    until("the loss", || {
        plane.tick(clock.now());
        plane.outbox().is_empty()
    });
    let mut events = Vec::new();
    plane.recv(2, &mut events);
    plane.recv(9, &mut events);
    let lost = ControlEvent::PeerLost(to, "the peer closed the connection".to_owned());
    let message = |seq| ControlEvent::Message(numbered(0, seq));
    assert_eq!(events, [lost, message(0), message(1), message(2)]);
    assert_eq!(plane.pending(), 0);
}

#[test]
fn a_tap_hears_what_was_taken_and_nothing_that_was_refused() {
    #[derive(Default)]
    struct Heard(Mutex<Vec<(Option<Endpoint>, Multipart)>>);
    impl ControlTap for Heard {
        fn sent(&self, to: &Endpoint, frames: &[Bytes]) {
            self.0.lock().unwrap().push((Some(to.clone()), frames.iter().cloned().collect()));
        }
        fn received(&self, frames: &[Bytes]) {
            self.0.lock().unwrap().push((None, frames.iter().cloned().collect()));
        }
    }
    let limits = Limits::default();
    let (_inbox, to) = inbox("127.0.0.1", &limits);
    let heard = Arc::new(Heard::default());
    let mut plane = ZmqControl::new(raw(PushRole::ToDecode, &limits)).tapped(Some(heard.clone()));
    plane.send(&to, numbered(0, 0)).unwrap();
    plane.send(&Endpoint::new("", 1), numbered(0, 1)).unwrap_err();
    plane.push_incoming(numbered(1, 0));
    plane.push_incoming(numbered(1, 1));
    // Not before the shard takes it.
    let mut events = Vec::new();
    plane.recv(1, &mut events);
    assert_eq!(*heard.0.lock().unwrap(), [(Some(to), numbered(0, 0)), (None, numbered(1, 0))]);
    plane.recv(9, &mut events);
    assert_eq!(events, [0, 1].map(|seq| ControlEvent::Message(numbered(1, seq))));
    assert_eq!(heard.0.lock().unwrap().last(), Some(&(None, numbered(1, 1))));
}
