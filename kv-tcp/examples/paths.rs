//! Measure both paths beside what the kernel gives a bare loop, in the same run, between two processes.
//!
//! `cargo run --release -p kv-transfer-tcp --example paths [ROUNDS]`
//!
//! Per round, interleaved: one 128 MiB op of shuffled 16 KiB pages through the transport, then the same pages by a
//! bare loop (`process_vm_readv` with 64 segments a call; two tuned sockets with 256 KiB a call). Medians.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::ids::{OpId, PeerId};
use kv_core::memory::RegisteredRegion;
use kv_core::net::Endpoint;
use kv_core::plan::{EntryPair, PlanGroup, Run, WritePlan};
use kv_core::transport::{Lane, LaneEvent, Outcome, PeerDescriptor, Transport, WriteOp};
use kv_tcp::{HostArena, SameHost, TcpConfig, TcpTransport};

const POOL: usize = 512 << 20;
const OP: usize = 128 << 20;
const PAGE: usize = 16 << 10;
const PAGES: usize = OP / PAGE;
const SLOTS: usize = POOL / PAGE;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn shuffled(seed: u64) -> Vec<u32> {
    let mut x = seed;
    let mut v: Vec<u32> = (0..SLOTS as u32).collect();
    for i in (1..SLOTS).rev() {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        v.swap(i, (x % (i as u64 + 1)) as usize);
    }
    v
}

/// The pages of round `k`: slots in source and destination.
fn pages<'a>(src: &'a [u32], dst: &'a [u32], k: usize) -> (&'a [u32], &'a [u32]) {
    let at = k * PAGES % SLOTS;
    (&src[at..at + PAGES], &dst[at..at + PAGES])
}

fn segs(base: usize, slots: &[u32]) -> Vec<libc::iovec> {
    slots.iter().map(|s| libc::iovec { iov_base: (base + *s as usize * PAGE) as *mut _, iov_len: PAGE }).collect()
}

fn median(v: &mut [f64]) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

fn cpu() -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

fn config(mode: &str) -> TcpConfig {
    let same_host = if mode == "tcp" { SameHost::Off } else { SameHost::Auto };
    let mut config = TcpConfig { same_host, ..TcpConfig::loopback() };
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse().ok());
    if let Some(kib) = number("SOCKBUF_KIB") {
        config.socket_buffer = (kib > 0).then_some(kib << 10);
    }
    if let Some(n) = number("CONNECTIONS") {
        config.connections_per_peer = n;
    }
    if let Some(n) = number("WORKERS") {
        config.workers = n;
    }
    config
}

// ---- the target ----

fn target(mode: &str) -> Result<()> {
    let transport = TcpTransport::new(config(mode))?;
    let arena = Arc::new(HostArena::prefaulted(POOL)?);
    let base = arena.as_ptr() as usize;
    let _region = transport.register(arena)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let hex: String = transport.local_metadata().iter().map(|b| format!("{b:02x}")).collect();
    println!("{} {base} {} {hex}", transport.local_name(), listener.local_addr()?.port());
    let (src, dst) = (shuffled(7777), shuffled(4242));
    let mut raw: Vec<TcpStream> = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let w: Vec<&str> = line.split(' ').collect();
        match w[0] {
            "cpu" => println!("{}", cpu()),
            "accept" => {
                tune(&listener);
                for _ in 0..2 {
                    let s = listener.accept()?.0;
                    s.set_nodelay(true)?;
                    raw.push(s);
                }
                println!("ok");
            }
            // bare PID SOURCE_BASE ROUND THREADS
            "bare" => {
                let (pid, from, k, threads): (i32, usize, usize, usize) =
                    (w[1].parse()?, w[2].parse()?, w[3].parse()?, w[4].parse()?);
                let (s, d) = pages(&src, &dst, k);
                let t = Instant::now();
                std::thread::scope(|scope| {
                    for n in 0..threads {
                        let part = n * PAGES / threads..(n + 1) * PAGES / threads;
                        let (s, d) = (&s[part.clone()], &d[part]);
                        scope.spawn(move || {
                            for (s, d) in s.chunks(64).zip(d.chunks(64)) {
                                let (r, l) = (segs(from, s), segs(base, d));
                                let (nl, nr) = (l.len() as u64, r.len() as u64);
                                // SAFETY: segments of our own pool; the remote side is checked by the kernel.
                                let got = unsafe { libc::process_vm_readv(pid, l.as_ptr(), nl, r.as_ptr(), nr, 0) };
                                assert_eq!(got, (l.len() * PAGE) as isize);
                            }
                        });
                    }
                });
                println!("{}", t.elapsed().as_secs_f64());
            }
            "raw" => {
                let (_, d) = pages(&src, &dst, w[1].parse()?);
                println!("go");
                std::thread::scope(|scope| {
                    for (n, mut sock) in raw.iter().enumerate() {
                        let d = &d[n * PAGES / 2..(n + 1) * PAGES / 2];
                        scope.spawn(move || {
                            for d in d.chunks(64) {
                                let mut v = segs(base, d);
                                let mut at = 0;
                                while at < v.len() {
                                    // SAFETY: segments of our own pool.
                                    let got = unsafe {
                                        libc::readv(sock.as_raw_fd(), v[at..].as_ptr(), (v.len() - at) as i32)
                                    };
                                    assert!(got > 0);
                                    advance(&mut v, &mut at, got as usize);
                                }
                            }
                            sock.write_all(b"k").unwrap_or_default();
                        });
                    }
                });
            }
            _ => break,
        }
    }
    Ok(())
}

