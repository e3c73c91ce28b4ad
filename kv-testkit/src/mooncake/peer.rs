//! The target.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::memory::MemoryOwner as _;
use mooncake_wire::handshake::{self, HEAD_LEN, MAX_LEN};
use mooncake_wire::{Buffer, Descriptor, HEADER_LEN, Kind, Opcode, Request, Status};
use serde_json::Value;

use crate::memory::TestMemory;

/// What is wrong with its handshake port.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum HandshakeFault {
    /// Nothing.
    #[default]
    None,
    /// It takes the connection, and never answers.
    Silent,
    /// It answers after this time.
    Slow(Duration),
    /// It sends so many bytes of its answer, and closes.
    Truncated(usize),
    /// A member of its descriptor (a JSON pointer) is this instead; where there is none, it is added at the top.
    Member(String, Value),
    /// Its descriptor is this.
    Says(Value),
    /// The answer is these bytes, whole.
    Raw(Vec<u8>),
}

/// What is wrong with its data port, from the next request on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DataFault {
    /// Nothing.
    #[default]
    None,
    /// It waits this long before each status.
    SlowStatus(Duration),
    /// It takes payload in pieces of so many bytes, with a pause before each.
    SlowPayload(usize, Duration),
    /// Half-open: it takes everything, and answers nothing.
    NoStatus,
    /// Half-open: it takes nothing any more, and does not close.
    Deaf,
    /// Its status is this word.
    StatusWord(u64),
    /// It sends so many bytes of its status, and closes.
    TruncatedStatus(usize),
    /// It takes so many bytes of a write's payload, and closes.
    ClosesWithin(usize),
    /// It refuses whatever is asked, with status 1, and closes.
    Refuses,
    /// It sends a status nobody asked for in front of the true one.
    StatusTwice,
    /// It answers a read with so many bytes of it, and closes.
    TruncatedRead(usize),
}

/// A request it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The request.
    pub request: Request,
    /// Its range lies in the registered memory.
    pub inside: bool,
}

#[derive(Default)]
struct Faults {
    handshake: HandshakeFault,
    data: DataFault,
}

struct Inner {
    session: String,
    data_port: u16,
    version: i64,
    memory: Arc<TestMemory>,
    faults: Mutex<Faults>,
    seen: Mutex<Vec<Seen>>,
    open: Mutex<Vec<TcpStream>>,
    stopped: AtomicBool,
}

