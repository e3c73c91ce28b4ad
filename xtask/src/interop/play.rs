//! Plays a case: starts its actors, does its steps, and gathers what they say.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::case::{Case, Mark, Step, Who};
use super::event::Event;
use super::launch::Launcher;
use super::options::Options;
use super::port;
use super::process::{Inbox, Process, Said};
use super::program::{Backend, Direction, Program};
use crate::sh::Result;

/// What one actor did.
#[derive(Debug)]
pub struct Acted {
    pub who: Who,
    pub program: Program,
    pub options: Options,
    /// For a person who runs it again.
    pub command: String,
    pub log: PathBuf,
    pub events: Vec<Event>,
    /// Lines of standard output that are no events.
    pub odd: Vec<String>,
    /// Exit status; a signal is negative.
    pub exit: Option<i32>,
    /// Something of its process group lived on.
    pub left: bool,
}

impl Acted {
    pub fn of(&self, kind: &str) -> impl Iterator<Item = &Event> {
        self.events.iter().filter(move |e| e.kind() == kind)
    }

    /// Whether it has come to a point.
    pub fn has(&self, mark: Mark) -> bool {
        let ranks = usize::try_from(self.options.ranks()).unwrap_or(usize::MAX);
        match mark {
            Mark::Ready => self.of("ready").count() >= ranks,
            Mark::Gate => self.of("gate").next().is_some(),
            Mark::Room(n) => self.of("room").any(|e| e.room() == Some(n)),
            Mark::Summary => self.of("summary").count() >= ranks,
        }
    }
}

/// What all did.
#[derive(Debug)]
pub struct Played {
    pub actors: Vec<Acted>,
    /// What the runner waited for when time was up.
    pub stuck: Option<String>,
    pub took: Duration,
}

/// What comes with every case of a run.
pub struct Stage<'a> {
    pub launcher: &'a Launcher,
    pub backend: Backend,
    /// Folder for what the actors send and receive.
    pub captures: Option<PathBuf>,
}

/// Play a case in a direction.
pub fn play(stage: &Stage<'_>, case: &Case, direction: Direction) -> Result<Played> {
    let (outbox, inbox) = channel();
    let start = Instant::now();
    let mut player = Player {
        stage,
        case,
        direction,
        port: port::free(host(case)?)?,
        outbox,
        inbox,
        actors: Vec::new(),
        until: start + Duration::from_secs(case.within),
    };
    let mut stuck = None;
    for step in case.steps() {
        if let Err(what) = player.step(step) {
            stuck = Some(what);
            break;
        }
    }
    let actors = player.end();
    Ok(Played { actors, stuck, took: start.elapsed() })
}

struct Player<'a> {
    stage: &'a Stage<'a>,
    case: &'a Case,
    direction: Direction,
    port: u16,
    outbox: Inbox,
    inbox: Receiver<(usize, Said)>,
    actors: Vec<(Acted, Box<dyn Process>)>,
    until: Instant,
}

