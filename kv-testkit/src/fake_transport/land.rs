//! The landing of writes: real copies from source memory to destination memory, checked against what is registered
//! at that moment.

use std::sync::Arc;

use kv_core::ids::{OpId, RegionId};
use kv_core::memory::{MemoryOwner, RegisteredRegion};
use kv_core::plan::Span;
use kv_core::transport::WriteOp;

use super::blob::{DIGEST_SEED, RemoteRegion, digest};
use super::op::OpRow;
use super::policy::Flaw;
use super::state::{Inner, Landing, Regions};
use crate::memory::{POISON, with_live};

/// Why bytes did not land.
#[derive(Debug)]
pub(super) enum Refusal {
    /// The target process is dead: nobody to write to.
    Dead,
    /// A rule of the seam was broken.
    Broken(String),
}

fn region(op: &WriteOp, id: RegionId) -> Option<&Arc<RegisteredRegion>> {
    op.regions.iter().find(|r| r.id() == id)
}

/// A copy of what a span reads; `None` when its region is not among the op's, or too short.
pub(super) fn read_source(op: &WriteOp, span: &Span) -> Option<Vec<u8>> {
    let region = region(op, span.src_region)?;
    if span.src_offset.checked_add(span.len)? > region.len() {
        return None;
    }
    let mut bytes = vec![0; usize::try_from(span.len).ok()?];
    // SAFETY: the owner keeps `[addr, addr + len)` valid for reads while its `Arc` is held, which `op` does; the range was
    // just checked; `bytes` is another allocation.
    unsafe {
        let from = (region.addr() + span.src_offset) as *const u8;
        std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len());
    }
    Some(bytes)
}

/// A digest of everything the op reads; `None` when it cannot be read.
pub(super) fn source_digest(op: &WriteOp) -> Option<u64> {
    op.plan.spans().try_fold(DIGEST_SEED, |h, s| Some(digest(h, &read_source(op, &s)?)))
}

/// The owner of the region that holds `[addr, addr + len)`, registered now under the key the peer has for it. `even_gone`
/// takes regions whose registration has ended (a flaw).
fn owner_of(
    regions: &Regions,
    known: &[RemoteRegion],
    addr: u64,
    len: u64,
    even_gone: bool,
) -> Option<Arc<dyn MemoryOwner>> {
    let end = addr.checked_add(len)?;
    let rows = regions.lock();
    let live = known.iter().filter_map(|k| rows.get(&k.id).filter(|r| r.key == k.key));
    let mut fits = live.filter(|r| addr >= r.base && end <= r.base + r.len && (even_gone || !r.gone));
    fits.next()?.owner.upgrade()
}

/// Whether a peer that knows `known` may write `[addr, addr + len)` now.
pub(super) fn is_registered(regions: &Regions, known: &[RemoteRegion], addr: u64, len: u64) -> bool {
    owner_of(regions, known, addr, len, false).is_some()
}

/// Write `bytes` at `addr`, inside one region of the target that is registered now under the key the peer has for it.
fn write_registered(
    regions: &Regions,
    known: &[RemoteRegion],
    addr: u64,
    bytes: &[u8],
    even_gone: bool,
) -> Result<(), String> {
    let len = bytes.len() as u64;
    let outside = || format!("[{addr:#x}; {len}] is outside what the target has registered");
    let owner = owner_of(regions, known, addr, len, even_gone).ok_or_else(outside)?;
    // SAFETY: the owner is alive (held here) and keeps its range valid for writes by others; `[addr, addr + len)` is inside it;
    // `bytes` is a private copy.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), addr as *mut u8, bytes.len()) };
    drop(owner);
    Ok(())
}

impl OpRow {
    /// Nothing reads the source any more, and bytes may still land: those that have left already.
    pub(super) fn take_to_the_wire(&mut self) {
        if let (Some(op), None, true, false) = (&self.op, &self.wire, self.info.src_quiet, self.info.dst_quiet) {
            self.wire = op.plan.spans().map(|span| read_source(op, &span)).collect();
        }
    }
}

