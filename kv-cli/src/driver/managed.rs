//! The real engines: kv-transfer's managers over a transport, one sender or receiver a room.
//!
//! Each room also moves one metadata row: prefill writes the room's number into its row, decode compares. A wrong
//! number is a failed room, as in SGLang's metadata gate.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_transfer::aux_slots::AuxSlots;
use kv_transfer::bootstrap::{BootstrapServer, RegistrationConfig, address::split_host_port};
use kv_transfer::engine::RoomEvent;
use kv_transfer::hooks::ManagerHooks;
use kv_transfer::layout::LocalLayout;
use kv_transfer::manager::{
    DecodeConfig, DecodeManager, KvReceiver, KvSender, MetadataOptions, PrefillConfig, PrefillIdentity, PrefillManager,
    SendOptions,
};
use kv_transfer::topology::DecodeRank;
use kv_transfer::transport::Transport;
use kv_transfer::{KvPoll, Room};

use crate::driver::agreement;
use crate::driver::engine::{DecodeEngine, EngineEvent, PrefillEngine, PrefillStart};
use crate::driver::layout::{self, Described};
use crate::driver::protocol::{Arrived, BootstrapAt, FetchRoom, ServeRoom, WorkerConfig};
use crate::driver::rows;
use crate::driver::stats::RankStats;
use crate::error::{CliError, Result};
use crate::memory::KvMemory;

/// A transport with the hooks that go with it.
pub struct Backend {
    /// Moves the bytes.
    pub transport: Arc<dyn Transport>,
    /// Frames the messages.
    pub hooks: Arc<dyn ManagerHooks>,
    /// Bytes that came in so far; zeros where the transport does not tell.
    pub arrived: Box<dyn Fn() -> Arrived + Send>,
}

fn failed(what: &str, e: impl std::fmt::Display) -> CliError {
    CliError::new(format!("{what}: {e}"))
}

fn room_of(room: u64) -> Result<Room> {
    Room::new(room).ok_or_else(|| CliError::new("room 0 cannot be used: 0 marks a row that was not written"))
}

/// Register the pool and the metadata rows, and describe them as an engine would.
fn layout(
    config: &WorkerConfig,
    backend: &Backend,
    memory: &Arc<KvMemory>,
    rows: &Arc<AuxSlots>,
) -> Result<LocalLayout> {
    let described = Described {
        // The width is what both sides must agree on; the model's own name for it is not known here.
        kv_cache_dtype: format!("{}-bit", config.model.value_bytes * 8),
        shape: config.shape,
        rank: config.rank,
        layer_ids: true,
    };
    layout::register(&*backend.transport, memory, rows, described)
}

/// Block until `fd` is readable or the time is over.
pub fn wait_readable(fd: RawFd, timeout: Duration) {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: one pollfd that lives through the call. Errors (EINTR) read as "no news", which the caller expects.
    unsafe { libc::poll(&mut poll, 1, ms) };
}

/// Rooms by state: what both engines share.
struct Rooms<H> {
    open: HashMap<u64, Open<H>>,
    /// Failed rooms whose pages are not free yet.
    held: HashMap<u64, Open<H>>,
    events: Vec<RoomEvent>,
    fd: RawFd,
}

struct Open<H> {
    handle: H,
    pages: Vec<i32>,
    prefix_tokens: u64,
    slot: u32,
    started: Option<Instant>,
}

impl<H> Rooms<H> {
    fn new(fd: RawFd) -> Self {
        Self { open: HashMap::new(), held: HashMap::new(), events: Vec::new(), fd }
    }
}

/// Prefill over a manager.
struct ManagedPrefill {
    manager: PrefillManager,
    rooms: Rooms<KvSender>,
    rows: Arc<AuxSlots>,
    chunk_pages: u32,
    page_tokens: u64,
    _server: Option<BootstrapServer>,
}

