//! A handshake that a peer began here: one question, one answer.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::time::Instant;

use mooncake_wire::Kind;
use mooncake_wire::handshake::{self, HEAD_LEN, MAX_LEN};

use crate::inbound::Wants;

pub(crate) struct Greeting {
    pub sock: TcpStream,
    pub wants: Wants,
    pub deadline: Instant,
    question: Vec<u8>,
    answer: Option<Vec<u8>>,
    sent: usize,
}

impl Greeting {
    pub fn new(sock: TcpStream, deadline: Instant) -> Self {
        let wants = Wants { read: true, write: false };
        Self { sock, wants, deadline, question: Vec::new(), answer: None, sent: 0 }
    }

    /// Go on; an error ends the connection. `descriptor`: what is said of us. True when it was answered just now.
    pub fn drive(&mut self, descriptor: impl FnOnce() -> String) -> io::Result<bool> {
        let mut answered = false;
        if self.answer.is_none() {
            let Some(kind) = self.read()? else { return Ok(false) };
            self.answer = Some(handshake::answer(kind, &descriptor()));
            self.question = Vec::new();
            answered = true;
        }
        let Some(answer) = &self.answer else { return Ok(answered) };
        while self.sent < answer.len() {
            match (&self.sock).write(&answer[self.sent..]) {
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.wants = Wants { read: false, write: true };
                    return Ok(answered);
                }
                Err(e) => return Err(e),
            }
            if self.sent == answer.len() {
                self.sock.shutdown(Shutdown::Write)?;
            }
        }
        self.wants = Wants { read: true, write: false };
        // Nothing is due any more but its end.
        match (&self.sock).read(&mut [0; 64]) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(answered),
            Err(e) if crate::sys::not_now(&e) => Ok(answered),
            Err(e) => Err(e),
        }
    }

    /// The kind of the question, once it is whole.
    fn read(&mut self) -> io::Result<Option<Option<Kind>>> {
        let odd = |e: String| io::Error::new(io::ErrorKind::InvalidData, e);
        let mut chunk = [0; 4096];
        loop {
            let whole = match self.question.first_chunk::<HEAD_LEN>() {
                None => HEAD_LEN,
                Some(head) => HEAD_LEN + handshake::body_len(*head, MAX_LEN).map_err(|e| odd(e.to_string()))?,
            };
            let missing = whole - self.question.len();
            if missing == 0 && whole > HEAD_LEN {
                let body = &self.question[HEAD_LEN..];
                return Ok(handshake::split(body).map(|(kind, _)| kind));
            }
            match (&self.sock).read(&mut chunk[..missing.min(4096)]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.question.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(e),
            }
        }
    }
}
