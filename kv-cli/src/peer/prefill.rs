//! The prefill role: senders in room order, chunks as soon as decode is known, aborts where they are asked for.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use kv_transfer::bootstrap::{BootstrapServer, RegistrationConfig};
use kv_transfer::engine::RoomEvent;
use kv_transfer::manager::{KvSender, PrefillConfig, PrefillIdentity, PrefillManager, SendOptions};
use kv_transfer::{KvPoll, Room};
use serde_json::json;

use super::args::{PrefillAbort, PrefillArgs, seconds, time_of};
use super::events::{Window, emit, ms};
use super::input::{Input, kill_self};
use super::store::Store;
use super::{GOOD, ROOMS_FAILED, capture, rank};
use crate::driver::agreement;
use crate::driver::managed::wait_readable;
use crate::driver::protocol::Role;
use crate::error::{CliError, Result};

/// How far a room has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Decode is not known.
    Boot,
    /// Chunks are left to send.
    Send,
    /// All are sent.
    Wait,
    /// No more are sent.
    Stopped,
    /// Failed, its pages not free yet.
    Held,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Boot => "boot",
            Self::Send => "send",
            Self::Wait => "wait",
            Self::Stopped => "stopped",
            Self::Held => "held",
        }
    }
}

struct Open {
    sender: KvSender,
    slot: u32,
    pages: Vec<i32>,
    sent: usize,
    chunks: usize,
    phase: Phase,
    opened: Instant,
    known: Option<Instant>,
    next_chunk: Instant,
}

struct Prefill<'a> {
    args: &'a PrefillArgs,
    manager: &'a PrefillManager,
    store: &'a Store,
    slots: HashMap<u64, u32>,
    open: HashMap<u64, Open>,
    window: Window,
    warm: Vec<u64>,
    delay: Duration,
    success: usize,
    failed: usize,
    /// Of `open`: failed, their pages not free yet.
    held: usize,
}

/// Run it; the exit status.
pub fn run(args: &PrefillArgs) -> Result<u8> {
    let common = &args.common;
    let input = Input::start();
    let fail = |what: &str, e: &dyn std::fmt::Display| CliError::new(format!("{what}: {e}")).hint_by_cause("");
    let server: Option<BootstrapServer> = match args.no_bootstrap {
        true => None,
        false => Some(agreement::serve(&common.bootstrap_host, common.bootstrap_port)?),
    };
    let port = server.as_ref().map_or(common.bootstrap_port, |s| s.local_addr().port());
    let backend = rank::backend(common)?;
    let store = Store::new(common, Role::Prefill)?;
    let rooms = rank::rooms(common);
    let started = Instant::now();
    let mut slots = HashMap::new();
    for (n, (i, room)) in rooms.iter().enumerate() {
        if n == 0 || !common.share_src {
            store.fill_pages(*i, *room);
        }
        slots.insert(*room, store.fill_row(*room)?);
    }
    let layout = rank::layout(common, &*backend.transport, &store)?;
    let agent = backend.transport.local_name().to_owned();
    let regions = layout.spec().kv.len();
    let dp = (common.dp_size, common.dp_rank);
    let config = PrefillConfig {
        host: Some(common.host_ip.clone()),
        tap: Some(capture::tap(common)?),
        load_balance_method: common.load_balance_method.clone(),
        bootstrap_timeout: time_of("--boot-timeout", args.boot_timeout, "BOOTSTRAP_TIMEOUT", 300.0)?,
        identity: PrefillIdentity {
            attn_tp: (common.tp_size, common.tp_rank),
            pp: (common.pp_size, common.pp_rank),
            attn_dp: if common.system_dp { (1, 0) } else { dp },
            system_dp: if common.system_dp { dp } else { (1, 0) },
            ..PrefillIdentity::default()
        },
        ..PrefillConfig::default()
    };
    let manager = PrefillManager::start(config, backend.transport, backend.hooks, layout)
        .map_err(|e| fail("cannot start prefill", &e))?;
    manager
        .register(&RegistrationConfig::new(&common.bootstrap_host, port))
        .map_err(|e| fail("cannot register", &e))?;
    let at = manager.endpoint().clone();
    emit(
        "ready",
        json!({
            "role": "prefill", "rank": rank::names(common), "bootstrap": rank::bootstrap_addr(common), "rank_ip": at.host(),
            "rank_port": at.port(), "backend": common.backend, "agent": agent, "regions": regions,
            "item_len": common.item_len, "fill_s": started.elapsed().as_secs_f64(),
        }),
    )?;
    let fd = manager.subscribe().map_err(|e| fail("cannot watch rooms", &e))?;
    let mut prefill = Prefill {
        args,
        manager: &manager,
        store: &store,
        slots,
        open: HashMap::new(),
        window: Window::default(),
        warm: rooms.iter().take(common.warmup).map(|(_, room)| *room).collect(),
        delay: seconds("--chunk-delay-ms", args.chunk_delay_ms / 1e3)?,
        success: 0,
        failed: 0,
        held: 0,
    };
    prefill.all(&rooms, &input, fd)?;
    let code = prefill.finish()?;
    if args.serve {
        input.wait_for_end()
    } else {
        input.linger(seconds("--linger", args.linger)?)
    }
    drop(server);
    Ok(code)
}

