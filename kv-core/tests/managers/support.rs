//! A prefill server of several ranks, a decode rank, and rooms between them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::bootstrap::{BootstrapServer, RegistrationConfig};
use kv_core::hooks::TcpHooks;
use kv_core::layout::{AttentionKind, EntryDesc, LayoutSpec, LocalLayout};
use kv_core::manager::{
    DecodeConfig, DecodeManager, KvReceiver, KvSender, MetadataOptions, PrefillConfig, PrefillManager, SendOptions,
};
use kv_core::transport::Transport;
use kv_core::{KvPoll, Limits, Room};
use kv_testkit::{FakeFabric, TestMemory};

pub const HOST: &str = "127.0.0.1";
/// Long enough for a machine that does much else; nothing waits for it when all is well.
pub const HANG: Duration = Duration::from_secs(60);

const PAGES: u64 = 16;
const PAGE: u64 = 64;
const ROW: u64 = 64;

pub fn room(n: u64) -> Room {
    Room::new(n).unwrap()
}

/// Memory of one rank: one KV entry of [`PAGES`], and as many metadata rows.
fn pool(fabric: &FakeFabric, name: &str, seed: u64) -> (Arc<TestMemory>, Arc<dyn Transport>, LocalLayout) {
    let transport = fabric.transport(name);
    let (memory, layout) = memory(&*transport, seed);
    (memory, transport, layout)
}

/// As [`pool`], of a transport that exists.
pub fn memory(transport: &dyn Transport, seed: u64) -> (Arc<TestMemory>, LocalLayout) {
    let memory = TestMemory::patterned((PAGES * (PAGE + ROW)) as usize, seed);
    let region = transport.register(memory.clone()).unwrap();
    let entry =
        |offset, item_len| EntryDesc { region: region.id(), offset, len: PAGES * item_len, item_len, layer_id: None };
    let spec = LayoutSpec {
        kv: vec![entry(0, PAGE)],
        aux: vec![entry(PAGES * PAGE, ROW)],
        page_size: 16,
        kv_cache_dtype: "bfloat16".into(),
        attention: AttentionKind::Mla,
        ..LayoutSpec::default()
    };
    let layout = LocalLayout::new(spec, [region]).unwrap();
    (memory, layout)
}

/// One prefill rank.
pub struct Prefill {
    pub manager: PrefillManager,
    memory: Arc<TestMemory>,
}

/// One decode rank.
pub struct Decode {
    pub manager: DecodeManager,
    memory: Arc<TestMemory>,
}

/// A fabric and a bootstrap server.
pub struct Cluster {
    pub fabric: FakeFabric,
    pub server: BootstrapServer,
    ranks: u64,
}

impl Cluster {
    pub fn new() -> Self {
        let server = BootstrapServer::bind(HOST, 0, Limits::default()).unwrap();
        Self { fabric: FakeFabric::new(), server, ranks: 0 }
    }

    /// Of the bootstrap server.
    pub fn addr(&self) -> String {
        self.server.local_addr().to_string()
    }

    /// A prefill rank that has registered.
    pub fn prefill(&mut self, config: PrefillConfig) -> Prefill {
        self.ranks += 1;
        let (memory, transport, layout) = pool(&self.fabric, &format!("prefill-{}", self.ranks), self.ranks);
        let config = PrefillConfig { host: Some(HOST.into()), ..config };
        let manager = PrefillManager::start(config, transport, Arc::new(TcpHooks::new()), layout).unwrap();
        manager.register(&RegistrationConfig::new(HOST, self.server.local_addr().port())).unwrap();
        Prefill { manager, memory }
    }

    pub fn decode(&mut self, config: DecodeConfig) -> Decode {
        self.ranks += 1;
        let (memory, transport, layout) = pool(&self.fabric, &format!("decode-{}", self.ranks), self.ranks);
        let config = DecodeConfig { host: Some(HOST.into()), ..config };
        let manager = DecodeManager::start(config, transport, Arc::new(TcpHooks::new()), layout).unwrap();
        Decode { manager, memory }
    }
}

/// Call `step` until it says true.
pub fn until(what: &str, mut step: impl FnMut() -> bool) {
    let end = Instant::now() + HANG;
    while !step() {
        assert!(Instant::now() < end, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Send page 3 and metadata row 1.
pub fn send(sender: &KvSender) {
    sender.init(1, Some(1)).unwrap();
    sender.send(&[3], SendOptions::default()).unwrap();
}

/// Ask for it at page 5 and row 2.
pub fn ask(receiver: &KvReceiver) {
    assert_eq!(receiver.ready_timeout(HANG), KvPoll::WaitingForInput, "{:?}", receiver.failure());
    receiver.send_metadata(&[5], 2, MetadataOptions::default()).unwrap();
}

/// What [`send`] sent is where [`ask`] asked for it; then it is wiped, so that the next one must send it again.
pub fn arrived(from: &Prefill, to: &Decode) {
    let row = (PAGES * PAGE) as usize;
    for (at, target, len) in [(3 * PAGE, 5 * PAGE, PAGE), (row as u64 + ROW, row as u64 + 2 * ROW, ROW)] {
        let len = len as usize;
        assert_eq!(to.memory.read(target as usize, len), from.memory.read(at as usize, len));
        to.memory.fill(target as usize, len, 0);
    }
}
