//! What the library reads from the environment.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Once;
use std::time::Duration;

/// Where the kernel lists RDMA devices.
const RDMA: &str = "/sys/class/infiniband";
/// How long nothing may move in a task over TCP, and how long its acknowledgement may take after the last byte, seconds.
const PROGRESS: (&str, u64) = ("MC_TCP_PROGRESS_TIMEOUT_SEC", 30);
const STATUS: (&str, u64) = ("MC_TCP_STATUS_TIMEOUT_SEC", 30);
/// The library has no more connections to one peer, whatever is set.
pub(crate) const MOST_CONNECTIONS: usize = 16;
/// What ours is above the library's.
const MARGIN: Duration = Duration::from_secs(5);

/// Set, once in the life of the process, what the library needs and the user has not set:
///
/// * `MC_FORCE_TCP=1`, only where the machine has no RDMA device. Where there is RDMA, nothing is turned off.
/// * `MC_TCP_PROGRESS_TIMEOUT_SEC=30` and `MC_TCP_STATUS_TIMEOUT_SEC=30`, its defaults: our own deadline lies above them.
/// * `MC_TCP_ENABLE_CONNECTION_POOL=1`: some builds otherwise open a connection for each task, inside the submission.
/// * `MC_LOG_LEVEL=WARNING`: its messages go to standard error.
///
/// [`MooncakeTransport::new`](crate::MooncakeTransport::new) calls it before it opens the library. A program whose other
/// threads read the environment in C code meanwhile calls it first thing in `main`, or sets the variables itself.
pub fn prepare_environment() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for (name, value) in wanted(has_rdma(Path::new(RDMA))) {
            if std::env::var_os(name).is_none() {
                // SAFETY: Rust code reads the environment under the same lock. C code on other threads may read it now;
                // this runs before the library is opened, and the function's documentation says what to do about others.
                unsafe { std::env::set_var(name, value) };
            }
        }
    });
}

fn wanted(rdma: bool) -> Vec<(&'static str, &'static str)> {
    let mut out =
        vec![(PROGRESS.0, "30"), (STATUS.0, "30"), ("MC_TCP_ENABLE_CONNECTION_POOL", "1"), ("MC_LOG_LEVEL", "WARNING")];
    if !rdma {
        out.push(("MC_FORCE_TCP", "1"));
    }
    out
}

fn has_rdma(class: &Path) -> bool {
    std::fs::read_dir(class).is_ok_and(|mut entries| entries.next().is_some())
}

/// What a task may take until the library calls it failed, and a margin.
pub(crate) fn above_the_library() -> Duration {
    let seconds = |(name, default): (&str, u64)| {
        std::env::var(name).ok().and_then(|v| v.parse().ok()).filter(|v| *v > 0).unwrap_or(default)
    };
    Duration::from_secs(seconds(PROGRESS).saturating_add(seconds(STATUS))).saturating_add(MARGIN)
}

/// How many connections the library has to one peer.
pub(crate) fn connections() -> usize {
    let set = ["MC_TCP_LANES_PER_PEER", "MC_TCP_MAX_CONNECTIONS_PER_PEER"].iter().find_map(|n| std::env::var(n).ok());
    set.and_then(|v| v.parse().ok()).filter(|n| (1..=MOST_CONNECTIONS).contains(n)).unwrap_or(4)
}

/// Whether TCP is used whatever devices there are: the variable counts by being there.
pub(crate) fn forces_tcp() -> bool {
    std::env::var_os("MC_FORCE_TCP").is_some()
}

/// What the user has set under which nothing could be proven, or no peer be looked at before the library reads it.
pub(crate) fn forbidden() -> Option<&'static str> {
    why_forbidden(|name| std::env::var_os(name))
}

fn why_forbidden(get: impl Fn(&str) -> Option<OsString>) -> Option<&'static str> {
    if get("MC_TCP_PROTO").is_some_and(|v| v == "1") {
        return Some("MC_TCP_PROTO=1 turns acknowledgements off, and nothing could be proven about writes: unset it");
    }
    if get("MC_DISABLE_METACACHE").is_some() {
        return Some(
            "MC_DISABLE_METACACHE has the library ask a peer for its descriptor inside each submission: it blocks there, \
             and an odd answer ends this process; unset it",
        );
    }
    if get("MC_TE_METADATA_REFRESH_INTERVAL_SECONDS").is_some_and(|v| v != "0") {
        return Some(
            "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS has the library take a restarted peer for the one it knew, behind our \
             back; unset it",
        );
    }
    None
}

/// Whether the user turned connection reuse off: each submission then connects first.
pub(crate) fn connects_each_time() -> bool {
    std::env::var("MC_TCP_ENABLE_CONNECTION_POOL")
        .is_ok_and(|v| matches!(v.to_ascii_lowercase().as_str(), "0" | "false" | "no"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_undo_proofs_are_named() {
        let with = |name: &'static str, value: &'static str| {
            why_forbidden(move |asked| (asked == name).then(|| value.into())).is_some_and(|why| why.contains(name))
        };
        assert!(with("MC_TCP_PROTO", "1") && !with("MC_TCP_PROTO", "2"));
        // It counts by being there.
        assert!(with("MC_DISABLE_METACACHE", "0"));
        assert!(with("MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "5"));
        assert!(!with("MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "0"));
    }

    #[test]
    fn rdma_is_never_silently_off() {
        assert!(wanted(true).iter().all(|(name, _)| *name != "MC_FORCE_TCP"));
        assert!(wanted(false).contains(&("MC_FORCE_TCP", "1")));
        let dir = std::env::temp_dir().join(format!("kv-mooncake-rdma-{}", std::process::id()));
        assert!(!has_rdma(&dir));
        std::fs::create_dir_all(dir.join("mlx5_0")).unwrap();
        assert!(has_rdma(&dir));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