impl Prefill<'_> {
    fn all(&mut self, rooms: &[(usize, u64)], input: &Input, fd: std::os::fd::RawFd) -> Result<()> {
        let common = &self.args.common;
        let end = Instant::now() + rank::timeout(common)?;
        let mut waiting: VecDeque<_> = rooms.iter().copied().collect();
        let at_a_time = if common.concurrency == 0 { usize::MAX } else { common.concurrency };
        let (mut events, mut told) = (Vec::new(), false);
        while (!waiting.is_empty() || self.running() > 0) && Instant::now() < end && !input.terminated() {
            let started = rooms.len() - waiting.len();
            let mut more = rank::allowed(common, rooms, input).saturating_sub(started);
            while more > 0 && self.running() < at_a_time {
                let Some((i, room)) = waiting.pop_front() else { break };
                self.open(i, room)?;
                more -= 1;
            }
            if !told && self.running() == 0 && !waiting.is_empty() && more == 0 {
                told = true;
                emit("gate", json!({ "role": "prefill", "rank": rank::names(common), "room": rooms[started].1 }))?;
            }
            let now = Instant::now();
            let due = self.open.values().filter(|o| o.phase == Phase::Send).map(|o| o.next_chunk).min();
            let next = due.map_or(Duration::from_millis(50), |at| at.saturating_duration_since(now));
            self.manager.drain_events(&mut events);
            if events.is_empty() && !next.is_zero() {
                wait_readable(fd, next.min(Duration::from_millis(50)).max(Duration::from_millis(1)));
                self.manager.drain_events(&mut events);
            }
            for event in events.drain(..) {
                self.event(&event)?;
            }
            if due.is_some_and(|at| at <= Instant::now()) {
                let rooms: Vec<u64> = self.open.keys().copied().collect();
                rooms.into_iter().try_for_each(|room| self.send(room))?;
            }
        }
        Ok(())
    }

    /// Rooms that have not ended.
    fn running(&self) -> usize {
        self.open.len() - self.held
    }

    fn targeted(&self, room: u64) -> bool {
        self.args.abort_at != PrefillAbort::None && self.args.abort_rooms.as_ref().is_none_or(|r| r.0.contains(&room))
    }

    fn open(&mut self, i: usize, room: u64) -> Result<()> {
        let error = |e: &dyn std::fmt::Display| CliError::new(format!("room {room}: {e}"));
        let number = Room::new(room).ok_or_else(|| error(&"no room number"))?;
        let addr = rank::bootstrap_addr(&self.args.common);
        let sender = self.manager.sender(number, &addr).map_err(|e| error(&e))?;
        let now = Instant::now();
        let open = Open {
            sender,
            slot: self.slots.get(&room).copied().unwrap_or_default(),
            pages: self.store.pages_of(i, Role::Prefill),
            sent: 0,
            chunks: 0,
            phase: Phase::Boot,
            opened: now,
            known: None,
            next_chunk: now,
        };
        self.open.insert(room, open);
        Ok(())
    }

    fn event(&mut self, event: &RoomEvent) -> Result<()> {
        let room = event.room.get();
        match event.poll {
            KvPoll::WaitingForInput => self.known(room),
            KvPoll::Success => self.succeeded(room),
            KvPoll::Failed => self.failed(room),
            KvPoll::Bootstrapping | KvPoll::Transferring => Ok(()),
        }
    }

    /// Decode said where the room goes.
    fn known(&mut self, room: u64) -> Result<()> {
        let targeted = self.targeted(room);
        let Some(open) = self.open.get_mut(&room).filter(|o| o.phase == Phase::Boot) else { return Ok(()) };
        if !self.warm.contains(&room) {
            self.window.start();
        }
        open.known = Some(Instant::now());
        if targeted && self.args.abort_at == PrefillAbort::BeforeSend {
            open.phase = Phase::Stopped;
            open.sender.abort();
            return Ok(());
        }
        let prefix = (open.sender.decode_prefix_len() / u64::from(self.args.common.page_size)) as usize;
        open.pages.drain(..prefix.min(open.pages.len()));
        open.phase = Phase::Send;
        let pages = open.pages.len() as u32;
        open.sender.init(pages, Some(open.slot)).map_err(|e| CliError::new(format!("room {room}: {e}")))?;
        self.send(room)
    }

    /// The chunks of a room that are due.
    fn send(&mut self, room: u64) -> Result<()> {
        let targeted = self.targeted(room);
        let Some(open) = self.open.get_mut(&room) else { return Ok(()) };
        while open.phase == Phase::Send && open.next_chunk <= Instant::now() {
            match self.args.abort_at {
                PrefillAbort::AfterChunk(k) if targeted && open.chunks == k => {
                    open.phase = Phase::Stopped;
                    open.sender.abort();
                    break;
                }
                PrefillAbort::Hang(k) if targeted && open.chunks == k => {
                    open.phase = Phase::Stopped;
                    break;
                }
                PrefillAbort::Kill(k) if targeted && open.chunks == k => {
                    emit("kill", json!({ "role": "prefill", "room": room, "chunks_sent": open.chunks }))?;
                    kill_self();
                }
                _ => {}
            }
            let left = open.pages.len() - open.sent;
            let n = if self.args.chunk_pages == 0 { left } else { left.min(self.args.chunk_pages) };
            let chunk = &open.pages[open.sent..open.sent + n];
            open.sender.send(chunk, SendOptions::default()).map_err(|e| CliError::new(format!("room {room}: {e}")))?;
            open.sent += n;
            open.chunks += 1;
            open.next_chunk = Instant::now() + self.delay;
            if open.sent == open.pages.len() {
                open.phase = Phase::Wait;
            }
        }
        Ok(())
    }

    fn succeeded(&mut self, room: u64) -> Result<()> {
        let Some(open) = self.open.remove(&room) else { return Ok(()) };
        if !self.warm.contains(&room) {
            self.window.end(open.known.map(|t| t.elapsed()));
        }
        self.success += 1;
        if self.args.common.quiet {
            return Ok(());
        }
        let latency = open.sender.transfer_latency().map(|l| l.0.as_secs_f64());
        let bytes = open.sent as u64 * self.store.memory.geometry().page_bytes();
        emit(
            "room",
            json!({
                "role": "prefill", "rank": rank::names(&self.args.common), "room": room, "status": "Success",
                "reason": null, "chunks_sent": open.chunks, "transfer_latency_s": latency, "transfer_bytes": bytes,
                "ms_since_metadata": open.known.map(|t| ms(t.elapsed())),
            }),
        )
    }

    fn failed(&mut self, room: u64) -> Result<()> {
        let Some(open) = self.open.get_mut(&room) else { return Ok(()) };
        if open.phase != Phase::Held {
            let phase = open.phase.name();
            open.phase = Phase::Held;
            let reason = open.sender.failure().map(|e| e.reason);
            if !self.warm.contains(&room) {
                self.window.end(None);
            }
            self.failed += 1;
            self.held += 1;
            emit(
                "room",
                json!({
                    "role": "prefill", "rank": rank::names(&self.args.common), "room": room, "status": "Failed",
                    "reason": reason, "phase": phase, "chunks_sent": open.chunks, "ms": ms(open.opened.elapsed()),
                }),
            )?;
        }
        if open.sender.releasable() {
            self.open.remove(&room);
            self.held -= 1;
        }
        Ok(())
    }

    /// What is still open did not end in time; then the summary.
    fn finish(&mut self) -> Result<u8> {
        let names = rank::names(&self.args.common);
        let mut late = 0;
        for (room, open) in &self.open {
            if open.phase == Phase::Held {
                let why = "a write of it has not been proven quiet";
                emit("retained", json!({ "role": "prefill", "rank": names, "room": room, "reason": why }))?;
                continue;
            }
            late += 1;
            emit(
                "room",
                json!({
                    "role": "prefill", "rank": names, "room": room, "status": "Timeout", "phase": open.phase.name(),
                    "chunks_sent": open.chunks, "poll": format!("{:?}", open.sender.poll()),
                }),
            )?;
        }
        self.window.close();
        let mut summary = self.window.summary(self.store.room_bytes(0));
        summary["role"] = "prefill".into();
        summary["rank"] = names;
        summary["rooms"] = (self.success + self.failed + late).into();
        summary["success"] = self.success.into();
        summary["failed"] = self.failed.into();
        emit("summary", summary)?;
        Ok(if self.failed + late == 0 { GOOD } else { ROOMS_FAILED })
    }
}