/// Start a prefill rank.
pub fn prefill(config: &WorkerConfig, backend: Backend, memory: &Arc<KvMemory>) -> Result<PrefillStart> {
    let rows = rows::rows()?;
    let layout = layout(config, &backend, memory, &rows)?;
    let manager_config = PrefillConfig {
        host: Some(config.host.clone()),
        identity: PrefillIdentity {
            attn_tp: (config.shape.tp, config.rank.tp),
            pp: (config.shape.pp, config.rank.pp),
            ..PrefillIdentity::default()
        },
        ..PrefillConfig::default()
    };
    let manager = PrefillManager::start(manager_config, backend.transport, backend.hooks, layout).map_err(|e| {
        failed("cannot start prefill", e).hint_by_cause("see --host: it must be an address of this machine")
    })?;
    let (server, addr) = match &config.bootstrap {
        BootstrapAt::Serve(addr) => {
            let (host, port) = split_host_port(addr).map_err(|e| failed("--serve-bootstrap", e))?;
            let server = agreement::serve(host, port)?;
            let at = kv_transfer::bootstrap::address::join_host_port(host, server.local_addr().port());
            (Some(server), at)
        }
        BootstrapAt::Connect(addr) => (None, addr.clone()),
    };
    let (host, port) = split_host_port(&addr).map_err(|e| failed("--bootstrap", e))?;
    manager
        .register(&RegistrationConfig::new(host, port))
        .map_err(|e| failed("cannot register", e).hint_by_cause(format!("is `kvt bootstrap` running at {addr}?")))?;
    let fd = manager.subscribe().map_err(|e| failed("cannot watch rooms", e))?;
    let bootstrap = server.is_some().then(|| addr.clone());
    let engine = ManagedPrefill {
        manager,
        rooms: Rooms::new(fd),
        rows,
        chunk_pages: 1,
        page_tokens: u64::from(config.model.page_tokens),
        _server: server,
    };
    Ok(PrefillStart { engine: Box::new(engine), bootstrap })
}

impl ManagedPrefill {
    /// Decode said where it goes, and what it has: send the rest.
    fn send(&mut self, room: u64) -> Result<()> {
        let Some(open) = self.rooms.open.get_mut(&room) else { return Ok(()) };
        if open.started.is_some() {
            return Ok(());
        }
        open.started = Some(Instant::now());
        open.prefix_tokens = open.handle.decode_prefix_len();
        let skip = usize::try_from(open.prefix_tokens / self.page_tokens).unwrap_or(usize::MAX).min(open.pages.len());
        let rest = &open.pages[skip..];
        self.rows.name(open.slot, room_of(room)?).map_err(|e| failed("metadata row", e))?;
        let error = |e| failed(&format!("room {room}"), e);
        open.handle.init(rest.len() as u32, Some(open.slot)).map_err(error)?;
        if rest.is_empty() {
            return open.handle.send(&[], SendOptions::default()).map_err(error);
        }
        for chunk in rest.chunks(self.chunk_pages.max(1) as usize) {
            open.handle.send(chunk, SendOptions::default()).map_err(error)?;
        }
        Ok(())
    }
}

impl PrefillEngine for ManagedPrefill {
    fn serve(&mut self, room: &ServeRoom, chunk_pages: u32) -> Result<()> {
        self.chunk_pages = chunk_pages;
        let number = room_of(room.room)?;
        let handle = self.manager.sender(number, "").map_err(|e| failed("cannot open a sender", e))?;
        let slot = rows::take(&self.rows)?;
        let pages = room.pages.iter().map(|p| *p as i32).collect();
        self.rooms.open.insert(room.room, Open { handle, pages, prefix_tokens: 0, slot, started: None });
        Ok(())
    }

    fn stats(&self) -> RankStats {
        self.manager.snapshot().into()
    }

    fn wait(&mut self, timeout: Duration, out: &mut Vec<EngineEvent>) -> Result<()> {
        let mut events = std::mem::take(&mut self.rooms.events);
        self.manager.drain_events(&mut events);
        if events.is_empty() {
            wait_readable(self.rooms.fd, timeout);
            self.manager.drain_events(&mut events);
        }
        for event in events.drain(..) {
            let room = event.room.get();
            match event.poll {
                KvPoll::WaitingForInput => self.send(room)?,
                KvPoll::Success => {
                    if let Some(open) = self.rooms.open.remove(&room) {
                        let latency = open.handle.transfer_latency().map_or(Duration::ZERO, |l| l.0);
                        let skip = open.prefix_tokens / self.page_tokens;
                        rows::give_back(&self.rows, open.slot);
                        out.push(EngineEvent::Done {
                            room,
                            latency,
                            pages: (open.pages.len() as u64).saturating_sub(skip),
                        });
                    }
                }
                KvPoll::Failed => {
                    if let Some(open) = self.rooms.open.remove(&room) {
                        let reason = reason_of(room, open.handle.failure());
                        out.push(EngineEvent::Failed { room, reason });
                        self.rooms.held.insert(room, open);
                    }
                    if let Some(open) = self.rooms.held.get(&room).filter(|o| o.handle.releasable()) {
                        rows::give_back(&self.rows, open.slot);
                        self.rooms.held.remove(&room);
                        out.push(EngineEvent::Released { room });
                    }
                }
                KvPoll::Bootstrapping | KvPoll::Transferring => {}
            }
        }
        self.rooms.events = events;
        Ok(())
    }
}

fn reason_of(room: u64, error: Option<kv_transfer::KvTransferError>) -> String {
    error.map_or_else(|| format!("room {room} failed without a reason"), |e| e.reason)
}

/// Decode over a manager.
struct ManagedDecode {
    manager: DecodeManager,
    bootstrap: String,
    rooms: Rooms<KvReceiver>,
    rows: Arc<AuxSlots>,
    arrived: Box<dyn Fn() -> Arrived + Send>,
}

