//! Trials: what must be refused, and that refusing changes nothing.

use kv_core::ids::{PeerId, RegionId};
use kv_core::plan::EntryPair;
use kv_core::transport::{PeerDescriptor, SubmitError, WriteOp};

use super::bench::{Bench, text};
use super::{Harness, Run, Stop};

pub(super) const TRIALS: &[(&str, Run)] = &[
    ("unknown_peer_rejected", unknown_peer),
    ("destination_out_of_range_refused", out_of_range),
    ("unregistered_memory_refused", unregistered_memory),
    ("unregister_then_write_refused", unregister_then_write),
    ("source_out_of_range_refused", source_out_of_range),
    ("unnamed_source_refused", unnamed_source),
    ("forged_peer_refused", forged_peer),
    ("damaged_peer_blob_harmless", damaged_blob),
    ("unsupported_memory_refused", unsupported_memory),
];

const K: usize = 1024;

fn unknown_peer(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block) = Bench::ready(h, K, K)?;
    for peer in [PeerId(u64::MAX), PeerId(b.peer.0.wrapping_add(1_000_000))] {
        let op = WriteOp { peer, ..b.op(Bench::piece(&source, 0, block.addr, 64), &[&source]) };
        match b.try_submit(0, op)? {
            Err(SubmitError::Rejected(..)) => {}
            other => return Err(format!("a write to an unknown peer was not rejected: {other:?}").into()),
        }
    }
    // The lane still works.
    let op = b.op(Bench::piece(&source, 0, block.addr, 64), &[&source]);
    b.submit(op)?;
    b.all_done()?;
    Ok(b.finish()?)
}

fn out_of_range(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block) = Bench::ready(h, 4 * K, 4 * K)?;
    let (base, end) = (block.addr, block.addr + block.len as u64);
    let bad = [
        ("just before the block", base - 64, 64),
        ("over its beginning", base - 1, 64),
        ("over its end", end - 63, 64),
        ("just past its end", end, 64),
        ("as long as the block, one byte late", base + 1, block.len as u64),
        ("one byte past", end, 1),
    ];
    for (what, addr, len) in bad {
        let op = b.op(Bench::piece(&source, 0, addr, len), &[&source]);
        b.must_not_be_done(op, what)?;
    }
    for (what, addr) in [("at address 0", 0), ("at the end of the address space", u64::MAX - 10)] {
        let op = b.op(Bench::piece(&source, 0, addr, 8), &[&source]);
        b.must_not_be_done(op, what)?;
    }
    // One bad span among good ones.
    let entries = vec![Bench::entry(&source, 0, base, 64), Bench::entry(&source, 0, end, 64)];
    let runs = vec![kv_core::plan::Run { src: 0, dst: 0, count: 1 }];
    let op = b.op(Bench::plan(entries, runs), &[&source]);
    b.must_not_be_done(op, "one bad span among good ones")?;
    Ok(b.finish()?)
}

fn unregistered_memory(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, _) = Bench::ready(h, K, K)?;
    let private = b.any_block(K, false)?;
    b.connect()?;
    let op = b.op(Bench::piece(&source, 0, private.addr, 64), &[&source]);
    b.must_not_be_done(op, "memory the target never registered")?;
    Ok(b.finish()?)
}

fn unregister_then_write(h: &mut dyn Harness) -> Result<(), Stop> {
    let mut b = Bench::new(h)?;
    if !b.transport.capabilities().unregister_revokes {
        return Err(Stop::Skip("this backend says that peers can write where they once could".into()));
    }
    let source = b.source(K)?;
    let (gone, kept) = (b.block(K)?, b.block(K)?);
    b.connect()?;
    let op = b.op(Bench::piece(&source, 0, gone.addr, 64), &[&source]);
    b.submit(op)?;
    b.all_done()?;
    b.target.unregister(gone.id)?;
    let op = b.op(Bench::piece(&source, 64, gone.addr + 128, 64), &[&source]);
    b.must_not_be_done(op, "memory that is not registered any more")?;
    b.connect()?;
    let op = b.op(Bench::piece(&source, 0, kept.addr, 64), &[&source]);
    let id = b.submit(op)?;
    if b.outcome(id)? != kv_core::transport::Outcome::Done {
        return Err("a region that is still registered is refused".into());
    }
    Ok(b.finish()?)
}

