//! A prefill rank: `cargo run --example prefill`, then `cargo run --example decode` in another terminal.
//!
//! It runs the bootstrap server, registers its one rank with it, and sends request 42: 8 pages in two chunks.
use std::sync::Arc;
use std::time::Duration;

use kv_transfer::bootstrap::{BootstrapServer, RegistrationConfig};
use kv_transfer::hooks::TcpHooks;
use kv_transfer::layout::{AttentionKind, EntryDesc, LayoutSpec, LocalLayout};
use kv_transfer::manager::{PrefillConfig, PrefillManager, SendOptions};
use kv_transfer::tcp::{HostArena, TcpConfig, TcpTransport};
use kv_transfer::transport::Transport;
use kv_transfer::{KvPoll, Limits, Room};

const PAGES: u64 = 64;
const PAGE: u64 = 16 * 1024; // bytes of one page of one layer
const LAYERS: u64 = 4;
const ROW: u64 = 64; // bytes of one metadata row

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The KV pool: all layers in one arena, registered once; then the metadata rows.
    let arena = Arc::new(HostArena::new((LAYERS * PAGES * PAGE + PAGES * ROW) as usize)?);
    let transport = Arc::new(TcpTransport::new(TcpConfig::loopback())?);
    let region = transport.register(arena.clone())?;
    let entry = |offset, items, item_len| EntryDesc {
        region: region.id(),
        offset,
        len: items * item_len,
        item_len,
        layer_id: None,
    };
    let spec = LayoutSpec {
        kv: (0..LAYERS).map(|layer| entry(layer * PAGES * PAGE, PAGES, PAGE)).collect(),
        aux: vec![entry(LAYERS * PAGES * PAGE, PAGES, ROW)],
        page_size: 64,
        kv_cache_dtype: "bfloat16".into(),
        attention: AttentionKind::Mla,
        ..LayoutSpec::default()
    };
    let layout = LocalLayout::new(spec, [region])?;

    // The rank, and the server that decode finds it by.
    let config = PrefillConfig { host: Some("127.0.0.1".into()), ..PrefillConfig::default() };
    let manager = PrefillManager::start(config, transport, Arc::new(TcpHooks::new()), layout)?;
    let server = BootstrapServer::bind("127.0.0.1", 8998, Limits::default())?;
    manager.register(&RegistrationConfig::new("127.0.0.1", server.local_addr().port()))?;
    println!("prefill rank {} at {}, bootstrap at {}", manager.rank(), manager.endpoint(), server.local_addr());

    // One request: its KV is "computed" into pages 0..8, then sent in two chunks; row 3 goes with the last one.
    let sender = manager.sender(Room::new(42).ok_or("0 is not a room")?, "127.0.0.1:8998")?;
    sender.init(8, Some(3))?;
    for page in 0..8u64 {
        for layer in 0..LAYERS {
            arena.write_at(((layer * PAGES + page) * PAGE) as usize, &[page as u8 + 1; PAGE as usize]);
        }
    }
    sender.send(&[0, 1, 2, 3], SendOptions::default())?;
    sender.send(&[4, 5, 6, 7], SendOptions::default())?;
    match sender.wait_timeout(Duration::from_secs(300)) {
        KvPoll::Success => println!("sent; {:?} from the first send to Success", sender.transfer_latency()),
        _ => println!("failed: {:?}", sender.failure()),
    }
    // Source pages may be reused only from here on.
    sender.released_timeout(Duration::from_secs(30));
    Ok(())
}
