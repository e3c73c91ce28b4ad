//! The decode role: receivers in room order, metadata as soon as prefill is known, every byte verified at the end.

use std::collections::{HashMap, VecDeque};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use kv_transfer::engine::RoomEvent;
use kv_transfer::manager::{DecodeConfig, DecodeManager, KvReceiver, MetadataOptions};
use kv_transfer::topology::DecodeRank;
use kv_transfer::{KvPoll, Room};
use serde_json::{Value, json};

use super::args::{Attn, Corrupt, DecodeAbort, DecodeArgs, Verify, seconds, time_of};
use super::events::{Window, emit, ms};
use super::input::{Input, kill_self};
use super::store::Store;
use super::{GOOD, NO_BOOTSTRAP, ROOMS_FAILED, capture, rank};
use crate::driver::managed::wait_readable;
use crate::driver::protocol::Role;
use crate::error::{CliError, Result};

/// How far a room has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Prefill is not known.
    Init,
    /// It is; the metadata goes out at this time.
    Hold(Instant),
    /// The metadata is out.
    Meta,
    /// Aborted by us.
    Aborted,
    /// Failed, its pages not free yet.
    Held(Instant),
}

struct Open {
    index: usize,
    receiver: KvReceiver,
    slot: u32,
    phase: Phase,
    published: Option<Instant>,
    aborted: Option<Instant>,
    /// The event of a failed room, said when its pages are free.
    line: Option<Value>,
}

/// A room that went well.
struct Done {
    index: usize,
    room: u64,
    slot: u32,
    latency: Option<Duration>,
}

struct Decode<'a> {
    args: &'a DecodeArgs,
    manager: &'a DecodeManager,
    store: &'a Store,
    tap: &'a capture::Capture,
    bootstrap: String,
    open: HashMap<u64, Open>,
    held: usize,
    /// Rooms that something is due for: a hold, an abort, a kill.
    timed: usize,
    done: Vec<Done>,
    failed: usize,
    late: usize,
    warm: Vec<u64>,
    warm_left: usize,
    window: Window,
    hold: Duration,
    release: Duration,
}

/// Run it; the exit status.
pub fn run(args: &DecodeArgs) -> Result<u8> {
    let common = &args.common;
    let input = Input::start();
    let fail = |what: &str, e: &dyn std::fmt::Display| CliError::new(format!("{what}: {e}")).hint_by_cause("");
    let backend = rank::backend(common)?;
    let store = Store::new(common, Role::Decode)?;
    let layout = rank::layout(common, &*backend.transport, &store)?;
    let agent = backend.transport.local_name().to_owned();
    let tap = capture::tap(common)?;
    let config = DecodeConfig {
        host: Some(common.host_ip.clone()),
        tap: Some(tap.clone()),
        waiting_timeout: time_of("--wait-timeout", args.wait_timeout, "WAITING_TIMEOUT", 300.0)?,
        heartbeat_interval: time_of("--heartbeat", args.heartbeat, "HEARTBEAT_INTERVAL", 5.0)?,
        rank: DecodeRank {
            attn_tp_size: common.tp_size,
            engine_rank: common.tp_rank,
            pp_size: common.pp_size,
            pp_rank: common.pp_rank,
            is_mla: common.attn == Attn::Mla,
            ..DecodeRank::default()
        },
        ..DecodeConfig::default()
    };
    let hooks = rank::Dressed::new(backend.hooks, args)?;
    let manager =
        DecodeManager::start(config, backend.transport, hooks, layout).map_err(|e| fail("cannot start decode", &e))?;
    let at = manager.endpoint().clone();
    let names = rank::names(common);
    emit(
        "ready",
        json!({
            "role": "decode", "rank": names, "rank_ip": at.host(), "rank_port": at.port(), "backend": common.backend,
            "agent": agent,
        }),
    )?;
    let bootstrap = rank::bootstrap_addr(common);
    if !answers(&bootstrap, seconds("--connect-timeout", args.connect_timeout)?, &input) {
        let reason = format!("no prefill at {bootstrap}");
        emit("error", json!({ "role": "decode", "rank": names, "where": "bootstrap", "reason": reason }))?;
        return Ok(NO_BOOTSTRAP);
    }
    let fd = manager.subscribe().map_err(|e| fail("cannot watch rooms", &e))?;
    let rooms = rank::rooms(common);
    let warm: Vec<u64> = rooms.iter().take(common.warmup).map(|(_, room)| *room).collect();
    let mut decode = Decode {
        args,
        manager: &manager,
        store: &store,
        tap: &tap,
        bootstrap,
        open: HashMap::new(),
        held: 0,
        timed: 0,
        done: Vec::new(),
        failed: 0,
        late: 0,
        warm_left: warm.len(),
        warm,
        window: Window::default(),
        hold: seconds("--hold", args.hold)?,
        release: args.release()?,
    };
    decode.all(&rooms, &input, fd)?;
    let code = decode.finish()?;
    input.linger(seconds("--d-linger", args.d_linger)?);
    Ok(code)
}