fn source_out_of_range(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block) = Bench::ready(h, K, 4 * K)?;
    for (what, offset, len) in [
        ("over the end", K as u64 - 8, 16),
        ("past the end", K as u64, 8),
        ("far past", 1 << 40, 8),
        ("wrapping round", u64::MAX - 3, 8),
    ] {
        let op = b.op(Bench::piece(&source, offset, block.addr, len), &[&source]);
        b.must_not_be_done(op, &format!("source {what}"))?;
    }
    Ok(b.finish()?)
}

fn unnamed_source(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block) = Bench::ready(h, K, K)?;
    let other = b.source(K)?;
    let op = b.op(Bench::piece(&source, 0, block.addr, 64), &[&other]);
    b.must_not_be_done(op, "a region the op does not hold")?;
    let plan = {
        let entry = EntryPair { src_region: RegionId(u32::MAX), ..Bench::entry(&source, 0, block.addr, 64) };
        Bench::plan(vec![entry], vec![kv_core::plan::Run { src: 0, dst: 0, count: 1 }])
    };
    let op = b.op(plan, &[&source]);
    b.must_not_be_done(op, "a region nobody registered")?;
    Ok(b.finish()?)
}

fn forged_peer(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block) = Bench::ready(h, K, K)?;
    let good = b.target.descriptor()?;
    if good.metadata.is_empty() {
        return Err(Stop::Skip("this backend's peers are named, and have no blob to forge".into()));
    }
    let forged = PeerDescriptor { name: format!("{}-impostor", good.name), ..good };
    if let Ok(peer) = b.transport.connect(&forged) {
        let op = WriteOp { peer, ..b.op(Bench::piece(&source, 0, block.addr, 64), &[&source]) };
        b.must_not_be_done(op, "a peer whose blob has another name")?;
    }
    Ok(b.finish()?)
}

fn damaged_blob(h: &mut dyn Harness) -> Result<(), Stop> {
    let mut b = Bench::new(h)?;
    let source = b.source(K)?;
    let (block, private) = (b.block(K)?, b.any_block(K, false)?);
    let good = b.target.descriptor()?;
    if good.metadata.is_empty() {
        return Err(Stop::Skip("this backend's peers are named, and have no blob to damage".into()));
    }
    let n = good.metadata.len();
    let mut blobs = vec![Vec::new(), vec![0xff; n], good.metadata[..n / 2].to_vec(), good.metadata[..n - 1].to_vec()];
    for _ in 0..b.harness.flipped_blobs() {
        let mut blob = good.metadata.to_vec();
        let at = b.rng.below(n as u64) as usize;
        blob[at] ^= 1 << b.rng.below(8);
        blobs.push(blob);
    }
    for blob in blobs {
        let damaged = PeerDescriptor { metadata: blob.into(), ..good.clone() };
        let Ok(peer) = b.transport.connect(&damaged) else { continue };
        // Accepted: then at least memory outside what the target registered stays as it is.
        let op = WriteOp { peer, ..b.op(Bench::piece(&source, 0, private.addr, 64), &[&source]) };
        b.must_not_be_done(op, "a damaged blob opened memory that was never registered")?;
        b.transport.disconnect(peer);
    }
    // The good one still works after all that.
    b.peer = b.transport.connect(&good).map_err(text)?;
    let op = b.op(Bench::piece(&source, 0, block.addr, 64), &[&source]);
    let id = b.submit(op)?;
    if b.outcome(id)? != kv_core::transport::Outcome::Done {
        return Err("the good blob does not work any more after damaged ones".into());
    }
    Ok(b.finish()?)
}

fn unsupported_memory(h: &mut dyn Harness) -> Result<(), Stop> {
    let b = Bench::new(h)?;
    if b.transport.capabilities().device_memory {
        return Err(Stop::Skip("this backend takes device memory".into()));
    }
    let memory = crate::TestMemory::of_kind(K, kv_core::memory::MemoryKind::Vram { device: 0 });
    if b.transport.register(memory).is_ok() {
        return Err("device memory was registered by a backend that does not declare it".into());
    }
    Ok(b.finish()?)
}