impl Player<'_> {
    fn step(&mut self, step: Step) -> Result<()> {
        match step {
            Step::Start(who) => self.start(who)?,
            Step::Seen(who, mark) => {
                let index = self.index(who)?;
                let what = format!("{} to say {mark:?}", who.name());
                self.wait(&what, |a| a[index].0.has(mark) || a[index].0.exit.is_some())?;
                if mark == Mark::Ready && !self.actors[index].0.has(mark) {
                    return Err(format!("{} ended before it was ready", who.name()));
                }
            }
            Step::Ended(who) => {
                let index = self.index(who)?;
                self.wait(&format!("{} to end", who.name()), |a| a[index].0.exit.is_some())?;
            }
            Step::Pause(seconds) => self.gather(Instant::now() + Duration::from_secs_f64(seconds)),
            Step::Kill(who) => self.tell(who, |p| p.signal(Signal::KILL))?,
            Step::Stop(who) => self.tell(who, |p| p.signal(Signal::STOP))?,
            Step::Continue(who) => self.tell(who, |p| p.signal(Signal::CONT))?,
            Step::Open(who) => self.tell(who, |p| p.line("go"))?,
            Step::Close(who) => self.tell(who, |p| p.close())?,
        }
        Ok(())
    }

    fn start(&mut self, who: Who) -> Result<()> {
        let program = self.case.program(who, self.direction);
        let mut options = self.case.options_in(who, self.direction);
        options.set("--backend", Some(self.stage.backend.name()));
        options.set("--bootstrap-port", Some(&self.port.to_string()));
        // Names of files too.
        let direction = self.direction.to_string().replace('>', "-");
        let id = format!("{}.{}.{direction}.{}", self.case.name, self.stage.backend.name(), who.name());
        let launcher = self.stage.launcher;
        if let Some(folder) = self.captures().filter(|_| who != Who::Registry) {
            let file = folder.join(format!("{id}.jsonl"));
            // Peers append.
            let _ = std::fs::remove_file(&file);
            options.set("--capture", Some(&file.to_string_lossy()));
        }
        let process = launcher.start(program, who.role(), &options, &id, (self.actors.len(), self.outbox.clone()))?;
        let acted = Acted {
            who,
            program,
            command: launcher.by_hand(program, who.role(), &options),
            options,
            log: launcher.log(&id),
            events: Vec::new(),
            odd: Vec::new(),
            exit: None,
            left: false,
        };
        self.actors.push((acted, process));
        Ok(())
    }

    /// Where messages are recorded: when asked for, and for checks that read them.
    fn captures(&self) -> Option<&Path> {
        let checked = !self.case.checks.is_empty();
        self.stage.captures.as_deref().or_else(|| checked.then_some(self.stage.launcher.logs.as_path()))
    }

    fn index(&self, who: Who) -> Result<usize> {
        let found = self.actors.iter().position(|(a, _)| a.who == who);
        found.ok_or_else(|| format!("the case's script names {} before it is started", who.name()))
    }

    /// Do something to an actor, unless it has gone.
    fn tell(&self, who: Who, what: impl Fn(&dyn Process)) -> Result<()> {
        let (acted, process) = &self.actors[self.index(who)?];
        if acted.exit.is_none() {
            what(&**process);
        }
        Ok(())
    }

    /// Gather until something is so.
    fn wait(&mut self, what: &str, done: impl Fn(&[(Acted, Box<dyn Process>)]) -> bool) -> Result<()> {
        while !done(&self.actors) {
            if !self.take(self.until) {
                return Err(format!("after {} s still waiting for {what}", self.case.within));
            }
        }
        Ok(())
    }

    fn gather(&mut self, until: Instant) {
        while self.take(until) {}
    }

    /// Take what comes next; `false`: nothing came in time.
    fn take(&mut self, until: Instant) -> bool {
        let (index, said) = match self.inbox.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(said) => said,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return false,
        };
        if let Some((acted, _)) = self.actors.get_mut(index) {
            match said {
                Said::Exit(code) => acted.exit = Some(code),
                Said::Line(line) => match Event::parse(&line) {
                    Some(event) => acted.events.push(event),
                    None => acted.odd.push(line),
                },
            }
        }
        true
    }

    /// Everybody goes; nobody stays behind.
    fn end(mut self) -> Vec<Acted> {
        for (acted, process) in &self.actors {
            if acted.exit.is_none() {
                process.signal(Signal::KILL);
            }
        }
        let until = Instant::now() + Duration::from_secs(10);
        while self.actors.iter().any(|(a, _)| a.exit.is_none()) && self.take(until) {}
        // Children of a process that ended need a moment to be gone.
        let until = Instant::now() + Duration::from_secs(2);
        while self.actors.iter().any(|(_, p)| p.left()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        for (acted, process) in &mut self.actors {
            acted.left = process.left();
            if acted.left {
                process.signal(Signal::KILL);
            }
        }
        self.actors.into_iter().map(|(a, _)| a).collect()
    }
}

/// The address of the case's bootstrap server.
pub fn host(case: &Case) -> Result<IpAddr> {
    match case.options(Who::Prefill).get("--bootstrap-host") {
        Some(text) => text.parse().map_err(|e| format!("{text}: {e}")),
        None => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
    }
}
