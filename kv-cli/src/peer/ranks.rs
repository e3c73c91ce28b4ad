//! `--all-ranks`: a process for each rank of a role.

use std::io::BufRead as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use super::args::CommonArgs;
use super::input::{catch_sigterm, terminated};
use crate::error::{CliError, Result};

/// Ranks of a role.
pub fn count(args: &CommonArgs) -> u64 {
    u64::from(args.tp_size) * u64::from(args.pp_size) * u64::from(args.dp_size)
}

/// Far above real fleets.
const MOST: u64 = 64;

/// Start them all, hand on what comes on standard input, and wait; the largest status.
pub fn run(args: &CommonArgs) -> Result<ExitCode> {
    if count(args) > MOST {
        return Err(CliError::new(format!("{} ranks", count(args))).hint(format!("at most {MOST}")));
    }
    let fail = |e: std::io::Error| CliError::new(format!("cannot start a rank: {e}"));
    let program = std::env::current_exe().map_err(fail)?;
    let given: Vec<String> = std::env::args().skip(1).filter(|a| a != "--all-ranks").collect();
    let mut children = Vec::new();
    for pp in 0..args.pp_size {
        for dp in 0..args.dp_size {
            for tp in 0..args.tp_size {
                let mut command = Command::new(&program);
                command.args(&given).stdin(Stdio::piped());
                for (name, rank) in [("--tp-rank", tp), ("--pp-rank", pp), ("--dp-rank", dp)] {
                    command.args([name, &rank.to_string()]);
                }
                // One of them runs the bootstrap server.
                let prefill = given.iter().any(|a| a == "prefill");
                if prefill && !children.is_empty() && !given.iter().any(|a| a == "--no-bootstrap") {
                    command.arg("--no-bootstrap");
                }
                // SAFETY: a system call that is safe between fork and exec; the child ends when we do.
                unsafe {
                    command.pre_exec(|| {
                        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                        Ok(())
                    })
                };
                children.push(command.spawn().map_err(fail)?);
            }
        }
    }
    catch_sigterm();
    let inputs: Vec<_> = children.iter_mut().filter_map(|c| c.stdin.take()).collect();
    std::thread::spawn(move || hand_on(inputs));
    wait(children).map(ExitCode::from)
}

/// Until all have ended; the largest status. SIGTERM is for all of them.
fn wait(mut children: Vec<Child>) -> Result<u8> {
    let (mut worst, mut told) = (0, false);
    while !children.is_empty() {
        let mut left = Vec::new();
        for mut child in children {
            match child.try_wait().map_err(|e| CliError::new(format!("a rank's status is lost: {e}")))? {
                Some(status) => worst = worst.max(code(status)),
                None => left.push(child),
            }
        }
        children = left;
        if terminated() && !std::mem::replace(&mut told, true) {
            for child in &children {
                // SAFETY: no pointers; it was not waited for, so the number is still its own.
                unsafe { libc::kill(child.id().cast_signed(), libc::SIGTERM) };
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(worst)
}

/// Every line to every rank; they all see the end.
fn hand_on(mut to: Vec<impl std::io::Write>) {
    for line in std::io::stdin().lock().lines().map_while(std::result::Result::ok) {
        for input in &mut to {
            let _ = writeln!(input, "{line}").and_then(|()| input.flush());
        }
    }
}

fn code(status: ExitStatus) -> u8 {
    u8::try_from(status.code().or(status.signal()).unwrap_or(1)).unwrap_or(1)
}
