//! Break the connections of a transport as a network would, with both processes alive: `ss --kill`.

use std::io::Read as _;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use super::PATIENCE;

/// What `ss` says, a socket a line.
fn ss(args: &[&str]) -> Result<Vec<String>, String> {
    let out = Command::new("ss").args(args).output().map_err(|e| format!("ss (iproute2): {e}"))?;
    if !out.status.success() {
        return Err(format!("ss: {}", String::from_utf8_lossy(&out.stderr).trim()));
    }
    Ok(String::from_utf8_lossy(&out.stdout).lines().map(str::to_owned).collect())
}

/// Break what is connected to this port here; how many connections that was.
fn kill(port: u16) -> Result<usize, String> {
    Ok(ss(&["-K", "-tnH", "dport", "=", &format!(":{port}")])?.len())
}

/// Why connections cannot be broken here.
pub fn possible() -> Result<(), String> {
    let text = |e: std::io::Error| e.to_string();
    let listener = TcpListener::bind("127.0.0.1:0").map_err(text)?;
    let at = listener.local_addr().map_err(text)?;
    let client = TcpStream::connect(at).map_err(text)?;
    kill(at.port())?;
    // A broken one says so.
    match client.take_error().map_err(text)? {
        Some(_) => Ok(()),
        None => Err("ss -K breaks nothing: it needs CAP_NET_ADMIN and CONFIG_INET_DIAG_DESTROY".into()),
    }
}

/// The port that a decode's transport listens on. It listens on two, and a control socket (ZMQ) greets who connects,
/// while the transport waits to be spoken to.
pub fn transport_port(pid: u32) -> u16 {
    let own = format!("pid={pid},");
    let listening = ss(&["-tlnpH"]).unwrap();
    let ports = listening.iter().filter(|line| line.contains(&own)).map(|line| {
        let local = line.split_whitespace().nth(3).unwrap();
        local.rsplit_once(':').unwrap().1.parse().unwrap()
    });
    let ports: Vec<u16> = ports.collect();
    let [a, b] = ports[..] else { panic!("a decode has two listeners: {listening:?}") };
    let [mut first, mut second] = [a, b].map(|port| {
        let sock = TcpStream::connect(("127.0.0.1", port)).unwrap();
        sock.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        sock
    });
    let greets = |sock: &mut TcpStream| sock.read(&mut [0]).is_ok_and(|n| n == 1);
    let deadline = Instant::now() + PATIENCE;
    loop {
        if greets(&mut first) {
            return b;
        }
        if greets(&mut second) {
            return a;
        }
        assert!(Instant::now() < deadline, "no control socket among {listening:?}");
    }
}

/// Break every connection to this port.
pub fn all_to(port: u16) {
    assert!(kill(port).unwrap() > 0, "nothing is connected to port {port}");
}