fn advance(v: &mut [libc::iovec], at: &mut usize, mut n: usize) {
    while n > 0 {
        let x = &mut v[*at];
        if n >= x.iov_len {
            n -= x.iov_len;
            *at += 1;
        } else {
            x.iov_base = (x.iov_base as usize + n) as *mut _;
            x.iov_len -= n;
            n = 0;
        }
    }
}

fn tune(fd: &impl AsRawFd) {
    let bytes: libc::c_int = 256 << 10;
    for option in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
        // SAFETY: an int of the stated size.
        unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, option, (&raw const bytes).cast(), 4) };
    }
}

// ---- the source ----

struct Ends {
    lane: Box<dyn Lane>,
    peer: PeerId,
    region: Arc<RegisteredRegion>,
    base: u64,
    next: u64,
}

impl Ends {
    fn submit(&mut self, plan: WritePlan) -> Result<u64> {
        self.next += 1;
        let op = WriteOp { id: OpId(self.next), peer: self.peer, plan, regions: Arc::new([self.region.clone()]) };
        self.lane.submit(op).map_err(|e| format!("{e:?}"))?;
        Ok(self.next)
    }

    /// Wait for news; returns how many ops are done.
    fn wait(&mut self, out: &mut Vec<LaneEvent>) -> Result<usize> {
        let fd = self.lane.wake_fd().ok_or("no descriptor")?;
        let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd.
        unsafe { libc::poll(&raw mut p, 1, 10_000) };
        out.clear();
        self.lane.poll(out);
        for e in out.iter() {
            if !matches!(e, LaneEvent::Outcome(_, Outcome::Done)) {
                return Err(format!("{e:?}").into());
            }
        }
        Ok(out.len())
    }

    fn plan(&self, runs: Vec<Run>, len: u64) -> WritePlan {
        let entry = EntryPair {
            src_entry: 0,
            dst_entry: 0,
            src_region: self.region.id(),
            src_offset: 0,
            dst_addr: self.base,
            item_len: len,
            src_stride: len,
            dst_stride: len,
            dst_kind: Default::default(),
        };
        WritePlan::new([PlanGroup { entries: Arc::new([entry]), runs: runs.into() }])
    }
}