/// A target on the loopback address with one registered block. Ends when dropped.
pub struct MooncakePeer(Arc<Inner>);

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MooncakePeer {
    /// One that registered `len` bytes and speaks this version of the data port's wire (1 or 2).
    pub fn start(len: usize, version: i64) -> io::Result<Self> {
        let (handshakes, data) = (TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?);
        let inner = Arc::new(Inner {
            session: handshakes.local_addr()?.to_string(),
            data_port: data.local_addr()?.port(),
            version,
            memory: TestMemory::new(len),
            faults: Mutex::default(),
            seen: Mutex::default(),
            open: Mutex::default(),
            stopped: AtomicBool::new(false),
        });
        for (listener, serve) in [(handshakes, Inner::handshake as fn(&Inner, TcpStream) -> _), (data, Inner::data)] {
            let inner = Arc::clone(&inner);
            std::thread::spawn(move || inner.accept(&listener, serve));
        }
        Ok(Self(inner))
    }

    /// Its session id.
    pub fn session(&self) -> &str {
        &self.0.session
    }

    /// Its registered block.
    pub fn memory(&self) -> &Arc<TestMemory> {
        &self.0.memory
    }

    /// Its descriptor while nothing is wrong.
    pub fn descriptor(&self) -> Value {
        self.0.descriptor()
    }

    /// Misbehave in handshakes from now on.
    pub fn handshake_fault(&self, fault: HandshakeFault) {
        lock(&self.0.faults).handshake = fault;
    }

    /// Misbehave on the data port from now on.
    pub fn data_fault(&self, fault: DataFault) {
        lock(&self.0.faults).data = fault;
    }

    /// Requests it took so far.
    pub fn seen(&self) -> Vec<Seen> {
        lock(&self.0.seen).clone()
    }

    /// Close every connection.
    pub fn close_connections(&self) {
        for stream in lock(&self.0.open).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for MooncakePeer {
    fn drop(&mut self) {
        self.0.stopped.store(true, Ordering::SeqCst);
        self.close_connections();
        // The listeners' threads see it at their next connection.
        let _ = TcpStream::connect(&self.0.session);
        let _ = TcpStream::connect(("127.0.0.1", self.0.data_port));
    }
}

impl Inner {
    fn descriptor(&self) -> Value {
        let buffer = Buffer { addr: self.memory.base(), len: self.memory.len() };
        let mut out =
            Descriptor::tcp(&self.session, Some("127.0.0.1"), self.data_port, self.version, [buffer]).to_json();
        if let (true, Some(members)) = (self.version < 2, out.as_object_mut()) {
            // Those engines do not know of versions.
            members.remove("tcp_proto_version");
        }
        out
    }

    fn accept(self: Arc<Self>, listener: &TcpListener, serve: fn(&Self, TcpStream) -> io::Result<()>) {
        for stream in listener.incoming().flatten() {
            if self.stopped.load(Ordering::SeqCst) {
                return;
            }
            let _ = stream.set_nodelay(true);
            if let Ok(other) = stream.try_clone() {
                lock(&self.open).push(other);
            }
            let inner = Arc::clone(&self);
            std::thread::spawn(move || {
                if let Ok(other) = stream.try_clone() {
                    let _ = serve(&inner, stream);
                    // A clone is kept for `close_connections`: without this the connection would stay.
                    let _ = other.shutdown(Shutdown::Both);
                }
            });
        }
    }

    /// Nothing more comes from here until the other side, or the test, closes.
    fn hold(mut stream: TcpStream, read: bool) -> io::Result<()> {
        if read {
            io::copy(&mut stream, &mut io::sink())?;
            return Ok(());
        }
        loop {
            std::thread::sleep(Duration::from_millis(10));
            stream.set_nonblocking(true)?;
            match stream.take_error()? {
                Some(e) => return Err(e),
                None if stream.peer_addr().is_err() => return Ok(()),
                None => {}
            }
        }
    }

    fn handshake(&self, mut stream: TcpStream) -> io::Result<()> {
        let mut head = [0; HEAD_LEN];
        stream.read_exact(&mut head)?;
        let odd = |e: handshake::BadLength| io::Error::other(e.to_string());
        let mut body = vec![0; handshake::body_len(head, MAX_LEN).map_err(odd)?];
        stream.read_exact(&mut body)?;
        let kind = handshake::split(&body).and_then(|(kind, _)| kind);
        let fault = lock(&self.faults).handshake.clone();
        let mut said = self.descriptor();
        let mut answer = None;
        match fault {
            HandshakeFault::None => {}
            HandshakeFault::Silent => return Self::hold(stream, true),
            HandshakeFault::Slow(time) => std::thread::sleep(time),
            HandshakeFault::Truncated(len) => {
                let whole = handshake::answer(kind, &said.to_string());
                answer = Some(whole[..len.min(whole.len())].to_vec());
            }
            HandshakeFault::Member(at, value) => match said.pointer_mut(&at) {
                Some(member) => *member = value,
                None => said[at.trim_start_matches('/')] = value,
            },
            HandshakeFault::Says(other) => said = other,
            HandshakeFault::Raw(bytes) => answer = Some(bytes),
        }
        let answer = answer.unwrap_or_else(|| handshake::answer(kind.or(Some(Kind::Metadata)), &said.to_string()));
        stream.write_all(&answer)?;
        stream.shutdown(Shutdown::Write)?;
        let _ = stream.read(&mut [0]);
        Ok(())
    }

    fn data(&self, mut stream: TcpStream) -> io::Result<()> {
        loop {
            let mut head = [0; HEADER_LEN];
            stream.read_exact(&mut head)?;
            let request = Request::decode(&head).map_err(io::Error::other)?;
            let (addr, len) = (request.addr, request.len);
            let (base, size) = (self.memory.base(), self.memory.len());
            let end = addr.checked_add(len);
            let inside = len > 0 && addr >= base && end.is_some_and(|end| end <= base + size);
            lock(&self.seen).push(Seen { request, inside });
            let fault = lock(&self.faults).data.clone();
            if fault == DataFault::Deaf {
                return Self::hold(stream, false);
            }
            if !inside || fault == DataFault::Refuses {
                if request.acknowledged {
                    stream.write_all(&Status::Rejected.encode())?;
                    stream.shutdown(Shutdown::Write)?;
                    io::copy(&mut stream, &mut io::sink())?;
                }
                return Ok(());
            }
            let (at, len) = ((addr - base) as usize, len as usize);
            match request.op {
                Opcode::Write => self.receive(&mut stream, at, len, &fault)?,
                Opcode::Read => {}
            }
            if fault == DataFault::NoStatus {
                return Self::hold(stream, true);
            }
            if request.acknowledged {
                Self::status(&mut stream, &fault)?;
            }
            if request.op == Opcode::Read {
                let mut bytes = self.memory.read(at, len);
                let short = match fault {
                    DataFault::TruncatedRead(n) => Some(n),
                    _ => None,
                };
                bytes.truncate(short.unwrap_or(len));
                stream.write_all(&bytes)?;
                if short.is_some() {
                    return Ok(());
                }
            }
        }
    }

    fn receive(&self, stream: &mut TcpStream, at: usize, len: usize, fault: &DataFault) -> io::Result<()> {
        let (piece, pause) = match fault {
            DataFault::SlowPayload(piece, pause) => ((*piece).max(1), *pause),
            _ => (256 << 10, Duration::ZERO),
        };
        let most = match fault {
            DataFault::ClosesWithin(n) => (*n).min(len),
            _ => len,
        };
        let mut done = 0;
        while done < most {
            std::thread::sleep(pause);
            let mut bytes = vec![0; piece.min(most - done)];
            stream.read_exact(&mut bytes)?;
            self.memory.write(at + done, &bytes);
            done += bytes.len();
        }
        match fault {
            DataFault::ClosesWithin(_) => Err(io::Error::other("closed as told")),
            _ => Ok(()),
        }
    }

    fn status(stream: &mut TcpStream, fault: &DataFault) -> io::Result<()> {
        let ok = Status::Ok.encode();
        match fault {
            DataFault::SlowStatus(time) => std::thread::sleep(*time),
            DataFault::StatusWord(word) => return stream.write_all(&word.to_le_bytes()),
            DataFault::TruncatedStatus(n) => {
                stream.write_all(&ok[..(*n).min(ok.len())])?;
                return Err(io::Error::other("closed as told"));
            }
            DataFault::StatusTwice => stream.write_all(&ok)?,
            _ => {}
        }
        stream.write_all(&ok)
    }
}
