//! What the library reads from the environment when it is opened.

use std::path::Path;
use std::sync::Once;

/// Where the kernel lists RDMA devices.
const RDMA: &str = "/sys/class/infiniband";

/// Set, once in the life of the process, what the library needs and the user has not set:
///
/// * `UCX_LOG_FILE=stderr`: UCX writes its messages to standard output otherwise, between the lines of programs whose
///   output is read by others.
/// * `UCX_MODULES=^ib`, only where the machine has no RDMA device: the module brings a library whose destructor was
///   seen to crash every process at its normal end (bundled libnl of the 1.5.1 wheel, exit status 139; on some machines). Where there is RDMA, nothing is
///   turned off; a program there that must end with its own status calls `_exit` after it has dropped its transports.
///
/// [`NixlTransport::new`](crate::NixlTransport::new) calls it before it opens the library. A program whose other threads
/// read the environment in C code meanwhile calls it first thing in `main`, or sets the variables itself.
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
    let mut out = vec![("UCX_LOG_FILE", "stderr")];
    if !rdma {
        out.push(("UCX_MODULES", "^ib"));
    }
    out
}

fn has_rdma(class: &Path) -> bool {
    std::fs::read_dir(class).is_ok_and(|mut entries| entries.next().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rdma_is_never_silently_off() {
        assert!(wanted(true).iter().all(|(name, _)| *name != "UCX_MODULES"));
        assert!(wanted(false).contains(&("UCX_MODULES", "^ib")));
        let dir = std::env::temp_dir().join(format!("kv-nixl-rdma-{}", std::process::id()));
        assert!(!has_rdma(&dir));
        std::fs::create_dir_all(dir.join("mlx5_0")).unwrap();
        assert!(has_rdma(&dir));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
