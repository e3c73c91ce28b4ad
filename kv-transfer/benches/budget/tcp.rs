//! kv-tcp across hosts, over loopback, against the best tuned raw socket: 1, 2 or 4 connections with a thread each,
//! 256 KiB a call, kernel buffers of its own choice, 256 or 512 KiB.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use kv_transfer::memory::MemoryOwner;
use kv_transfer::tcp::{HostArena, SameHost, TcpConfig, TcpTransport};
use kv_transfer::transport::Transport;
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};

use crate::child::{Peer, number};
use crate::lane::{self, OP, OPS, POOL, offsets};
use crate::report::{Budget, Report, Row};
use crate::same_host::Speed;
use crate::stats::median;
use crate::sys::{now_ns, process_cpu_ns};
use crate::{Options, Result};

pub const ROWS: &[&str] = &["tcp_16k"];
const PAGE: u64 = 16 << 10;
/// Bytes of one call.
const CALL: u64 = 256 << 10;
const CONNECTIONS: [usize; 3] = [1, 2, 4];
/// KiB; 0 leaves the kernel its own.
const BUFFERS: [u64; 3] = [0, 256, 512];

fn socket(buffer_kib: u64) -> Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    if buffer_kib > 0 {
        socket.set_send_buffer_size((buffer_kib << 10) as usize)?;
        socket.set_recv_buffer_size((buffer_kib << 10) as usize)?;
    }
    Ok(socket)
}

fn iovecs(addrs: &[u64]) -> Vec<libc::iovec> {
    addrs.iter().map(|a| libc::iovec { iov_base: *a as *mut libc::c_void, iov_len: PAGE as usize }).collect()
}

/// Take `n` bytes off the front.
fn advance(iov: &mut [libc::iovec], at: &mut usize, mut n: usize) {
    while n > 0 {
        let first = &mut iov[*at];
        let taken = n.min(first.iov_len);
        first.iov_base = (first.iov_base as usize + taken) as *mut libc::c_void;
        first.iov_len -= taken;
        n -= taken;
        if first.iov_len == 0 {
            *at += 1;
        }
    }
}

/// Send or receive all pages, one call's worth at a time.
fn move_all(addrs: &[u64], call: impl Fn(&[libc::iovec]) -> isize) -> std::io::Result<()> {
    for part in addrs.chunks((CALL / PAGE) as usize) {
        let (mut iov, mut at) = (iovecs(part), 0);
        while at < iov.len() {
            match call(&iov[at..]) {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                n if n < 0 => return Err(std::io::Error::last_os_error()),
                n => advance(&mut iov, &mut at, n as usize),
            }
        }
    }
    Ok(())
}

/// Each connection's share of an op.
fn shares(addrs: &[u64], connections: usize) -> Vec<&[u64]> {
    let n = addrs.len();
    (0..connections).map(|c| &addrs[c * n / connections..(c + 1) * n / connections]).collect()
}

/// The source's half of a raw transfer; ns until every connection was acknowledged.
pub fn raw_send(request: &Value, addrs: &[u64], page: u64) -> Result<u64> {
    if page != PAGE {
        return Err("raw transfers have one page size".into());
    }
    let port = u16::try_from(number(request, "port")?)?;
    let connections = number(request, "connections")? as usize;
    let open = || -> Result<TcpStream> {
        let socket = socket(number(request, "buffer")?)?;
        socket.connect(&SocketAddr::from(([127, 0, 0, 1], port)).into())?;
        socket.set_tcp_nodelay(true)?;
        // The target starts its threads when all are there.
        Ok(socket.into())
    };
    let streams = (0..connections).map(|_| open()).collect::<Result<Vec<_>>>()?;
    for s in &streams {
        let mut go = [0];
        (&*s).read_exact(&mut go)?;
    }
    let start = now_ns();
    std::thread::scope(|scope| -> Result<()> {
        let all: Vec<_> = shares(addrs, connections)
            .into_iter()
            .zip(&streams)
            .map(|(share, stream)| {
                scope.spawn(move || {
                    // SAFETY: the segments lie in the arena, which outlives the call.
                    move_all(share, |iov| unsafe {
                        libc::writev(stream.as_raw_fd(), iov.as_ptr(), iov.len() as libc::c_int)
                    })?;
                    let mut ack = [0];
                    let mut stream = stream;
                    stream.read_exact(&mut ack)
                })
            })
            .collect();
        for thread in all {
            thread.join().map_err(|_| "a sending thread panicked")??;
        }
        Ok(())
    })?;
    Ok(now_ns() - start)
}