/// Start a decode rank.
pub fn decode(config: &WorkerConfig, backend: Backend, memory: &Arc<KvMemory>) -> Result<Box<dyn DecodeEngine>> {
    let bootstrap = match &config.bootstrap {
        BootstrapAt::Connect(addr) => addr.clone(),
        BootstrapAt::Serve(_) => return Err(CliError::new("decode does not run the bootstrap server; prefill does")),
    };
    split_host_port(&bootstrap).map_err(|e| failed("--bootstrap", e))?;
    let rows = rows::rows()?;
    let layout = layout(config, &backend, memory, &rows)?;
    let manager_config = DecodeConfig {
        host: Some(config.host.clone()),
        rank: DecodeRank {
            attn_tp_size: config.shape.tp,
            engine_rank: config.rank.tp,
            pp_size: config.shape.pp,
            pp_rank: config.rank.pp,
            is_mla: config.model.is_mla(),
            ..DecodeRank::default()
        },
        heartbeat_interval: Duration::from_secs(config.heartbeat_s),
        ..DecodeConfig::default()
    };
    let manager = DecodeManager::start(manager_config, backend.transport, backend.hooks, layout).map_err(|e| {
        failed("cannot start decode", e).hint_by_cause("see --host: it must be an address of this machine")
    })?;
    let fd = manager.subscribe().map_err(|e| failed("cannot watch rooms", e))?;
    Ok(Box::new(ManagedDecode { manager, bootstrap, rooms: Rooms::new(fd), rows, arrived: backend.arrived }))
}

impl ManagedDecode {
    fn success(&mut self, room: u64, out: &mut Vec<EngineEvent>) {
        let Some(open) = self.rooms.open.remove(&room) else { return };
        let latency = open.started.map_or(Duration::ZERO, |t| t.elapsed());
        let row = self.rows.verify(open.slot, open.handle.room());
        rows::give_back(&self.rows, open.slot);
        match row {
            Ok(()) => out.push(EngineEvent::Done { room, latency, pages: open.pages.len() as u64 }),
            Err(error) => {
                let reason = format!("metadata corruption: {error}");
                out.extend([EngineEvent::Failed { room, reason }, EngineEvent::Released { room }]);
            }
        }
    }
}

impl DecodeEngine for ManagedDecode {
    fn fetch(&mut self, room: &FetchRoom) -> Result<()> {
        let number = room_of(room.room)?;
        let handle = self.manager.receiver(number, &self.bootstrap).map_err(|e| failed("cannot open a receiver", e))?;
        let slot = rows::take(&self.rows)?;
        let pages = room.pages.iter().map(|p| *p as i32).collect();
        handle.init(None).map_err(|e| failed("cannot start a receiver", e))?;
        let open = Open { handle, pages, prefix_tokens: room.prefix_tokens, slot, started: None };
        self.rooms.open.insert(room.room, open);
        Ok(())
    }

    fn arrived(&self) -> Arrived {
        (self.arrived)()
    }

    fn stats(&self) -> RankStats {
        self.manager.snapshot().into()
    }

    fn wait(&mut self, timeout: Duration, out: &mut Vec<EngineEvent>) -> Result<()> {
        let mut events = std::mem::take(&mut self.rooms.events);
        self.manager.drain_events(&mut events);
        if events.is_empty() {
            wait_readable(self.rooms.fd, timeout);
            self.manager.drain_events(&mut events);
        }
        for event in events.drain(..) {
            let room = event.room.get();
            match event.poll {
                KvPoll::WaitingForInput => {
                    if let Some(open) = self.rooms.open.get_mut(&room).filter(|o| o.started.is_none()) {
                        let options =
                            MetadataOptions { decode_prefix_len: open.prefix_tokens, ..MetadataOptions::default() };
                        open.started = Some(Instant::now());
                        open.handle
                            .send_metadata(&open.pages, open.slot, options)
                            .map_err(|e| failed(&format!("room {room}"), e))?;
                    }
                }
                KvPoll::Success => self.success(room, out),
                KvPoll::Failed => {
                    if let Some(open) = self.rooms.open.remove(&room) {
                        // Its pages and row are held until it is releasable.
                        let reason = open.handle.failure().map_or_else(String::new, |e| e.reason);
                        out.push(EngineEvent::Failed { room, reason });
                        self.rooms.held.insert(room, open);
                    }
                    if let Some(open) = self.rooms.held.get(&room).filter(|o| o.handle.releasable()) {
                        rows::give_back(&self.rows, open.slot);
                        self.rooms.held.remove(&room);
                        out.push(EngineEvent::Released { room });
                    }
                }
                KvPoll::Bootstrapping | KvPoll::Transferring => {}
            }
        }
        self.rooms.events = events;
        Ok(())
    }
}
