//! kv-tcp on one host, driven bare, against the best `process_vm_readv` of the same threads in the same run.

use std::collections::BTreeMap;
use std::sync::Arc;

use kv_transfer::memory::MemoryOwner;
use kv_transfer::tcp::{HostArena, TcpConfig, TcpTransport};
use kv_transfer::transport::Transport;
use serde_json::json;

use crate::child::{Peer, number};
use crate::lane::{self, OP, OPS, POOL, offsets};
use crate::report::{Budget, Report, Row};
use crate::stats::median;
use crate::sys::{now_ns, process_cpu_ns};
use crate::vm::{Copy, Reader};
use crate::{Options, Result};

pub const ROWS: &[&str] = &["same_host_16k", "same_host_16k_1t", "same_host_4k", "same_host_4k_1t"];

/// GB/s and CPU s/GB of some ops.
#[derive(Default)]
pub struct Speed {
    pub gb_s: Vec<f64>,
    pub cpu: Vec<f64>,
}

impl Speed {
    pub fn add(&mut self, bytes: u64, ns: u64, cpu_ns: u64) {
        self.gb_s.push(bytes as f64 / ns as f64);
        self.cpu.push(cpu_ns as f64 / bytes as f64);
    }

    pub fn median(&self) -> f64 {
        median(&self.gb_s)
    }
}

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let arena = Arc::new(HostArena::prefaulted(POOL as usize)?);
    for (page, names) in [(16 << 10, &ROWS[..2]), (4 << 10, &ROWS[2..])] {
        if names.iter().any(|n| options.wants(n)) {
            one_page_size(options, report, &arena, page, names)?;
        }
    }
    Ok(())
}

fn one_page_size(
    options: &Options,
    report: &mut Report,
    arena: &Arc<HostArena>,
    page: u64,
    names: &[&str],
) -> Result<()> {
    // Index = threads - 1.
    let mut targets = Vec::new();
    for workers in [1, 2] {
        let transport = TcpTransport::new(TcpConfig { workers, ..TcpConfig::loopback() })?;
        let region = transport.register(arena.clone())?;
        targets.push((transport, region));
    }
    let describe: Vec<_> = targets.iter().map(|(t, _)| lane::describe(t, arena.base())).collect();
    let mut peer = Peer::start(lane::ROLE)?;
    let hello = peer.ask(&json!({ "page": page, "targets": describe }))?;
    let reader = Reader { pid: peer.pid(), from: number(&hello, "base")?, to: arena.base() };
    let lists: Vec<Vec<Copy>> = (0..OPS)
        .map(|op| {
            let (src, dst) = offsets(page, op);
            src.into_iter().zip(dst).map(|(s, d)| (s, d, page)).collect()
        })
        .collect();

    let mut ours: BTreeMap<usize, Speed> = BTreeMap::new();
    let mut floor: BTreeMap<(usize, usize), Speed> = BTreeMap::new();
    let rounds = options.rounds(10);
    // The first round warms up.
    for op in 0..=rounds {
        for threads in [1, 2] {
            for segments in [16, 64] {
                let (cpu, start) = (process_cpu_ns(), now_ns());
                reader.read(&lists[op % OPS], segments, threads)?;
                let (ns, cpu) = (now_ns() - start, process_cpu_ns() - cpu);
                if op > 0 {
                    floor.entry((threads, segments)).or_default().add(OP, ns, cpu);
                }
            }
            let cpu = process_cpu_ns();
            let reply = peer.ask(&json!({ "op": op, "target": threads - 1 }))?;
            let cpu = process_cpu_ns() - cpu + number(&reply, "cpu")?;
            if op > 0 {
                ours.entry(threads).or_default().add(OP, number(&reply, "ns")?, cpu);
            }
        }
    }
    for (name, threads) in names.iter().zip([2, 1]) {
        let best = [16, 64].map(|s| (floor[&(threads, s)].median(), s)).into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
        let (peer, segments) = best.ok_or("no floor")?;
        let floor = &floor[&(threads, segments)];
        report.add(Row {
            row: (*name).to_owned(),
            ours: ours[&threads].median(),
            peer,
            unit: "GB/s",
            budget: Budget::RatioAtLeast(0.95),
            cpu: format!("{:.3} | {:.3} s/GB", median(&ours[&threads].cpu), median(&floor.cpu)),
            note: format!(
                "{threads} thread(s), best of 16 and 64 segments: {segments}; {rounds} ops of 128 MiB, shuffled"
            ),
        });
    }
    Ok(())
}