impl Inner {
    /// Let the spans in `which` land, those that have not yet.
    pub(super) fn land(&mut self, name: &str, id: OpId, which: std::ops::Range<usize>) -> Result<(), Refusal> {
        let (refuse_quietly, watch) = (self.refuse_quietly, self.watch_sources);
        let node = self.node(name);
        let flaw = node.flaw;
        let row = node.ops.get(&id).unwrap_or_else(|| panic!("{name} has no {id:?}"));
        let target = row.info.target.clone();
        let Some(op) = row.op.clone() else { panic!("{name} {id:?} is quiet: it cannot land any more") };
        let known = node.peers.get(&op.peer).map(|p| p.regions.clone()).unwrap_or_default();
        let row = &node.ops[&id];
        let changed = watch
            && row.info.landed == 0
            && row.wire.is_none()
            && row.source_digest.is_some_and(|want| source_digest(&op) != Some(want));
        let regions = match self.nodes.get(&target) {
            Some(node) if node.alive => node.regions.clone(),
            Some(_) => return Err(Refusal::Dead),
            None if flaw == Some(Flaw::AcceptsUnknownPeer) => return Ok(()),
            None => return Err(Refusal::Dead),
        };
        if changed {
            self.violation(format!("the source of {name} {id:?} changed between submit and landing"));
        }
        let spans: Vec<Span> = op.plan.spans().collect();
        assert!(which.end <= spans.len(), "{name} {id:?} has {} spans, not {}", spans.len(), which.end);
        for i in which {
            if self.node(name).ops[&id].landed[i] {
                continue;
            }
            let span = spans[i];
            let row = &self.node(name).ops[&id];
            let from = row.wire.as_ref().map_or_else(|| read_source(&op, &span), |wire| wire.get(i).cloned());
            let mut bytes = match from {
                Some(bytes) => bytes,
                // Only flawed fakes come here: the memory is gone, or was never named.
                None => vec![POISON; span.len as usize],
            };
            if flaw == Some(Flaw::CorruptsByte)
                && i + 1 == spans.len()
                && let Some(last) = bytes.last_mut()
            {
                *last ^= 0x80;
            }
            if flaw == Some(Flaw::SpillsOver) {
                bytes.push(POISON);
            }
            let hit = |g: &&super::state::Guard| span.dst_addr < g.addr + g.len && g.addr < span.dst_addr + span.len;
            if let Some(g) = self.guards.iter().find(hit) {
                let text = format!("{name} {id:?} landed {} bytes at {:#x}: {}", span.len, span.dst_addr, g.why);
                self.violation(text);
            }
            if let Some(mut look) = self.observer.take() {
                let landing = Landing { from: name, to: &target, op: id, addr: span.dst_addr, bytes: &bytes };
                let text = look(&landing);
                self.observer = Some(look);
                self.violations.extend(text);
            }
            let even_gone = flaw == Some(Flaw::KeepsUnregistered);
            if let Err(text) = write_registered(&regions, &known, span.dst_addr, &bytes, even_gone) {
                let anywhere = matches!(flaw, Some(Flaw::IgnoresBounds | Flaw::SpillsOver | Flaw::TrustsForgedPeer))
                    && with_live(span.dst_addr, bytes.len() as u64, || {
                        // SAFETY: inside a live test allocation, which stays while the closure runs.
                        unsafe {
                            std::ptr::copy_nonoverlapping(bytes.as_ptr(), span.dst_addr as *mut u8, bytes.len());
                        }
                    });
                if !anywhere {
                    let text = format!("{name} {id:?} -> {target}: {text}");
                    if !refuse_quietly {
                        self.violation(text.clone());
                    }
                    return Err(Refusal::Broken(text));
                }
            }
            let row = self.node(name).ops.get_mut(&id).expect("looked up above");
            row.landed[i] = true;
            row.info.landed += 1;
        }
        Ok(())
    }
}