/// Wait until something accepts connections there.
fn answers(at: &str, patience: Duration, input: &Input) -> bool {
    let end = Instant::now() + patience;
    loop {
        let mut addrs = at.to_socket_addrs().into_iter().flatten();
        if addrs.any(|a| TcpStream::connect_timeout(&a, Duration::from_secs(2)).is_ok()) {
            return true;
        }
        if Instant::now() >= end || input.terminated() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

impl Decode<'_> {
    fn all(&mut self, rooms: &[(usize, u64)], input: &Input, fd: RawFd) -> Result<()> {
        let common = &self.args.common;
        let end = Instant::now() + rank::timeout(common)?;
        let mut waiting: VecDeque<_> = rooms.iter().copied().collect();
        let at_a_time = if common.concurrency == 0 { usize::MAX } else { common.concurrency };
        let (mut events, mut told) = (Vec::new(), false);
        while (!waiting.is_empty() || !self.open.is_empty()) && Instant::now() < end && !input.terminated() {
            let started = rooms.len() - waiting.len();
            let mut more = rank::allowed(common, rooms, input).saturating_sub(started);
            while more > 0 && self.open.len() - self.held < at_a_time {
                // The window begins when the rooms before it are over.
                let Some(&(index, room)) = waiting.front() else { break };
                if self.warm_left > 0 && !self.warm.contains(&room) {
                    break;
                }
                waiting.pop_front();
                self.open(index, room)?;
                more -= 1;
            }
            if !told && self.open.len() == self.held && !waiting.is_empty() && more == 0 {
                told = true;
                emit("gate", json!({ "role": "decode", "rank": rank::names(common), "room": rooms[started].1 }))?;
            }
            self.manager.drain_events(&mut events);
            if events.is_empty() {
                let next = if self.timed > 0 { Duration::from_millis(1) } else { Duration::from_millis(50) };
                wait_readable(fd, next);
                self.manager.drain_events(&mut events);
            }
            for event in events.drain(..) {
                self.event(&event)?;
            }
            if self.timed > 0 {
                let rooms: Vec<u64> = self.open.keys().copied().collect();
                rooms.into_iter().try_for_each(|room| self.due(room))?;
            }
        }
        Ok(())
    }

    fn targeted(&self, room: u64) -> bool {
        self.args.d_abort_at != DecodeAbort::None
            && self.args.d_abort_rooms.as_ref().is_none_or(|r| r.0.contains(&room))
    }

    fn open(&mut self, index: usize, room: u64) -> Result<()> {
        let error = |e: &dyn std::fmt::Display| CliError::new(format!("room {room}: {e}"));
        let number = Room::new(room).ok_or_else(|| error(&"no room number"))?;
        let receiver = self.manager.receiver(number, &self.bootstrap).map_err(|e| error(&e))?;
        let slot = self.store.rows.take().map_err(|e| error(&e))?;
        receiver.init(None).map_err(|e| error(&e))?;
        let open = Open { index, receiver, slot, phase: Phase::Init, published: None, aborted: None, line: None };
        self.open.insert(room, open);
        Ok(())
    }

    fn event(&mut self, event: &RoomEvent) -> Result<()> {
        let room = event.room.get();
        match event.poll {
            KvPoll::WaitingForInput => self.known(room),
            KvPoll::Success => {
                self.succeeded(room);
                Ok(())
            }
            KvPoll::Failed => self.failed(room),
            KvPoll::Bootstrapping | KvPoll::Transferring => Ok(()),
        }
    }

    /// Prefill's ranks are known.
    fn known(&mut self, room: u64) -> Result<()> {
        let Some(open) = self.open.get_mut(&room).filter(|o| o.phase == Phase::Init) else { return Ok(()) };
        open.phase = Phase::Hold(Instant::now() + self.hold);
        self.timed += 1;
        self.due(room)
    }

    /// What is due for a room now.
    fn due(&mut self, room: u64) -> Result<()> {
        let targeted = self.targeted(room);
        let Some(open) = self.open.get_mut(&room) else { return Ok(()) };
        match (open.phase, self.args.d_abort_at) {
            (Phase::Hold(at), _) if at > Instant::now() => Ok(()),
            (Phase::Hold(_), DecodeAbort::BeforeMetadata) if targeted => {
                self.timed -= 1;
                (open.phase, open.aborted) = (Phase::Aborted, Some(Instant::now()));
                open.receiver.abort();
                Ok(())
            }
            (Phase::Hold(_), action) => {
                let prefix = self.args.decode_prefix_pages;
                let pages = self.store.pages_of(open.index, Role::Decode);
                let tokens = u64::from(prefix) * u64::from(self.args.common.page_size);
                let options = MetadataOptions { decode_prefix_len: tokens, ..MetadataOptions::default() };
                open.phase = Phase::Meta;
                if !targeted || action == DecodeAbort::BeforeMetadata {
                    self.timed -= 1;
                }
                if !self.warm.contains(&room) {
                    self.window.start();
                }
                open.published = Some(Instant::now());
                let rest = pages.get(prefix as usize..).unwrap_or_default();
                let sent = open.receiver.send_metadata(rest, open.slot, options);
                sent.map_err(|e| CliError::new(format!("room {room}: {e}")))
            }
            (Phase::Meta, DecodeAbort::AfterMetadata(after) | DecodeAbort::Kill(after)) if targeted => {
                if open.published.is_none_or(|t| t.elapsed() < after) {
                    return Ok(());
                }
                if let DecodeAbort::Kill(_) = self.args.d_abort_at {
                    emit("kill", json!({ "role": "decode", "room": room }))?;
                    kill_self();
                }
                self.timed -= 1;
                (open.phase, open.aborted) = (Phase::Aborted, Some(Instant::now()));
                open.receiver.abort();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// A room has ended: nothing more is due for it.
    fn ended(&mut self, room: u64) {
        let targeted = self.targeted(room);
        let waits = matches!(self.args.d_abort_at, DecodeAbort::AfterMetadata(_) | DecodeAbort::Kill(_));
        match self.open.get(&room).map(|o| o.phase) {
            Some(Phase::Hold(_)) => self.timed -= 1,
            Some(Phase::Meta) if targeted && waits => self.timed -= 1,
            _ => {}
        }
        self.warm_left -= usize::from(self.warm.contains(&room));
    }

    fn succeeded(&mut self, room: u64) {
        self.ended(room);
        let Some(open) = self.open.remove(&room) else { return };
        let latency = open.published.map(|t| t.elapsed());
        if !self.warm.contains(&room) {
            self.window.end(latency);
        }
        self.done.push(Done { index: open.index, room, slot: open.slot, latency });
    }

    fn failed(&mut self, room: u64) -> Result<()> {
        if self.open.get(&room).is_some_and(|o| !matches!(o.phase, Phase::Held(_))) {
            self.ended(room);
            if !self.warm.contains(&room) {
                self.window.end(None);
            }
        }
        let Some(open) = self.open.get_mut(&room) else { return Ok(()) };
        if !matches!(open.phase, Phase::Held(_)) {
            let reason = open.receiver.failure().map(|e| e.reason);
            open.line = Some(json!({
                "role": "decode", "rank": rank::names(&self.args.common), "room": room, "status": "Failed",
                "reason": reason, "latency_ms": open.published.map(|t| ms(t.elapsed())),
            }));
            open.phase = Phase::Held(Instant::now());
            self.held += 1;
            self.failed += 1;
        }
        if open.receiver.releasable() {
            self.held -= 1;
            if let Some(open) = self.open.remove(&room) {
                emit("room", released(open, self.release, self.tap.acks(room)))?;
            }
        }
        Ok(())
    }

    /// Verify, and say how every room ended.
    fn finish(&mut self) -> Result<u8> {
        self.window.close();
        let (args, names) = (self.args, rank::names(&self.args.common));
        for (room, open) in self.open.drain() {
            match open.line {
                Some(mut line) => {
                    line["abort_ack"] = false.into();
                    line["held"] = true.into();
                    emit("room", line)?;
                }
                None => {
                    self.late += 1;
                    let phase = format!("{:?}", open.phase);
                    let poll = format!("{:?}", open.receiver.poll());
                    emit(
                        "room",
                        json!({ "role": "decode", "rank": names, "room": room, "status": "Timeout", "phase": phase, "poll": poll }),
                    )?;
                }
            }
        }
        match (args.self_test_corrupt, self.done.first()) {
            (Corrupt::Kv, Some(done)) => self.store.spoil_kv(done.index),
            (Corrupt::Aux, Some(done)) => self.store.spoil_row(done.slot)?,
            (Corrupt::Stray, _) => self.store.spoil_stray(),
            _ => {}
        }
        let mut corrupt = 0;
        for done in &self.done {
            let mut line = json!({
                "role": "decode", "rank": names, "room": done.room, "status": "Success", "reason": null,
                "latency_ms": done.latency.map(ms),
            });
            let mut good = true;
            if args.verify == Verify::End {
                let (bad, places) = self.store.check(done.index, done.room, done.slot, args.decode_prefix_pages);
                good = bad == 0;
                corrupt += usize::from(!good);
                line["verified"] = good.into();
                line["bad"] = bad.into();
                line["where"] = json!(places);
            }
            if !(args.common.quiet && good) {
                emit("room", line)?;
            }
        }
        let all_well = self.failed + self.late == 0;
        if args.verify == Verify::End && all_well {
            let strays = self.store.strays(self.done.iter().map(|d| d.index), args.decode_prefix_pages);
            if !strays.is_empty() {
                corrupt += 1;
                emit("stray", json!({ "role": "decode", "rank": names, "where": strays }))?;
            }
        }
        let mut summary = self.window.summary(self.store.room_bytes(args.decode_prefix_pages));
        summary["role"] = "decode".into();
        summary["rank"] = names;
        summary["rooms"] = (self.done.len() + self.failed + self.late).into();
        summary["success"] = self.done.len().into();
        summary["failed"] = (self.failed + self.late).into();
        summary["corrupt"] = corrupt.into();
        summary["verify"] = if args.verify == Verify::End { "end" } else { "none" }.into();
        emit("summary", summary)?;
        Ok(if all_well && corrupt == 0 { GOOD } else { ROOMS_FAILED })
    }
}

/// The event of a failed room whose pages are free now.
fn released(open: Open, timeout: Duration, acks: usize) -> Value {
    let mut line = open.line.unwrap_or_default();
    if let (Phase::Held(since), Some(_)) = (open.phase, open.published) {
        // By the timeout alone, or by proof before it.
        let waited = open.aborted.unwrap_or(since).elapsed();
        line["abort_ack"] = (waited + Duration::from_millis(100) < timeout).into();
        line["abort_ack_ms"] = ms(waited).into();
        line["required_acks"] = acks.into();
    }
    line
}
