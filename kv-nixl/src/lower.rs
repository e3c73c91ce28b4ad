//! From an op to transfers of the library: by prepared lists where an entry has many runs, else by lists made for the op; one
//! transfer for each pair of memory kinds, or prepared entry.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kv_core::memory::{MemoryKind, RegisteredRegion};
use kv_core::plan::{EntryPair, PlanGroup, Span, WritePlan};
use kv_core::transport::{TransportError, TransportErrorKind as ErrorKind, WriteOp};
use smallvec::SmallVec;

use crate::agent::{Code, Request};
use crate::peer::Peer;
use crate::prepared;
use crate::stats;
use crate::transport::Core;

/// The transfers of an op, not started.
pub(crate) fn lower(core: &Arc<Core>, op: &WriteOp, peer: &Peer) -> Result<SmallVec<[Request; 1]>, TransportError> {
    let invalid = |text: String| TransportError::new(ErrorKind::InvalidArgument, text);
    if let Some(foreign) = op.regions.iter().find(|r| !core.is_ours(r)) {
        return Err(invalid(format!("{foreign:?} is not registered with this agent")));
    }
    let (total, most) = (op.plan.total_bytes(), core.config.max_op_bytes.max(1));
    if total > most {
        return Err(invalid(format!("an op of {total} bytes; at most {most}")));
    }
    // A peer whose device memory is host memory after all (see `Peer::device_is_host`) was found out by its first write.
    let device_is_host = peer.device_is_host.load(Ordering::Relaxed);
    let device = op.plan.groups().iter().flat_map(|g| g.entries.iter()).any(|e| e.dst_kind != MemoryKind::Dram);
    match transfers(core, op, peer, device_is_host) {
        Err(error) if device && error.kind == ErrorKind::Refused => {
            let requests = transfers(core, op, peer, !device_is_host).map_err(|_| error)?;
            if !peer.device_is_host.swap(!device_is_host, Ordering::Relaxed) {
                let name = peer.name.to_string_lossy();
                tracing::info!(peer = %name, "its device memory is registered as host memory with NIXL: written as that");
            }
            Ok(requests)
        }
        made => made,
    }
}

fn transfers(
    core: &Arc<Core>,
    op: &WriteOp,
    peer: &Peer,
    device_is_host: bool,
) -> Result<SmallVec<[Request; 1]>, TransportError> {
    let mut requests = SmallVec::new();
    let made = parts(op, device_is_host).iter().try_for_each(|part| {
        let rest = by_index(core, part, op, peer, &mut requests)?;
        let plan = rest.as_ref().unwrap_or(&part.plan);
        requests.extend(by_lists(core, part, plan, op, peer)?);
        Ok(())
    });
    match made {
        Ok(()) => Ok(requests),
        Err(error) => {
            // None of them was started.
            requests.into_iter().for_each(|r| core.agent.release(r));
            Err(error)
        }
    }
}

/// A transfer by lists made for it; `None`: nothing to move.
fn by_lists(
    core: &Core,
    part: &Part<'_>,
    plan: &WritePlan,
    op: &WriteOp,
    peer: &Peer,
) -> Result<Option<Request>, TransportError> {
    if plan.total_bytes() == 0 {
        return Ok(None);
    }
    let list = |memory| core.agent.list(memory).map_err(|code| refused(peer, code));
    let (mut local, mut remote) = (list(part.source)?, list(part.target)?);
    let mut failed = None;
    plan.for_each_span(|span| {
        if failed.is_some() || span.len == 0 {
            return;
        }
        let added = source_of(&op.regions, &span).and_then(|from| {
            let add = local.add(from, span.len).and_then(|()| remote.add(span.dst_addr, span.len));
            add.map_err(|code| refused(peer, code))
        });
        failed = added.err();
    });
    match failed {
        Some(error) => Err(error),
        None => core.agent.create(&peer.name, &local, &remote).map(Some).map_err(|code| refused(peer, code)),
    }
}

