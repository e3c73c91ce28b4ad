//! A prefill and a decode rank of ours, each to be run in a process of its own.

use std::sync::Arc;
use std::time::Duration;

use kv_transfer::bootstrap::{BootstrapServer, RegistrationConfig};
use kv_transfer::hooks::{ManagerHooks, TcpHooks};
use kv_transfer::layout::{AttentionKind, EntryDesc, LayoutSpec, LocalLayout};
use kv_transfer::manager::{
    DecodeConfig, DecodeManager, KvReceiver, KvSender, MetadataOptions, PrefillConfig, PrefillManager, SendOptions,
};
use kv_transfer::memory::RegisteredRegion;
use kv_transfer::tcp::HostArena;
use kv_transfer::transport::Transport;
use kv_transfer::{KvPoll, Limits, Room};

use crate::Result;

pub const HOST: &str = "127.0.0.1";
/// Bytes of one metadata row.
pub const ROW: u64 = 64;
/// Metadata rows of a pool.
pub const ROWS: u64 = 4096;
/// Only hangs end here.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A pool of pages, layer by layer, then the metadata rows.
#[derive(Clone, Copy)]
pub struct Geometry {
    pub layers: u64,
    /// Pages of each layer.
    pub pages: u64,
    /// Bytes of one page of one layer.
    pub page: u64,
}

impl Geometry {
    pub fn layer_offset(&self, layer: u64) -> u64 {
        layer * self.pages * self.page
    }

    pub fn rows_offset(&self) -> u64 {
        self.layers * self.pages * self.page
    }

    pub fn arena(&self) -> Result<Arc<HostArena>> {
        Ok(Arc::new(HostArena::prefaulted((self.rows_offset() + ROWS * ROW) as usize)?))
    }

    /// The layout of an arena registered as `region`.
    pub fn layout(&self, region: Arc<RegisteredRegion>) -> Result<LocalLayout> {
        let entry = |offset, items, item_len| EntryDesc {
            region: region.id(),
            offset,
            len: items * item_len,
            item_len,
            layer_id: None,
        };
        let spec = LayoutSpec {
            kv: (0..self.layers).map(|l| entry(self.layer_offset(l), self.pages, self.page)).collect(),
            aux: vec![entry(self.rows_offset(), ROWS, ROW)],
            page_size: 64,
            kv_cache_dtype: "bfloat16".into(),
            attention: AttentionKind::Mla,
            ..LayoutSpec::default()
        };
        Ok(LocalLayout::new(spec, [region])?)
    }
}

/// Metadata row of a room.
pub fn row(room: u64) -> u32 {
    (room % ROWS) as u32
}

/// The room of this number.
pub fn room(number: u64) -> Result<Room> {
    Room::new(number).ok_or_else(|| "room 0".into())
}

/// The hooks that belong to a transport.
fn hooks(transport: &dyn Transport) -> Arc<dyn ManagerHooks> {
    match transport.capabilities().name {
        #[cfg(feature = "nixl")]
        "nixl" => Arc::new(kv_transfer::nixl::NixlHooks::new()),
        #[cfg(feature = "mooncake")]
        "mooncake" => Arc::new(kv_transfer::mooncake::MooncakeHooks::new()),
        _ => Arc::new(TcpHooks::new()),
    }
}

/// A prefill rank with its bootstrap server.
pub struct Prefill {
    pub manager: PrefillManager,
    pub bootstrap: String,
    _server: BootstrapServer,
}

impl Prefill {
    pub fn start(transport: Arc<dyn Transport>, layout: LocalLayout) -> Result<Self> {
        let config = PrefillConfig { host: Some(HOST.into()), ..PrefillConfig::default() };
        let hooks = hooks(&*transport);
        let manager = PrefillManager::start(config, transport, hooks, layout)?;
        let server = BootstrapServer::bind(HOST, 0, Limits::default())?;
        let port = server.local_addr().port();
        manager.register(&RegistrationConfig::new(HOST, port))?;
        Ok(Self { manager, bootstrap: format!("{HOST}:{port}"), _server: server })
    }

    /// A sender whose pages are on their way as soon as decode says where to.
    pub fn send(&self, number: u64, pages: &[i32]) -> Result<KvSender> {
        let sender = self.manager.sender(room(number)?, &self.bootstrap)?;
        sender.init(pages.len() as u32, Some(row(number)))?;
        sender.send(pages, SendOptions::default())?;
        Ok(sender)
    }
}

/// A decode rank.
pub struct Decode {
    pub manager: DecodeManager,
    bootstrap: String,
}

impl Decode {
    pub fn start(transport: Arc<dyn Transport>, layout: LocalLayout, bootstrap: &str) -> Result<Self> {
        let config = DecodeConfig { host: Some(HOST.into()), ..DecodeConfig::default() };
        let hooks = hooks(&*transport);
        let manager = DecodeManager::start(config, transport, hooks, layout)?;
        Ok(Self { manager, bootstrap: bootstrap.to_owned() })
    }

    /// A receiver that is finding out prefill's ranks.
    pub fn open(&self, number: u64) -> Result<KvReceiver> {
        let receiver = self.manager.receiver(room(number)?, &self.bootstrap)?;
        receiver.init(None)?;
        Ok(receiver)
    }

    /// Receivers that may publish their pages.
    pub fn ready(&self, rooms: std::ops::Range<u64>) -> Result<Vec<KvReceiver>> {
        let all = rooms.map(|n| self.open(n)).collect::<Result<Vec<_>>>()?;
        for receiver in &all {
            if receiver.ready_timeout(PATIENCE) != KvPoll::WaitingForInput {
                return Err(why(receiver));
            }
        }
        Ok(all)
    }
}

/// Say where the pages go.
pub fn publish(receiver: &KvReceiver, pages: &[i32]) -> Result<()> {
    Ok(receiver.send_metadata(pages, row(receiver.room().get()), MetadataOptions::default())?)
}

/// Why a room is not where it should be.
pub fn why(receiver: &KvReceiver) -> Box<dyn std::error::Error> {
    let poll = receiver.poll();
    match receiver.failure() {
        Some(e) => e.to_string().into(),
        None => format!("room {} is {poll:?}", receiver.room()).into(),
    }
}

/// All of these succeeded.
pub fn check_sent(senders: &[KvSender]) -> Result<()> {
    for s in senders {
        if s.wait_timeout(PATIENCE) != KvPoll::Success {
            return Err(format!("room {}: {:?} {:?}", s.room(), s.poll(), s.failure()).into());
        }
    }
    Ok(())
}
