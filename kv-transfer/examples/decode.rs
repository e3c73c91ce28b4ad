//! A decode rank: run `cargo run --example prefill` first, then `cargo run --example decode`.
//!
//! It asks for request 42's KV, into pages of its own choice, and looks at what arrived.
use std::sync::Arc;
use std::time::Duration;

use kv_transfer::hooks::TcpHooks;
use kv_transfer::layout::{AttentionKind, EntryDesc, LayoutSpec, LocalLayout};
use kv_transfer::manager::{DecodeConfig, DecodeManager, MetadataOptions};
use kv_transfer::tcp::{HostArena, TcpConfig, TcpTransport};
use kv_transfer::transport::Transport;
use kv_transfer::{KvPoll, Room};

const PAGES: u64 = 128; // pools may differ in size; pages and layers may not
const PAGE: u64 = 16 * 1024;
const LAYERS: u64 = 4;
const ROW: u64 = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
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
    let config = DecodeConfig { host: Some("127.0.0.1".into()), ..DecodeConfig::default() };
    let manager = DecodeManager::start(config, transport, Arc::new(TcpHooks::new()), layout)?;

    // Find prefill's ranks, then say where the KV goes. From send_metadata on, prefill may write these pages.
    let receiver = manager.receiver(Room::new(42).ok_or("0 is not a room")?, "127.0.0.1:8998")?;
    receiver.init(None)?;
    if receiver.ready_timeout(Duration::from_secs(60)) == KvPoll::Failed {
        return Err(receiver.failure().map_or("failed".into(), |e| e.to_string()).into());
    }
    let pages = [90, 17, 3, 44, 45, 46, 100, 101];
    receiver.send_metadata(&pages, 5, MetadataOptions::default())?;
    match receiver.wait_timeout(Duration::from_secs(300)) {
        KvPoll::Success => {
            for (i, page) in pages.iter().enumerate() {
                let at = (*page as u64 * PAGE) as usize;
                println!("page {i} of the request is at {page}, filled with {}", arena.to_vec(at, 1)[0]);
            }
        }
        _ => println!("failed: {:?}", receiver.failure()),
    }
    // The pages of a failed request may be given to another one only from here on.
    println!("pages free: {}", receiver.released_timeout(Duration::from_secs(60)));
    Ok(())
}