fn source(mode: &str, rounds: usize) -> Result<()> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["target", mode])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut ask = child.stdin.take().ok_or("stdin")?;
    let mut hear = BufReader::new(child.stdout.take().ok_or("stdout")?);
    let mut answer = move || -> Result<String> {
        let mut line = String::new();
        hear.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    };
    let first = answer()?;
    let w: Vec<&str> = first.split(' ').collect();
    let bytes: Vec<u8> = (0..w[3].len() / 2)
        .map(|i| u8::from_str_radix(&w[3][i * 2..i * 2 + 2], 16))
        .collect::<std::result::Result<_, _>>()?;
    let transport = TcpTransport::new(config(mode))?;
    let arena = Arc::new(HostArena::prefaulted(POOL)?);
    let from = arena.as_ptr() as usize;
    let region = transport.register(arena)?;
    let lane = transport.lane()?;
    let descriptor = PeerDescriptor {
        name: w[0].into(),
        metadata: bytes.into(),
        endpoint: Endpoint::new("127.0.0.1", 1),
        host: None,
    };
    let peer = transport.connect(&descriptor)?;
    println!("path: {:?}", transport.peer_path(peer).map(|p| p.kind));
    let mut ends = Ends { lane, peer, region, base: w[1].parse()?, next: 0 };
    let (src, dst) = (shuffled(7777), shuffled(4242));
    let mut raw: Vec<TcpStream> = Vec::new();
    if mode == "tcp" {
        writeln!(ask, "accept")?;
        for _ in 0..2 {
            let s = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
            tune(&s);
            s.connect(&format!("127.0.0.1:{}", w[2]).parse::<std::net::SocketAddr>()?.into())?;
            s.set_tcp_nodelay(true)?;
            raw.push(s.into());
        }
        answer()?;
    }
    // Seconds and CPU seconds by name.
    let mut took: BTreeMap<&str, (Vec<f64>, Vec<f64>)> = BTreeMap::new();
    let mut out = Vec::new();
    for k in 0..=rounds {
        let (s, d) = pages(&src, &dst, k);
        let runs = s.iter().zip(d).map(|(s, d)| Run { src: *s, dst: *d, count: 1 }).collect();
        let plan = ends.plan(runs, PAGE as u64);
        writeln!(ask, "cpu")?;
        let there: f64 = answer()?.parse()?;
        let (t, c) = (Instant::now(), cpu());
        ends.submit(plan)?;
        while ends.wait(&mut out)? == 0 {}
        let ours = t.elapsed().as_secs_f64();
        writeln!(ask, "cpu")?;
        let spent = cpu() - c + answer()?.parse::<f64>()? - there;
        let mut bare = Vec::new();
        if mode == "tcp" {
            writeln!(ask, "cpu")?;
            let there: f64 = answer()?.parse()?;
            let c = cpu();
            writeln!(ask, "raw {k}")?;
            answer()?;
            let t = Instant::now();
            std::thread::scope(|scope| {
                for (n, mut sock) in raw.iter().enumerate() {
                    let s = &s[n * PAGES / 2..(n + 1) * PAGES / 2];
                    scope.spawn(move || {
                        for s in s.chunks(16) {
                            let mut v = segs(from, s);
                            let mut at = 0;
                            while at < v.len() {
                                // SAFETY: segments of our own pool.
                                let n =
                                    unsafe { libc::writev(sock.as_raw_fd(), v[at..].as_ptr(), (v.len() - at) as i32) };
                                assert!(n > 0);
                                advance(&mut v, &mut at, n as usize);
                            }
                        }
                        let mut b = [0];
                        let _ = sock.read_exact(&mut b);
                    });
                }
            });
            let t = t.elapsed().as_secs_f64();
            writeln!(ask, "cpu")?;
            bare.push(("raw, 2 tuned connections", t, cpu() - c + answer()?.parse::<f64>()? - there));
        } else {
            for (name, threads) in [("process_vm_readv, 1 thread", 1), ("process_vm_readv, 2 threads", 2)] {
                writeln!(ask, "cpu")?;
                let there: f64 = answer()?.parse()?;
                writeln!(ask, "bare {} {from} {k} {threads}", std::process::id())?;
                let t: f64 = answer()?.parse()?;
                writeln!(ask, "cpu")?;
                bare.push((name, t, answer()?.parse::<f64>()? - there));
            }
        }
        if k > 0 {
            for (name, t, c) in bare.into_iter().chain([("ours", ours, spent)]) {
                let entry = took.entry(name).or_default();
                entry.0.push(t);
                entry.1.push(c);
            }
        }
    }
    let gb = OP as f64 / 1e9;
    println!("{mode}: 128 MiB of 16 KiB pages, {rounds} rounds: GB/s median (best), CPU s/GB");
    for (name, (t, c)) in &mut took {
        let (m, c) = (gb / median(t), median(c) / gb);
        println!("{mode}:   {name:<28} {m:.2} ({:.2}), {c:.3}", gb / t[0]);
    }
    // Small ops: one at a time with a pause, then 64 in flight.
    let mut lat = Vec::new();
    for k in 0..2000u32 {
        std::thread::sleep(Duration::from_micros(300));
        let plan = ends.plan(vec![Run { src: k, dst: k, count: 1 }], 4096);
        let t = Instant::now();
        ends.submit(plan)?;
        while ends.wait(&mut out)? == 0 {}
        lat.push(t.elapsed().as_secs_f64() * 1e6);
    }
    let p50 = median(&mut lat);
    println!("{mode}: 4 KiB, one at a time: p50 {p50:.1} us, p99 {:.1} us", lat[lat.len() * 99 / 100]);
    for (len, name) in [(4096, "4 KiB"), (65536, "64 KiB")] {
        let (n, mut sent, mut done) = (100_000u32, 0u32, 0u32);
        let (t, c) = (Instant::now(), cpu());
        while done < n {
            while sent - done < 64 && sent < n {
                let plan = ends.plan(vec![Run { src: sent % 2000, dst: sent % 2000, count: 1 }], len);
                ends.submit(plan)?;
                sent += 1;
            }
            done += ends.wait(&mut out)? as u32;
        }
        let s = t.elapsed().as_secs_f64();
        let rate = f64::from(n) / s;
        println!(
            "{mode}: {name}, 64 in flight: {rate:.0} ops/s, source {:.1} us CPU/op",
            (cpu() - c) * 1e6 / f64::from(n)
        );
    }
    drop(ask);
    child.wait()?;
    Ok(())
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|a| a == "target") {
        return target(&args[2]);
    }
    let rounds = args.get(1).map_or(Ok(15), |a| a.parse())?;
    let only = args.get(2).cloned();
    for mode in ["direct", "tcp"] {
        if only.as_deref().is_none_or(|o| o == mode) {
            source(mode, rounds)?;
        }
    }
    Ok(())
}