/// Transfers by prepared lists, for entries with many runs; what is left to be moved otherwise, `None`: all of it.
fn by_index(
    core: &Core,
    part: &Part<'_>,
    op: &WriteOp,
    peer: &Peer,
    requests: &mut SmallVec<[Request; 1]>,
) -> Result<Option<WritePlan>, TransportError> {
    let worth = |g: &PlanGroup| g.runs.len() >= prepared::WORTH;
    if core.budget.most == 0 || !part.plan.groups().iter().any(worth) {
        return Ok(None);
    }
    let mut rest = Vec::new();
    for group in part.plan.groups() {
        if !worth(group) {
            rest.push(group.clone());
            continue;
        }
        let (src_reach, dst_reach) = prepared::reach(&group.runs);
        let indices = prepared::indices(&group.runs);
        let mut left = Vec::new();
        for entry in group.entries.iter() {
            let lists = op.regions.iter().find(|r| r.id() == entry.src_region).and_then(|region| {
                let here = region.len().checked_sub(entry.src_offset)?.checked_div(entry.item_len)?;
                if !entry.is_dense() || src_reach > here {
                    return None;
                }
                let ours = (region.addr() + entry.src_offset, entry.item_len, part.source);
                let theirs = (entry.dst_addr, entry.item_len, part.target);
                let local = core.lists.get(&core.agent, None, ours, src_reach, Some(here), &core.budget)?;
                let name = Some(peer.name.as_c_str());
                let remote = peer.lists.get(&core.agent, name, theirs, dst_reach, None, &core.budget)?;
                Some((local, remote))
            });
            match (lists, &indices) {
                (Some((local, remote)), Ok((ours, theirs))) => {
                    let made = core.agent.make((local.prepared(), ours), (remote.prepared(), theirs));
                    requests.push(made.map_err(|code| refused(peer, code))?);
                    stats::add(&core.counters.transfers_by_index, 1);
                }
                // Checked, and refused, where lists are made for it.
                _ => left.push(*entry),
            }
        }
        rest.push(PlanGroup { entries: left.into(), runs: Arc::clone(&group.runs) });
    }
    Ok(Some(WritePlan::new(rest)))
}

/// What of an op goes from one kind of memory to one kind of memory: a transfer of its own.
struct Part<'a> {
    source: MemoryKind,
    target: MemoryKind,
    plan: Cow<'a, WritePlan>,
}

fn parts(op: &WriteOp, device_is_host: bool) -> SmallVec<[Part<'_>; 1]> {
    let source =
        |e: &EntryPair| op.regions.iter().find(|r| r.id() == e.src_region).map_or(MemoryKind::Dram, |r| r.kind());
    let target = |e: &EntryPair| if device_is_host { MemoryKind::Dram } else { e.dst_kind };
    let mut kinds = SmallVec::<[(MemoryKind, MemoryKind); 1]>::new();
    for entry in op.plan.groups().iter().flat_map(|g| g.entries.iter()) {
        let pair = (source(entry), target(entry));
        if !kinds.contains(&pair) {
            kinds.push(pair);
        }
    }
    let whole = kinds.len() == 1;
    let part = |(from, to): (MemoryKind, MemoryKind)| {
        let of_it = |g: &PlanGroup| PlanGroup {
            entries: g.entries.iter().filter(|e| (source(e), target(e)) == (from, to)).copied().collect(),
            runs: Arc::clone(&g.runs),
        };
        let plan = if whole {
            Cow::Borrowed(&op.plan)
        } else {
            Cow::Owned(WritePlan::new(op.plan.groups().iter().map(of_it)))
        };
        Part { source: from, target: to, plan }
    };
    kinds.into_iter().map(part).collect()
}

/// Where a span begins here. It must lie in a region of the op. The plan has joined what belongs together; pieces of
/// different entries may lie side by side in different registrations, so nothing more is joined.
fn source_of(regions: &[Arc<RegisteredRegion>], span: &Span) -> Result<u64, TransportError> {
    let invalid = |text: String| TransportError::new(ErrorKind::InvalidArgument, text);
    let region = regions
        .iter()
        .find(|r| r.id() == span.src_region)
        .ok_or_else(|| invalid(format!("region {} is not among those the op holds", span.src_region)))?;
    if span.src_offset.checked_add(span.len).is_none_or(|end| end > region.len()) {
        return Err(invalid(format!("{} bytes at {} of {region:?}", span.len, span.src_offset)));
    }
    if span.dst_addr.checked_add(span.len).is_none() {
        return Err(invalid(format!("{} bytes at {:#x} of the peer", span.len, span.dst_addr)));
    }
    Ok(region.addr() + span.src_offset)
}

fn refused(peer: &Peer, code: Code) -> TransportError {
    let name = peer.name.to_string_lossy();
    let text = format!(
        "NIXL refuses a write to {name}: {} (a range that it did not register, or not yet when it was connected)",
        code.name()
    );
    TransportError::new(ErrorKind::Refused, text)
}