/// The target's half.
fn raw_receive(listener: &TcpListener, addrs: &[u64], connections: usize) -> Result<()> {
    let streams = (0..connections).map(|_| Ok(listener.accept()?.0)).collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        let all: Vec<_> = shares(addrs, connections)
            .into_iter()
            .zip(streams)
            .map(|(share, mut stream)| {
                scope.spawn(move || {
                    stream.set_nodelay(true)?;
                    stream.write_all(b"g")?;
                    // SAFETY: the segments lie in the arena, to which no reference is held.
                    move_all(share, |iov| unsafe {
                        libc::readv(stream.as_raw_fd(), iov.as_ptr(), iov.len() as libc::c_int)
                    })?;
                    stream.write_all(b"k")
                })
            })
            .collect();
        for thread in all {
            thread.join().map_err(|_| "a receiving thread panicked")??;
        }
        Ok(())
    })
}

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let arena = Arc::new(HostArena::prefaulted(POOL as usize)?);
    let transport = TcpTransport::new(TcpConfig { same_host: SameHost::Off, ..TcpConfig::loopback() })?;
    let _region = transport.register(arena.clone())?;
    let mut peer = Peer::start(lane::ROLE)?;
    let target = lane::describe(&transport, arena.base());
    peer.ask(&json!({ "page": PAGE, "tcp": true, "targets": [target] }))?;
    let lists: Vec<Vec<u64>> =
        (0..OPS).map(|op| offsets(PAGE, op).1.into_iter().map(|o| arena.base() + o).collect()).collect();
    let mut variants = Vec::new();
    for buffer in BUFFERS {
        // The receive buffer must be set before the handshake: accepted sockets inherit it.
        let listener = socket(buffer)?;
        listener.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())?;
        listener.listen(16)?;
        let listener = TcpListener::from(listener);
        for connections in CONNECTIONS {
            variants.push((connections, buffer, listener.try_clone()?));
        }
    }

    let mut ours = Speed::default();
    let mut floor: BTreeMap<(usize, u64), Speed> = BTreeMap::new();
    let rounds = options.rounds(8);
    for op in 0..=rounds {
        for (connections, buffer, listener) in &variants {
            let port = listener.local_addr()?.port();
            let cpu = process_cpu_ns();
            peer.tell(&json!({ "op": op, "port": port, "connections": connections, "buffer": buffer }))?;
            raw_receive(listener, &lists[op % OPS], *connections)?;
            let reply = peer.hear()?;
            let cpu = process_cpu_ns() - cpu + number(&reply, "cpu")?;
            if op > 0 {
                floor.entry((*connections, *buffer)).or_default().add(OP, number(&reply, "ns")?, cpu);
            }
        }
        // Twice, since it is one of ten.
        for half in 0..2 {
            let cpu = process_cpu_ns();
            let reply = peer.ask(&json!({ "op": op + half, "target": 0 }))?;
            let cpu = process_cpu_ns() - cpu + number(&reply, "cpu")?;
            if op > 0 {
                ours.add(OP, number(&reply, "ns")?, cpu);
            }
        }
    }
    let best = floor.iter().max_by(|a, b| a.1.median().total_cmp(&b.1.median()));
    let ((connections, buffer), best) = best.ok_or("no floor")?;
    let buffer = if *buffer == 0 { "the kernel's own".to_owned() } else { format!("{buffer} KiB") };
    report.add(Row {
        row: ROWS[0].into(),
        ours: ours.median(),
        peer: best.median(),
        unit: "GB/s",
        budget: Budget::RatioAtLeast(0.90),
        cpu: format!("{:.3} | {:.3} s/GB", median(&ours.cpu), median(&best.cpu)),
        note: format!("best of 9 raw sockets: {connections} connection(s), buffers {buffer}; ops of 128 MiB, shuffled"),
    });
    Ok(())
}
